//! Process file descriptors (pidfd_open(2), Linux 5.3): each refers to one process even if its pid is reused.
//!
//! A pidfd becomes readable when the whole process is gone: the last thread ended, files closed, and its PID namespace
//! empty if it was that namespace's init. This is later than the exit record of a probe, and the earliest moment at which
//! a replacement may start.

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd as _;
use std::os::fd::FromRawFd as _;
use std::os::fd::OwnedFd;
use std::os::fd::RawFd;

use nix::poll::PollFd;
use nix::poll::PollFlags;
use nix::poll::PollTimeout;
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::bpf::ExitStatus;
use super::proc::ProcessFacts;
use crate::cgroups::Hierarchy;

/// A process was not pinned.
#[derive(Debug, Error)]
pub enum PinError {
    /// It does not exist, or ended while it was inspected.
    #[error("process {pid} is already gone")]
    AlreadyGone {
        /// The pid asked for.
        pid: u32,
    },
    /// The pid names a thread of a process.
    #[error("{pid} is a thread, not a process")]
    Thread {
        /// The pid asked for.
        pid: u32,
    },
    /// The system returned an error: an old kernel, no permission, too many open files.
    #[error("cannot pin process {pid}: {source}")]
    System {
        /// The pid asked for.
        pid: u32,
        /// The cause.
        source: io::Error,
    },
}

/// A process that still existed after its `/proc` files had been read: they belong to it.
#[derive(Debug)]
pub struct PinnedProcess {
    pid: u32,
    facts: ProcessFacts,
    fd: AsyncFd<PidFd>,
}

/// Pins process `pid`. Must be called inside a tokio runtime; reads two small files of `/proc`.
///
/// The order proves identity: open the descriptor, read `/proc`, then check that the process still exists. The pid was not
/// reused in between.
///
/// # Errors
/// See [`PinError`].
pub fn pin(pid: u32) -> Result<PinnedProcess, PinError> {
    let fd = PidFd::open(pid)?;
    let system = |source| PinError::System { pid, source };
    let facts = ProcessFacts::read(pid);
    if fd.is_gone().map_err(system)? {
        return Err(PinError::AlreadyGone { pid });
    }
    let facts = facts.map_err(system)?;
    // SAFETY: a `PidFd` owns its descriptor, keeps it open until it is dropped, and always names the same one.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    let fd = fd.map_err(|error| system(error.into()))?;
    Ok(PinnedProcess { pid, facts, fd })
}

impl PinnedProcess {
    /// Process id in the agent's PID namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What `/proc` contained while it was pinned.
    pub fn facts(&self) -> &ProcessFacts {
        &self.facts
    }

    /// Its cgroup in `hierarchy`.
    pub fn cgroup_path(&self, hierarchy: &Hierarchy) -> Option<&str> {
        hierarchy.path_in(&self.facts.cgroups)
    }

    /// It is the init of a PID namespace of its own: when it ends, the kernel kills all other processes of the container.
    /// False for host and shared PID namespaces.
    pub fn is_pid_ns_init(&self) -> bool {
        self.facts.is_pid_ns_init()
    }

    /// Resolves when the process is gone; at once if it is. Cancel-safe.
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    pub async fn gone(&self) -> io::Result<()> {
        // Readiness is never cleared: an ended process stays ended.
        self.fd.readable().await.map(|_| ())
    }

    /// How it ended, once its parent has reaped it. `None` before that, and on kernels before 6.15.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.fd.get_ref().exit_status()
    }
}

/// The descriptor itself.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Opens a descriptor for process `pid`, which may be a zombie.
    ///
    /// # Errors
    /// See [`PinError`].
    pub fn open(pid: u32) -> Result<Self, PinError> {
        let Ok(number) = libc::pid_t::try_from(pid) else {
            return Err(PinError::AlreadyGone { pid });
        };
        // SAFETY: the system call takes two integers and touches no memory.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
        if fd < 0 {
            let source = io::Error::last_os_error();
            return Err(match source.raw_os_error() {
                Some(libc::ESRCH) => PinError::AlreadyGone { pid },
                // Up to 6.8 a thread's id gives EINVAL, later ENOENT.
                Some(libc::EINVAL | libc::ENOENT) if pid > 0 => PinError::Thread { pid },
                _ => PinError::System { pid, source },
            });
        }
        // SAFETY: the kernel has just opened this descriptor for us alone; it fits, as descriptors are small integers.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    /// Whether the process is gone (a zombie is).
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    pub fn is_gone(&self) -> io::Result<bool> {
        use std::os::fd::AsFd as _;
        let mut polled = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        nix::poll::poll(&mut polled, PollTimeout::ZERO)?;
        Ok(polled[0].any().unwrap_or(true))
    }

    /// How the process ended, if it is reaped and the kernel reports it (`PIDFD_INFO_EXIT`, Linux 6.15).
    pub fn exit_status(&self) -> Option<ExitStatus> {
        let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
        // SAFETY: the descriptor is open, and the request's number carries the size of the structure that the kernel
        // may write.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), PIDFD_GET_INFO as _, &raw mut info) };
        let has_exited = result == 0 && info.mask & PIDFD_INFO_EXIT != 0;
        has_exited.then(|| ExitStatus::from_wait_status(info.exit_code as u32))
    }
}

impl std::os::fd::AsRawFd for PidFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The first version of the kernel's `struct pidfd_info`; later kernels accept it.
#[derive(Default)]
#[repr(C)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    /// Real, effective, saved and file system user and group ids.
    ids: [u32; 8],
    exit_code: i32,
}

const PIDFD_INFO_EXIT: u64 = 1 << 3;
/// `_IOWR(0xFF, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: u64 = 3 << 30 | (size_of::<PidfdInfo>() as u64) << 16 | 0xFF << 8 | 11;

const _: () = assert!(size_of::<PidfdInfo>() == 64);

#[cfg(test)]
#[path = "pidfd_tests.rs"]
mod tests;
