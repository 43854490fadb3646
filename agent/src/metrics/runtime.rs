//! Calls to the container runtime, image pulls and cgroups.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::IntGauge;
use prometheus::IntGaugeVec;

use super::buckets;
use super::register::Register;
use super::values::gauge;

/// The container runtime.
#[derive(Debug)]
pub struct Runtime {
    calls: IntCounterVec,
    durations: HistogramVec,
    errors: IntCounterVec,
    sandbox: HistogramVec,
    sandbox_errors: IntCounterVec,
    pull: HistogramVec,
    cgroups: HistogramVec,
    memory_min: IntGauge,
    memory_low: IntGauge,
    images_asked: IntCounterVec,
    images_collected: IntCounterVec,
    images: IntGaugeVec,
    image_bytes: IntGaugeVec,
}

/// Upper ends of the size classes of images, in MiB.
const IMAGE_SIZES: [(u64, &str); 11] = [
    (10, "0-10MB"),
    (100, "10MB-100MB"),
    (500, "100MB-500MB"),
    (1 << 10, "500MB-1GB"),
    (5 << 10, "1GB-5GB"),
    (10 << 10, "5GB-10GB"),
    (20 << 10, "10GB-20GB"),
    (30 << 10, "20GB-30GB"),
    (40 << 10, "30GB-40GB"),
    (60 << 10, "40GB-60GB"),
    (100 << 10, "60GB-100GB"),
];

/// The size class of an image; 0 bytes means that the size is not known.
fn image_size(bytes: u64) -> &'static str {
    if bytes == 0 {
        return "N/A";
    }
    IMAGE_SIZES.iter().find(|(mebibytes, _)| bytes <= mebibytes << 20).map_or("GT100GB", |(_, class)| class)
}

impl Runtime {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            calls: register.counters(
                "kubelet_runtime_operations_total",
                "[ALPHA] Calls to the container runtime.",
                &["operation_type"],
            ),
            durations: register.histograms(
                "kubelet_runtime_operations_duration_seconds",
                "[ALPHA] Duration of calls to the container runtime.",
                buckets::RUNTIME_CALL,
                &["operation_type"],
            ),
            errors: register.counters(
                "kubelet_runtime_operations_errors_total",
                "[ALPHA] Calls to the container runtime that failed.",
                &["operation_type"],
            ),
            sandbox: register.histograms(
                "kubelet_run_podsandbox_duration_seconds",
                "[ALPHA] Duration of making a sandbox.",
                buckets::USUAL,
                &["runtime_handler"],
            ),
            sandbox_errors: register.counters(
                "kubelet_run_podsandbox_errors_total",
                "[ALPHA] Sandboxes that could not be made.",
                &["runtime_handler"],
            ),
            pull: register.histograms(
                "kubelet_image_pull_duration_seconds",
                "[ALPHA] Duration of image pulls, by size.",
                buckets::IMAGE_PULL,
                &["image_size_in_bytes"],
            ),
            cgroups: register.histograms(
                "kubelet_cgroup_manager_duration_seconds",
                "[ALPHA] Duration of operations on cgroups of pods and QoS classes.",
                buckets::USUAL,
                &["operation_type"],
            ),
            memory_min: register.gauge(
                "kubelet_memory_qos_node_memory_min_bytes",
                "[ALPHA] Bytes of memory of Guaranteed pods that the kernel never reclaims (memory.min).",
            ),
            memory_low: register.gauge(
                "kubelet_memory_qos_node_memory_low_bytes",
                "[ALPHA] Bytes of memory of Burstable pods that the kernel reclaims last (memory.low).",
            ),
            images_asked: register.counters(
                "kubelet_image_manager_ensure_image_requests_total",
                "[ALPHA] Images that containers were to start from, by policy, presence and need of a pull.",
                &["present_locally", "pull_policy", "pull_required"],
            ),
            images_collected: register.counters(
                "kubelet_image_garbage_collected_total",
                "[ALPHA] Unused images that were removed, by reason: their age, or the space that they took.",
                &["reason"],
            ),
            images: register.gauges(
                "keblet_images",
                "Images of the node, by whether a container uses them or the runtime has pinned them.",
                &["in_use"],
            ),
            image_bytes: register.gauges(
                "keblet_image_bytes",
                "Bytes of the node's images, by whether a container uses them or the runtime has pinned them.",
                &["in_use"],
            ),
        }
    }

    /// A call ended; `operation` is upstream's label.
    pub fn call(&self, operation: &'static str, took: Duration, ok: bool) {
        self.calls.with_label_values(&[operation]).inc();
        self.durations.with_label_values(&[operation]).observe(took.as_secs_f64());
        if !ok {
            self.errors.with_label_values(&[operation]).inc();
        }
    }

    /// A sandbox was made, or not.
    pub fn sandbox(&self, handler: &str, took: Duration, ok: bool) {
        self.sandbox.with_label_values(&[handler]).observe(took.as_secs_f64());
        if !ok {
            self.sandbox_errors.with_label_values(&[handler]).inc();
        }
    }

    /// An image was requested with a pull policy, which is in lower case: whether it was present, and whether it was to be
    /// pulled, as far as either became clear.
    pub fn image_asked(&self, policy: &'static str, present: Option<bool>, required: Option<bool>) {
        let label = |is: Option<bool>| match is {
            Some(true) => "true",
            Some(false) => "false",
            None => "unknown",
        };
        self.images_asked.with_label_values(&[label(present), policy, label(required)]).inc();
    }

    /// Number and bytes of the node's images that are in use, or that are not.
    pub fn set_images(&self, in_use: bool, count: usize, bytes: u64) {
        let label = [if in_use { "true" } else { "false" }];
        self.images.with_label_values(&label).set(gauge(count));
        self.image_bytes.with_label_values(&label).set(gauge(bytes));
    }

    /// Garbage collection has removed an image, for its age or else for its size.
    pub fn image_collected(&self, for_age: bool) {
        self.images_collected.with_label_values(&[if for_age { "age" } else { "space" }]).inc();
    }

    /// An image was pulled; 0 bytes if its size is not known.
    pub fn pulled(&self, bytes: u64, took: Duration) {
        self.pull.with_label_values(&[image_size(bytes)]).observe(took.as_secs_f64());
    }

    /// An operation (`create`, `update`, `destroy`) on a cgroup ended.
    pub fn cgroup(&self, operation: &'static str, took: Duration) {
        self.cgroups.with_label_values(&[operation]).observe(took.as_secs_f64());
    }

    /// Bytes of memory that are protected for Guaranteed and for Burstable pods.
    pub fn protected_memory(&self, guaranteed: i64, burstable: i64) {
        self.memory_min.set(guaranteed);
        self.memory_low.set(burstable);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes() {
        for (bytes, class) in [
            (0, "N/A"),
            (1, "0-10MB"),
            (10 << 20, "0-10MB"),
            ((10 << 20) + 1, "10MB-100MB"),
            (1 << 30, "500MB-1GB"),
            (100 << 30, "60GB-100GB"),
            ((100 << 30) + 1, "GT100GB"),
        ] {
            assert_eq!(image_size(bytes), class, "{bytes}");
        }
    }
}
