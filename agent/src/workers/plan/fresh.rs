//! The pod needs another sandbox: which containers to start in it, or none.

use super::draft::Draft;
use super::resize;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::SandboxId;
use crate::model::restart;
use crate::model::restart::RestartPolicy;
use crate::model::spec;
use crate::model::spec::SpecContainer;

/// Whether a regular container runs in a new sandbox.
enum Restart {
    Yes,
    Done,
    AwaitExitCode,
}

pub(super) fn plan(draft: &mut Draft<'_>, attempt: u32, replaces: Option<SandboxId>) {
    let pod = draft.input.pod;
    // One of them may yet restart the whole pod instead, or leave nothing to make a sandbox for: known with its code.
    if spec::lasting_containers(pod).any(|container| may_yet_restart_all(draft, &container)) {
        return draft.await_exit_code();
    }
    if !restart::may_replace_sandbox(pod, draft.input.snapshot, attempt) {
        return draft.kill_pod();
    }
    let mut starts = Vec::new();
    let mut seen = false;
    for container in spec::classified_regular(pod) {
        let newest = draft.newest(&container);
        seen |= newest.is_some_and(|status| status.state != ContainerState::Unknown);
        match restart_in_new_sandbox(draft, &container, newest) {
            Restart::Yes => starts.push(container),
            Restart::Done => {}
            Restart::AwaitExitCode => draft.await_exit_code(),
        }
    }
    if draft.actions.await_confirmation {
        return;
    }
    if starts.is_empty() && seen {
        return draft.kill_pod();
    }
    draft.replace_sandbox(attempt, replaces);
    match spec::classified_init(pod).next() {
        Some(first) => draft.start(&first),
        None => starts.iter().for_each(|container| draft.start(container)),
    }
    // The pod's cgroup exists already if the pod was resized while it had no sandbox.
    resize::plan(draft);
}

fn may_yet_restart_all(draft: &Draft<'_>, container: &SpecContainer<'_>) -> bool {
    let undecided = |last: &ContainerStatus| last.state == ContainerState::Exited && last.exit_code.is_none();
    draft.newest(container).is_some_and(undecided) && restart::may_restart_all(container.spec, draft.input.gates)
}

fn restart_in_new_sandbox(
    draft: &Draft<'_>,
    container: &SpecContainer<'_>,
    newest: Option<&ContainerStatus>,
) -> Restart {
    let (pod, gates) = (draft.input.pod, draft.input.gates);
    let policy = RestartPolicy::of_container(pod, container.spec, gates);
    match newest {
        Some(last) if policy == RestartPolicy::OnFailure && last.state == ContainerState::Exited => {
            match last.exit_code {
                // A rule may restart the container also after success.
                Some(code) if restart::restarts_after(pod, container.spec, code, gates) => Restart::Yes,
                Some(_) => Restart::Done,
                None => Restart::AwaitExitCode,
            }
        }
        _ => Restart::Yes,
    }
}
