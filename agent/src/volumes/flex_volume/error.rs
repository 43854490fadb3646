//! Errors of FlexVolume drivers. Texts as upstream where it has them.

use std::path::PathBuf;

/// A FlexVolume driver that cannot be used, or a call of it that failed.
#[derive(Debug, thiserror::Error)]
pub enum FlexError {
    /// A name that no driver can have.
    #[error("FlexVolume driver {0:?}: must be file names between slashes, without '~' and not below kubernetes.io")]
    Name(Box<str>),
    /// The agent has no directory of drivers.
    #[error("no volume plugin matched: this agent has no directory of FlexVolume drivers")]
    NoDirectory,
    /// The directory has no such driver.
    #[error("no volume plugin matched: there is no FlexVolume driver {path}")]
    NoDriver {
        /// Where its program would be.
        path: PathBuf,
    },
    /// The driver leaves the mount for a pod to the agent, which has nothing to mount.
    #[error("the FlexVolume driver supports no mount, and has mounted nothing at {place}")]
    NothingMounted {
        /// Where it would be mounted for the node.
        place: PathBuf,
    },
    /// Another volume of this driver has the same name.
    #[error("the node has another volume {name:?} of FlexVolume driver {driver}, with another fsType or other options")]
    OtherVolume {
        /// Name of both.
        name: Box<str>,
        /// Their driver.
        driver: &'static str,
    },
    /// The driver reports a failure.
    #[error("{command} command failed, status: {status}, reason: {reason}")]
    Failed {
        /// What it was called for.
        command: &'static str,
        /// The status that it reports.
        status: Box<str>,
        /// Its message, in part.
        reason: Box<str>,
    },
    /// The driver does not report what it has done.
    #[error("{command} command failed: {problem}")]
    Reply {
        /// What it was called for.
        command: &'static str,
        /// What is wrong with its output.
        problem: Box<str>,
    },
    /// A secret of another type than the driver's name.
    #[error("couldn't get secret {namespace}/{name} err: cannot get secret of type {driver}")]
    SecretType {
        /// The secret's namespace.
        namespace: Box<str>,
        /// Its name.
        name: Box<str>,
        /// The driver.
        driver: Box<str>,
    },
}
