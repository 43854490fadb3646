//! The whole agent on a simulated node: sensors, PLEG, sync loop, workers, joined as the wiring joins them. Desired
//! pods come from the test instead of a folder.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keblet::admission::NodeOffer;
use keblet::images::{Images, PullLimits};
use keblet::metrics::Metrics;
use keblet::model::restart::RestartGates;
use keblet::model::{Clock, ConfigSource, Pod, PodUid, PodUpdate};
use keblet::pacing::{FirstStatusHold, Pacing, PacingPolicy};
use keblet::recorder::Recorder;
use keblet::retry::RetryTracker;
use keblet::runtime::{Runtime, RuntimeOptions, RuntimeState, watch_runtime};
use keblet::sources::{self, SourcesConfig};
use keblet::status::manager::StatusManager;
use keblet::status::{NodeAddresses, Statuses, TerminationReason};
use keblet::sync::{KillRequest, Leftovers, Mirrors, PodAdmission, SharedPods, SyncLoop, SyncRequests};
use keblet::volumes::Volumes;
use keblet::wiring::Observers;
use keblet::workers::act::{ActContext, NodeFiles};
use keblet::workers::backoff;
use keblet::workers::generate::NodeSettings;
use keblet::workers::pod_workers::PodWorkers;
use keblet::workers::state::KillOptions;
use keblet::workers::static_pod_start_queue::StaticPodStartQueue;
use keblet::workers::worker::{NoWorkerObserver, WorkerContext, WorkerObserver};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::api::Api;
use super::pleg_harness::{PlegHarness, SensorSet, clock};
use super::seen::Seen;
use crate::cri::SimRuntime;

/// Updates that may wait for the sync loop.
const UPDATES: usize = 64;

/// One agent. Dropping it is like SIGKILL: whatever it was doing stops where it was.
pub struct Agent {
    /// Its sensors and PLEG.
    pub harness: PlegHarness,
    /// The statuses it publishes.
    pub statuses: Statuses,
    updates: mpsc::Sender<PodUpdate>,
    kills: mpsc::Sender<KillRequest>,
    closed: watch::Sender<bool>,
    tasks: JoinSet<()>,
    ending: CancellationToken,
    _aside: DropGuard,
}

/// Who hears what the agent does.
struct Listeners {
    seen: Seen,
    observer: Arc<dyn WorkerObserver>,
    recorder: Recorder,
    api: Option<Api>,
}

impl Default for Listeners {
    fn default() -> Self {
        let (observer, recorder) = (Arc::new(NoWorkerObserver), Recorder::default());
        Self { seen: Seen::default(), observer, recorder, api: None }
    }
}

impl Agent {
    /// Starts an agent that keeps its files below `root` and wants these pods.
    pub fn start(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>) -> Self {
        Self::start_seeing(sim, sensors, root, pods, Seen::default())
    }

    /// As [`Agent::start`], with what it sees written to `seen`.
    pub fn start_seeing(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>, seen: Seen) -> Self {
        Self::begin(sim, sensors, root, pods, Listeners { seen, ..Listeners::default() })
    }

    /// As [`Agent::start`], with its events told to `recorder`.
    pub fn start_telling(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
        recorder: Recorder,
    ) -> Self {
        Self::begin(sim, sensors, root, pods, Listeners { recorder, ..Listeners::default() })
    }

    /// As [`Agent::start`], with statuses and final deletions sent to `api`.
    pub fn start_in_cluster(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>, api: &Api) -> Self {
        Self::begin(sim, sensors, root, pods, Listeners { api: Some(api.clone()), ..Listeners::default() })
    }

    /// As [`Agent::start_in_cluster`], with what it sees written to `seen`.
    pub fn start_seeing_in_cluster(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
        seen: Seen,
        api: &Api,
    ) -> Self {
        Self::begin(sim, sensors, root, pods, Listeners { seen, api: Some(api.clone()), ..Listeners::default() })
    }

    /// As [`Agent::start`], with what its workers do counted as the real agent counts it.
    pub fn start_counting(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>) -> (Self, Arc<Metrics>) {
        let metrics = Metrics::new();
        let listeners = Listeners { observer: Arc::new(Observers(metrics.clone())), ..Listeners::default() };
        (Self::begin(sim, sensors, root, pods, listeners), metrics)
    }

    fn begin(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>, listeners: Listeners) -> Self {
        let Listeners { seen, observer, recorder, api } = listeners;
        let runtime = super::pleg_harness::runtime(sim, RuntimeOptions::default());
        let harness = PlegHarness::open_on(sim, sensors, &runtime, seen);
        let (aside, ending) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        let (state_sender, state) = watch::channel(RuntimeState::Unknown);
        tasks.spawn(watch_runtime(runtime.clone(), state_sender, harness.board.subscribe(), aside.clone()));
        let gates = RestartGates::default();
        let shared = SharedPods::default();
        let pacing = Pacing::new(PacingPolicy::default(), 2);
        let mut statuses = Statuses::new("containerd".to_owned(), watch::channel(NodeAddresses::default()).1, gates);
        if let Some(api) = api {
            statuses = statuses.with_api(Arc::new(shared.clone()));
            tasks.spawn(tell(statuses.clone(), api, pacing.first_status.clone(), clock(sim), aside.clone()));
        }
        let context = Arc::new(WorkerContext {
            pleg: harness.pleg.clone(),
            act: act(sim, &runtime, root, state.clone(), (recorder.clone(), pacing), &mut tasks),
            statuses: statuses.clone(),
            static_pod_starts: StaticPodStartQueue::default(),
            clock: clock(sim),
            retries: RetryTracker::new(recorder.clone(), None),
            recorder: recorder.clone(),
            runtime: state,
            gates,
            max_backoff: backoff::DEFAULT_MAX,
            sync_frequency: Duration::from_secs(60),
            observer,
            shutdown: CancellationToken::new(),
        });
        let (_, sources) = sources::start(no_sources(), clock(sim), Recorder::default(), aside.clone());
        let (kills, kills_receiver) = mpsc::channel(UPDATES);
        let closed = watch::Sender::new(false);
        let (_, offer) = watch::channel(NodeOffer::default());
        let sync = SyncLoop {
            pods: shared,
            admission: PodAdmission::new(offer),
            workers: PodWorkers::new(context),
            pleg: harness.pleg.clone(),
            sources,
            statuses: statuses.clone(),
            clock: clock(sim),
            recorder,
            mirrors: Mirrors::none(),
            requests: SyncRequests { kills: kills_receiver, closed: closed.subscribe() },
            startups: keblet::startup::Startups::default(),
            leftovers: Arc::new(NothingLeft),
            housekeeping: None,
        };
        let (updates, receiver) = mpsc::channel(UPDATES);
        // The channel is empty: the first set is there before the loop begins.
        let _ = updates.try_send(PodUpdate::Add(ConfigSource::File, pods));
        tasks.spawn(sync.run(receiver, ending.clone()));
        Self { harness, statuses, updates, kills, closed, tasks, ending, _aside: aside.drop_guard() }
    }

    /// A pod becomes desired.
    pub async fn add(&self, pod: Pod) {
        self.send(PodUpdate::Add(ConfigSource::File, vec![pod])).await;
    }

    /// A desired pod changes, under the same UID.
    pub async fn update(&self, pod: Pod) {
        self.send(PodUpdate::Update(ConfigSource::File, vec![pod])).await;
    }

    /// A pod is no longer desired.
    pub async fn remove(&self, pod: Pod) {
        self.send(PodUpdate::Remove(ConfigSource::File, vec![pod])).await;
    }

    /// Ends a pod against its will, and waits until nothing of it is left.
    pub async fn kill(&self, uid: PodUid, grace: i64, ending: TerminationReason) {
        let finished = CancellationToken::new();
        let options = KillOptions {
            grace: Some(grace),
            termination_reason: Some(Arc::new(ending)),
            finished: Some(finished.clone()),
            ..KillOptions::default()
        };
        if self.kills.send(KillRequest { uid, options }).await.is_ok() {
            finished.cancelled().await;
        }
    }

    /// The machine goes down: no new pods.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Ends the agent as SIGTERM does; its containers stay.
    pub async fn shut_down(mut self) {
        self.ending.cancel();
        while self.tasks.join_next().await.is_some_and(|ended| ended.is_err()) {}
    }

    async fn send(&self, update: PodUpdate) {
        // A loop that has ended wants nothing any more.
        let _ = self.updates.send(update).await;
    }
}

/// Sends what is published to the API server.
async fn tell(statuses: Statuses, api: Api, first_status: FirstStatusHold, clock: Clock, shutdown: CancellationToken) {
    if let Some(api_view) = statuses.api_view() {
        let (api, metrics) = (Arc::new(api), Metrics::new());
        StatusManager { statuses, api_view, api, first_status, clock, metrics }.run(shutdown).await;
    }
}

fn act(
    sim: &SimRuntime,
    runtime: &Runtime,
    root: &Path,
    mut state: watch::Receiver<RuntimeState>,
    (recorder, pacing): (Recorder, Pacing),
    tasks: &mut JoinSet<()>,
) -> ActContext {
    let (network_sender, network) = watch::channel(Some("not asked yet".to_owned()));
    tasks.spawn(async move {
        loop {
            network_sender.send_replace(state.borrow_and_update().network_error().map(str::to_owned));
            if state.changed().await.is_err() {
                return;
            }
        }
    });
    let limits = PullLimits { parallel: None, per_second: 0, burst: 0 };
    ActContext::new(
        runtime.clone(),
        Images::new(runtime.clone(), limits),
        Volumes::new(root),
        None,
        NodeSettings { pod_logs_dir: root.join("logs"), ..NodeSettings::default() },
        NodeFiles { resolv_conf: None, hosts: root.join("hosts"), log_links: None },
        network,
        recorder,
        clock(sim),
        pacing,
    )
}

fn no_sources() -> SourcesConfig {
    SourcesConfig {
        static_pod_path: None,
        file_check_frequency: Duration::from_secs(20),
        static_pod_url: None,
        static_pod_url_headers: Vec::new(),
        http_check_frequency: Duration::from_secs(20),
        node_name: "sim".to_owned(),
        prevent_static_pod_api_references: false,
        api: None,
    }
}

/// Simulated pods leave no cgroups, and their directories go with the test's folder.
struct NothingLeft;

impl Leftovers for NothingLeft {
    fn sweep(&self, _keep: &HashSet<PodUid>) -> bool {
        true
    }
}
