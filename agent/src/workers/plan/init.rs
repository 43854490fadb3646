//! Init containers run one after the other, sidecars keep running (KEP-753).
//!
//! Read from the last to the first: finished init containers may have been removed, so the latest one with an
//! instance shows how far initialisation is. Everything before it is done; of those only sidecars are restarted.
//!
//! Only instances of the current sandbox count, as upstream since 1.37: a new sandbox is initialised anew, whatever ran in
//! the one before it.

use super::draft::Draft;
use super::resize;
use crate::model::ContainerClass;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::KillReason;
use crate::model::ProbeResult;
use crate::model::container_hash;
use crate::model::restart;
use crate::model::restart::RestartDecision;
use crate::model::restart::RestartPolicy;
use crate::model::spec;
use crate::model::spec::SpecContainer;

/// How far initialisation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// Regular containers may run.
    Done,
    /// Not yet.
    Pending,
    /// An init container failed for good.
    Failed,
}

/// What follows from one entry with an instance.
enum InitStep {
    /// This entry is done: the next one may start, or, after the last one, the regular containers.
    Next,
    /// Nothing follows from it (yet).
    Wait,
    /// The pod cannot be initialised.
    Fail,
}

pub(super) fn plan(draft: &mut Draft<'_>) -> Progress {
    let entries: Vec<_> = spec::classified_init(draft.input.pod).collect();
    if kill_in_replaced_sandboxes(draft, &entries) {
        return Progress::Pending;
    }
    let mut initialised = entries.is_empty() || already_initialised(draft);
    let mut later_has_run = initialised;
    for entry in entries.iter().rev() {
        let sidecar = entry.class == ContainerClass::Sidecar;
        let Some(newest) = draft.active(entry) else {
            if later_has_run && sidecar {
                draft.start(entry);
            }
            continue;
        };
        if later_has_run && !sidecar {
            continue;
        }
        match if sidecar { sidecar_step(draft, entry, newest) } else { init_step(draft, entry, newest) } {
            InitStep::Next => match entries.get(entry.index + 1) {
                None => initialised = true,
                Some(next) if !later_has_run => draft.start(next),
                Some(_) => {}
            },
            InitStep::Wait => {}
            InitStep::Fail => return Progress::Failed,
        }
        later_has_run = true;
    }
    if !later_has_run && let Some(first) = entries.first() {
        draft.start(first);
    }
    if initialised { Progress::Done } else { Progress::Pending }
}

/// Kills instances that still run in a sandbox that was replaced; true if there are any. Another instance of them waits for
/// their end.
fn kill_in_replaced_sandboxes(draft: &mut Draft<'_>, entries: &[SpecContainer<'_>]) -> bool {
    let runs_elsewhere = |entry: &SpecContainer<'_>| {
        let newest = draft.newest(entry).filter(|newest| newest.state == ContainerState::Running)?;
        draft.active(entry).is_none().then_some((newest, entry.name().to_owned()))
    };
    let stale: Vec<_> = entries.iter().filter_map(runs_elsewhere).collect();
    for (instance, name) in &stale {
        let message = format!("Init container {name} runs in a sandbox that was replaced");
        draft.kill(instance, KillReason::SandboxReplaced, message);
    }
    !stale.is_empty()
}

/// An instance of a regular container proves that initialisation was done.
fn already_initialised(draft: &Draft<'_>) -> bool {
    spec::classified_regular(draft.input.pod).any(|container| draft.active(&container).is_some())
}

fn init_step(draft: &mut Draft<'_>, entry: &SpecContainer<'_>, newest: &ContainerStatus) -> InitStep {
    let pod = draft.input.pod;
    match newest.state {
        ContainerState::Running => {
            if draft.input.resizes_init && resize::needs_restart(draft, entry, newest) {
                kill_for_resize(draft, entry, newest);
            }
            InitStep::Wait
        }
        ContainerState::Created => start(draft, entry),
        ContainerState::Exited if succeeded(newest) => InitStep::Next,
        ContainerState::Exited if newest.exit_code.is_none() => {
            draft.await_exit_code();
            InitStep::Wait
        }
        ContainerState::Exited => match restart::should_start(pod, entry.spec, Some(newest), draft.input.gates) {
            RestartDecision::Start => start(draft, entry),
            RestartDecision::Leave | RestartDecision::AwaitExitCode => InitStep::Fail,
        },
        ContainerState::Unknown
            if RestartPolicy::of_container(pod, entry.spec, draft.input.gates) == RestartPolicy::Never =>
        {
            InitStep::Fail
        }
        ContainerState::Unknown => kill_unknown_and_start(draft, entry, newest),
    }
}

fn sidecar_step(draft: &mut Draft<'_>, entry: &SpecContainer<'_>, newest: &ContainerStatus) -> InitStep {
    match newest.state {
        ContainerState::Running => running_sidecar_step(draft, entry, newest),
        ContainerState::Created => start(draft, entry),
        // The exit code matters only if it could restart the whole pod instead.
        ContainerState::Exited
            if newest.exit_code.is_none() && restart::may_restart_all(entry.spec, draft.input.gates) =>
        {
            draft.await_exit_code();
            InitStep::Wait
        }
        ContainerState::Exited => start(draft, entry),
        ContainerState::Unknown => kill_unknown_and_start(draft, entry, newest),
    }
}

fn running_sidecar_step(draft: &mut Draft<'_>, entry: &SpecContainer<'_>, newest: &ContainerStatus) -> InitStep {
    let probes = draft.input.probes;
    if entry.spec.startup_probe.is_some() {
        match probes.startup.get(&newest.id) {
            Some(ProbeResult::Success) => {}
            Some(ProbeResult::Failure) => {
                kill_and_start(draft, entry, newest, KillReason::Startup, "failed startup probe");
                return InitStep::Wait;
            }
            Some(ProbeResult::Unknown) | None => return InitStep::Wait,
        }
    }
    let liveness = entry.spec.liveness_probe.as_ref().and_then(|_| probes.liveness.get(&newest.id));
    if newest.hash != container_hash(entry.name(), entry.spec.image.as_deref().unwrap_or_default()) {
        kill_and_start(draft, entry, newest, KillReason::DefinitionChanged, "definition changed");
    } else if liveness == Some(&ProbeResult::Failure) {
        kill_and_start(draft, entry, newest, KillReason::Liveness, "failed liveness probe");
    } else if resize::needs_restart(draft, entry, newest) {
        kill_for_resize(draft, entry, newest);
    }
    InitStep::Next
}

fn succeeded(exited: &ContainerStatus) -> bool {
    exited.exit_code == Some(0) && exited.reason != "OOMKilled"
}

fn start(draft: &mut Draft<'_>, entry: &SpecContainer<'_>) -> InitStep {
    draft.start(entry);
    InitStep::Wait
}

fn kill_unknown_and_start(draft: &mut Draft<'_>, entry: &SpecContainer<'_>, newest: &ContainerStatus) -> InitStep {
    // As upstream, without the name.
    let message = r#"Init container is in "unknown" state, try killing it before restart"#;
    draft.kill(newest, KillReason::UnknownState, message.to_owned());
    draft.start(entry);
    InitStep::Wait
}

fn kill_for_resize(draft: &mut Draft<'_>, entry: &SpecContainer<'_>, newest: &ContainerStatus) {
    draft.kill(newest, KillReason::Resize, format!("Container {} resize requires restart", entry.name()));
    draft.start(entry);
}

fn kill_and_start(
    draft: &mut Draft<'_>,
    entry: &SpecContainer<'_>,
    newest: &ContainerStatus,
    reason: KillReason,
    what: &str,
) {
    draft.kill(newest, reason, format!("Init container {} {what}", entry.name()));
    draft.start(entry);
}
