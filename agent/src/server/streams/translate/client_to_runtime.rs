//! The direction from the client to the runtime.

use std::convert::Infallible;
use std::io;

use futures_util::Stream;
use futures_util::StreamExt as _;
use tokio::io::AsyncWrite;
use tokio::io::AsyncWriteExt as _;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::Error as WebSocketError;
use tokio_tungstenite::tungstenite::Message;

use super::super::spdy;
use super::super::spdy::Writer;
use super::SessionError;
use super::channels::Channels;
use super::channels::ClientChannels;
use super::channels::ClientInput;
use super::idle::IdleTimer;

/// Largest frame to the runtime, in bytes.
const PART: usize = 32 * 1024;

/// Frames to the runtime that the other direction asks for.
#[derive(Debug)]
pub(super) enum Control {
    /// A ping of our own.
    Ping,
    /// The answer to a ping.
    Pong(u32),
    Refuse(u32),
}

/// Ends only with an error: results come in the other direction.
pub(super) struct ClientToRuntime<'a> {
    pub(super) channels: &'a Channels,
    pub(super) idle: &'a IdleTimer,
    pub(super) controls: mpsc::Receiver<Control>,
    /// Changes when all streams are accepted; data on a stream before that would be lost.
    pub(super) accepted: watch::Receiver<bool>,
}

impl ClientToRuntime<'_> {
    /// Forwards the client's input. When the runtime has closed the connection, the other direction finds out why.
    ///
    /// # Errors
    /// Always: the client has closed the session, or broke the protocol.
    pub(super) async fn run(
        self,
        client: &mut (impl Stream<Item = Result<Message, WebSocketError>> + Unpin),
        backend: impl AsyncWrite + Unpin,
    ) -> Result<Infallible, SessionError> {
        let idle = self.idle;
        if let Err(Ended::Client(error)) = self.carry(client, backend).await {
            return Err(error);
        }
        loop {
            received(client.next().await, idle)?;
        }
    }

    async fn carry(
        self,
        client: &mut (impl Stream<Item = Result<Message, WebSocketError>> + Unpin),
        mut backend: impl AsyncWrite + Unpin,
    ) -> Result<Infallible, Ended> {
        let Self { channels, idle, mut controls, mut accepted } = self;
        let (mut writer, mut out, mut writable) = (Writer::default(), Vec::new(), ClientChannels::new(channels));
        for (stream, channel) in channels.streams() {
            writer.open(&mut out, stream, &[("streamtype", channel.name)]);
        }
        let (mut ready, mut pings) = (false, (1_u32..).step_by(2));
        loop {
            send(&mut backend, &mut out).await?;
            tokio::select! {
                Some(control) = controls.recv() => match control {
                    Control::Ping => writer.ping(&mut out, pings.next().unwrap_or(1)),
                    Control::Pong(id) => writer.ping(&mut out, id),
                    Control::Refuse(stream) => writer.reset(&mut out, stream, spdy::REFUSED_STREAM),
                },
                _ = accepted.changed(), if !ready => ready = true,
                message = client.next(), if ready => match received(message, idle)?.and_then(|bytes| writable.input(bytes)) {
                    Some(ClientInput::Data { stream, bytes }) => {
                        for part in bytes.chunks(PART) {
                            writer.data(&mut out, stream, part, false);
                            send(&mut backend, &mut out).await?;
                        }
                    }
                    Some(ClientInput::End { stream }) => writer.data(&mut out, stream, &[], true),
                    None => {}
                },
            }
        }
    }
}

/// Which side has ended.
enum Ended {
    Client(SessionError),
    Runtime,
}

impl From<SessionError> for Ended {
    fn from(error: SessionError) -> Self {
        Self::Client(error)
    }
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Self {
        Self::Runtime
    }
}

async fn send(backend: &mut (impl AsyncWrite + Unpin), out: &mut Vec<u8>) -> io::Result<()> {
    if !out.is_empty() {
        backend.write_all(out).await?;
        backend.flush().await?;
        out.clear();
    }
    Ok(())
}

/// The payload of a client's message; `None` for control frames. Some clients send text messages.
///
/// # Errors
/// The client has closed the session, or broke the protocol.
fn received(
    message: Option<Result<Message, WebSocketError>>,
    idle: &IdleTimer,
) -> Result<Option<bytes::Bytes>, SessionError> {
    let bytes = match message {
        None | Some(Ok(Message::Close(_))) => return Err(SessionError::ClientGone("it ended the session".to_owned())),
        Some(Ok(Message::Binary(bytes))) => bytes,
        Some(Ok(Message::Text(text))) => text.into(),
        Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => return Ok(None),
        Some(Err(error @ (WebSocketError::Protocol(_) | WebSocketError::Capacity(_) | WebSocketError::Utf8(_)))) => {
            return Err(SessionError::Reported(format!("malformed message of the client: {error}")));
        }
        Some(Err(error)) => return Err(SessionError::client_closed(error)),
    };
    idle.touch();
    Ok(Some(bytes))
}
