//! preStop hooks in progress.
//!
//! A stop waits for the hook no longer than the grace period. The hook is not cancelled then, as upstream: a command ends
//! with its container, and its failure is still reported. It is dropped [`LATE`] after the container was stopped, so that
//! a server that never answers does not keep a task forever.
//!
//! A stop that is abandoned for another with a shorter grace period leaves its hook behind, and the next stop of the same
//! instance continues to wait for it: the hook of one instance is never run twice at the same time. A stop that failed is
//! retried with its hook, as upstream.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::model::ContainerId;

/// How long a hook may continue after its container was stopped.
const LATE: Duration = Duration::from_secs(10);

/// preStop hooks that were begun by stops in progress or abandoned ones, by container instance.
#[derive(Debug, Default)]
pub(in crate::workers::act) struct PreStops(Mutex<HashMap<ContainerId, Begun>>);

#[derive(Debug)]
struct Begun {
    /// UID of the pod.
    pod: String,
    /// True once the hook has ended.
    ended: watch::Receiver<bool>,
    task: AbortOnDropHandle<()>,
}

impl PreStops {
    /// Runs the hook of an instance of pod `uid`, or continues the one that was begun, and waits for its end no longer
    /// than `limit`. Returns whether it has ended. Dropping the future leaves the hook running for the next call.
    pub(in crate::workers::act) async fn run<F>(
        &self,
        uid: &str,
        id: &ContainerId,
        limit: Duration,
        hook: impl FnOnce() -> F,
    ) -> bool
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut ended = self.lock().entry(id.clone()).or_insert_with(|| Begun::begin(uid, hook())).ended.clone();
        // An error: the hook ended by a panic.
        tokio::time::timeout(limit, ended.wait_for(|ended| *ended)).await.is_ok()
    }

    /// The stop of an instance has returned: the next one runs its hook again.
    pub(in crate::workers::act) fn release(&self, id: &ContainerId) {
        let Some(begun) = self.lock().remove(id) else { return };
        if !*begun.ended.borrow() {
            tokio::spawn(async move {
                // Dropping the handle aborts the hook.
                let _ = tokio::time::timeout(LATE, begun.task).await;
            });
        }
    }

    /// No process of a pod is left: its hooks end as after their stops. A stop may not have returned yet.
    pub(in crate::workers::act) fn forget_pod(&self, uid: &str) {
        let of_pod = |(id, begun): (&ContainerId, &Begun)| (begun.pod == uid).then(|| id.clone());
        let ids: Vec<ContainerId> = self.lock().iter().filter_map(of_pod).collect();
        ids.iter().for_each(|id| self.release(id));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ContainerId, Begun>> {
        // Entries are added and removed whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Begun {
    fn begin(uid: &str, hook: impl Future<Output = ()> + Send + 'static) -> Self {
        let (sender, ended) = watch::channel(false);
        let task = AbortOnDropHandle::new(tokio::spawn(async move {
            hook.await;
            sender.send_replace(true);
        }));
        Self { pod: uid.to_owned(), ended, task }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering;

    use tokio::time::Instant;
    use tokio::time::sleep;

    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Counts how many hooks were begun and how many ended, each of which takes 20 seconds.
    #[derive(Clone, Default)]
    struct Counts(Arc<[AtomicUsize; 2]>);

    impl Counts {
        async fn hook(self) {
            self.0[0].fetch_add(1, Ordering::Relaxed);
            sleep(seconds(20)).await;
            self.0[1].fetch_add(1, Ordering::Relaxed);
        }

        fn now(&self) -> [usize; 2] {
            [0, 1].map(|index| self.0[index].load(Ordering::Relaxed))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_stop_leaves_its_hook_to_the_next_one() {
        let (hooks, counts, id, since) = (PreStops::default(), Counts::default(), "c".into(), Instant::now());
        let run = |limit| hooks.run("uid", &id, limit, || counts.clone().hook());
        assert!(tokio::time::timeout(seconds(12), run(seconds(30))).await.is_err(), "the stop was abandoned");
        assert!(run(seconds(10)).await);
        assert_eq!((since.elapsed(), counts.now()), (seconds(20), [1, 1]));
        assert!(run(seconds(10)).await, "it has ended already");
        hooks.release(&id);
        assert!(!run(seconds(10)).await);
        assert_eq!(counts.now(), [2, 1], "a stop that was tried again runs it again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_hook_continues_for_a_while_after_the_stop() {
        for (limit, ended) in [(9, 0), (11, 1)] {
            let (hooks, counts, id) = (PreStops::default(), Counts::default(), "c".into());
            assert!(!hooks.run("uid", &id, seconds(limit), || counts.clone().hook()).await);
            hooks.release(&id);
            sleep(seconds(60)).await;
            assert_eq!(counts.now(), [1, ended], "{limit} s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hooks_end_with_their_pod() {
        let (hooks, counts, id) = (PreStops::default(), Counts::default(), "c".into());
        assert!(!hooks.run("uid", &id, seconds(1), || counts.clone().hook()).await);
        hooks.forget_pod("other");
        assert_eq!(hooks.lock().len(), 1);
        hooks.forget_pod("uid");
        sleep(seconds(60)).await;
        assert_eq!(counts.now(), [1, 0]);
    }
}
