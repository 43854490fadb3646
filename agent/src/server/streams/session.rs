//! Sessions that translate WebSocket (client) to SPDY (runtime).
//!
//! ```text
//!  exec, attach   v5 messages ══▶ translate ══ SPDY streams ══▶ streaming server of the runtime
//!  portForward    messages    ══▶ SPDY frames as they are  ══▶
//! ```

use std::io;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::http::Method;
use axum::http::Request;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::Response;
use futures_util::Sink;
use futures_util::Stream;
use futures_util::StreamExt as _;
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWrite;
use tokio::io::AsyncWriteExt as _;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::Message;

use super::super::InFlight;
use super::backend::Backend;
use super::params;
use super::params::Streams;
use super::proxy;
use super::refusal::Refusal;
use super::translate;
use super::translate::Protocol;
use super::websocket;
use super::websocket::Client;
use super::websocket::Keepalive;
use super::websocket::PendingHandshake;

const PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// Largest message of a tunnel to the client, in bytes.
const PIECE: usize = 16 * 1024;
/// Time to flush data to the runtime.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Accepts version 5 of the channel protocol, and translates it to the runtime's streams. Later errors of the runtime
/// are reported within the session.
///
/// # Errors
/// The request is not a WebSocket handshake.
pub(super) fn translated(url: &str, mut request: Request<Body>, streams: Streams) -> Result<Response, Refusal> {
    let backend = Backend::parse(url).map_err(|error| Refusal::internal(error.to_string()))?;
    let waiting = PendingHandshake::take(&mut request)?;
    let in_flight = request.extensions_mut().remove::<InFlight>();
    let (response, client) = waiting.accept_translated();
    tokio::spawn(async move {
        let _in_flight = in_flight;
        match client.await {
            Ok(client) => translate::carry(client, open(&backend), streams).await,
            Err(error) => tracing::debug!(%error, "a stream ended before it began"),
        }
    });
    Ok(response)
}

/// A SPDY connection to the streaming server, and the protocol that it chose.
async fn open(backend: &Backend) -> Result<(TokioIo<Upgraded>, Protocol), String> {
    let request = upgrade(backend, &Protocol::OFFERED.map(Protocol::name)).map_err(|error| error.to_string())?;
    let mut answer = proxy::send(backend, request).await?;
    let status = answer.status();
    if status.is_redirection() {
        return Err("redirect not allowed".to_owned());
    }
    if status != StatusCode::SWITCHING_PROTOCOLS || !is_spdy_upgrade(&answer) {
        let text = proxy::error_body(answer.into_body()).await;
        let text = String::from_utf8_lossy(&text).into_owned();
        return Err(format!("unable to upgrade connection: status code {}: {text}", status.as_u16()));
    }
    let chosen = protocol(&answer);
    let protocol = Protocol::chosen(&chosen);
    let protocol = protocol.ok_or_else(|| format!("the runtime chose a protocol that was not offered: {chosen:?}"))?;
    let connection = hyper::upgrade::on(&mut answer).await.map_err(|error| error.to_string())?;
    Ok((TokioIo::new(connection), protocol))
}

/// Tunnels SPDY frames in WebSocket messages. The client is answered when the runtime has accepted.
///
/// # Errors
/// The request is not a WebSocket handshake, or the runtime refuses.
pub(super) async fn tunnelled(
    url: &str,
    mut request: Request<Body>,
    protocols: &[String],
) -> Result<Response, Refusal> {
    let failed = |why: String| Refusal::internal(why);
    let backend = Backend::parse(url).map_err(|error| failed(error.to_string()))?;
    let waiting = PendingHandshake::take(&mut request)?;
    let mut outgoing = proxy::outgoing(&backend, &request).map_err(failed)?;
    *outgoing.method_mut() = Method::POST;
    let websocket: Vec<HeaderName> =
        outgoing.headers().keys().filter(|name| name.as_str().starts_with("sec-websocket-")).cloned().collect();
    for name in &websocket {
        outgoing.headers_mut().remove(name);
    }
    offer(&mut outgoing, protocols).map_err(|error| failed(error.to_string()))?;
    let mut answer = proxy::send(&backend, outgoing).await.map_err(failed)?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return proxy::refused(answer).await.map_err(failed);
    }
    if !is_spdy_upgrade(&answer) {
        return Err(Refusal::internal("unable to upgrade: missing upgrade headers in response"));
    }
    let (response, client) = waiting.accept_tunnel(protocols, &protocol(&answer));
    let runtime = hyper::upgrade::on(&mut answer);
    let in_flight = request.extensions_mut().remove::<InFlight>();
    tokio::spawn(async move {
        let _in_flight = in_flight;
        match tokio::try_join!(client, runtime) {
            Ok((client, runtime)) => tunnel(client, runtime).await,
            Err(error) => tracing::debug!(%error, "a stream ended before it began"),
        }
    });
    Ok(response)
}

/// Copies bytes in both directions until one side ends; buffers one message each.
async fn tunnel(mut client: Client, runtime: Upgraded) {
    let (from_runtime, mut to_runtime) = tokio::io::split(TokioIo::new(runtime));
    let (to_client, from_client) = (&mut client).split();
    let ended = tokio::select! {
        ended = into_frames(from_client, &mut to_runtime) => ended,
        ended = into_messages(from_runtime, to_client) => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a tunnel broke");
    }
    // Errors mean that the side is closed.
    let end = async move { tokio::time::timeout(SHUTDOWN_TIMEOUT, to_runtime.shutdown()).await };
    let _ = tokio::join!(websocket::close(client), end);
}

async fn into_frames(
    mut client: impl Stream<Item = Result<Message, Error>> + Unpin,
    runtime: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    while let Some(message) = client.next().await {
        match message.map_err(io::Error::other)? {
            Message::Binary(bytes) => {
                runtime.write_all(&bytes).await?;
                runtime.flush().await?;
            }
            Message::Close(_) => break,
            Message::Text(_) => return Err(io::Error::other("the client sent a text")),
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    }
    Ok(())
}

async fn into_messages(
    mut runtime: impl AsyncRead + Unpin,
    mut client: impl Sink<Message, Error = Error> + Unpin,
) -> io::Result<()> {
    let (mut piece, mut keepalive) = (vec![0; PIECE], Keepalive::default());
    loop {
        let message = tokio::select! {
            read = runtime.read(&mut piece) => match piece.get(..read?) {
                None | Some([]) => return Ok(()),
                Some(bytes) => Message::Binary(Bytes::copy_from_slice(bytes)),
            },
            ping = keepalive.next_ping() => ping,
        };
        websocket::send(&mut client, message).await.map_err(io::Error::other)?;
    }
}

/// The agent's own request for a SPDY connection.
fn upgrade(
    backend: &Backend,
    protocols: &[impl AsRef<str>],
) -> Result<Request<Empty<Bytes>>, header::InvalidHeaderValue> {
    let mut request = Request::new(Empty::new());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = backend.target.clone();
    request.headers_mut().insert(header::HOST, HeaderValue::try_from(backend.authority())?);
    offer(&mut request, protocols)?;
    Ok(request)
}

fn offer(request: &mut Request<Empty<Bytes>>, protocols: &[impl AsRef<str>]) -> Result<(), header::InvalidHeaderValue> {
    let headers = request.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("SPDY/3.1"));
    headers.remove(&PROTOCOL);
    for protocol in protocols {
        headers.append(PROTOCOL, HeaderValue::try_from(protocol.as_ref())?);
    }
    Ok(())
}

fn is_spdy_upgrade(answer: &axum::http::Response<Incoming>) -> bool {
    params::asks_for_upgrade(answer.headers()) && params::names_spdy(answer.headers())
}

fn protocol(answer: &axum::http::Response<Incoming>) -> String {
    let value = answer.headers().get(&PROTOCOL).and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_owned()
}
