//! Connections of the main port: accepted, secured, served, bounded in number and in time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::client_ca::{Bundle, ClientCa};
use super::connections::{ConnectionSlot, Connections, Peer};
use super::error::SetupError;
use super::tls::{Serving, TlsSettings};
use crate::server::dispatch::Dispatcher;

/// A handshake that takes longer is broken off.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A connection without a request, or with one whose head does not end, is closed.
const IDLE: Duration = Duration::from_secs(90);
/// Head of a request at most, in bytes, and what is buffered for one connection.
const HEAD: usize = 1 << 20;
/// Ciphertext at most that waits for a client who does not read.
const UNSENT: usize = 16 << 10;
/// Requests at once on one HTTP/2 connection.
const STREAMS: u32 = 250;
/// A connection whose other end says nothing is asked whether it is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Time for requests to end after the agent was told to.
const DRAIN: Duration = Duration::from_secs(2);
/// Wait after the system had no connection to give, for want of files mostly.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// How connections are secured, with the authorities of clients as they are at the moment.
pub(super) struct Handshakes {
    settings: TlsSettings,
    serving: Serving,
    client_ca: Option<Arc<ClientCa>>,
    /// Set if the names of authorities shown to clients follow the file.
    changes: Option<watch::Receiver<Bundle>>,
    http2: bool,
    current: Arc<ServerConfig>,
}

impl Handshakes {
    pub(super) fn new(
        settings: TlsSettings,
        serving: Serving,
        client_ca: Option<Arc<ClientCa>>,
        reload_hints: bool,
    ) -> Result<Self, SetupError> {
        let changes = client_ca.as_ref().filter(|_| reload_hints).map(|client_ca| client_ca.changes());
        // As upstream: a configuration that may change per connection names no protocols.
        let http2 = changes.is_none();
        let hints = client_ca.as_ref().map(|client_ca| client_ca.hints());
        let current = Arc::new(settings.server(serving.clone(), hints, http2)?);
        Ok(Self { settings, serving, client_ca, changes, http2, current })
    }

    fn current(&mut self) -> Arc<ServerConfig> {
        let changed = self.changes.as_mut().is_some_and(|changes| {
            let changed = changes.has_changed().unwrap_or(false);
            changes.mark_unchanged();
            changed
        });
        if changed {
            let hints = self.client_ca.as_ref().map(|client_ca| client_ca.hints());
            match self.settings.server(self.serving.clone(), hints, self.http2) {
                Ok(config) => self.current = Arc::new(config),
                Err(error) => tracing::warn!(%error, "clients are shown the former authorities"),
            }
        }
        self.current.clone()
    }
}

/// Serves until `shutdown`.
pub(super) async fn serve(
    listener: TcpListener,
    mut handshakes: Handshakes,
    dispatcher: Arc<Dispatcher>,
    shutdown: &CancellationToken,
) {
    if let Ok(address) = listener.local_addr() {
        tracing::info!(server = "main", %address, "listening");
    }
    let connections = Connections::default();
    let tasks = TaskTracker::new();
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, address)) => {
                let Some(slot) = connections.accept() else {
                    tracing::debug!(%address, "too many connections");
                    continue;
                };
                let connection = Connection {
                    address,
                    slot: Arc::new(slot),
                    dispatcher: dispatcher.clone(),
                    shutdown: shutdown.clone(),
                };
                tasks.spawn(connection.run(stream, handshakes.current()));
            }
            Err(error) => {
                tracing::warn!(server = "main", %error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    tasks.close();
    // What lasts longer ends with the process.
    let _ = tokio::time::timeout(DRAIN, tasks.wait()).await;
}

struct Connection {
    address: SocketAddr,
    slot: Arc<ConnectionSlot>,
    dispatcher: Arc<Dispatcher>,
    shutdown: CancellationToken,
}

impl Connection {
    async fn run(self, stream: TcpStream, config: Arc<ServerConfig>) {
        let (evicted, address) = (self.slot.evicted(), self.address);
        let served = evicted.run_until_cancelled(self.serve(stream, config)).await;
        match served {
            None => tracing::debug!(%address, "closed, because others wait and this client has shown no right to ask"),
            Some(Err(error)) => tracing::debug!(%address, error, "connection ended"),
            Some(Ok(())) => {}
        }
    }

    async fn serve(self, stream: TcpStream, config: Arc<ServerConfig>) -> Result<(), String> {
        let alive = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
        let set = SockRef::from(&stream).set_tcp_keepalive(&alive).and_then(|()| stream.set_nodelay(true));
        set.map_err(|error| format!("setting socket options: {error}"))?;
        let handshake = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream));
        let mut stream = handshake.await.map_err(|_| "no handshake in time")?.map_err(|error| error.to_string())?;
        let (_, session) = stream.get_mut();
        session.set_buffer_limit(Some(UNSENT));
        let certificates = session.peer_certificates().unwrap_or_default();
        let certificates: Arc<[_]> =
            certificates.iter().map(CertificateDer::clone).map(CertificateDer::into_owned).collect();
        if session.alpn_protocol() == Some(b"h2") {
            self.http2(stream, certificates).await
        } else {
            self.http1(stream, certificates).await
        }
    }

    async fn http1(
        self,
        stream: TlsStream<TcpStream>,
        certificates: Arc<[CertificateDer<'static>]>,
    ) -> Result<(), String> {
        let shutdown = self.shutdown.clone();
        let service = self.service(certificates);
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(IDLE).max_buf_size(HEAD);
        let connection = builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return ended.map_err(|error| error.to_string()),
            () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await.map_err(|error| error.to_string())
    }

    async fn http2(
        self,
        stream: TlsStream<TcpStream>,
        certificates: Arc<[CertificateDer<'static>]>,
    ) -> Result<(), String> {
        let shutdown = self.shutdown.clone();
        let service = self.service(certificates);
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE);
        builder.max_header_list_size(HEAD as u32).max_concurrent_streams(STREAMS);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return ended.map_err(|error| error.to_string()),
            () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await.map_err(|error| error.to_string())
    }

    /// Hands requests to the dispatcher, each with what is known of its client.
    fn service(
        self,
        certificates: Arc<[CertificateDer<'static>]>,
    ) -> impl hyper::service::Service<
        hyper::Request<Incoming>,
        Response = hyper::Response<Body>,
        Error = std::convert::Infallible,
        Future: Send,
    > {
        let peer = Peer { address: Some(self.address), certificates, slot: Some(self.slot) };
        let dispatcher = self.dispatcher;
        service_fn(move |request: hyper::Request<Incoming>| {
            let (dispatcher, peer) = (dispatcher.clone(), peer.clone());
            async move {
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(peer);
                Ok(dispatcher.answer(request).await)
            }
        })
    }
}
