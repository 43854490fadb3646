//! Plans: tables of single situations, and properties over random ones.

mod init;
mod many;
mod properties;
mod proven;
mod regular;
mod reported;
mod resize;
mod restart_all;
mod sandbox;
mod simulation;
mod strategies;

use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use super::PlanInput;
use super::PodCgroup;
use crate::model::ContainerStatus;
use crate::model::PodActions;
use crate::model::PodSnapshot;
use crate::model::ProbeResult;
use crate::model::ProbeResults;
use crate::model::resources::PodResources;
use crate::model::restart::RestartGates;
use crate::model::testing;
use crate::model::testing::set_rule;
use crate::workers::backoff;
use crate::workers::backoff::BackoffHistory;

/// The input of a plan.
#[derive(Clone, Debug)]
struct Situation {
    pod: Pod,
    snapshot: PodSnapshot,
    history: BackoffHistory,
    probes: ProbeResults,
    restarting_all: bool,
    actuated: Option<PodResources>,
    pod_cgroup: PodCgroup,
    resizes_init: bool,
    gates: RestartGates,
    now: SystemTime,
}

impl Situation {
    /// A ready sandbox with these instances (newest first), no history, long after their ends.
    fn new(pod: Pod, containers: Vec<ContainerStatus>) -> Self {
        Self {
            pod,
            snapshot: testing::snapshot(containers),
            history: BackoffHistory::for_crash_loops(backoff::DEFAULT_MAX),
            probes: ProbeResults::default(),
            restarting_all: false,
            actuated: None,
            pod_cgroup: PodCgroup::default(),
            resizes_init: true,
            gates: RestartGates::default(),
            now: backoff::wall_time(testing::at(100_000)),
        }
    }

    fn plan(&self) -> PodActions {
        super::plan(&PlanInput {
            pod: &self.pod,
            snapshot: &self.snapshot,
            history: &self.history,
            probes: &self.probes,
            restarting_all: self.restarting_all,
            actuated: self.actuated.as_ref(),
            pod_cgroup: self.pod_cgroup,
            resizes_init: self.resizes_init,
            gates: self.gates,
            now: self.now,
        })
    }

    fn liveness(mut self, id: &str, result: ProbeResult) -> Self {
        self.probes.liveness.insert(id.into(), result);
        self
    }

    fn startup(mut self, id: &str, result: ProbeResult) -> Self {
        self.probes.startup.insert(id.into(), result);
        self
    }

    fn with_pod(mut self, change: impl FnOnce(&mut Pod)) -> Self {
        change(&mut self.pod);
        self
    }

    fn deleting(self) -> Self {
        self.with_pod(|pod| pod.metadata.deletion_timestamp = Some(testing::time(Duration::ZERO)))
    }
}

/// A plan in one line: what matters to most tests.
fn brief(actions: &PodActions) -> String {
    let mut parts = Vec::new();
    if actions.kill_pod {
        parts.push("kill-pod".to_owned());
    }
    parts.extend(actions.kill.iter().map(|kill| format!("kill {}", kill.id)));
    parts.extend(actions.remove.iter().map(|removal| format!("remove {}", removal.id)));
    parts.extend(actions.prune.iter().map(|removal| format!("prune {}", removal.id)));
    if let crate::model::SandboxPlan::Create { attempt, .. } = actions.sandbox {
        parts.push(format!("sandbox {attempt}"));
    }
    parts.extend(actions.start.iter().map(|start| format!("start {}", start.name)));
    if actions.await_confirmation {
        parts.push("await".to_owned());
    }
    if parts.is_empty() { "idle".to_owned() } else { parts.join(", ") }
}

fn init_container<'a>(pod: &'a mut Pod, name: &str) -> &'a mut Container {
    let list = pod.spec.get_or_insert_default().init_containers.get_or_insert_default();
    list.iter_mut().find(|container| container.name == name).expect("an init container of that name")
}

fn regular_container<'a>(pod: &'a mut Pod, name: &str) -> &'a mut Container {
    let list = &mut pod.spec.get_or_insert_default().containers;
    list.iter_mut().find(|container| container.name == name).expect("a container of that name")
}
