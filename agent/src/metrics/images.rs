//! Access to images: records of pulls, credential plugins, image volumes.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounter;
use prometheus::IntCounterVec;
use prometheus::IntGauge;
use prometheus::IntGaugeVec;

use super::buckets;
use super::register::Register;
use super::values::gauge;

/// Access to images.
#[derive(Debug)]
pub struct Images {
    checks: IntCounterVec,
    intents: IntGauge,
    records: IntGauge,
    plugin_runs: HistogramVec,
    plugin_errors: IntCounterVec,
    plugin_config: IntGaugeVec,
    volumes: IntCounter,
    volumes_mounted: IntCounter,
    volumes_failed: IntCounter,
}

/// Whether an image that is on the node has to be pulled all the same, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MustPull {
    /// Not: the policy does not verify it.
    Allowed,
    /// Not: the pod may use it according to the record.
    Recorded,
    /// It has to be: access is not proven.
    Authenticate,
    /// It has to be, or the start fails: access cannot be verified.
    Error,
}

impl Images {
    pub(super) fn new(register: &Register<'_>) -> Self {
        let counters = |name, help: &str, label| register.counters(name, help, &[label]);
        Self {
            checks: counters(
                "kubelet_imagemanager_image_mustpull_checks_total",
                "[ALPHA] Checks whether a pod may use an image that is on the node, by result.",
                "result",
            ),
            intents: register
                .gauge("kubelet_imagemanager_ondisk_pullintents", "[ALPHA] Files of pulls that were begun."),
            records: register
                .gauge("kubelet_imagemanager_ondisk_pulledrecords", "[ALPHA] Files of images that were pulled."),
            plugin_runs: register.histograms(
                "kubelet_credential_provider_plugin_duration",
                "[ALPHA] Duration of runs of credential plugins, in seconds.",
                buckets::USUAL,
                &["plugin_name"],
            ),
            plugin_errors: counters(
                "kubelet_credential_provider_plugin_errors_total",
                "[ALPHA] Runs of credential plugins that failed.",
                "plugin_name",
            ),
            plugin_config: register.gauges(
                "kubelet_credential_provider_config_info",
                "[ALPHA] 1 for the hash of the configuration of credential plugins.",
                &["hash"],
            ),
            volumes: register.counter("kubelet_image_volume_requested_total", "[BETA] Image volumes to be mounted."),
            volumes_mounted: register
                .counter("kubelet_image_volume_mounted_succeed_total", "[BETA] Image volumes that were mounted."),
            volumes_failed: register
                .counter("kubelet_image_volume_mounted_errors_total", "[BETA] Image volumes that were not mounted."),
        }
    }

    /// A check of access ended.
    pub fn checked(&self, result: MustPull) {
        let label = match result {
            MustPull::Allowed => "credentialPolicyAllowed",
            MustPull::Recorded => "credentialRecordFound",
            MustPull::Authenticate => "mustAuthenticate",
            MustPull::Error => "error",
        };
        self.checks.with_label_values(&[label]).inc();
    }

    /// Files of intents and records.
    pub fn set_files(&self, intents: usize, records: usize) {
        self.intents.set(gauge(intents));
        self.records.set(gauge(records));
    }

    /// A credential plugin ended. `ok`: it exited with 0.
    pub fn plugin_ran(&self, plugin: &str, took: Duration, ok: bool) {
        self.plugin_runs.with_label_values(&[plugin]).observe(took.as_secs_f64());
        if !ok {
            self.plugin_errors.with_label_values(&[plugin]).inc();
        }
    }

    /// The hash of the plugins' configuration.
    pub fn set_plugin_config(&self, hash: &str) {
        self.plugin_config.with_label_values(&[hash]).set(1);
    }

    /// A container with so many image volumes was created, or was not because one could not be mounted.
    pub fn volumes_mounted(&self, count: u64, ok: bool) {
        self.volumes.inc_by(count);
        if ok { self.volumes_mounted.inc_by(count) } else { self.volumes_failed.inc_by(count) }
    }
}
