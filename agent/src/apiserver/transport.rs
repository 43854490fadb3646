//! Connections to the API server, shared by all clients: one HTTP/2 connection carries many requests, and further ones
//! are opened for many concurrent watches.
//!
//! A server limits the streams of a connection; requests beyond the limit would wait for watches that last minutes. So
//! a *pool*, which usually is one connection, takes no more than [`STREAMS`] requests at a time.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http::Response;
use http_body_util::Full;
use hyper::body::Body;
use hyper::body::Frame;
use hyper::body::Incoming;
use hyper::body::SizeHint;
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use hyper_util::rt::TokioTimer;
use tokio::time::Instant;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tracing::Span;

use super::dial::Dialer;
use super::requests::Latency;
use crate::metrics::Metrics;

/// Concurrent requests of one pool; API servers allow 100 streams or more on a connection.
const STREAMS: usize = 80;
/// A connection without traffic is probed after this.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time for the answer to a probe.
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// An unused connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

/// How reading and writing fail when the server has reset or closed the connection.
const BROKEN: [io::ErrorKind; 3] =
    [io::ErrorKind::ConnectionReset, io::ErrorKind::UnexpectedEof, io::ErrorKind::BrokenPipe];

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type HttpClient = legacy::Client<Dialer, Full<Bytes>>;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// No connection, or it broke.
    #[error("{}", causes(.0))]
    Http(#[source] legacy::Error),
    /// The connection was closed because the client certificate has changed, or because it may be broken.
    #[error("the connection was closed for a new one")]
    ConnectionReplaced,
    /// The body of an answer did not end in time.
    #[error("the answer did not end in time")]
    Unfinished,
}

impl TransportError {
    /// The server closed the connection gracefully (GOAWAY with NO_ERROR, as with `--goaway-chance` or after a 401)
    /// before it processed the request.
    pub fn is_graceful_go_away(&self) -> bool {
        let mut errors = self.below().filter_map(|error| error.downcast_ref::<h2::Error>());
        errors.any(|error| error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
    }

    /// The connection was reset or closed before the answer, as by a server that ends, be it during the TLS handshake or
    /// with a GOAWAY, or did not answer probes.
    pub fn is_broken_connection(&self) -> bool {
        self.below().any(|error| {
            let io = error.downcast_ref::<io::Error>();
            let http = error.downcast_ref::<hyper::Error>();
            let http2 = error.downcast_ref::<h2::Error>();
            io.is_some_and(|error| BROKEN.contains(&error.kind()))
                || http.is_some_and(|error| error.is_incomplete_message() || error.is_timeout())
                || http2.is_some_and(|error| error.is_go_away() && error.is_remote())
        })
    }

    /// The errors that led to this one, from the last to the first.
    fn below(&self) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
        let first = match self {
            Self::Http(error) => std::error::Error::source(error),
            Self::ConnectionReplaced | Self::Unfinished => None,
        };
        std::iter::successors(first, |error| cause_of(*error))
    }
}

/// The error that led to another one. That of a TLS handshake is inside an I/O error, whose source is that of the inner one.
fn cause_of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a (dyn std::error::Error + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}

/// An error with its sources: the outermost text alone ("client error (Connect)") does not name the cause.
fn causes(error: &legacy::Error) -> String {
    let mut text = error.to_string();
    let mut below = std::error::Error::source(error);
    while let Some(error) = below {
        text.push_str(": ");
        text.push_str(&error.to_string());
        below = error.source();
    }
    text
}

/// All connections to one API server.
pub struct Transport {
    dialer: Dialer,
    pools: Mutex<Pools>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Pools {
    /// For further requests.
    current: Vec<Arc<ConnectionPool>>,
    /// Closes these, and those that were retired.
    closed: CancellationToken,
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.metrics.rest_client.transport_dropped();
    }
}

struct ConnectionPool {
    client: HttpClient,
    http2_only: bool,
    closed: CancellationToken,
}

impl Transport {
    /// Opens no connection yet.
    pub fn new(dialer: Dialer, metrics: Arc<Metrics>) -> Self {
        metrics.rest_client.transport_made();
        Self { dialer, pools: Mutex::default(), metrics }
    }

    fn pools(&self) -> MutexGuard<'_, Pools> {
        // The list is consistent between any two changes.
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first pool with room; a new one if there is none. Idle pools but the first are dropped.
    fn pool(&self) -> Arc<ConnectionPool> {
        let mut pools = self.pools();
        let mut first = true;
        pools.current.retain(|pool| std::mem::take(&mut first) || Arc::strong_count(pool) > 1);
        // Every request in progress holds one reference, the list another one.
        if let Some(pool) = pools.current.iter().find(|pool| Arc::strong_count(pool) <= STREAMS) {
            return pool.clone();
        }
        let dialer = self.dialer.adapted();
        let (http2_only, closed) = (dialer.http2_only(), pools.closed.clone());
        let pool = Arc::new(ConnectionPool { client: http_client(dialer), http2_only, closed });
        pools.current.push(pool.clone());
        pool
    }

    /// Opens new connections for further requests; those in progress keep theirs.
    pub fn retire(&self) {
        self.pools().current.clear();
    }

    /// Aborts all requests in progress and opens new connections for further ones.
    pub fn reconnect(&self) {
        let pools = std::mem::take(&mut *self.pools());
        pools.closed.cancel();
    }

    /// Whether connections are probed by the pings of HTTP/2, so that requests on a broken one end.
    pub fn is_probed(&self) -> bool {
        self.dialer.adapted().http2_only()
    }

    /// Sends a request with an absolute URL. The body of the answer may be read for any time.
    ///
    /// # Errors
    /// There is no answer. The server may have processed the request.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<ResponseBody>, TransportError> {
        let pool = self.pool();
        let http2_only = pool.http2_only;
        match self.send_on(pool, request.clone()).await {
            // Not sent: the server supports HTTP/1.1 only.
            Err(_) if http2_only && !self.dialer.adapted().http2_only() => {
                self.pools().current.retain(|pool| !pool.http2_only);
                self.send_on(self.pool(), request).await
            }
            answer => answer,
        }
    }

    async fn send_on(
        &self,
        pool: Arc<ConnectionPool>,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<ResponseBody>, TransportError> {
        let answer = tokio::select! {
            biased;
            () = pool.closed.cancelled() => return Err(TransportError::ConnectionReplaced),
            answer = pool.client.request(request) => answer.map_err(TransportError::Http)?,
        };
        Ok(answer.map(|inner| {
            let closed = Box::pin(pool.closed.clone().cancelled_owned());
            ResponseBody { inner, closed, due: None, span: Span::none(), latency: None, _pool: pool }
        }))
    }
}

fn http_client(dialer: Dialer) -> HttpClient {
    // With HTTP/2 prior knowledge, concurrent first requests share one connection instead of opening one each.
    let http2_only = dialer.http2_only();
    legacy::Client::builder(TokioExecutor::new())
        .http2_only(http2_only)
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .http2_keep_alive_interval(PING_INTERVAL)
        .http2_keep_alive_timeout(PING_TIMEOUT)
        .build(dialer)
}

/// The body of an answer. Fails when its pool is closed or its deadline has passed.
pub struct ResponseBody {
    inner: Incoming,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    due: Option<Pin<Box<Sleep>>>,
    /// Ends with the body.
    span: Span,
    /// The same.
    latency: Option<Latency>,
    /// Counts as a request in progress.
    _pool: Arc<ConnectionPool>,
}

impl ResponseBody {
    /// Ends this span with the body.
    pub fn within(mut self, span: Span) -> Self {
        self.span = span;
        self
    }

    /// Measures the request up to the end of the body.
    pub(super) fn measured_by(mut self, latency: Option<Latency>) -> Self {
        self.latency = latency;
        self
    }

    /// Sets a deadline for the rest of the body.
    pub fn until(mut self, due: Instant) -> Self {
        self.due = Some(Box::pin(tokio::time::sleep_until(due)));
        self
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(TransportError::ConnectionReplaced.into())));
        }
        if self.due.as_mut().is_some_and(|due| due.as_mut().poll(cx).is_ready()) {
            return Poll::Ready(Some(Err(TransportError::Unfinished.into())));
        }
        let frame = std::task::ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            // The body is complete, even if the caller keeps it.
            self.span = Span::none();
            self.latency = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
