//! Stopping pods in turns. A container that has ended costs the runtime more to bury than it cost to stop; when many pods
//! are deleted at once, burying all of them at once makes the first one wait for the last.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::recorder::Recorder;

/// Pods that are stopped at the same time, for each processor.
const PER_PROCESSOR: usize = 2;
/// A pod that takes longer to end has other reasons, and keeps nobody back.
const TURN: Duration = Duration::from_millis(250);
/// Nobody waits longer for a turn: a pod's grace period is not to begin much later than it was asked for.
const PATIENCE: Duration = Duration::from_secs(1);

/// As many turns as this machine has use for.
pub(super) fn turns() -> Semaphore {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Semaphore::new(PER_PROCESSOR * processors)
}

/// Stops a pod when it is its turn. Events give way meanwhile.
pub(super) async fn in_turn<T>(turns: &Semaphore, recorder: &Recorder, stop: impl Future<Output = T>) -> T {
    // A turn that did not come in time is none; nor is one of a closed semaphore, and nobody closes it.
    let turn = timeout(PATIENCE, turns.acquire()).await;
    let urgent = recorder.urgent();
    let mut stop = pin!(stop);
    let soon = timeout(TURN, &mut stop).await;
    drop((turn, urgent));
    match soon {
        Ok(done) => done,
        Err(_) => stop.await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::Mutex;

    use tokio::task::JoinSet;
    use tokio::time::Instant;
    use tokio::time::sleep;

    use super::*;

    /// When each of ten stops begins, in milliseconds, with two turns.
    async fn begins(each_takes: Duration) -> Vec<u128> {
        let (turns, begins) = (Arc::new(Semaphore::new(2)), Arc::new(Mutex::new(Vec::new())));
        let start = Instant::now();
        let mut stops = JoinSet::new();
        for _ in 0..10 {
            let (turns, begins) = (turns.clone(), begins.clone());
            stops.spawn(async move {
                let stop = async {
                    begins.lock().unwrap().push(start.elapsed().as_millis());
                    sleep(each_takes).await;
                };
                in_turn(&turns, &Recorder::default(), stop).await;
            });
        }
        stops.join_all().await;
        Arc::try_unwrap(begins).unwrap().into_inner().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn prompt_pods_end_one_after_the_other() {
        assert_eq!(begins(Duration::from_millis(100)).await, [0, 0, 100, 100, 200, 200, 300, 300, 400, 400]);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_pods_keep_nobody_back_for_long() {
        assert_eq!(begins(Duration::from_secs(30)).await, [0, 0, 250, 250, 500, 500, 750, 750, 1000, 1000]);
        let begins = begins(Duration::from_millis(249)).await;
        assert!(begins.iter().all(|begin| *begin <= 1000), "{begins:?}");
    }
}
