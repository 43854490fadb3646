//! Corrects an existing Node at registration. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::NodeStatus;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::initial;
use crate::model::Amount;
use crate::model::resources::is_extended;

/// Labels of an existing Node that are corrected, if the initial one has them.
const CORRECTED: [&str; 11] = [
    initial::HOSTNAME,
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    initial::OS[0],
    initial::OS[1],
    initial::ARCH[0],
    initial::ARCH[1],
];

/// `existing`, corrected to `initial`. `reset_extended`: the machine was set up anew, so extended resources are set to zero
/// until they are offered again.
pub(super) fn reconciled(existing: &Node, initial: &Node, reset_extended: bool) -> Node {
    let mut node = existing.clone();
    correct_annotation(&mut node, initial);
    correct_labels(&mut node, initial);
    let empty = NodeStatus::default();
    let wanted = initial.status.as_ref().unwrap_or(&empty);
    let status = node.status.get_or_insert_default();
    for (map, wanted) in [(&mut status.capacity, &wanted.capacity), (&mut status.allocatable, &wanted.allocatable)] {
        if map.as_ref().is_none_or(BTreeMap::is_empty) {
            map.clone_from(wanted);
        }
    }
    if reset_extended {
        reset(status);
    }
    correct_hugepages(status, wanted);
    node
}

fn correct_annotation(node: &mut Node, initial: &Node) {
    let wanted = initial.metadata.annotations.as_ref().and_then(|all| all.get(initial::ATTACH_DETACH));
    match wanted {
        Some(value) => {
            let annotations = node.metadata.annotations.get_or_insert_default();
            annotations.insert(initial::ATTACH_DETACH.to_owned(), value.clone());
        }
        None => {
            node.metadata.annotations.as_mut().and_then(|all| all.remove(initial::ATTACH_DETACH));
        }
    }
}

fn correct_labels(node: &mut Node, initial: &Node) {
    let labels = node.metadata.labels.get_or_insert_default();
    for key in CORRECTED {
        match initial.metadata.labels.as_ref().and_then(|wanted| wanted.get(key)) {
            None => {}
            Some(value) if value.is_empty() => {
                labels.remove(key);
            }
            Some(value) => {
                labels.insert(key.to_owned(), value.clone());
            }
        }
    }
}

/// Sets extended resources to zero.
fn reset(status: &mut NodeStatus) {
    let names: Vec<String> = status.capacity.iter().flatten().map(|(name, _)| name.clone()).collect();
    for name in names.into_iter().filter(|name| is_extended(name)) {
        for map in [&mut status.capacity, &mut status.allocatable] {
            map.get_or_insert_default().insert(name.clone(), Quantity("0".to_owned()));
        }
    }
}

fn correct_hugepages(status: &mut NodeStatus, wanted: &NodeStatus) {
    let is_huge = |name: &str| name.starts_with("hugepages-");
    let supported = wanted.capacity.clone().unwrap_or_default();
    for (map, wanted) in [(&mut status.capacity, &wanted.capacity), (&mut status.allocatable, &wanted.allocatable)] {
        let Some(map) = map else { continue };
        map.retain(|name, _| !is_huge(name) || supported.contains_key(name));
        for (name, amount) in wanted.iter().flatten().filter(|(name, _)| is_huge(name)) {
            let same = map.get(name).is_some_and(|known| Amount::try_from(known).ok() == Amount::try_from(amount).ok());
            if !same {
                map.insert(name.clone(), amount.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(value: serde_json::Value) -> Node {
        serde_json::from_value(value).expect("a node")
    }

    #[test]
    fn only_fields_of_the_kubelet_are_corrected() {
        let existing = node(json!({
            "metadata": {
                "name": "n",
                "labels": { "kubernetes.io/os": "plan9", "mine": "kept", "topology.kubernetes.io/zone": "a" },
                "annotations": { "other": "kept" },
            },
            "spec": { "taints": [{ "key": "kept", "effect": "NoSchedule" }] },
            "status": {
                "capacity": { "cpu": "7", "hugepages-1Gi": "1Gi", "hugepages-2Mi": "4Mi", "example.com/gpu": "2" },
                "allocatable": { "cpu": "6", "hugepages-1Gi": "1Gi", "example.com/gpu": "2" },
            },
        }));
        let initial = node(json!({
            "metadata": {
                "name": "n",
                "labels": { "kubernetes.io/os": "linux", "kubernetes.io/hostname": "n", "new": "not added", "topology.kubernetes.io/zone": "" },
                "annotations": { "volumes.kubernetes.io/controller-managed-attach-detach": "true" },
            },
            "spec": { "taints": [{ "key": "not-added", "effect": "NoSchedule" }] },
            "status": {
                "capacity": { "cpu": "4", "hugepages-2Mi": "8Mi" },
                "allocatable": { "cpu": "4", "hugepages-2Mi": "8Mi" },
            },
        }));
        let expected = node(json!({
            "metadata": {
                "name": "n",
                "labels": { "kubernetes.io/os": "linux", "kubernetes.io/hostname": "n", "mine": "kept" },
                "annotations": { "other": "kept", "volumes.kubernetes.io/controller-managed-attach-detach": "true" },
            },
            "spec": { "taints": [{ "key": "kept", "effect": "NoSchedule" }] },
            "status": {
                "capacity": { "cpu": "7", "hugepages-2Mi": "8Mi", "example.com/gpu": "2" },
                "allocatable": { "cpu": "6", "hugepages-2Mi": "8Mi", "example.com/gpu": "2" },
            },
        }));
        assert_eq!(reconciled(&existing, &initial, false), expected);
        let reset = reconciled(&existing, &initial, true).status.expect("a status");
        assert_eq!(reset.capacity.expect("capacity")["example.com/gpu"].0, "0");
        assert_eq!(reset.allocatable.expect("allocatable")["example.com/gpu"].0, "0");
    }

    #[test]
    fn missing_maps_are_filled_whole() {
        let initial =
            node(json!({ "metadata": {}, "status": { "capacity": { "cpu": "4" }, "allocatable": { "cpu": "3" } } }));
        let status = reconciled(&Node::default(), &initial, true).status.expect("a status");
        assert_eq!(Some(&status), initial.status.as_ref());
    }

    #[test]
    fn an_unwanted_annotation_goes() {
        let existing = node(json!({
            "metadata": { "annotations": { "volumes.kubernetes.io/controller-managed-attach-detach": "true", "b": "c" } },
        }));
        let annotations = reconciled(&existing, &Node::default(), false).metadata.annotations.expect("annotations");
        assert_eq!(annotations.into_keys().collect::<Vec<_>>(), ["b"]);
    }
}
