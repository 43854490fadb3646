//! Releases devices that no pod uses any more.

use std::path::Path;
use std::path::PathBuf;

use super::VolumeError;
use super::Volumes;
use super::claims;
use super::plugin::blocking;

impl Volumes {
    /// Requests a search for devices that no pod uses any more: all pods that will use some are known.
    pub fn request_unused_search(&self) {
        self.node.globals.announce();
    }

    /// Waits until a search is requested. For one waiter. Cancel-safe.
    pub async fn until_unused(&self) {
        self.node.globals.announced().await;
    }

    /// Where devices are mounted, or attached, that no pod uses: those of persistent volumes on local devices, iSCSI disks,
    /// Fibre Channel disks and FlexVolumes.
    ///
    /// # Errors
    /// The places, or the table of mounts, cannot be read.
    pub async fn unused(&self) -> Result<Vec<PathBuf>, VolumeError> {
        let (dirs, node) = (self.dirs.clone(), self.node.clone());
        blocking(move || {
            let mut unused = node.disks.unused()?;
            unused.extend(node.flex_volumes.unused()?);
            for place in claims::places(&dirs)? {
                if node.globals.is_unused(&place)? {
                    unused.push(place);
                }
            }
            Ok(unused)
        })
        .await
    }

    /// Unmounts and detaches the device of a place, unless a pod has come to use it.
    ///
    /// # Errors
    /// It is in use, or cannot be detached. The next call completes what was begun.
    pub async fn release_unused(&self, place: &Path) -> Result<(), VolumeError> {
        let (disks, globals, flex_volumes) = (&self.node.disks, &self.node.globals, &self.node.flex_volumes);
        let operation = if disks.is_of_device(place) { "unmap_device" } else { "unmount_device" };
        match disks.kind_of(place) {
            Some(kind) => self.actual.timed(operation, kind.plugin(), disks.release(place)).await,
            None if flex_volumes.owns(place) => {
                let released = flex_volumes.release(place, &self.objects);
                self.actual.timed(operation, flex_volumes.plugin_of_place(place), released).await
            }
            None => self.actual.timed(operation, claims::LOCAL, claims::release(globals, place)).await,
        }
    }
}
