//! A node without a valid client certificate cannot request one with it: only a restart can bootstrap again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::pair::Pair;
use super::rotation_manager::ServerHealth;

/// How long the certificate may be missing while the API server is healthy.
const TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// Period of checks.
const PERIOD: Duration = Duration::from_secs(10);

/// Returns when there was no valid certificate for five minutes although the API server is healthy. Can be cancelled.
pub async fn wait_until_missing_too_long(current: watch::Receiver<Option<Arc<Pair>>>, server_health: ServerHealth) {
    let mut last_good = Instant::now();
    loop {
        if current.borrow().is_some() {
            last_good = Instant::now();
        } else if last_good.elapsed() >= TIMEOUT && server_health.healthy() {
            return;
        }
        tokio::time::sleep(PERIOD).await;
    }
}
