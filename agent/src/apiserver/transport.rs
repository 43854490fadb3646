//! Connections to the API server. Requests of all clients share them: one HTTP/2 connection carries many requests, and
//! as many more connections are opened as there are long watches.
//!
//! A server lets a client have only so many streams on one connection; what is above waits, behind watches that do not
//! end for minutes. So a *pool*, one connection in the usual case, takes no more than [`STREAMS`] requests at a time.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tracing::Span;

use super::dial::Dialer;
use crate::metrics::Metrics;

/// Requests on one pool; API servers allow 100 streams or more on a connection.
const STREAMS: usize = 80;
/// A connection on which nothing arrives for so long is asked whether it still lives.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// It has so long to answer.
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// An unused connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type HttpClient = legacy::Client<Dialer, Full<Bytes>>;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// No connection, or it broke.
    #[error("{}", causes(.0))]
    Http(#[source] legacy::Error),
    /// The connection was closed because the client certificate has changed.
    #[error("the connection was closed for one with the new client certificate")]
    ConnectionReplaced,
    /// An answer began but did not end in time.
    #[error("the answer did not end in time")]
    Unfinished,
}

impl TransportError {
    /// The server has left the connection in order (GOAWAY without an error, as with `--goaway-chance` or to a client it
    /// does not know) before it looked at the request.
    pub fn is_graceful_go_away(&self) -> bool {
        let Self::Http(error) = self else { return false };
        let below = std::iter::successors(std::error::Error::source(error), |error| error.source());
        let mut errors = below.filter_map(|error| error.downcast_ref::<h2::Error>());
        errors.any(|error| error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
    }
}

/// An error with what is below it: the outermost text alone says nothing ("client error (Connect)").
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
    pools: Mutex<Vec<Arc<ConnectionPool>>>,
    metrics: Arc<Metrics>,
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
    /// Connects nowhere yet.
    pub fn new(dialer: Dialer, metrics: Arc<Metrics>) -> Self {
        metrics.rest_client.transport_made();
        Self { dialer, pools: Mutex::default(), metrics }
    }

    fn pools(&self) -> MutexGuard<'_, Vec<Arc<ConnectionPool>>> {
        // A list that is whole between any two changes.
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first pool with room; a new one if there is none. Pools that carry nothing any more are given up.
    fn pool(&self) -> Arc<ConnectionPool> {
        let mut pools = self.pools();
        let mut first = true;
        pools.retain(|pool| std::mem::take(&mut first) || Arc::strong_count(pool) > 1);
        // Every request under way holds its pool once, the list holds it once more.
        if let Some(pool) = pools.iter().find(|pool| Arc::strong_count(pool) <= STREAMS) {
            return pool.clone();
        }
        let dialer = self.dialer.adapted();
        let http2_only = dialer.http2_only();
        let pool =
            Arc::new(ConnectionPool { client: http_client(dialer), http2_only, closed: CancellationToken::new() });
        pools.push(pool.clone());
        pool
    }

    /// Lets what is under way finish, and opens new connections for all that follows.
    pub fn retire(&self) {
        self.pools().clear();
    }

    /// Breaks off everything that is under way, and opens new connections for all that follows.
    pub fn reconnect(&self) {
        let pools = std::mem::take(&mut *self.pools());
        pools.iter().for_each(|pool| pool.closed.cancel());
    }

    /// Sends a request with an absolute URL. The answer's body may be read as long as it lasts.
    ///
    /// # Errors
    /// There is no answer. Whether the server has seen the request is not known.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<ResponseBody>, TransportError> {
        let pool = self.pool();
        let http2_only = pool.http2_only;
        match self.send_on(pool, request.clone()).await {
            // Never sent: the server turned out to speak HTTP/1.1 only.
            Err(_) if http2_only && !self.dialer.adapted().http2_only() => {
                self.pools().retain(|pool| !pool.http2_only);
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
            ResponseBody { inner, closed, due: None, span: Span::none(), _pool: pool }
        }))
    }
}

fn http_client(dialer: Dialer) -> HttpClient {
    // Said in advance, HTTP/2 lets all who wait share the first connection instead of opening one each.
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

/// The body of an answer. Ends with an error when its pool is closed or it takes too long.
pub struct ResponseBody {
    inner: Incoming,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    due: Option<Pin<Box<Sleep>>>,
    /// Ends with it.
    span: Span,
    /// Counts as a request under way.
    _pool: Arc<ConnectionPool>,
}

impl ResponseBody {
    /// Is part of this span from now on.
    pub fn within(mut self, span: Span) -> Self {
        self.span = span;
        self
    }

    /// Gives the rest of the body until then to arrive.
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
            // Over, whoever still holds it.
            self.span = Span::none();
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
