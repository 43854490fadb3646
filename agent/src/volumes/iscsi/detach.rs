//! Takes the device of a disk away that nothing on the node uses, and ends the sessions that no other disk needs.

use super::attach::perform;
use super::commands;
use super::disk::DiskRecord;
use crate::host_program::Programs;
use crate::volumes::VolumeError;
use crate::volumes::disks;
use crate::volumes::disks::Host;
use crate::volumes::plugin::blocking;

/// A disk that is about to be detached; the lock of its target is held.
#[derive(Debug)]
pub(super) struct Detaching<'a> {
    pub(super) programs: &'a dyn Programs,
    pub(super) host: &'a Host,
    pub(super) record: &'a DiskRecord,
    /// The other disks of the node.
    pub(super) others: &'a [DiskRecord],
}

impl Detaching<'_> {
    /// Removes the devices of the disk, and ends the sessions at its portals.
    ///
    /// # Errors
    /// A session stays that nothing needs.
    pub(super) async fn run(&self) -> Result<(), VolumeError> {
        let lun = self.record.unit()?;
        let of_target: Vec<&DiskRecord> =
            self.others.iter().filter(|other| other.target == self.record.target).collect();
        if of_target.iter().all(|other| other.lun != self.record.lun) {
            self.remove_devices(lun).await?;
        }
        let used = self.portals_of_used_disks().await?;
        let is_needed =
            |portal: &String| used.contains(portal) || of_target.iter().any(|other| other.portals.contains(portal));
        let free: Vec<&str> =
            self.record.portals.iter().filter(|portal| !is_needed(portal)).map(String::as_str).collect();
        perform(self.programs, &commands::log_out(self.record, &free)).await
    }

    /// Removes the disk's devices from the kernel. A failure is only logged: the logout removes them too.
    async fn remove_devices(&self, lun: u8) -> Result<(), VolumeError> {
        let (host, target) = (self.host.clone(), self.record.target.clone());
        let find = move || {
            let sessions = host.sessions(&target);
            let disks = sessions.into_iter().flat_map(|session| session.disks);
            let disks: Vec<String> = disks.filter(|(unit, _)| *unit == u64::from(lun)).map(|(_, disk)| disk).collect();
            let mut maps: Vec<_> = disks.iter().filter_map(|disk| host.multipath_of(disk)).collect();
            maps.sort();
            maps.dedup();
            Ok((disks, maps))
        };
        let (disks, maps) = blocking(find).await?;
        for map in maps {
            if let Err(error) = disks::flush_multipath(self.programs, &map).await {
                tracing::warn!(map, %error, "cannot remove a multipath device");
            }
        }
        disks::delete_unused(self.host, disks).await
    }

    /// Portals of sessions with a disk that is mounted or otherwise in use.
    async fn portals_of_used_disks(&self) -> Result<Vec<String>, VolumeError> {
        let (host, record) = (self.host.clone(), self.record.clone());
        blocking(move || {
            let table = disks::mounts()?;
            let is_used = |disks: &[(u64, String)]| disks.iter().any(|(_, disk)| host.is_used(disk, &table));
            let used: Vec<_> =
                host.sessions(&record.target).into_iter().filter(|session| is_used(&session.disks)).collect();
            let portals = record.portals.into_iter();
            Ok(portals.filter(|portal| used.iter().any(|session| session.has(portal))).collect())
        })
        .await
    }
}
