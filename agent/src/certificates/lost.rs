//! A node whose client certificate has gone for good cannot help itself: only a new start can bootstrap again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::keeper::Progress;
use super::pair::Pair;

/// How long the certificate may be missing while the API server works.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(10);

/// Returns when there has been no good certificate for five minutes although the API server works.
pub async fn lost(current: watch::Receiver<Option<Arc<Pair>>>, progress: Progress) {
    let mut last_good = Instant::now();
    loop {
        if current.borrow().is_some() {
            last_good = Instant::now();
        } else if last_good.elapsed() >= PATIENCE && progress.healthy() {
            return;
        }
        tokio::time::sleep(PERIOD).await;
    }
}
