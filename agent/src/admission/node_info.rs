//! The node as schedulers see it: name, labels, taints, allocatable resources. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Taint;

use super::needs::Quantities;
use crate::model::Amount;

/// The node as schedulers see it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its taints.
    pub taints: Vec<Taint>,
    /// What pods may hold of it in all.
    pub allocatable: Quantities,
}

impl NodeInfo {
    /// From a Node object, for a machine with these allocatable amounts. Resources with a domain are those of the object,
    /// also of `kubernetes.io`: the agent does not measure them, but a controller may add them (`kubernetes.io/batch-cpu`).
    pub fn new(node: &Node, machine: &BTreeMap<String, Amount>) -> Self {
        let status = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let others = status.into_iter().flatten().filter(|(name, _)| name.contains('/'));
        let others = others.filter_map(|(name, text)| Some((name.clone(), Amount::try_from(text).ok()?)));
        let mut allocatable: BTreeMap<String, Amount> = others.collect();
        allocatable.extend(machine.iter().map(|(name, amount)| (name.clone(), *amount)));
        Self {
            name: node.metadata.name.clone().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
            allocatable: Quantities::of_node(&allocatable),
        }
    }

    /// The same with name, labels and taints of a newer Node object.
    #[must_use]
    pub fn with_object(&self, node: &Node) -> Self {
        Self { allocatable: self.allocatable.clone(), ..Self::new(node, &BTreeMap::new()) }
    }

    /// A node without name, labels and taints on which any pods fit.
    pub fn unlimited() -> Self {
        Self { allocatable: Quantities::unlimited(), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_machine_has_its_own_resources_and_the_object_the_others() {
        let node: Node = serde_json::from_value(json!({
            "metadata": { "name": "n", "labels": { "zone": "a" } },
            "spec": { "taints": [{ "key": "k", "effect": "NoExecute" }] },
            "status": { "allocatable": { "cpu": "64", "pods": "9", "example.com/gpu": "2", "example.com/bad": "much" } },
        }))
        .expect("a Node");
        let machine = BTreeMap::from([("cpu".to_owned(), Amount::units(4)), ("pods".to_owned(), Amount::units(110))]);
        let info = NodeInfo::new(&node, &machine);
        assert_eq!((info.name.as_str(), info.labels["zone"].as_str(), info.taints.len()), ("n", "a", 1));
        assert_eq!((info.allocatable.milli_cpu, info.allocatable.pods), (4000, 110));
        assert_eq!(info.allocatable.scalar, BTreeMap::from([("example.com/gpu".to_owned(), 2)]));
        let mut newer = node;
        newer.metadata.labels = None;
        let info = info.with_object(&newer);
        assert_eq!((info.labels.len(), info.allocatable.milli_cpu), (0, 4000));
    }

    #[test]
    fn resources_of_kubernetes_own_domain_are_those_of_the_object() {
        let allocatable = json!({ "kubernetes.io/batch-cpu": "20k", "hugepages-2Mi": "4Mi" });
        let node = json!({ "metadata": {}, "status": { "allocatable": allocatable } });
        let node: Node = serde_json::from_value(node).expect("a Node");
        let info = NodeInfo::new(&node, &BTreeMap::new());
        assert_eq!(info.allocatable.scalar, BTreeMap::from([("kubernetes.io/batch-cpu".to_owned(), 20_000)]));
    }
}
