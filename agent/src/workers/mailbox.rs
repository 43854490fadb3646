//! Where a worker's requests wait: the pod's state under a lock, and a wake-up. Requests coalesce in the state; the
//! mailbox is never full.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use tokio::sync::Notify;

use super::state::PodState;
use super::state::Reaction;

/// Shared by the sync loop (which requests) and one worker (which completes).
#[derive(Debug)]
pub struct Mailbox {
    state: Mutex<PodState>,
    wake: Notify,
    cancel: Notify,
}

impl Mailbox {
    /// A mailbox with this state of its pod.
    pub fn new(state: PodState) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(state), wake: Notify::new(), cancel: Notify::new() })
    }

    /// The state; hold it only to read or take one step.
    pub fn state(&self) -> MutexGuard<'_, PodState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a reaction on to the worker.
    pub fn react(&self, reaction: Reaction) {
        if reaction.cancel {
            self.cancel.notify_one();
        }
        if reaction.wake {
            self.wake.notify_one();
        }
    }

    /// Waits until there may be work. For one waiter. Cancel-safe.
    pub async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Waits until what the worker is doing is out of date. For one waiter. Cancel-safe.
    pub async fn cancelled(&self) {
        self.cancel.notified().await;
    }
}
