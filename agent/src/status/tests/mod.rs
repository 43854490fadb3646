//! Tests of status generation and the status cache.

mod conditions;
mod containers;
mod phase;
mod readiness;
mod store;
mod whole;

use std::collections::HashMap;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::ContainerState as ApiState;
use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::api::core::v1::ContainerStatus as ApiStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::ResourceRequirements;

use super::NodeAddresses;
use super::ResizeView;
use super::StatusInput;
use super::generate;
use super::state;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::ProbeResults;
use crate::model::StartFailure;
use crate::model::resources::PodResources;
use crate::model::restart::RestartGates;
use crate::model::testing;

/// Input of one status computation.
struct Situation {
    pod: Pod,
    snapshot: PodSnapshot,
    old: PodStatus,
    reasons: HashMap<String, StartFailure>,
    probes: ProbeResults,
    resources: Option<ResourceRequirements>,
    resize: ResizeView<'static>,
    actuated: Option<PodResources>,
    recursive_read_only: bool,
    stop_signals: bool,
    is_terminal: bool,
    node: NodeAddresses,
    gates: RestartGates,
}

impl Situation {
    fn new(pod: Pod, containers: Vec<ContainerStatus>) -> Self {
        Self {
            pod,
            snapshot: testing::snapshot(containers),
            old: PodStatus::default(),
            reasons: HashMap::new(),
            probes: ProbeResults::default(),
            resources: None,
            resize: ResizeView::default(),
            actuated: None,
            recursive_read_only: false,
            stop_signals: false,
            is_terminal: false,
            node: NodeAddresses::default(),
            gates: RestartGates::default(),
        }
    }

    fn generate(&self) -> PodStatus {
        generate(&StatusInput {
            pod: &self.pod,
            snapshot: &self.snapshot,
            old: &self.old,
            reasons: &self.reasons,
            probes: Some(&self.probes),
            qos_class: "BestEffort",
            resources: self.resources.as_ref(),
            resize: ResizeView { actuated: self.actuated.as_ref(), ..self.resize },
            recursive_read_only: self.recursive_read_only,
            stop_signals: self.stop_signals,
            is_terminal: self.is_terminal,
            runtime_type: "containerd",
            node: &self.node,
            gates: self.gates,
            now: now(),
        })
    }

    /// Makes the status the previous one, and these containers the new snapshot.
    fn then(mut self, containers: Vec<ContainerStatus>) -> Self {
        self.old = self.generate();
        self.snapshot.containers = containers;
        self
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn failed(self, name: &str, token: &str) -> Self {
        let failure = StartFailure { token: token.into(), message: format!("{token} detail"), retry_at: None };
        self.with(|situation| drop(situation.reasons.insert(name.into(), failure)))
    }

    fn phase(&self) -> String {
        self.generate().phase.unwrap_or_default()
    }
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_nanos(testing::at(5_000).unsigned_abs()) + Duration::from_millis(700)
}

/// The status of a container in any of the lists.
fn container<'a>(status: &'a PodStatus, name: &str) -> &'a ApiStatus {
    let lists = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let mut all = lists.into_iter().flatten().flatten();
    all.find(|container| container.name == name).expect("a status of that name")
}

/// A container's state as short text.
fn brief(state: Option<&ApiState>) -> String {
    let Some(state) = state else {
        return "none".to_owned();
    };
    if let Some(waiting) = &state.waiting {
        format!("waiting {}", waiting.reason.as_deref().unwrap_or_default()).trim_end().to_owned()
    } else if let Some(end) = &state.terminated {
        format!("terminated {} {}", end.exit_code, end.reason.as_deref().unwrap_or_default()).trim_end().to_owned()
    } else if state.running.is_some() {
        "running".to_owned()
    } else {
        "unset".to_owned()
    }
}

/// State and last state of a container, and its restart count.
fn story(status: &PodStatus, name: &str) -> String {
    let status = container(status, name);
    format!("{} after {}, {}", brief(status.state.as_ref()), brief(status.last_state.as_ref()), status.restart_count)
}

fn condition<'a>(status: &'a PodStatus, type_: &str) -> &'a PodCondition {
    let mut conditions = status.conditions.iter().flatten();
    conditions.find(|condition| condition.type_ == type_).expect("a condition of that type")
}

/// Status, reason and message of a condition.
fn describe(status: &PodStatus, type_: &str) -> String {
    let condition = condition(status, type_);
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let parts = [condition.status.clone(), text(&condition.reason), text(&condition.message)];
    parts.join(" ").trim_end().to_owned()
}

fn is_running() -> ApiState {
    state::running(&testing::running("any", 0))
}

fn has_ended(exit_code: i32) -> ApiState {
    let terminated = ContainerStateTerminated { exit_code, ..ContainerStateTerminated::default() };
    ApiState { terminated: Some(terminated), ..ApiState::default() }
}

fn api_status(name: &str, state: ApiState) -> ApiStatus {
    ApiStatus { name: name.into(), state: Some(state), ..ApiStatus::default() }
}
