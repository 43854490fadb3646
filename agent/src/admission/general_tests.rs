//! Reasons, messages and order of the checks of schedulers.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use serde_json::json;

use super::*;
use crate::admission::HeldResources;
use crate::admission::Needs;
use crate::admission::NodeOffer;
use crate::model::Amount;

fn quantities(list: &[(&str, &str)]) -> Quantities {
    let amount = |(name, text): &(&str, &str)| ((*name).to_owned(), text.parse::<Amount>().expect(text));
    Quantities::of_node(&list.iter().map(amount).collect())
}

fn pod(spec: Value) -> Pod {
    let mut spec = spec;
    spec["containers"] = json!([{ "name": "c", "ports": spec["ports"].take() }]);
    serde_json::from_value(json!({ "metadata": {}, "spec": spec })).expect("a pod")
}

fn critical(spec: Value) -> Pod {
    let mut spec = spec;
    spec["priority"] = json!(2_000_000_000);
    pod(spec)
}

/// A node with 2 pods, 1 cpu, 1000 bytes of memory and storage, and a device; another pod holds 1 pod, 600m, 600 bytes and
/// port 80.
fn admission(pod: &Pod, request: &[(&str, &str)]) -> AdmissionResult {
    let node = NodeInfo {
        name: "n".to_owned(),
        labels: [("zone".to_owned(), "a".to_owned())].into(),
        taints: vec![serde_json::from_value(json!({ "key": "k", "effect": "NoExecute" })).expect("a taint")],
        allocatable: quantities(&[
            ("pods", "2"),
            ("cpu", "1"),
            ("memory", "1000"),
            ("ephemeral-storage", "1000"),
            ("example.com/gpu", "1"),
        ]),
    };
    let node = NodeOffer { node: Some(Arc::new(node)), ..NodeOffer::default() };
    let mut other = Needs::new(&self::pod(json!({ "ports": [{ "containerPort": 80, "hostPort": 80 }] })), &[].into());
    other.request = quantities(&[
        ("pods", "1"),
        ("cpu", "600m"),
        ("memory", "600"),
        ("ephemeral-storage", "600"),
        ("example.com/gpu", "1"),
    ]);
    let held: HeldResources = [&other].into_iter().collect();
    let amount = |(name, text): &(&str, &str)| ((*name).to_owned(), text.parse::<Amount>().expect(text));
    let needs = Needs::new(pod, &request.iter().map(amount).collect());
    check(Input { pod, best_effort: false, is_resumed: false, needs: &needs, held: &held, node: &node })
}

fn tolerating(mut spec: Value) -> Pod {
    spec["tolerations"] = json!([{ "operator": "Exists" }]);
    pod(spec)
}

#[test]
fn the_first_missing_resource_is_reported_with_its_numbers() {
    let text = |name: &str, requested: i64, used: i64, capacity: i64| {
        let numbers = format!("requested: {requested}, used: {used}, capacity: {capacity}");
        format!("OutOf{name}: Node didn't have enough resource: {name}, {numbers}")
    };
    for (request, expected) in [
        (vec![("cpu", "400m"), ("memory", "400")], None),
        (vec![("cpu", "401m")], Some(text("cpu", 401, 600, 1000))),
        (vec![("memory", "401"), ("cpu", "1")], Some(text("cpu", 1000, 600, 1000))),
        (vec![("memory", "401")], Some(text("memory", 401, 600, 1000))),
        (vec![("ephemeral-storage", "1k")], Some(text("ephemeral-storage", 1000, 600, 1000))),
        (vec![("example.com/gpu", "1")], Some(text("example.com/gpu", 1, 1, 1))),
        (vec![("hugepages-2Mi", "2Mi")], Some(text("hugepages-2Mi", 2 << 20, 0, 0))),
        (vec![("example.com/of-the-cluster", "5")], None),
        (vec![], None),
    ] {
        let found = match admission(&tolerating(json!({})), &request) {
            AdmissionResult::Reject(Rejection { reason, message }) => Some(format!("{reason}: {message}")),
            AdmissionResult::Admit => None,
            AdmissionResult::Preempt(_) => Some("preempts".to_owned()),
        };
        assert_eq!(found, expected, "{request:?}");
    }
}

#[test]
fn a_pod_without_requests_is_counted() {
    let held = Quantities { pods: 2, milli_cpu: 9000, ..Quantities::default() };
    let node = quantities(&[("pods", "2"), ("cpu", "1")]);
    let nothing = Quantities { pods: 1, ..Quantities::default() };
    let missing = insufficient(&nothing, &held, &node);
    let message = "Node didn't have enough resource: pods, requested: 1, used: 2, capacity: 2";
    assert_eq!(missing.iter().map(|m| m.rejection().message).collect::<Vec<_>>(), [message]);
    assert_eq!(missing[0].missing(), 1);
}

#[test]
fn other_requirements_follow_in_their_order() {
    let affinity = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
    let name = "Predicate NodeName failed: node(s) didn't match the requested node name";
    let ports = "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    let taint = "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
    let taken = json!([{ "containerPort": 80, "hostPort": 80 }]);
    for (spec, reason, message) in [
        (json!({ "nodeSelector": { "zone": "b" }, "nodeName": "m", "ports": taken }), "NodeAffinity", affinity),
        (json!({ "nodeSelector": { "zone": "a" }, "nodeName": "m", "ports": taken }), "NodeName", name),
        (json!({ "nodeName": "n", "ports": taken }), "NodePorts", ports),
        (json!({ "nodeName": "n" }), "TaintToleration", taint),
    ] {
        assert_eq!(admission(&pod(spec.clone()), &[]), AdmissionResult::reject(reason, message), "{spec}");
        // A critical pod preempts nothing if it would be rejected anyway; other pods are rejected for resources first.
        let much = [("cpu", "1")];
        assert_eq!(admission(&critical(spec.clone()), &much), AdmissionResult::reject(reason, message), "{spec}");
        let AdmissionResult::Reject(rejection) = admission(&pod(spec), &much) else { panic!("admitted") };
        assert_eq!(rejection.reason, "OutOfcpu");
    }
    assert_eq!(admission(&tolerating(json!({ "nodeName": "n" })), &[]), AdmissionResult::Admit);
}

#[test]
fn taints_do_not_concern_static_pods() {
    let mut pod = pod(json!({}));
    pod.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
    assert_eq!(admission(&pod, &[]), AdmissionResult::Admit);
}

#[test]
fn a_critical_pod_preempts_for_all_that_is_missing() {
    let mut pod = critical(json!({ "tolerations": [{ "operator": "Exists" }] }));
    let AdmissionResult::Preempt(missing) = admission(&pod, &[("cpu", "700m"), ("memory", "500")]) else {
        panic!("no preemption")
    };
    let missing: Vec<(&str, i64)> = missing.iter().map(|m| (m.resource.as_str(), m.missing())).collect();
    assert_eq!(missing, [("cpu", 300), ("memory", 100)]);
    pod.spec.as_mut().expect("a spec").priority = Some(1_999_999_999);
    assert!(matches!(admission(&pod, &[("cpu", "700m")]), AdmissionResult::Reject(_)));
}
