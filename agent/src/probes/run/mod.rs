//! One run of a probe: the effect. Decides nothing about containers.

mod exec;
mod grpc;
mod http;
mod tcp;

use std::time::Duration;

use k8s_openapi::api::core::v1::EnvVar;

use super::target::Target;
use crate::http_get::Caller;
use crate::model::ContainerId;
use crate::model::PodRef;
use crate::runtime::Runtime;

/// A probe that cannot be carried out is tried this often in all.
const ATTEMPTS: usize = 3;
/// What is kept of a probe's output, in bytes.
const MAX_OUTPUT: usize = 10 * 1024;

/// How a run ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// It succeeded.
    Success,
    /// It succeeded, with a remark.
    Warning(String),
    /// It failed.
    Failure(String),
    /// It could not be carried out; `state` is upstream's name of what it resulted in.
    Error {
        /// `unknown` or `failure`.
        state: &'static str,
        /// The cause.
        message: String,
    },
}

impl Outcome {
    fn error(message: String) -> Self {
        Self::Error { state: "unknown", message }
    }
}

/// Replaces `$(NAME)` in the arguments of a command by the values of these variables.
///
/// # Errors
/// The length of an argument, if it is too long.
pub type Expand = fn(&[String], &[EnvVar]) -> Result<Vec<String>, usize>;

/// What runs probes.
pub(super) struct Runner {
    pub(super) runtime: Runtime,
    pub(super) caller: Caller,
    pub(super) expand: Expand,
}

/// What is probed.
pub(super) struct Subject<'a> {
    pub(super) pod: &'a PodRef,
    pub(super) container: &'a ContainerId,
    /// The pod's address; empty if the probe needs none, or if it is the node's and that is not known.
    pub(super) address: &'a str,
    pub(super) target: &'a Target,
    pub(super) timeout: Duration,
}

impl Runner {
    /// Runs a probe, again if it could not be carried out. Ends within a multiple of its timeout, exec probes within a
    /// multiple of the runtime's. Dropping the future ends the probe.
    pub(super) async fn run(&self, subject: &Subject<'_>) -> Outcome {
        let mut outcome = self.attempt(subject).await;
        for _ in 1..ATTEMPTS {
            if !matches!(outcome, Outcome::Error { .. }) {
                break;
            }
            outcome = self.attempt(subject).await;
        }
        outcome
    }

    /// Upstream's order, if a pod without an API server has several actions.
    async fn attempt(&self, subject: &Subject<'_>) -> Outcome {
        let probe = &subject.target.probe;
        if let Some(action) = &probe.exec {
            exec::run(self, subject, action).await
        } else if let Some(action) = &probe.http_get {
            http::run(&self.caller, subject, action).await
        } else if let Some(action) = &probe.tcp_socket {
            tcp::run(subject, action).await
        } else if let Some(action) = &probe.grpc {
            grpc::run(&self.caller, subject, action).await
        } else {
            let PodRef { namespace, name, uid } = subject.pod;
            let container = &subject.target.container.name;
            Outcome::error(format!("missing probe handler for {name}_{namespace}({uid}):{container}"))
        }
    }
}

#[cfg(test)]
mod network_tests;
