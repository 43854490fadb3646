//! Pod start latencies: until the agent finds a pod running, and as the SLI of Kubernetes defines them.
//!
//! Collects the times of creation, pulls, init containers and the running state, and of the watch event with the
//! running status, which other modules report. Static pods have no SLI: only when they run is measured.

mod record;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;

use self::record::Record;
pub use self::record::first_seen;
use crate::metrics::Metrics;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::pod_ref;

/// Start latencies of pods. Cheap to clone; the default measures nothing.
#[derive(Clone, Debug, Default)]
pub struct Startups(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    metrics: Arc<Metrics>,
    pods: Mutex<Pods>,
}

#[derive(Debug, Default)]
struct Pods {
    records: HashMap<PodUid, Record>,
    /// Pods that were unschedulable at first: their start latency does not depend on this node.
    excluded: HashSet<PodUid>,
    network_seen: bool,
}

impl Startups {
    /// Measures into these metrics.
    pub fn counting(metrics: Arc<Metrics>) -> Self {
        Self(Some(Arc::new(Inner { metrics, pods: Mutex::default() })))
    }

    fn pods(&self) -> Option<(&Inner, MutexGuard<'_, Pods>)> {
        let inner = self.0.as_deref()?;
        // Records are consistent after every statement: a panic elsewhere leaves them usable.
        Some((inner, inner.pods.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// A pod was received from the API server in its current state.
    pub fn observed(&self, pod: &Pod, now: SystemTime) {
        let Some((inner, mut pods)) = self.pods() else { return };
        if let Some(start) = pods.observe(pod, now) {
            let first = start.has_network && start.level.is_some() && !std::mem::replace(&mut pods.network_seen, true);
            inner.metrics.startup.measured(start.total, start.level, first);
        }
    }

    /// A file or URL has a new pod, which an earlier agent may have started.
    pub fn added(&self, uid: PodUid) {
        let Some((_, mut pods)) = self.pods() else { return };
        pods.records.insert(uid, Record::of_static_pod());
    }

    /// The source no longer has the pod.
    pub fn gone(&self, uid: &PodUid) {
        let Some((_, mut pods)) = self.pods() else { return };
        pods.records.remove(uid);
        pods.excluded.remove(uid);
    }

    /// An image of the pod was pulled, successfully or not, between these moments.
    pub fn pulled(&self, uid: &str, began: SystemTime, ended: SystemTime) {
        let Some((_, mut pods)) = self.pods() else { return };
        if let Some(record) = pods.records.get_mut(uid) {
            record.pulled(began, ended);
        }
    }

    /// A status made from `view` is published.
    pub fn published(&self, pod: &Pod, view: &PodSnapshot, now: SystemTime) {
        let Some((inner, mut pods)) = self.pods() else { return };
        let Some(record) = pods.records.get_mut(view.pod.uid.as_str()) else { return };
        if let Some(since_seen) = record.published(pod, view, now) {
            inner.metrics.startup.running_after(since_seen);
        }
    }
}

/// A measured start.
struct Start {
    total: Duration,
    /// Without pulls and init containers; `None` for pods with state.
    level: Option<Duration>,
    has_network: bool,
}

impl Pods {
    fn observe(&mut self, pod: &Pod, now: SystemTime) -> Option<Start> {
        let uid = pod_ref(pod).uid;
        if record::is_over(pod) {
            self.records.remove(&uid);
            return None;
        }
        if record::waits_for_scheduling(pod) {
            if self.records.remove(&uid).is_some() || record::is_new(pod) {
                self.excluded.insert(uid);
            }
            return None;
        }
        match self.records.get_mut(&uid) {
            Some(record) => record.observed(pod, now),
            None if record::is_new(pod) && !self.excluded.contains(&uid) => {
                self.records.insert(uid, Record::default());
                None
            }
            None => None,
        }
    }
}
