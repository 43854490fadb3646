//! Removes the devices of a disk from the kernel that nothing on the node uses.

use std::collections::BTreeSet;
use std::path::Path;

use super::disk::FcDisk;
use super::search::search;
use crate::host_program;
use crate::host_program::Call;
use crate::host_program::Programs;
use crate::volumes::VolumeError;
use crate::volumes::disks;
use crate::volumes::disks::Host;
use crate::volumes::plugin::blocking;

/// A disk that is about to be detached; the lock of all Fibre Channel disks is held.
#[derive(Debug)]
pub(super) struct Detaching<'a> {
    pub(super) programs: &'a dyn Programs,
    pub(super) host: &'a Host,
    /// What the disk may be: the first that has a device is it.
    pub(super) readings: Vec<FcDisk>,
    /// The other disks of the node.
    pub(super) others: Vec<FcDisk>,
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
    /// Removes the multipath device of the disk, then all paths to it.
    ///
    /// # Errors
    /// The multipath device stays: its paths are in use. The kernel has a disk in use that was not just unmounted.
    pub(super) async fn run(self) -> Result<(), VolumeError> {
        let (host, readings, others, was_mounted) = (self.host.clone(), self.readings, self.others, self.was_mounted);
        let devices = blocking(move || devices_of_no_other(&host, &readings, &others)).await?;
        for name in &devices.multipath {
            disks::flush_multipath(self.programs, name).await?;
        }
        let host = self.host.clone();
        let unused = blocking(move || unused(&host, devices.disks, was_mounted)).await?;
        for name in &unused {
            flush(self.programs, &self.host.dev.join(name)).await;
        }
        disks::delete_unused(self.host, unused).await
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

/// The devices of a disk, without those that other disks have, and without multipath devices that are in use. Blocking.
fn devices_of_no_other(host: &Host, readings: &[FcDisk], others: &[FcDisk]) -> Result<Devices, VolumeError> {
    let table = disks::mounts()?;
    let own = readings.iter().map(|disk| devices_of(host, disk)).find(|found| *found != Devices::default());
    let Some(mut own) = own else { return Ok(Devices::default()) };
    for other in others.iter().map(|disk| devices_of(host, disk)) {
        own.multipath.retain(|name| !other.multipath.contains(name));
        own.disks.retain(|name| !other.disks.contains(name));
    }
    own.multipath.retain(|name| !host.is_multipath_used(name, &table));
    Ok(own)
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
