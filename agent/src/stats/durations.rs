//! How long measurements of volumes take, for `kubelet_volume_metric_collection_duration_seconds`.

use std::sync::Arc;
use std::time::Duration;

use crate::metrics::MetricSource;
use crate::metrics::Metrics;

/// Where durations are observed; nowhere by default.
#[derive(Clone, Debug, Default)]
pub(super) struct Durations(Option<Arc<Metrics>>);

impl Durations {
    /// In these metrics.
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self(Some(metrics))
    }

    /// A volume was measured.
    pub(super) fn observe(&self, source: MetricSource, took: Duration) {
        if let Some(metrics) = &self.0 {
            metrics.volumes.measured(source, took);
        }
    }
}
