//! What went wrong with which cgroup file or unit.

use std::io;
use std::path::Path;
use std::path::PathBuf;

use super::CgroupNameError;

/// A cgroup that could not be made, written, read or removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A file or directory of the kernel's tree refused.
    #[error("cannot {verb} {path}: {source}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// systemd refused or did not answer.
    #[error("systemd: cannot {verb} {unit}: {detail}")]
    Systemd {
        /// What was tried.
        verb: &'static str,
        /// On which unit.
        unit: String,
        /// Why not.
        detail: String,
    },
    /// The systemd driver is configured where systemd does not run.
    #[error("systemd not running on this host, cannot use systemd cgroups manager")]
    NoSystemd,
    /// A pod UID or root that cannot be a cgroup.
    #[error(transparent)]
    Name(#[from] CgroupNameError),
    /// No usable hierarchy is mounted.
    #[error("no cgroup hierarchy is mounted")]
    NotMounted,
    /// Processes that survive SIGKILL.
    #[error("failed to kill all the processes attached to the {path} cgroups")]
    Survivors {
        /// The cgroup.
        path: String,
    },
    /// A cgroup that is expected and lacks something.
    #[error("cgroup {name:?} has some missing {what}: {missing}")]
    Missing {
        /// Its components.
        name: Vec<String>,
        /// `paths` (v1) or `controllers` (v2).
        what: &'static str,
        /// Which.
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
