//! When a request was sent: from then on its answer is awaited.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

/// An extension of a request, which its sender shares with the path of all requests: that one sends it again after a pause
/// for which the server has asked (`Retry-After`), and an answer is awaited only after it.
#[derive(Clone, Debug)]
pub(super) struct SentAt(Arc<Mutex<Instant>>);

impl SentAt {
    /// It is sent now.
    pub(super) fn now() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    /// It is sent again after this pause.
    pub(super) fn postpone(&self, pause: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + pause;
    }

    /// When it was sent last, or will be sent again.
    pub(super) fn get(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
