//! RestartAllContainers (KEP-5532): removes every instance of the pod's init and regular containers; sandbox,
//! volumes and logs stay, and the next pass starts with the first init container.
//!
//! The instances whose exit triggered it are removed last, so that it stays pending until all others are removed.

use super::draft::Draft;
use super::draft::remove;
use crate::model::ContainerState;
use crate::model::KillContainer;
use crate::model::KillReason;
use crate::model::restart;
use crate::model::spec;

pub(super) fn plan(draft: &mut Draft<'_>) {
    let pod = draft.input.pod;
    let instances = spec::classified_regular(pod)
        .chain(spec::classified_init(pod))
        .flat_map(|container| draft.instances_of(container.name()).iter().map(move |instance| (container, *instance)));
    let gates = draft.input.gates;
    let (last, first): (Vec<_>, Vec<_>) =
        instances.partition(|(container, instance)| restart::demands_restart_all(container.spec, instance, gates));
    for (_, instance) in first.into_iter().chain(last) {
        if instance.state != ContainerState::Exited {
            draft.actions.kill.push(KillContainer {
                id: instance.id.clone(),
                name: instance.name.clone(),
                reason: KillReason::RestartAll,
                message: "killing".to_owned(),
                grace_override: Some(0),
            });
        }
        draft.actions.remove.push(remove(instance, true));
    }
}
