//! A node whose client certificate has gone for good cannot help itself: only a new start can bootstrap again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::pair::Pair;
use super::rotation_manager::ServerHealth;

/// How long the certificate may be missing while the API server works.
const TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(10);

/// Returns when there has been no good certificate for five minutes although the API server works.
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
