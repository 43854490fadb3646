//! Readiness of the runtime and its network, polled with the CRI call Status: frequently while not ready, rarely while
//! ready, immediately on request. The version is read when the runtime becomes ready, and after a change of a sensor: a runtime
//! that was replaced by another version may answer before a check has found it gone.

use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Runtime;

/// Period while the runtime is ready, network included. The end of its event stream requests a check at once, and so does a
/// sandbox that cannot be made: only a loss of the network that no pod has met waits for this.
const HEALTHY_PERIOD: Duration = Duration::from_secs(60);
/// Period while it is not, and the shortest one while sandboxes cannot be made.
const UNHEALTHY_PERIOD: Duration = Duration::from_secs(1);
/// Timeout of a Status call, and of one for the version.
const STATUS_TIMEOUT: Duration = Duration::from_secs(15);
/// Delay of a requested check, which bundles requests in quick succession.
const CHECK_DELAY: Duration = Duration::from_millis(100);

/// The last known state of the runtime.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuntimeState {
    /// Not polled yet.
    Unknown,
    /// It does not answer.
    Unreachable(String),
    /// Its condition `RuntimeReady` is not met.
    NotReady {
        /// What is not met.
        error: String,
        /// Why the network is not ready either, if it is not.
        network_error: Option<String>,
    },
    /// It is ready; its network may not be.
    Ready {
        /// Why the network is not ready, if it is not.
        network_error: Option<String>,
        /// Version and features.
        offer: Arc<RuntimeOffer>,
    },
}

/// Version and features of a ready runtime.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RuntimeOffer {
    /// Such as `containerd`; empty if unknown.
    pub name: String,
    /// Its own version; empty if unknown.
    pub version: String,
    /// Its handlers, sorted by name.
    pub handlers: Vec<HandlerOffer>,
    /// Feature `supplementalGroupsPolicy` (KEP-3619); `None` if the runtime does not report features.
    pub supplemental_groups_policy: Option<bool>,
}

/// A runtime handler.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct HandlerOffer {
    /// Empty for the default handler.
    pub name: String,
    /// Supports recursive read-only mounts (KEP-3857).
    pub recursive_read_only_mounts: bool,
    /// Supports user namespaces (KEP-127).
    pub user_namespaces: bool,
}

impl RuntimeOffer {
    fn new(version: Option<v1::VersionResponse>, reply: &v1::StatusResponse) -> Self {
        let version = version.unwrap_or_default();
        let handler = |handler: &v1::RuntimeHandler| {
            let features = handler.features.unwrap_or_default();
            HandlerOffer {
                name: handler.name.clone(),
                recursive_read_only_mounts: features.recursive_read_only_mounts,
                user_namespaces: features.user_namespaces,
            }
        };
        let mut handlers: Vec<_> = reply.runtime_handlers.iter().map(handler).collect();
        handlers.sort();
        Self {
            name: version.runtime_name,
            version: version.runtime_version,
            handlers,
            supplemental_groups_policy: reply.features.as_ref().map(|features| features.supplemental_groups_policy),
        }
    }
}

impl RuntimeState {
    /// Containers can be started.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready { .. })
    }

    /// Why pods without host network cannot be started; upstream's message.
    pub fn network_error(&self) -> Option<&str> {
        match self {
            Self::Ready { network_error, .. } => network_error.as_deref(),
            Self::Unknown | Self::Unreachable(_) | Self::NotReady { .. } => Some("network state unknown"),
        }
    }
}

/// Polls the runtime until `shutdown`; a change of `check_request` triggers a check.
pub async fn watch_runtime(
    runtime: Runtime,
    state: watch::Sender<RuntimeState>,
    mut check_request: watch::Receiver<()>,
    shutdown: CancellationToken,
) {
    let mut version: Option<v1::VersionResponse> = None;
    let mut is_requested = false;
    loop {
        let began = Instant::now();
        let reply = tokio::time::timeout(STATUS_TIMEOUT, runtime.status(false)).await;
        let reply = reply.map_err(|_| format!("no answer to Status within {STATUS_TIMEOUT:?}"));
        let reply = reply.and_then(|reply| reply.map_err(|error| error.to_string()));
        if reply.is_ok() && (is_requested || !state.borrow().is_ready()) {
            let answer = tokio::time::timeout(STATUS_TIMEOUT, runtime.version()).await;
            if let Ok(Ok(answered)) = answer {
                if version.as_ref().is_some_and(|known| *known != answered) {
                    runtime.forget_missing_calls();
                }
                version = Some(answered);
            }
        }
        let now = evaluate(reply, version.clone());
        state.send_if_modified(|known| {
            let changed = *known != now;
            if changed {
                log(&now);
                known.clone_from(&now);
            }
            changed
        });
        let healthy = matches!(now, RuntimeState::Ready { network_error: None, .. });
        let period = if healthy { HEALTHY_PERIOD } else { UNHEALTHY_PERIOD };
        is_requested = tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep_until(began + period) => false,
            Ok(()) = check_request.changed() => {
                tokio::time::sleep(CHECK_DELAY).await;
                true
            }
            () = runtime.inner.sandbox_failed.notified() => {
                tokio::time::sleep_until(began + UNHEALTHY_PERIOD).await;
                false
            }
        };
    }
}

fn log(state: &RuntimeState) {
    match state {
        RuntimeState::Unknown => {}
        RuntimeState::Unreachable(reason) => tracing::warn!(reason, "container runtime does not answer"),
        RuntimeState::NotReady { error, .. } => tracing::warn!(reason = error, "container runtime is not ready"),
        RuntimeState::Ready { network_error: None, .. } => tracing::info!("container runtime is ready"),
        RuntimeState::Ready { network_error: Some(reason), .. } => {
            tracing::warn!(reason, "container runtime is ready, its network is not");
        }
    }
}

/// State by the runtime's conditions; a missing condition is not met.
fn evaluate(reply: Result<v1::StatusResponse, String>, version: Option<v1::VersionResponse>) -> RuntimeState {
    let reply = match reply {
        Ok(reply) => reply,
        Err(error) => return RuntimeState::Unreachable(error),
    };
    let conditions = reply.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let unmet = |kind: &str| match conditions.iter().find(|c| c.r#type == kind) {
        Some(condition) if condition.status => None,
        Some(c) => Some(format!("{kind}=false reason:{} message:{}", c.reason, c.message)),
        None => Some("<nil>".to_owned()),
    };
    let network_error = unmet("NetworkReady").map(|e| format!("container runtime network not ready: {e}"));
    match unmet("RuntimeReady") {
        Some(reason) => {
            RuntimeState::NotReady { error: format!("container runtime not ready: {reason}"), network_error }
        }
        None => RuntimeState::Ready { network_error, offer: Arc::new(RuntimeOffer::new(version, &reply)) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(conditions: &[(&str, bool)]) -> v1::StatusResponse {
        let conditions = conditions
            .iter()
            .map(|(kind, status)| v1::RuntimeCondition {
                r#type: (*kind).into(),
                status: *status,
                ..Default::default()
            })
            .collect();
        let status = v1::RuntimeStatus { conditions };
        v1::StatusResponse { status: Some(status), ..Default::default() }
    }

    #[test]
    fn a_missing_condition_is_not_met() {
        let evaluate = |reply| evaluate(Ok(reply), None);
        let neither = RuntimeState::NotReady {
            error: "container runtime not ready: <nil>".to_owned(),
            network_error: Some("container runtime network not ready: <nil>".to_owned()),
        };
        assert_eq!(evaluate(reply(&[])), neither);
        let only_network = evaluate(reply(&[("RuntimeReady", false), ("NetworkReady", true)]));
        assert!(matches!(only_network, RuntimeState::NotReady { network_error: None, .. }));
        let no_network = evaluate(reply(&[("RuntimeReady", true)]));
        assert!(no_network.is_ready());
        assert_eq!(no_network.network_error(), Some("container runtime network not ready: <nil>"));
        let all = evaluate(reply(&[("RuntimeReady", true), ("NetworkReady", true)]));
        assert_eq!(all.network_error(), None);
    }

    #[test]
    fn offers_are_sorted_by_handler() {
        let mut reply = reply(&[("RuntimeReady", true), ("NetworkReady", true)]);
        let handler = |name: &str, features| v1::RuntimeHandler { name: name.to_owned(), features };
        let features = v1::RuntimeHandlerFeatures { recursive_read_only_mounts: true, user_namespaces: false };
        reply.runtime_handlers = vec![handler("runc", Some(features)), handler("", None)];
        reply.features = Some(v1::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() });
        let version = v1::VersionResponse {
            runtime_name: "containerd".to_owned(),
            runtime_version: "1.7.24".to_owned(),
            ..Default::default()
        };
        let RuntimeState::Ready { offer, .. } = evaluate(Ok(reply), Some(version)) else { panic!("not ready") };
        let runc = HandlerOffer { name: "runc".to_owned(), recursive_read_only_mounts: true, user_namespaces: false };
        assert_eq!(offer.handlers, [HandlerOffer::default(), runc]);
        assert_eq!(offer.supplemental_groups_policy, Some(true));
        assert_eq!((offer.name.as_str(), offer.version.as_str()), ("containerd", "1.7.24"));
    }
}
