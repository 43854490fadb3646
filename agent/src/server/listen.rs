//! Listening sockets of all ports, and the limits that hold on each: connections, time and size of a request's head,
//! idle time, and time without progress of an answer. The times are upstream's where it has them (`http.Server` of the
//! kubelet's main and read-only port).

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::Ipv6Addr;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::Request;
use hyper::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::rt::TokioTimer;
use socket2::SockRef;
use socket2::TcpKeepalive;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::net::TcpListener;
use tokio::net::TcpSocket;
use tokio::net::TcpStream;
use tokio::net::lookup_host;
use tokio::time::Instant;
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use super::connections::ConnectionSlot;
use super::connections::Connections;
use super::connections::Peer;

/// How long an address that is in use is tried again: the sockets of a killed predecessor close with its last thread.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two attempts to bind.
const BIND_RETRY: Duration = Duration::from_millis(100);
/// Time between two series of attempts to bind the health port, which never gives up.
const HEALTH_RETRY: Duration = Duration::from_secs(5);
/// A connection without a request, or with one whose head is incomplete, is closed after this.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Largest head of a request, and what is buffered for one connection, in bytes. A kubelet accepts 1 MiB; here the path has
/// 64 KiB at most, and up to 1024 connections without an authorized request may each hold such a head.
pub(super) const MAX_HEAD: usize = 256 << 10;
/// An HTTP/1.1 connection, also an upgraded one, whose client reads nothing of what is sent is closed after this. An answer on
/// HTTP/2 may take at least as long.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(4 * 60 * 60);
/// TCP keep-alive probes on connections without traffic.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Time for requests in progress to end at shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections that wait to be accepted at a socket of both families; the kernel may allow fewer.
const BACKLOG: u32 = 4096;
/// Pause after a failed accept, mostly for lack of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// A host, by its IP address or its name, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// An IP address, or a name.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl HostPort {
    /// The address to bind. Of several, as a kubelet does, the first of IPv4, or else the first.
    ///
    /// # Errors
    /// The name has no address.
    async fn resolve(&self) -> io::Result<SocketAddr> {
        let found: Vec<SocketAddr> = lookup_host((self.host.as_str(), self.port)).await?.collect();
        let chosen = found.iter().find(|address| address.is_ipv4()).or(found.first());
        chosen.copied().ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the host has no address"))
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// A port that cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot bind the address {address} of the {server} server: {source}")]
pub struct ListenError {
    server: &'static str,
    address: SocketAddr,
    source: io::Error,
}

/// Binds an address; one that is in use is tried again for 5 s. The unspecified address of either family is that of both,
/// as with a kubelet: a node with addresses of IPv6 alone is reached with the default `address: 0.0.0.0`.
///
/// # Errors
/// The address cannot be bound, or is still in use after that.
pub(super) async fn bind(server: &str, address: SocketAddr) -> io::Result<TcpListener> {
    let deadline = Instant::now() + BIND_TIMEOUT;
    let mut is_logged = false;
    loop {
        match bind_once(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::info!(server, %address, "the address is in use, trying again for {BIND_TIMEOUT:?}");
                }
                tokio::time::sleep(BIND_RETRY).await;
            }
            outcome => return outcome,
        }
    }
}

async fn bind_once(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified()
        && let Ok(socket) = socket_of_both_families()
    {
        socket.bind((Ipv6Addr::UNSPECIFIED, address.port()).into())?;
        return socket.listen(BACKLOG);
    }
    TcpListener::bind(address).await
}

/// Fails where the kernel has no IPv6.
fn socket_of_both_families() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v6()?;
    SockRef::from(&socket).set_only_v6(false)?;
    socket.set_reuseaddr(true)?;
    Ok(socket)
}

/// The address of a client. That of an IPv4 client is mapped to IPv6 by a socket of both families.
fn unmapped(mut address: SocketAddr) -> SocketAddr {
    address.set_ip(address.ip().to_canonical());
    address
}

/// Serves `router` at `address` over HTTP/1 until `shutdown`; returns at once if there is no address.
///
/// # Errors
/// The address cannot be bound.
pub(super) async fn serve_or_fail(
    server: &'static str,
    address: Option<SocketAddr>,
    router: Router,
    shutdown: &CancellationToken,
) -> Result<(), ListenError> {
    let Some(address) = address else { return Ok(()) };
    let listener = match shutdown.run_until_cancelled(bind(server, address)).await {
        Some(bound) => bound.map_err(|source| ListenError { server, address, source })?,
        None => return Ok(()),
    };
    serve_plain(server, listener, router, shutdown).await;
    Ok(())
}

/// As [`serve_or_fail`], but never gives up resolving and binding the address.
pub(super) async fn serve(
    server: &'static str,
    address: Option<HostPort>,
    router: Router,
    shutdown: &CancellationToken,
) {
    let Some(address) = address else { return };
    let binding = async {
        let mut last_error = String::new();
        loop {
            let bound = async { bind(server, address.resolve().await?).await };
            match bound.await {
                Ok(listener) => return listener,
                Err(error) => {
                    let error = error.to_string();
                    if error != last_error {
                        tracing::error!(server, %address, error, "cannot bind the address, trying again");
                    }
                    last_error = error;
                }
            }
            tokio::time::sleep(HEALTH_RETRY).await;
        }
    };
    if let Some(listener) = shutdown.run_until_cancelled(binding).await {
        serve_plain(server, listener, router, shutdown).await;
    }
}

/// HTTP without TLS: every connection counts as unauthorized.
async fn serve_plain(server: &str, listener: TcpListener, router: Router, shutdown: &CancellationToken) {
    accept(server, listener, shutdown, |stream, address, slot| {
        let peer = Peer { address: Some(address), slot: Some(slot), ..Peer::default() };
        let (router, shutdown) = (router.clone(), shutdown.clone());
        async move {
            prepare(&stream)?;
            let service = service_fn(move |request: Request<Incoming>| {
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(peer.clone());
                router.clone().oneshot(request)
            });
            http1(stream, service, &shutdown).await
        }
    })
    .await;
}

/// Accepts connections until `shutdown` and runs `serve` for each in a task, as long as [`Connections`] keeps it. Waits
/// a moment for what is in progress then.
pub(super) async fn accept<F>(
    server: &str,
    listener: TcpListener,
    shutdown: &CancellationToken,
    mut serve: impl FnMut(TcpStream, SocketAddr, Arc<ConnectionSlot>) -> F,
) where
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    if let Ok(address) = listener.local_addr() {
        tracing::info!(server, %address, "listening");
    }
    let (connections, tasks, mut last_error) = (Connections::default(), TaskTracker::new(), String::new());
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, address)) => {
                let address = unmapped(address);
                last_error.clear();
                let Some(slot) = connections.accept(address.ip()) else {
                    tracing::debug!(server, %address, "too many connections");
                    continue;
                };
                let evicted = slot.evicted();
                let connection = serve(stream, address, Arc::new(slot));
                tasks.spawn(run(address, evicted, connection));
            }
            Err(error) => {
                let error = error.to_string();
                if error != last_error {
                    tracing::warn!(server, error, "cannot accept connections");
                }
                last_error = error;
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    tasks.close();
    // Connections that take longer end with the process.
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, tasks.wait()).await;
}

async fn run(address: SocketAddr, evicted: CancellationToken, connection: impl Future<Output = Result<(), String>>) {
    match evicted.run_until_cancelled(connection).await {
        None => tracing::debug!(%address, "closed: too many connections without an authorized request"),
        Some(Err(error)) => tracing::debug!(%address, error, "connection ended"),
        Some(Ok(())) => {}
    }
}

/// Sets the options of an accepted socket.
///
/// # Errors
/// The system refuses one of them.
pub(super) fn prepare(stream: &TcpStream) -> Result<(), String> {
    let keep_alive = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
    let set = SockRef::from(stream).set_tcp_keepalive(&keep_alive).and_then(|()| stream.set_nodelay(true));
    set.map_err(|error| format!("setting socket options: {error}"))
}

/// Serves HTTP/1.1 on one connection, which may be upgraded; `shutdown` ends it after the request in progress.
///
/// # Errors
/// The connection broke, or broke a limit.
pub(super) async fn http1<S>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    service: S,
    shutdown: &CancellationToken,
) -> Result<(), String>
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>,
{
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT).max_buf_size(MAX_HEAD);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let connection = builder.serve_connection(TokioIo::new(Box::pin(stream)), service).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended.map_err(|error| error.to_string()),
        () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    connection.await.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::net::Ipv4Addr;
    use std::sync::OnceLock;

    use tokio::io::AsyncReadExt as _;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_the_answer_is_disconnected() {
        let (mut client, server) = tokio::io::duplex(1024);
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("sent");
        let service = service_fn(|_: Request<Incoming>| async {
            Ok::<_, Infallible>(Response::new(Body::from(vec![0; 1 << 20])))
        });
        let (began, shutdown) = (Instant::now(), CancellationToken::new());
        let ended = tokio::time::timeout(2 * WRITE_TIMEOUT, http1(server, service, &shutdown)).await;
        assert!(matches!(ended, Ok(Err(_))), "{ended:?}");
        assert!(began.elapsed() >= WRITE_TIMEOUT, "{:?}", began.elapsed());
    }

    /// The answer to a request that is in progress at the shutdown and takes this long, and how long the server goes on.
    async fn shut_down_during_a_request(takes: Duration) -> (String, Duration) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
        let address = listener.local_addr().expect("an address");
        let shutdown = CancellationToken::new();
        let (stopping, stopped) = (shutdown.clone(), Arc::new(OnceLock::new()));
        let at = stopped.clone();
        let router = Router::new().fallback(async move || {
            at.get_or_init(Instant::now);
            stopping.cancel();
            tokio::time::sleep(takes).await;
            "done"
        });
        let client = async {
            let mut stream = TcpStream::connect(address).await.expect("connected");
            stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("sent");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.expect("an end");
            answer
        };
        let server = async {
            serve_plain("test", listener, router, &shutdown).await;
            stopped.get().expect("a request").elapsed()
        };
        tokio::join!(client, server)
    }

    #[tokio::test(start_paused = true)]
    async fn requests_in_progress_have_a_moment_to_end_at_shutdown() {
        let (answer, took) = shut_down_during_a_request(DRAIN_TIMEOUT / 2).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\ndone"), "{answer}");
        assert!(took < DRAIN_TIMEOUT, "{took:?}");
        let (_, took) = shut_down_during_a_request(10 * DRAIN_TIMEOUT).await;
        assert_eq!(took, DRAIN_TIMEOUT);
    }

    #[tokio::test]
    async fn the_unspecified_address_is_that_of_both_families() {
        let loopbacks = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
        let is_there = |ip: &IpAddr| std::net::TcpListener::bind((*ip, 0)).is_ok();
        for unspecified in [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)] {
            if unspecified.is_ipv6() && !is_there(&loopbacks[1]) {
                continue;
            }
            let listener = bind("test", SocketAddr::new(unspecified, 0)).await.expect("bound");
            let port = listener.local_addr().expect("an address").port();
            for loopback in loopbacks.into_iter().filter(is_there) {
                let client = TcpStream::connect((loopback, port)).await.expect("reached");
                let (_, peer) = listener.accept().await.expect("accepted");
                assert_eq!(unmapped(peer), client.local_addr().expect("an address"), "{unspecified} {loopback}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_another_socket_has_on_this_port_is_in_use() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
        let port = taken.local_addr().expect("an address").port();
        let began = Instant::now();
        let error = bind("test", (Ipv4Addr::UNSPECIFIED, port).into()).await.expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(began.elapsed() >= BIND_TIMEOUT, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn other_addresses_are_bound_as_they_are() {
        let listener = bind("test", (Ipv4Addr::LOCALHOST, 0).into()).await.expect("bound");
        assert_eq!(listener.local_addr().expect("an address").ip(), Ipv4Addr::LOCALHOST);
    }
}
