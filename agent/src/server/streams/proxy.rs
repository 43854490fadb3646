//! Proxies one upgraded connection to the runtime's streaming server, byte by byte.
//!
//! Owns the handshake and both directions; SPDY and the WebSocket protocols that runtimes support pass through. Uses
//! two small buffers per connection, with back-pressure.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::http::Request;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;
use http_body_util::BodyExt as _;
use http_body_util::Empty;
use http_body_util::Limited;
use hyper::body::Bytes;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;

use super::super::InFlight;
use super::super::secure::Peer;
use super::backend::Backend;
use super::params;
use super::refusal::Refusal;

/// Timeout and size limit of a refusing backend's body.
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(10);
const ERROR_BODY_LIMIT: usize = 64 * 1024;
/// Timeout of the streaming server's answer to the upgrade request.
const ANSWER: Duration = Duration::from_secs(60);
/// Time to flush one side after the other side has ended.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Forwards the client's request to `url`, and joins the connections if the backend accepts the upgrade.
pub(super) async fn proxy(url: &str, request: Request<Body>) -> Response {
    let backend = match Backend::parse(url) {
        Ok(backend) => backend,
        Err(error) => return Refusal::internal(error.to_string()).into(),
    };
    if !params::asks_for_upgrade(request.headers()) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "Upgrade request required\n").into_response();
    }
    match forward(&backend, request).await {
        Ok(response) => response,
        Err(text) => Refusal::internal(text).into(),
    }
}

async fn forward(backend: &Backend, mut request: Request<Body>) -> Result<Response, String> {
    let client = request.extensions_mut().remove::<OnUpgrade>();
    let client = client.ok_or("unable to upgrade: the connection cannot be taken over")?;
    let outgoing = outgoing(backend, &request)?;
    let mut answer = send(backend, outgoing).await?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        let upgraded = hyper::upgrade::on(&mut answer);
        let in_flight = request.extensions_mut().remove::<InFlight>();
        tokio::spawn(async move {
            let _in_flight = in_flight;
            match tokio::try_join!(client, upgraded) {
                Ok((client, backend)) => join(client, backend).await,
                Err(error) => tracing::debug!(%error, "a stream ended before it began"),
            }
        });
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *response.headers_mut() = std::mem::take(answer.headers_mut());
        return Ok(response);
    }
    refused(answer).await
}

/// The request to the backend: the client's, with another target.
///
/// # Errors
/// A header is invalid.
pub(super) fn outgoing(backend: &Backend, request: &Request<Body>) -> Result<Request<Empty<Bytes>>, String> {
    let mut headers = request.headers().clone();
    // The body was read already.
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::TRANSFER_ENCODING);
    if let Some(peer) = request.extensions().get::<Peer>().and_then(|peer| peer.address) {
        append_forwarded(&mut headers, peer);
    }
    if !headers.contains_key(header::HOST) {
        headers.insert(header::HOST, HeaderValue::from_static("localhost"));
    }
    let mut outgoing = Request::new(Empty::new());
    *outgoing.method_mut() = request.method().clone();
    *outgoing.uri_mut() = backend.target.clone();
    *outgoing.headers_mut() = headers;
    Ok(outgoing)
}

fn append_forwarded(headers: &mut HeaderMap, peer: SocketAddr) {
    let before = headers.get_all(&FORWARDED_FOR).iter().filter_map(|value| value.to_str().ok());
    let all: Vec<String> = before.map(str::to_owned).chain([peer.ip().to_string()]).collect();
    if let Ok(value) = HeaderValue::from_str(&all.join(", ")) {
        headers.insert(FORWARDED_FOR, value);
    }
}

/// Sends a request on a connection of its own.
///
/// # Errors
/// The streaming server cannot be reached or does not answer.
pub(super) async fn send(
    backend: &Backend,
    request: Request<Empty<Bytes>>,
) -> Result<axum::http::Response<Incoming>, String> {
    let answer = tokio::time::timeout(ANSWER, ask(backend, request)).await;
    answer.map_err(|_| "error proxying to the streaming server: it does not answer".to_owned())?
}

async fn ask(backend: &Backend, request: Request<Empty<Bytes>>) -> Result<axum::http::Response<Incoming>, String> {
    let stream = backend.connect().await.map_err(|error| error.to_string())?;
    let handshake = hyper::client::conn::http1::Builder::new().max_buf_size(64 * 1024).handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|error| format!("error dialing backend: {error}"))?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "the connection to the streaming server ended");
        }
    });
    sender.send_request(request).await.map_err(|error| format!("error proxying to the streaming server: {error}"))
}

/// The backend refuses the upgrade: its response is passed to the client.
///
/// # Errors
/// The response is neither an upgrade nor an error.
pub(super) async fn refused(answer: axum::http::Response<Incoming>) -> Result<Response, String> {
    let status = answer.status();
    if !status.is_client_error() && !status.is_server_error() {
        return Err(format!("invalid upgrade response: status code {}", status.as_u16()));
    }
    let (mut head, body) = answer.into_parts();
    let body = error_body(body).await;
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::TRANSFER_ENCODING);
    head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    Ok(Response::from_parts(head, Body::from(body)))
}

/// The body of a refusing backend, within time and size limits.
pub(super) async fn error_body(body: Incoming) -> Bytes {
    let body = tokio::time::timeout(ERROR_BODY_TIMEOUT, Limited::new(body, ERROR_BODY_LIMIT).collect()).await;
    body.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes).unwrap_or_default()
}

/// Copies bytes in both directions until one side ends; then both are closed.
async fn join(client: Upgraded, backend: Upgraded) {
    let (mut from_client, mut to_client) = tokio::io::split(TokioIo::new(client));
    let (mut from_backend, mut to_backend) = tokio::io::split(TokioIo::new(backend));
    let ended = tokio::select! {
        ended = tokio::io::copy(&mut from_client, &mut to_backend) => ended,
        ended = tokio::io::copy(&mut from_backend, &mut to_client) => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a stream broke");
    }
    // Flushes both sides; errors mean that a side is closed.
    let last = async { tokio::join!(to_client.shutdown(), to_backend.shutdown()) };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, last).await;
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_streaming_server_that_does_not_answer_is_not_waited_for_any_longer() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let backend = Backend::parse(&format!("http://{}/x", silent.local_addr().unwrap())).unwrap();
        let began = Instant::now();
        let error = send(&backend, Request::new(Empty::new())).await.expect_err("no answer");
        assert_eq!(error, "error proxying to the streaming server: it does not answer");
        assert_eq!(began.elapsed(), ANSWER);
    }
}
