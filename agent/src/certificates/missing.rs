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

#[cfg(test)]
mod tests {
    use super::super::testing::pair;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_node_is_lost_only_if_the_server_works() {
        let (_sender, none) = watch::channel(None);
        let (away, works) = (ServerHealth::default(), ServerHealth::default());
        works.note(true);
        let began = Instant::now();
        wait_until_missing_too_long(none.clone(), works).await;
        assert!((300..=310).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        let waiting = wait_until_missing_too_long(none, away);
        assert!(tokio::time::timeout(Duration::from_secs(86_400), waiting).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn the_node_is_lost_after_five_minutes_without_a_certificate() {
        let (works, valid) = (ServerHealth::default(), Arc::new(pair("system:node:n", 0, 1)));
        works.note(true);
        let (sender, current) = watch::channel(Some(valid.clone()));
        let waiting = tokio::spawn(wait_until_missing_too_long(current, works));
        for (pair, seconds) in [(Some(valid.clone()), 3600), (None, 250), (Some(valid), 60)] {
            sender.send_replace(pair);
            tokio::time::sleep(Duration::from_secs(seconds)).await;
        }
        sender.send_replace(None);
        let began = Instant::now();
        waiting.await.expect("no panic");
        assert!((290..=310).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    }
}
