//! Removes disks from the kernel that nothing on the node uses, with the multipath devices made from them.

use std::path::Path;

use super::host::Host;
use crate::filesystem::MountTable;
use crate::host_program;
use crate::host_program::Call;
use crate::host_program::Programs;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::plugin::blocking;

/// Removes a multipath device, which keeps its disks in use.
///
/// # Errors
/// It is in use, or multipath(8) is missing.
pub(in crate::volumes) async fn flush_multipath(programs: &dyn Programs, name: &str) -> Result<(), VolumeError> {
    host_program::succeed(programs, &Call::new("multipath", ["-f", name])).await?;
    Ok(())
}

/// Removes the disks that are in use by nothing. One that the kernel does not remove is only logged: it stays as it was.
///
/// # Errors
/// The table of mounts cannot be read.
pub(in crate::volumes) async fn delete_unused(host: &Host, disks: Vec<String>) -> Result<(), VolumeError> {
    let host = host.clone();
    blocking(move || {
        let table = mounts()?;
        for disk in disks.iter().filter(|disk| !host.is_used(disk, &table)) {
            if let Err(error) = host.delete(disk) {
                tracing::warn!(disk, %error, "cannot remove the device of a disk");
            }
        }
        Ok(())
    })
    .await
}

/// The table of mounts. Blocking.
///
/// # Errors
/// It cannot be read.
pub(in crate::volumes) fn mounts() -> Result<MountTable, VolumeError> {
    MountTable::read().on("read", Path::new("/proc/thread-self/mountinfo"))
}
