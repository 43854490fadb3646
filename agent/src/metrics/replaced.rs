//! Gauges whose series are replaced together.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::PoisonError;

use prometheus::IntGaugeVec;

/// A family that has the series of the last replacement. During a replacement each series that stays is there, with its
/// old or its new value: Prometheus ends a series that is missing in a scrape, and the `for` of alerts on it starts over.
#[derive(Debug)]
pub(super) struct Replaced {
    family: IntGaugeVec,
    /// The labels of the series.
    shown: Mutex<HashSet<Vec<String>>>,
}

impl Replaced {
    /// Without series.
    pub(super) fn new(family: IntGaugeVec) -> Self {
        Self { family, shown: Mutex::default() }
    }

    /// Replaces all series.
    pub(super) fn replace<'a, const N: usize>(&self, series: impl IntoIterator<Item = ([&'a str; N], i64)>) {
        let series: Vec<([&str; N], i64)> = series.into_iter().collect();
        let now: HashSet<Vec<String>> =
            series.iter().map(|&(labels, _)| Vec::from(labels.map(str::to_owned))).collect();
        // Valid also after a panic: it is written in one step.
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        // First: for the library, labels that are equal when joined ("a", "bc" and "ab", "c") are one series.
        for ended in shown.difference(&now) {
            // Fails only if the removal of labels that are equal when joined has removed it.
            let _ = self.family.remove_label_values(ended);
        }
        for (labels, value) in series {
            self.family.with_label_values(&labels).set(value);
        }
        *shown = now;
    }
}

#[cfg(test)]
mod tests {
    use super::super::ClaimStats;
    use super::super::LogsOf;
    use super::super::Metrics;
    use super::super::VolumeState;
    use super::super::register::Register;

    #[test]
    fn a_series_stays_when_one_with_the_same_joined_labels_ends() {
        let registry = prometheus::Registry::new();
        let family = Register::new(&registry).replaced("family", "Help.", &["first", "second"]);
        family.replace([(["a", "bc"], 1), (["ab", "c"], 2)]);
        family.replace([(["ab", "c"], 3)]);
        let text = String::from_utf8(super::super::encode_text(&registry.gather()).expect("encodes")).expect("text");
        assert!(text.lines().any(|line| line == "family{first=\"ab\",second=\"c\"} 3"), "{text}");
    }

    #[test]
    fn a_scrape_during_a_replacement_finds_the_series_that_stay() {
        let metrics = Metrics::new();
        let shows = |line: &str| metrics.render().expect("metrics").lines().any(|found| found == line);
        let logs = |container| LogsOf { uid: "u", namespace: "ns", pod: "p", container };
        let log = |container, bytes| {
            let name = "kubelet_container_log_filesystem_used_bytes";
            format!("{name}{{container=\"{container}\",namespace=\"ns\",pod=\"p\",uid=\"u\"}} {bytes}")
        };
        metrics.containers.logs([(logs("stays"), 1), (logs("ends"), 2)]);
        metrics.containers.logs([(logs("stays"), 3)].into_iter().inspect(|_| assert!(shows(&log("stays", 1)))));
        assert!(shows(&log("stays", 3)) && !shows(&log("ends", 2)));

        let claim = |capacity| ClaimStats {
            namespace: "ns",
            name: "c",
            capacity,
            available: 0,
            used: 0,
            inodes: 0,
            inodes_free: 0,
            inodes_used: 0,
        };
        let size = |bytes| {
            format!("kubelet_volume_stats_capacity_bytes{{namespace=\"ns\",persistentvolumeclaim=\"c\"}} {bytes}")
        };
        metrics.volumes.claims([claim(1)]);
        metrics.volumes.claims([claim(2)].into_iter().inspect(|_| assert!(shows(&size(1)))));
        assert!(shows(&size(2)));
        metrics.volumes.claims([]);
        assert!(!shows(&size(2)));

        let volumes = |count: usize| [(VolumeState::Actual, "kubernetes.io/secret", count)];
        let total = |count| {
            let labels = "plugin_name=\"kubernetes.io/secret\",state=\"actual_state_of_world\"";
            format!("volume_manager_total_volumes{{{labels}}} {count}")
        };
        metrics.volumes.totals(volumes(4));
        metrics.volumes.totals(volumes(5).into_iter().inspect(|_| assert!(shows(&total(4)))));
        assert!(shows(&total(5)));

        let running = |count| format!("kubelet_running_containers{{container_state=\"running\"}} {count}");
        metrics.pods.running(1, [("running", 6)]);
        metrics.pods.running(1, [("running", 7)].into_iter().inspect(|_| assert!(shows(&running(6)))));
        assert!(shows(&running(7)));
    }
}
