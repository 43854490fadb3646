//! TLS bootstrap: the first client certificate of a node, requested with the credentials of a bootstrap kubeconfig.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Request;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::Api;
use kube::api::PostParams;
use rcgen::KeyPair;
use rcgen::PublicKeyData as _;
use secrecy::ExposeSecret as _;
use secrecy::SecretString;
use sha2::Digest as _;
use sha2::Sha512_256;
use x509_parser::prelude::FromDer as _;
use x509_parser::prelude::X509CertificationRequest;

use super::kubeconfig;
use super::pair::Pair;
use super::request;
use super::request::RequestError;
use super::store;
use super::store::Store;
use super::store::StoreError;
use super::template::Template;
use crate::apiserver::kubeconfig::Access;
use crate::apiserver::kubeconfig::KubeconfigError;
use crate::apiserver::kubeconfig::load;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::tls::PairError;

/// How long the request may wait until a certificate is issued.
const TIMEOUT: Duration = Duration::from_secs(3600);
/// How long an unhealthy server is waited for before the request is sent anyway.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);
/// Period of health checks.
const SERVER_PERIOD: Duration = Duration::from_secs(2);

/// Why there is no first certificate.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// A file cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The bootstrap kubeconfig cannot be used.
    #[error("unable to load bootstrap kubeconfig: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    /// The request failed.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A request of this name exists and is not ours.
    #[error("CertificateSigningRequest {name} already exists, but {why}")]
    Foreign {
        /// Its name.
        name: String,
        /// How it differs.
        why: &'static str,
    },
    /// A key cannot be made or used.
    #[error("key {}: {source}", path.display())]
    Key {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        source: rcgen::Error,
    },
    /// The issued certificate does not match the key.
    #[error("the issued certificate is unusable: {0}")]
    Certificate(#[from] PairError),
    /// Work on files panicked.
    #[error("reading or writing files of the first certificate: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// Which credentials are used first.
#[derive(Debug)]
pub enum FirstAccess {
    /// Those of the kubeconfig: it is usable, or there is no other one.
    Kubeconfig,
    /// Those of the bootstrap kubeconfig, until there is a client certificate.
    Bootstrap(Box<Access>),
}

/// Chooses the credentials. Without a bootstrap kubeconfig the kubeconfig is not read. Blocks.
///
/// # Errors
/// The kubeconfig cannot be accessed; the bootstrap kubeconfig is needed and cannot be used.
pub fn first_access(file: &Path, bootstrap: Option<&Path>, now: SystemTime) -> Result<FirstAccess, BootstrapError> {
    match bootstrap {
        None => Ok(FirstAccess::Kubeconfig),
        Some(_) if kubeconfig::usable(file, now)? => Ok(FirstAccess::Kubeconfig),
        Some(bootstrap) => Ok(FirstAccess::Bootstrap(Box::new(load(bootstrap)?))),
    }
}

/// Requests the client certificate of `node_name` with `client`, waits up to an hour for it, and writes it to `store`.
/// When this is cancelled and called again, the same key and therefore the same request are used.
///
/// # Errors
/// The step that failed. The key is kept.
pub async fn bootstrap(
    client: &kube::Client,
    node_name: &str,
    store: &Store,
    cert_dir: &Path,
    now: SystemTime,
) -> Result<(), BootstrapError> {
    let kept = cert_dir.join("kubelet-client.key.tmp");
    let FirstKey { key, text: key_text } = stored_key(store.clone(), kept.clone()).await?;
    let template = Template::client(node_name);
    let text = template.request(&key).map_err(RequestError::Make)?;
    let name = request_name(&key, &template);
    until_server_answers(client).await;
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let wanted = request::object(template.purpose, &key, &text, Some(&name));
    let request = match requests.create(&PostParams::default(), &wanted).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            let present = requests.get(&name).await.map_err(RequestError::Create)?;
            if let Some(why) = foreign(&present, &wanted, now) {
                return Err(BootstrapError::Foreign { name, why });
            }
            present
        }
        answer => answer.map_err(RequestError::Create)?,
    };
    tracing::info!(csr = name, "first client certificate requested");
    // Nothing else is sent before there is a certificate: no other request would detect that the server has recovered.
    let chain = request::signed(&requests, &request, Recovered::default(), TIMEOUT).await?;
    let (pair, store) = (Pair::parse(&chain, key_text.expose_secret())?, store.clone());
    tokio::task::spawn_blocking(move || finish(&store, &pair, &kept, now)).await?
}

/// [`first_key`] on a thread that may block.
async fn stored_key(store: Store, kept: PathBuf) -> Result<FirstKey, BootstrapError> {
    tokio::task::spawn_blocking(move || first_key(&store, &kept)).await?
}

/// Stores the pair and removes the key that was kept for it. Blocks.
fn finish(store: &Store, pair: &Pair, kept: &Path, now: SystemTime) -> Result<(), BootstrapError> {
    store.replace(pair, now)?;
    if let Err(error) = fs::remove_file(kept)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(file = %kept.display(), "cannot remove the key kept until success: {error}");
    }
    Ok(())
}

/// A key with its PEM text. A key that a kubelet has written is encoded as `EC PRIVATE KEY`; serialized from [`KeyPair`] it
/// would have the same content under another name, and could not be read.
struct FirstKey {
    key: KeyPair,
    text: SecretString,
}

impl FirstKey {
    fn parse(text: SecretString) -> Option<Self> {
        let key = KeyPair::from_pem(text.expose_secret()).ok()?;
        Some(Self { key, text })
    }
}

/// The key of an existing pair, or the one kept from a previous attempt, or a new one, which is kept. Blocks.
fn first_key(store: &Store, kept: &Path) -> Result<FirstKey, BootstrapError> {
    if let Ok(Some(pair)) = store.load()
        && let Some(first) = FirstKey::parse(pair.key)
    {
        return Ok(first);
    }
    match store::text(kept) {
        Ok(text) => {
            if let Some(first) = FirstKey::parse(text.into()) {
                return Ok(first);
            }
            // A kubelet that loses power leaves a part of it, and would not start again.
            let file = kept.display();
            tracing::warn!(%file, "the key that was kept for the first certificate is unusable; replacing it");
        }
        Err(StoreError::File { source, .. }) if source.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let key = KeyPair::generate().map_err(|source| BootstrapError::Key { path: kept.to_owned(), source })?;
    if let Some(folder) = kept.parent() {
        let made = fs::create_dir_all(folder);
        made.map_err(|source| StoreError::File { verb: "create", path: folder.to_owned(), source })?;
    }
    let text = key.serialize_pem();
    store::write_private(kept, &text)?;
    Ok(FirstKey { key, text: text.into() })
}

/// A name derived from key and subject, so that no second request is made for them.
fn request_name(key: &KeyPair, template: &Template) -> String {
    let mut digest = Sha512_256::new();
    let fields = [
        vec![key.subject_public_key_info(), template.common_name.clone().into_bytes(), b"system:nodes".to_vec()],
        template.purpose.usages(key).into_iter().map(String::into_bytes).collect(),
    ];
    for field in fields.concat() {
        digest.update(URL_SAFE_NO_PAD.encode(field));
        digest.update(b"|");
    }
    format!("node-csr-{}", URL_SAFE_NO_PAD.encode(digest.finalize()))
}

/// Why an existing request cannot be reused.
fn foreign(
    present: &CertificateSigningRequest,
    wanted: &CertificateSigningRequest,
    now: SystemTime,
) -> Option<&'static str> {
    if present.spec.signer_name != wanted.spec.signer_name {
        return Some("it is for another signer");
    }
    let identity = |request: &CertificateSigningRequest| {
        let (_, pem) = x509_parser::pem::parse_x509_pem(&request.spec.request.0).ok()?;
        let (_, parsed) = X509CertificationRequest::from_der(&pem.contents).ok()?;
        let info = parsed.certification_request_info;
        Some((info.subject.to_string(), info.subject_pki.raw.to_vec()))
    };
    match (identity(present), identity(wanted)) {
        (Some((subject, _)), Some((ours, _))) if subject != ours => return Some("it is for another subject"),
        (Some((_, key)), Some((_, ours))) if key != ours => return Some("it is for another key"),
        (Some(_), Some(_)) => {}
        _ => return Some("its request cannot be parsed"),
    }
    let issued = present.status.as_ref().and_then(|status| status.certificate.as_ref());
    let issued = issued.filter(|certificate| !certificate.0.is_empty())?;
    let expired = || {
        let (_, pem) = x509_parser::pem::parse_x509_pem(&issued.0).ok()?;
        let until = pem.parse_x509().ok()?.validity().not_after.timestamp();
        Some(SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(until).unwrap_or(0)) <= now)
    };
    (expired() != Some(false)).then_some("its certificate has expired")
}

async fn until_server_answers(client: &kube::Client) {
    let asking = async {
        loop {
            let request = Request::get("/healthz").body(Vec::new());
            let Ok(request) = request else { return };
            let answer = tokio::time::timeout(Duration::from_secs(1), client.request_text(request)).await;
            if matches!(answer, Ok(Ok(_))) {
                return;
            }
            tokio::time::sleep(SERVER_PERIOD.mul_f64(1.0 + 0.2 * fastrand::f64())).await;
        }
    };
    if tokio::time::timeout(SERVER_TIMEOUT, asking).await.is_err() {
        tracing::warn!("the API server is not healthy after {SERVER_TIMEOUT:?}; requesting a certificate anyway");
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering;

    use base64::engine::general_purpose::STANDARD;
    use http::Method;
    use http::Response;
    use kube::client::Body;
    use serde_json::Value;
    use serde_json::json;

    use super::super::template::Purpose;
    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    #[test]
    fn the_name_is_derived_from_key_and_node() {
        let (key, other) = (KeyPair::generate().expect("a key"), KeyPair::generate().expect("a key"));
        let template = Template::client("n");
        let name = request_name(&key, &template);
        assert_eq!(name, request_name(&key, &template));
        assert_ne!(name, request_name(&other, &template));
        assert_ne!(name, request_name(&key, &Template::client("m")));
        // SHA-512/256 is 32 bytes: 43 characters without padding.
        assert_eq!(name.len(), "node-csr-".len() + 43);
    }

    #[test]
    fn a_key_is_kept_until_success() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new(folder.path(), Purpose::Client, None);
        let kept = folder.path().join("kubelet-client.key.tmp");
        let text = || first_key(&store, &kept).expect("a key").text.expose_secret().to_owned();
        let first = text();
        assert_eq!(text(), first);
        std::fs::write(&kept, "nonsense").expect("written");
        assert_ne!(text(), first);
        let pair = super::super::testing::pair("system:node:n", 0, 100);
        store.replace(&pair, SystemTime::UNIX_EPOCH).expect("written");
        assert_eq!(text(), pair.key.expose_secret());
    }

    /// Made for this test, in the encoding of Go's `x509.MarshalECPrivateKey`.
    const KEY_OF_A_KUBELET: &str = "\
        -----BEGIN EC PRIVATE KEY-----\n\
        MHcCAQEEIGRkkV0JEw6wIaEtAcfZV2ghqZuY7dRjTNkvzERYKAFGoAoGCCqGSM49\n\
        AwEHoUQDQgAEUsJCknXZ9gHeYh54hmN2M09Edppw8EVMEDrlIf1xcZxXdG+mggXw\n\
        coN/r3OD9ByVsL7lnGZ7o3vzahbRvtomGA==\n\
        -----END EC PRIVATE KEY-----\n";

    #[test]
    fn a_key_that_a_kubelet_has_kept_keeps_its_request_and_fits_the_certificate() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new(folder.path(), Purpose::Client, None);
        let kept = folder.path().join("kubelet-client.key.tmp");
        std::fs::write(&kept, KEY_OF_A_KUBELET).expect("written");
        let first = first_key(&store, &kept).expect("a key");
        // As upstream's digestedName derives it.
        let name = "node-csr-hnye-dqJAsEU6_ZOW65-xn1y0QnWgtuMnuEmiIGBCzQ";
        assert_eq!(request_name(&first.key, &Template::client("n")), name);
        let issued = rcgen::CertificateParams::default().self_signed(&first.key).expect("a certificate");
        Pair::parse(&issued.pem(), first.text.expose_secret()).expect("they belong together");
    }

    /// kubeadm deletes it when the node has joined.
    #[test]
    fn the_bootstrap_kubeconfig_is_read_only_if_the_kubeconfig_is_not_usable() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |second| SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        let [file, token, pem] = ["kubelet.conf", "token.conf", "current.pem"].map(|name| folder.path().join(name));
        let is_bootstrap = |bootstrap: Option<&Path>, second| {
            let access = first_access(&file, bootstrap, at(second)).map_err(|error| error.to_string());
            access.map(|access| matches!(access, FirstAccess::Bootstrap(_)))
        };
        assert_eq!(is_bootstrap(None, 50), Ok(false));
        let missing = is_bootstrap(Some(&token), 50).expect_err("there is neither");
        assert!(missing.starts_with("unable to load bootstrap kubeconfig: "), "{missing}");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                    contexts: [{name: c, context: {cluster: k, user: u}}]\n\
                    clusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443'}}]\n\
                    users: [{name: u, user: {token: abc.def}}]\n";
        std::fs::write(&token, text).expect("written");
        assert_eq!(is_bootstrap(Some(&token), 50), Ok(true));
        kubeconfig::write(&file, &load(&token).expect("access"), &pem).expect("written");
        let pair = super::super::testing::pair("system:node:n", 0, 100);
        std::fs::write(&pem, pair.text().expose_secret()).expect("written");
        assert_eq!(is_bootstrap(Some(&token), 100), Ok(true), "the certificate has expired");
        std::fs::remove_file(&token).expect("removed");
        assert_eq!(is_bootstrap(Some(&token), 99), Ok(false));
    }

    /// An API server that has this request already; counts further ones.
    fn server_with(present: &Value, refused: &Arc<AtomicUsize>) -> kube::Client {
        let (present, refused) = (present.clone(), refused.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
            let mark = json!({"metadata": {"resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}},
                              "kind": "CertificateSigningRequest", "apiVersion": "certificates.k8s.io/v1"});
            let (code, text) = if request.method() == Method::POST {
                refused.fetch_add(1, Ordering::SeqCst);
                let status = json!({"kind": "Status", "status": "Failure", "code": 409, "reason": "AlreadyExists",
                                    "message": "it exists"});
                (409_u16, status.to_string())
            } else if path == "/healthz" {
                (200, "ok".to_owned())
            } else if query.contains("watch=true") {
                let added = json!({"type": "ADDED", "object": present});
                (200, format!("{added}\n{}\n", json!({"type": "BOOKMARK", "object": mark})))
            } else if path.ends_with("/certificatesigningrequests") {
                let metadata = json!({"resourceVersion": "1"});
                let list = json!({"kind": "CertificateSigningRequestList", "metadata": metadata, "items": [present]});
                (200, list.to_string())
            } else {
                (200, present.to_string())
            };
            let answer = Response::builder().status(code).body(Body::from(text.into_bytes())).expect("a response");
            async move { Ok::<_, Infallible>(answer) }
        });
        kube::Client::new(service, "default")
    }

    /// The request of `node` with this key, approved and issued, under the name of that of node `n`.
    fn issued(node: &str, key: &KeyPair) -> Value {
        let certificate = rcgen::CertificateParams::default().self_signed(key).expect("a certificate").pem();
        let text = Template::client(node).request(key).expect("a request");
        let present = request::object(Purpose::Client, key, &text, Some(&request_name(key, &Template::client("n"))));
        let mut present = serde_json::to_value(present).expect("JSON");
        present["metadata"]["uid"] = "u".into();
        let approved = json!([{"type": "Approved", "status": "True"}]);
        present["status"] = json!({"conditions": approved, "certificate": STANDARD.encode(&certificate)});
        present
    }

    /// A disk that hangs must stop no other task. Here the one thread for file calls is busy.
    #[test]
    fn files_are_read_beside_other_tasks() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
        runtime.expect("a runtime").block_on(async {
            let folder = tempfile::tempdir().expect("a folder");
            std::fs::write(folder.path().join("kubelet-client.key.tmp"), KEY_OF_A_KUBELET).expect("written");
            let present = issued("n", &KeyPair::from_pem(KEY_OF_A_KUBELET).expect("a key"));
            let requests = Arc::default();
            let client = server_with(&present, &requests);
            let store = Store::new(folder.path(), Purpose::Client, None);
            let (release, released) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || released.recv());
            let mut requesting = std::pin::pin!(bootstrap(&client, "n", &store, folder.path(), SystemTime::UNIX_EPOCH));
            let early = tokio::time::timeout(Duration::from_millis(50), &mut requesting).await;
            assert!(early.is_err() && requests.load(Ordering::SeqCst) == 0, "it has the key already");
            drop(release);
            busy.await.expect("ended").expect_err("nothing was sent");
            requesting.await.expect("a certificate");
        });
    }

    #[test]
    fn what_lies_in_place_of_the_kept_key_is_named_and_stays() {
        for found in [InPlace::Huge, InPlace::Folder, InPlace::Pipe, InPlace::Loop] {
            let folder = tempfile::tempdir().expect("a folder");
            let (store, kept) = (Store::new(folder.path(), Purpose::Client, None), folder.path().join("key.tmp"));
            found.put(&kept).expect("made");
            let of_thread = kept.clone();
            let key = in_time(move || first_key(&store, &of_thread).map(drop)).expect("no other process is waited for");
            let error = key.expect_err("no key").to_string();
            assert!(error.starts_with(&format!("cannot read {}: ", kept.display())), "{error}");
            assert!(found.is_at(&kept), "{found:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_request_of_an_earlier_start_is_used_unless_it_is_foreign() {
        let key = KeyPair::from_pem(KEY_OF_A_KUBELET).expect("a key");
        for (node, why) in [("n", None), ("m", Some("it is for another subject"))] {
            let folder = tempfile::tempdir().expect("a folder");
            let store = Store::new(folder.path(), Purpose::Client, None);
            let kept = folder.path().join("kubelet-client.key.tmp");
            std::fs::write(&kept, KEY_OF_A_KUBELET).expect("written");
            let name = request_name(&key, &Template::client("n"));
            let refused = Arc::default();
            let client = server_with(&issued(node, &key), &refused);
            let outcome = bootstrap(&client, "n", &store, folder.path(), SystemTime::UNIX_EPOCH).await;
            let stored = store.load().expect("readable");
            let expected = why.map(|why| format!("CertificateSigningRequest {name} already exists, but {why}"));
            assert_eq!(outcome.err().map(|error| error.to_string()), expected);
            let key_text = stored.as_ref().map(|pair| pair.key.expose_secret());
            assert_eq!(key_text, why.is_none().then_some(KEY_OF_A_KUBELET), "{node}");
            assert_eq!((kept.exists(), refused.load(Ordering::SeqCst)), (why.is_some(), 1), "{node}");
        }
    }

    /// As upstream, which derives the name from the usages in this order.
    #[test]
    fn a_certificate_with_an_rsa_key_may_encipher_keys() {
        let usages = |key: &KeyPair| request::object(Purpose::Client, key, "PEM", None).spec.usages.expect("usages");
        let rsa = KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).expect("a key");
        assert_eq!(usages(&rsa), ["digital signature", "client auth", "key encipherment"]);
        assert_eq!(usages(&KeyPair::generate().expect("a key")), ["digital signature", "client auth"]);
    }

    #[test]
    fn only_our_own_request_is_reused() {
        let (key, other) = (KeyPair::generate().expect("a key"), KeyPair::generate().expect("a key"));
        let of = |key: &KeyPair, node: &str, purpose| {
            request::object(purpose, key, &Template::client(node).request(key).expect("a request"), Some("x"))
        };
        let wanted = of(&key, "n", Purpose::Client);
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(50);
        let issued = |until: u64| {
            let mut request = of(&key, "n", Purpose::Client);
            let chain = super::super::testing::pair("system:node:n", 0, until).chain;
            request.status = Some(serde_json::from_value(serde_json::json!({})).expect("a status"));
            if let Some(status) = &mut request.status {
                status.certificate = Some(k8s_openapi::ByteString(chain.into_bytes()));
            }
            request
        };
        let table = [
            (of(&key, "n", Purpose::Client), None),
            (of(&key, "n", Purpose::Serving), Some("it is for another signer")),
            (of(&key, "m", Purpose::Client), Some("it is for another subject")),
            (of(&other, "n", Purpose::Client), Some("it is for another key")),
            (request::object(Purpose::Client, &key, "nonsense", Some("x")), Some("its request cannot be parsed")),
            (issued(100), None),
            (issued(40), Some("its certificate has expired")),
        ];
        for (present, expected) in table {
            assert_eq!(foreign(&present, &wanted, now), expected);
        }
    }
}
