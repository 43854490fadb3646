//! The direction from the runtime to the client.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::Sink;
use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::Error as WebSocketError;
use tokio_tungstenite::tungstenite::Message;

use super::super::spdy::Frame;
use super::super::spdy::Frames;
use super::super::websocket;
use super::super::websocket::Keepalive;
use super::SessionError;
use super::channels::Channels;
use super::channels::ERROR;
use super::channels::STDERR;
use super::channels::STDOUT;
use super::channels::message;
use super::client_to_runtime::Control;
use super::idle::IdleTimer;

/// Time for the runtime to accept all streams.
pub(super) const ACCEPT: Duration = Duration::from_secs(30);
/// How long input from the runtime is waited for before it is pinged. A runtime whose output waits for a slow client is not
/// pinged: it may have closed the connection already, and its kernel discards output that is not sent yet when more input
/// arrives.
const PING: Duration = Duration::from_secs(5);
/// Largest result, in bytes.
pub(super) const RESULT_LENGTH: usize = 64 * 1024;
/// Bytes per read from the runtime and per message to the client.
const READ: usize = 16 * 1024;

const NO_RESULT: &str = "the runtime ended the stream without a result";

/// Ends with the result or an error.
pub(super) struct RuntimeToClient<'a> {
    pub(super) channels: &'a Channels,
    pub(super) idle: &'a IdleTimer,
    pub(super) controls: mpsc::Sender<Control>,
    pub(super) accepted: watch::Sender<bool>,
    /// Accepted streams that have not ended.
    pub(super) open: Vec<u32>,
    /// The result received so far.
    pub(super) result: Vec<u8>,
    /// The runtime has sent GOAWAY.
    pub(super) goaway: bool,
}

impl RuntimeToClient<'_> {
    /// Returns the contents of the error stream when it and all output have ended.
    ///
    /// # Errors
    /// The session broke, or ended without a result.
    pub(super) async fn run(
        mut self,
        mut backend: impl AsyncRead + Unpin,
        client: &mut (impl Sink<Message, Error = WebSocketError> + Unpin),
    ) -> Result<Vec<u8>, SessionError> {
        let mut buffer = BytesMut::new();
        let mut frames = Frames::default();
        let accepted = self.accept(&mut frames, &mut buffer, &mut backend);
        let accepted = tokio::time::timeout(ACCEPT, accepted).await;
        accepted.map_err(|_| SessionError::reported("the runtime did not accept the streams in time"))??;
        self.accepted.send_replace(true);
        let mut keepalive = Keepalive::default();
        loop {
            while let Some(frame) = frames.next(&mut buffer).map_err(SessionError::reported)? {
                if let Some(message) = self.frame(frame)? {
                    websocket::send(client, message).await.map_err(SessionError::client_closed)?;
                    self.idle.touch();
                }
                if self.is_over() {
                    return self.result(NO_RESULT);
                }
            }
            tokio::select! {
                biased;
                read = fill(&mut buffer, &mut backend) => match read {
                    Ok(true) => {}
                    Ok(false) => return self.result(NO_RESULT),
                    Err(error) => return self.result(&format!("the runtime's stream broke: {error}")),
                },
                // Counted from here: while a message waited for the client, nothing was read.
                () = tokio::time::sleep(PING) => self.control(Control::Ping),
                ping = keepalive.next_ping() => websocket::send(client, ping).await.map_err(SessionError::client_closed)?,
            }
        }
    }

    /// The result at the end of the connection. Runtimes may close it after the result; before version 4 of the
    /// protocol success is an orderly end without a result.
    fn result(self, missing: &str) -> Result<Vec<u8>, SessionError> {
        let in_order = self.goaway || self.channels.stream(ERROR).is_some_and(|stream| !self.open.contains(&stream));
        if self.result.is_empty() && !in_order { Err(SessionError::reported(missing)) } else { Ok(self.result) }
    }

    /// Waits until all streams were accepted. Other frames before that are an error.
    async fn accept(
        &mut self,
        frames: &mut Frames,
        buffer: &mut BytesMut,
        backend: &mut (impl AsyncRead + Unpin),
    ) -> Result<(), SessionError> {
        let mut missing: Vec<u32> = self.channels.streams().map(|(stream, _)| stream).collect();
        while !missing.is_empty() {
            match frames.next(buffer).map_err(SessionError::reported)? {
                Some(Frame::Reply { stream, last: false }) => {
                    if missing.contains(&stream) {
                        missing.retain(|one| *one != stream);
                        self.open.push(stream);
                    }
                }
                Some(Frame::Ping { id }) => self.pong(id),
                Some(Frame::Open { stream }) => self.control(Control::Refuse(stream)),
                Some(_) => return Err(SessionError::reported("the runtime did not accept the streams")),
                None => match fill(buffer, backend).await {
                    Ok(true) => {}
                    Ok(false) => {
                        return Err(SessionError::reported(
                            "the runtime closed the connection before it accepted the streams",
                        ));
                    }
                    Err(error) => {
                        return Err(SessionError::reported(format!("the runtime did not accept the streams: {error}")));
                    }
                },
            }
        }
        Ok(())
    }

    fn frame(&mut self, frame: Frame) -> Result<Option<Message>, SessionError> {
        match frame {
            Frame::Data { stream, bytes, last } => {
                let number = self.channels.number(stream).filter(|_| self.open.contains(&stream));
                if last {
                    self.close(stream);
                }
                match number {
                    Some(ERROR) if self.result.len() + bytes.len() > RESULT_LENGTH => {
                        return Err(SessionError::reported("the runtime's result is too long"));
                    }
                    Some(ERROR) => self.result.extend_from_slice(&bytes),
                    Some(number @ (STDOUT | STDERR)) if !bytes.is_empty() => return Ok(Some(message(number, &bytes))),
                    _ => {}
                }
            }
            Frame::Reply { stream, last: true } | Frame::Reset { stream } => self.close(stream),
            Frame::Ping { id } => self.pong(id),
            Frame::Open { stream } => self.control(Control::Refuse(stream)),
            Frame::GoAway => self.goaway = true,
            Frame::Reply { .. } => {}
        }
        Ok(None)
    }

    fn close(&mut self, stream: u32) {
        self.open.retain(|one| *one != stream);
    }

    /// Whether all output has ended; the client's own channels do not matter.
    fn is_over(&self) -> bool {
        !self.open.iter().any(|stream| matches!(self.channels.number(*stream), Some(STDOUT | STDERR | ERROR)))
    }

    /// Answers a ping. Our own pings have odd numbers, and their answers need none.
    fn pong(&self, id: u32) {
        if id.is_multiple_of(2) {
            self.control(Control::Pong(id));
        }
    }

    /// Queues a frame without waiting; frames beyond the queue's capacity are dropped.
    fn control(&self, control: Control) {
        let _ = self.controls.try_send(control);
    }
}

/// Reads more; false at the end.
async fn fill(buffer: &mut BytesMut, backend: &mut (impl AsyncRead + Unpin)) -> io::Result<bool> {
    buffer.reserve(READ);
    Ok(backend.read_buf(buffer).await? > 0)
}
