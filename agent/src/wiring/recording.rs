//! The event recorder, and the events of the agent's own start.

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::observers::Observers;
use crate::config::Settings;
use crate::model::Clock;
use crate::model::named;
use crate::pacing::EventDeferral;
use crate::recorder::Deferral;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::volumes::Volumes;
use crate::workers::generate::dns;

const CGROUP_V1: &str = "cgroup v1 detected. cgroup v1 support is deprecated and will be removed in a future release. \
    Please migrate to cgroup v2. More information at \
    https://git.k8s.io/enhancements/keps/sig-node/5573-remove-cgroup-v1";

const ON_DISK: &str = "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) \
    might be swapped to disk and should no longer be considered secure.";

/// Time for the last event of an agent that cannot start.
const LAST_EVENT: Duration = Duration::from_secs(2);

/// The node's recorder and the delivery of its events.
#[derive(Clone)]
pub(super) struct Recording {
    /// Records events.
    pub recorder: Recorder,
    /// Cancelled when the delivery has ended.
    over: CancellationToken,
}

impl Deferral for EventDeferral {
    fn ready(&self, age: Duration) -> impl Future<Output = ()> + Send {
        EventDeferral::ready(self, age)
    }
}

/// A recorder for this node. Events are sent to the API server through `client`, or logged without one.
pub(super) fn start(
    node: &str,
    client: Option<kube::Client>,
    deferral: &EventDeferral,
    observers: &Arc<Observers>,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> Recording {
    let over = CancellationToken::new();
    let Some(client) = client else {
        over.cancel();
        return Recording { recorder: Recorder::logging(node), over };
    };
    let (recorder, queue) = Recorder::delivering(node, Clock::System, observers.clone());
    let (delivery, ended) = (queue.deliver(client, deferral.clone(), shutdown.clone()), over.clone().drop_guard());
    let delivering = async move {
        delivery.await;
        drop(ended);
    };
    tasks.spawn(named("delivery of events", delivering));
    Recording { recorder, over }
}

impl Recording {
    /// Records why the agent cannot start, cancels `shutdown`, and waits up to 2 s for the event to be sent.
    pub(super) async fn setup_failed(&self, error: &anyhow::Error, shutdown: &CancellationToken) {
        self.recorder.node_event(EventType::Warning, "KubeletSetupFailed", &format!("{error:#}"));
        shutdown.cancel();
        // The agent ends in any case.
        let _ = tokio::time::timeout(LAST_EVENT, self.over.cancelled()).await;
    }
}

/// Records the start of the agent, and warnings about the node.
pub(super) fn announce(recorder: &Recorder, settings: &Settings, cgroup_version: i64) {
    recorder.node_event(EventType::Normal, "Starting", "Starting kubelet.");
    let kubelet = &settings.kubelet;
    if let Some(problem) = resolver_problem(&kubelet.resolv_conf, !kubelet.cluster_domain.is_empty()) {
        recorder.node_event(EventType::Warning, "CheckLimitsForResolvConf", &problem);
    }
    if cgroup_version == 1 {
        recorder.node_event(EventType::Warning, "CgroupV1", CGROUP_V1);
    }
}

/// Records a warning if volumes in memory may be swapped to disk. Blocking.
pub(super) fn announce_volumes(recorder: &Recorder, volumes: &Volumes) {
    match volumes.memory_may_be_swapped() {
        Ok(false) => {}
        Ok(true) => recorder.node_event(EventType::Warning, "PossibleMemoryBackedVolumesOnDisk", ON_DISK),
        Err(error) => tracing::debug!(%error, "cannot determine whether volumes in memory may be swapped"),
    }
}

/// The limits of the resolver that the node's resolver file exceeds, or why it cannot be read.
fn resolver_problem(path: &str, has_cluster_domain: bool) -> Option<String> {
    if path.is_empty() {
        return None;
    }
    match std::fs::read(path) {
        Ok(bytes) => dns::exceeded_limit(&String::from_utf8_lossy(&bytes), path, has_cluster_domain),
        Err(error) => {
            // As Go shows it: without its number.
            let reason = error.raw_os_error().map(|number| Errno::from_raw(number).desc().to_lowercase());
            Some(format!("open {path}: {}", reason.unwrap_or_else(|| error.to_string())))
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::metrics::Metrics;
    use crate::pacing::Pacing;
    use crate::pacing::PacingPolicy;

    fn no_deferral() -> EventDeferral {
        Pacing::new(PacingPolicy::default(), 1).events
    }

    #[tokio::test]
    async fn a_failed_start_is_recorded_before_the_exit() {
        let (sender, mut recorded) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect().await.map_err(std::io::Error::other)?.to_bytes();
                sender.send(String::from_utf8_lossy(&body).into_owned()).map_err(std::io::Error::other)?;
                let answer = http::Response::builder().status(201);
                answer.body(kube::client::Body::from(body.to_vec())).map_err(std::io::Error::other)
            }
        });
        let (client, shutdown) = (kube::Client::new(service, "default"), CancellationToken::new());
        let (observers, mut tasks) = (Arc::new(Observers(Metrics::new())), JoinSet::new());
        let recording = start("n", Some(client), &no_deferral(), &observers, &mut tasks, &shutdown);
        let error = anyhow::anyhow!("no such controller").context("making the cgroups of pods");
        recording.setup_failed(&error, &shutdown).await;
        assert!(shutdown.is_cancelled() && tasks.len() == 1, "the caller watches {} tasks", tasks.len());
        let event: serde_json::Value = serde_json::from_str(&recorded.try_recv().expect("an event")).expect("JSON");
        assert_eq!((&event["type"], &event["reason"]), (&"Warning".into(), &"KubeletSetupFailed".into()));
        assert_eq!(event["message"], "making the cgroups of pods: no such controller");
    }

    #[test]
    fn a_resolver_file_that_cannot_be_read_is_a_problem() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("resolv.conf").to_string_lossy().into_owned();
        assert_eq!(resolver_problem(&path, true), Some(format!("open {path}: no such file or directory")));
        std::fs::write(&path, "nameserver 192.0.2.1\n").expect("written");
        assert_eq!(resolver_problem(&path, true), None);
        assert_eq!(resolver_problem("", true), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_standalone_agent_waits_for_no_delivery() {
        let shutdown = CancellationToken::new();
        let (observers, mut tasks) = (Arc::new(Observers(Metrics::new())), JoinSet::new());
        let recording = start("n", None, &no_deferral(), &observers, &mut tasks, &shutdown);
        let began = tokio::time::Instant::now();
        recording.setup_failed(&anyhow::anyhow!("no"), &shutdown).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
