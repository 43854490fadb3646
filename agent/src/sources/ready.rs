//! Which sources are ready: until all of them are, no pod is known to be undesired; until they are complete, no static pod.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use tokio::sync::Notify;

use crate::model::ConfigSource;

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Its first complete set was merged.
    delivered: bool,
    /// Updates of incomplete sets that have not gone through the sync loop yet.
    incomplete: usize,
    /// One of them has.
    partly_seen: bool,
    /// An update of a complete set went through the sync loop.
    seen: bool,
}

/// Shared by the merger, which delivers updates, and the sync loop, which handles them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SourcesHandle {
    /// One entry per configured source. A std lock: held for one access, never across an await.
    progress: Arc<Mutex<Vec<(ConfigSource, Progress)>>>,
    /// A source has delivered.
    delivery: Arc<Notify>,
}

impl SourcesHandle {
    pub(super) fn new(sources: Vec<ConfigSource>) -> Self {
        let progress = sources.into_iter().map(|source| (source, Progress::default())).collect();
        Self { progress: Arc::new(Mutex::new(progress)), delivery: Arc::new(Notify::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(ConfigSource, Progress)>> {
        // Plain flags: a panic elsewhere cannot leave them half-written.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, source: ConfigSource, note: impl Fn(&mut Progress)) {
        self.lock().iter_mut().filter(|(s, _)| *s == source).for_each(|(_, progress)| note(progress));
    }

    pub(super) fn mark_delivered(&self, source: ConfigSource) {
        self.note(source, |progress| progress.delivered = true);
        self.delivery.notify_waiters();
    }

    /// The next update of this source is one of an incomplete set: the source is not complete with it.
    pub(super) fn mark_incomplete(&self, source: ConfigSource) {
        self.note(source, |progress| progress.incomplete += 1);
    }

    /// Waits until a configured source has delivered its first set. Cancelled by dropping it.
    pub(super) async fn until_delivered(&self, source: ConfigSource) {
        loop {
            // Before the check, so that no delivery is missed.
            let delivery = self.delivery.notified();
            if self.lock().iter().any(|(one, progress)| *one == source && progress.delivered) {
                return;
            }
            delivery.await;
        }
    }

    /// The sync loop has handled an update of this source.
    pub fn mark_seen(&self, source: ConfigSource) {
        self.note(source, |progress| match progress.incomplete.checked_sub(1) {
            Some(left) => (progress.incomplete, progress.partly_seen) = (left, true),
            None => progress.seen = true,
        });
    }

    /// The sync loop has handled an update of every configured source, which may lack static pods that run: a manifest that
    /// cannot be read does not hold up what concerns other pods. True at once without sources.
    pub fn all_ready(&self) -> bool {
        self.lock().iter().all(|(_, progress)| progress.partly_seen || (progress.delivered && progress.seen))
    }

    /// Every configured source has delivered a complete set and the sync loop has handled an update of it. True at
    /// once without sources.
    pub fn all_complete(&self) -> bool {
        self.waiting_for().is_empty()
    }

    /// The sources that [`SourcesHandle::all_complete`] still waits for.
    pub fn waiting_for(&self) -> Vec<ConfigSource> {
        let waiting = |progress: &Progress| !(progress.delivered && progress.seen);
        self.lock().iter().filter(|(_, p)| waiting(p)).map(|(source, _)| *source).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_needs_delivery_and_sight_of_every_source() {
        assert!(SourcesHandle::new(vec![]).all_ready());
        let handle = SourcesHandle::new(vec![ConfigSource::File, ConfigSource::Http]);
        handle.mark_delivered(ConfigSource::File);
        handle.mark_seen(ConfigSource::File);
        assert_eq!(handle.waiting_for(), [ConfigSource::Http]);
        handle.mark_seen(ConfigSource::Http);
        assert!(!handle.all_ready(), "seen but not delivered");
        handle.mark_seen(ConfigSource::Api);
        handle.mark_delivered(ConfigSource::Http);
        assert!(handle.all_ready());
    }

    /// The sync loop acts when it finds that the source has become ready by the update that it handles.
    #[test]
    fn an_update_of_an_incomplete_set_is_none_of_the_complete_one() {
        let handle = SourcesHandle::new(vec![ConfigSource::File]);
        handle.mark_incomplete(ConfigSource::File);
        handle.mark_incomplete(ConfigSource::File);
        assert!(!handle.all_ready(), "not seen yet");
        handle.mark_seen(ConfigSource::File);
        assert!(handle.all_ready() && !handle.all_complete(), "what concerns other pods does not wait");
        handle.mark_delivered(ConfigSource::File);
        handle.mark_seen(ConfigSource::File);
        assert!(!handle.all_complete(), "the loop has not seen the complete set yet");
        handle.mark_seen(ConfigSource::File);
        assert!(handle.all_complete());
    }
}
