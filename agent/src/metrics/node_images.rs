//! Images of the node: pulls, number and size, garbage collection.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;

use super::buckets;
use super::register::Register;
use super::values::gauge;

/// Images of the node.
#[derive(Debug)]
pub struct NodeImages {
    asked: IntCounterVec,
    pulls: HistogramVec,
    collected: IntCounterVec,
    count: IntGaugeVec,
    bytes: IntGaugeVec,
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

impl NodeImages {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            asked: register.counters(
                "kubelet_image_manager_ensure_image_requests_total",
                "[ALPHA] Images that containers were to start from, by policy, presence and need of a pull.",
                &["present_locally", "pull_policy", "pull_required"],
            ),
            pulls: register.histograms(
                "kubelet_image_pull_duration_seconds",
                "[ALPHA] Duration of image pulls, by size.",
                buckets::IMAGE_PULL,
                &["image_size_in_bytes"],
            ),
            collected: register.counters(
                "kubelet_image_garbage_collected_total",
                "[ALPHA] Unused images that were removed, by reason: their age, or the space that they took.",
                &["reason"],
            ),
            count: register.gauges(
                "keblet_images",
                "Images of the node, by whether a container uses them or the runtime has pinned them.",
                &["in_use"],
            ),
            bytes: register.gauges(
                "keblet_image_bytes",
                "Bytes of the node's images, by whether a container uses them or the runtime has pinned them.",
                &["in_use"],
            ),
        }
    }

    /// An image was requested with a pull policy, which is in lower case: whether it was present, and whether it was to be
    /// pulled, as far as either became clear.
    pub fn asked(&self, policy: &'static str, present: Option<bool>, required: Option<bool>) {
        let label = |is: Option<bool>| match is {
            Some(true) => "true",
            Some(false) => "false",
            None => "unknown",
        };
        self.asked.with_label_values(&[label(present), policy, label(required)]).inc();
    }

    /// An image was pulled; 0 bytes if its size is not known.
    pub fn pulled(&self, bytes: u64, took: Duration) {
        self.pulls.with_label_values(&[image_size(bytes)]).observe(took.as_secs_f64());
    }

    /// Garbage collection has removed an image, for its age or else for its size.
    pub fn collected(&self, for_age: bool) {
        self.collected.with_label_values(&[if for_age { "age" } else { "space" }]).inc();
    }

    /// Number and bytes of the node's images that are in use, or that are not.
    pub fn set(&self, in_use: bool, count: usize, bytes: u64) {
        let label = [if in_use { "true" } else { "false" }];
        self.count.with_label_values(&label).set(gauge(count));
        self.bytes.with_label_values(&label).set(gauge(bytes));
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
