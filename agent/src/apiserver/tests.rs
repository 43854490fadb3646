//! The clients against a real HTTPS server.

use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::PostParams;
use kube::runtime::watcher::Config;
use serde_json::Value;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tower::ServiceExt as _;

use super::test_server::Authority;
use super::test_server::FirstConnection;
use super::test_server::Reply;
use super::test_server::Seen;
use super::test_server::TestServer;
use super::watch::Event;
use super::*;

#[path = "answers_tests.rs"]
mod answers;
#[path = "connection_tests.rs"]
mod connection;
#[path = "impersonation_tests.rs"]
mod impersonation;
#[path = "limit_tests.rs"]
mod limit;

fn options() -> Options {
    Options {
        per_second: -1,
        burst: 0,
        events_per_second: 50,
        events_burst: 100,
        heartbeat_timeout: Duration::from_millis(300),
        versions: ("9.9.9", "v1.36.3"),
    }
}

fn connect(kubeconfig: &Path) -> ApiServer {
    let access = kubeconfig::load(kubeconfig).expect("access");
    ApiServer::connect(&access, &options(), Metrics::new(), CancellationToken::new()).expect("clients")
}

fn object(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "resourceVersion": "7"}})
}

fn objects(client: &kube::Client) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), "default")
}

fn write_pair(folder: &Path, (certificate, key): (String, String)) {
    // One file for both, replaced atomically, as certificate stores do.
    std::fs::write(folder.join("new.pem"), certificate + &key).expect("written");
    std::fs::rename(folder.join("new.pem"), folder.join("client.pem")).expect("renamed");
}

const PAIR: &str = "client-certificate: client.pem, client-key: client.pem";

#[tokio::test]
async fn requests_carry_credentials_and_share_a_connection() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_| Reply::json(200, object("a"))).await;
    write_pair(folder.path(), authority.issue("system:node:n"));
    let user = format!("{PAIR}, token: sesame");
    let api = connect(&server.kubeconfig(folder.path(), &authority, &user));
    for client in [&api.main, &api.events, &api.heartbeat, &api.main] {
        objects(client).get("a").await.expect("an answer");
    }
    let seen = server.seen();
    assert_eq!(seen.len(), 4);
    for request in &seen {
        assert_eq!((request.connection, request.version), (1, http::Version::HTTP_2));
        assert_eq!(request.client.as_deref(), Some("system:node:n"));
        assert_eq!(request.headers["authorization"], "Bearer sesame");
        assert_eq!(request.headers["user-agent"], "keblet/v9.9.9 (linux/amd64) kubernetes/v1.36.3");
        assert_eq!(request.headers["audit-id"].len(), 36);
    }
    assert_ne!(seen[0].headers["audit-id"], seen[1].headers["audit-id"]);
}

#[tokio::test]
async fn a_server_without_http2_is_spoken_to_in_http1() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start_http1(&authority, |_| Reply::json(200, object("a"))).await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "token: t"));
    let (first, second) = (objects(&api.main), objects(&api.main));
    let (a, b) = tokio::join!(first.get("a"), second.get("a"));
    a.and(b).expect("answers");
    objects(&api.main).get("a").await.expect("an answer");
    assert!(server.seen().iter().all(|request| request.version == http::Version::HTTP_11));
}

#[tokio::test]
async fn a_server_of_another_authority_gets_no_request() {
    let (authority, other, folder) = (Authority::new(), Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&other, |_| Reply::json(200, object("a"))).await;
    let file = server.kubeconfig(folder.path(), &authority, "token: sesame");
    let error = objects(&connect(&file).main).get("a").await.expect_err("no trust");
    assert!(format!("{error:?} {error}").contains("invalid peer certificate"), "{error:?}");
    assert!(server.seen().is_empty());
    let text = std::fs::read_to_string(&file).expect("a kubeconfig");
    let text = text.replace("certificate-authority: ca.crt", "insecure-skip-tls-verify: true");
    std::fs::write(&file, text).expect("written");
    objects(&connect(&file).main).get("a").await.expect("a server that is not verified");
}

#[tokio::test]
async fn a_rotated_certificate_is_used_on_new_connections_and_the_watch_resumes() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |seen: &Seen| {
        let line = |kind: &str, object: Value| format!("{}\n", json!({"type": kind, "object": object}));
        let mut mark = object("");
        mark["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        match (seen.path.contains("sendInitialEvents"), seen.client.as_deref()) {
            (true, _) => Reply::Open(line("ADDED", object("a")) + &line("BOOKMARK", mark)),
            (false, Some("second")) => Reply::Open(line("ADDED", object("b"))),
            (false, _) => Reply::json(403, json!({"kind": "Status", "code": 403})),
        }
    })
    .await;
    write_pair(folder.path(), authority.issue("first"));
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, PAIR)).expect("access");
    let files = Files { certificate: access.certificate.clone(), authority: None };
    let api = connect(&server.kubeconfig(folder.path(), &authority, PAIR));
    let mut events = std::pin::pin!(watch::follow(objects(&api.main), Config::default(), api.recovered()));
    for expected in ["init", "a", "done"] {
        let seen = match events.next().await.expect("an event") {
            Event::Init => "init".to_owned(),
            Event::InitDone => "done".to_owned(),
            Event::InitApply(object) | Event::Apply(object) => object.metadata.name.unwrap_or_default(),
            Event::InitKeep(object) | Event::Delete(object) => object.name,
        };
        assert_eq!(seen, expected);
    }
    files.reload(&api).expect("nothing new");
    assert_eq!(server.seen().len(), 1);
    std::fs::write(folder.path().join("client.pem"), "half a file").expect("written");
    files.reload(&api).expect_err("no pair");
    write_pair(folder.path(), authority.issue("second"));
    files.reload(&api).expect("a new pair");
    let event = events.next().await.expect("an event");
    assert!(matches!(event, Event::Apply(object) if object.metadata.name.as_deref() == Some("b")));
    let last = server.seen().pop().expect("requests");
    assert_eq!((last.connection, last.client.as_deref()), (2, Some("second")));
    assert!(last.path.contains("resourceVersion=7"), "{}", last.path);
}

#[tokio::test]
async fn watches_beyond_the_stream_limit_do_not_block_other_requests() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |seen: &Seen| match seen.path.contains("watch") {
        true => Reply::Hang,
        false => Reply::json(200, object("a")),
    })
    .await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "token: t"));
    let watches: Vec<_> = (0..250)
        .map(|_| {
            let objects = objects(&api.main);
            tokio::spawn(async move { objects.watch(&Default::default(), "0").await.map(drop) })
        })
        .collect();
    let seen = server.until(|seen| seen.len() == 250).await;
    let connections = seen.iter().map(|request| request.connection).max();
    assert!(connections.is_some_and(|count| (4..8).contains(&count)), "{connections:?}");
    let answer = tokio::time::timeout(Duration::from_secs(5), objects(&api.main).get("a")).await;
    answer.expect("in time").expect("an answer");
    watches.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn requests_succeed_when_the_server_is_back() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_| Reply::json(200, object("a"))).await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "token: t"));
    objects(&api.main).get("a").await.expect("an answer");
    let address = server.address;
    drop(server);
    let mut refused = 0;
    while refused < 3 {
        match tokio::time::timeout(Duration::from_secs(5), objects(&api.main).get("a")).await.expect("in time") {
            Ok(_) => tokio::task::yield_now().await,
            Err(_) => refused += 1,
        }
    }
    let server = TestServer::start_at(&authority, address, |_| Reply::json(200, object("b"))).await;
    let found = objects(&api.main).get("a").await.expect("an answer");
    assert_eq!(found.metadata.name.as_deref(), Some("b"));
    drop(server);
}

#[tokio::test]
async fn a_heartbeat_times_out_and_the_next_one_uses_a_new_connection() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |seen: &Seen| match seen.connection {
        1 => Reply::Hang,
        _ => Reply::json(200, object("a")),
    })
    .await;
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "token: t")).expect("access");
    let metrics = Metrics::new();
    let api = ApiServer::connect(&access, &options(), metrics.clone(), CancellationToken::new()).expect("clients");
    let began = std::time::Instant::now();
    let error = objects(&api.heartbeat).get("a").await.expect_err("no answer");
    assert!(format!("{error:?}").contains("RequestTimeout"), "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    objects(&api.heartbeat).get("a").await.expect("an answer on another connection");
    let (text, host) = (metrics.render().expect("metrics"), server.address);
    for line in [
        format!("rest_client_requests_total{{code=\"<error>\",host=\"{host}\",method=\"GET\"}} 1"),
        format!("rest_client_requests_total{{code=\"200\",host=\"{host}\",method=\"GET\"}} 1"),
        format!("rest_client_request_duration_seconds_count{{host=\"{host}\",verb=\"GET\"}} 2"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} not in {text}");
    }
}

#[tokio::test]
async fn retry_after_is_honoured_with_the_same_audit_id() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let tries = AtomicUsize::new(0);
    let server = TestServer::start(&authority, move |_| match tries.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::Answer(429, vec![("retry-after", "0".to_owned())], String::new()),
        1 => Reply::Answer(503, vec![("retry-after", "0".to_owned())], String::new()),
        2 => Reply::json(200, object("a")),
        _ => Reply::json(500, json!({"kind": "Status", "code": 500})),
    })
    .await;
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "token: t")).expect("access");
    let metrics = Metrics::new();
    let api = ApiServer::connect(&access, &options(), metrics.clone(), CancellationToken::new()).expect("clients");
    objects(&api.main).get("a").await.expect("an answer at last");
    objects(&api.main).get("a").await.expect_err("500 without a time is final");
    let seen = server.seen();
    assert_eq!(seen.len(), 4);
    assert_eq!(seen[0].headers["audit-id"], seen[2].headers["audit-id"]);
    let text = metrics.render().expect("metrics");
    for line in [
        format!("rest_client_requests_total{{code=\"429\",host=\"{}\",method=\"GET\"}} 1", server.address),
        format!("rest_client_request_retries_total{{code=\"503\",host=\"{}\",verb=\"GET\"}} 1", server.address),
        format!("rest_client_request_retries_total{{code=\"200\",host=\"{}\",verb=\"GET\"}} 1", server.address),
        format!("rest_client_request_duration_seconds_count{{host=\"{}\",verb=\"GET\"}} 2", server.address),
    ] {
        assert!(text.contains(&line), "{line} not in {text}");
    }
    assert!(!text.contains("retries_total{code=\"429\""), "the first attempt is no retry: {text}");
}

#[tokio::test]
async fn requests_after_a_graceful_goaway_use_another_connection() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let made = serde_json::from_value(object("a")).expect("an object");
    let first = FirstConnection::GoAway(0);
    let server = TestServer::start_failing(&authority, first, |_| Reply::json(201, object("a"))).await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "token: t"));
    objects(&api.main).create(&PostParams::default(), &made).await.expect("an answer");
    assert_eq!(server.seen().iter().map(|seen| seen.connection).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn a_replaced_token_is_used_after_a_401() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |seen: &Seen| match seen.headers["authorization"] == "Bearer new" {
        true => Reply::json(200, object("a")),
        false => Reply::json(401, json!({"kind": "Status", "code": 401})),
    })
    .await;
    std::fs::write(folder.path().join("token"), "old\n").expect("written");
    let api = connect(&server.kubeconfig(folder.path(), &authority, "tokenFile: token"));
    objects(&api.main).get("a").await.expect_err("refused");
    std::fs::write(folder.path().join("token"), "new\n").expect("written");
    objects(&api.main).get("a").await.expect_err("the file has just been read");
    // The next 401 comes when the token may be read again.
    let Authorizer::File(file) = &api.shared.authorizer else { panic!("a token file") };
    file.age(Duration::from_secs(11)).await;
    objects(&api.main).get("a").await.expect_err("still the old one, and refused");
    objects(&api.main).get("a").await.expect("the new token");
    std::fs::remove_file(folder.path().join("token")).expect("removed");
    file.age(Duration::from_secs(61)).await;
    objects(&api.main).get("a").await.expect("the last token while the file is missing");
}

#[tokio::test]
async fn beside_a_token_file_the_token_of_the_kubeconfig_counts_until_the_file_can_be_read() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_: &Seen| Reply::json(200, object("a"))).await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "tokenFile: token, token: inline"));
    let token = folder.path().join("token");
    let sent = async || {
        objects(&api.main).get("a").await.expect("an answer");
        server.seen().last().expect("a request").headers["authorization"].clone()
    };
    assert_eq!(sent().await, "Bearer inline", "there is no such file");
    std::fs::write(&token, " \n").expect("written");
    assert_eq!(sent().await, "Bearer inline", "an empty file is none");
    std::fs::write(&token, "filed\n").expect("written");
    assert_eq!(sent().await, "Bearer filed");
    let Authorizer::File(file) = &api.shared.authorizer else { panic!("a token file") };
    std::fs::remove_file(&token).expect("removed");
    file.age(Duration::from_secs(61)).await;
    assert_eq!(sent().await, "Bearer filed", "what was read last, not what stands in the kubeconfig");
}

#[tokio::test]
async fn watches_resume_when_a_request_is_authenticated() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let known = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let knows = known.clone();
    let server = TestServer::start(&authority, move |seen: &Seen| match knows.load(Ordering::SeqCst) {
        true if seen.path.contains("watch=true") => {
            Reply::Open(format!("{}\n", json!({"type": "ADDED", "object": object("a")})))
        }
        true => Reply::json(200, object("a")),
        false => Reply::json(401, json!({"kind": "Status", "code": 401})),
    })
    .await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "token: t"));
    objects(&api.main).get("a").await.expect_err("refused");
    let mut events = std::pin::pin!(watch::follow(objects(&api.main), Config::default(), api.recovered()));
    let early = tokio::time::timeout(Duration::from_millis(300), events.next()).await;
    assert!(early.is_err(), "it waits");
    assert_eq!(server.seen().len(), 1, "and sends no further request");
    known.store(true, Ordering::SeqCst);
    objects(&api.heartbeat).get("a").await.expect("known");
    let began = std::time::Instant::now();
    assert!(matches!(events.next().await, Some(Event::Init)));
    assert!(matches!(events.next().await, Some(Event::InitApply(_))));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_token_in_the_kubeconfig_is_read_again_after_a_refusal() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |seen: &Seen| match seen.headers["authorization"] == "Bearer new" {
        true => Reply::json(200, object("a")),
        false => Reply::json(401, json!({"kind": "Status", "code": 401})),
    })
    .await;
    let file = server.kubeconfig(folder.path(), &authority, "token: old");
    let api = connect(&file);
    objects(&api.main).get("a").await.expect_err("refused");
    let Authorizer::File(token) = &api.shared.authorizer else { panic!("a token in a file") };
    for text in ["{", "users: []"] {
        std::fs::write(&file, text).expect("written");
        token.age(Duration::from_secs(11)).await;
        for _ in 0..2 {
            let error = objects(&api.main).get("a").await.expect_err("nothing new");
            assert!(matches!(error, kube::Error::Api(status) if status.code == 401), "the last token is used on");
        }
    }
    server.kubeconfig(folder.path(), &authority, "token: new");
    token.age(Duration::from_secs(11)).await;
    objects(&api.main).get("a").await.expect_err("still the old one, and refused");
    objects(&api.main).get("a").await.expect("the new token");
}

#[tokio::test]
async fn transports_authorities_and_look_ups_are_counted() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_| Reply::json(200, object("a"))).await;
    let file = server.kubeconfig(folder.path(), &authority, "token: t");
    let text = std::fs::read_to_string(&file).expect("a kubeconfig");
    std::fs::write(&file, text.replace("127.0.0.1", "localhost")).expect("written");
    let access = kubeconfig::load(&file).expect("access");
    let (metrics, cancel) = (Metrics::new(), CancellationToken::new());
    let api = ApiServer::connect(&access, &options(), metrics.clone(), cancel.clone()).expect("clients");
    objects(&api.main).get("a").await.expect("an answer");
    let (_, roots) = tls::client_config(&access, &Identity::default()).expect("a configuration");
    let files = Files { certificate: None, authority: access.authority.clone().zip(roots) };
    files.reload(&api).expect("nothing has changed");
    server.kubeconfig(folder.path(), &Authority::new(), "token: t");
    files.reload(&api).expect("another one");
    for content in ["", "-----BEGIN CERTIFICATE-----\nnonsense"] {
        std::fs::write(folder.path().join("ca.crt"), content).expect("written");
        files.reload(&api).expect_err(content);
    }
    std::fs::remove_file(folder.path().join("ca.crt")).expect("removed");
    files.reload(&api).expect_err("nothing to read");
    cancel.cancel();
    drop(api);
    let text = metrics.render().expect("metrics");
    for line in [
        "rest_client_transport_create_calls_total{result=\"miss\"} 1",
        "rest_client_transport_create_calls_total{result=\"hit\"} 3",
        "rest_client_dns_resolution_duration_seconds_count{host=\"localhost\"} 1",
        "rest_client_transport_ca_reload_total{reason=\"unchanged\",result=\"success\"} 1",
        "rest_client_transport_ca_reload_total{reason=\"updated\",result=\"success\"} 1",
        "rest_client_transport_ca_reload_total{reason=\"empty\",result=\"failure\"} 1",
        "rest_client_transport_ca_reload_total{reason=\"ca_parse_error\",result=\"failure\"} 1",
        "rest_client_transport_ca_reload_total{reason=\"read_error\",result=\"failure\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn a_plugin_may_bring_the_certificate() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_| Reply::json(200, object("a"))).await;
    let (certificate, key) = authority.issue("from-plugin");
    let credential = json!({
        "kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1",
        "status": {"clientCertificateData": certificate, "clientKeyData": key},
    });
    std::fs::write(folder.path().join("credential"), credential.to_string()).expect("written");
    let user = format!(
        "exec: {{command: cat, args: ['{}'], apiVersion: client.authentication.k8s.io/v1}}",
        folder.path().join("credential").display()
    );
    let api = connect(&server.kubeconfig(folder.path(), &authority, &user));
    objects(&api.main).get("a").await.expect("an answer");
    assert_eq!(server.seen()[0].client.as_deref(), Some("from-plugin"));
}

#[tokio::test]
async fn requests_go_out_anonymously_until_there_is_a_certificate() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |seen: &Seen| match seen.client {
        Some(_) => Reply::json(200, object("a")),
        None => Reply::json(401, json!({"kind": "Status", "code": 401})),
    })
    .await;
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "")).expect("access");
    let (metrics, cancel) = (Metrics::new(), CancellationToken::new());
    let api = ApiServer::with_identity(&access, Identity::default(), &options(), metrics, cancel).expect("clients");
    let mut recovered = api.recovered();
    let refused = tokio::time::timeout(Duration::from_secs(5), objects(&api.main).get("a")).await.expect("no wait");
    assert!(refused.is_err_and(|error| error.to_string().contains("401")));
    assert_eq!(server.seen().last().and_then(|seen| seen.client.clone()), None);
    write_pair(folder.path(), authority.issue("system:node:n"));
    let pair = std::fs::read_to_string(folder.path().join("client.pem")).expect("a pair");
    assert!(api.identify(Arc::new(tls::certified_key(&pair, &pair).expect("a pair"))));
    let woken = tokio::time::timeout(Duration::from_secs(5), recovered.wait(Duration::from_secs(60))).await;
    woken.expect("waiting callers retry");
    objects(&api.main).get("a").await.expect("an answer");
    let last = server.seen().pop().expect("requests");
    assert_eq!(
        (last.connection, last.client.as_deref()),
        (2, Some("system:node:n")),
        "the first one knew no certificate"
    );
}

/// The address of a proxy that refuses connections: the port was free a moment ago.
async fn closed_port() -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("an address")
}

#[tokio::test]
async fn a_server_at_a_loopback_address_needs_no_proxy_of_the_environment() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_| Reply::json(200, object("a"))).await;
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "token: t")).expect("access");
    let closed = format!("http://{}", closed_port().await);
    let dialer = |proxy_url: Option<&str>| {
        let (tls, _) = tls::client_config(&access, &Identity::default()).expect("a configuration");
        let proxies = Proxies::from_variables(|name| (name == "HTTPS_PROXY").then(|| closed.clone()));
        let proxy = proxy_url.map(|url| url.parse().expect("a URL"));
        let dialing = Dialing { tls, server_name: None, proxy, proxies, http2: true, metrics: Metrics::new() };
        Dialer::new(dialing, &access.server)
    };
    dialer(None).oneshot(access.server.clone()).await.expect("a connection without the proxy");
    let through = dialer(Some(closed.as_str())).oneshot(access.server.clone()).await;
    assert!(through.is_err(), "proxy-url of the kubeconfig is for all servers");
}

#[tokio::test]
async fn a_remote_server_is_reached_through_the_proxy_of_the_environment() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_| Reply::json(200, object("a"))).await;
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "token: t")).expect("access");
    let (tls, _) = tls::client_config(&access, &Identity::default()).expect("a configuration");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let proxies = Proxies::from_variables(|name| (name == "HTTPS_PROXY").then(|| address.clone()));
    let dialing = Dialing { tls, server_name: None, proxy: None, proxies, http2: true, metrics: Metrics::new() };
    let remote: http::Uri = "https://api.example:6443".parse().expect("a URL");
    let dialing = tokio::spawn(Dialer::new(dialing, &remote).oneshot(remote));
    let accepted = tokio::time::timeout(Duration::from_secs(20), listener.accept()).await.expect("in time");
    let (mut stream, _) = accepted.expect("a connection to the proxy");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        assert_ne!(stream.read_buf(&mut head).await.expect("a request to the proxy"), 0, "closed");
    }
    let head = String::from_utf8(head).expect("text");
    assert!(head.starts_with("CONNECT api.example:6443 "), "{head}");
    dialing.abort();
}
