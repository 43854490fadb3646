use serde_json::Value;
use serde_json::json;

use super::*;
use crate::model::testing;

fn requirements(value: Value) -> ResourceRequirements {
    serde_json::from_value(value).expect("resources")
}

fn pod(containers: Value, resources: Value) -> Pod {
    serde_json::from_value(json!({ "spec": { "containers": containers, "resources": resources } })).expect("a pod")
}

#[test]
fn extended_resources_have_a_domain() {
    for (name, extended) in [
        ("cpu", false),
        ("hugepages-2Mi", false),
        ("kubernetes.io/x", false),
        ("batch.kubernetes.io/x", false),
        ("requests.example.com/gpu", false),
        ("example.com/gpu", true),
    ] {
        assert_eq!(is_extended(name), extended, "{name}");
    }
}

#[test]
fn notation_makes_no_difference() {
    let one = requirements(json!({ "requests": { "cpu": "1000m" }, "limits": {} }));
    assert!(are_same(&one, &requirements(json!({ "requests": { "cpu": "1" } }))));
    assert!(!are_same(&one, &requirements(json!({ "requests": { "cpu": "1001m" } }))));
    assert!(!are_same(&one, &requirements(json!({ "limits": { "cpu": "1" } }))));
    assert!(is_same_pod_level(None, None) && !is_same_pod_level(None, Some(&ResourceRequirements::default())));
}

#[test]
fn a_record_replaces_what_the_spec_states() {
    let stated = || json!([{ "name": "a", "resources": { "requests": { "cpu": "2" } } }, { "name": "b" }]);
    let desired = pod(stated(), json!({ "requests": { "cpu": "4" } }));
    let a = requirements(json!({ "requests": { "cpu": "1" } }));
    let record = PodResources { containers: [("a".to_owned(), a.clone())].into(), pod: None };
    let spec = |pod_level| record.put_into(&desired, pod_level).expect("changed").spec.expect("a spec");
    assert_eq!((spec(true).containers[0].resources.clone(), spec(true).resources), (Some(a), None));
    assert_eq!(spec(false).resources, desired.spec.as_ref().expect("a spec").resources, "without the gate");
    assert_eq!(PodResources::of(&desired).put_into(&desired, true), None);
    let gone = PodResources { containers: [("gone".to_owned(), ResourceRequirements::default())].into(), pod: None };
    assert_eq!(gone.put_into(&pod(stated(), json!(null)), true), None, "containers without an entry keep theirs");
}

#[test]
fn limits_fall_back_to_those_of_the_pod() {
    let container = json!([{ "name": "a", "resources": { "limits": { "cpu": "0", "memory": "1Gi" } } }]);
    let pod = pod(container, json!({ "limits": { "cpu": "2", "memory": "4Gi", "hugepages-2Mi": "2Mi" } }));
    let limits = effective(&pod, &spec::regular_containers(&pod)[0]).limits.expect("limits");
    assert_eq!(limits.iter().map(|(name, q)| format!("{name}={}", q.0)).collect::<Vec<_>>(), ["cpu=2", "memory=1Gi"]);
}

#[test]
fn without_a_record_the_runtime_tells_what_is_in_force() {
    let allocated = Compute { cpu_request: 1, cpu_limit: 5, memory_request: 64, memory_limit: 128 };
    let none = ContainerResources::default();
    let reported = |cpu_request, cpu_limit, memory_limit| ContainerResources { cpu_request, cpu_limit, memory_limit };
    assert_eq!(in_force(None, allocated, none), allocated);
    assert_eq!(in_force(None, allocated, reported(Some(2), Some(10), Some(128))), allocated, "too small to differ");
    let other = in_force(None, allocated, reported(Some(100), Some(200), Some(256)));
    assert_eq!(other, Compute { cpu_request: 100, cpu_limit: 200, memory_request: 64, memory_limit: 256 });
    let unlimited = in_force(None, Compute { cpu_request: 0, ..allocated }, reported(Some(2), None, None));
    assert_eq!(unlimited, Compute { cpu_request: 0, cpu_limit: 0, memory_request: 64, memory_limit: 0 });
    let recorded = requirements(json!({ "requests": { "cpu": "3m" } }));
    let expected = Compute { cpu_request: 3, ..Compute::default() };
    assert_eq!(in_force(Some(&recorded), allocated, reported(Some(9), None, None)), expected);
}

#[test]
fn only_running_regular_containers_and_sidecars_are_resizing() {
    let mut pod = testing::pod("Always", &["init", "side"], &["main"]);
    let spec = pod.spec.as_mut().expect("a spec");
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        container.resources = Some(requirements(json!({ "requests": { "cpu": "1" } })));
    }
    let zero = |name: &str| (name.to_owned(), ResourceRequirements::default());
    let actuated = PodResources { containers: ["init", "side", "main"].map(zero).into(), pod: None };
    let resizing = |containers| is_resizing(&pod, &testing::snapshot(containers), Some(&actuated));
    assert!(resizing(vec![testing::running("main", 0)]));
    assert!(resizing(vec![testing::running("side", 0)]));
    assert!(!resizing(vec![testing::running("init", 0)]));
    assert!(!resizing(vec![testing::exited("main", 0, 1)]));
    let no_record = is_resizing(&pod, &testing::snapshot(vec![testing::running("main", 0)]), None);
    assert!(!no_record, "nothing says otherwise");
}

#[test]
fn what_was_applied_to_containers_that_do_not_run_is_not_in_force() {
    let pod = testing::pod("Always", &["init", "side"], &["main", "other"]);
    let record = |name: &str| (name.to_owned(), ResourceRequirements::default());
    let applied = ["init", "side", "main", "other", "gone"].map(record).into();
    let mut actuated = PodResources { containers: applied, pod: Some(ResourceRequirements::default()) };
    let states = vec![
        testing::running("init", 0),
        testing::running("side", 0),
        testing::exited("main", 1, 1),
        testing::running("main", 0),
        testing::status("other", 0, ContainerState::Created),
        testing::running("gone", 0),
    ];
    actuated.retain_running(&pod, &testing::snapshot(states));
    assert_eq!(actuated.containers.keys().collect::<Vec<_>>(), ["side"]);
    assert!(actuated.pod.is_some(), "the pod's cgroup stays");
}

#[test]
fn pod_level_resources_are_compared_if_there_is_a_record() {
    let resources = |cpu: &str| json!({ "requests": { "cpu": cpu } });
    let pod = pod(json!([]), resources("2"));
    let resizing = |of_pod: Option<Value>| {
        let actuated = PodResources { pod: of_pod.map(requirements), ..PodResources::default() };
        is_resizing(&pod, &testing::snapshot(vec![]), Some(&actuated))
    };
    assert_eq!(
        [resizing(Some(resources("1"))), resizing(Some(resources("2000m"))), resizing(None)],
        [true, false, true]
    );
    assert!(!is_resizing(&pod, &testing::snapshot(vec![]), None), "what was applied is not known");
}

#[test]
fn restart_policies_are_per_resource() {
    let policies = json!([{ "resourceName": "memory", "restartPolicy": "RestartContainer" },
        { "resourceName": "cpu", "restartPolicy": "NotRequired" }]);
    let container: Container =
        serde_json::from_value(json!({ "name": "a", "resizePolicy": policies })).expect("a container");
    assert!(needs_restart(&container, Resizable::Memory) && !needs_restart(&container, Resizable::Cpu));
    assert!(!needs_restart(&Container::default(), Resizable::Memory));
}
