//! What holds for every plan, whatever the situation.

use std::collections::HashSet;

use proptest::prelude::*;

use super::Situation;
use super::strategies::situations;
use crate::model::ContainerClass;
use crate::model::ContainerState;
use crate::model::PodActions;
use crate::model::SandboxPlan;
use crate::model::spec;

fn killed(actions: &PodActions, name: &str) -> bool {
    actions.kill_pod || actions.kill.iter().any(|kill| kill.name == name)
}

fn spec_name(situation: &Situation, class: ContainerClass, index: usize) -> Option<&str> {
    let pod = &situation.pod;
    match class {
        ContainerClass::Ephemeral => spec::ephemeral_containers(pod).get(index).map(|c| c.name.as_str()),
        ContainerClass::Init | ContainerClass::Sidecar => {
            spec::init_containers(pod).get(index).map(|c| c.name.as_str())
        }
        ContainerClass::Regular => spec::regular_containers(pod).get(index).map(|c| c.name.as_str()),
    }
}

fn rank(class: ContainerClass) -> u8 {
    match class {
        ContainerClass::Ephemeral => 0,
        ContainerClass::Init | ContainerClass::Sidecar => 1,
        ContainerClass::Regular => 2,
    }
}

proptest! {
    #[test]
    fn no_container_is_started_twice_or_beside_itself(situation in situations()) {
        let actions = situation.plan();
        let mut names = HashSet::new();
        for start in &actions.start {
            prop_assert!(names.insert(&start.name), "{} is started twice", start.name);
            let newest = situation.snapshot.newest(&start.name);
            if newest.is_some_and(|status| status.state == ContainerState::Running) {
                prop_assert!(killed(&actions, &start.name), "{} still runs", start.name);
            }
        }
    }

    #[test]
    fn starts_name_spec_entries_in_order(situation in situations()) {
        let actions = situation.plan();
        for start in &actions.start {
            prop_assert_eq!(spec_name(&situation, start.class, start.index), Some(start.name.as_str()));
        }
        let order: Vec<_> = actions.start.iter().map(|start| (rank(start.class), start.index)).collect();
        prop_assert!(order.is_sorted(), "{order:?}");
    }

    #[test]
    fn restart_counts_rise(situation in situations()) {
        for start in situation.plan().start {
            let newest = situation.snapshot.newest(&start.name).map(|status| status.restart_count);
            prop_assert_eq!(start.restart_count, newest.map(|count| count + 1));
        }
    }

    #[test]
    fn starts_need_a_sandbox(situation in situations()) {
        let actions = situation.plan();
        prop_assert!(actions.start.is_empty() || actions.sandbox != SandboxPlan::None);
        if actions.kill_pod {
            prop_assert!(!matches!(actions.sandbox, SandboxPlan::Keep(_)));
        }
    }

    #[test]
    fn only_existing_instances_are_touched(situation in situations()) {
        let actions = situation.plan();
        for kill in &actions.kill {
            let instance = situation.snapshot.by_id(&kill.id);
            prop_assert!(instance.is_some_and(|c| c.name == kill.name && c.state != ContainerState::Exited));
        }
        let mut gone = HashSet::new();
        for removal in actions.remove.iter().chain(&actions.prune) {
            prop_assert!(situation.snapshot.by_id(&removal.id).is_some_and(|c| c.name == removal.name));
            prop_assert!(gone.insert(&removal.id), "{} is removed twice", removal.id);
        }
    }

    #[test]
    fn nothing_that_runs_is_removed_alive(situation in situations()) {
        let actions = situation.plan();
        for removal in actions.remove.iter().chain(&actions.prune) {
            let instance = situation.snapshot.by_id(&removal.id).expect("an instance of the snapshot");
            if instance.state == ContainerState::Running {
                prop_assert!(killed(&actions, &removal.name));
            }
        }
    }

    #[test]
    fn exited_regular_containers_are_not_started_once_deletion_is_requested(situation in situations()) {
        let situation = situation.deleting();
        let actions = situation.plan();
        if matches!(actions.sandbox, SandboxPlan::Keep(_)) {
            for start in actions.start.iter().filter(|start| start.class == ContainerClass::Regular) {
                let newest = situation.snapshot.newest(&start.name);
                prop_assert!(newest.is_some_and(|status| status.state == ContainerState::Running), "{}", start.name);
            }
        }
    }

    /// Whatever the missing code turns out to be, a start made without it was right. Of an instance in a sandbox that was
    /// replaced it may still restart all containers, which all start anew in the new sandbox anyway.
    #[test]
    fn starts_without_a_code_hold_with_every_code(situation in situations(), code in prop::sample::select(vec![0, 1, 42])) {
        let early = situation.plan();
        let current = situation.snapshot.sandboxes.first().map(|sandbox| sandbox.id.clone());
        for start in &early.start {
            let mut confirmed = situation.clone();
            let unknown = |c: &&mut crate::model::ContainerStatus| {
                let is_current = Some(&c.sandbox_id) == current.as_ref();
                is_current && c.name == start.name && c.state == ContainerState::Exited && c.exit_code.is_none()
            };
            let Some(instance) = confirmed.snapshot.containers.iter_mut().find(unknown) else { continue };
            instance.exit_code = Some(code);
            let late = confirmed.plan();
            prop_assert!(late.start.contains(start), "{} with code {code}: {early:?} then {late:?}", start.name);
        }
    }

    #[test]
    fn a_code_is_awaited_only_if_one_is_missing(situation in situations()) {
        let missing = situation.snapshot.containers.iter().any(|c| c.state == ContainerState::Exited && c.exit_code.is_none());
        prop_assert!(missing || !situation.plan().await_confirmation);
    }
}
