//! Errors of cgroup files and systemd units.

use std::io;
use std::path::Path;
use std::path::PathBuf;

use super::CgroupNameError;

/// A cgroup was not created, written, read or removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A file or directory of a cgroup.
    #[error("cannot {verb} {path}: {source}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A limit was not accepted by the kernel.
    #[error("cannot write {what} of {}: {source}", cgroup.display())]
    Limit {
        /// Which limit.
        what: &'static str,
        /// The cgroup's folder.
        cgroup: PathBuf,
        /// The crate's error, with file, value and cause.
        source: Box<cgroups_rs::fs::error::Error>,
    },
    /// The thread that works on a cgroup ended early.
    #[error("work on cgroup {path} was aborted: {reason}")]
    Aborted {
        /// The cgroup.
        path: String,
        /// The cause.
        reason: String,
    },
    /// systemd returned an error or did not answer.
    #[error("systemd: cannot {verb} {unit}: {detail}")]
    Systemd {
        /// What was tried.
        verb: &'static str,
        /// The unit.
        unit: String,
        /// systemd's error.
        detail: String,
    },
    /// The systemd driver is configured where systemd does not run.
    #[error("systemd not running on this host, cannot use systemd cgroups manager")]
    NoSystemd,
    /// A pod UID or `cgroupRoot` that cannot name a cgroup.
    #[error(transparent)]
    Name(#[from] CgroupNameError),
    /// No usable hierarchy is mounted.
    #[error("no cgroup hierarchy is mounted")]
    NotMounted,
    /// cgroup v1 without controllers that a node needs.
    #[error("system validation failed - Following Cgroup subsystem not mounted: [{}]", .0.join(" "))]
    MissingControllers(Vec<&'static str>),
    /// Processes that did not end after SIGKILL.
    #[error("failed to kill all the processes attached to the {path} cgroups")]
    Survivors {
        /// The cgroup.
        path: String,
    },
    /// A cgroup that must exist lacks controllers or paths.
    #[error("cgroup {name} has some missing {what}: {missing}")]
    Missing {
        /// Components of its name, quoted.
        name: String,
        /// `paths` (v1) or `controllers` (v2).
        what: &'static str,
        /// The missing paths or controllers, joined by commas.
        missing: String,
    },
}

/// Adds verb and path to an I/O result.
pub(super) trait OnPath<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, CgroupError>;
}

impl<T> OnPath<T> for io::Result<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, CgroupError> {
        self.map_err(|source| CgroupError::Io { verb, path: path.to_owned(), source })
    }
}
