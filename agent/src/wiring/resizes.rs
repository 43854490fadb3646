//! In-place resizes of pods: the records of an earlier agent, and what the configuration rules out.

use crate::allocation::Allocations;
use crate::allocation::OpenError;
use crate::allocation::ResizeGates;
use crate::allocation::ResizePolicy;
use crate::config::Feature;
use crate::config::Settings;
use crate::workers::generate::Swap;

/// Reads what is allocated to pods and what was applied. Blocks.
///
/// # Errors
/// A record is damaged.
pub(super) fn open(settings: &Settings) -> Result<Allocations, OpenError> {
    let gates = ResizeGates {
        pod_level: settings.gates.enabled(Feature::InPlacePodLevelResourcesVerticalScaling),
        init_containers: settings.gates.enabled(Feature::InPlacePodVerticalScalingInitContainers),
    };
    Allocations::open(&settings.flags.root_dir, gates)
}

/// Resizes that this node can never perform.
pub(super) fn policy(settings: &Settings, swap: Swap, cgroup_v2: bool) -> ResizePolicy {
    let (kubelet, gates) = (&settings.kubelet, &settings.gates);
    ResizePolicy {
        pod_level: gates.enabled(Feature::InPlacePodLevelResourcesVerticalScaling),
        fixed_cpus: kubelet.cpu_manager_policy == "static"
            && !gates.enabled(Feature::InPlacePodVerticalScalingExclusiveCPUs),
        fixed_memory: kubelet.memory_manager_policy == "Static"
            && !gates.enabled(Feature::InPlacePodVerticalScalingExclusiveMemory),
        limited_swap: cgroup_v2 && matches!(swap, Swap::Limited { .. }),
    }
}
