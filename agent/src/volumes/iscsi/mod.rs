//! iSCSI disks: attached by iscsiadm(8), and detached (upstream: `pkg/volume/iscsi`). What they share with other disks is in
//! `disks`.
//!
//! The host has to have iscsiadm(8) with a running iscsid(8), and udev. The record `iscsi.json` of a disk is a kubelet's.

mod attach;
mod chap;
mod commands;
mod detach;
mod disk;
mod host;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::path::PathBuf;

use super::VolumeError;
use super::disks::Tools;
use super::plugin::blocking;
use attach::Attaching;
use detach::Detaching;

pub(super) use chap::Chap;
pub(super) use disk::DiskRecord;
pub(super) use disk::IscsiSource;
pub(super) use disk::names_of_place;
pub(super) use disk::places;
pub(super) use disk::status_name;

/// Name of the plugin.
pub(super) const NAME: &str = crate::model::iscsi::PLUGIN;

/// Attaches the disk and leaves its record in its place.
///
/// # Errors
/// No portal leads to the disk.
pub(super) async fn attach(
    tools: &Tools,
    record: &DiskRecord,
    chap: &Chap,
    place: &Path,
) -> Result<PathBuf, VolumeError> {
    let base = attach::interface(&*tools.programs, record).await?;
    // Before the login: only a recorded session is logged out.
    let (to_write, at) = (record.clone(), place.to_owned());
    blocking(move || to_write.write(&at)).await?;
    let (programs, host, targets) = (&*tools.programs, &tools.host, &tools.locks);
    Attaching { programs, host, targets, record, chap }.run(&base).await
}

/// Removes the devices of the disk, and ends its sessions that no other disk of the node needs. The lock of its target is
/// held.
///
/// # Errors
/// A session stays.
pub(super) async fn detach(tools: &Tools, record: &DiskRecord, others: &[DiskRecord]) -> Result<(), VolumeError> {
    Detaching { programs: &*tools.programs, host: &tools.host, record, others }.run().await
}
