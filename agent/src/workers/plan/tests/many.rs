//! Pods with as many containers as an object of the API server has room for. A plan is made without an await: the work must
//! not grow with the square of their number.

use k8s_openapi::api::core::v1::ResourceRequirements;
use serde_json::json;

use super::Situation;
use super::brief;
use super::regular_container;
use crate::model::ContainerStatus;
use crate::model::PodActions;
use crate::model::RemoveContainer;
use crate::model::SandboxPlan;
use crate::model::resources::PodResources;
use crate::model::testing::exited;
use crate::model::testing::pod;
use crate::model::testing::running;

const COUNT: usize = 20_000;

fn names() -> Vec<String> {
    (0..COUNT).map(|number| format!("c{number}")).collect()
}

fn as_strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

/// Regular containers, with one instance of each.
fn regular(names: &[String], instance: impl Fn(&str) -> ContainerStatus) -> Situation {
    let situation =
        Situation::new(pod("Always", &[], &as_strs(names)), names.iter().map(|name| instance(name)).collect());
    Situation { actuated: Some(PodResources::of(&situation.pod)), ..situation }
}

/// Init containers that have all succeeded, each with an older instance that failed.
fn initialised(names: &[String]) -> Situation {
    let (newest, old) = (names.iter().map(|name| exited(name, 1, 0)), names.iter().map(|name| exited(name, 0, 1)));
    Situation::new(pod("Always", &as_strs(names), &["main"]), newest.chain(old).collect())
}

fn started(actions: &PodActions) -> Vec<&str> {
    actions.start.iter().map(|start| start.name.as_str()).collect()
}

fn ids(removals: &[RemoveContainer]) -> Vec<&str> {
    removals.iter().map(|removal| removal.id.as_str()).collect()
}

/// Instances of these containers.
fn instances(names: &[String], attempt: u32) -> Vec<String> {
    names.iter().map(|name| format!("{name}-{attempt}")).collect()
}

#[test]
fn running_containers_are_kept() {
    let names = names();
    assert!(regular(&names, |name| running(name, 0)).plan().is_idle());
}

#[test]
fn crashed_containers_start_in_the_order_of_the_spec() {
    let names = names();
    let actions = regular(&names, |name| exited(name, 3, 1)).plan();
    assert!(started(&actions) == as_strs(&names) && actions.resize.is_none());
    assert!(actions.start.iter().all(|start| start.restart_count == Some(4)));
}

#[test]
fn changed_containers_are_restarted_and_not_resized() {
    let names = names();
    let actions = regular(&names, |name| ContainerStatus { hash: 0, ..running(name, 0) }).plan();
    let killed: Vec<&str> = actions.kill.iter().map(|kill| kill.name.as_str()).collect();
    assert!(killed == as_strs(&names) && started(&actions) == as_strs(&names) && actions.resize.is_none());
}

#[test]
fn the_last_of_those_that_shrink_comes_first() {
    let names = names();
    let memory = |limit: &str| -> Option<ResourceRequirements> {
        Some(serde_json::from_value(json!({"limits": {"memory": limit}})).expect("resources"))
    };
    let limited = |limit: &'static str| {
        let of_all = regular(&names, |name| running(name, 0));
        of_all.with_pod(|pod| {
            let spec = pod.spec.as_mut().expect("a spec");
            spec.containers.iter_mut().for_each(|container| container.resources = memory(limit));
        })
    };
    let before = PodResources::of(&limited("2Mi").pod);
    let resize = Situation { actuated: Some(before), ..limited("1Mi") }.plan().resize.expect("a resize");
    assert!(resize.memory.iter().map(|container| &container.name).eq(names.iter().rev()) && resize.cpu.is_empty());
}

#[test]
fn old_instances_of_init_containers_are_pruned_in_the_order_of_the_spec() {
    let names = names();
    let actions = initialised(&names).plan();
    assert_eq!(started(&actions), ["main"]);
    assert!(ids(&actions.prune) == as_strs(&instances(&names, 0)));
}

#[test]
fn all_instances_of_init_containers_go_with_a_lost_sandbox() {
    let (names, main) = (names(), running("main", 0));
    let mut lost = initialised(&names);
    lost.snapshot.containers.insert(0, main);
    lost.snapshot.sandboxes[0].ready = false;
    let actions = lost.plan();
    assert!(actions.kill_pod && matches!(actions.sandbox, SandboxPlan::Create { attempt: 1, .. }));
    assert_eq!(started(&actions), ["c0"]);
    assert!(ids(&actions.prune) == as_strs(&[instances(&names, 1), instances(&names, 0)].concat()));
}

#[test]
fn a_restart_of_all_removes_its_source_last() {
    let names = names();
    let source = |name: &str| if name == "c0" { exited(name, 0, 42) } else { running(name, 0) };
    let demanded = regular(&names, source)
        .with_pod(|pod| super::set_rule(regular_container(pod, "c0"), "Never", "RestartAllContainers"));
    let actions = demanded.plan();
    let mut expected = instances(&names, 0);
    expected.rotate_left(1);
    assert!(ids(&actions.remove) == as_strs(&expected) && actions.kill.len() == COUNT - 1);
}

/// Of several instances the newest one counts; of an init container's the newest one in the current sandbox.
#[test]
fn the_newest_instance_of_each_container_counts() {
    let elsewhere = |status: ContainerStatus| ContainerStatus { sandbox_id: "sandbox-9".into(), ..status };
    let init = vec![elsewhere(exited("one", 2, 1)), exited("one", 1, 0), exited("one", 0, 1)];
    for (containers, expected) in [
        (vec![running("a", 2), exited("a", 1, 1), exited("a", 0, 1)], "idle"),
        (vec![exited("a", 2, 0), running("a", 1)], "kill-pod"),
        (init, "prune one-1, prune one-0, start a"),
    ] {
        let situation = Situation::new(pod("OnFailure", &["one"], &["a"]), containers);
        assert_eq!(brief(&situation.plan()), expected);
    }
}
