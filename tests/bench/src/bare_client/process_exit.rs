//! Waits for the exit of a container's init process through a pidfd.

use anyhow::Context as _;
use keblet::kernel::pidfd;
use keblet::kernel::pidfd::PinError;
use keblet::kernel::pidfd::PinnedProcess;
use keblet::runtime::Runtime;

/// Returns once the container's init process has exited.
///
/// # Errors
/// The runtime reports no PID, or the kernel refuses a pidfd.
pub(super) async fn wait(runtime: &Runtime, id: &str) -> anyhow::Result<()> {
    match pin(runtime, id).await? {
        Some(process) => process.gone().await.with_context(|| format!("cannot wait for the process of container {id}")),
        None => Ok(()),
    }
}

/// A pidfd of the container's init process; `None` if it has exited.
///
/// # Errors
/// The runtime reports no PID, or the kernel refuses a pidfd.
pub(super) async fn pin(runtime: &Runtime, id: &str) -> anyhow::Result<Option<PinnedProcess>> {
    let inspection = runtime.container_status(id, true).await?;
    if inspection.status.finished_at != 0 {
        return Ok(None);
    }
    let Some(pid) = inspection.pid() else {
        // Exited, but not recorded by the runtime yet; or a runtime that reports no PIDs at all.
        anyhow::ensure!(inspection.info.contains_key("info"), "the runtime reports no PID of container {id}");
        return Ok(None);
    };
    let process = match pidfd::pin(pid) {
        Ok(process) => process,
        Err(PinError::AlreadyGone { .. }) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("container {id}")),
    };
    // The PID may have been reused before the pidfd was opened.
    Ok(process.facts().cgroups.contains(id).then_some(process))
}
