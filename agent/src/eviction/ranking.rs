//! The order in which pods are evicted for a signal. Pure.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::readings::DiskLayout;
use super::readings::Resource;
use crate::config::eviction::Signal;
use crate::model::Amount;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::qos::ResourceKind;
use crate::model::qos::pod_total;
use crate::stats::FsUsage;
use crate::stats::PodUsage;

/// Which files of a pod count for a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scope {
    rootfs: bool,
    /// Logs and local volumes.
    others: bool,
}

/// How far a pod's usage makes it a candidate: pods without statistics first, then those above their requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Class {
    Unmeasured,
    AboveRequest,
    WithinRequest,
}

/// The pods, the one to be evicted first in front: pods above their requests (not for process ids), then lower priority, then
/// larger usage above the request.
pub(super) fn order(signal: Signal, layout: DiskLayout, pods: Vec<Pod>, usage: &HashMap<PodUid, PodUsage>) -> Vec<Pod> {
    let mut ranked: Vec<_> = pods.into_iter().map(|pod| (key(signal, layout, &pod, usage), pod)).collect();
    ranked.sort_by(|(left, _), (right, _)| left.cmp(right));
    ranked.into_iter().map(|(_, pod)| pod).collect()
}

/// Pods are ordered by class, priority, usage above the request, and then by name, so that the order is always the same.
type Key = (Class, i32, Option<Reverse<Amount>>, String);

fn key(signal: Signal, layout: DiskLayout, pod: &Pod, usage: &HashMap<PodUid, PodUsage>) -> Key {
    let name = pod_ref(pod);
    let usage = usage.get(&name.uid);
    let (class, above) = match Resource::of(signal) {
        Resource::Pids => {
            let processes = usage.map(|usage| usage.processes.unwrap_or(0));
            (Class::WithinRequest, processes.map(|count| Amount::units(signed(count))))
        }
        Resource::Memory => {
            // Only a pod without any statistics is Unmeasured.
            let used = usage.map(|usage| Amount::bytes(signed(usage.memory.unwrap_or(0))));
            let requested = request(pod, "memory");
            (class(used, requested), used.map(|used| used - requested))
        }
        resource => {
            let used = usage.map(|usage| disk_usage(usage, scope(signal, layout)));
            let requested = request(pod, "ephemeral-storage");
            let (used, own_request) = match resource {
                Resource::Inodes => (used.map(|used| Amount::units(signed(used.inodes))), Amount::ZERO),
                _ => (used.map(|used| Amount::bytes(signed(used.bytes))), requested),
            };
            // As upstream, the request for bytes is subtracted from inodes too.
            (class(used, own_request), used.map(|used| used - requested))
        }
    };
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    (class, priority, above.map(Reverse), format!("{}/{}", name.namespace, name.name))
}

fn class(used: Option<Amount>, requested: Amount) -> Class {
    match used {
        None => Class::Unmeasured,
        Some(used) if used > requested => Class::AboveRequest,
        Some(_) => Class::WithinRequest,
    }
}

fn scope(signal: Signal, layout: DiskLayout) -> Scope {
    let of_node = matches!(signal, Signal::NodeFsAvailable | Signal::NodeFsInodesFree);
    let of_images = matches!(signal, Signal::ImageFsAvailable | Signal::ImageFsInodesFree);
    match layout {
        DiskLayout::Shared => Scope { rootfs: true, others: true },
        DiskLayout::Dedicated => Scope { rootfs: !of_node, others: of_node },
        DiskLayout::Split => Scope { rootfs: !of_images, others: !of_images },
    }
}

fn disk_usage(usage: &PodUsage, scope: Scope) -> FsUsage {
    let nothing = FsUsage::default();
    let of_containers = usage.containers.values().fold(nothing, |sum, container| {
        let rootfs = container.rootfs.filter(|_| scope.rootfs).unwrap_or_default();
        sum + rootfs + container.logs.filter(|_| scope.others).unwrap_or_default()
    });
    usage.volumes.values().filter(|_| scope.others).fold(of_containers, |sum, volume| sum + *volume)
}

/// What the whole pod requests. As upstream: its overhead counts only if it requests any of the resource itself. A quantity
/// that cannot be read counts as none.
pub(super) fn request(pod: &Pod, resource: &str) -> Amount {
    let total = |with_overhead| pod_total(pod, ResourceKind::Requests, with_overhead).ok()?.remove(resource);
    let is_requested = total(false).is_some_and(|own| !own.is_zero());
    total(true).filter(|_| is_requested).unwrap_or_default()
}

/// Bytes or a count as the API has them.
pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
