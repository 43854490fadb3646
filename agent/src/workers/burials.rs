//! Who has ended by itself is buried one after the other, and when the node is quiet if nobody waits for it. Burying costs
//! the runtime many times what it costs to tell the API server of an end; so first all ends are told that come in quick
//! succession.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio::time::sleep_until;

/// Processors for each pod that is buried: half of them are left to those who do work.
const PROCESSORS_PER_BURIAL: usize = 2;
/// The node is quiet when no pod has ended by itself for so long.
const QUIET: Duration = Duration::from_millis(250);

/// The turns of pods that have ended by themselves.
pub struct Burials {
    turns: Arc<Semaphore>,
    last_end: Mutex<Option<Instant>>,
}

impl Burials {
    /// As many turns as a machine with so many processors has use for.
    pub fn new(processors: usize) -> Self {
        let turns = (processors / PROCESSORS_PER_BURIAL).max(1);
        Self { turns: Arc::new(Semaphore::new(turns)), last_end: Mutex::new(None) }
    }

    /// A pod has ended by itself just now.
    pub fn ended(&self) {
        *self.last_end.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Waits until fewer pods are being buried than have room. The turn lasts until it is dropped. Who gives up waiting
    /// loses nothing but its place.
    pub async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        // Nobody closes it; and if somebody did, it would only be faster.
        self.turns.clone().acquire_owned().await.ok()
    }

    /// Waits until the node is quiet, too.
    pub async fn quiet_turn(&self) -> Option<OwnedSemaphorePermit> {
        loop {
            self.quiet().await;
            let turn = self.turn().await?;
            if self.quiet_from().is_none_or(|at| at <= Instant::now()) {
                return Some(turn);
            }
        }
    }

    /// Waits until no pod has ended by itself for a while.
    pub async fn quiet(&self) {
        while let Some(at) = self.quiet_from().filter(|at| *at > Instant::now()) {
            sleep_until(at).await;
        }
    }

    /// When the node is quiet unless something happens; `None` if nothing ever has.
    fn quiet_from(&self) -> Option<Instant> {
        let last_end = *self.last_end.lock().unwrap_or_else(PoisonError::into_inner);
        last_end.map(|at| at + QUIET)
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;
    use tokio::time::sleep;

    use super::*;

    /// When each of ten pods is buried that end at an interval, in milliseconds since the first end.
    async fn buried(processors: usize, interval: u64, each_takes: u64) -> Vec<u128> {
        let (burials, start) = (Arc::new(Burials::new(processors)), Instant::now());
        let mut all = JoinSet::new();
        for _ in 0..10 {
            let burials = burials.clone();
            burials.ended();
            all.spawn(async move {
                let _turn = burials.quiet_turn().await;
                let at = start.elapsed().as_millis();
                sleep(Duration::from_millis(each_takes)).await;
                at
            });
            sleep(Duration::from_millis(interval)).await;
        }
        let mut all = all.join_all().await;
        all.sort_unstable();
        all
    }

    #[tokio::test(start_paused = true)]
    async fn ends_in_quick_succession_are_all_told_before_one_is_buried() {
        // The last one ends after 900 ms.
        let expected: Vec<u128> = (0..10).map(|n| 1150 + 50 * n).collect();
        assert_eq!(buried(1, 100, 50).await, expected);
        assert_eq!(buried(2, 100, 50).await, expected, "half of the processors");
        let pairs: Vec<u128> = (0..10).map(|n| 1150 + 50 * (n / 2)).collect();
        assert_eq!(buried(4, 100, 50).await, pairs);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_ends_alone_is_buried_soon() {
        let expected: Vec<u128> = (0..10).map(|n| 250 + 1000 * n).collect();
        assert_eq!(buried(2, 1000, 50).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_while_pods_wait_for_their_turn_keeps_them_back() {
        let burials = Arc::new(Burials::new(1));
        burials.ended();
        let first = burials.turn().await;
        let second = tokio::spawn({
            let burials = burials.clone();
            async move { burials.quiet_turn().await.map(|_turn| Instant::now()) }
        });
        sleep(Duration::from_millis(100)).await;
        burials.ended();
        let ended = Instant::now();
        drop(first);
        assert_eq!(second.await.unwrap(), Some(ended + QUIET));
    }
}
