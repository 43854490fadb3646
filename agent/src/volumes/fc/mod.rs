//! Fibre Channel disks: found by the names that udev gives them, and removed from the kernel (upstream: `pkg/volume/fc`).
//! What they share with other disks is in `disks`.
//!
//! ```text
//!  targetWWNs, lun ─▶ /dev/disk/by-path/[pci-...-]fc-0x<name>-lun-<unit>  ┐
//!  wwids           ─▶ /dev/disk/by-id/scsi-<identifier>                   ┴▶ the disk, or the multipath device of its paths
//!                     (no multipath device: scan all SCSI hosts, wait for udev)
//! ```
//!
//! The host has to have udev, and for several paths multipathd(8). As upstream, nothing is recorded: the name of a place is
//! the disk's.

mod attach;
mod detach;
mod disk;
mod search;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::path::PathBuf;

use tokio::sync::OwnedMutexGuard;

use super::VolumeError;
use super::disks::Tools;
use super::layout;
use super::plugin::blocking;
use detach::Detaching;

pub(super) use disk::FcDisk;
pub(super) use disk::FcSource;
pub(super) use disk::names_of_place;
pub(super) use disk::places;
pub(super) use disk::remove_place;
pub(super) use disk::status_name;

/// Name of the plugin.
pub(super) const NAME: &str = crate::model::fc::PLUGIN;

/// Finds the device of the disk.
///
/// # Errors
/// The disk has no device within ten seconds.
pub(super) async fn attach(tools: &Tools, disk: &FcDisk, place: &Path) -> Result<PathBuf, VolumeError> {
    // Before the search: the release of another place keeps the devices of disks that have one. A release that began before
    // that holds the locks of the devices that it removes, for which the search waits.
    let releasing = tools.locks.lock(NAME).await;
    let at = place.to_owned();
    blocking(move || layout::make_dirs(&at)).await?;
    drop(releasing);
    attach::find(tools, disk).await
}

/// Removes the devices of a disk that nothing else on the node uses. The name of its place may have several `readings`, of
/// which only one may lead to a disk. `was_mounted`: its file system was just unmounted. `all` is the lock of all Fibre
/// Channel disks; `None` is returned if it was released before what may take long.
///
/// # Errors
/// A multipath device stays, or a disk that the kernel has in use.
pub(super) async fn detach(
    tools: &Tools,
    readings: Vec<FcDisk>,
    others: Vec<FcDisk>,
    was_mounted: bool,
    all: OwnedMutexGuard<()>,
) -> Result<Option<OwnedMutexGuard<()>>, VolumeError> {
    Detaching { tools, was_mounted }.run(readings, others, all).await
}

/// Name of the lock of a device, which is held while the device is removed.
fn lock_of(device: &str) -> String {
    format!("{NAME}/{device}")
}
