//! Waiting for the death of a container's first process, as the kernel tells it.

use anyhow::Context as _;

use keblet::kernel::pidfd;
use keblet::kernel::pidfd::PinError;
use keblet::runtime::Runtime;

/// Returns once the container's first process is gone.
pub(super) async fn wait(runtime: &Runtime, id: &str) -> anyhow::Result<()> {
    let inspection = runtime.container_status(id, true).await?;
    if inspection.status.finished_at != 0 {
        return Ok(());
    }
    let Some(pid) = inspection.pid() else {
        // Gone between its end and the runtime's record of it, or a runtime that tells no pids.
        anyhow::ensure!(inspection.info.contains_key("info"), "the runtime does not tell the pid of container {id}");
        return Ok(());
    };
    let process = match pidfd::pin(pid) {
        Ok(process) => process,
        Err(PinError::AlreadyGone { .. }) => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("container {id}")),
    };
    // A pid may have passed to another process before it was pinned.
    if !process.facts().cgroups.contains(id) {
        return Ok(());
    }
    process.gone().await.with_context(|| format!("cannot wait for process {pid} of container {id}"))
}
