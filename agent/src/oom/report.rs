//! Reports verdicts: metrics, one log line, an event on the pod or the node, and subscribers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::OomCounts;
use super::message;
use crate::metrics::Metrics;
use crate::model::ContainerClass;
use crate::model::OomScope;
use crate::model::OomVerdict;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::model::spec;
use crate::recorder::EventType;
use crate::recorder::Recorder;

/// Verdicts kept for a slow subscriber; it receives the number of those that it missed.
const BACKLOG: usize = 1024;
/// Reason of the event on a pod.
const POD_REASON: &str = "OOMKilled";
/// Reason of the event on the node (the kubelet's `oom/oom_watcher_linux.go`).
const NODE_REASON: &str = "SystemOOM";

/// Returns the desired pod with a UID. Must not block.
pub type PodLookup = Arc<dyn Fn(&PodUid) -> Option<Pod> + Send + Sync>;

/// Reports verdicts. Clones share metrics, counts and subscribers; no call blocks. The default one reports to its own
/// metrics, and events as log lines.
#[derive(Clone)]
pub struct OomReporter {
    metrics: Arc<Metrics>,
    recorder: Recorder,
    pods: PodLookup,
    counts: OomCounts,
    subscribers: broadcast::Sender<Arc<OomVerdict>>,
}

impl Default for OomReporter {
    fn default() -> Self {
        Self::new(Metrics::new(), Recorder::default(), Arc::new(|_| None))
    }
}

impl fmt::Debug for OomReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OomReporter").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl OomReporter {
    /// Reports to these. Events on containers need the pod's spec, which `pods` returns.
    pub fn new(metrics: Arc<Metrics>, recorder: Recorder, pods: PodLookup) -> Self {
        let subscribers = broadcast::Sender::new(BACKLOG);
        Self { metrics, recorder, pods, counts: OomCounts::default(), subscribers }
    }

    /// OOM events of containers over all their instances.
    pub fn counts(&self) -> &OomCounts {
        &self.counts
    }

    /// All verdicts from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<OomVerdict>> {
        self.subscribers.subscribe()
    }

    /// Reports a verdict. Further victims of one event are counted, without an event and a log line.
    pub fn report(&self, verdict: OomVerdict) {
        self.metrics.oom.kill(verdict.scope, verdict.victim, verdict.confidence);
        self.counts.add(&verdict);
        if !verdict.is_group_member() {
            log(&verdict);
            self.record(&verdict);
        }
        // Fails only without subscribers.
        let _ = self.subscribers.send(Arc::new(verdict));
    }

    /// The runtime's reason of an exit was replaced.
    pub fn corrected(&self, pod: &PodRef, container: &str, from: &str, to: &str) {
        self.metrics.oom.corrected(from, to);
        tracing::info!(%pod, container, from, to, "the runtime's reason of an exit contradicts the OOM verdict");
    }

    /// A pod is gone.
    pub fn pod_removed(&self, uid: &PodUid) {
        self.counts.remove(uid);
    }

    fn record(&self, verdict: &OomVerdict) {
        if verdict.scope == OomScope::Node {
            self.recorder.node_event(EventType::Warning, NODE_REASON, &message::of_node(verdict));
        }
        let Some(pod) = verdict.pod.as_ref().filter(|pod| !pod.name.is_empty()) else { return };
        let name = verdict.container.as_ref().map_or("", |container| container.name.as_str());
        let text = message::of(verdict);
        match (self.pods)(&pod.uid) {
            Some(of) => self.recorder.pod_event(&of, &field_path(&of, name), EventType::Warning, POD_REASON, &text),
            None => self.recorder.event(reference(pod), EventType::Warning, POD_REASON, &text, BTreeMap::new()),
        }
    }
}

/// The pod as the runtime reports it.
fn reference(pod: &PodRef) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

/// The container in the pod's spec; empty if it is not in there.
fn field_path(pod: &Pod, name: &str) -> String {
    let list =
        spec::lasting_containers(pod).find(|container| container.name() == name).map(|found| match found.class {
            ContainerClass::Init | ContainerClass::Sidecar => "initContainers",
            ContainerClass::Regular | ContainerClass::Ephemeral => "containers",
        });
    let is_ephemeral = || spec::ephemeral_containers(pod).iter().any(|container| container.name == name);
    match list.or_else(|| is_ephemeral().then_some("ephemeralContainers")) {
        Some(list) => format!("spec.{list}{{{name}}}"),
        None => String::new(),
    }
}

fn log(verdict: &OomVerdict) {
    let missing: Vec<&str> = verdict.missing.iter().map(|evidence| evidence.as_str()).collect();
    tracing::warn!(
        target: "keblet::events",
        pod = verdict.pod.as_ref().map(ToString::to_string),
        pod_uid = verdict.pod.as_ref().map(|pod| pod.uid.as_str()),
        container = verdict.container.as_ref().map(|container| container.name.as_str()),
        id = verdict.container.as_ref().map(|container| container.id.as_str()),
        event = "OomKilled",
        time = %verdict.time,
        pid = verdict.pid,
        comm = verdict.comm,
        victim = verdict.victim.as_str(),
        scope = verdict.scope.as_str(),
        limit_cgroup = verdict.limit_cgroup,
        limit_bytes = verdict.limit_bytes,
        anon_bytes = verdict.memory.map(|memory| memory.anon_bytes),
        file_bytes = verdict.memory.map(|memory| memory.file_bytes),
        shmem_bytes = verdict.memory.map(|memory| memory.shmem_bytes),
        group = verdict.group.as_str(),
        confidence = verdict.confidence.as_str(),
        missing = missing.join(","),
        latency_ms = verdict.moment.age(Instant::now()).as_secs_f64() * 1000.0,
        "OOM kill"
    );
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
