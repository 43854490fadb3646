use axum::http::header;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use k8s_openapi::api::authentication::v1::UserInfo;

use super::super::testing::Authority;
use super::super::testing::Script;
use super::*;

/// Accepts the token "good".
fn script() -> Arc<Script> {
    Script::tokens(|token| {
        let user = UserInfo {
            username: Some("ann".to_owned()),
            groups: Some(vec!["admins".to_owned()]),
            ..UserInfo::default()
        };
        Ok(TokenReviewStatus { authenticated: Some(token == "good"), user: Some(user), ..Default::default() })
    })
}

struct Fixture {
    authority: Authority,
    authenticator: Authenticator,
    _folder: tempfile::TempDir,
}

fn fixture(anonymous: bool) -> Fixture {
    let folder = tempfile::tempdir().expect("a folder");
    let (authority, path) = (Authority::new("ours"), folder.path().join("ca.crt"));
    std::fs::write(&path, authority.pem()).expect("written");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let authenticator = Authenticator {
        client_ca: Some(Arc::new(ClientCa::load(&path, provider).expect("usable"))),
        tokens: Some(Tokens::new(script(), std::time::Duration::from_secs(120), Metrics::new()).expect("random bytes")),
        anonymous,
        metrics: Metrics::new(),
        uid_from_certificate: true,
    };
    Fixture { authority, authenticator, _folder: folder }
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| ((*name).parse().expect("a name"), value.parse().expect("a value"))).collect()
}

fn bearer_header(token: &str) -> HeaderMap {
    headers(&[("authorization", &format!("Bearer {token}"))])
}

impl Fixture {
    async fn ask(&self, chain: &[CertificateDer<'static>], headers: &mut HeaderMap) -> Result<User, Unauthenticated> {
        self.authenticator.authenticate(None, chain, headers).await
    }

    async fn name(&self, chain: &[CertificateDer<'static>], mut headers: HeaderMap) -> Option<String> {
        self.ask(chain, &mut headers).await.ok().map(|user| user.name)
    }
}

#[tokio::test]
async fn each_way_in() {
    let fixture = fixture(false);
    let chain = fixture.authority.client("bob", &["ops"]).chain;
    let user = fixture.ask(&chain, &mut HeaderMap::new()).await.expect("a user");
    assert_eq!((user.name.as_str(), user.groups.join(" ").as_str()), ("bob", "ops system:authenticated"));

    let mut token = bearer_header("good");
    let user = fixture.ask(&[], &mut token).await.expect("a user");
    assert_eq!((user.name.as_str(), user.groups.join(" ").as_str()), ("ann", "admins system:authenticated"));
    assert!(!token.contains_key(header::AUTHORIZATION), "the credential goes no further");

    let encoded =
        format!("v4.channel.k8s.io, base64url.bearer.authorization.k8s.io.{}", URL_SAFE_NO_PAD.encode("good"));
    let mut socket =
        headers(&[("upgrade", "websocket"), ("connection", "Upgrade"), ("sec-websocket-protocol", &encoded)]);
    assert_eq!(fixture.ask(&[], &mut socket).await.expect("a user").name, "ann");
    assert_eq!(socket[header::SEC_WEBSOCKET_PROTOCOL], "v4.channel.k8s.io");
}

#[tokio::test]
async fn the_first_authenticator_with_a_user_wins() {
    let fixture = fixture(false);
    let (ours, theirs) =
        (fixture.authority.client("bob", &[]).chain, Authority::new("theirs").client("eve", &[]).chain);
    assert_eq!(fixture.name(&ours, bearer_header("good")).await.as_deref(), Some("bob"));
    assert_eq!(fixture.name(&ours, bearer_header("bad")).await.as_deref(), Some("bob"));
    assert_eq!(fixture.name(&theirs, bearer_header("good")).await.as_deref(), Some("ann"));
    let nameless = fixture.authority.client("", &["system:masters"]).chain;
    assert_eq!(fixture.name(&nameless, bearer_header("good")).await.as_deref(), Some("ann"));
}

#[tokio::test]
async fn no_user_without_credentials_unless_anonymous_is_allowed() {
    let strict = fixture(false);
    assert_eq!(strict.ask(&[], &mut HeaderMap::new()).await, Err(Unauthenticated::Rejected(Vec::new())));
    let open = fixture(true);
    let user = open.ask(&[], &mut HeaderMap::new()).await.expect("anonymous");
    assert_eq!((user.name.as_str(), user.groups.join(" ").as_str()), ("system:anonymous", "system:unauthenticated"));
    let nameless = open.authority.client("", &["system:masters"]).chain;
    assert_eq!(open.name(&nameless, HeaderMap::new()).await.as_deref(), Some("system:anonymous"));
    assert_eq!(open.name(&[], headers(&[("authorization", "Basic x")])).await.as_deref(), Some("system:anonymous"));
}

#[tokio::test]
async fn refused_credentials_do_not_become_anonymous() {
    let open = fixture(true);
    let theirs = Authority::new("theirs").client("eve", &[]).chain;
    for (chain, headers) in [
        (&[][..], bearer_header("bad")),
        (&theirs[..], HeaderMap::new()),
        (&open.authority.expired("bob").chain[..], HeaderMap::new()),
    ] {
        let refused = open.ask(chain, &mut headers.clone()).await.expect_err("refused");
        assert!(matches!(&refused, Unauthenticated::Rejected(errors) if errors.len() == 1), "{refused:?}");
    }
}

#[tokio::test]
async fn without_a_webhook_tokens_are_ignored() {
    let mut fixture = fixture(true);
    fixture.authenticator.tokens = None;
    assert_eq!(fixture.name(&[], bearer_header("bad")).await.as_deref(), Some("system:anonymous"));
}

#[tokio::test]
async fn remaining_validity_of_certificates_is_measured() {
    let fixture = fixture(false);
    let text = || fixture.authenticator.metrics.render().expect("metrics");
    assert!(text().contains("apiserver_client_certificate_expiration_seconds_count 0\n"));
    let expired = fixture.authority.expired("late").chain;
    assert_eq!(fixture.name(&expired, headers(&[])).await, None);
    assert!(text().contains("apiserver_client_certificate_expiration_seconds_bucket{le=\"0\"} 1\n"), "{}", text());
    let good = fixture.authority.client("ann", &[]).chain;
    assert_eq!(fixture.name(&good, headers(&[])).await.as_deref(), Some("ann"));
    assert!(text().contains("apiserver_client_certificate_expiration_seconds_bucket{le=\"0\"} 1\n"), "{}", text());
    assert!(text().contains("apiserver_client_certificate_expiration_seconds_count 2\n"), "{}", text());
}
