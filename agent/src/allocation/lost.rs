//! Completes the record of containers that an earlier agent started and, since it was killed, did not record. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;

use crate::model::resources;
use crate::model::resources::Compute;
use crate::model::resources::PodResources;
use crate::model::spec;

/// The record of what was applied to a pod, with what it lacks and a resize from `before` to `after` changes: a container
/// without a record was started with what was allocated to it until now, or is not started yet. `None` if nothing is lacking.
/// What the resize does not change stays without a record: what the runtime reports of it applies.
pub(super) fn completed(recorded: Option<&PodResources>, before: &Pod, after: &Pod) -> Option<PodResources> {
    let next = of_containers(after);
    let mut lacking = of_containers(before);
    lacking.retain(|name, held| {
        let is_recorded = recorded.is_some_and(|recorded| recorded.containers.contains_key(name));
        !is_recorded && next.get(name).is_some_and(|next| Compute::of(next) != Compute::of(held))
    });
    // A record without resources of the pod says that it was started without them.
    let lacks_pod = recorded.is_none() && !resources::is_same_pod_level(of_pod(before), of_pod(after));
    if lacking.is_empty() && !lacks_pod {
        return None;
    }
    let nothing = || PodResources { containers: BTreeMap::new(), pod: of_pod(before).cloned() };
    let mut completed = recorded.cloned().unwrap_or_else(nothing);
    completed.containers.extend(lacking);
    Some(completed)
}

/// Something of what is `allocated` to the pod is not on record as applied.
pub(super) fn is_unapplied(recorded: &PodResources, allocated: &Pod) -> bool {
    let mut allocated_to = of_containers(allocated).into_iter();
    resources::is_pod_level_behind(allocated, Some(recorded))
        || allocated_to.any(|(name, held)| {
            let applied = recorded.containers.get(&name);
            applied.is_some_and(|applied| Compute::of(applied) != Compute::of(&held))
        })
}

/// What containers are started with, by name.
fn of_containers(pod: &Pod) -> BTreeMap<String, ResourceRequirements> {
    let containers = spec::lasting_containers(pod);
    containers.map(|container| (container.name().to_owned(), resources::effective(pod, container.spec))).collect()
}

fn of_pod(pod: &Pod) -> Option<&ResourceRequirements> {
    pod.spec.as_ref()?.resources.as_ref()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn cpu(cpu: &str) -> Value {
        json!({ "requests": { "cpu": cpu } })
    }

    /// A pod with the containers `a` and `b`.
    fn pod(a: &Value, of_pod: &Value) -> Pod {
        let containers = json!([{ "name": "a", "resources": a }, { "name": "b", "resources": cpu("5") }]);
        serde_json::from_value(json!({ "spec": { "containers": containers, "resources": of_pod } })).expect("a pod")
    }

    fn requirements(value: Value) -> ResourceRequirements {
        serde_json::from_value(value).expect("resources")
    }

    fn record(containers: &[(&str, &str)], of_pod: Option<Value>) -> PodResources {
        let entry = |(name, held): &(&str, &str)| ((*name).to_owned(), requirements(cpu(held)));
        PodResources { containers: containers.iter().map(entry).collect(), pod: of_pod.map(requirements) }
    }

    #[test]
    fn what_a_resize_changes_and_no_record_has_is_what_was_allocated() {
        let (before, after) = (pod(&cpu("1"), &json!(null)), pod(&cpu("2"), &json!(null)));
        assert_eq!(completed(None, &before, &after), Some(record(&[("a", "1")], None)));
        let other = record(&[("b", "4")], None);
        assert_eq!(completed(Some(&other), &before, &after), Some(record(&[("a", "1"), ("b", "4")], None)));
        let known = record(&[("a", "7")], None);
        assert_eq!(completed(Some(&known), &before, &after), None, "a record is right");
        assert_eq!(completed(None, &before, &pod(&cpu("1000m"), &json!(null))), None, "nothing changes");
    }

    #[test]
    fn so_is_what_the_pod_as_a_whole_has() {
        let (small, large) = (pod(&cpu("1"), &cpu("8")), pod(&cpu("1"), &cpu("9")));
        assert_eq!(completed(None, &small, &large), Some(record(&[], Some(cpu("8")))));
        assert_eq!(completed(Some(&record(&[], None)), &small, &large), None, "it was started without");
        let grown = pod(&cpu("2"), &cpu("8"));
        assert_eq!(completed(None, &small, &grown), Some(record(&[("a", "1")], Some(cpu("8")))));
    }

    #[test]
    fn limits_of_the_pod_are_those_of_its_containers() {
        let limit = |cpu: &str| json!({ "limits": { "cpu": cpu } });
        let (before, after) = (pod(&json!({}), &limit("8")), pod(&json!({}), &limit("9")));
        let held = completed(None, &before, &after).expect("both containers");
        assert_eq!(held.containers["a"], requirements(limit("8")));
        assert_eq!((held.containers.len(), held.pod), (2, Some(requirements(limit("8")))));
    }
}
