//! One HTTP/2 connection to a runtime, made when first needed and made anew by the first call after it broke.

use std::io;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tonic::transport::Channel;
use tonic::transport::Endpoint;

/// A socket whose owner does not accept (stopped, or starting up) must not hold up a call to its deadline.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Lists of a full node arrive in one message of some MiB; larger windows spare them round trips.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;

/// A channel over whatever `connect` yields. Needs a tokio runtime around it.
pub(super) fn channel<F, Fut, IO>(connect: F) -> Channel
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = io::Result<IO>> + Send + 'static,
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let connector = tower::service_fn(move |_| {
        let connecting = connect();
        async move {
            match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
                Ok(stream) => stream.map(TokioIo::new),
                Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "it does not accept connections")),
            }
        }
    });
    // The address is never resolved; runtimes only require a well-formed authority.
    Endpoint::from_static("http://localhost")
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .connect_with_connector_lazy(connector)
}
