//! The whole agent on a simulated node, with the real pipeline. Desired pods come from the test instead of a folder.

mod start;

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use keblet::admission::NodeOffer;
use keblet::allocation::Allocations;
use keblet::allocation::ResizeGates;
use keblet::allocation::ResizePolicy;
use keblet::apiserver::recovery::Recovered;
use keblet::cgroups::Cgroups;
use keblet::images::GcPolicy;
use keblet::metrics::Metrics;
use keblet::model::Clock;
use keblet::model::ConfigSource;
use keblet::model::DeadContainerPolicy;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::model::PodUpdate;
use keblet::model::Pressures;
use keblet::objects::Objects;
use keblet::oom::OomReporter;
use keblet::pacing::Pacing;
use keblet::pacing::PacingPolicy;
use keblet::pipeline::Desired;
use keblet::pipeline::NodeGarbage;
use keblet::pipeline::Running;
use keblet::pipeline::Services;
use keblet::pipeline::Started;
use keblet::probes::ProbeResultStore;
use keblet::recorder::Recorder;
use keblet::runtime::RuntimeOptions;
use keblet::runtime::RuntimeState;
use keblet::runtime::watch_runtime;
use keblet::sources;
use keblet::sources::ApiPods;
use keblet::sources::SourcesConfig;
use keblet::sources::adoption::Adoptions;
use keblet::startup::Startups;
use keblet::status::Statuses;
use keblet::status::TerminationReason;
use keblet::status::manager::PodApi;
use keblet::sync::EvictionSender;
use keblet::sync::KillRequest;
use keblet::sync::ReadNode;
use keblet::sync::SharedPods;
use keblet::user_namespaces::IdRange;
use keblet::user_namespaces::UserNamespaces;
use keblet::volumes::PodDirs;
use keblet::volumes::Volumes;
use keblet::workers::act::NodeFiles;
use keblet::workers::generate::HandlerFeatures;
use keblet::workers::generate::NodeSettings;
use keblet::workers::generate::ResourceSettings;
use keblet::workers::generate::SecuritySettings;
use keblet::workers::state::KillOptions;
use keblet::workers::worker::NoWorkerObserver;
use keblet::workers::worker::WorkerObserver;
use kube::client::Body;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;

use super::api::Api;
use super::pleg_harness::PlegHarness;
use super::pleg_harness::SensorSet;
use super::pleg_harness::clock;
use super::pleg_harness::clock_behind;
use super::seen::Seen;
use crate::cri::SimRuntime;

/// Capacity of the sync loop's update channel.
const UPDATES: usize = 64;

/// One agent. Dropping it stops all its tasks at once, as SIGKILL does.
pub struct Agent {
    /// Sensors and PLEG.
    pub harness: PlegHarness,
    /// Published statuses.
    pub statuses: Statuses,
    /// Results of probes, as a prober publishes them.
    pub probes: ProbeResultStore,
    /// Eviction requests.
    pub evictions: EvictionSender,
    /// What can be removed from the node without terminating a pod.
    pub garbage: NodeGarbage,
    /// Resources under pressure.
    pub pressures: watch::Sender<Pressures>,
    pub(super) clock: Clock,
    pub(super) desired: SharedPods,
    pub(super) running: Running,
    updates: mpsc::Sender<PodUpdate>,
    closed: watch::Sender<bool>,
    /// True while the sync loop must not begin yet.
    pub(super) preparing: watch::Sender<bool>,
    sync_loop: JoinSet<()>,
    pub(super) shutdown: CancellationToken,
    pub(super) tasks: JoinSet<()>,
    _delivered: mpsc::Receiver<PodUpdate>,
    _aside: DropGuard,
}

/// Receivers of the agent's reports.
struct Listeners {
    seen: Seen,
    observer: Arc<dyn WorkerObserver>,
    recorder: Recorder,
    metrics: Arc<Metrics>,
    api: Option<Api>,
    cgroups: Option<Cgroups>,
    resources: ResourceSettings,
    image_gc: GcPolicy,
    dead_containers: DeadContainerPolicy,
    offer: NodeOffer,
    read_node: Option<ReadNode>,
    /// The folder of static pods: the first set of pods is then the API server's.
    static_pods: Option<PathBuf>,
    /// Static pods that the runtime has already.
    adoptions: Adoptions,
    /// There is an API server, which never answers.
    unreachable_api: bool,
    /// Static pods have mirror pods.
    mirrors: bool,
    resizes: ResizePolicy,
    /// Volumes of pods, which get ranges of ids then.
    volumes: Option<Volumes>,
    /// API objects that pods refer to.
    objects: Objects,
    /// Of the pipeline.
    counted: Arc<Metrics>,
    /// How much the clock of the workers is behind the runtime's.
    behind: Duration,
}

impl Default for Listeners {
    fn default() -> Self {
        let (observer, recorder) = (Arc::new(NoWorkerObserver), Recorder::default());
        let (metrics, resources) = (Metrics::new(), ResourceSettings::default());
        let (seen, image_gc) = (Seen::default(), GcPolicy::default());
        let (offer, read_node) = (NodeOffer::unlimited(), None);
        let (resizes, counted) = (ResizePolicy::default(), Metrics::new());
        Self {
            seen,
            observer,
            recorder,
            metrics,
            api: None,
            cgroups: None,
            resources,
            image_gc,
            dead_containers: DeadContainerPolicy::default(),
            offer,
            read_node,
            static_pods: None,
            adoptions: Adoptions::default(),
            unreachable_api: false,
            mirrors: false,
            resizes,
            volumes: None,
            objects: Objects::standalone(),
            counted,
            behind: Duration::ZERO,
        }
    }
}

impl Agent {
    fn begin(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>, listeners: Listeners) -> Self {
        let Listeners {
            seen,
            observer,
            recorder,
            metrics,
            api,
            cgroups,
            resources,
            image_gc,
            dead_containers,
            offer,
            read_node,
            static_pods,
            adoptions,
            unreachable_api,
            mirrors,
            resizes,
            volumes,
            objects,
            counted,
            behind,
        } = listeners;
        let runtime = super::pleg_harness::runtime(sim, RuntimeOptions::default());
        let shared = SharedPods::default();
        let (desired, of_ooms) = (shared.clone(), shared.clone());
        let startups = Startups::counting(metrics.clone());
        let ooms = OomReporter::new(metrics, recorder.clone(), Arc::new(move |uid| of_ooms.by_uid(uid)));
        let harness = PlegHarness::open_on(sim, sensors, &runtime, seen, ooms);
        let (aside, shutdown) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        let (state_sender, state) = watch::channel(RuntimeState::Unknown);
        tasks.spawn(watch_runtime(runtime.clone(), state_sender, harness.sensor_states.subscribe(), aside.clone()));
        let (updates, receiver) = mpsc::channel(UPDATES);
        // The first set of pods is in the channel before the loop begins.
        let first = if static_pods.is_some() { ConfigSource::Api } else { ConfigSource::File };
        let _ = updates.try_send(PodUpdate::Add(first, pods));
        let config = SourcesConfig { api: unreachable_api.then(no_answer), adoptions, ..only(static_pods) };
        let (delivered, sources) = sources::start(config, clock(sim), Recorder::default(), &mut tasks, aside.clone());
        let (closed, pressures) = (watch::Sender::new(false), watch::Sender::new(Pressures::default()));
        let security =
            SecuritySettings { handlers: HandlerFeatures::new(state.clone()), ..SecuritySettings::default() };
        let user_namespaces = volumes.as_ref().map(|_| ranges(root)).unwrap_or_default();
        let gates = ResizeGates { pod_level: resizes.pod_level, ..ResizeGates::default() };
        let services = Services {
            node: NodeSettings { pod_logs_dir: root.join("logs"), resources, security, ..NodeSettings::default() },
            volumes: volumes.unwrap_or_else(|| Volumes::new(root)),
            objects,
            user_namespaces,
            cgroups,
            allocations: Allocations::open(root, gates).expect("records of an earlier agent"),
            resize_policy: resizes,
            files: NodeFiles { resolv_conf: None, hosts: root.join("hosts"), log_links: Some(root.join("links")) },
            api: api.map(|api| Arc::new(api) as Arc<dyn PodApi>),
            mirrors_of: mirrors.then(|| watch::channel(Some(Arc::default())).1),
            pods: shared,
            recorder,
            observer,
            startups,
            image_gc,
            dead_containers,
            offer: watch::channel(offer).1,
            read_node,
            closed: closed.subscribe(),
            pressures: pressures.subscribe(),
            pacing: Pacing::new(PacingPolicy::default(), 2),
            clock: clock_behind(sim, behind),
            ..Services::new(runtime, state, root, counted)
        };
        let updated = Desired { updates: receiver, sources };
        let Started { running, garbage, sync } =
            services.start(updated, harness.pleg.clone(), &mut tasks, shutdown.clone());
        let preparing = watch::Sender::new(false);
        let (mut prepared, mut sync_loop) = (preparing.subscribe(), JoinSet::new());
        sync_loop.spawn(async move {
            // Fails only without the agent, which ends this task.
            _ = prepared.wait_for(|preparing| !preparing).await;
            sync.await;
        });
        Self {
            harness,
            statuses: running.statuses.clone(),
            probes: running.probes.clone(),
            evictions: running.evictions(),
            garbage,
            pressures,
            clock: clock(sim),
            desired,
            running,
            updates,
            closed,
            preparing,
            sync_loop,
            shutdown,
            tasks,
            _delivered: delivered,
            _aside: aside.drop_guard(),
        }
    }

    /// Adds a desired pod.
    pub async fn add(&self, pod: Pod) {
        self.send(PodUpdate::Add(ConfigSource::File, vec![pod])).await;
    }

    /// Updates a desired pod, under the same UID.
    pub async fn update(&self, pod: Pod) {
        self.send(PodUpdate::Update(ConfigSource::File, vec![pod])).await;
    }

    /// Replaces a desired pod, of which only the API status has changed.
    pub async fn reconcile(&self, pod: Pod) {
        self.send(PodUpdate::Reconcile(ConfigSource::File, vec![pod])).await;
    }

    /// From now on the API server has these pods, which cannot be decoded, and no others such.
    pub async fn keep_undecodable(&self, uids: &[&str]) {
        let uids = uids.iter().map(|uid| PodUid::from(*uid)).collect();
        self.send(PodUpdate::Undecodable(ConfigSource::Api, uids)).await;
    }

    /// Removes a desired pod.
    pub async fn remove(&self, pod: Pod) {
        self.send(PodUpdate::Remove(ConfigSource::File, vec![pod])).await;
    }

    /// Requests the termination of a pod, as a graceful node shutdown does, and waits until it has terminated.
    pub async fn kill(&self, uid: PodUid, grace: i64, reason: TerminationReason) {
        let finished = CancellationToken::new();
        let options = KillOptions {
            grace: Some(grace),
            termination_reason: Some(Arc::new(reason)),
            finished: Some(finished.clone()),
            ..KillOptions::default()
        };
        if self.running.kills.send(KillRequest { uid, options }).await.is_ok() {
            finished.cancelled().await;
        }
    }

    /// Rejects new pods from now on, as during a shutdown of the machine.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Stops the agent as SIGTERM does; its containers keep running.
    pub async fn shut_down(mut self) {
        self.shutdown.cancel();
        let ended = self.sync_loop.join_next().await;
        assert!(ended.is_none_or(|ended| ended.is_ok()), "the sync loop panicked");
    }

    /// Ends the stream of desired pods, and waits for the end of the sync loop.
    pub async fn lose_sources(self) {
        let Self { updates, mut sync_loop, .. } = self;
        drop(updates);
        let ended = sync_loop.join_next().await;
        assert!(ended.is_none_or(|ended| ended.is_ok()), "the sync loop panicked");
    }

    /// Delivers an update of any source.
    pub async fn send(&self, update: PodUpdate) {
        // A loop that has ended receives no updates.
        let _ = self.updates.send(update).await;
    }
}

/// Static pods of this folder, if any, and nothing else.
fn only(static_pod_path: Option<PathBuf>) -> SourcesConfig {
    SourcesConfig {
        static_pod_path,
        file_check_frequency: Duration::from_secs(20),
        static_pod_url: None,
        static_pod_url_headers: Vec::new(),
        http_check_frequency: Duration::from_secs(20),
        node_name: "sim".to_owned(),
        prevent_static_pod_api_references: false,
        adoptions: Adoptions::default(),
        api: None,
    }
}

/// An API server that never answers.
fn no_answer() -> ApiPods {
    let pending = |_: http::Request<Body>| std::future::pending::<Result<http::Response<Body>, http::Error>>();
    let client = kube::Client::new(tower::service_fn(pending), "default");
    ApiPods { client, recovered: Recovered::default(), node_known: watch::channel(true).1 }
}

/// Ranges of ids for pods below this root.
fn ranges(root: &Path) -> UserNamespaces {
    let range = IdRange::new(1 << 16, (1 << 32) - (1 << 16), 1 << 16, 110).expect("a range");
    UserNamespaces::open(PodDirs::new(root), range).expect("ranges of an earlier agent")
}
