//! Connections of the main port: TLS handshake, then HTTP/1.1 or HTTP/2.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::TokioExecutor;
use hyper_util::rt::TokioIo;
use hyper_util::rt::TokioTimer;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::client_ca::Bundle;
use super::client_ca::ClientCa;
use super::error::SetupError;
use super::tls::Serving;
use super::tls::TlsSettings;
use crate::server::connections::ConnectionSlot;
use crate::server::connections::Peer;
use crate::server::dispatch::Dispatcher;
use crate::server::listen;
use crate::server::listen::KEEP_ALIVE;
use crate::server::listen::MAX_HEAD;
use crate::server::listen::WRITE_TIMEOUT;

/// A handshake that takes longer is aborted.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Ciphertext that is buffered for a client that does not read, in bytes at most.
const MAX_UNSENT: usize = 16 << 10;
/// Concurrent requests on one HTTP/2 connection.
const MAX_STREAMS: u32 = 250;

/// The TLS configuration of connections, with the current authorities of client certificates.
pub(super) struct Handshakes {
    settings: TlsSettings,
    serving: Serving,
    client_ca: Option<Arc<ClientCa>>,
    /// Set if the acceptable authorities in handshakes follow the file (gate ReloadKubeletClientCAFile).
    changes: Option<watch::Receiver<Bundle>>,
    http2: bool,
    current: Arc<ServerConfig>,
}

impl Handshakes {
    /// # Errors
    /// The TLS settings cannot be combined.
    pub(super) fn new(
        settings: TlsSettings,
        serving: Serving,
        client_ca: Option<Arc<ClientCa>>,
        reload_hints: bool,
    ) -> Result<Self, SetupError> {
        let changes = client_ca.as_ref().filter(|_| reload_hints).map(|client_ca| client_ca.changes());
        // As upstream: a configuration that may change per connection has no ALPN protocols.
        let http2 = changes.is_none();
        let hints = client_ca.as_ref().map(|client_ca| client_ca.hints());
        let current = Arc::new(settings.server(serving.clone(), hints, http2)?);
        Ok(Self { settings, serving, client_ca, changes, http2, current })
    }

    fn current(&mut self) -> Arc<ServerConfig> {
        if self.changes.as_mut().is_some_and(take_change) {
            let hints = self.client_ca.as_ref().map(|client_ca| client_ca.hints());
            match self.settings.server(self.serving.clone(), hints, self.http2) {
                Ok(config) => self.current = Arc::new(config),
                Err(error) => tracing::warn!(%error, "handshakes keep the previous authorities"),
            }
        }
        self.current.clone()
    }
}

/// True if the value has changed since the last call. It is to be read afterwards. A change after the check is one for the
/// next call.
fn take_change<T>(changes: &mut watch::Receiver<T>) -> bool {
    let has_changed = changes.has_changed().unwrap_or(false);
    if has_changed {
        changes.mark_unchanged();
    }
    has_changed
}

/// Serves until `shutdown`.
pub(super) async fn serve(
    listener: TcpListener,
    mut handshakes: Handshakes,
    dispatcher: Arc<Dispatcher>,
    shutdown: &CancellationToken,
) {
    listen::accept("main", listener, shutdown, |stream, address, slot| {
        let (dispatcher, shutdown) = (dispatcher.clone(), shutdown.clone());
        Connection { address, slot, dispatcher, shutdown }.serve(stream, handshakes.current())
    })
    .await;
}

struct Connection {
    address: SocketAddr,
    slot: Arc<ConnectionSlot>,
    dispatcher: Arc<Dispatcher>,
    shutdown: CancellationToken,
}

impl Connection {
    async fn serve(self, stream: TcpStream, config: Arc<ServerConfig>) -> Result<(), String> {
        listen::prepare(&stream)?;
        let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream));
        let mut stream = handshake.await.map_err(|_| "no handshake in time")?.map_err(|error| error.to_string())?;
        let (_, session) = stream.get_mut();
        session.set_buffer_limit(Some(MAX_UNSENT));
        let certificates = session.peer_certificates().unwrap_or_default();
        let certificates: Arc<[_]> =
            certificates.iter().map(CertificateDer::clone).map(CertificateDer::into_owned).collect();
        let is_http2 = session.alpn_protocol() == Some(b"h2");
        let shutdown = self.shutdown.clone();
        let service = self.service(certificates);
        if is_http2 { http2(stream, service, &shutdown).await } else { listen::http1(stream, service, &shutdown).await }
    }

    /// Passes requests to the dispatcher, each with its client.
    fn service(
        self,
        certificates: Arc<[CertificateDer<'static>]>,
    ) -> impl hyper::service::Service<
        hyper::Request<Incoming>,
        Response = hyper::Response<Body>,
        Error = std::convert::Infallible,
        Future: Send + 'static,
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

/// Serves HTTP/2 on one connection. A client that answers pings may still take no more of an answer, which only the connection
/// knows: after a while the client is asked to open another one, and later this one is closed with what is left on it.
/// Upstream, which knows it, resets an answer after 4 h.
async fn http2<S>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: S,
    shutdown: &CancellationToken,
) -> Result<(), String>
where
    S: hyper::service::Service<
            hyper::Request<Incoming>,
            Response = hyper::Response<Body>,
            Error = std::convert::Infallible,
            Future: Send + 'static,
        >,
{
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE);
    builder.max_header_list_size(MAX_HEAD as u32).max_concurrent_streams(MAX_STREAMS);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended.map_err(|error| error.to_string()),
        () = shutdown.cancelled() => {}
        () = tokio::time::sleep(WRITE_TIMEOUT) => {}
    }
    connection.as_mut().graceful_shutdown();
    let ended = tokio::time::timeout(WRITE_TIMEOUT, connection).await;
    ended.map_err(|_| "an answer takes too long")?.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_answers_pings_and_takes_no_answer_is_disconnected() {
        let (client, server) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
            let handshake = builder.initial_stream_window_size(1024).handshake(TokioIo::new(client));
            let (mut sender, connection) = handshake.await.expect("HTTP/2");
            tokio::spawn(connection);
            let request = hyper::Request::get("https://localhost/").body(Body::empty()).expect("a request");
            let answer = sender.send_request(request).await.expect("an answer");
            std::future::pending::<()>().await;
            drop(answer);
        });
        let service = service_fn(|_: hyper::Request<Incoming>| async {
            Ok::<_, Infallible>(hyper::Response::new(Body::from(vec![0; 1 << 20])))
        });
        let (began, shutdown) = (Instant::now(), CancellationToken::new());
        let ended = tokio::time::timeout(3 * WRITE_TIMEOUT, http2(server, service, &shutdown)).await;
        assert!(matches!(ended, Ok(Err(_))), "{ended:?}");
        assert!(began.elapsed() >= WRITE_TIMEOUT, "{:?}", began.elapsed());
    }

    /// The change falls between any two instructions of the check.
    #[test]
    fn a_change_during_the_check_is_not_missed() {
        let (sender, mut changes) = watch::channel(0);
        for value in 1..=500 {
            let mut is_seen = false;
            std::thread::scope(|scope| {
                let sending = scope.spawn(|| sender.send_replace(value));
                while !sending.is_finished() {
                    is_seen |= take_change(&mut changes);
                }
            });
            assert!(is_seen || take_change(&mut changes), "change {value}");
        }
    }

    #[test]
    fn a_change_is_taken_once() {
        let (sender, mut changes) = watch::channel(0);
        assert!(!take_change(&mut changes));
        sender.send_replace(1);
        assert!(take_change(&mut changes) && !take_change(&mut changes));
        drop(sender);
        assert!(!take_change(&mut changes), "nothing follows");
    }
}
