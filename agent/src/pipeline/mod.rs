//! The pod pipeline: joins pod sources, PLEG, sync loop, pod workers and the status manager. The agent and every test of
//! the whole agent build it here; they differ in the [`Services`] they bring and in what feeds it.
//!
//! ```text
//!  Desired (sources) ─────┐                   ┌─▶ runtime · images · volumes · cgroups
//!                         ├─▶ sync ─▶ workers ┤
//!  Observation ─▶ PLEG ───┘                   └─▶ statuses ─▶ status manager ─▶ API server
//! ```
//!
//! Only joins, and decides nothing: whatever differs between nodes is a field of [`Services`].

mod dead_containers;
mod devices;
mod garbage;
mod housekeeping;
mod observation;
mod probed_pods;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use garbage::NodeGarbage;
pub use observation::Observation;
pub use observation::observe;

use crate::admission::NodeOffer;
use crate::allocation::Allocations;
use crate::allocation::ResizePolicy;
use crate::cgroups::Cgroups;
use crate::eviction::Journal;
use crate::images::GcPolicy;
use crate::images::ImageGc;
use crate::images::Images;
use crate::images::PullLimits;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::DeadContainerPolicy;
use crate::model::PodUpdate;
use crate::model::Pressures;
use crate::model::named;
use crate::model::restart::RestartGates;
use crate::model::until;
use crate::objects::Objects;
use crate::pacing::Pacing;
use crate::pacing::PacingPolicy;
use crate::pleg::PlegHandle;
use crate::probes::ProbeResultStore;
use crate::probes::Prober;
use crate::recorder::Recorder;
use crate::retry::RetryTracker;
use crate::runtime::Runtime;
use crate::runtime::RuntimeState;
use crate::sources::SourcesHandle;
use crate::startup::Startups;
use crate::status::NodeAddresses;
use crate::status::Statuses;
use crate::status::manager::PodApi;
use crate::status::manager::StatusManager;
use crate::sync::EvictionSender;
use crate::sync::KILL_CAPACITY;
use crate::sync::KillRequest;
use crate::sync::Mirrors;
use crate::sync::PendingResizes;
use crate::sync::PodAdmission;
use crate::sync::ReadNode;
use crate::sync::SharedPods;
use crate::sync::SyncLoop;
use crate::sync::SyncRequests;
use crate::user_namespaces::UserNamespaces;
use crate::volumes::Volumes;
use crate::workers::act::ActContext;
use crate::workers::act::ActServices;
use crate::workers::act::NodeFiles;
use crate::workers::act::gc::DeadContainers;
use crate::workers::backoff;
use crate::workers::generate::NodeSettings;
use crate::workers::pod_workers::PodWorkers;
use crate::workers::registry::WorkerRegistry;
use crate::workers::static_pod_start_queue::StaticPodStartQueue;
use crate::workers::worker::NoWorkerObserver;
use crate::workers::worker::WorkerContext;
use crate::workers::worker::WorkerObserver;
use dead_containers::DeadContainerLimits;
use devices::DeviceRelease;
use housekeeping::OrphanCleanup;

/// What the pipeline works with. [`Services::new`] is a standalone node with the defaults of a kubelet; every field can
/// be replaced.
pub struct Services {
    /// The container runtime.
    pub runtime: Runtime,
    /// Its state, followed by [`crate::runtime::watch_runtime`].
    pub state: watch::Receiver<RuntimeState>,
    /// Its name, the part of container ids before `://`.
    pub runtime_name: String,
    /// Images and the limits on pulling them.
    pub images: Images,
    /// When unused images are removed; by default only for the eviction manager.
    pub image_gc: GcPolicy,
    /// Limits on dead containers.
    pub dead_containers: DeadContainerPolicy,
    /// API objects that pods refer to.
    pub objects: Objects,
    /// Pods' directories and volumes.
    pub volumes: Volumes,
    /// Ranges of ids of pods with a user namespace of their own; none by default, so that such pods fail.
    pub user_namespaces: UserNamespaces,
    /// The cgroup tree; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<Cgroups>,
    /// The node's settings for sandboxes and containers.
    pub node: NodeSettings,
    /// What is allocated to pods, and what was applied.
    pub allocations: Allocations,
    /// Resizes that this node can never perform.
    pub resize_policy: ResizePolicy,
    /// Files of the node.
    pub files: NodeFiles,
    /// Addresses of the node, none while unknown.
    pub addresses: watch::Receiver<NodeAddresses>,
    /// The API server's pods; `None` when standalone.
    pub api: Option<Arc<dyn PodApi>>,
    /// The own Node object, the owner of mirror pods; `None` for no mirror pods.
    pub mirrors_of: Option<watch::Receiver<Option<Arc<Node>>>>,
    /// Desired pods, shared with readers.
    pub pods: SharedPods,
    /// True while the machine shuts down: new pods are rejected.
    pub closed: watch::Receiver<bool>,
    /// Resources of the node under pressure: some new pods are rejected.
    pub pressures: watch::Receiver<Pressures>,
    /// Events.
    pub recorder: Recorder,
    /// Metrics of volumes, images, cgroups and the status manager.
    pub metrics: Arc<Metrics>,
    /// Metrics of workers.
    pub observer: Arc<dyn WorkerObserver>,
    /// Durations of pod starts.
    pub startups: Startups,
    /// Permits and priorities.
    pub pacing: Pacing,
    /// What the node offers to pods.
    pub offer: watch::Receiver<NodeOffer>,
    /// Reads the own Node for admission; `None` without an API server.
    pub read_node: Option<ReadNode>,
    /// Evictions and preemptions that are not finished.
    pub journal: Journal,
    /// Time.
    pub clock: Clock,
    /// Feature gates of restarts.
    pub restarts: RestartGates,
    /// Longest crash-loop back-off.
    pub max_backoff: Duration,
    /// `syncFrequency`.
    pub sync_frequency: Duration,
}

/// Desired pods as their sources report them.
pub struct Desired {
    /// Changes.
    pub updates: mpsc::Receiver<PodUpdate>,
    /// Which sources have reported.
    pub sources: SourcesHandle,
}

/// A pipeline that runs.
#[derive(Clone)]
pub struct Running {
    /// Statuses of pods.
    pub statuses: Statuses,
    /// The pod cache.
    pub pleg: PlegHandle,
    /// Pods that have a worker.
    pub registry: WorkerRegistry,
    /// Their volumes.
    pub volumes: Volumes,
    /// The API objects that they refer to.
    pub objects: Objects,
    /// Requests to terminate a pod.
    pub kills: mpsc::Sender<KillRequest>,
    /// Where a prober publishes its results.
    pub probes: ProbeResultStore,
    /// Evictions and preemptions that are not finished.
    pub journal: Journal,
}

impl Running {
    /// Sends eviction requests to the pods' workers.
    pub fn evictions(&self) -> EvictionSender {
        EvictionSender::new(self.kills.clone())
    }
}

/// What a pipeline runs with beside the sync loop.
pub struct Started<F> {
    /// Handles for readers.
    pub running: Running,
    /// What can be removed from the node without terminating a pod.
    pub garbage: NodeGarbage,
    /// The sync loop, to be awaited until it ends.
    pub sync: F,
}

impl Services {
    /// A standalone node with its files below `root`, without cgroups and limits on pulls, on which any pods fit. Reads the
    /// record of evictions there.
    pub fn new(runtime: Runtime, state: watch::Receiver<RuntimeState>, root: &Path, metrics: Arc<Metrics>) -> Self {
        let limits = PullLimits { parallel: None, per_second: 0, burst: 0 };
        Self {
            images: Images::new(runtime.clone(), limits),
            image_gc: GcPolicy::default(),
            dead_containers: DeadContainerPolicy::default(),
            runtime,
            state,
            runtime_name: "containerd".to_owned(),
            objects: Objects::standalone(),
            volumes: Volumes::new(root),
            user_namespaces: UserNamespaces::default(),
            cgroups: None,
            node: NodeSettings::default(),
            allocations: Allocations::default(),
            resize_policy: ResizePolicy::default(),
            files: NodeFiles::default(),
            addresses: watch::channel(NodeAddresses::default()).1,
            api: None,
            mirrors_of: None,
            pods: SharedPods::default(),
            closed: watch::channel(false).1,
            pressures: watch::channel(Pressures::default()).1,
            recorder: Recorder::default(),
            metrics,
            observer: Arc::new(NoWorkerObserver),
            startups: Startups::default(),
            pacing: Pacing::for_this_machine(PacingPolicy::default()),
            offer: watch::channel(NodeOffer::unlimited()).1,
            read_node: None,
            journal: Journal::open(root),
            clock: Clock::System,
            restarts: RestartGates::default(),
            max_backoff: backoff::DEFAULT_MAX,
            sync_frequency: Duration::from_secs(60),
        }
    }

    /// Joins everything. Tasks beside the sync loop are spawned into `tasks` and end when `shutdown` is
    /// cancelled; the loop is to be awaited until it ends, and stops where it is when dropped. Containers stay as they
    /// are either way.
    pub fn start(
        self,
        desired: Desired,
        pleg: PlegHandle,
        tasks: &mut JoinSet<()>,
        shutdown: CancellationToken,
    ) -> Started<impl Future<Output = ()> + use<>> {
        let (kills, kills_receiver) = mpsc::channel(KILL_CAPACITY);
        let running = Running {
            statuses: self.statuses(tasks, &shutdown),
            pleg,
            registry: WorkerRegistry::default(),
            volumes: self.volumes.clone(),
            objects: self.objects.clone(),
            kills,
            probes: ProbeResultStore::default(),
            journal: self.journal.clone(),
        };
        let (mirrors, admission) = (self.mirrors(), self.admission(running.evictions()));
        let (pods, clock, recorder, startups) =
            (self.pods.clone(), self.clock, self.recorder.clone(), self.startups.clone());
        let (closed, pressures) = (self.closed.clone(), self.pressures.clone());
        let requests = SyncRequests { kills: kills_receiver, closed, pressures };
        let (image_gc, metrics) = (self.image_gc, self.metrics.clone());
        let (allocations, resizes) = (self.allocations.clone(), PendingResizes::new(self.resize_policy));
        let prober = probed_pods::prober(&self, &running);
        tasks.spawn(named("prober", prober.clone().run(shutdown.clone())));
        let context = Arc::new(self.worker_context(&running, prober, tasks));
        let images = ImageGc::new(context.act.images.clone(), image_gc, recorder.clone(), metrics.clone());
        let garbage = collect_garbage(&context, images, &running.registry, &pods, tasks, &shutdown);
        let (sweep_again, leftovers_due) = mpsc::channel(1);
        let sync = SyncLoop {
            leftovers: Arc::new(OrphanCleanup::new(
                context.clone(),
                pods.clone(),
                running.registry.clone(),
                sweep_again,
            )),
            leftovers_due,
            workers: PodWorkers::new(context, running.registry.clone()),
            admission,
            allocations,
            resizes,
            metrics,
            pods,
            pleg: running.pleg.clone(),
            sources: desired.sources,
            statuses: running.statuses.clone(),
            probes: running.probes.clone(),
            clock,
            recorder,
            mirrors,
            requests,
            startups,
            housekeeping: None,
            undecodable: HashSet::new(),
        };
        Started { running, garbage, sync: sync.run(desired.updates, shutdown) }
    }

    /// The statuses; the manager that sends them if there is an API server.
    fn statuses(&self, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) -> Statuses {
        let statuses = Statuses::new(self.runtime_name.clone(), self.addresses.clone(), self.restarts);
        let Some(api) = &self.api else { return statuses };
        let statuses = statuses.with_api(Arc::new(self.pods.clone()));
        if let Some(api_view) = statuses.api_view() {
            let manager = StatusManager {
                statuses: statuses.clone(),
                api_view,
                api: api.clone(),
                first_status: self.pacing.first_status.clone(),
                clock: self.clock,
                metrics: self.metrics.clone(),
                retries: RetryTracker::new(self.recorder.clone(), Some(self.metrics.clone())),
            };
            tasks.spawn(named("status manager", manager.run(shutdown.clone())));
        }
        statuses
    }

    /// Mirror pods, if the API server is to have them.
    fn mirrors(&self) -> Mirrors {
        match (&self.api, &self.mirrors_of) {
            (Some(api), Some(node)) => {
                let retries = RetryTracker::new(self.recorder.clone(), Some(self.metrics.clone()));
                Mirrors::new(api.clone(), node.clone(), retries)
            }
            _ => Mirrors::none(),
        }
    }

    /// The admission of pods, which may preempt others.
    fn admission(&self, evictions: EvictionSender) -> PodAdmission {
        let record = self.journal.record_of_preemptions(self.clock);
        PodAdmission::new(self.offer.clone(), evictions, self.read_node.clone(), record)
    }

    /// What all pod workers share.
    fn worker_context(self, running: &Running, prober: Prober, tasks: &mut JoinSet<()>) -> WorkerContext {
        let network = network_of(self.state.clone(), tasks);
        let mut act = ActContext::new(ActServices {
            runtime: self.runtime,
            images: self.images,
            volumes: self.volumes,
            cgroups: self.cgroups,
            settings: self.node,
            files: self.files,
            network,
            recorder: self.recorder.clone(),
            clock: self.clock,
            pacing: self.pacing,
        })
        .with_objects(self.objects)
        .with_user_namespaces(self.user_namespaces);
        act.startups = self.startups;
        act.exits = Some(running.pleg.clone());
        act.allocations = self.allocations;
        act.dead_containers = DeadContainers::new(self.dead_containers);
        let metrics = self.metrics.clone();
        act.metrics = Some(self.metrics);
        WorkerContext {
            pleg: running.pleg.clone(),
            act,
            statuses: running.statuses.clone(),
            probes: running.probes.clone(),
            prober,
            static_pod_starts: StaticPodStartQueue::default(),
            retries: RetryTracker::new(self.recorder.clone(), Some(metrics)),
            clock: self.clock,
            recorder: self.recorder,
            runtime: self.state,
            gates: self.restarts,
            max_backoff: self.max_backoff,
            sync_frequency: self.sync_frequency,
            observer: self.observer,
            shutdown: CancellationToken::new(),
        }
    }
}

/// Collects garbage in `tasks`: unused images, devices of volumes, dead containers. Returns what the eviction manager may
/// remove beside that.
fn collect_garbage(
    context: &Arc<WorkerContext>,
    images: ImageGc,
    registry: &WorkerRegistry,
    pods: &SharedPods,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> NodeGarbage {
    let images = Arc::new(images);
    let garbage = NodeGarbage::new(context.clone(), registry.clone(), images.clone());
    let collecting = async move { images.run().await };
    tasks.spawn(named("image garbage collection", until(shutdown.clone(), collecting)));
    let devices = DeviceRelease::new(context.act.volumes.clone(), context.retries.clone());
    tasks.spawn(named("release of devices", until(shutdown.clone(), devices.run())));
    if let Some(limits) = DeadContainerLimits::new(context.clone(), registry.clone(), pods.clone()) {
        tasks.spawn(named("limits on dead containers", until(shutdown.clone(), limits.run())));
    }
    garbage
}

/// Why the runtime's network is not ready, which concerns pods with a network of their own.
fn network_of(mut state: watch::Receiver<RuntimeState>, tasks: &mut JoinSet<()>) -> watch::Receiver<Option<String>> {
    let error = |state: &RuntimeState| state.network_error().map(str::to_owned);
    let (sender, network) = watch::channel(error(&state.borrow()));
    let following = async move {
        while state.changed().await.is_ok() {
            let now = error(&state.borrow_and_update());
            sender.send_if_modified(|known| std::mem::replace(known, now.clone()) != now);
        }
    };
    tasks.spawn(named("state of the network", following));
    network
}
