//! Texts of an evicted pod's status and event. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;

use super::ranking::signed;
use super::readings::Readings;
use super::readings::Resource;
use super::readings::limit;
use crate::config::eviction::Threshold;
use crate::model::Amount;
use crate::model::Pod;
use crate::model::pod_ref;
use crate::model::spec;
use crate::stats::ContainerUsage;
use crate::stats::PodUsage;

/// Reason of the status and of the event of an evicted pod.
pub(super) const REASON: &str = "Evicted";

/// Message and annotations of the event.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Notice {
    /// The message, of the status too.
    pub message: String,
    /// Annotations of the event.
    pub annotations: BTreeMap<String, String>,
}

/// The notice for a pod that is evicted because the node is low on `resource`; `met`: all thresholds to act on.
pub(super) fn notice(
    resource: Resource,
    pod: &Pod,
    usage: Option<&PodUsage>,
    met: &[Threshold],
    readings: &Readings,
) -> Notice {
    because(resource, pod, usage, &quantities(resource, met, readings))
}

/// The notice for a pod that is evicted because the node is low on `resource`, with the reason of this agent.
pub(super) fn because(resource: Resource, pod: &Pod, usage: Option<&PodUsage>, why: &str) -> Notice {
    let mut message = format!("The node was low on resource: {}. {why}", resource.as_str());
    let Some(usage) = usage else { return Notice { message, annotations: BTreeMap::new() } };
    let mut annotations = BTreeMap::new();
    if let Some((used, requested)) = of_whole_pod(resource, pod, usage) {
        let name = pod_ref(pod).name;
        message.push_str(&consumption("Pod", &name, used, requested, resource));
        annotations.insert("offending_pod".to_owned(), name.to_string());
        annotations.insert("offending_pod_usage".to_owned(), used.to_string());
    }
    let (mut names, mut amounts) = (Vec::new(), Vec::new());
    for (container, used, requested) in above_requests(resource, pod, usage) {
        message.push_str(&consumption("Container", &container.name, used, requested, resource));
        names.push(container.name.clone());
        amounts.push(used.to_string());
    }
    annotations.insert("offending_containers".to_owned(), names.join(","));
    annotations.insert("offending_containers_usage".to_owned(), amounts.join(","));
    annotations.insert("starved_resource".to_owned(), resource.as_str().to_owned());
    Notice { message, annotations }
}

/// Threshold and reading of the first met threshold on the resource.
fn quantities(resource: Resource, met: &[Threshold], readings: &Readings) -> String {
    let threshold = met.iter().find(|threshold| Resource::of(threshold.signal) == resource);
    let reading = threshold.and_then(|threshold| Some((threshold, readings.signals.get(&threshold.signal)?)));
    reading.map_or_else(String::new, |(threshold, reading)| {
        let (limit, available) = (limit(threshold, reading, false), resource.amount(reading.available));
        format!("Threshold quantity: {limit}, available: {available}. ")
    })
}

fn consumption(kind: &str, name: &str, used: Amount, requested: Amount, resource: Resource) -> String {
    let resource = resource.as_str();
    format!("{kind} {name} was using {used}, request is {requested}, has larger consumption of {resource}. ")
}

/// Usage and request of the pod, if it has a memory request of its own (KEP-2837).
fn of_whole_pod(resource: Resource, pod: &Pod, usage: &PodUsage) -> Option<(Amount, Amount)> {
    let requests = pod.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?;
    let requested = Amount::try_from(requests.get("memory").filter(|_| resource == Resource::Memory)?).ok()?;
    Some((Amount::bytes(signed(usage.memory?)), requested))
}

/// Containers that use more than they request, init containers first.
fn above_requests<'a>(
    resource: Resource,
    pod: &'a Pod,
    usage: &'a PodUsage,
) -> impl Iterator<Item = (&'a Container, Amount, Amount)> {
    let measured = move |usage: &ContainerUsage| match resource {
        Resource::Memory => usage.memory,
        Resource::EphemeralStorage => Some(usage.rootfs?.bytes.saturating_add(usage.logs?.bytes)),
        Resource::Inodes | Resource::Pids => None,
    };
    spec::lasting_containers(pod).filter_map(move |container| {
        let used = Amount::bytes(signed(measured(usage.containers.get(container.name())?)?));
        let requests = container.spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        let requested = requests.and_then(|all| Amount::try_from(all.get(resource.as_str())?).ok()).unwrap_or_default();
        (used > requested).then_some((container.spec, used, requested))
    })
}
