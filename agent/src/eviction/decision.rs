//! Which pod is evicted, and what is reclaimed from the node before. Pure.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Container;

use super::message::Notice;
use super::message::notice;
use super::ranking;
use super::readings::DiskLayout;
use super::readings::Readings;
use super::readings::Resource;
use crate::config::eviction::Signal;
use crate::config::eviction::Threshold;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::stats::PodUsage;

/// Seconds that a pod gets to end where its own grace period does not count.
pub(super) const IMMEDIATE: i64 = 1;

/// What can be removed from a node without ending a pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reclaim {
    /// Dead containers of pods that have terminated.
    pub containers: bool,
    /// Images that no container uses.
    pub images: bool,
}

impl Reclaim {
    /// What is removed for a signal.
    pub fn of(signal: Signal, layout: DiskLayout) -> Self {
        let nothing = Self::default();
        let of_node = matches!(signal, Signal::NodeFsAvailable | Signal::NodeFsInodesFree);
        let of_images = matches!(signal, Signal::ImageFsAvailable | Signal::ImageFsInodesFree);
        match (Resource::of(signal), layout) {
            (Resource::Memory | Resource::Pids, _) => nothing,
            (_, DiskLayout::Dedicated) if of_node => nothing,
            (_, DiskLayout::Shared | DiskLayout::Dedicated) => Self { containers: true, images: true },
            (_, DiskLayout::Split) => Self { containers: !of_images, images: of_images },
        }
    }

    /// There is something that could be removed.
    pub fn is_any(self) -> bool {
        self.containers || self.images
    }
}

/// A pod that is to be evicted.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Victim {
    /// The pod.
    pub pod: Pod,
    /// Its grace period in seconds.
    pub grace: i64,
    /// Its processes are suspended for a moment, see [`suspends`].
    pub suspend: bool,
    /// Texts of its status and event.
    pub notice: Notice,
}

/// The pod to evict for the first of the thresholds to act on, and the critical pods that come before it and stay. `due` is
/// not empty; `max_grace` is `evictionMaxPodGracePeriod`.
pub(super) fn victim(
    due: &[Threshold],
    readings: &Readings,
    pods: Vec<Pod>,
    usage: &HashMap<PodUid, PodUsage>,
    max_grace: i64,
) -> (Option<Victim>, Vec<Pod>) {
    let Some(threshold) = due.first() else { return (None, Vec::new()) };
    let ranked = ranking::order(threshold.signal, readings.disks.unwrap_or_default(), pods, usage);
    let mut spared = ranked;
    let Some(position) = spared.iter().position(|pod| !spec::is_critical(pod)) else { return (None, spared) };
    let pod = spared.swap_remove(position);
    spared.truncate(position);
    let resource = Resource::of(threshold.signal);
    let notice = notice(resource, &pod, usage.get(&pod_ref(&pod).uid), due, readings);
    let grace = if threshold.is_hard() { IMMEDIATE } else { soft_grace(&pod, max_grace) };
    let suspend = grace == IMMEDIATE && resource == Resource::Memory && suspends(&pod);
    (Some(Victim { pod, grace, suspend, notice }), spared)
}

/// A pod that is evicted at once for lack of memory takes no more of it while the runtime stops it, if its processes are
/// suspended. A preStop hook needs all of its short grace period, and the processes that it connects to. The processes of a
/// RuntimeClass may be those of a sandbox, which has to answer the runtime.
pub(super) fn suspends(pod: &Pod) -> bool {
    if spec::runtime_class(pod).is_some() {
        return false;
    }
    let hooks = |container: &Container| container.lifecycle.as_ref().is_some_and(|hooks| hooks.pre_stop.is_some());
    !spec::regular_containers(pod).iter().chain(spec::init_containers(pod)).any(hooks)
}

fn soft_grace(pod: &Pod, max: i64) -> i64 {
    let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    own.map_or(max, |own| own.min(max)).max(IMMEDIATE)
}
