//! Removes the devices of a disk from the kernel that nothing on the node uses.

use std::collections::BTreeSet;
use std::path::Path;

use tokio::sync::OwnedMutexGuard;

use super::disk::FcDisk;
use super::lock_of;
use super::search::search;
use crate::host_program;
use crate::host_program::Call;
use crate::host_program::Programs;
use crate::volumes::VolumeError;
use crate::volumes::disks;
use crate::volumes::disks::Host;
use crate::volumes::disks::Tools;
use crate::volumes::plugin::blocking;

/// A disk that is about to be detached.
#[derive(Debug)]
pub(super) struct Detaching<'a> {
    pub(super) tools: &'a Tools,
    /// Its file system was just unmounted and written out.
    pub(super) was_mounted: bool,
}

/// Names of devices that lead to disks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Devices {
    multipath: BTreeSet<String>,
    disks: BTreeSet<String>,
}

impl Detaching<'_> {
    /// Removes the devices that the disk has by its `readings` and none of the `others` has. `all` is the lock of all Fibre
    /// Channel disks: it is released before what takes long if a device does not answer, and `None` returned then. The locks
    /// of the devices are held instead, for which only the attachment of the same disk waits.
    ///
    /// # Errors
    /// A multipath device stays: its paths are in use. The kernel has a disk in use that was not just unmounted, or a device
    /// is being removed already.
    pub(super) async fn run(
        self,
        readings: Vec<FcDisk>,
        others: Vec<FcDisk>,
        all: OwnedMutexGuard<()>,
    ) -> Result<Option<OwnedMutexGuard<()>>, VolumeError> {
        let host = self.tools.host.clone();
        let (devices, is_shared) = blocking(move || devices_of_no_other(&host, &readings, &others)).await?;
        if devices == Devices::default() {
            return Ok(Some(all));
        }
        let _removing = self.lock(&devices)?;
        // Two disks that share devices leave them to each other: one release has to be over before the other begins.
        let all = is_shared.then_some(all);
        self.remove(devices).await.map(|()| all)
    }

    /// Locks devices that are about to be removed. Does not wait: the lock of all disks is held.
    ///
    /// # Errors
    /// One is being removed: the kernel may have given its name to another disk meanwhile.
    fn lock(&self, devices: &Devices) -> Result<Vec<OwnedMutexGuard<()>>, VolumeError> {
        let lock = |name: &String| {
            let held = self.tools.locks.try_lock(&lock_of(name));
            held.ok_or_else(|| VolumeError::FcDisk(format!("fc: {name} is being removed already")))
        };
        devices.multipath.iter().chain(&devices.disks).map(lock).collect()
    }

    /// The multipath device first, then all paths to the disk.
    async fn remove(&self, devices: Devices) -> Result<(), VolumeError> {
        let (programs, host, was_mounted) = (&*self.tools.programs, &self.tools.host, self.was_mounted);
        for name in &devices.multipath {
            disks::flush_multipath(programs, name).await?;
        }
        let of = host.clone();
        let unused = blocking(move || unused(&of, devices.disks, was_mounted)).await?;
        for name in &unused {
            flush(programs, &host.dev.join(name)).await;
        }
        disks::delete_unused(host, unused).await
    }
}

/// Writes out what the kernel holds for a device. As upstream, one that cannot be flushed is removed all the same.
async fn flush(programs: &dyn Programs, device: &Path) {
    let device = device.to_string_lossy();
    let call = Call::new("blockdev", ["--flushbufs", &*device]);
    if let Err(error) = host_program::succeed(programs, &call).await {
        tracing::warn!(%device, %error, "cannot flush a disk that is removed");
    }
}

/// The devices of a disk, without those that other disks have, and without multipath devices that are in use; and whether
/// other disks have some. Blocking.
fn devices_of_no_other(host: &Host, readings: &[FcDisk], others: &[FcDisk]) -> Result<(Devices, bool), VolumeError> {
    let table = disks::mounts()?;
    let found = readings.iter().map(|disk| devices_of(host, disk)).find(|found| *found != Devices::default());
    let all = found.unwrap_or_default();
    let mut own = all.clone();
    for other in others.iter().map(|disk| devices_of(host, disk)) {
        own.multipath.retain(|name| !other.multipath.contains(name));
        own.disks.retain(|name| !other.disks.contains(name));
    }
    let is_shared = own != all;
    own.multipath.retain(|name| !host.is_multipath_used(name, &table));
    Ok((own, is_shared))
}

/// Those of the disks that nothing on the node uses. A container may have a copy of the mount that was just removed: as
/// upstream, its disk is removed all the same, so that this node cannot write it once another one has it. Blocking.
///
/// # Errors
/// The kernel has a disk in use for something else that no mount of the node shows.
fn unused(host: &Host, all: BTreeSet<String>, was_mounted: bool) -> Result<Vec<String>, VolumeError> {
    let table = disks::mounts()?;
    let has_reserved = |disk: &str| host.partitions(disk).iter().any(|partition| host.is_reserved(partition));
    let is_used = |disk: &str| host.is_used(disk, &table) || host.is_mapped(disk) || has_reserved(disk);
    let unused: Vec<String> = all.into_iter().filter(|disk| !is_used(disk)).collect();
    match unused.iter().find(|disk| !was_mounted && host.is_reserved(disk)) {
        Some(disk) => Err(VolumeError::FcDisk(format!("fc: {disk} is in use by the kernel, and is not removed"))),
        None => Ok(unused),
    }
}

/// The devices that lead to a disk, with those that its names do not: all paths that its multipath device has. Blocking.
fn devices_of(host: &Host, disk: &FcDisk) -> Devices {
    let mut found = Devices::default();
    for device in search(host, disk).devices {
        let Some(name) = device.file_name().and_then(|name| name.to_str()) else { continue };
        match host.multipath_of(name) {
            Some(multipath) => {
                found.disks.extend(host.disks_of(&multipath));
                found.multipath.insert(multipath.clone());
                if multipath != name {
                    found.disks.insert(name.to_owned());
                }
            }
            None => _ = found.disks.insert(name.to_owned()),
        }
    }
    found
}
