//! WebSockets that the agent terminates itself: detection and handshake (KEP-4006).
//!
//! The first `Sec-WebSocket-Protocol` header decides; all other protocols are passed through to the runtime.

use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::HeaderValue;
use axum::http::Method;
use axum::http::Request;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;
use bytes::Bytes;
use futures_util::Sink;
use futures_util::SinkExt as _;
use futures_util::StreamExt as _;
use hyper::upgrade::OnUpgrade;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::io::AsyncWriteExt as _;
use tokio::time::Instant;
use tokio::time::Interval;
use tokio::time::MissedTickBehavior;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::Utf8Bytes;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::params;
use super::refusal::Refusal;

/// The protocol of exec and attach in which single channels can be closed.
const V5: &str = "v5.channel.k8s.io";
/// Prefix of protocols that tunnel SPDY frames in messages.
const TUNNEL: &str = "SPDY/3.1+";
/// Largest message of a client, in bytes; clients send far smaller ones.
const MESSAGE: usize = 4 << 20;
/// Bytes per read from a client.
const BUFFER: usize = 16 << 10;
/// Bytes buffered for a client that does not read: one message, and answers to its pings.
const UNREAD: usize = 256 << 10;
/// Period of pings to the client.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// Time for the client's close frame after the agent's; then the agent shuts down its side of the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a slow client to read everything and close the connection.
const CLOSE_TOTAL_TIMEOUT: Duration = Duration::from_secs(2 * 60);

/// kubectl treats every other close code as a failure.
const NORMAL: CloseFrame = CloseFrame { code: CloseCode::Normal, reason: Utf8Bytes::from_static("") };

/// A WebSocket connection to a client.
pub(super) type Client = WebSocketStream<TokioIo<Upgraded>>;

/// Whether the client offers the protocol that is translated.
pub(super) fn is_translated(headers: &HeaderMap) -> bool {
    params::asks_for_websocket(headers) && offered(headers).any(|name| name == V5)
}

/// The protocols that the client offers through a tunnel.
pub(super) fn tunnelled(headers: &HeaderMap) -> Vec<String> {
    if !params::asks_for_websocket(headers) {
        return Vec::new();
    }
    let names = offered(headers).filter_map(|name| name.strip_prefix(TUNNEL)).filter(|name| name.ends_with(".k8s.io"));
    names.map(str::to_owned).collect()
}

fn offered(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let first = headers.get(header::SEC_WEBSOCKET_PROTOCOL).and_then(|line| line.to_str().ok()).unwrap_or_default();
    first.split(',').map(str::trim)
}

/// A handshake that is not answered yet.
pub(super) struct PendingHandshake {
    connection: OnUpgrade,
    /// The value of `Sec-WebSocket-Accept`.
    accept: HeaderValue,
}

impl PendingHandshake {
    /// Takes the connection out of the request.
    ///
    /// # Errors
    /// The request is not a WebSocket handshake.
    pub(super) fn take(request: &mut Request<Body>) -> Result<Self, Refusal> {
        let header = |name: &header::HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
        if request.method() != Method::GET || header(&header::SEC_WEBSOCKET_VERSION) != Some("13") {
            return Err(Refusal::bad("unable to upgrade: no WebSocket handshake of version 13"));
        }
        let accept = header(&header::SEC_WEBSOCKET_KEY).map(|key| derive_accept_key(key.as_bytes()));
        let accept = accept.and_then(|accept| HeaderValue::try_from(accept).ok());
        let accept = accept.ok_or_else(|| Refusal::bad("unable to upgrade: a WebSocket handshake without a key"))?;
        let connection = request.extensions_mut().remove::<OnUpgrade>();
        let connection =
            connection.ok_or_else(|| Refusal::internal("unable to upgrade: the connection cannot be taken over"))?;
        Ok(Self { connection, accept })
    }

    /// Accepts the translated protocol.
    pub(super) fn accept_translated(self) -> (Response, impl Future<Output = hyper::Result<Client>> + use<>) {
        self.accept(Some(HeaderValue::from_static(V5)))
    }

    /// Accepts a tunnel with the protocol that the runtime chose, if the client offered it.
    pub(super) fn accept_tunnel(
        self,
        offered: &[String],
        chosen: &str,
    ) -> (Response, impl Future<Output = hyper::Result<Client>> + use<>) {
        let named = offered.iter().find(|name| *name == chosen);
        self.accept(named.and_then(|name| HeaderValue::try_from(format!("{TUNNEL}{name}")).ok()))
    }

    /// The response, and the connection after it was sent.
    fn accept(self, protocol: Option<HeaderValue>) -> (Response, impl Future<Output = hyper::Result<Client>> + use<>) {
        let headers = [
            (header::CONNECTION, HeaderValue::from_static("Upgrade")),
            (header::UPGRADE, HeaderValue::from_static("websocket")),
            (header::SEC_WEBSOCKET_ACCEPT, self.accept),
        ];
        let mut response = (StatusCode::SWITCHING_PROTOCOLS, headers).into_response();
        if let Some(protocol) = protocol {
            response.headers_mut().insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
        }
        let client = async move {
            let connection = TokioIo::new(self.connection.await?);
            Ok(WebSocketStream::from_raw_socket(connection, Role::Server, Some(limits())).await)
        };
        (response, client)
    }
}

/// Bounds of the memory that a client can use: an incomplete message, and unread answers.
pub(super) fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(BUFFER)
        .write_buffer_size(0)
        .max_write_buffer_size(UNREAD)
        .max_message_size(Some(MESSAGE))
        .max_frame_size(Some(MESSAGE))
}

/// Pings the client periodically: otherwise a disconnected client is not detected while its input is not read.
pub(super) struct Keepalive(Interval);

impl Default for Keepalive {
    fn default() -> Self {
        let mut interval = tokio::time::interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self(interval)
    }
}

impl Keepalive {
    /// The next ping, when it is due. Can be cancelled.
    pub(super) async fn next_ping(&mut self) -> Message {
        self.0.tick().await;
        Message::Ping(Bytes::new())
    }
}

/// Sends a message after flushing the buffer, which answers to pings may have filled.
///
/// # Errors
/// The connection broke.
pub(super) async fn send(
    client: &mut (impl Sink<Message, Error = Error> + Unpin),
    message: Message,
) -> Result<(), Error> {
    client.flush().await?;
    client.send(message).await
}

/// Closes the connection. Further input is read and discarded until the client has closed it, too: closing a socket
/// with unread input would discard what the client has not read yet. Bounded by a timeout.
pub(super) async fn close<C: AsyncRead + AsyncWrite + Unpin>(mut client: WebSocketStream<C>) {
    let closing = async {
        send(&mut client, Message::Close(Some(NORMAL))).await?;
        // A client that does not answer may wait for the end of the connection, or still have much to read.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, drain(&mut client)).await;
        client.get_mut().shutdown().await?;
        drain(&mut client).await;
        Ok::<_, Error>(())
    };
    if !matches!(tokio::time::timeout(CLOSE_TOTAL_TIMEOUT, closing).await, Ok(Ok(()))) {
        tracing::debug!("the client of a stream did not close it");
    }
}

async fn drain<C: AsyncRead + AsyncWrite + Unpin>(client: &mut WebSocketStream<C>) {
    while client.next().await.is_some_and(|message| message.is_ok()) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offering(lines: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        for line in lines {
            headers.append(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(line));
        }
        headers
    }

    #[test]
    fn the_first_line_decides() {
        for (lines, expected) in [
            (&["v5.channel.k8s.io"][..], true),
            (&["v4.channel.k8s.io, v5.channel.k8s.io"], true),
            (&["v4.channel.k8s.io", "v5.channel.k8s.io"], false),
            (&["v4.channel.k8s.io"], false),
            (&[], false),
        ] {
            assert_eq!(is_translated(&offering(lines)), expected, "{lines:?}");
        }
        let mut spdy = offering(&["v5.channel.k8s.io"]);
        spdy.insert(header::UPGRADE, HeaderValue::from_static("SPDY/3.1"));
        assert!(!is_translated(&spdy));
    }

    #[test]
    fn tunnels_carry_spdy() {
        let both = offering(&["SPDY/3.1+portforward.k8s.io, SPDY/3.1+v2.portforward.k8s.io,SPDY/3.1+other"]);
        assert_eq!(tunnelled(&both), ["portforward.k8s.io", "v2.portforward.k8s.io"]);
        assert!(tunnelled(&offering(&["v4.channel.k8s.io"])).is_empty());
    }
}
