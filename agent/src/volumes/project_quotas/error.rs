//! Why a volume is not counted by its file system.

use std::io;
use std::path::PathBuf;

use crate::kernel::project_quota::NoProjectQuotas;

/// A volume that gets no project, or whose project is not given back.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProjectQuotaError {
    /// The file system.
    #[error("the file system of {directory} does not count projects: {source}")]
    FileSystem {
        /// The volume's directory.
        directory: PathBuf,
        /// The cause.
        source: NoProjectQuotas,
    },
    /// A directory whose path would be another line, or several.
    #[error("{directory:?} cannot be recorded as a project's directory")]
    NoLine {
        /// The volume's directory.
        directory: PathBuf,
    },
    /// Lines of the volume's directory or of its id that are not the agent's.
    #[error("project {id} of {directory} was not assigned by a kubelet, or not to it alone")]
    Foreign {
        /// The id.
        id: u32,
        /// The volume's directory.
        directory: PathBuf,
    },
    /// All ids that were tried are in use, although no file names them.
    #[error("no project id is free: {tries} are in use")]
    NoneFree {
        /// Number of ids that were tried.
        tries: usize,
    },
    /// An operation on a file or directory failed.
    #[error("cannot {verb} {path}: {source}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process keeps a file locked.
    #[error("{path} is locked by another process")]
    Locked {
        /// The file.
        path: PathBuf,
    },
}
