//! Errors of CRI calls: which call, on which object, and why.

use std::error::Error;
use std::time::Duration;

use tonic::Code;
use tonic::Status;

use super::Operation;

/// A CRI call that failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No connection, or it broke during the call. The runtime may have acted.
    #[error("{}runtime at {endpoint} does not answer: {why}", on(*.operation, .object))]
    Unreachable {
        /// The call.
        operation: Operation,
        /// Id or name of what it was about; empty where there is no such thing.
        object: Box<str>,
        /// The runtime's endpoint.
        endpoint: Box<str>,
        /// The innermost cause.
        why: Box<str>,
    },
    /// No answer in time. The runtime may have acted, or act later.
    #[error("{}runtime at {endpoint} gave no answer within {}", on(*.operation, .object), humantime::format_duration(*.deadline))]
    Deadline {
        /// The call.
        operation: Operation,
        /// Id or name of what it was about.
        object: Box<str>,
        /// The runtime's endpoint.
        endpoint: Box<str>,
        /// How long the call was given.
        deadline: Duration,
    },
    /// The runtime answered with an error, or the answer could not be read (code `OutOfRange`: over the message limit).
    #[error("{}{message} ({code:?})", on(*.operation, .object))]
    Failed {
        /// The call.
        operation: Operation,
        /// Id or name of what it was about.
        object: Box<str>,
        /// gRPC status code.
        code: Code,
        /// gRPC status message, as the runtime sent it.
        message: Box<str>,
    },
    /// The answer lacks something that the CRI requires.
    #[error("{}the answer lacks {missing}", on(*.operation, .object))]
    Incomplete {
        /// The call.
        operation: Operation,
        /// Id or name of what it was about.
        object: Box<str>,
        /// The missing field.
        missing: &'static str,
    },
}

/// `Call object: `, the start of every message.
fn on(operation: Operation, object: &str) -> String {
    match object {
        "" => format!("{operation}: "),
        object => format!("{operation} {object}: "),
    }
}

impl RuntimeError {
    /// Classifies a tonic status. A status with a source was made on this side of the connection.
    pub(super) fn from_status(operation: Operation, object: &str, endpoint: &str, status: &Status) -> Self {
        let object = object.into();
        match status.source() {
            Some(source) => Self::Unreachable {
                operation,
                object,
                endpoint: endpoint.into(),
                why: innermost(source).to_string().into(),
            },
            None => Self::Failed { operation, object, code: status.code(), message: status.message().into() },
        }
    }

    /// gRPC status code, as a Go client would see it.
    pub fn code(&self) -> Code {
        match self {
            Self::Unreachable { .. } => Code::Unavailable,
            Self::Deadline { .. } => Code::DeadlineExceeded,
            Self::Failed { code, .. } => *code,
            Self::Incomplete { .. } => Code::Unknown,
        }
    }

    /// The cause alone, without call and object; for an error from the runtime its own message.
    pub fn message(&self) -> String {
        match self {
            Self::Unreachable { endpoint, why, .. } => format!("runtime at {endpoint} does not answer: {why}"),
            Self::Deadline { .. } => "context deadline exceeded".to_owned(),
            Self::Failed { message, .. } => message.to_string(),
            Self::Incomplete { missing, .. } => format!("the answer lacks {missing}"),
        }
    }

    /// The error in the form that users of the Go implementation know from pod events.
    pub fn rpc_text(&self) -> String {
        format!("rpc error: code = {} desc = {}", go_name(self.code()), self.message())
    }

    /// The runtime does not know the object (any more).
    pub fn is_not_found(&self) -> bool {
        self.code() == Code::NotFound
    }

    /// The runtime does not have this call.
    pub fn is_unimplemented(&self) -> bool {
        self.code() == Code::Unimplemented
    }

    /// There is no connection to the runtime.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// The call ran out of time, here or in the runtime.
    pub fn is_deadline(&self) -> bool {
        self.code() == Code::DeadlineExceeded
    }
}

fn innermost<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error
}

/// The name of a gRPC code as Go prints it: two are spelled in its own way, all others as their variants.
pub(crate) fn go_name(code: Code) -> String {
    match code {
        Code::Ok => "OK".to_owned(),
        Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    }
}
