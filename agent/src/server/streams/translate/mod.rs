//! Translates between the channels of a WebSocket and the streams of a SPDY connection.
//!
//! ```text
//!  client ── messages: channel byte, data ──▶ client_to_runtime  ── frames ──▶ streaming server of the runtime
//!         ◀────────────────────────────────── runtime_to_client ◀── frames ──
//! ```
//!
//! Owns the mapping of channels to streams, and the result at the end. Each direction buffers one message or one read
//! and waits for its receiver (back-pressure). The directions share no lock, so that neither blocks the other.

mod channels;
mod client_to_runtime;
mod idle;
mod protocol;
mod runtime_to_client;
#[cfg(test)]
mod tests;

use std::time::Duration;

use futures_util::SinkExt as _;
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio_tungstenite::WebSocketStream;

use self::channels::Channels;
use self::channels::ERROR;
use self::channels::message;
use self::client_to_runtime::ClientToRuntime;
use self::idle::IdleTimer;
pub(super) use self::protocol::Protocol;
use self::runtime_to_client::RuntimeToClient;
use super::params::Streams;
use super::status;
use super::websocket;

/// Timeout of sending the result to the client.
const RESULT: Duration = Duration::from_secs(10);
/// Queued control frames to the runtime; further ones are dropped.
const CONTROLS: usize = 16;

/// Why a session ends without a result.
#[derive(Debug)]
enum SessionError {
    /// The client has disconnected.
    ClientGone(String),
    /// The error is sent to the client.
    Reported(String),
}

impl SessionError {
    fn client_closed(error: impl ToString) -> Self {
        Self::ClientGone(error.to_string())
    }

    fn reported(error: impl ToString) -> Self {
        Self::Reported(error.to_string())
    }
}

/// Runs a session to its end, with the streams that the runtime expects, over the connection that `connect` opens.
/// Cancelling it drops both connections.
pub(super) async fn carry<C, B>(
    mut client: WebSocketStream<C>,
    connect: impl Future<Output = Result<(B, Protocol), String>>,
    streams: Streams,
) where
    C: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite,
{
    if let Err(error) = client.send(message(channels::ready_channel(streams), &[])).await {
        return tracing::debug!(%error, "the client of a stream disconnected");
    }
    let ended = match connect.await {
        Ok((backend, protocol)) => both_ways(&mut client, backend, &Channels::new(streams, protocol))
            .await
            .map(|result| status::translate(&result, protocol)),
        Err(why) => Err(SessionError::Reported(why)),
    };
    match ended {
        Ok(status) => result(client, &status).await,
        Err(SessionError::Reported(why)) => {
            tracing::debug!(why, "a stream broke");
            result(client, &status::failure(&why)).await;
        }
        Err(SessionError::ClientGone(why)) => tracing::debug!(why, "the client of a stream disconnected"),
    }
}

/// Returns the contents of the error stream. The connection to the runtime is closed then.
///
/// # Errors
/// The session broke, or ended without a result.
async fn both_ways<C, B>(
    client: &mut WebSocketStream<C>,
    backend: B,
    channels: &Channels,
) -> Result<Vec<u8>, SessionError>
where
    C: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite,
{
    let (mut to_client, mut from_client) = client.split();
    let (from_backend, to_backend) = tokio::io::split(backend);
    let (controls, waiting) = mpsc::channel(CONTROLS);
    let (accepted, all_accepted) = watch::channel(false);
    let idle = IdleTimer::default();
    let client_to_runtime = ClientToRuntime { channels, idle: &idle, controls: waiting, accepted: all_accepted };
    let runtime_to_client = RuntimeToClient {
        channels,
        idle: &idle,
        controls,
        accepted,
        open: Vec::new(),
        result: Vec::new(),
        goaway: false,
    };
    // Unbiased: a branch that is always polled first could starve the others.
    tokio::select! {
        result = runtime_to_client.run(from_backend, &mut to_client) => result,
        Err(error) = client_to_runtime.run(&mut from_client, to_backend) => Err(error),
        () = idle.ended() => Err(SessionError::reported("the session was idle for four hours")),
    }
}

/// Sends the result of the session to the client, within a timeout.
async fn result<C: AsyncRead + AsyncWrite + Unpin>(mut client: WebSocketStream<C>, status: &Value) {
    let message = message(ERROR, status.to_string().as_bytes());
    match tokio::time::timeout(RESULT, websocket::send(&mut client, message)).await {
        Ok(Ok(())) => websocket::close(client).await,
        _ => tracing::debug!("the client of a stream did not read its result"),
    }
}
