//! A pod's registration for its objects, and the counter of their changes.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::Weak;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::watch;

use super::Inner;
use crate::model::PodUid;

/// Counts the changes of all objects of one registration.
pub(super) type Changed = watch::Sender<u64>;

/// Identifies a registration: a pod may be registered again before its previous registration is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct RegistrationId(u64);

/// One pod's registration. Dropping it releases the objects.
pub struct Registration {
    pub(super) id: RegistrationId,
    pub(super) uid: PodUid,
    pub(super) counter: Changed,
    /// Where it is registered.
    pub(super) objects: Weak<Inner>,
    changes: watch::Receiver<u64>,
}

impl Registration {
    /// A registration without objects.
    pub fn new(uid: PodUid) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (counter, changes) = watch::channel(0);
        Self { id: RegistrationId(NEXT.fetch_add(1, Relaxed)), uid, counter, objects: Weak::new(), changes }
    }

    /// Changes of the pod's objects since its registration.
    pub fn generation(&self) -> u64 {
        *self.changes.borrow()
    }

    /// Waits for the next change. Cancelling the wait loses no change.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            // Unreachable: the counter lives as long as `self`.
            std::future::pending().await
        }
    }
}

/// Registrations notified of changes of objects that many pods share.
#[derive(Default)]
pub(super) struct Listeners(Mutex<HashMap<RegistrationId, (PodUid, Changed)>>);

impl Listeners {
    fn all(&self) -> MutexGuard<'_, HashMap<RegistrationId, (PodUid, Changed)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies this registration from now on if it `listens`, and else no longer.
    pub(super) fn set(&self, registration: &Registration, listens: bool) {
        if listens {
            let entry = (registration.uid.clone(), registration.counter.clone());
            self.all().insert(registration.id, entry);
        } else {
            self.remove(registration.id);
        }
    }

    pub(super) fn remove(&self, id: RegistrationId) {
        self.all().remove(&id);
    }

    /// Counts a change for all.
    pub(super) fn notify_all(&self) {
        self.notify(|_| true);
    }

    /// Counts a change for the registrations of some pods.
    pub(super) fn notify(&self, concerned: impl Fn(&PodUid) -> bool) {
        let all = self.all();
        let concerned = all.values().filter(|(uid, _)| concerned(uid));
        concerned.for_each(|(_, changed)| changed.send_modify(|count| *count += 1));
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration")
            .field("uid", &self.uid)
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(objects) = self.objects.upgrade() {
            objects.unregister(self.id, &self.uid);
        }
    }
}
