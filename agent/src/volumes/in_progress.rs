//! Which pods' volumes are being set up or torn down. A teardown is alone; each volume is set up by one task at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::Weak;

use tokio::sync::OwnedMutexGuard;
use tokio::sync::OwnedRwLockReadGuard;
use tokio::sync::OwnedRwLockWriteGuard;
use tokio::sync::RwLock;
use tokio_util::sync::CancellationToken;

use super::global_mounts::Locks;

/// Set-ups and teardowns in progress, by UID of the pod. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct InProgress(Arc<Mutex<HashMap<String, Weak<OfPod>>>>);

/// What is in progress for one pod.
#[derive(Debug, Default)]
struct OfPod {
    /// Read by set-ups, written by teardowns.
    alone: Arc<RwLock<()>>,
    /// Locks of volumes, by name or claim.
    volumes: Locks,
    /// Cancelled when a teardown begins; the set-ups after it have another one.
    over: Mutex<CancellationToken>,
}

impl OfPod {
    fn over(&self) -> MutexGuard<'_, CancellationToken> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InProgress {
    fn of_pod(&self, uid: &str) -> Arc<OfPod> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, of_pod| of_pod.strong_count() > 0);
        if let Some(known) = all.get(uid).and_then(Weak::upgrade) {
            return known;
        }
        let of_pod = Arc::<OfPod>::default();
        all.insert(uid.to_owned(), Arc::downgrade(&of_pod));
        of_pod
    }

    /// Begins set-ups of a pod's volumes, once no teardown is in progress. Cancel-safe.
    pub(super) async fn set_up(&self, uid: &str) -> SettingUp {
        let of_pod = self.of_pod(uid);
        let shared = Arc::new(of_pod.alone.clone().read_owned().await);
        let over = of_pod.over().clone();
        SettingUp { of_pod, over, _shared: shared }
    }

    /// Begins a teardown: the pod's set-ups give up what they wait for, and those that go on are waited for. Cancel-safe.
    pub(super) async fn tear_down(&self, uid: &str) -> TearingDown {
        let of_pod = self.of_pod(uid);
        std::mem::take(&mut *of_pod.over()).cancel();
        TearingDown { _alone: of_pod.alone.clone().write_owned().await, _of_pod: of_pod }
    }
}

/// Set-ups of one pod's volumes. No teardown begins until all clones are dropped.
#[derive(Clone, Debug)]
pub(super) struct SettingUp {
    of_pod: Arc<OfPod>,
    over: CancellationToken,
    _shared: Arc<OwnedRwLockReadGuard<()>>,
}

impl SettingUp {
    /// Cancelled when a teardown waits for the end of these set-ups.
    pub(super) fn over(&self) -> &CancellationToken {
        &self.over
    }

    /// Waits until nothing else sets up the volume, or one of the claim, of this name. Cancel-safe.
    pub(super) async fn lock(&self, volume: &str) -> OwnedMutexGuard<()> {
        self.of_pod.volumes.lock(volume).await
    }
}

/// A teardown, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct TearingDown {
    _alone: OwnedRwLockWriteGuard<()>,
    _of_pod: Arc<OfPod>,
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_teardown_ends_what_set_ups_wait_for_and_waits_for_their_end() {
        let all = InProgress::default();
        let (one, other) = (all.set_up("u").await, all.set_up("u").await);
        let volume = one.lock("v").await;
        assert!(other.lock("v").now_or_never().is_none() && other.lock("w").now_or_never().is_some());
        drop((volume, other));
        let in_task = one.clone();
        drop(one);

        let mut teardown = Box::pin(all.tear_down("u"));
        assert!(futures_util::poll!(&mut teardown).is_pending() && in_task.over().is_cancelled());
        assert!(all.tear_down("another").now_or_never().is_some());
        let mut next = Box::pin(all.set_up("u"));
        assert!(futures_util::poll!(&mut next).is_pending());
        drop(in_task);
        let teardown = teardown.await;
        assert!(futures_util::poll!(&mut next).is_pending(), "the teardown is alone");
        drop(teardown);
        assert!(!next.await.over().is_cancelled());
        drop(all.set_up("x").await);
        assert_eq!(all.0.lock().expect("unpoisoned").len(), 1, "the one that was asked for last");
    }
}
