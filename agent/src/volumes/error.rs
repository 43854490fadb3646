//! What went wrong with which file or volume.

use std::io;
use std::path::Path;
use std::path::PathBuf;

/// A volume or a pod's file that could not be made or removed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A file or directory refused.
    #[error("cannot {verb} {path}: {source}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A UID or name that would lead elsewhere.
    #[error("{name:?} cannot be part of a path")]
    NotAFileName {
        /// What was given.
        name: String,
    },
    /// A hostPath that is not what its type says.
    #[error("hostPath type check failed: {path} is not a {expected}")]
    HostPathType {
        /// The path.
        path: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A hostPath of an unknown type, or one that climbs.
    #[error("hostPath {path:?}: {problem}")]
    HostPath {
        /// The path.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A volume this agent cannot provide.
    #[error("no volume plugin matched: volume {volume:?} is of a kind that is not supported yet")]
    Unsupported {
        /// Its name in the spec.
        volume: String,
    },
    /// A mount of a volume that the spec does not have.
    #[error("volume {volume:?} is not in the pod's spec")]
    NoSuchVolume {
        /// Its name.
        volume: String,
    },
    /// A subPath that cannot be given to a container.
    #[error("failed to prepare subPath for volumeMount {volume:?} of container {container:?}: {source}")]
    SubPath {
        /// The volume.
        volume: String,
        /// The container.
        container: String,
        /// Why not.
        source: io::Error,
    },
    /// A volume that was not torn down before its pod's directory went.
    #[error("{path} is not empty: a volume was not torn down")]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
}

/// Adds verb and path to an I/O result.
pub(super) trait OnPath<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, VolumeError>;
}

impl<T> OnPath<T> for io::Result<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, VolumeError> {
        self.map_err(|source| VolumeError::Io { verb, path: path.to_owned(), source })
    }
}

impl<T> OnPath<T> for nix::Result<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, VolumeError> {
        self.map_err(io::Error::from).on(verb, path)
    }
}
