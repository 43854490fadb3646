//! Certificates of a real control plane: bootstrap, rotation, serving certificates; and watches through its faults.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::Stream;
use futures_util::StreamExt as _;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::NodeAddress;
use keblet::apiserver::ApiServer;
use keblet::apiserver::Options;
use keblet::apiserver::kubeconfig;
use keblet::apiserver::recovery::Recovered;
use keblet::apiserver::tls;
use keblet::apiserver::watch::Event;
use keblet::apiserver::watch::follow;
use keblet::certificates;
use keblet::certificates::FirstAccess;
use keblet::certificates::Pair;
use keblet::certificates::Purpose;
use keblet::certificates::RotationManager;
use keblet::certificates::ServerHealth;
use keblet::certificates::Store;
use keblet::certificates::Template;
use keblet::metrics::Metrics;
use keblet::model::Clock;
use keblet_peers::ControlPlane;
use keblet_peers::ControlPlaneOptions;
use keblet_peers::ControlPlaneReady;
use keblet_peers::Part;
use kube::Api;
use kube::api::DeleteParams;
use kube::api::PostParams;
use kube::runtime::watcher::Config;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Deadline of every wait; generous, for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, work).await.unwrap_or_else(|_| panic!("{what}: not within {TIMEOUT:?}"))
}

async fn plane() -> ControlPlane {
    tls::install_crypto();
    tokio::task::spawn_blocking(|| ControlPlane::start(&ControlPlaneOptions::default())).await.unwrap().unwrap()
}

fn options() -> Options {
    Options {
        per_second: 50,
        burst: 100,
        events_per_second: 50,
        events_burst: 100,
        heartbeat_timeout: Duration::from_secs(10),
        versions: ("0.0.0", "v1.36.3"),
    }
}

fn connect(file: &Path) -> ApiServer {
    let access = kubeconfig::load(file).unwrap();
    ApiServer::connect(&access, &options(), Metrics::new(), CancellationToken::new()).unwrap()
}

/// The user and groups by which the API server knows the client.
async fn whoami(client: &kube::Client) -> String {
    let reviews: Api<SelfSubjectReview> = Api::all(client.clone());
    let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
    let user = review.status.unwrap().user_info.unwrap();
    format!("{} {}", user.username.unwrap(), user.groups.unwrap_or_default().join(","))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn cluster_bootstrap_writes_a_reusable_kubeconfig() {
    let plane = plane().await;
    let ready = plane.ready().clone();
    let folder = tempfile::tempdir().unwrap();
    let (file, pki) = (folder.path().join("kubelet.conf"), folder.path().join("pki"));
    let now = SystemTime::now();
    let first = certificates::first_access(&file, Some(&ready.bootstrap_kubeconfig), now).unwrap();
    let FirstAccess::Bootstrap(access) = first else { panic!("there is no kubeconfig yet") };
    let bootstrap = connect(&ready.bootstrap_kubeconfig);
    assert!(whoami(&bootstrap.main).await.starts_with("system:bootstrap:"));
    let store = Store::new(&pki, Purpose::Client, None);
    let began = std::time::Instant::now();
    let getting = certificates::bootstrap(&bootstrap.main, "n-1", &store, &pki, now);
    within("the first certificate", getting).await.unwrap();
    println!("first certificate after {:?}", began.elapsed());
    certificates::write_kubeconfig(&file, &access, &store.current_path()).unwrap();
    let again = certificates::first_access(&file, Some(&ready.bootstrap_kubeconfig), now).unwrap();
    assert!(matches!(again, FirstAccess::Kubeconfig));
    let identity = whoami(&connect(&file).main).await;
    assert!(identity.starts_with("system:node:n-1 ") && identity.contains("system:nodes"), "{identity}");
    assert!(!pki.join("kubelet-client.key.tmp").exists());
    // After an interruption following the request: the same key finds the same request.
    let requests: Api<CertificateSigningRequest> = Api::all(connect(&ready.kubeconfig).main);
    let before = requests.list(&Default::default()).await.unwrap().items.len();
    within("the same again", certificates::bootstrap(&bootstrap.main, "n-1", &store, &pki, now)).await.unwrap();
    assert_eq!(requests.list(&Default::default()).await.unwrap().items.len(), before);
}

fn rotation_manager(
    store: Store,
    template: watch::Receiver<Option<Template>>,
    api: ApiServer,
    at_once: bool,
) -> RotationManager {
    RotationManager {
        store,
        template,
        clients: Box::new(api),
        clock: Clock::System,
        metrics: Metrics::new(),
        server_health: ServerHealth::default(),
        at_once,
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn cluster_client_certificates_are_requested_and_rotated() {
    let plane = plane().await;
    let ready = plane.ready().clone();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path(), Purpose::Client, None);
    let access = kubeconfig::load(&ready.bootstrap_kubeconfig).unwrap();
    let identity = tls::Identity::default();
    let certified = kubeconfig::Access { credentials: kubeconfig::Credentials::None, ..access };
    let (metrics, cancel) = (Metrics::new(), CancellationToken::new());
    let api = ApiServer::with_identity(&certified, identity, &options(), metrics, cancel.clone()).unwrap();
    // Requested before there is any certificate: the request has no client certificate.
    let reviews: Api<SelfSubjectReview> = Api::all(api.main.clone());
    // The server closes connections of unauthenticated clients, sometimes before its response is read.
    let early = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap_err();
    assert!(early.to_string().contains("system:anonymous"), "{early}");
    let template = watch::channel(Some(Template::client("n-2"))).1;
    let (sender, mut current) = watch::channel(None);
    let bootstrap = connect(&ready.bootstrap_kubeconfig);
    let rotating =
        tokio::spawn(rotation_manager(store.clone(), template.clone(), bootstrap, false).run(sender, cancel.clone()));
    let first = within("a certificate", current.wait_for(Option::is_some)).await.unwrap().clone().unwrap();
    api.identify(first.certified.clone());
    assert!(whoami(&api.main).await.starts_with("system:node:n-2 "));
    cancel.cancel();
    rotating.await.unwrap();
    // A restart with the stored pair, which is due for rotation: the request is authenticated by the pair itself.
    let stored: Option<Arc<Pair>> = store.load().unwrap().map(Arc::new);
    let (sender, mut current) = watch::channel(stored);
    let cancel = CancellationToken::new();
    let rotating = tokio::spawn(rotation_manager(store, template, api.clone(), true).run(sender, cancel.clone()));
    let other = |pair: &Option<Arc<Pair>>| pair.as_ref().is_some_and(|pair| pair.chain != first.chain);
    let second = within("a renewed certificate", current.wait_for(other)).await.unwrap().clone().unwrap();
    assert!(api.identify(second.certified.clone()));
    assert!(whoami(&api.main).await.starts_with("system:node:n-2 "));
    cancel.cancel();
    rotating.await.unwrap();
}

fn kubectl(ready: &ControlPlaneReady, arguments: &[&str]) {
    let status = Command::new(ready.kubectl()).args(arguments).env("KUBECONFIG", &ready.kubeconfig).status().unwrap();
    assert!(status.success(), "kubectl {arguments:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn cluster_serving_certificates_are_used_once_approved() {
    let mut plane = plane().await;
    let ready = plane.ready().clone();
    let node = plane.node("n-3", "192.0.2.3".parse().unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let address = |kind: &str, value: &str| NodeAddress { type_: kind.to_owned(), address: value.to_owned() };
    let addresses = [address("InternalIP", "192.0.2.3"), address("Hostname", "n-3")];
    let template = watch::channel(Template::serving("n-3", &addresses)).1;
    let store = Store::new(folder.path(), Purpose::Serving, None);
    let (sender, mut current) = watch::channel(None);
    let api = connect(&node.client.kubeconfig);
    let cancel = CancellationToken::new();
    let rotating = tokio::spawn(rotation_manager(store.clone(), template, api, false).run(sender, cancel.clone()));
    let requests: Api<CertificateSigningRequest> = Api::all(connect(&ready.kubeconfig).main);
    let mut received = Box::pin(follow(requests, Config::default(), Recovered::default()));
    let name = within("a request", async {
        loop {
            match received.next().await {
                Some(Event::Apply(request) | Event::InitApply(request))
                    if request.spec.signer_name == "kubernetes.io/kubelet-serving" =>
                {
                    assert_eq!(request.spec.username.as_deref(), Some("system:node:n-3"));
                    return request.metadata.name.unwrap();
                }
                event => assert!(event.is_some()),
            }
        }
    })
    .await;
    assert!(current.borrow().is_none(), "the request is not approved");
    kubectl(&ready, &["certificate", "approve", &name]);
    let pair = within("a certificate", current.wait_for(Option::is_some)).await.unwrap().clone().unwrap();
    assert!(pair.leaf.dns_names.contains("n-3") && pair.leaf.ips.contains(&"192.0.2.3".parse().unwrap()));
    assert_eq!(store.load().unwrap().unwrap().leaf, pair.leaf);
    cancel.cancel();
    rotating.await.unwrap();
}

/// Reads events until the object with this name was received, or, for the name `done`, a list is complete.
async fn until_seen(events: &mut (impl Stream<Item = Event<ConfigMap>> + Unpin), name: &str) -> Vec<String> {
    let mut received = Vec::new();
    within(name, async {
        loop {
            match events.next().await.unwrap() {
                Event::Init => received.push("init".to_owned()),
                Event::InitDone => {
                    received.push("done".to_owned());
                    if name == "done" {
                        return;
                    }
                }
                Event::InitApply(object) | Event::Apply(object) => {
                    let found = object.metadata.name.unwrap();
                    received.push(found.clone());
                    if found == name {
                        return;
                    }
                }
                Event::InitKeep(object) => panic!("{object:?} cannot be decoded"),
                Event::Delete(object) => received.push(format!("-{}", object.name)),
            }
        }
    })
    .await;
    received
}

async fn make(objects: &Api<ConfigMap>, name: &str) {
    let object: ConfigMap = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    within(name, async {
        // A restarted server may refuse connections for a moment.
        while objects.create(&PostParams::default(), &object).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn cluster_watches_survive_restarts_hangs_and_compaction() {
    let mut plane = plane().await;
    let api = connect(&plane.ready().kubeconfig);
    let objects: Api<ConfigMap> = Api::namespaced(api.main.clone(), "default");
    let mut events = Box::pin(follow(objects.clone(), Config::default(), api.recovered()));
    make(&objects, "before").await;
    let received = until_seen(&mut events, "before").await;
    assert_eq!(received.first().map(String::as_str), Some("init"));

    // Killed and restarted: the watch resumes from its version, unless other clients have written meanwhile. A
    // restarted server has no history, so the version may be too old; then it sends a complete list.
    plane.kill(Part::ApiServer).unwrap();
    plane.start_part(Part::ApiServer).unwrap();
    make(&objects, "after-kill").await;
    let mut received = until_seen(&mut events, "after-kill").await;
    if let Some(list) = received.iter().position(|event| event == "init") {
        // Reads the list to its end: later events are changes.
        if !received[list..].contains(&"done".to_owned()) {
            received.extend(until_seen(&mut events, "done").await);
        }
        assert!(received[list..].contains(&"before".to_owned()), "{received:?}");
    }

    // Suspended for a while: changes during that time are received afterwards.
    plane.freeze(Part::ApiServer).unwrap();
    let reported = tokio::time::timeout(Duration::from_secs(5), events.next()).await;
    assert!(reported.is_err(), "{reported:?}");
    plane.thaw(Part::ApiServer).unwrap();
    make(&objects, "after-freeze").await;
    until_seen(&mut events, "after-freeze").await;

    // The watch is broken and not polled while the history is compacted: then its version is too old, and a new list
    // list follows.
    plane.kill(Part::ApiServer).unwrap();
    plane.start_part(Part::ApiServer).unwrap();
    make(&objects, "unheard").await;
    objects.delete("before", &DeleteParams::default()).await.unwrap();
    plane.compact().unwrap();
    plane.kill(Part::ApiServer).unwrap();
    plane.start_part(Part::ApiServer).unwrap();
    make(&objects, "after-compaction").await;
    let received = until_seen(&mut events, "after-compaction").await;
    let list =
        received.iter().rposition(|event| event == "init").unwrap_or_else(|| panic!("no new list: {received:?}"));
    assert!(!received[list..].contains(&"before".to_owned()), "{received:?}");
}
