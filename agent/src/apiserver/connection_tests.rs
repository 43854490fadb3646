//! Connections that may be broken.

use hyper_rustls::MaybeHttpsStream;
use socket2::SockRef;

use super::*;

/// Other requests than watches, such as heartbeats, get no answer.
fn reply(seen: &Seen) -> Reply {
    match seen.path.contains("watch=true") {
        true => Reply::Open(format!("{}\n", json!({"type": "ADDED", "object": object("a")}))),
        false => Reply::Hang,
    }
}

/// Whether a watch ends when connections are retired after a heartbeat without an answer.
async fn ends_watch(api: &ApiServer) -> bool {
    let mut events = std::pin::pin!(objects(&api.main).watch(&Default::default(), "0").await.expect("a watch"));
    events.next().await.expect("an event").expect("an object");
    objects(&api.heartbeat).get("a").await.expect_err("no answer");
    api.retire_connections();
    futures_util::poll!(events.next()).is_ready()
}

#[tokio::test]
async fn watches_on_connections_without_pings_end_after_failures_of_heartbeats() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start_http1(&authority, reply).await;
    assert!(ends_watch(&connect(&server.kubeconfig(folder.path(), &authority, "token: t"))).await);
    let server = TestServer::start(&authority, reply).await;
    assert!(!ends_watch(&connect(&server.kubeconfig(folder.path(), &authority, "token: t"))).await, "HTTP/2");
}

#[tokio::test]
async fn silent_connections_are_probed_as_by_a_kubelet() {
    tls::install_crypto();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let server: http::Uri = format!("http://{address}").parse().expect("a URL");
    let tls = rustls::ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty());
    let (tls, proxies) = (tls.with_no_client_auth(), Proxies::from_variables(|_| None));
    let dialing = Dialing { tls, server_name: None, proxy: None, proxies, http2: true, metrics: Metrics::new() };
    let stream = Dialer::new(dialing, &server).oneshot(server).await.expect("a connection");
    let MaybeHttpsStream::Http(tcp) = &stream else { panic!("without TLS") };
    let socket = SockRef::from(tcp.inner());
    assert_eq!(socket.tcp_keepalive_time().expect("an option"), Duration::from_secs(30));
    assert_eq!(socket.tcp_keepalive_interval().expect("an option"), Duration::from_secs(15));
    assert_eq!(socket.tcp_keepalive_retries().expect("an option"), 9);
}

/// INTERNAL_ERROR of HTTP/2.
const BROKEN_SERVER: FirstConnection = FirstConnection::GoAway(2);

/// As by client-go: a server that ends, or a proxy before it, may break a connection at any time.
#[tokio::test]
async fn only_reads_are_sent_again_when_their_connection_breaks() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let made = serde_json::from_value(object("a")).expect("an object");
    let first = [FirstConnection::Reset, FirstConnection::Close, BROKEN_SERVER];
    for (first, is_read) in first.into_iter().flat_map(|first| [(first, true), (first, false)]) {
        let server = TestServer::start_failing(&authority, first, |_| Reply::json(200, object("a"))).await;
        let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "token: t")).expect("access");
        let metrics = Metrics::new();
        let api = ApiServer::connect(&access, &options(), metrics.clone(), CancellationToken::new()).expect("clients");
        let objects = objects(&api.main);
        let answer = if is_read { objects.get("a").await } else { objects.create(&PostParams::default(), &made).await };
        assert_eq!(answer.is_ok(), is_read, "{first:?}: {answer:?}");
        let connections = if is_read { vec![2] } else { Vec::new() };
        assert_eq!(server.seen().iter().map(|seen| seen.connection).collect::<Vec<_>>(), connections, "{first:?}");
        let (text, host) = (metrics.render().expect("metrics"), server.address);
        let retry = format!("rest_client_request_retries_total{{code=\"200\",host=\"{host}\",verb=\"GET\"}} 1");
        assert_eq!(text.lines().any(|line| line == retry), is_read, "{text}");
    }
}
