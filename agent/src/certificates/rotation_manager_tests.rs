//! The rotation manager against a scripted signer, on paused time.

use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Method;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use http_body_util::StreamBody;
use hyper::body::Frame;
use k8s_openapi::api::core::v1::NodeAddress;
use kube::client::Body;
use rcgen::BasicConstraints;
use rcgen::CertificateParams;
use rcgen::CertificateSigningRequestParams;
use rcgen::DnType;
use rcgen::IsCa;
use rcgen::Issuer;
use rcgen::KeyPair;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tracing::Level;

use super::super::testing::pair;
use super::*;
use crate::apiserver::recovery::Recovery;
use crate::model::testing::LogCount;

/// What the signer does with the next request; the last entry is used for all further ones.
#[derive(Clone, Copy, Debug)]
enum Does {
    Sign {
        seconds: u64,
    },
    /// Issues a certificate for another node.
    SignAnother,
    Deny,
    Nothing,
    /// Issues a certificate, but lists and watches fail with this status until [`Signer::recover`].
    SignUnseen(u16),
    /// Issues a certificate, but no list is ever answered.
    SignUnlisted,
    /// Deletes the request.
    Delete,
    Refuse(u16),
}

/// An API server for CertificateSigningRequests only.
struct Signer {
    issuer: Issuer<'static, KeyPair>,
    clock: Clock,
    script: Mutex<Vec<Does>>,
    /// Time and object of each request.
    asked: Mutex<Vec<(Instant, Value)>>,
    number: AtomicU32,
    last: Mutex<Value>,
    /// What was done with the last request.
    done: Mutex<Option<Does>>,
    recovery: Recovery,
}

impl Signer {
    fn new(clock: Clock, script: &[Does]) -> Arc<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let mut script = script.to_vec();
        script.reverse();
        Arc::new(Self {
            issuer: Issuer::new(params, KeyPair::generate().expect("a key")),
            clock,
            script: Mutex::new(script),
            asked: Mutex::default(),
            number: AtomicU32::new(0),
            last: Mutex::default(),
            done: Mutex::default(),
            recovery: Recovery::default(),
        })
    }

    /// Lists and watches succeed again, and other requests have detected that.
    fn recover(&self) {
        *self.done.lock().expect("a step") = None;
        self.recovery.over();
    }

    fn client(self: &Arc<Self>) -> kube::Client {
        let signer = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let signer = signer.clone();
            async move { Ok::<_, std::convert::Infallible>(signer.answer(request).await) }
        });
        kube::Client::new(service, "default")
    }

    fn asked(&self) -> Vec<(Instant, Value)> {
        self.asked.lock().expect("a log").clone()
    }

    fn does(&self) -> Does {
        let mut script = self.script.lock().expect("a script");
        if script.len() > 1 { script.pop().expect("a step") } else { *script.last().expect("a step") }
    }

    async fn answer(
        &self,
        request: Request<Body>,
    ) -> Response<http_body_util::combinators::UnsyncBoxBody<Bytes, std::io::Error>> {
        let whole = |status: u16, value: &Value| {
            let body = Full::from(value.to_string()).map_err(|never| match never {}).boxed_unsync();
            Response::builder().status(status).body(body).expect("a response")
        };
        let query = request.uri().query().unwrap_or_default().to_owned();
        if request.method() == Method::POST {
            let body = request.into_body().collect().await.expect("a body").to_bytes();
            let mut object: Value = serde_json::from_slice(&body).expect("JSON");
            self.asked.lock().expect("a log").push((Instant::now(), object.clone()));
            let does = self.does();
            if let Does::Refuse(code) = does {
                return whole(code, &json!({"kind": "Status", "status": "Failure", "code": code, "reason": "x"}));
            }
            *self.done.lock().expect("a step") = Some(does);
            let number = self.number.fetch_add(1, Ordering::SeqCst);
            object["metadata"] =
                json!({"name": format!("csr-{number}"), "uid": format!("u{number}"), "resourceVersion": "1"});
            object["status"] = self.status(does, object["spec"]["request"].as_str().expect("a request"));
            *self.last() = object.clone();
            return whole(201, &object);
        }
        let last = self.last().clone();
        let (done, is_watch) = (*self.done.lock().expect("a step"), query.contains("watch=true"));
        if let Some(Does::SignUnseen(code)) = done {
            return whole(code, &json!({"kind": "Status", "status": "Failure", "code": code, "reason": "x"}));
        }
        if !is_watch && matches!(done, Some(Does::SignUnlisted)) {
            std::future::pending::<()>().await;
        }
        let items: Vec<Value> = if matches!(done, Some(Does::Delete)) { Vec::new() } else { vec![last] };
        if !is_watch {
            return whole(
                200,
                &json!({"kind": "CertificateSigningRequestList", "metadata": {"resourceVersion": "1"}, "items": items}),
            );
        }
        let mark = json!({"metadata": {"resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}},
                          "kind": "CertificateSigningRequest", "apiVersion": "certificates.k8s.io/v1"});
        let added = items.iter().map(|item| format!("{}\n", json!({"type": "ADDED", "object": item})));
        let added: String = added.collect();
        let lines = format!("{added}{}\n", json!({"type": "BOOKMARK", "object": mark}));
        let first = futures_util::stream::iter([Ok(Frame::data(Bytes::from(lines)))]);
        Response::new(
            StreamBody::new(futures_util::StreamExt::chain(first, futures_util::stream::pending())).boxed_unsync(),
        )
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Value> {
        self.last.lock().expect("an object")
    }

    fn status(&self, does: Does, request: &str) -> Value {
        let condition = |kind: &str| json!([{"type": kind, "status": "True"}]);
        let seconds = match does {
            Does::Sign { seconds } => seconds,
            Does::SignUnseen(_) | Does::SignUnlisted | Does::SignAnother => 1000,
            Does::Deny => return json!({"conditions": condition("Denied")}),
            Does::Nothing | Does::Delete | Does::Refuse(_) => return json!({}),
        };
        let pem = String::from_utf8(STANDARD.decode(request).expect("base64")).expect("text");
        let mut params = CertificateSigningRequestParams::from_pem(&pem).expect("a request");
        let now = self.clock.wall();
        params.params.not_before = now.into();
        params.params.not_after = (now + Duration::from_secs(seconds)).into();
        if matches!(does, Does::SignAnother) {
            params.params.distinguished_name.push(DnType::CommonName, "system:node:another");
        }
        let certificate = params.signed_by(&self.issuer).expect("a certificate").pem();
        json!({"conditions": condition("Approved"), "certificate": STANDARD.encode(certificate)})
    }
}

/// One client, which records the arguments of the calls.
struct NotingClients {
    client: kube::Client,
    signer: Arc<Signer>,
    used: Arc<Mutex<Vec<bool>>>,
}

impl RequestClients for NotingClients {
    fn next(&self, is_certified: bool) -> (kube::Client, Recovered) {
        self.used.lock().expect("a log").push(is_certified);
        (self.client.clone(), self.signer.recovery.subscribe())
    }
}

struct Bench {
    signer: Arc<Signer>,
    folder: tempfile::TempDir,
    current: watch::Receiver<Option<Arc<Pair>>>,
    templates: watch::Sender<Option<Template>>,
    server_health: ServerHealth,
    clock: Clock,
    metrics: Arc<Metrics>,
    /// The argument of each call for a client.
    used: Arc<Mutex<Vec<bool>>>,
}

fn start(purpose: Purpose, template: Option<Template>, first: Option<Pair>, script: &[Does]) -> Bench {
    start_with(purpose, template, first, script, false)
}

fn start_with(
    purpose: Purpose,
    template: Option<Template>,
    first: Option<Pair>,
    script: &[Does],
    at_once: bool,
) -> Bench {
    let clock = Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000));
    let (signer, folder) = (Signer::new(clock, script), tempfile::tempdir().expect("a folder"));
    let (templates, template) = watch::channel(template);
    let (sender, current) = watch::channel(first.map(Arc::new));
    let (used, server_health) = (Arc::new(Mutex::new(Vec::new())), ServerHealth::default());
    let metrics = Metrics::new();
    let manager = RotationManager {
        store: Store::new(folder.path(), purpose, None),
        template,
        clients: Box::new(NotingClients { client: signer.client(), signer: signer.clone(), used: used.clone() }),
        clock,
        metrics: metrics.clone(),
        server_health: server_health.clone(),
        at_once,
    };
    tokio::spawn(manager.run(sender, CancellationToken::new()));
    Bench { signer, folder, current, templates, server_health, clock, metrics, used }
}

impl Bench {
    async fn until(&mut self, wanted: impl Fn(Option<&Pair>) -> bool) {
        let waiting = self.current.wait_for(|pair| wanted(pair.as_deref()));
        tokio::time::timeout(Duration::from_secs(100_000_000), waiting).await.expect("in time").expect("a manager");
    }

    fn wall(&self, second: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + second)
    }

    /// The remaining lifetime that the metrics show of the `client` or `server` certificate.
    fn left(&self, whose: &str) -> f64 {
        let name = format!("kubelet_certificate_manager_{whose}_ttl_seconds ");
        let text = self.metrics.render().expect("metrics");
        let value = text.lines().find_map(|line| line.strip_prefix(&name)).expect("a gauge");
        value.parse().expect("a number")
    }
}

#[tokio::test(start_paused = true)]
async fn a_missing_pair_is_requested_stored_and_rotated() {
    let script = [Does::Sign { seconds: 1000 }];
    let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &script);
    let began = Instant::now();
    bench.until(|pair| pair.is_some()).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(bench.server_health.healthy());
    let first = bench.current.borrow().clone().expect("a pair");
    assert_eq!(first.leaf.common_name, "system:node:n");
    let stored = Store::new(bench.folder.path(), Purpose::Client, None).load().expect("readable").expect("a pair");
    assert_eq!(stored.leaf, first.leaf);
    bench.until(|pair| pair.is_some_and(|pair| pair.leaf.not_before != first.leaf.not_before)).await;
    let passed = began.elapsed().as_secs();
    assert!((699..=902).contains(&passed), "{passed}");
    assert_eq!(*bench.used.lock().expect("a log"), [false, true], "then with its own certificate");
    let asked = &bench.signer.asked()[0].1;
    assert_eq!(asked["spec"]["signerName"], "kubernetes.io/kube-apiserver-client-kubelet");
    assert_eq!(asked["metadata"]["generateName"], "csr-");
}

#[tokio::test(start_paused = true)]
async fn failed_attempts_are_repeated_with_pauses_and_update_server_health() {
    let script = [Does::Refuse(503), Does::Refuse(401), Does::Deny, Does::Sign { seconds: 1000 }];
    let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &script);
    bench.until(|pair| pair.is_some()).await;
    let times: Vec<Instant> = bench.signer.asked().iter().map(|(at, _)| *at).collect();
    let pauses: Vec<u64> = times.windows(2).map(|two| two[1].duration_since(two[0]).as_secs()).collect();
    assert_eq!(pauses, [2, 4, 8]);
    for (code, healthy) in [(503, false), (500, false), (401, true), (403, true), (404, true)] {
        let bench = start(Purpose::Client, Some(Template::client("n")), None, &[Does::Refuse(code)]);
        bench.server_health.note(!healthy);
        while bench.signer.asked().is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(bench.server_health.healthy(), healthy, "{code}");
    }
    let (unreachable, health) = (std::io::Error::from(std::io::ErrorKind::ConnectionRefused), ServerHealth::default());
    health.note(true);
    health.created(Err(&kube::Error::Service(unreachable.into())));
    assert!(!health.healthy(), "nothing answers");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_cannot_be_stored_is_used_and_stored_later() {
    let script = [Does::Sign { seconds: 100_000 }];
    let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &script);
    let link = Store::new(bench.folder.path(), Purpose::Client, None).current_path();
    std::fs::create_dir(&link).expect("a folder in place of the link");
    let used = bench.current.wait_for(Option::is_some);
    drop(tokio::time::timeout(Duration::from_secs(60), used).await.expect("used").expect("a manager"));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(bench.signer.asked().len(), 1, "one request");
    let files = std::fs::read_dir(bench.folder.path()).expect("a folder").flatten();
    let keys = files.filter(|file| file.file_type().is_ok_and(|kind| kind.is_file())).count();
    assert!(keys <= 2, "each attempt has left one: {keys}");
    let (text, failures) =
        (bench.metrics.render().expect("metrics"), "kubelet_certificate_manager_client_expiration_renew_errors ");
    let counted = text.lines().find_map(|line| line.strip_prefix(failures)).expect("a counter");
    assert_ne!(counted, "0", "it is not stored");
    std::fs::remove_dir(&link).expect("removed");
    let began = Instant::now();
    while !link.is_symlink() {
        assert!(began.elapsed() < Duration::from_secs(120), "not stored");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let stored = Store::new(bench.folder.path(), Purpose::Client, None).load().expect("readable").expect("a pair");
    assert_eq!(Some(&stored.leaf), bench.current.borrow().as_ref().map(|pair| &pair.leaf));
    assert_eq!(bench.signer.asked().len(), 1, "the same certificate");
}

#[tokio::test(start_paused = true)]
async fn useless_certificates_are_replaced_with_pauses() {
    let good = Does::Sign { seconds: 1000 };
    // For another node, and expired as by a clock that is ahead.
    for useless in [Does::SignAnother, Does::Sign { seconds: 0 }] {
        let script = [useless, useless, useless, good, useless, good];
        let bench = start(Purpose::Client, Some(Template::client("n")), None, &script);
        while bench.signer.asked().len() < script.len() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let times: Vec<Instant> = bench.signer.asked().iter().map(|(at, _)| *at).collect();
        let pauses: Vec<u64> = times.windows(2).map(|two| two[1].duration_since(two[0]).as_secs()).collect();
        assert_eq!((&pauses[..3], pauses[4]), (&[2, 4, 8][..], 2), "{useless:?}");
        assert!((699..=902).contains(&pauses[3]), "after a good one: {pauses:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pending_request_is_abandoned_after_fifteen_minutes() {
    let script = [Does::Nothing, Does::Sign { seconds: 1000 }];
    let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &script);
    let began = Instant::now();
    bench.until(|pair| pair.is_some()).await;
    assert!((900..910).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_deleted_is_replaced_by_another_one() {
    let script = [Does::Delete, Does::Delete, Does::Sign { seconds: 1000 }];
    let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &script);
    let began = Instant::now();
    bench.until(|pair| pair.is_some()).await;
    assert_eq!(bench.signer.asked().len(), 3);
    assert!(began.elapsed() < Duration::from_secs(10), "two pauses: {:?}", began.elapsed());
}

/// As one that is embedded in the kubeconfig.
#[tokio::test(start_paused = true)]
async fn a_valid_pair_is_replaced_at_once_on_request_and_the_next_one_in_time() {
    let (first, script) = (pair("system:node:n", 999_000, 9_000_000), [Does::Sign { seconds: 1000 }]);
    let bench = start_with(Purpose::Client, Some(Template::client("n")), Some(first), &script, true);
    tokio::time::sleep(Duration::from_secs(690)).await;
    assert_eq!(bench.signer.asked().len(), 1);
    assert_eq!(*bench.used.lock().expect("a log"), [true], "with the pair that is valid");
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(bench.signer.asked().len(), 2);
}

/// After an outage, or when the permission to read requests was granted.
#[tokio::test(start_paused = true)]
async fn a_certificate_issued_while_its_request_cannot_be_read_is_received_later() {
    for code in [503, 401, 403, 404] {
        let warned = LogCount::start("keblet::apiserver::watch", Level::WARN);
        let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &[Does::SignUnseen(code)]);
        // Long enough for pauses of half a minute and more.
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!((bench.signer.asked().len(), bench.current.borrow().is_none()), (1, true), "{code}");
        assert_eq!(warned.lines(), usize::from(matches!(code, 403 | 404)), "{code}: each change of a denial once");
        let began = Instant::now();
        bench.signer.recover();
        bench.until(|pair| pair.is_some()).await;
        assert!(began.elapsed() <= Duration::from_millis(1100), "{code}: {:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_without_an_answer_does_not_hold_back_the_certificate() {
    let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &[Does::SignUnlisted]);
    let began = Instant::now();
    bench.until(|pair| pair.is_some()).await;
    assert!(began.elapsed() < Duration::from_secs(100), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_expired_pair_counts_as_missing_until_it_is_replaced() {
    let script = [Does::Refuse(503)];
    let first = pair("system:node:n", 999_000, 1_000_200);
    let mut bench = start(Purpose::Client, Some(Template::client("n")), Some(first), &script);
    assert!(bench.current.borrow().is_some());
    bench.until(|pair| pair.is_none()).await;
    let (now, end) = (bench.clock.wall(), bench.wall(200));
    assert!(now >= end && now < end + Duration::from_secs(62), "{now:?}");
    assert!(bench.used.lock().expect("a log").first().is_some_and(|good| *good));
    bench.signer.script.lock().expect("a script").push(Does::Sign { seconds: 1000 });
    bench.until(|pair| pair.is_some()).await;
    assert_eq!(
        bench.used.lock().expect("a log").last(),
        Some(&false),
        "an expired certificate is not used for requests"
    );
}

/// Also of a certificate whose template is not known yet.
#[tokio::test(start_paused = true)]
async fn the_remaining_lifetime_is_shown_while_no_other_certificate_is_issued() {
    let table = [(Purpose::Client, Some(Template::client("n")), "client"), (Purpose::Serving, None, "server")];
    for (purpose, template, whose) in table {
        // Due for renewal since long.
        let first = pair("system:node:n", 990_000, 1_000_600);
        let bench = start(purpose, template, Some(first), &[Does::Refuse(503)]);
        for (after, expected) in [(300, 300.0), (400, -100.0)] {
            tokio::time::sleep(Duration::from_secs(after)).await;
            let left = bench.left(whose);
            assert!((left - expected).abs() <= 1.0, "{whose} after {after} s: {left}");
        }
    }
    let script = [Does::Sign { seconds: 1000 }];
    let mut bench = start(Purpose::Client, Some(Template::client("n")), None, &script);
    assert_eq!(bench.left("client"), f64::INFINITY);
    bench.until(|pair| pair.is_some()).await;
    assert!((bench.left("client") - 1000.0).abs() <= 1.0, "{}", bench.left("client"));
}

#[tokio::test(start_paused = true)]
async fn a_valid_pair_put_in_place_of_an_expired_one_is_used() {
    let old = pair("system:node:n", 999_000, 999_900);
    let mut bench = start(Purpose::Client, Some(Template::client("n")), Some(old.clone()), &[Does::Refuse(401)]);
    let store = Store::new(bench.folder.path(), Purpose::Client, None);
    store.replace(&old, bench.clock.wall()).expect("written");
    while bench.signer.asked().len() < 2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(bench.current.borrow().is_none());
    let began = Instant::now();
    store.replace(&pair("system:node:n", 999_000, 1_100_000), bench.clock.wall()).expect("written");
    bench.until(|pair| pair.is_some()).await;
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    let asked = bench.signer.asked().len();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(bench.signer.asked().len(), asked, "there is no need any more");
}

#[tokio::test(start_paused = true)]
async fn a_serving_certificate_follows_the_addresses() {
    let with = |ip: &str| Template::serving("n", &[NodeAddress { type_: "InternalIP".into(), address: ip.into() }]);
    let script = [Does::Sign { seconds: 1_000_000 }, Does::Nothing, Does::Sign { seconds: 1_000_000 }];
    let mut bench = start(Purpose::Serving, None, None, &script);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(bench.signer.asked().is_empty(), "nothing to ask for yet");
    bench.templates.send_replace(with("10.0.0.1"));
    let has =
        |ip: &str, pair: Option<&Pair>| pair.is_some_and(|pair| pair.leaf.ips.contains(&ip.parse().expect("an IP")));
    bench.until(|pair| has("10.0.0.1", pair)).await;
    // While a request for the second address waits, a third one comes.
    bench.templates.send_replace(with("10.0.0.2"));
    while bench.signer.asked().len() < 2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let began = Instant::now();
    bench.templates.send_replace(with("10.0.0.3"));
    bench.until(|pair| has("10.0.0.3", pair)).await;
    assert!(began.elapsed() < Duration::from_secs(10), "the outdated request is not waited for: {:?}", began.elapsed());
    assert_eq!(bench.signer.asked().len(), 3);
    let metrics = bench.metrics.render().expect("metrics");
    let replaced = "kubelet_certificate_manager_server_rotation_seconds_count 1";
    assert!(metrics.lines().any(|line| line == replaced), "only the first one was replaced: {metrics}");
}
