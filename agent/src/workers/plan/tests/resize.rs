//! Which resources of running containers are changed, in which order, and when a restart is needed.

use k8s_openapi::api::core::v1::ContainerResizePolicy;
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde_json::Value;
use serde_json::json;

use super::*;
use crate::model::KillReason;
use crate::model::ResizeContainer;
use crate::model::ResizePod;
use crate::model::testing::exited;
use crate::model::testing::running;

fn requirements(value: Value) -> ResourceRequirements {
    serde_json::from_value(value).expect("resources")
}

fn memory(limit: &str) -> Value {
    json!({ "limits": { "memory": limit } })
}

/// Running containers with what is in force and what is allocated.
fn situation(containers: &[(&str, Value, Value)]) -> Situation {
    let init: Vec<&str> = containers.iter().map(|(name, ..)| *name).filter(|name| name.starts_with("side")).collect();
    let regular: Vec<&str> =
        containers.iter().map(|(name, ..)| *name).filter(|name| !name.starts_with("side")).collect();
    let mut pod = testing::pod("Always", &init, &regular);
    let mut actuated = PodResources::default();
    for (name, from, to) in containers {
        let container =
            if name.starts_with("side") { init_container(&mut pod, name) } else { regular_container(&mut pod, name) };
        container.resources = Some(requirements(to.clone()));
        actuated.containers.insert((*name).to_owned(), requirements(from.clone()));
    }
    let instances = containers.iter().map(|(name, ..)| running(name, 0)).collect();
    Situation { actuated: Some(actuated), ..Situation::new(pod, instances) }
}

fn names(list: &[ResizeContainer]) -> Vec<&str> {
    list.iter().map(|container| container.name.as_str()).collect()
}

fn planned(situation: &Situation) -> ResizePod {
    situation.plan().resize.expect("a resize")
}

#[test]
fn what_shrinks_comes_first() {
    let plan = planned(&situation(&[
        ("c1", memory("100Mi"), memory("200Mi")),
        ("c2", memory("300Mi"), memory("150Mi")),
        ("c3", memory("300Mi"), memory("300Mi")),
    ]));
    assert_eq!((names(&plan.memory), names(&plan.cpu)), (vec!["c2", "c1"], vec![]));
    assert!(plan.checks_memory && !plan.pod_level);
    let requests = |cpu: &str| json!({ "requests": { "cpu": cpu } });
    let plan = planned(&situation(&[
        ("a", requests("2"), requests("1")),
        ("b", requests("3"), requests("1")),
        ("c", requests("1"), json!({ "requests": { "cpu": "2" }, "limits": { "cpu": "2" } })),
    ]));
    // A first limit is less than none, whatever the request does; the container that is visited last comes first.
    assert_eq!((names(&plan.memory), names(&plan.cpu)), (vec![], vec!["c", "b", "a"]));
    assert!(!plan.checks_memory);
}

#[test]
fn nothing_is_changed_that_is_in_force() {
    let equal = situation(&[("c", json!({ "limits": { "cpu": "1000m" } }), json!({ "limits": { "cpu": "1" } }))]);
    assert_eq!(brief(&equal.plan()), "idle");
    assert!(equal.plan().is_idle());
    let unknown = Situation { actuated: None, ..equal };
    assert!(unknown.plan().is_idle(), "without a record and without a report");
}

#[test]
fn sidecars_come_before_regular_containers_once_they_have_started() {
    let change = || (memory("1Mi"), memory("2Mi"));
    let ((a, b), (c, d), (e, f)) = (change(), change(), change());
    let both = situation(&[("side1", a, b), ("side2", c, d), ("main", e, f)]);
    assert_eq!(names(&planned(&both).memory), ["side2", "side1", "main"]);
    let probed = both.with_pod(|pod| init_container(pod, "side1").startup_probe = Some(Default::default()));
    // Nothing is known of its startup probe.
    assert_eq!(names(&planned(&probed).memory), ["side2", "main"]);
    let started = probed.startup("side1-0", ProbeResult::Success);
    assert_eq!(names(&planned(&started).memory), ["side2", "side1", "main"]);
}

#[test]
fn init_containers_are_resized_unless_their_gate_is_off() {
    let mut pod = testing::pod("Always", &["init"], &["main"]);
    init_container(&mut pod, "init").resources = Some(requirements(memory("2Mi")));
    let mut actuated = PodResources::default();
    actuated.containers.insert("init".to_owned(), requirements(memory("1Mi")));
    let resized = Situation { actuated: Some(actuated), ..Situation::new(pod, vec![running("init", 0)]) };
    assert_eq!(names(&planned(&resized).memory), ["init"]);
    let restarted = resized.clone().with_pod(|pod| {
        let policy =
            ContainerResizePolicy { resource_name: "memory".into(), restart_policy: "RestartContainer".into() };
        init_container(pod, "init").resize_policy = Some(vec![policy]);
    });
    assert_eq!(brief(&restarted.plan()), "kill init-0, start init");
    for situation in [resized, restarted] {
        let off = Situation { resizes_init: false, ..situation };
        assert!(off.plan().is_idle(), "{:?}", off.plan());
    }
}

#[test]
fn a_container_is_restarted_if_its_resize_policy_requires_it() {
    let changed = situation(&[("c", memory("1Mi"), memory("2Mi")), ("d", memory("1Mi"), memory("1Mi"))]);
    let policy = |resource: &str| {
        vec![ContainerResizePolicy { resource_name: resource.into(), restart_policy: "RestartContainer".into() }]
    };
    let restarted = changed.clone().with_pod(|pod| regular_container(pod, "c").resize_policy = Some(policy("memory")));
    let actions = restarted.plan();
    assert_eq!(brief(&actions), "kill c-0, start c");
    assert_eq!(
        (actions.kill[0].reason, actions.kill[0].message.as_str()),
        (KillReason::Resize, "Container c resize requires restart")
    );
    let resize = actions.resize.expect("the pod's cgroup follows");
    assert_eq!(resize, ResizePod { checks_memory: true, ..ResizePod::default() });
    let other = changed.with_pod(|pod| regular_container(pod, "c").resize_policy = Some(policy("cpu")));
    assert_eq!(brief(&other.plan()), "idle");
    assert_eq!(names(&planned(&other).memory), ["c"]);
}

#[test]
fn the_pods_cgroup_follows_a_container_that_starts_with_other_resources() {
    let mut crashed = situation(&[("c", memory("1Mi"), memory("2Mi")), ("d", memory("1Mi"), memory("1Mi"))]);
    crashed.snapshot.containers[0] = exited("c", 0, 1);
    let expected = ResizePod { checks_memory: true, ..ResizePod::default() };
    assert_eq!(planned(&crashed), expected);
    crashed.pod_cgroup = PodCgroup::Current;
    assert_eq!(crashed.plan().resize, None, "it was set already");
    crashed.pod_cgroup = PodCgroup::Behind;
    assert_eq!(planned(&crashed), expected);
    let behind = Situation { pod_cgroup: PodCgroup::Behind, ..situation(&[("c", memory("1Mi"), memory("1Mi"))]) };
    assert_eq!(planned(&behind), ResizePod::default(), "a failed change is tried again");
}

/// A pod may be resized while its sandbox cannot be created, or is gone: its cgroup is there.
#[test]
fn the_pods_cgroup_follows_containers_that_start_with_other_resources_in_a_new_sandbox() {
    let expected = ResizePod { checks_memory: true, ..ResizePod::default() };
    let mut waiting = situation(&[("c", memory("1Mi"), memory("2Mi"))]);
    let mut replaced = waiting.clone();
    waiting.snapshot.containers.clear();
    waiting.snapshot.sandboxes.clear();
    assert_eq!(brief(&waiting.plan()), "kill-pod, sandbox 0, start c");
    assert_eq!(planned(&waiting), expected);
    replaced.snapshot.sandboxes[0].ready = false;
    assert_eq!(brief(&replaced.plan()), "kill-pod, sandbox 1, start c");
    assert_eq!(planned(&replaced), expected, "what runs is killed, not resized");
    let mut unchanged = situation(&[("c", memory("1Mi"), memory("1Mi"))]);
    unchanged.snapshot.sandboxes[0].ready = false;
    assert_eq!(unchanged.plan().resize, None);
}

#[test]
fn pod_level_resources_are_compared() {
    let mut of_pod = situation(&[("c", memory("1Mi"), memory("1Mi"))]);
    of_pod.pod.spec.as_mut().expect("a spec").resources = Some(requirements(json!({ "requests": { "cpu": "2" } })));
    // The pod's memory may shrink although that of no container does.
    let expected = ResizePod { pod_level: true, checks_memory: true, ..ResizePod::default() };
    assert_eq!(planned(&of_pod), expected, "it was started without");
    of_pod.actuated.as_mut().expect("a record").pod = Some(requirements(json!({ "requests": { "cpu": "1" } })));
    assert_eq!(planned(&of_pod), expected);
    of_pod.actuated = None;
    assert!(of_pod.plan().is_idle(), "what was applied is not known");
}
