//! Plugins that are shell commands, run in real time.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::FutureExt as _;
use serde_json::Value;
use serde_json::json;

use super::super::Credentials;
use super::super::testing;
use super::*;
use crate::apiserver::recovery::Recovered;
use crate::images::access::AccountUse;
use crate::model::Clock;
use crate::objects::ObjectsConfig;
use crate::objects::Strategy;
use crate::objects::tests::api::Api;

const V1: &str = "credentialprovider.kubelet.k8s.io/v1";
/// Notes the request, then answers with the content of a file in which `TOKEN` is the token of the request.
const SCRIPT: &str = r#"request=$(cat); echo "$request" >> "$LOG"
token=$(printf %s "$request" | sed -n 's/.*"serviceAccountToken":"\([^"]*\)".*/\1/p'); sed "s/TOKEN/$token/" "$ANSWER""#;

struct Fixture {
    dir: tempfile::TempDir,
    metrics: Arc<Metrics>,
    api: Api,
    providers: Providers,
}

impl Fixture {
    /// With one plugin for `*.io`, whose configuration has these fields too.
    fn new(changes: Value) -> Self {
        Self::with(&[("p", changes)])
    }

    /// With several such plugins.
    fn with(plugins: &[(&str, Value)]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("bin")).expect("made");
        let provider = |(name, changes): &(&str, Value)| {
            symlink("/bin/sh", path("bin").join(name)).expect("linked");
            let mut provider = json!({"name": name, "apiVersion": V1, "matchImages": ["*.io"], "defaultCacheDuration": "10m",
                "args": ["-c", SCRIPT], "env": [{"name": "LOG", "value": path("log")}, {"name": "ANSWER", "value": path("answer")}]});
            provider.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
            provider
        };
        let providers: Vec<Value> = plugins.iter().map(provider).collect();
        let config = json!({"kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1", "providers": providers});
        fs::write(path("config"), config.to_string()).expect("written");
        let clock = Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let (api, metrics) = (Api::new(clock), Metrics::new());
        let (strategy, recovered) = (Strategy::Get, Recovered::default());
        let config = ObjectsConfig { strategy, recovered, sync_frequency: Duration::from_secs(60), clock, node: None };
        let objects = Objects::new(&api.client(), config);
        let providers = Providers::read(&path("config"), &path("bin"), true, objects, metrics.clone()).expect("valid");
        Self { dir, metrics, api, providers }
    }

    fn answers(&self, changes: Value) {
        let mut answer = json!({"kind": "CredentialProviderResponse", "apiVersion": V1, "cacheKeyType": "Image",
            "auth": {"a.io": {"username": "u", "password": "TOKEN"}}});
        answer.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        fs::write(self.dir.path().join("answer"), answer.to_string()).expect("written");
    }

    /// The requests so far.
    fn requests(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    async fn found(&self, image: &str, account: &str) -> Vec<(String, CredentialSource)> {
        let pod = json!({"metadata": {"name": "pod", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [], "serviceAccountName": account}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let found = self.providers.matching(image, &pod).await;
        found.iter().map(|one| (one.login.password.expose_secret().to_owned(), one.source.clone())).collect()
    }

    fn account(&self, uid: &str, annotations: Value) {
        let account = json!({"metadata": {"name": "sa", "uid": uid, "annotations": annotations}});
        self.api.put("serviceaccounts/ns/sa", account);
    }

    fn errors(&self) -> bool {
        let line = "kubelet_credential_provider_plugin_errors_total{plugin_name=\"p\"} 1";
        self.metrics.render().expect("metrics").contains(line)
    }
}

#[tokio::test]
async fn responses_are_cached_by_registry() {
    for (duration, runs) in [("10m", 1), ("0s", 2)] {
        let fixture = Fixture::new(json!({}));
        let auth = json!({"a.io": {"username": "u", "password": "p"}});
        fixture.answers(json!({"cacheKeyType": "Registry", "cacheDuration": duration, "auth": auth}));
        assert_eq!(fixture.found("a.io/x", "").await, [("p".to_owned(), CredentialSource::Node)]);
        assert_eq!(fixture.found("a.io/y", "").await.len(), 1);
        assert_eq!(fixture.requests().len(), runs, "{duration}");
        assert!(
            fixture.found("b.com/x", "").await.is_empty() && fixture.requests().len() == runs,
            "no pattern matches"
        );
    }
}

#[tokio::test]
async fn a_failing_plugin_gives_nothing() {
    let fixture = Fixture::new(json!({}));
    fixture.answers(json!({"apiVersion": "credentialprovider.kubelet.k8s.io/v1beta1"}));
    assert!(fixture.found("a.io/x", "").await.is_empty());
    assert!(!fixture.errors(), "the program worked");
    let fixture = Fixture::new(json!({"args": ["-c", "echo broken >&2; exit 1"]}));
    assert!(fixture.found("a.io/x", "").await.is_empty());
    assert!(fixture.errors());
    let fixture = Fixture::new(json!({"args": ["-c", "yes | head -c 2000000"]}));
    assert!(fixture.found("a.io/x", "").await.is_empty());
    assert!(fixture.errors(), "output without end");
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_does_not_end_is_given_up_after_a_minute() {
    let fixture = Fixture::new(json!({"args": ["-c", "exec sleep 600"]}));
    let began = Instant::now();
    assert!(fixture.found("a.io/x", "").await.is_empty());
    assert_eq!(began.elapsed().as_secs(), 60);
    assert!(fixture.errors());
}

#[tokio::test]
async fn entries_of_all_plugins_with_a_pattern_for_the_image_are_one_keyring() {
    let saying = |auth: Value| {
        let answer =
            json!({"kind": "CredentialProviderResponse", "apiVersion": V1, "cacheKeyType": "Image", "auth": auth});
        json!({"args": ["-c", format!("echo '{answer}'")]})
    };
    let login = |password: &str| json!({"username": "u", "password": password});
    let mut other = saying(json!({"a.io": login("other")}));
    other["matchImages"] = json!(["b.io"]);
    let fixture = Fixture::with(&[
        ("first", saying(json!({"*.io": login("first *"), "a.io": login("first")}))),
        ("broken", json!({"args": ["-c", "exit 1"]})),
        ("other", other),
        ("second", saying(json!({"a.io": login("second"), "a.io/x": login("second path")}))),
    ]);
    let found: Vec<String> = fixture.found("a.io/x", "").await.into_iter().map(|(password, _)| password).collect();
    assert_eq!(found, ["second path", "first", "second", "first *"], "the longest first, then in order of the plugins");
}

#[tokio::test]
async fn pull_secrets_precede_files_and_files_precede_plugins() {
    let login = |user: &str| json!({"a.io": {"username": user, "password": "p"}});
    let fixture = Fixture::new(json!({}));
    fixture.answers(json!({"auth": login("plugin")}));
    let Fixture { dir, providers, .. } = fixture;
    fs::write(dir.path().join("config.json"), json!({"auths": login("file")}).to_string()).expect("written");
    let secrets = [testing::secret("s", &json!({"auths": login("secret")}))];
    let credentials = Credentials::none().with_node_files(dir.path()).with_providers(providers);
    let found = credentials.matching("a.io/x:1", &Pod::default(), &secrets).await.expect("valid");
    let users: Vec<&str> = found.iter().map(|one| one.login.username.as_str()).collect();
    assert_eq!(users, ["secret", "file", "plugin"]);
}

#[tokio::test]
async fn concurrent_requests_for_an_image_share_a_run() {
    let fixture = Fixture::new(json!({}));
    fixture.answers(json!({"cacheDuration": "0s", "auth": {"a.io": {"username": "u", "password": "p"}}}));
    let (one, other) = tokio::join!(fixture.found("a.io/x", ""), fixture.found("a.io/x", ""));
    assert_eq!(one, [("p".to_owned(), CredentialSource::Node)]);
    assert_eq!((one, fixture.requests().len()), (other, 1));
    fixture.found("a.io/x", "").await;
    assert_eq!(fixture.requests().len(), 2, "not cached");
    let expected = json!({"kind": "CredentialProviderRequest", "apiVersion": V1, "image": "a.io/x"});
    assert_eq!(fixture.requests()[0], expected);
}

#[tokio::test]
async fn a_caller_that_is_dropped_leaves_the_others_their_response() {
    let fixture = Fixture::new(json!({}));
    fixture.answers(json!({"auth": {"a.io": {"username": "u", "password": "p"}}}));
    let [mut runs, mut waits] = ["a.io/x"; 2].map(|image| Box::pin(fixture.found(image, "")));
    assert!(runs.as_mut().now_or_never().is_none() && waits.as_mut().now_or_never().is_none());
    fixture.found("a.io/other", "").await;
    assert_eq!(lock(&fixture.providers.all[0].running).len(), 1, "callers wait for it");
    drop(runs);
    assert_eq!(waits.await, [("p".to_owned(), CredentialSource::Node)]);
    assert!(lock(&fixture.providers.all[0].running).is_empty());
}

#[tokio::test]
async fn a_run_whose_callers_were_dropped_is_not_kept() {
    let fixture = Fixture::new(json!({"args": ["-c", "exec sleep 600"]}));
    for image in ["a.io/x", "a.io/y", "a.io/z"] {
        assert!(fixture.found(image, "").now_or_never().is_none(), "it does not end");
    }
    assert_eq!(lock(&fixture.providers.all[0].running).len(), 1, "until the next one begins");
}

fn attributes(changes: Value) -> Value {
    let mut all =
        json!({"serviceAccountTokenAudience": "registry", "cacheType": "Token", "requireServiceAccount": true});
    all.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
    json!({"tokenAttributes": all})
}

fn source(uid: &str) -> CredentialSource {
    let [uid, namespace, name] = [uid, "ns", "sa"].map(str::to_owned);
    CredentialSource::ServiceAccount(AccountUse { uid, namespace, name })
}

#[tokio::test]
async fn plugins_get_a_token_of_the_service_account() {
    let fixture = Fixture::new(attributes(json!({"optionalServiceAccountAnnotationKeys": ["example.com/role"]})));
    fixture.answers(json!({}));
    fixture.account("first", json!({"example.com/role": "reader", "other": "x"}));
    assert_eq!(fixture.found("a.io/x", "sa").await, [("token-1".to_owned(), source("first"))]);
    let request = fixture.requests().remove(0);
    assert_eq!(request["serviceAccountToken"], "token-1");
    assert_eq!(request["serviceAccountAnnotations"], json!({"example.com/role": "reader"}));
    let asked = fixture.api.state().last_token.clone();
    assert_eq!(asked["spec"]["audiences"], json!(["registry"]));
    assert_eq!((&asked["metadata"]["uid"], &asked["spec"]["boundObjectRef"]["uid"]), (&json!("first"), &json!("u")));
    fixture.found("a.io/x", "sa").await;
    assert_eq!(fixture.requests().len(), 1, "cached");
    fixture.account("second", json!({}));
    assert_eq!(fixture.found("a.io/x", "sa").await, [("token-2".to_owned(), source("second"))]);
}

#[tokio::test]
async fn a_token_is_no_credential_of_a_service_account() {
    let fixture = Fixture::new(attributes(json!({"cacheType": "ServiceAccount"})));
    fixture.answers(json!({}));
    fixture.account("first", json!({}));
    assert!(fixture.found("a.io/x", "sa").await.is_empty());
    fixture.answers(json!({"auth": {"a.io": {"username": "u", "password": "issued"}}}));
    assert_eq!(fixture.found("a.io/x", "sa").await, [("issued".to_owned(), source("first"))]);
}

#[tokio::test]
async fn responses_for_a_service_account_are_cached_by_what_the_plugin_gets_of_it() {
    let keys = json!({"cacheType": "ServiceAccount", "requiredServiceAccountAnnotationKeys": ["needed"],
        "optionalServiceAccountAnnotationKeys": ["wanted"]});
    let fixture = Fixture::new(attributes(keys));
    fixture.answers(json!({"auth": {"a.io": {"username": "u", "password": "p"}}}));
    for (uid, annotations, runs) in [
        ("first", json!({"needed": "1"}), 1),
        ("first", json!({"needed": "1"}), 1),
        ("first", json!({"needed": "1", "other": "x"}), 1),
        ("first", json!({"needed": "1", "wanted": "x"}), 2),
        ("first", json!({"needed": "2"}), 3),
        ("first", json!({"needed": "1"}), 3),
        ("second", json!({"needed": "1"}), 4),
    ] {
        fixture.account(uid, annotations.clone());
        assert_eq!(fixture.found("a.io/x", "sa").await, [("p".to_owned(), source(uid))]);
        assert_eq!(fixture.requests().len(), runs, "{uid} {annotations}");
    }
}

#[tokio::test]
async fn pods_without_what_a_plugin_requires() {
    let required = json!({"requiredServiceAccountAnnotationKeys": ["example.com/role"]});
    let fixture = Fixture::new(attributes(required));
    fixture.answers(json!({"auth": {"a.io": {"username": "u", "password": "p"}}}));
    assert!(fixture.found("a.io/x", "").await.is_empty(), "no service account");
    assert!(fixture.found("a.io/x", "sa").await.is_empty(), "none of this name");
    fixture.account("first", json!({}));
    assert!(fixture.found("a.io/x", "sa").await.is_empty(), "no annotation");
    assert!(fixture.requests().is_empty());
    fixture.account("first", json!({"example.com/role": ""}));
    assert_eq!(fixture.found("a.io/x", "sa").await.len(), 1);
    let fixture = Fixture::new(attributes(json!({"requireServiceAccount": false})));
    fixture.answers(json!({"auth": {"a.io": {"username": "u", "password": "p"}}}));
    assert_eq!(fixture.found("a.io/x", "").await, [("p".to_owned(), CredentialSource::Node)]);
}
