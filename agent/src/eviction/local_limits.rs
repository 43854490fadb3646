//! Limits on the files of pods: `emptyDir.sizeLimit`, and limits of `ephemeral-storage` on containers. Pure.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::ranking::signed;
use super::readings::DiskLayout;
use crate::model::Amount;
use crate::model::Pod;
use crate::model::qos::ResourceKind;
use crate::model::qos::pod_total;
use crate::model::spec;
use crate::stats::FsUsage;
use crate::stats::PodUsage;

const EPHEMERAL_STORAGE: &str = "ephemeral-storage";

/// A limit that a pod exceeds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Excess {
    /// The label of the metric.
    pub limit: &'static str,
    /// For status and event.
    pub message: String,
}

/// What has to be measured to check the limits of a pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Needs {
    /// The volumes.
    pub volumes: bool,
    /// Writable layers and logs.
    pub containers: bool,
}

impl Needs {
    /// What the limits of this pod need.
    pub fn of(pod: &Pod) -> Self {
        let containers = pod_limit(pod).is_some();
        Self { volumes: containers || limited_volumes(pod).next().is_some(), containers }
    }

    /// Something has to be measured.
    pub fn is_any(self) -> bool {
        self.volumes || self.containers
    }
}

/// The first limit that the pod exceeds.
pub(super) fn excess(pod: &Pod, usage: &PodUsage, layout: DiskLayout) -> Option<Excess> {
    of_volumes(pod, usage).or_else(|| of_pod(pod, usage)).or_else(|| of_containers(pod, usage, layout))
}

/// Names and limits of volumes on disk. One in memory or huge pages is a file system of that size: the kernel refuses what
/// does not fit.
fn limited_volumes(pod: &Pod) -> impl Iterator<Item = (&str, Amount)> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter_map(|volume| {
        let source = volume.empty_dir.as_ref()?;
        let limit = source.size_limit.as_ref().filter(|_| source.medium.as_deref().is_none_or(str::is_empty))?;
        Some((volume.name.as_str(), Amount::try_from(limit).ok().filter(|limit| limit.is_positive())?))
    })
}

/// Names and limits of regular containers and sidecars.
fn limited_containers(pod: &Pod) -> impl Iterator<Item = (&str, Amount)> {
    let sidecars = spec::init_containers(pod).iter().filter(|container| spec::is_sidecar(container));
    spec::regular_containers(pod).iter().chain(sidecars).filter_map(|container| {
        let limits = container.resources.as_ref()?.limits.as_ref()?;
        let limit: &Quantity = limits.get(EPHEMERAL_STORAGE)?;
        Some((container.name.as_str(), Amount::try_from(limit).ok().filter(|limit| limit.is_positive())?))
    })
}

/// The sum of the containers' limits, if one of them has any.
fn pod_limit(pod: &Pod) -> Option<Amount> {
    pod_total(pod, ResourceKind::Limits, true).ok()?.get(EPHEMERAL_STORAGE).copied()
}

fn of_volumes(pod: &Pod, usage: &PodUsage) -> Option<Excess> {
    let is_above = |(name, limit): &(&str, Amount)| usage.volumes.get(*name).is_some_and(|used| bytes(*used) > *limit);
    limited_volumes(pod).find(is_above).map(|(name, limit)| Excess {
        limit: "emptydirfs.limit",
        message: format!("Usage of EmptyDir volume {name:?} exceeds the limit \"{limit}\". "),
    })
}

fn of_pod(pod: &Pod, usage: &PodUsage) -> Option<Excess> {
    let limit = pod_limit(pod)?;
    let of_containers = usage.containers.values().flat_map(|container| [container.rootfs, container.logs]).flatten();
    let used = of_containers.chain(usage.volumes.values().copied()).fold(usage.other, |sum, used| sum + used);
    (bytes(used) > limit).then(|| Excess {
        limit: "ephemeralpodfs.limit",
        message: format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. "),
    })
}

fn of_containers(pod: &Pod, usage: &PodUsage, layout: DiskLayout) -> Option<Excess> {
    let is_above = |(name, limit): &(&str, Amount)| {
        usage.containers.get(*name).is_some_and(|container| {
            // As upstream, also not where writable layers are on the node's file system and only images are elsewhere.
            let rootfs = container.rootfs.filter(|_| layout == DiskLayout::Shared).unwrap_or_default();
            bytes(rootfs + container.logs.unwrap_or_default()) > *limit
        })
    };
    limited_containers(pod).find(is_above).map(|(name, limit)| Excess {
        limit: "ephemeralcontainerfs.limit",
        message: format!("Container {name} exceeded its local ephemeral storage limit \"{limit}\". "),
    })
}

fn bytes(used: FsUsage) -> Amount {
    Amount::bytes(signed(used.bytes))
}
