//! Pods, counted and timed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Histogram;
use prometheus::IntCounter;
use prometheus::IntCounterVec;
use prometheus::IntGauge;
use prometheus::IntGaugeVec;

use super::buckets;
use super::register::Register;
use super::replaced::Replaced;
use super::values::gauge;
use crate::model::ContainerState;
use crate::model::PodSnapshot;

/// Pods.
#[derive(Debug)]
pub struct Pods {
    desired: IntGaugeVec,
    active: IntGaugeVec,
    working: Replaced,
    mirrors: IntGauge,
    running: IntGauge,
    running_containers: Replaced,
    restarted: IntCounterVec,
    orphaned: IntCounter,
    status_sync: Histogram,
    started: IntCounter,
    start_errors: IntCounter,
    user_namespaced: IntCounter,
    user_namespaced_errors: IntCounter,
    rejections: IntCounterVec,
}

/// The source of a pod, as the families distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodOrigin {
    /// A file or URL.
    Static,
    /// The API server.
    Api,
    /// Known from the runtime alone.
    Unknown,
}

impl PodOrigin {
    const fn label(self) -> &'static str {
        match self {
            Self::Static => "true",
            Self::Api => "",
            Self::Unknown => "unknown",
        }
    }
}

/// Labels of pods with a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Working {
    /// `sync`, `terminating` or `terminated`.
    pub lifecycle: &'static str,
    /// `desired`, `orphan` or `runtime_only`.
    pub config: &'static str,
    /// Their source.
    pub origin: PodOrigin,
}

impl Working {
    /// The groups that there can be.
    fn all() -> impl Iterator<Item = Self> {
        let origins = [
            ("desired", PodOrigin::Static),
            ("desired", PodOrigin::Api),
            ("orphan", PodOrigin::Static),
            ("orphan", PodOrigin::Api),
            ("runtime_only", PodOrigin::Unknown),
        ];
        let lifecycles = ["sync", "terminating", "terminated"];
        origins
            .into_iter()
            .flat_map(move |(config, origin)| lifecycles.map(|lifecycle| Self { lifecycle, config, origin }))
    }
}

impl Pods {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            desired: register.gauges(
                "kubelet_desired_pods",
                "[ALPHA] Pods that the agent is instructed to run.",
                &["static"],
            ),
            active: register.gauges("kubelet_active_pods", "[ALPHA] Pods that count for admission.", &["static"]),
            working: register.replaced(
                "kubelet_working_pods",
                "[ALPHA] Pods with a worker, by its phase and the pod's source.",
                &["config", "lifecycle", "static"],
            ),
            mirrors: register
                .gauge("kubelet_mirror_pods", "[ALPHA] Mirror pods the API server has of static pods here."),
            running: register.gauge("kubelet_running_pods", "[ALPHA] Pods with a running sandbox."),
            running_containers: register.replaced(
                "kubelet_running_containers",
                "[ALPHA] Containers in the runtime, by state.",
                &["container_state"],
            ),
            restarted: restarted(register),
            orphaned: register.counter(
                "kubelet_orphaned_runtime_pods_total",
                "[ALPHA] Pods found running that no source desired and no worker knew.",
            ),
            status_sync: register.histogram(
                "kubelet_pod_status_sync_duration_seconds",
                "[ALPHA] From a status change to the API server's acknowledgement.",
                buckets::STATUS_SYNC,
            ),
            started: register.counter("kubelet_started_pods_total", "[ALPHA] Attempts to create a sandbox."),
            start_errors: register
                .counter("kubelet_started_pods_errors_total", "[ALPHA] Failed attempts to create a sandbox."),
            user_namespaced: register.counter(
                "kubelet_started_user_namespaced_pods_total",
                "[ALPHA] Attempts to create the sandbox of a pod with a user namespace of its own.",
            ),
            user_namespaced_errors: register.counter(
                "kubelet_started_user_namespaced_pods_errors_total",
                "[ALPHA] Pods with a user namespace of their own whose sandbox or first start failed.",
            ),
            rejections: register.counters(
                "kubelet_admission_rejections_total",
                "[ALPHA] Pods that were rejected at admission, by reason.",
                &["reason"],
            ),
        }
    }

    /// Pods that the sources desire.
    pub fn desired(&self, origin: PodOrigin, count: usize) {
        self.desired.with_label_values(&[origin.label()]).set(gauge(count));
    }

    /// Pods that count for admission.
    pub fn active(&self, origin: PodOrigin, count: usize) {
        self.active.with_label_values(&[origin.label()]).set(gauge(count));
    }

    /// Pods with a worker; replaces all earlier counts. Groups without a pod are shown, too, as by a kubelet.
    pub fn working(&self, counts: impl IntoIterator<Item = (Working, usize)>) {
        let mut all: HashMap<Working, usize> = Working::all().map(|group| (group, 0)).collect();
        all.extend(counts);
        let labels = |group: Working| [group.config, group.lifecycle, group.origin.label()];
        self.working.replace(all.into_iter().map(|(group, count)| (labels(group), gauge(count))));
    }

    /// Mirror pods of this node.
    pub fn mirrors(&self, count: usize) {
        self.mirrors.set(gauge(count));
    }

    /// Sets the gauges of what runs from the pod cache, the only source of these counts.
    pub fn observe_cache(&self, snapshots: &[Arc<PodSnapshot>]) {
        let pods = snapshots.iter().filter(|s| s.sandboxes.iter().any(|sandbox| sandbox.ready)).count();
        let count = |state| snapshots.iter().flat_map(|s| &s.containers).filter(|c| c.state == state).count();
        let states = [
            ("created", ContainerState::Created),
            ("running", ContainerState::Running),
            ("exited", ContainerState::Exited),
            ("unknown", ContainerState::Unknown),
        ];
        self.running(pods, states.map(|(name, state)| (name, count(state))));
    }

    /// What the runtime runs: pods, and containers by state (`created`, `running`, `exited`, `unknown`).
    pub fn running(&self, pods: usize, containers: impl IntoIterator<Item = (&'static str, usize)>) {
        self.running.set(gauge(pods));
        self.running_containers.replace(containers.into_iter().map(|(state, count)| ([state], gauge(count))));
    }

    /// A pod was rejected. Only the reasons that upstream distinguishes have a label of their own.
    pub fn rejected(&self, reason: &str) {
        let label = match REJECTIONS.iter().find(|known| **known == reason) {
            Some(known) => known,
            None if reason.starts_with("OutOf") => "OutOfExtendedResources",
            None => "Other",
        };
        self.rejections.with_label_values(&[label]).inc();
    }

    /// A pod was removed and is desired again under the same UID.
    pub fn restarted(&self, origin: PodOrigin) {
        self.restarted.with_label_values(&[origin.label()]).inc();
    }

    /// The runtime has a pod that has no worker.
    pub fn orphaned(&self) {
        self.orphaned.inc();
    }

    /// The API server acknowledged a status, so long after it changed.
    pub fn status_synced(&self, since_change: Duration) {
        self.status_sync.observe(since_change.as_secs_f64());
    }

    /// The creation of a sandbox was tried.
    pub fn sandbox_started(&self, ok: bool) {
        self.started.inc();
        if !ok {
            self.start_errors.inc();
        }
    }

    /// The creation of the sandbox of a pod with a user namespace of its own was tried.
    pub fn user_namespaced_started(&self) {
        self.user_namespaced.inc();
    }

    /// Such a sandbox, or the first start of a container in it, failed.
    pub fn user_namespaced_failed(&self) {
        self.user_namespaced_errors.inc();
    }
}

/// Series begin with 0: `increase()` in Prometheus does not count the first value of a series.
fn restarted(register: &Register<'_>) -> IntCounterVec {
    let help = "[ALPHA] Pods that were deleted and created again with the same UID.";
    let counters = register.counters("kubelet_restarted_pods_total", help, &["static"]);
    for origin in [PodOrigin::Static, PodOrigin::Api] {
        counters.with_label_values(&[origin.label()]);
    }
    counters
}

/// Reasons of rejections that are counted by name.
const REJECTIONS: [&str; 21] = [
    "AppArmor",
    "PodOSSelectorNodeLabelDoesNotMatch",
    "PodOSNotSupported",
    "InvalidNodeInfo",
    "InitContainerRestartPolicyForbidden",
    "SupplementalGroupsPolicyNotSupported",
    "UnexpectedAdmissionError",
    "UnknownReason",
    "UnexpectedPredicateFailureType",
    "OutOfcpu",
    "OutOfmemory",
    "OutOfephemeral-storage",
    "OutOfpods",
    "PodLevelResourcesNotSupported",
    "PodFeatureUnsupported",
    "node(s) had taints that the pod didn't tolerate",
    "Evicted",
    "SysctlForbidden",
    "TopologyAffinityError",
    "NodeShutdown",
    "VolumeAttachmentLimitExceeded",
];
