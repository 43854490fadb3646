//! Resources in container statuses (KEP-1287). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ContainerStatus as ApiStatus;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::model::Amount;
use crate::model::ContainerResources;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::resources::Compute;
use crate::model::resources::MIN_CPU_LIMIT;
use crate::model::resources::MIN_CPU_REQUEST;

/// `containerStatuses[].resources`: the allocated ones, with what the runtime reports for a running instance in place of the
/// values that are allocated. A value that is not reported is kept from the previous status of the same instance. The memory
/// request, which no runtime reports, and all values of a runtime that reports none, are those that were applied.
pub(super) fn container_resources(
    spec: Option<&ResourceRequirements>,
    actuated: Option<&ResourceRequirements>,
    instance: &ContainerStatus,
    container_id: &str,
    old: Option<&ApiStatus>,
) -> ResourceRequirements {
    let mut resources = spec.cloned().unwrap_or_default();
    if instance.state != ContainerState::Running {
        return resources;
    }
    let same_instance = old.filter(|old| {
        let was_running = old.state.as_ref().is_some_and(|state| state.running.is_some());
        was_running && old.container_id.as_deref() == Some(container_id)
    });
    let previous = same_instance.and_then(|old| old.resources.as_ref());
    let applied = actuated.map(Compute::of);
    let reported = reported_or_applied(instance.resources, applied);
    if let Some(limits) = &mut resources.limits {
        let previous = previous.and_then(|resources| resources.limits.as_ref());
        let cpu = reported.cpu_limit.map(Amount::millis);
        set(limits, "cpu", cpu, Amount::millis(MIN_CPU_LIMIT), previous);
        set(limits, "memory", reported.memory_limit.map(Amount::bytes), Amount::default(), previous);
    }
    if let Some(requests) = &mut resources.requests {
        let previous = previous.and_then(|resources| resources.requests.as_ref());
        let cpu = reported.cpu_request.map(Amount::millis);
        set(requests, "cpu", cpu, Amount::millis(MIN_CPU_REQUEST), previous);
        if let Some(applied) = applied {
            set(requests, "memory", Some(Amount::bytes(applied.memory_request)), Amount::default(), None);
        }
    }
    resources
}

fn reported_or_applied(reported: ContainerResources, applied: Option<Compute>) -> ContainerResources {
    match applied.filter(|_| reported == ContainerResources::default()) {
        Some(applied) => ContainerResources {
            cpu_request: Some(applied.cpu_request),
            cpu_limit: Some(applied.cpu_limit),
            memory_limit: Some(applied.memory_limit),
        },
        None => reported,
    }
}

/// The spec's own notation stays where the amounts agree, or where both are too small for the cgroup to distinguish them.
fn set(
    list: &mut BTreeMap<String, Quantity>,
    name: &str,
    reported: Option<Amount>,
    minimum: Amount,
    previous: Option<&BTreeMap<String, Quantity>>,
) {
    let Some(reported) = reported else {
        list.extend(previous.and_then(|list| list.get(name)).map(|quantity| (name.to_owned(), quantity.clone())));
        return;
    };
    let stated = list.get(name).and_then(|quantity| Amount::try_from(quantity).ok()).unwrap_or_default();
    let both_minimal = reported <= minimum && stated <= minimum;
    if reported != stated && !both_minimal {
        list.insert(name.to_owned(), reported.to_quantity());
    }
}
