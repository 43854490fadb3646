//! The next actions for one pod: a pure function of spec, snapshot, history and time. Guesses no exit code.
//!
//! ```text
//!  restart-all pending? ─yes─▶ remove every instance      (restart_all)
//!        │ no
//!  another sandbox?     ─yes─▶ kill pod, create, start    (fresh)
//!        │ no
//!  ephemeral ─▶ init and sidecars (init) ─▶ regular       (regular)
//!                            └── running ones ─▶ resize ──┘ (resize)
//! ```
//!
//! Two assumptions make the plan safe. The snapshot was sampled after the worker's own last action, so an instance in
//! state Created is the leftover of a start that failed, or of one whose result was lost: the call timed out,
//! or the agent that made it was killed. The latter may still succeed, so the leftover is removed before another instance
//! is created (`StartContainer::replaces`). And an exit proven by the kernel is final, so it is acted on before the runtime
//! confirms it; only where the exit code matters and is not known yet does the plan leave the container alone and say
//! so (`PodActions::await_confirmation`).

mod draft;
mod fresh;
mod init;
mod regular;
mod resize;
mod restart_all;
#[cfg(test)]
mod tests;

use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;

use crate::model::PodActions;
use crate::model::PodSnapshot;
use crate::model::ProbeResults;
use crate::model::SandboxNeed;
use crate::model::SandboxPlan;
use crate::model::resources::PodResources;
use crate::model::restart;
use crate::model::restart::RestartGates;
use crate::workers::backoff::BackoffHistory;
use draft::Draft;

/// Everything a plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// The desired pod, with its allocated resources.
    pub pod: &'a Pod,
    /// What the runtime reported, sampled after the worker's last action.
    pub snapshot: &'a PodSnapshot,
    /// Crash-loop history. The plan only reads it; executing a start records it.
    pub history: &'a BackoffHistory,
    /// Probe results.
    pub probes: &'a ProbeResults,
    /// The pod's published status has condition AllContainersRestarting=True (KEP-5532).
    pub restarting_all: bool,
    /// What was applied to the pod's containers, as far as known (KEP-1287).
    pub actuated: Option<&'a PodResources>,
    /// Whether the pod's own cgroup has what is allocated.
    pub pod_cgroup: PodCgroup,
    /// Init containers that are no sidecars are resized (gate InPlacePodVerticalScalingInitContainers).
    pub resizes_init: bool,
    /// Feature gates.
    pub gates: RestartGates,
    /// The wall clock, comparable with the runtime's finish times.
    pub now: SystemTime,
}

/// Whether the pod's own cgroup has what is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PodCgroup {
    /// It has what its containers were started with.
    #[default]
    AsStarted,
    /// This agent has set it to what is allocated now.
    Current,
    /// Setting it failed, an earlier agent may have ended before it, or it was set to what is no longer allocated.
    Behind,
}

/// The next actions for one pod.
pub fn plan(input: &PlanInput<'_>) -> PodActions {
    let need = SandboxNeed::of(input.pod, input.snapshot);
    let restart_all = restart::restart_all_pending(input.pod, input.snapshot, input.restarting_all, input.gates);
    let mut draft = Draft::new(input);
    match (need, restart_all) {
        (SandboxNeed::Create { attempt, replaces, .. }, true) => draft.replace_sandbox(attempt, replaces),
        (SandboxNeed::Create { attempt, replaces, .. }, false) => fresh::plan(&mut draft, attempt, replaces),
        (SandboxNeed::Keep(id), true) => {
            draft.actions.sandbox = SandboxPlan::Keep(id);
            restart_all::plan(&mut draft);
        }
        (SandboxNeed::Keep(id), false) => {
            draft.actions.sandbox = SandboxPlan::Keep(id);
            keep_sandbox(&mut draft);
        }
    }
    draft.into_actions()
}

/// The sandbox stays: plans ephemeral, init and regular containers.
fn keep_sandbox(draft: &mut Draft<'_>) {
    draft.start_new_ephemeral();
    match init::plan(draft) {
        init::Progress::Done => regular::plan(draft),
        init::Progress::Pending => {}
        init::Progress::Failed => return draft.kill_pod(),
    }
    if !draft.actions.kill_pod {
        resize::plan(draft);
    }
}
