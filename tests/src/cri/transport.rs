//! Transports of the simulated runtime: an in-memory duplex for deterministic tests, a unix socket for processes.
//!
//! When the runtime goes down every connection breaks at once, as with a killed process; connecting then fails.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::task::Poll;

use hyper_util::rt::TokioIo;
use keblet_proto::cri::v1::image_service_server::ImageServiceServer;
use keblet_proto::cri::v1::runtime_service_server::RuntimeServiceServer;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::io::DuplexStream;
use tokio::io::ReadBuf;
use tokio::net::UnixListener;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::Channel;
use tonic::transport::Endpoint;
use tonic::transport::Server;
use tonic::transport::Uri;
use tonic::transport::server::Connected;

use super::engine::Engine;
use super::image_service::ImageApi;
use super::runtime_service::RuntimeApi;

/// Maximum message size, as in containerd and kubelets.
const MAX_MESSAGE: usize = 16 << 20;
/// Bytes in flight per direction of an in-memory connection.
const PIPE_BYTES: usize = 256 << 10;
/// Connections waiting to be accepted.
const BACKLOG: usize = 16;

/// An in-memory address of the runtime.
#[derive(Clone, Debug)]
pub struct MemoryEndpoint {
    engine: Arc<Engine>,
    accept: mpsc::Sender<io::Result<Cut<DuplexStream>>>,
}

impl MemoryEndpoint {
    pub(super) fn serve(engine: Arc<Engine>) -> Self {
        let (accept, incoming) = mpsc::channel(BACKLOG);
        let server = router(&engine).serve_with_incoming(ReceiverStream::new(incoming));
        tokio::spawn(server);
        Self { engine, accept }
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// The runtime is down.
    pub async fn connect(&self) -> io::Result<DuplexStream> {
        let lifetime = self.engine.lifetime();
        if lifetime.is_cancelled() {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused));
        }
        let (client, server) = tokio::io::duplex(PIPE_BYTES);
        let refused = |_| io::Error::from(io::ErrorKind::ConnectionRefused);
        self.accept.send(Ok(Cut::new(server, lifetime))).await.map_err(refused)?;
        Ok(client)
    }

    /// A gRPC channel that connects on first use, and reconnects after each break.
    pub fn channel(&self) -> Channel {
        let endpoint = self.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let endpoint = endpoint.clone();
            async move { endpoint.connect().await.map(TokioIo::new) }
        });
        Endpoint::from_static("http://runtime.sim").connect_with_connector_lazy(connector)
    }
}

/// A unix socket of the runtime. The file exists while the runtime is up.
#[derive(Debug)]
pub struct SocketEndpoint {
    path: PathBuf,
    closed: CancellationToken,
}

impl SocketEndpoint {
    /// Binds `path` now, and again after each restart of the runtime, until dropped.
    pub(super) fn serve(engine: Arc<Engine>, path: &Path) -> io::Result<Self> {
        let closed = CancellationToken::new();
        let mut listener = Some(UnixListener::bind(path)?);
        let (this, path) = (Self { path: path.to_owned(), closed: closed.clone() }, path.to_owned());
        let serve = async move {
            let mut changes = engine.changes();
            loop {
                let lifetime = engine.lifetime();
                if !lifetime.is_cancelled() {
                    match listener.take().map_or_else(|| UnixListener::bind(&path), Ok) {
                        Ok(bound) => serve_until_exit(&engine, bound, lifetime).await,
                        Err(error) => tracing::error!(path = %path.display(), %error, "cannot bind again"),
                    }
                    let _ = std::fs::remove_file(&path);
                }
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::spawn(async move { closed.run_until_cancelled_owned(serve).await });
        Ok(this)
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketEndpoint {
    fn drop(&mut self) {
        self.closed.cancel();
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Serves one runtime process on a socket.
async fn serve_until_exit(engine: &Arc<Engine>, bound: UnixListener, lifetime: CancellationToken) {
    let cut = lifetime.clone();
    let incoming = UnixListenerStream::new(bound).map(move |io| Ok::<_, io::Error>(Cut::new(io?, cut.clone())));
    // A listener does not fail; it ends with the runtime.
    let _ = lifetime.run_until_cancelled(router(engine).serve_with_incoming(incoming)).await;
}

fn router(engine: &Arc<Engine>) -> tonic::transport::server::Router {
    let runtime = RuntimeServiceServer::new(RuntimeApi(Arc::clone(engine)));
    let images = ImageServiceServer::new(ImageApi(Arc::clone(engine)));
    Server::builder()
        .add_service(runtime.max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE))
        .add_service(images.max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE))
}

/// A connection that is reset when the runtime process exits.
#[derive(Debug)]
struct Cut<IO> {
    io: IO,
    end: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<IO> Cut<IO> {
    fn new(io: IO, lifetime: CancellationToken) -> Self {
        Self { io, end: Box::pin(lifetime.cancelled_owned()) }
    }

    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::Error::from(io::ErrorKind::ConnectionReset)),
            Poll::Pending => Ok(()),
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Cut<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Cut<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl Connected for Cut<DuplexStream> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl Connected for Cut<UnixStream> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}
