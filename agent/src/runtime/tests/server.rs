//! A scripted runtime: a gRPC server over in-memory pipes that answers each call by a function, on raw bytes.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::task::Context;
use std::task::Poll;

use bytes::Buf;
use bytes::BufMut;
use bytes::Bytes;
use futures_util::Stream;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream;
use futures_util::stream::BoxStream;
use prost::Message;
use tokio::io::DuplexStream;
use tokio::task::AbortHandle;
use tokio::task::JoinSet;
use tonic::Response;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::Codec;
use tonic::codec::DecodeBuf;
use tonic::codec::Decoder;
use tonic::codec::EncodeBuf;
use tonic::codec::Encoder;

/// What the server sends: messages, one after the other, or a status in their place.
pub(crate) type Answer = Result<BoxStream<'static, Result<Bytes, Status>>, Status>;

/// Answers a call, by its name and its encoded request.
pub(crate) type Script = Arc<dyn Fn(&str, Bytes) -> BoxFuture<'static, Answer> + Send + Sync>;

/// One message.
pub(crate) fn say(message: &impl Message) -> Answer {
    say_all([message])
}

/// Several messages.
pub(crate) fn say_all<'a, M: Message + 'a>(messages: impl IntoIterator<Item = &'a M>) -> Answer {
    let messages: Vec<_> = messages.into_iter().map(|m| Ok(m.encode_to_vec().into())).collect();
    Ok(stream::iter(messages).boxed())
}

/// A script that needs no waiting.
pub(crate) fn script(answer: impl Fn(&str, Bytes) -> Answer + Send + Sync + 'static) -> Script {
    Arc::new(move |method, message| {
        let answer = answer(method, message);
        Box::pin(async move { answer })
    })
}

/// A socket on which a server may or may not listen.
#[derive(Clone, Default)]
pub(crate) struct Socket(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    script: Option<Script>,
    pipes: JoinSet<()>,
    connections: usize,
}

impl Socket {
    /// Starts a server.
    pub(crate) fn serve(&self, script: Script) {
        self.0.lock().unwrap().script = Some(script);
    }

    /// Stops the server and breaks every connection.
    pub(crate) fn vanish(&self) {
        let mut state = self.0.lock().unwrap();
        state.script = None;
        state.pipes.abort_all();
    }

    /// How often a client connected.
    pub(crate) fn connections(&self) -> usize {
        self.0.lock().unwrap().connections
    }

    /// A client connects.
    pub(crate) async fn connect(self) -> io::Result<DuplexStream> {
        let mut state = self.0.lock().unwrap();
        let script = state.script.clone().ok_or(io::ErrorKind::ConnectionRefused)?;
        state.connections += 1;
        let (client, mut near) = tokio::io::duplex(1 << 16);
        let (mut far, server) = tokio::io::duplex(1 << 16);
        let serving: AbortHandle = state.pipes.spawn(async move {
            let incoming = stream::iter([Ok::<_, io::Error>(server)]).chain(stream::pending());
            let _ = tonic::transport::Server::builder().serve_with_incoming(Service(script), incoming).await;
        });
        // Cut in the middle, both ends see the connection break, whatever tasks the server left running.
        state.pipes.spawn(async move {
            let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            serving.abort();
        });
        Ok(client)
    }
}

#[derive(Clone)]
struct Service(Script);

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let script = self.0.clone();
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let answer = tower::service_fn(move |request: tonic::Request<Bytes>| {
            let answer = script(&method, request.into_inner());
            async move { answer.await.map(Response::new) }
        });
        Box::pin(async move { Ok(tonic::server::Grpc::new(Raw).server_streaming(answer, request).await) })
    }
}

/// Messages as the bytes they are.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Keeps the type of a stream out of the tests.
pub(crate) fn endless(events: impl Stream<Item = Result<Bytes, Status>> + Send + 'static) -> Answer {
    Ok(events.chain(stream::pending()).boxed())
}
