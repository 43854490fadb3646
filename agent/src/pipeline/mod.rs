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
mod services;

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use garbage::NodeGarbage;
pub use observation::Observation;
pub use observation::observe;
pub use services::AdmissionInputs;
pub use services::ClusterServices;
pub use services::Monitoring;
pub use services::NodeServices;
pub use services::PodRecords;
pub use services::Policies;
pub use services::RuntimeServices;
pub use services::Services;

use crate::eviction::Journal;
use crate::images::ImageGc;
use crate::model::PodUpdate;
use crate::model::named;
use crate::model::until;
use crate::objects::Objects;
use crate::pleg::PlegHandle;
use crate::probes::ProbeResultStore;
use crate::probes::Prober;
use crate::runtime::RuntimeState;
use crate::sources::SourcesHandle;
use crate::status::Statuses;
use crate::status::manager::StatusManager;
use crate::sync::EvictionSender;
use crate::sync::Housekeeping;
use crate::sync::KILL_CAPACITY;
use crate::sync::KillRequest;
use crate::sync::Mirrors;
use crate::sync::PendingResizes;
use crate::sync::PodAdmission;
use crate::sync::SharedPods;
use crate::sync::SyncLoop;
use crate::sync::SyncRequests;
use crate::volumes::Volumes;
use crate::workers::act::ActContext;
use crate::workers::act::ActServices;
use crate::workers::act::gc::DeadContainers;
use crate::workers::pod_workers::PodWorkers;
use crate::workers::registry::WorkerRegistry;
use crate::workers::static_pod_start_queue::StaticPodStartQueue;
use crate::workers::worker::WorkerContext;
use dead_containers::DeadContainerLimits;
use devices::DeviceRelease;
use housekeeping::OrphanCleanup;

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
            volumes: self.node.volumes.clone(),
            objects: self.cluster.objects.clone(),
            kills,
            probes: ProbeResultStore::default(),
            journal: self.pods.journal.clone(),
        };
        let mirrors = mirrors(&self.cluster, &self.monitoring);
        let record = self.pods.journal.record_of_preemptions(self.clock);
        let AdmissionInputs { offer, read_node, closed, pressures } = self.admission.clone();
        // It may preempt other pods.
        let admission = PodAdmission::new(offer, running.evictions(), read_node, record);
        let requests = SyncRequests { kills: kills_receiver, closed, pressures };
        let PodRecords { desired: pods, allocations, .. } = self.pods.clone();
        let Monitoring { recorder, metrics, startups, .. } = self.monitoring.clone();
        let (clock, image_gc, resizes) = (self.clock, self.policies.image_gc, self.policies.resizes);
        let prober = probed_pods::prober(&self.runtime.client, &self.monitoring, clock, &running);
        tasks.spawn(named("prober", prober.clone().run(shutdown.clone())));
        let context = Arc::new(self.worker_context(&running, prober, tasks));
        let images = ImageGc::new(context.act.images.clone(), image_gc, recorder.clone(), metrics.clone());
        let garbage = collect_garbage(&context, images, &running.registry, &pods, tasks, &shutdown);
        let (sweep_again, leftovers_due) = mpsc::channel(1);
        let leftovers = OrphanCleanup::new(context.clone(), pods.clone(), running.registry.clone(), sweep_again);
        let sync = SyncLoop {
            housekeeping: Housekeeping::new(Arc::new(leftovers), leftovers_due),
            workers: PodWorkers::new(context, running.registry.clone()),
            admission,
            allocations,
            resizes: PendingResizes::new(resizes),
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
        };
        Started { running, garbage, sync: sync.run(desired.updates, shutdown) }
    }

    /// The statuses; the manager that sends them if there is an API server.
    fn statuses(&self, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) -> Statuses {
        let (name, addresses) = (self.runtime.name.clone(), self.node.addresses.clone());
        let statuses = Statuses::new(name, addresses, self.policies.restarts);
        let Some(api) = &self.cluster.pods else { return statuses };
        let statuses = statuses.with_api(Arc::new(self.pods.desired.clone()));
        if let Some(api_view) = statuses.api_view() {
            let manager = StatusManager {
                statuses: statuses.clone(),
                api_view,
                api: api.clone(),
                first_status: self.pacing.first_status.clone(),
                clock: self.clock,
                metrics: self.monitoring.metrics.clone(),
                retries: self.monitoring.retries(),
            };
            tasks.spawn(named("status manager", manager.run(shutdown.clone())));
        }
        statuses
    }

    /// What all pod workers share.
    fn worker_context(self, running: &Running, prober: Prober, tasks: &mut JoinSet<()>) -> WorkerContext {
        let Self { runtime, node, cluster, pods, monitoring, policies, pacing, clock, .. } = self;
        let (network, retries) = (network_of(runtime.state.clone(), tasks), monitoring.retries());
        let mut act = ActContext::new(ActServices {
            runtime: runtime.client,
            images: runtime.images,
            volumes: node.volumes,
            cgroups: node.cgroups,
            settings: node.settings,
            files: node.files,
            network,
            recorder: monitoring.recorder.clone(),
            clock,
            pacing,
        })
        .with_objects(cluster.objects)
        .with_user_namespaces(node.user_namespaces);
        act.startups = monitoring.startups;
        act.exits = Some(running.pleg.clone());
        act.allocations = pods.allocations;
        act.dead_containers = DeadContainers::new(policies.dead_containers);
        act.metrics = Some(monitoring.metrics);
        WorkerContext {
            pleg: running.pleg.clone(),
            act,
            statuses: running.statuses.clone(),
            probes: running.probes.clone(),
            prober,
            static_pod_starts: StaticPodStartQueue::default(),
            retries,
            clock,
            recorder: monitoring.recorder,
            runtime: runtime.state,
            gates: policies.restarts,
            max_backoff: policies.max_backoff,
            sync_frequency: policies.sync_frequency,
            observer: monitoring.workers,
            shutdown: CancellationToken::new(),
        }
    }
}

/// Mirror pods, if the API server is to have them.
fn mirrors(cluster: &ClusterServices, monitoring: &Monitoring) -> Mirrors {
    match (&cluster.pods, &cluster.mirrors_of) {
        (Some(api), Some(node)) => Mirrors::new(api.clone(), node.clone(), monitoring.retries()),
        _ => Mirrors::none(),
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
