//! Volumes of pods.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounter;
use prometheus::IntGauge;

use super::buckets;
use super::register::Register;
use super::replaced::Replaced;
use super::values::gauge;

/// Volumes.
#[derive(Debug)]
pub struct Volumes {
    operations: HistogramVec,
    overall: HistogramVec,
    measurements: HistogramVec,
    totals: Replaced,
    found: IntCounter,
    not_understood: IntCounter,
    forced: IntCounter,
    force_failed: IntCounter,
    orphans: IntGauge,
    orphans_left: IntGauge,
    claims: [Replaced; 6],
}

/// A claim whose volume is measured: bytes and inodes.
#[derive(Clone, Copy, Debug)]
pub struct ClaimStats<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Size of the file system.
    pub capacity: u64,
    /// Bytes left.
    pub available: u64,
    /// Bytes that the volume takes.
    pub used: u64,
    /// Inodes of the file system.
    pub inodes: u64,
    /// Inodes left.
    pub inodes_free: u64,
    /// Inodes that the volume takes.
    pub inodes_used: u64,
}

/// How a volume was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricSource {
    /// Its file system reported its size.
    FileSystem,
    /// Its device reported its size.
    Device,
    /// Its files were counted.
    Walk,
    /// The count of its project was read.
    Quota,
}

impl MetricSource {
    const fn label(self) -> &'static str {
        match self {
            Self::FileSystem => "statfs",
            Self::Device => "block",
            Self::Walk => "du",
            Self::Quota => "fsquota",
        }
    }
}

/// Which volumes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VolumeState {
    /// Those that desired pods need.
    Desired,
    /// Those that are set up.
    Actual,
}

impl VolumeState {
    const fn label(self) -> &'static str {
        match self {
            Self::Desired => "desired_state_of_world",
            Self::Actual => "actual_state_of_world",
        }
    }
}

impl Volumes {
    pub(super) fn new(register: &Register<'_>) -> Self {
        let of_claim = |name, help| register.replaced(name, help, &["namespace", "persistentvolumeclaim"]);
        Self {
            claims: [
                of_claim("kubelet_volume_stats_capacity_bytes", "[ALPHA] Size of the volume in bytes."),
                of_claim("kubelet_volume_stats_available_bytes", "[ALPHA] Bytes left in the volume."),
                of_claim("kubelet_volume_stats_used_bytes", "[ALPHA] Bytes used in the volume."),
                of_claim("kubelet_volume_stats_inodes", "[ALPHA] Inodes of the volume."),
                of_claim("kubelet_volume_stats_inodes_free", "[ALPHA] Inodes left in the volume."),
                of_claim("kubelet_volume_stats_inodes_used", "[ALPHA] Inodes used in the volume."),
            ],
            operations: register.histograms(
                "storage_operation_duration_seconds",
                "[ALPHA] Duration of operations on volumes, by how they ended.",
                buckets::STORAGE,
                &["migrated", "operation_name", "status", "volume_plugin"],
            ),
            overall: register.histograms(
                "volume_operation_total_seconds",
                "[ALPHA] Time from the request of a volume until it was mounted, with waits and failed attempts.",
                buckets::STORAGE,
                &["operation_name", "plugin_name"],
            ),
            measurements: register.histograms(
                "kubelet_volume_metric_collection_duration_seconds",
                "[ALPHA] Time to measure what a volume uses, by how it is measured.",
                buckets::USUAL,
                &["metric_source"],
            ),
            totals: register.replaced(
                "volume_manager_total_volumes",
                "[ALPHA] Volumes that pods want, and volumes that are set up.",
                &["plugin_name", "state"],
            ),
            found: register.counter(
                "reconstruct_volume_operations_total",
                "[ALPHA] Volumes of an earlier run that were found on disk when the agent started.",
            ),
            not_understood: register
                .counter("reconstruct_volume_operations_errors_total", "[ALPHA] Of these, volumes of an unknown kind."),
            forced: register.counter(
                "force_cleaned_failed_volume_operations_total",
                "[ALPHA] Removals of volumes of an unknown kind after the removal of their pod.",
            ),
            force_failed: register
                .counter("force_cleaned_failed_volume_operation_errors_total", "[ALPHA] Those of them that failed."),
            orphans: register.gauge(
                "kubelet_orphan_pod_cleaned_volumes",
                "[ALPHA] Orphaned pods with a directory that the last pass of housekeeping found.",
            ),
            orphans_left: register.gauge(
                "kubelet_orphan_pod_cleaned_volumes_errors",
                "[ALPHA] Orphaned pods whose directory the last pass of housekeeping could not remove.",
            ),
        }
    }

    /// An operation ended: `operation` is such as `volume_mount` or `unmap_volume`, `plugin` such as `kubernetes.io/secret`.
    pub fn operation(&self, operation: &'static str, plugin: &str, took: Duration, ok: bool) {
        let status = if ok { "success" } else { "fail-unknown" };
        self.operations.with_label_values(&["false", operation, status, plugin]).observe(took.as_secs_f64());
    }

    /// A volume was mounted, so long after it was first requested.
    pub fn mounted_after(&self, plugin: &str, waited: Duration) {
        self.overall.with_label_values(&["overall_volume_mount", plugin]).observe(waited.as_secs_f64());
    }

    /// What a volume uses was measured.
    pub fn measured(&self, source: MetricSource, took: Duration) {
        self.measurements.with_label_values(&[source.label()]).observe(took.as_secs_f64());
    }

    /// Volumes by kind and state; replaces all earlier counts.
    pub fn totals<'a>(&self, counts: impl IntoIterator<Item = (VolumeState, &'a str, usize)>) {
        let counts = counts.into_iter().map(|(state, plugin, count)| ([plugin, state.label()], gauge(count)));
        self.totals.replace(counts);
    }

    /// Volumes of claims; replaces all earlier numbers.
    pub fn claims<'a>(&self, claims: impl IntoIterator<Item = ClaimStats<'a>>) {
        let values: Vec<([&str; 2], [u64; 6])> = claims
            .into_iter()
            .map(|claim| {
                let ClaimStats { namespace, name, capacity, available, used, inodes, inodes_free, inodes_used } = claim;
                ([namespace, name], [capacity, available, used, inodes, inodes_free, inodes_used])
            })
            .collect();
        for (index, family) in self.claims.iter().enumerate() {
            family.replace(values.iter().map(|(labels, of)| (*labels, gauge(of[index]))));
        }
    }

    /// A volume was found on disk when the agent started.
    pub fn found(&self, understood: bool) {
        self.found.inc();
        if !understood {
            self.not_understood.inc();
        }
    }

    /// A volume of unknown kind was removed, or could not be.
    pub fn forced(&self, ok: bool) {
        self.forced.inc();
        if !ok {
            self.force_failed.inc();
        }
    }

    /// Orphaned pods with a directory that the last pass of housekeeping found, and those of them it could not remove.
    pub fn orphans(&self, found: usize, failed: usize) {
        self.orphans.set(gauge(found));
        self.orphans_left.set(gauge(failed));
    }
}
