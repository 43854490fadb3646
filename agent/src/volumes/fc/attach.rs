//! Finds the device of a disk, and makes the kernel look for it.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use super::disk::FcDisk;
use super::lock_of;
use super::search::Found;
use super::search::search;
use crate::volumes::VolumeError;
use crate::volumes::disks::Tools;
use crate::volumes::plugin::blocking;

/// How long udev may take to name a disk that the kernel has found, and multipathd(8) to join its paths.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(100);

/// The device of the disk: that of all paths if multipathd(8) makes one, or the first path. As upstream, all SCSI hosts are
/// scanned if there is no multipath device. The only path of a disk with one name is used as soon as it appears; one of
/// several that are named, only if multipathd(8) does not join them in time.
///
/// # Errors
/// There is none.
pub(super) async fn find(tools: &Tools, disk: &FcDisk) -> Result<PathBuf, VolumeError> {
    let was_there = match look(tools, disk).await? {
        Found { multipath: Some(device), .. } => return Ok(device),
        found => !found.devices.is_empty(),
    };
    let scanned = tools.host.clone();
    blocking(move || {
        scanned.scan_all();
        Ok(())
    })
    .await?;
    let deadline = Instant::now() + if was_there { Duration::ZERO } else { DEVICE_TIMEOUT };
    loop {
        let found = look(tools, disk).await?;
        let is_complete = found.multipath.is_some() || (disk.ids.len() == 1 && found.devices.len() == 1);
        if is_complete || Instant::now() >= deadline {
            return found.device().cloned().ok_or_else(|| VolumeError::FcDisk(problem(disk)));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// What leads to the disk. A device of it that is being removed is waited for: it would vanish under the volume.
async fn look(tools: &Tools, disk: &FcDisk) -> Result<Found, VolumeError> {
    loop {
        let (host, wanted) = (tools.host.clone(), disk.clone());
        let found = blocking(move || Ok(search(&host, &wanted))).await?;
        let all = found.devices.iter().chain(&found.multipath);
        let names = all.filter_map(|device| device.file_name()?.to_str());
        let removed = names.map(lock_of).find(|lock| tools.locks.try_lock(lock).is_none());
        let Some(removed) = removed else { return Ok(found) };
        drop(tools.locks.lock(&removed).await);
    }
}

fn problem(disk: &FcDisk) -> String {
    let (ids, seconds) = (disk.ids.join(", "), DEVICE_TIMEOUT.as_secs());
    let (wanted, folder) = match disk.lun {
        Some(lun) => (format!("of unit {lun} at target {ids}"), "by-path"),
        None => (format!("with identifier {ids}"), "by-id"),
    };
    format!("no fc disk found: no device {wanted} in /dev/disk/{folder} within {seconds} s")
}
