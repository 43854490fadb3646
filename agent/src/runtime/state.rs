//! Is the runtime there, ready, and is its network? Asked for with `Status`: often while something is wrong, rarely
//! while all is well, at once when somebody has reason to think that it changed.

use std::time::Duration;

use keblet_proto::cri::v1;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Runtime;
use super::RuntimeError;

/// Period while the runtime is ready, network included.
const HEALTHY_PERIOD: Duration = Duration::from_secs(30);
/// Period while it is not.
const UNHEALTHY_PERIOD: Duration = Duration::from_secs(1);
/// How soon the runtime is asked after a nudge.
const AFTER_NUDGE: Duration = Duration::from_millis(100);

/// What the runtime last said of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuntimeState {
    /// Nothing yet.
    Unknown,
    /// It does not answer, or says that it is not ready.
    NotReady(String),
    /// It is ready; pods with their own network may have to wait.
    Ready {
        /// Why the network is not ready, if it is not.
        network_error: Option<String>,
    },
}

impl RuntimeState {
    /// Containers can be started.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready { .. })
    }

    /// Why pods without host network cannot be started, in upstream's words.
    pub fn network_error(&self) -> Option<&str> {
        match self {
            Self::Ready { network_error } => network_error.as_deref(),
            Self::Unknown | Self::NotReady(_) => Some("network state unknown"),
        }
    }
}

/// Watches the runtime until `shutdown`. A change of `nudge` makes it look at once.
pub async fn watch_runtime(
    runtime: Runtime,
    state: watch::Sender<RuntimeState>,
    mut nudge: watch::Receiver<()>,
    shutdown: CancellationToken,
) {
    loop {
        let began = Instant::now();
        let now = judge(runtime.status(false).await);
        state.send_if_modified(|known| {
            let changed = *known != now;
            if changed {
                tell(&now);
                known.clone_from(&now);
            }
            changed
        });
        let healthy = matches!(now, RuntimeState::Ready { network_error: None });
        let period = if healthy { HEALTHY_PERIOD } else { UNHEALTHY_PERIOD };
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep_until(began + period) => {}
            Ok(()) = nudge.changed() => tokio::time::sleep(AFTER_NUDGE).await,
        }
    }
}

fn tell(state: &RuntimeState) {
    match state {
        RuntimeState::Unknown => {}
        RuntimeState::NotReady(reason) => tracing::warn!(reason, "container runtime is not ready"),
        RuntimeState::Ready { network_error: None } => tracing::info!("container runtime is ready"),
        RuntimeState::Ready { network_error: Some(reason) } => {
            tracing::warn!(reason, "container runtime is ready, its network is not");
        }
    }
}

/// The runtime's conditions, judged as upstream does: a missing condition is not met.
fn judge(status: Result<v1::StatusResponse, RuntimeError>) -> RuntimeState {
    let conditions = match status {
        Ok(reply) => reply.status.unwrap_or_default().conditions,
        Err(error) => return RuntimeState::NotReady(error.to_string()),
    };
    let unmet = |kind: &str| match conditions.iter().find(|c| c.r#type == kind) {
        Some(condition) if condition.status => None,
        Some(c) => Some(format!("{kind}=false reason:{} message:{}", c.reason, c.message)),
        None => Some(format!("the runtime does not tell {kind}")),
    };
    match unmet("RuntimeReady") {
        Some(reason) => RuntimeState::NotReady(format!("container runtime not ready: {reason}")),
        None => RuntimeState::Ready {
            network_error: unmet("NetworkReady").map(|e| format!("container runtime network not ready: {e}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(conditions: &[(&str, bool)]) -> Result<v1::StatusResponse, RuntimeError> {
        let conditions = conditions
            .iter()
            .map(|(kind, status)| v1::RuntimeCondition {
                r#type: (*kind).into(),
                status: *status,
                ..Default::default()
            })
            .collect();
        let status = v1::RuntimeStatus { conditions };
        Ok(v1::StatusResponse { status: Some(status), ..Default::default() })
    }

    #[test]
    fn a_missing_condition_is_not_met() {
        assert!(!judge(reply(&[])).is_ready());
        assert!(!judge(reply(&[("RuntimeReady", false), ("NetworkReady", true)])).is_ready());
        let no_network = judge(reply(&[("RuntimeReady", true)]));
        assert!(no_network.is_ready() && no_network.network_error().is_some());
        let all = judge(reply(&[("RuntimeReady", true), ("NetworkReady", true)]));
        assert_eq!(all.network_error(), None);
    }
}
