//! Requests and limits that follow from the others (containers, and the pod as a whole: KEP-2837).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::model::Amount;

type ResourceList = BTreeMap<String, Quantity>;

/// A container that has a limit but no request for a resource requests the limit.
pub(super) fn requests_from_limits(spec: &mut PodSpec) {
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        let Some(resources) = &mut container.resources else { continue };
        let Some(limits) = resources.limits.clone() else { continue };
        let requests = resources.requests.get_or_insert_default();
        for (name, limit) in limits {
            requests.entry(name).or_insert(limit);
        }
    }
}

/// Pod-level resources, where the manifest sets some: huge page limits from the containers' limits, requests from
/// the containers' requests, else from the pod's limits.
pub(super) fn pod_level(spec: &mut PodSpec) {
    let is_filled = |list: &Option<ResourceList>| list.as_ref().is_some_and(|list| !list.is_empty());
    if !spec.resources.as_ref().is_some_and(|own| is_filled(&own.limits) || is_filled(&own.requests)) {
        return;
    }
    let container_limits = aggregate(spec, |c| c.resources.as_ref()?.limits.as_ref());
    let container_requests = aggregate(spec, |c| c.resources.as_ref()?.requests.as_ref());
    let Some(resources) = &mut spec.resources else { return };

    let set_by_pod = |name: &String, list: &Option<ResourceList>| list.as_ref().is_some_and(|l| l.contains_key(name));
    for (name, limit) in container_limits.into_iter().filter(|(name, _)| name.starts_with("hugepages-")) {
        if !set_by_pod(&name, &resources.limits) && !set_by_pod(&name, &resources.requests) {
            resources.limits.get_or_insert_default().insert(name, written(limit));
        }
    }
    let Some(limits) = resources.limits.clone().filter(|limits| !limits.is_empty()) else { return };
    let requests = resources.requests.get_or_insert_default();
    for (name, request) in container_requests.into_iter().filter(|(name, _)| name == "cpu" || name == "memory") {
        requests.entry(name).or_insert(written(request));
    }
    for (name, limit) in limits {
        if name == "cpu" || name == "memory" || name.starts_with("hugepages-") {
            requests.entry(name).or_insert(limit);
        }
    }
}

/// Every amount of the containers, the pod and its overhead, rounded up to thousandths.
pub(super) fn round_up(spec: &mut PodSpec) {
    let containers = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
    let all = containers.filter_map(|container| container.resources.as_mut()).chain(spec.resources.as_mut());
    let lists = all.flat_map(|resources| [&mut resources.limits, &mut resources.requests]).chain([&mut spec.overhead]);
    for quantity in lists.flatten().flat_map(BTreeMap::values_mut) {
        let Ok(amount) = Amount::try_from(&*quantity) else { continue };
        let rounded = amount.rounded_to_millis();
        if rounded != amount {
            *quantity = written(rounded);
        }
    }
}

fn written(amount: Amount) -> Quantity {
    Quantity(amount.to_string())
}

/// What the containers need at the same time: the regular ones and sidecars together, or an init container with the
/// sidecars started before it, whichever is more. Amounts that do not parse count as nothing; validation finds them.
fn aggregate(spec: &PodSpec, list: impl Fn(&Container) -> Option<&ResourceList>) -> BTreeMap<String, Amount> {
    let mut running: BTreeMap<String, Amount> = BTreeMap::new();
    for container in &spec.containers {
        add(&mut running, list(container));
    }
    let mut sidecars = BTreeMap::new();
    let mut peak: BTreeMap<String, Amount> = BTreeMap::new();
    for container in spec.init_containers.iter().flatten() {
        let mut now = sidecars.clone();
        add(&mut now, list(container));
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars = now.clone();
            add(&mut running, list(container));
        }
        at_least(&mut peak, now);
    }
    at_least(&mut running, peak);
    running
}

fn add(sum: &mut BTreeMap<String, Amount>, list: Option<&ResourceList>) {
    for (name, quantity) in list.into_iter().flatten() {
        let amount: Amount = quantity.0.parse().unwrap_or_default();
        let entry = sum.entry(name.clone()).or_default();
        *entry += amount;
    }
}

fn at_least(sum: &mut BTreeMap<String, Amount>, floor: BTreeMap<String, Amount>) {
    for (name, amount) in floor {
        let entry = sum.entry(name).or_default();
        *entry = (*entry).max(amount);
    }
}
