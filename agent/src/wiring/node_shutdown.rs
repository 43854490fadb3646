//! Connects the graceful node shutdown (KEP-2000) to logind and the sync loop.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::Feature;
use crate::config::Settings;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pod;
use crate::model::named;
use crate::model::pod_ref;
use crate::node::shutdown::Group;
use crate::node::shutdown::Logind;
use crate::node::shutdown::PodTerminator;
use crate::node::shutdown::Shutdown;
use crate::node::shutdown::StateFile;
use crate::node::shutdown::groups;
use crate::recorder::Recorder;
use crate::status::Statuses;
use crate::status::TerminationReason;
use crate::sync::KillRequest;
use crate::sync::SharedPods;
use crate::workers::state::KillOptions;

const REASON: &str = "Terminated";
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";

/// Services of the graceful shutdown.
pub(super) struct Parts<'a> {
    /// The configuration.
    pub settings: &'a Settings,
    /// Desired pods.
    pub pods: SharedPods,
    /// Their statuses.
    pub statuses: Statuses,
    /// Events of the node.
    pub recorder: Recorder,
    /// Times of the last shutdown.
    pub metrics: Arc<Metrics>,
    /// Requests to terminate pods.
    pub kills: mpsc::Sender<KillRequest>,
    /// Set while the machine shuts down.
    pub down: watch::Sender<bool>,
}

/// Starts waiting for shutdowns, if grace periods for it are configured.
pub(super) fn start(parts: Parts<'_>, tasks: &mut JoinSet<()>, shutdown: CancellationToken) {
    let groups = configured(parts.settings);
    if groups.is_empty() {
        return;
    }
    let by_priority = parts.settings.gates.enabled(Feature::GracefulNodeShutdownBasedOnPodPriority);
    let graceful = Shutdown {
        groups,
        pods: ShutdownPodTerminator { pods: parts.pods, statuses: parts.statuses, kills: parts.kills },
        down: parts.down,
        state_file: by_priority.then(|| StateFile::new(&parts.settings.flags.root_dir)),
        recorder: parts.recorder,
        metrics: parts.metrics,
        clock: Clock::System,
    };
    tasks.spawn(named("graceful node shutdown", graceful.run(Logind::connect, shutdown)));
}

fn configured(settings: &Settings) -> Vec<Group> {
    if !settings.gates.enabled(Feature::GracefulNodeShutdown) {
        return Vec::new();
    }
    let kubelet = &settings.kubelet;
    let by_priority = kubelet.shutdown_grace_period_by_pod_priority.iter();
    let by_priority: Vec<(i32, i64)> =
        by_priority.map(|group| (group.priority, group.shutdown_grace_period_seconds)).collect();
    groups(kubelet.shutdown_grace_period.std(), kubelet.shutdown_grace_period_critical_pods.std(), &by_priority)
}

/// Terminates pods through the sync loop.
struct ShutdownPodTerminator {
    pods: SharedPods,
    statuses: Statuses,
    kills: mpsc::Sender<KillRequest>,
}

impl PodTerminator for ShutdownPodTerminator {
    fn pods(&self) -> Vec<Pod> {
        let is_over = |pod: &Pod| {
            let status = self.statuses.stored(&pod_ref(pod).uid);
            status.is_some_and(|stored| stored.is_finished)
        };
        self.pods.all().into_iter().filter(|pod| !is_over(pod)).collect()
    }

    async fn terminate(&self, pod: &Pod, grace: i64) -> CancellationToken {
        let finished = CancellationToken::new();
        let ending =
            TerminationReason { reason: REASON, message: MESSAGE.to_owned(), disruption: Some(MESSAGE.to_owned()) };
        let options = KillOptions {
            grace: Some(grace),
            termination_reason: Some(Arc::new(ending)),
            finished: Some(finished.clone()),
            ..KillOptions::default()
        };
        let request = KillRequest { uid: pod_ref(pod).uid, options };
        if self.kills.send(request).await.is_err() {
            // The sync loop has ended: nothing to wait for.
            finished.cancel();
        }
        finished
    }
}
