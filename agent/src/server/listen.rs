//! Listening, for as long as the agent runs: an address that is taken is tried again, or ends the agent.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Time between two tries.
const RETRY: Duration = Duration::from_secs(5);

/// A port that is not to be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for the {server} server: {source}")]
pub struct ListenError {
    server: &'static str,
    address: SocketAddr,
    source: std::io::Error,
}

/// Serves `router` at `address` until `shutdown`; returns at once if there is no address.
///
/// # Errors
/// The address cannot be had.
pub(super) async fn serve_or_fail(
    server: &'static str,
    address: Option<SocketAddr>,
    router: Router,
    shutdown: &CancellationToken,
) -> Result<(), ListenError> {
    let Some(address) = address else { return Ok(()) };
    let failed = |source| ListenError { server, address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    tracing::info!(server, %address, "listening");
    axum::serve(listener, router).with_graceful_shutdown(shutdown.clone().cancelled_owned()).await.map_err(failed)
}

/// As [`serve_or_fail`] with an address that is tried again as long as it takes.
pub(super) async fn serve(name: &str, address: Option<SocketAddr>, router: Router, shutdown: &CancellationToken) {
    let Some(address) = address else { return };
    while let Some(listener) = listen(name, address, shutdown).await {
        tracing::info!(server = name, %address, "listening");
        let ended =
            axum::serve(listener, router.clone()).with_graceful_shutdown(shutdown.clone().cancelled_owned()).await;
        if shutdown.is_cancelled() {
            return;
        }
        tracing::warn!(server = name, %address, ?ended, "server ended, starting it again");
    }
}

/// A listener, as soon as there can be one; `None` if the agent ends first. Says so once when the address is not to be
/// had.
async fn listen(name: &str, address: SocketAddr, shutdown: &CancellationToken) -> Option<TcpListener> {
    let mut complained = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Some(listener),
            Err(error) if !std::mem::replace(&mut complained, true) => {
                tracing::error!(server = name, %address, %error, "cannot listen, trying again every {RETRY:?}");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = shutdown.cancelled() => return None,
        }
    }
}
