//! The conditions of the node, with upstream's reasons and messages. Pure.

use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::api::core::v1::NodeStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

use super::runtime_view::RuntimeView;
use crate::model::Pressures;
use crate::model::aggregate;

/// Reason and message of a pressure condition while it is True and while it is False.
struct Texts {
    type_: &'static str,
    under: (&'static str, &'static str),
    free: (&'static str, &'static str),
}

const MEMORY: Texts = Texts {
    type_: "MemoryPressure",
    under: ("KubeletHasInsufficientMemory", "kubelet has insufficient memory available"),
    free: ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
};
const DISK: Texts = Texts {
    type_: "DiskPressure",
    under: ("KubeletHasDiskPressure", "kubelet has disk pressure"),
    free: ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
};
const PID: Texts = Texts {
    type_: "PIDPressure",
    under: ("KubeletHasInsufficientPID", "kubelet has insufficient PID available"),
    free: ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
};

pub(super) const READY: &str = "Ready";

/// Inputs of readiness beside the runtime.
#[derive(Clone, Debug, Default)]
pub(super) struct Readiness<'a> {
    /// Messages of failing health checks.
    pub(super) health: &'a [String],
    /// The node is shutting down.
    pub(super) shutting_down: bool,
    /// `localStorageCapacityIsolation`.
    pub(super) local_storage: bool,
    /// What the machine lacks although the node may be ready.
    pub(super) warning: Option<&'static str>,
}

/// Sets the three pressure conditions. Reason and message are written only when the status changes.
pub(super) fn set_pressures(status: &mut NodeStatus, pressures: Pressures, now: &Time) {
    for (texts, under) in [(MEMORY, pressures.memory), (DISK, pressures.disk), (PID, pressures.pid)] {
        let (reason, message) = if under { texts.under } else { texts.free };
        let value = condition_status(under);
        let condition = entry(status, texts.type_);
        condition.last_heartbeat_time = Some(now.clone());
        if condition.status != value {
            condition.status = value;
            condition.reason = Some(reason.to_owned());
            condition.message = Some(message.to_owned());
            condition.last_transition_time = Some(now.clone());
        }
    }
}

/// Sets all fields of Ready.
pub(super) fn set_ready(status: &mut NodeStatus, runtime: &RuntimeView, rest: &Readiness<'_>, at: Instant, now: &Time) {
    let errors = errors(status, runtime, rest, at);
    let (value, reason, mut message) = match errors.is_empty() {
        true => (condition_status(true), "KubeletReady", "kubelet is posting ready status".to_owned()),
        false => (condition_status(false), "KubeletNotReady", aggregate(errors)),
    };
    if let Some(warning) = rest.warning {
        message = format!("{message}. WARNING: {warning}");
    }
    let condition = entry(status, READY);
    let turned = condition.status != value;
    *condition = NodeCondition {
        type_: READY.to_owned(),
        status: value,
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_heartbeat_time: Some(now.clone()),
        last_transition_time: if turned { Some(now.clone()) } else { condition.last_transition_time.take() },
    };
}

/// Errors that make the node NotReady, in the kubelet's order.
fn errors(status: &NodeStatus, runtime: &RuntimeView, rest: &Readiness<'_>, at: Instant) -> Vec<String> {
    let mut errors: Vec<String> = runtime.unreachable_error(at).map(str::to_owned).into_iter().collect();
    errors.extend(rest.health.iter().cloned());
    errors.extend(runtime.error().map(str::to_owned));
    errors.extend(runtime.network_error().map(str::to_owned));
    errors.extend(rest.shutting_down.then(|| "node is shutting down".to_owned()));
    let mut required = vec!["cpu", "memory", "pods"];
    required.extend(rest.local_storage.then_some("ephemeral-storage"));
    let capacity = status.capacity.as_ref();
    required.retain(|resource| !capacity.is_some_and(|capacity| capacity.contains_key(*resource)));
    if !required.is_empty() {
        errors.push(format!("missing node capacity for resources: {}", required.join(", ")));
    }
    errors
}

fn condition_status(value: bool) -> String {
    if value { "True" } else { "False" }.to_owned()
}

/// The condition of this type, appended if missing.
fn entry<'a>(status: &'a mut NodeStatus, type_: &str) -> &'a mut NodeCondition {
    let conditions = status.conditions.get_or_insert_default();
    let index = conditions.iter().position(|condition| condition.type_ == type_).unwrap_or_else(|| {
        conditions.push(NodeCondition { type_: type_.to_owned(), ..NodeCondition::default() });
        conditions.len() - 1
    });
    &mut conditions[index]
}

/// The status of one condition.
pub(super) fn status_of<'a>(status: Option<&'a NodeStatus>, type_: &str) -> Option<&'a str> {
    let mut conditions = status?.conditions.iter().flatten();
    conditions.find(|condition| condition.type_ == type_).map(|condition| condition.status.as_str())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
    use k8s_openapi::jiff::Timestamp;

    use super::*;
    use crate::runtime::RuntimeState;

    fn time(second: i64) -> Time {
        Time(Timestamp::from_second(second).expect("a second"))
    }

    fn status() -> NodeStatus {
        let capacity = ["cpu", "memory", "pods"].map(|name| (name.to_owned(), Quantity("1".to_owned())));
        NodeStatus { capacity: Some(capacity.into()), ..NodeStatus::default() }
    }

    fn ready_runtime(network_error: Option<&str>) -> RuntimeView {
        let mut view = RuntimeView::default();
        let network_error = network_error.map(str::to_owned);
        view.observe(&RuntimeState::Ready { network_error, offer: Arc::default() }, Instant::now());
        view
    }

    fn ready(status: &NodeStatus) -> (&str, &str, &str) {
        let all = status.conditions.as_deref().expect("conditions");
        let ready = all.iter().find(|c| c.type_ == READY).expect("Ready");
        (&ready.status, ready.reason.as_deref().expect("a reason"), ready.message.as_deref().expect("a message"))
    }

    #[tokio::test]
    async fn readiness_has_the_messages_of_the_kubelet() {
        let now = Instant::now();
        let health = ["PLEG is not healthy: pleg has yet to be successful".to_owned()];
        let fine = Readiness::default();
        let table = [
            (ready_runtime(None), fine.clone(), "kubelet is posting ready status"),
            (
                ready_runtime(Some("container runtime network not ready: x")),
                fine.clone(),
                "container runtime network not ready: x",
            ),
            (
                RuntimeView::default(),
                fine.clone(),
                "[container runtime status check may not have completed yet, network state unknown]",
            ),
            (ready_runtime(None), Readiness { health: &health, ..fine.clone() }, health[0].as_str()),
            (ready_runtime(None), Readiness { shutting_down: true, ..fine.clone() }, "node is shutting down"),
            (
                ready_runtime(None),
                Readiness { local_storage: true, ..fine.clone() },
                "missing node capacity for resources: ephemeral-storage",
            ),
            (
                ready_runtime(Some("n")),
                Readiness { shutting_down: true, health: &health, local_storage: true, ..fine.clone() },
                "[PLEG is not healthy: pleg has yet to be successful, n, node is shutting down, missing node capacity \
                 for resources: ephemeral-storage]",
            ),
        ];
        for (runtime, rest, message) in table {
            let mut status = status();
            set_ready(&mut status, &runtime, &rest, now, &time(5));
            let is_fine = message == "kubelet is posting ready status";
            let expected = if is_fine { ("True", "KubeletReady") } else { ("False", "KubeletNotReady") };
            assert_eq!(ready(&status), (expected.0, expected.1, message));
        }
    }

    #[tokio::test]
    async fn a_warning_ends_the_message_whether_the_node_is_ready_or_not() {
        let rest = Readiness { warning: Some("w"), ..Readiness::default() };
        for (network_error, expected) in [
            (None, ("True", "KubeletReady", "kubelet is posting ready status. WARNING: w")),
            (Some("n"), ("False", "KubeletNotReady", "n. WARNING: w")),
        ] {
            let mut status = status();
            set_ready(&mut status, &ready_runtime(network_error), &rest, Instant::now(), &time(5));
            assert_eq!(ready(&status), expected);
        }
    }

    #[tokio::test]
    async fn transition_times_change_with_the_status_only() {
        let (mut status, now) = (status(), Instant::now());
        for second in [1, 2] {
            set_ready(&mut status, &ready_runtime(None), &Readiness::default(), now, &time(second));
            set_pressures(&mut status, Pressures::default(), &time(second));
        }
        for condition in status.conditions.iter().flatten() {
            assert_eq!(condition.last_heartbeat_time, Some(time(2)), "{}", condition.type_);
            assert_eq!(condition.last_transition_time, Some(time(1)), "{}", condition.type_);
        }
        set_pressures(&mut status, Pressures { memory: true, ..Pressures::default() }, &time(3));
        let memory = status.conditions.iter().flatten().find(|c| c.type_ == "MemoryPressure").expect("there");
        assert_eq!((memory.status.as_str(), memory.last_transition_time.clone()), ("True", Some(time(3))));
        assert_eq!(memory.message.as_deref(), Some("kubelet has insufficient memory available"));
    }

    #[test]
    fn each_pressure_has_its_own_condition() {
        let none = Pressures::default();
        for (pressures, type_, reason, message) in [
            (
                Pressures { memory: true, ..none },
                "MemoryPressure",
                "KubeletHasInsufficientMemory",
                "kubelet has insufficient memory available",
            ),
            (Pressures { disk: true, ..none }, "DiskPressure", "KubeletHasDiskPressure", "kubelet has disk pressure"),
            (
                Pressures { pid: true, ..none },
                "PIDPressure",
                "KubeletHasInsufficientPID",
                "kubelet has insufficient PID available",
            ),
        ] {
            let mut status = NodeStatus::default();
            set_pressures(&mut status, pressures, &time(1));
            let all = status.conditions.expect("conditions");
            assert_eq!(all.len(), 3);
            let mut under = all.iter().filter(|condition| condition.status != "False");
            let condition = under.next().expect(type_);
            assert_eq!((condition.type_.as_str(), condition.status.as_str()), (type_, "True"));
            assert_eq!((condition.reason.as_deref(), condition.message.as_deref()), (Some(reason), Some(message)));
            assert_eq!(under.next(), None, "{type_} alone");
        }
    }

    #[test]
    fn unchanged_pressures_keep_their_message_and_position() {
        let foreign = NodeCondition {
            type_: "DiskPressure".into(),
            status: "False".into(),
            message: Some("edited".into()),
            ..NodeCondition::default()
        };
        let network =
            NodeCondition { type_: "NetworkUnavailable".into(), status: "False".into(), ..NodeCondition::default() };
        let mut status = NodeStatus { conditions: Some(vec![network, foreign]), ..NodeStatus::default() };
        set_pressures(&mut status, Pressures::default(), &time(1));
        let all = status.conditions.expect("conditions");
        let types: Vec<_> = all.iter().map(|c| c.type_.as_str()).collect();
        assert_eq!(types, ["NetworkUnavailable", "DiskPressure", "MemoryPressure", "PIDPressure"]);
        assert_eq!(all[1].message.as_deref(), Some("edited"));
    }
}
