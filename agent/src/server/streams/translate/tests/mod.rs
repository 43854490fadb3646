//! Sessions between a client and a runtime that are both scripted.

mod malformed;
mod sessions;

use std::collections::HashMap;

use bytes::BytesMut;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::io::DuplexStream;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::super::spdy::Frame;
use super::super::spdy::Frames;
use super::super::spdy::Writer;
use super::*;

const TIMEOUT: Duration = Duration::from_secs(20);
const OK: &[u8] = br#"{"metadata":{},"status":"Success"}"#;
const INPUT_AND_OUTPUT: Streams = Streams { stdin: true, stdout: true, stderr: false, tty: false };
const OUTPUT: Streams = Streams { stdin: false, ..INPUT_AND_OUTPUT };

/// The runtime's end of a session.
struct Runtime {
    connection: DuplexStream,
    buffer: BytesMut,
    frames: Frames,
    channels: Channels,
    /// Streams by name.
    streams: HashMap<&'static str, u32>,
}

struct Session {
    client: WebSocketStream<DuplexStream>,
    runtime: Runtime,
    agent: JoinHandle<()>,
}

impl Session {
    /// A session with buffers of this many bytes, whose runtime has not accepted the streams yet.
    async fn start(streams: Streams, room: usize) -> Self {
        Self::speaking(Protocol::V4, streams, room).await
    }

    async fn speaking(protocol: Protocol, streams: Streams, room: usize) -> Self {
        let (client, agents) = tokio::io::duplex(room);
        let (connection, to_runtime) = tokio::io::duplex(room);
        let server = WebSocketStream::from_raw_socket(agents, Role::Server, Some(websocket::limits())).await;
        let agent = tokio::spawn(carry(server, async move { Ok((to_runtime, protocol)) }, streams));
        let client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
        let channels = Channels::new(streams, protocol);
        let streams = channels.streams().map(|(stream, channel)| (channel.name, stream)).collect();
        let runtime = Runtime { connection, buffer: BytesMut::new(), frames: Frames::default(), channels, streams };
        Self { client, runtime, agent }
    }

    /// A session that has begun.
    async fn begun(streams: Streams, room: usize) -> Self {
        let mut session = Self::start(streams, room).await;
        assert_eq!(session.input().await.unwrap(), [channels::ready_channel(streams)], "there is a session");
        session.runtime.accept().await;
        session
    }

    /// The next message to the client, without pings.
    async fn input(&mut self) -> Option<Vec<u8>> {
        loop {
            match tokio::time::timeout(2 * idle::IDLE, self.client.next()).await.expect("in time")? {
                Ok(Message::Binary(bytes)) => return Some(bytes.to_vec()),
                Ok(Message::Close(_)) => {
                    // The answer is sent with the next message.
                    let _ = self.client.flush().await;
                    return None;
                }
                Err(_) => return None,
                Ok(Message::Ping(_) | Message::Pong(_)) => {}
                Ok(other) => panic!("{other:?}"),
            }
        }
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.client.send(Message::Binary(bytes.to_vec().into())).await.unwrap();
    }

    async fn result(&mut self) -> Value {
        let message = self.input().await.expect("a result");
        assert_eq!(message[0], ERROR);
        serde_json::from_slice(&message[1..]).unwrap()
    }

    /// Why it failed.
    async fn failure(&mut self) -> String {
        let result = self.result().await;
        assert_eq!((&result["status"], &result["code"]), (&"Failure".into(), &500.into()), "{result}");
        result["message"].as_str().unwrap().to_owned()
    }
}

impl Runtime {
    /// The next frame, pings included.
    async fn any_frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.frames.next(&mut self.buffer).unwrap() {
                return Some(frame);
            }
            let read = tokio::time::timeout(TIMEOUT, self.connection.read_buf(&mut self.buffer));
            if read.await.expect("in time").unwrap() == 0 {
                return None;
            }
        }
    }

    async fn frame(&mut self) -> Option<Frame> {
        loop {
            match self.any_frame().await {
                Some(Frame::Ping { .. }) => {}
                frame => return frame,
            }
        }
    }

    async fn accept(&mut self) {
        for (stream, _) in self.channels.clone().streams() {
            assert_eq!(self.frame().await, Some(Frame::Open { stream }));
            self.raw(&[&[0x80, 3, 0, 2, 0, 0, 0, 4][..], &stream.to_be_bytes()].concat()).await;
        }
    }

    async fn raw(&mut self, bytes: &[u8]) {
        self.connection.write_all(bytes).await.unwrap();
    }

    async fn send(&mut self, stream: &str, bytes: &[u8], last: bool) {
        let mut out = Vec::new();
        Writer::default().data(&mut out, self.streams[stream], bytes, last);
        self.raw(&out).await;
    }

    /// The data of a stream, to its end or up to this length.
    async fn receive(&mut self, stream: &str, length: usize) -> (Vec<u8>, bool) {
        let (wanted, mut all) = (self.streams[stream], Vec::new());
        loop {
            match self.frame().await {
                Some(Frame::Data { stream, bytes, last }) if stream == wanted => {
                    all.extend_from_slice(&bytes);
                    if last || all.len() >= length {
                        return (all, last);
                    }
                }
                other => panic!("{other:?} after {} bytes", all.len()),
            }
        }
    }
}
