//! Errors of user namespaces, in the words of the kubelet where it has any.

use std::io;
use std::path::PathBuf;

/// A pod that cannot have a range of ids.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each case is")]
pub enum UserNamespaceError {
    /// A file of a pod has content that is not possible.
    #[error("user namespace: {0}")]
    Recorded(#[source] Box<UserNamespaceError>),
    /// A pod cannot get a range.
    #[error("create user namespace: {0}")]
    Create(#[source] Box<UserNamespaceError>),
    #[error("could not find an empty slot to allocate a user namespace")]
    NoFreeRange,
    #[error("invalid user namespace mappings file: {0}")]
    Json(String),
    #[error("invalid user namespace configuration: {problem}")]
    Configuration { problem: &'static str },
    #[error("wrong user namespace length {length}")]
    Length { length: u32 },
    #[error("wrong user namespace offset specified {first}")]
    Offset { first: u32 },
    #[error("id {first} is out of range")]
    OutOfRange { first: u32 },
    #[error("range picked for pod {uid:?} already taken")]
    Taken { uid: String },
    #[error("different user namespace range already used by pod {uid:?}")]
    Different { uid: String },
    #[error("cannot {verb} the user namespace file {path}: {source}")]
    File { verb: &'static str, path: PathBuf, source: io::Error },
    #[error("{uid:?} cannot be part of a path")]
    Uid { uid: String },
    /// The runtime, or the handler of the pod's RuntimeClass, cannot make user namespaces.
    #[error("can't set `spec.hostUsers: false`, {}", unsupported(handler, *is_known))]
    Unsupported { handler: String, is_known: bool },
    #[error("the work was interrupted: {0}")]
    Interrupted(#[source] io::Error),
    #[error("this agent was not given a range of ids for user namespaces")]
    NotSetUp,
}

impl UserNamespaceError {
    /// The error of a pod's own file, while the pod is being synced.
    pub(super) fn in_file(self) -> Self {
        match self {
            Self::File { .. } | Self::Uid { .. } => self,
            fault => Self::Recorded(Box::new(fault)),
        }
    }
}

/// Why the agent cannot serve user namespaces, and so must not start. The texts are complete: there are no further sources.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each case is")]
pub enum StartError {
    #[error("kubelet mappings: {0}")]
    Mappings(String),
    #[error("{0}")]
    Range(String),
    #[error("cannot list the pods' directories in {path}: {cause}")]
    List { path: PathBuf, cause: io::Error },
    #[error("record pod mappings for existing pod {uid:?}: {fault}")]
    Record { uid: String, fault: Box<UserNamespaceError> },
}

fn unsupported(handler: &str, is_known: bool) -> String {
    let message = match handler {
        "" => "runtime does not support user namespaces".to_owned(),
        class => format!("RuntimeClass handler {class:?} does not support user namespaces"),
    };
    let cause = if is_known { String::new() } else { format!(": the handler {handler:?} is not known") };
    message + &cause
}
