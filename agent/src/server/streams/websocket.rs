//! WebSockets that the agent speaks itself: who asks for one, and the handshake.
//!
//! Which protocol decides is on the first line of those offered; all others are the runtime's, and pass through.

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

/// The protocol of commands and attaching, with channels that can be closed one by one.
const V5: &str = "v5.channel.k8s.io";
/// What precedes the name of a protocol whose SPDY frames travel in messages.
const TUNNEL: &str = "SPDY/3.1+";
/// Bytes of a client's message, at most; clients cut what they send into pieces far smaller.
const MESSAGE: usize = 4 << 20;
/// Bytes read from a client in one go.
const BUFFER: usize = 16 << 10;
/// Bytes that wait for a client who does not read, at most: a message to it, and answers to its pings.
const UNREAD: usize = 256 << 10;
/// Time between two questions whether a client is there.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// Time for a client to end the conversation when the agent has; then the agent's side of the connection ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a slow client to read what was said, and to end the connection.
const CLOSE_TOTAL_TIMEOUT: Duration = Duration::from_secs(2 * 60);

/// kubectl takes every other end for a failure, whatever was said before.
const NORMAL: CloseFrame = CloseFrame { code: CloseCode::Normal, reason: Utf8Bytes::from_static("") };

/// A connection to a client, in messages.
pub(super) type Client = WebSocketStream<TokioIo<Upgraded>>;

/// The client offers the protocol that is translated.
pub(super) fn is_translated(headers: &HeaderMap) -> bool {
    params::asks_for_websocket(headers) && offered(headers).any(|name| name == V5)
}

/// The protocols that the client offers to speak through a tunnel.
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

/// A client who waits for the answer to its handshake.
pub(super) struct PendingHandshake {
    connection: OnUpgrade,
    /// What proves that its handshake was understood.
    accept: HeaderValue,
}

impl PendingHandshake {
    /// Takes the connection out of the request.
    ///
    /// # Errors
    /// The request is no handshake.
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

    /// The answer that agrees to translate.
    pub(super) fn accept_translated(self) -> (Response, impl Future<Output = hyper::Result<Client>> + use<>) {
        self.accept(Some(HeaderValue::from_static(V5)))
    }

    /// The answer that agrees to a tunnel, in the protocol that the runtime chose. One that the client did not offer
    /// cannot be named to it.
    pub(super) fn accept_tunnel(
        self,
        offered: &[String],
        chosen: &str,
    ) -> (Response, impl Future<Output = hyper::Result<Client>> + use<>) {
        let named = offered.iter().find(|name| *name == chosen);
        self.accept(named.and_then(|name| HeaderValue::try_from(format!("{TUNNEL}{name}")).ok()))
    }

    /// The answer, and the connection that there will be when it has been sent.
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

/// What a client can make the agent hold: a message that is not complete, and answers that it does not read.
pub(super) fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(BUFFER)
        .write_buffer_size(0)
        .max_write_buffer_size(UNREAD)
        .max_message_size(Some(MESSAGE))
        .max_frame_size(Some(MESSAGE))
}

/// Asks now and then whether the client is there. One that leaves while it is not read from, for what it said is not yet
/// taken, would be noticed by nothing else.
pub(super) struct Keepalive(Interval);

impl Default for Keepalive {
    fn default() -> Self {
        let mut interval = tokio::time::interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self(interval)
    }
}

impl Keepalive {
    /// The next question, when it is time. Can be dropped and called again.
    pub(super) async fn next_ping(&mut self) -> Message {
        self.0.tick().await;
        Message::Ping(Bytes::new())
    }
}

/// Sends a message when what waits before it has gone: answers to a client that asks much and does not listen may leave no
/// room for one.
pub(super) async fn send(
    client: &mut (impl Sink<Message, Error = Error> + Unpin),
    message: Message,
) -> Result<(), Error> {
    client.flush().await?;
    client.send(message).await
}

/// Ends the conversation. What the client still says is read and dropped until it has ended it too: a connection that is
/// closed while the other side speaks takes along what that side has not read yet. One who never ends it is left.
pub(super) async fn close<C: AsyncRead + AsyncWrite + Unpin>(mut client: WebSocketStream<C>) {
    let closing = async {
        send(&mut client, Message::Close(Some(NORMAL))).await?;
        // Whoever does not answer may wait for the end of the connection, or still have much to read.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, drain(&mut client)).await;
        client.get_mut().shutdown().await?;
        drain(&mut client).await;
        Ok::<_, Error>(())
    };
    if !matches!(tokio::time::timeout(CLOSE_TOTAL_TIMEOUT, closing).await, Ok(Ok(()))) {
        tracing::debug!("the client of a stream did not end it");
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
