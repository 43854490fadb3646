//! Unmounts and detaches devices that no pod uses any more (upstream: the reconciler's unmount of devices). A pod does
//! not wait for it: the device may be another pod's next. Nor does one release wait for another, or for a search: that of a
//! disk whose target does not answer may never end.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::model::sleep_until;
use crate::retry::Operation;
use crate::retry::RetryTracker;
use crate::volumes::VolumeError;
use crate::volumes::Volumes;

/// The search for devices, as the target of its retries.
const ALL: &str = "devices";

/// The devices of a node.
pub(super) trait Devices: Send + Sync {
    /// Waits until one may have lost its last pod.
    fn announced(&self) -> impl Future<Output = ()> + Send;

    /// Where those are that no pod uses.
    fn list_unused(&self) -> impl Future<Output = Result<Vec<PathBuf>, VolumeError>> + Send;

    /// Releases one, unless a pod has come to use it.
    fn release(&self, place: &Path) -> impl Future<Output = Result<(), VolumeError>> + Send;
}

impl Devices for Volumes {
    async fn announced(&self) {
        self.until_unused().await;
    }

    async fn list_unused(&self) -> Result<Vec<PathBuf>, VolumeError> {
        self.unused().await
    }

    async fn release(&self, place: &Path) -> Result<(), VolumeError> {
        self.release_unused(place).await
    }
}

/// Places whose release is in progress, and whether they were found unused again meanwhile.
type InProgress = HashMap<PathBuf, bool>;

/// Releases devices in the background.
pub(super) struct DeviceRelease<D> {
    devices: D,
    retries: RetryTracker,
}

impl<D: Devices + 'static> DeviceRelease<D> {
    pub(super) fn new(devices: D, retries: RetryTracker) -> Self {
        Self { devices, retries }
    }

    /// Looks for unused devices whenever a pod may have been the last one, and again after failures. Nothing is done before
    /// the first pods are known.
    pub(super) async fn run(self) {
        let (mut due, mut in_progress) = (None, InProgress::new());
        let (this, mut releases) = (Arc::new(self), JoinSet::<(PathBuf, Option<Instant>)>::new());
        loop {
            tokio::select! {
                () = this.devices.announced() => {}
                () = sleep_until(due) => {}
                Some(ended) = releases.join_next() => {
                    let (place, retry) = ended.unwrap_or_else(|error| resume_unwind(error.into_panic()));
                    let again = in_progress.remove(&place) == Some(true);
                    due = [due, retry, again.then(Instant::now)].into_iter().flatten().min();
                    continue;
                }
            }
            let (begun, next) = this.begin_releases(&mut in_progress).await;
            due = next;
            for place in begun {
                let this = this.clone();
                releases.spawn(async move { this.release(place).await });
            }
        }
    }

    /// The places whose release begins, and when the next one is due.
    async fn begin_releases(&self, in_progress: &mut InProgress) -> (Vec<PathBuf>, Option<Instant>) {
        let retries = &self.retries;
        let places = match self.devices.list_unused().await {
            Ok(places) => places,
            Err(error) => {
                return (Vec::new(), Some(retries.failed(Operation::ReleaseDevice, ALL, &error.to_string())));
            }
        };
        retries.keep_only(Operation::ReleaseDevice, |target| {
            places.iter().any(|place| place.as_path() == Path::new(target))
        });
        begin(places, in_progress, |place| retries.due(Operation::ReleaseDevice, &place.to_string_lossy()))
    }

    /// Releases a device; when to try again.
    async fn release(&self, place: PathBuf) -> (PathBuf, Option<Instant>) {
        let target = place.to_string_lossy().into_owned();
        let retry = match self.devices.release(&place).await {
            Ok(()) => {
                self.retries.succeeded(Operation::ReleaseDevice, &target);
                None
            }
            Err(error) => Some(self.retries.failed(Operation::ReleaseDevice, &target, &error.to_string())),
        };
        (place, retry)
    }
}

/// Of unused places those whose release begins, which is noted, and when the next one is due. `retry`: when a place is due
/// whose last release has failed.
fn begin(
    unused: Vec<PathBuf>,
    in_progress: &mut InProgress,
    retry: impl Fn(&Path) -> Option<Instant>,
) -> (Vec<PathBuf>, Option<Instant>) {
    let (mut begun, mut failed) = (Vec::new(), Vec::new());
    for place in unused {
        if let Some(again) = in_progress.get_mut(&place) {
            *again = true;
        } else if let Some(due) = retry(&place) {
            failed.push(due);
        } else {
            in_progress.insert(place.clone(), false);
            begun.push(place);
        }
    }
    (begun, failed.into_iter().min())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use tokio::sync::Notify;
    use tokio_util::task::AbortOnDropHandle;

    use super::*;
    use crate::recorder::Recorder;

    /// Devices by name: the release of `dead` never ends, that of `slow` when permitted, that of `busy` fails.
    #[derive(Default)]
    struct Node {
        unused: Mutex<Vec<PathBuf>>,
        begun: Mutex<Vec<PathBuf>>,
        ended: Mutex<Vec<PathBuf>>,
        /// Searches never end.
        hangs: AtomicBool,
        announced: Notify,
        permitted: Notify,
    }

    impl Devices for Arc<Node> {
        async fn announced(&self) {
            self.announced.notified().await;
        }

        async fn list_unused(&self) -> Result<Vec<PathBuf>, VolumeError> {
            if self.hangs.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            Ok(self.unused.lock().expect("not poisoned").clone())
        }

        async fn release(&self, place: &Path) -> Result<(), VolumeError> {
            self.begun.lock().expect("not poisoned").push(place.to_owned());
            match place.to_str() {
                Some("dead") => std::future::pending::<()>().await,
                Some("slow") => self.permitted.notified().await,
                Some("busy") => return Err(VolumeError::Interrupted("busy".to_owned())),
                _ => self.unused.lock().expect("not poisoned").retain(|other| other != place),
            }
            self.ended.lock().expect("not poisoned").push(place.to_owned());
            Ok(())
        }
    }

    impl Node {
        /// Releases that begin within `wait` when these places are unused too.
        async fn begins(&self, places: &[&str], wait: Duration) -> Vec<PathBuf> {
            self.unused.lock().expect("not poisoned").extend(places.iter().map(PathBuf::from));
            self.announced.notify_one();
            tokio::time::sleep(wait).await;
            std::mem::take(&mut *self.begun.lock().expect("not poisoned"))
        }
    }

    fn started() -> (Arc<Node>, AbortOnDropHandle<()>) {
        let node = Arc::new(Node::default());
        let release = DeviceRelease::new(node.clone(), RetryTracker::new(Recorder::default(), None));
        (node, AbortOnDropHandle::new(tokio::spawn(release.run())))
    }

    const SOON: Duration = Duration::from_millis(1);

    #[tokio::test(start_paused = true)]
    async fn a_release_that_never_ends_delays_no_other() {
        let (node, _running) = started();
        assert_eq!(node.begins(&["dead", "a"], SOON).await, ["dead", "a"].map(PathBuf::from));
        assert_eq!(node.begins(&["b"], SOON).await, ["b"].map(PathBuf::from), "and it is not begun twice");
        assert_eq!(*node.unused.lock().expect("not poisoned"), ["dead"].map(PathBuf::from));
        // Neither does it keep another from being retried: after half a second to three quarters of one.
        let begun = node.begins(&["busy"], Duration::from_millis(800)).await;
        assert_eq!(begun, ["busy", "busy"].map(PathBuf::from));
    }

    #[tokio::test(start_paused = true)]
    async fn a_search_that_never_ends_holds_up_no_release() {
        let (node, _running) = started();
        assert_eq!(node.begins(&["slow"], SOON).await, ["slow"].map(PathBuf::from));
        node.hangs.store(true, Ordering::Relaxed);
        assert_eq!(node.begins(&["a"], SOON).await, [""; 0].map(PathBuf::from));
        node.permitted.notify_one();
        tokio::time::sleep(SOON).await;
        assert_eq!(*node.ended.lock().expect("not poisoned"), ["slow"].map(PathBuf::from));
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_is_unused_again_during_its_release_is_released_again() {
        let (node, _running) = started();
        assert_eq!(node.begins(&["slow"], SOON).await, ["slow"].map(PathBuf::from));
        assert_eq!(node.begins(&[], SOON).await, [""; 0].map(PathBuf::from), "it is in progress");
        node.permitted.notify_one();
        tokio::time::sleep(SOON).await;
        assert_eq!(*node.begun.lock().expect("not poisoned"), ["slow"].map(PathBuf::from), "and no more often");
        node.permitted.notify_one();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(node.begun.lock().expect("not poisoned").len(), 1);
    }
}
