//! Servers that misbehave: each costs no more than its timeout and the bounds of what is read.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use axum::Router;
use axum::routing::get;
use hyper_util::rt::TokioExecutor;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio_rustls::TlsAcceptor;

use super::server::Server;
use super::server::read_head;
use super::*;

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(60);

/// Answers every request with `head`, then writes `again` until the connection is closed.
async fn endless(head: &'static str, again: &'static [u8]) -> Server {
    Server::start(move |mut stream, _| async move {
        read_head(&mut stream).await;
        drop(stream.write_all(head.as_bytes()).await);
        while stream.write_all(again).await.is_ok() {}
    })
    .await
}

/// A server that sends these bytes in response to anything.
async fn speaking(words: &'static str) -> Server {
    Server::start(move |mut stream, _| async move {
        drop(stream.read_u8().await);
        drop(stream.write_all(words.as_bytes()).await);
        drop(stream.flush().await);
        // Closing at once would reset a connection with unread bytes.
        while stream.read_u8().await.is_ok() {}
    })
    .await
}

async fn silent() -> Server {
    Server::start(|stream, _| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await
}

fn https(server: &Server) -> HttpGet {
    probe(&HTTPGetAction { scheme: Some("HTTPS".into()), ..action("/", server.address.port()) })
}

#[tokio::test]
async fn a_response_may_have_many_headers() {
    const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n";
    let with = |count: usize| format!("{HEAD}{}\r\n", "a: b\r\n".repeat(count)).leak();
    let server = speaking(with(190)).await;
    let response = send(&request_to(server.address, "/"), LONG).await.expect("a response");
    assert_eq!(response.status, 200);
    let server = speaking(with(200)).await;
    let error = send(&request_to(server.address, "/"), LONG).await.expect_err("too many headers");
    assert!(matches!(error, HttpGetError::Exchange { .. }), "{error}");
}

#[tokio::test]
async fn headers_may_be_folded_or_have_a_space_before_their_colon() {
    let server = speaking("HTTP/1.1 200 OK\r\nSID : 0\r\nX-Folded: a\r\n b\r\nContent-Length: 2\r\n\r\nok").await;
    let response = send(&request_to(server.address, "/"), LONG).await.expect("a response");
    assert_eq!((response.status.as_u16(), &response.body[..]), (200, &b"ok"[..]));
}

#[tokio::test]
async fn a_server_that_never_answers_costs_the_timeout() {
    let server = silent().await;
    for request in [request_to(server.address, "/"), https(&server)] {
        let began = Instant::now();
        let error = send(&request, SHORT).await.expect_err("no answer");
        assert!(matches!(error, HttpGetError::Timeout { .. }), "{error}");
        assert!(began.elapsed() >= SHORT);
        let text = error.to_string();
        assert!(text.ends_with("(Client.Timeout exceeded while awaiting headers)"), "{text}");
    }
}

#[tokio::test]
async fn heads_are_bounded() {
    let many =
        endless("HTTP/1.1 200 OK\r\n", b"X-Filler: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n").await;
    let one = endless("HTTP/1.1 200 OK\r\nX-Filler: ", &[b'y'; 4096]).await;
    for server in [many, one] {
        let error = send(&request_to(server.address, "/"), LONG).await.expect_err("too long");
        assert!(matches!(error, HttpGetError::Exchange { .. }), "{error}");
    }
}

#[tokio::test]
async fn bodies_are_cut() {
    let server = endless("HTTP/1.1 200 OK\r\n\r\n", &[b'y'; 4096]).await;
    let response = send(&request_to(server.address, "/"), LONG).await.expect("a response");
    assert_eq!((response.status.as_u16(), response.body.len()), (200, MAX_BODY));
    let exact = format!("HTTP/1.1 200 OK\r\nContent-Length: 10241\r\n\r\n{}", "y".repeat(10241));
    let server = Server::answering(&[&exact]).await;
    let response = send(&request_to(server.address, "/"), LONG).await.expect("a response");
    assert_eq!(response.body.len(), 10240);
}

#[tokio::test]
async fn broken_bodies_are_distinguished_from_other_failures() {
    let short = Server::answering(&["HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"]).await;
    let error = send(&request_to(short.address, "/"), LONG).await.expect_err("the body is short");
    assert!(matches!(error, HttpGetError::Body { .. }), "{error}");
    let dripping = Server::start(|mut stream, _| async move {
        read_head(&mut stream).await;
        drop(stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok").await);
        std::future::pending::<()>().await;
    })
    .await;
    let error = send(&request_to(dripping.address, "/"), SHORT).await.expect_err("the body does not end");
    assert!(matches!(error, HttpGetError::Body { .. }), "{error}");
}

#[tokio::test]
async fn refusals_resets_and_garbage_are_failures() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let error = send(&request_to(closed, "/"), LONG).await.expect_err("no listener");
    let expected = format!("Get \"http://{closed}/\": dial tcp {closed}: connect: connection refused");
    assert_eq!(error.to_string(), expected);
    let resetting = Server::start(|mut stream, _| async move {
        read_head(&mut stream).await;
        let socket = socket2::SockRef::from(&stream);
        socket.set_linger(Some(Duration::ZERO)).expect("it can be reset");
    })
    .await;
    let closing = Server::answering(&[""]).await;
    let garbage = Server::answering(&["SSH-2.0-OpenSSH_9.9\r\n\r\n"]).await;
    for server in [resetting, closing, garbage] {
        let error = send(&request_to(server.address, "/"), LONG).await.expect_err("no response");
        assert!(matches!(error, HttpGetError::Exchange { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_server_without_tls_is_recognized() {
    let server = speaking("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
    let error = send(&https(&server), LONG).await.expect_err("it has no TLS");
    assert!(matches!(error, HttpGetError::HttpResponseToHttps { .. }), "{error}");
    let plain = send(&https(&server).without_tls(), LONG).await.expect("a response");
    assert_eq!(plain.status.as_u16(), 400);
    let other = speaking("SSH-2.0-OpenSSH_9.9\r\n").await;
    let error = send(&https(&other), LONG).await.expect_err("it has no TLS");
    assert!(matches!(error, HttpGetError::Tls { .. }), "{error}");
}

/// An HTTPS server with a certificate of its own for another name.
async fn self_signed(protocols: &[&[u8]]) -> Server {
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let own = rcgen::generate_simple_self_signed(["elsewhere".to_owned()]).expect("a certificate");
    let key = own.signing_key.serialize_der().try_into().expect("a key");
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![own.cert.der().clone()], key);
    let mut config = config.expect("a configuration");
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    Server::start(move |stream, _| {
        let acceptor = acceptor.clone();
        async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let version = |request: axum::extract::Request| async move { format!("{:?}", request.version()) };
            let service = hyper_util::service::TowerToHyperService::new(Router::new().route("/", get(version)));
            let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            drop(builder.serve_connection(TokioIo::new(stream), service).await);
        }
    })
    .await
}

#[tokio::test]
async fn certificates_are_not_verified_and_probes_offer_http2() {
    for (protocols, expected) in [(&[&b"h2"[..], b"http/1.1"][..], "HTTP/2.0"), (&[], "HTTP/1.1")] {
        let server = self_signed(protocols).await;
        let response = send(&https(&server), LONG).await.expect("a response");
        assert_eq!((response.status.as_u16(), &response.body[..]), (200, expected.as_bytes()));
        let action = HTTPGetAction { scheme: Some("HTTPS".into()), ..action("/", server.address.port()) };
        let hook = HttpGet::new(&action, &[], "127.0.0.1", &Caller::hook("v1.36.3")).expect("a request");
        let response = send(&hook, LONG).await.expect("a response");
        assert_eq!(&response.body[..], b"HTTP/1.1");
    }
}
