//! Regular containers of an initialised pod: keep, start, or kill and perhaps start.

use super::draft::Draft;
use super::resize;
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

pub(super) fn plan(draft: &mut Draft<'_>) {
    let mut kept = 0;
    for container in spec::classified_regular(draft.input.pod) {
        let newest = draft.newest(&container);
        kept += usize::from(match newest.filter(|status| status.state == ContainerState::Running) {
            Some(running) => keep_running(draft, &container, running),
            None => start_if_due(draft, &container, newest),
        });
    }
    // Sidecars alone do not keep a pod alive.
    if kept == 0 && !draft.has_regular_starts() {
        draft.kill_pod();
    }
}

/// Starts a container that does not run, if it may run. True if that depends on an exit code that is not known yet.
fn start_if_due(draft: &mut Draft<'_>, container: &SpecContainer<'_>, newest: Option<&ContainerStatus>) -> bool {
    match restart::should_start(draft.input.pod, container.spec, newest, draft.input.gates) {
        RestartDecision::Leave => false,
        RestartDecision::AwaitExitCode => {
            draft.await_exit_code();
            true
        }
        RestartDecision::Start => {
            if let Some(lost) = newest.filter(|status| status.state == ContainerState::Unknown) {
                let message = r#"Container is in "unknown" state, try killing it before restart"#;
                draft.kill(lost, KillReason::UnknownState, message.to_owned());
            }
            draft.start(container);
            false
        }
    }
}

/// Kills a container that must not keep running, and starts it again where the policy (not rules) allows. True if it is
/// kept.
fn keep_running(draft: &mut Draft<'_>, container: &SpecContainer<'_>, running: &ContainerStatus) -> bool {
    let Some((reason, what)) = reason_to_kill(draft, container, running) else {
        return true;
    };
    let restart = matches!(reason, KillReason::DefinitionChanged | KillReason::Resize)
        || RestartPolicy::of_container(draft.input.pod, container.spec, draft.input.gates) != RestartPolicy::Never;
    let suffix = if restart { ", will be restarted" } else { "" };
    let suffix = if reason == KillReason::Resize { "" } else { suffix };
    draft.kill(running, reason, format!("Container {} {what}{suffix}", container.name()));
    if restart {
        draft.start(container);
    }
    false
}

fn reason_to_kill(
    draft: &Draft<'_>,
    container: &SpecContainer<'_>,
    running: &ContainerStatus,
) -> Option<(KillReason, &'static str)> {
    let probes = draft.input.probes;
    if running.hash != container_hash(container.name(), container.spec.image.as_deref().unwrap_or_default()) {
        Some((KillReason::DefinitionChanged, "definition changed"))
    } else if probes.liveness.get(&running.id) == Some(&ProbeResult::Failure) {
        Some((KillReason::Liveness, "failed liveness probe"))
    } else if probes.startup.get(&running.id) == Some(&ProbeResult::Failure) {
        Some((KillReason::Startup, "failed startup probe"))
    } else if resize::needs_restart(draft, container, running) {
        Some((KillReason::Resize, "resize requires restart"))
    } else {
        None
    }
}
