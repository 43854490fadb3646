//! Unmounts and detaches devices that no pod uses any more (upstream: the reconciler's unmount of devices). A pod does not wait
//! for it: the device may be another pod's next.

use std::path::Path;
use std::sync::Arc;

use tokio::time::Instant;

use crate::model::sleep_until;
use crate::retry::Operation;
use crate::workers::worker::WorkerContext;

/// Where the devices are, as the target of looking for them.
const ALL: &str = "devices";

/// Releases devices in the background.
pub(super) struct DeviceRelease(Arc<WorkerContext>);

impl DeviceRelease {
    pub(super) fn new(context: Arc<WorkerContext>) -> Self {
        Self(context)
    }

    /// Looks for unused devices whenever a pod may have been the last one, and again after failures. Nothing is done before
    /// the first pods are known.
    pub(super) async fn run(self) {
        let mut due = None;
        loop {
            tokio::select! {
                () = self.0.act.volumes.until_unused() => {}
                () = sleep_until(due) => {}
            }
            due = self.pass().await;
        }
    }

    /// Releases all devices that are due; when the next one is.
    async fn pass(&self) -> Option<Instant> {
        let (volumes, retries) = (&self.0.act.volumes, &self.0.retries);
        let places = match volumes.unused().await {
            Ok(places) => places,
            Err(error) => return Some(retries.failed(Operation::ReleaseDevice, ALL, &error.to_string())),
        };
        retries.keep_only(Operation::ReleaseDevice, |target| {
            places.iter().any(|place| place.as_path() == Path::new(target))
        });
        let released = places.iter().map(|place| async move {
            let target = place.to_string_lossy();
            if let Some(due) = retries.due(Operation::ReleaseDevice, &target) {
                return Some(due);
            }
            match volumes.release_unused(place).await {
                Ok(()) => retries.succeeded(Operation::ReleaseDevice, &target),
                Err(error) => return Some(retries.failed(Operation::ReleaseDevice, &target, &error.to_string())),
            }
            None
        });
        futures_util::future::join_all(released).await.into_iter().flatten().min()
    }
}
