//! Why an action on a container or sandbox failed.

use std::io;
use std::path::PathBuf;

use crate::cgroups::CgroupError;
use crate::objects::ObjectError;
use crate::runtime::RuntimeError;
use crate::user_namespaces::UserNamespaceError;
use crate::volumes::VolumeError;
use crate::workers::generate::GenerateError;

/// Why an action on a container or sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// The runtime failed the call.
    #[error("{}", .0.rpc_text())]
    Runtime(#[from] RuntimeError),
    /// No configuration can be made from the spec.
    #[error(transparent)]
    Generate(Box<GenerateError>),
    /// An API object cannot be read.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A volume or a file of the pod cannot be made.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The pod cannot have a user namespace of its own.
    #[error(transparent)]
    UserNamespace(#[from] UserNamespaceError),
    /// A name of the cgroup tree is invalid.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// A file operation failed.
    #[error("{attempt}: {source}")]
    File {
        /// What was tried.
        attempt: String,
        /// The system's error.
        source: io::Error,
    },
    /// The file system does not accept the name of the pod's log directory.
    #[error("mkdir {}: file name too long: namespace, name and UID of the pod make {length} bytes", directory.display())]
    LogDirectoryName {
        /// The directory.
        directory: PathBuf,
        /// Bytes of its name.
        length: usize,
    },
    /// The spec does not name the container, so that its grace period is unknown.
    #[error("failed to get container spec of container {0:?} of the pod")]
    NoContainerSpec(String),
    /// The container that an ephemeral container targets has no instance.
    #[error("unable to find target container {0}")]
    NoTargetContainer(String),
    /// The pod was terminated meanwhile. The text is that of a kubelet, whose calls end.
    #[error("context canceled")]
    Terminated,
}

impl From<GenerateError> for Cause {
    fn from(error: GenerateError) -> Self {
        Self::Generate(Box::new(error))
    }
}

impl Cause {
    /// A file operation that failed.
    pub(super) fn file(attempt: String, source: io::Error) -> Self {
        Self::File { attempt, source }
    }
}
