//! Waiting for the death of a container's first process, as the kernel tells it.

use std::io;
use std::os::fd::FromRawFd;
use std::os::fd::OwnedFd;

use anyhow::Context as _;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::runtime::Runtime;

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
    let Some(process) = pin(pid).with_context(|| format!("cannot open process {pid} of container {id}"))? else {
        return Ok(());
    };
    if !runs_in(pid, id)? {
        return Ok(());
    }
    let process = AsyncFd::with_interest(process, Interest::READABLE).context("cannot wait for a pidfd")?;
    process.readable().await.context("cannot wait for a pidfd")?.retain_ready();
    Ok(())
}

/// A pidfd, `None` if there is no such process.
fn pin(pid: u32) -> io::Result<Option<OwnedFd>> {
    // SAFETY: takes no pointers; the arguments are plain numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    if fd >= 0 {
        // SAFETY: the kernel just made this descriptor for us, and nobody else owns it.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd as i32) }));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        error => Err(error),
    }
}

/// Whether the pid still belongs to the container and was not given to another process since.
fn runs_in(pid: u32, container: &str) -> anyhow::Result<bool> {
    match std::fs::read_to_string(format!("/proc/{pid}/cgroup")) {
        Ok(cgroups) => Ok(cgroups.contains(container)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot read the cgroup of process {pid}")),
    }
}
