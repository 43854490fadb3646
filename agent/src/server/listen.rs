//! Listening, for as long as the agent runs: an address that is taken is tried again.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Time between two tries.
const RETRY: Duration = Duration::from_secs(5);

/// Serves `router` at `address` until `shutdown`; returns at once if there is no address.
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
