//! Which resources of running containers are to be changed in place, and for which a restart is needed (KEP-1287). What the
//! pod's own cgroup gets is computed when it is read.

use std::collections::HashSet;
use std::collections::VecDeque;

use super::PodCgroup;
use super::draft::Draft;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::ProbeResult;
use crate::model::ResizeContainer;
use crate::model::ResizePod;
use crate::model::container_hash;
use crate::model::resources;
use crate::model::resources::Compute;
use crate::model::resources::Resizable;
use crate::model::spec;
use crate::model::spec::SpecContainer;

/// A resource changes whose policy is `RestartContainer`.
pub(super) fn needs_restart(draft: &Draft<'_>, container: &SpecContainer<'_>, running: &ContainerStatus) -> bool {
    let (from, to) = change(draft, container, running);
    [Resizable::Cpu, Resizable::Memory]
        .into_iter()
        .any(|resource| from.get(resource) != to.get(resource) && resources::needs_restart(container.spec, resource))
}

/// What is in force for a running instance, and what is allocated to it.
fn change(draft: &Draft<'_>, container: &SpecContainer<'_>, running: &ContainerStatus) -> (Compute, Compute) {
    let to = Compute::of(&resources::effective(draft.input.pod, container.spec));
    let recorded = draft.input.actuated.and_then(|actuated| actuated.containers.get(container.name()));
    (resources::in_force(recorded, to, running.resources), to)
}

/// Plans the changes of all containers that keep running, init containers first, from the last to the first. The plan is
/// otherwise complete.
pub(super) fn plan(draft: &mut Draft<'_>) {
    let (pod, resizes_init) = (draft.input.pod, draft.input.resizes_init);
    let killed: HashSet<&ContainerId> = draft.actions.kill.iter().map(|kill| &kill.id).collect();
    let (mut memory, mut cpu) = (VecDeque::new(), VecDeque::new());
    let init = spec::classified_init(pod).rev().filter(|init| resizes_init || init.class != ContainerClass::Init);
    for container in init.chain(spec::classified_regular(pod)) {
        let running = draft.newest(&container).filter(|newest| newest.state == ContainerState::Running);
        let running = running.filter(|running| !draft.actions.kill_pod && !killed.contains(&running.id));
        if let Some(running) = running.filter(|running| is_resizable(draft, &container, running)) {
            let (from, to) = change(draft, &container, running);
            let entry = || ResizeContainer { id: running.id.clone(), name: container.name().to_owned(), from, to };
            list(&mut memory, Resizable::Memory, entry);
            list(&mut cpu, Resizable::Cpu, entry);
        }
    }
    let pod_level = resources::is_pod_level_behind(pod, draft.input.actuated);
    let restarts = draft.starts_with_other_resources();
    let checks_memory = !memory.is_empty() || restarts || pod_level;
    let resize = ResizePod { memory: memory.into(), cpu: cpu.into(), pod_level, checks_memory };
    let changes = !resize.memory.is_empty() || !resize.cpu.is_empty() || resize.pod_level;
    let pod_cgroup = match draft.input.pod_cgroup {
        PodCgroup::Behind => true,
        PodCgroup::AsStarted => restarts,
        PodCgroup::Current => false,
    };
    if changes || pod_cgroup {
        draft.actions.resize = Some(resize);
    }
}

/// Adds a container whose amounts of this resource differ: those that shrink in front, by their limit, else by their
/// request.
fn list(containers: &mut VecDeque<ResizeContainer>, resource: Resizable, entry: impl FnOnce() -> ResizeContainer) {
    let entry = entry();
    let ((request, limit), (new_request, new_limit)) = (entry.from.get(resource), entry.to.get(resource));
    // No limit is the highest one.
    let height = |limit: i64| if limit == 0 { i64::MAX } else { limit };
    let grows = match height(new_limit).cmp(&height(limit)) {
        std::cmp::Ordering::Equal if new_request == request => return,
        std::cmp::Ordering::Equal => new_request > request,
        order => order.is_gt(),
    };
    if grows { containers.push_back(entry) } else { containers.push_front(entry) }
}

/// The instance is not about to be restarted for another reason. A sidecar has passed its startup probe.
fn is_resizable(draft: &Draft<'_>, container: &SpecContainer<'_>, running: &ContainerStatus) -> bool {
    let probes = draft.input.probes;
    let failed = |results: &std::collections::HashMap<ContainerId, ProbeResult>| {
        results.get(&running.id) == Some(&ProbeResult::Failure)
    };
    let hash = container_hash(container.name(), container.spec.image.as_deref().unwrap_or_default());
    let is_started = container.class != ContainerClass::Sidecar
        || ((container.spec.startup_probe.is_none() || probes.startup.get(&running.id) == Some(&ProbeResult::Success))
            && (container.spec.liveness_probe.is_none() || probes.liveness.contains_key(&running.id)));
    is_started && running.hash == hash && !failed(&probes.liveness) && !failed(&probes.startup)
}

impl Draft<'_> {
    /// A container that ran before is started with other resources.
    fn starts_with_other_resources(&self) -> bool {
        let pod = self.input.pod;
        let Some(actuated) = self.input.actuated else { return false };
        let containers = spec::lasting_by_name(pod);
        self.planned_starts().any(|name| {
            let container = containers.get(name);
            container.zip(actuated.containers.get(name)).is_some_and(|(container, recorded)| {
                Compute::of(recorded) != Compute::of(&resources::effective(pod, container.spec))
            })
        })
    }
}
