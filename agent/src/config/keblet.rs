//! `KebletConfiguration` (`keblet.dev/v1alpha1`): what the standard document has no field for.
//!
//! It may stand as a second document in the file of `--config` or in a file of its own (`--keblet-config`).

use super::duration::GoDuration;
use super::pressure::PressureSettings;
use super::schema::document;

/// `apiVersion` of the document.
pub const API_VERSION: &str = "keblet.dev/v1alpha1";
/// `kind` of the document.
pub const KIND: &str = "KebletConfiguration";

document! {
    /// keblet's own settings. An empty document is valid.
    #[derive(Eq)]
    pub struct KebletConfiguration {
        sensors "sensors": Sensors, nested, used, "Which ways of noticing changes are used.";
        relist "relist": Relist, nested, used, "How often the runtime is listed as a whole.";
        pressure "pressure": PressureSettings, nested, used, "When the kernel reports pressure, and what is done about it.";
        pacing "pacing": PacingSettings, nested, used, "By which rules one pod's work waits for another's.";
        images "images": ImageSettings, nested, used, "When images are pulled.";
        eviction "eviction": EvictionSettings, nested, used, "What evictions are decided by.";
    }
}

document! {
    /// `sensors`: each can be turned off, to measure its effect or to work around a fault. Relisting always stays.
    #[derive(Eq)]
    pub struct Sensors {
        runtime_events "runtimeEvents": bool = true, pointer, used, "Read the runtime's event stream (CRI GetContainerEvents).";
        bpf "bpf": bool = true, pointer, used, "Load the kernel probes for exits, OOM kills and cgroups.";
        pidfd "pidfd": bool = true, pointer, used, "Hold a pidfd on the init process of each running container.";
    }
}

document! {
    /// `relist`
    #[derive(Eq)]
    pub struct Relist {
        period "period": GoDuration = GoDuration::secs(300), pointer, used, "Time between two relists while the runtime's event stream is read.";
        degraded_period "degradedPeriod": GoDuration = GoDuration::secs(1), pointer, used, "Time between two relists while the event stream is not up.";
        fixed_period "fixedPeriod": Option<GoDuration>, pointer, used, "Always relist at this period, whatever the sensors do; for comparing with polling.";
    }
}

document! {
    /// `pacing`: each policy can be turned off, to measure its effect.
    #[derive(Eq)]
    pub struct PacingSettings {
        stop_limiter "stopLimiter": bool = true, pointer, used, "Limit how many pods are stopped at the same time.";
        held_back_statuses "heldBackStatuses": bool = true, pointer, used, "Hold back the first status of a pod while containers are being started, 200 ms at most.";
        deferred_events "deferredEvents": bool = true, pointer, used, "Defer events while containers are being started or pods stopped, 2 s at most.";
    }
}

document! {
    /// `images`
    #[derive(Eq)]
    pub struct ImageSettings {
        prefetch "prefetch": bool = false, value, used, "Pull images of later containers while init containers run, within the limits of all pulls.";
    }
}

document! {
    /// `eviction`
    #[derive(Eq)]
    pub struct EvictionSettings {
        memory_available "memoryAvailable": MemoryAvailable, pointer, used, "What memory.available is: WorkingSet, the capacity less the working set of all cgroups, as a kubelet; or MemAvailable, the kernel's estimate of /proc/meminfo.";
    }
}

/// `eviction.memoryAvailable`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum MemoryAvailable {
    /// The capacity less the working set of the root cgroup, as in the kubelet.
    #[default]
    WorkingSet,
    /// `MemAvailable` of `/proc/meminfo`; the working set where the kernel does not report it.
    MemAvailable,
}
