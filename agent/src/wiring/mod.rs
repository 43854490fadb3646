//! The only place that knows every room: constructs, connects, runs, drains. Decides nothing.

mod admission;
mod apiserver;
mod certificates;
mod cgroups;
mod housekeeping;
mod node;
mod node_object;
mod node_shutdown;
mod notify;
mod objects;
mod observers;
mod pods;
mod recording;
mod sensors;
mod server;
mod spans;
mod status;
mod streams;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::admission::NodeOffer;
use crate::apiserver::ApiServer;

use crate::cgroups::Cgroups;
use crate::cgroups::Hierarchies;
use crate::cli::logging::Verbosity;
use crate::config::Feature;
use crate::config::Origin;
use crate::config::Settings;
use crate::events;
use crate::events::sensors::RelistPeriods;
use crate::events::sensors::SensorBoard;
use crate::images::Images;
use crate::images::check_disk;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::restart::RestartGates;
use crate::objects::Objects;
use crate::pacing::Pacing;
use crate::pacing::PacingPolicy;
use crate::pleg;
use crate::pleg::PlegConfig;
use crate::pleg::PlegHandle;
use crate::recorder::Recorder;
use crate::retry::RetryTracker;
use crate::runtime::Runtime;
use crate::runtime::RuntimeEndpoint;
use crate::runtime::RuntimeOptions;
use crate::runtime::RuntimeState;
use crate::runtime::watch_runtime;
use crate::sources;
use crate::sources::SourcesConfig;
use crate::startup::Startups;
use crate::status::Statuses;
use crate::sync::PodAdmission;
use crate::sync::SharedPods;
use crate::sync::SyncLoop;
use crate::volumes::Volumes;
use crate::workers::act::ActContext;
use crate::workers::pod_workers::PodWorkers;
use crate::workers::registry::WorkerRegistry;
use crate::workers::static_pod_start_queue::StaticPodStartQueue;
use crate::workers::worker::WorkerContext;
use node_object::NodeHandles;
pub use observers::Observers;
use recording::Recording;
pub use spans::spans;

/// Single pods looked at in the same moment.
const PARALLEL_INSPECTIONS: usize = 64;
/// A runtime that takes longer to describe one pod counts as failing for that pod.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// What every room is built on: there from the start, runtime or not.
struct Ground {
    settings: Settings,
    shutdown: CancellationToken,
    metrics: Arc<Metrics>,
    observers: Arc<Observers>,
    node: node::Node,
    hierarchies: Hierarchies,
    api: Option<ApiServer>,
    recorder: Recorder,
    recording: Recording,
    pacing: Pacing,
    runtime: Runtime,
    board: SensorBoard,
    /// What the runtime says of itself.
    state: watch::Receiver<RuntimeState>,
    shared: SharedPods,
    /// The machine is going down.
    down: watch::Sender<bool>,
}

/// What pods need before they start.
struct Supplies {
    images: Images,
    objects: Objects,
    cgroups: Option<Cgroups>,
    offer: watch::Receiver<NodeOffer>,
}

/// What the servers read, once the runtime has been reached.
type Started = watch::Sender<Option<pods::Running>>;

/// Runs the agent until `shutdown` is cancelled. Containers are left running.
///
/// # Errors
/// What keeps the agent from starting: directories that cannot be made, cgroups that cannot be set up.
pub async fn run(settings: Settings, verbosity: Verbosity, shutdown: CancellationToken) -> anyhow::Result<()> {
    let watchdog = notify::watchdog()?;
    let (ground, mut connection) = Ground::lay(settings, shutdown.clone()).await?;
    let images = Images::new(ground.runtime.clone(), node::pull_limits(&ground.settings));
    let own_node = ground.join_cluster(&images);
    let objects = objects::start(&ground.settings, ground.api.as_ref(), Some(own_node.node.clone()));
    let (started, later) = watch::channel(None);
    let serving = ground.serve(verbosity, &own_node, &later)?;
    notify::start(watchdog, &ground.settings, ground.shared.clone(), &shutdown);

    let (runtime, node) = (ground.runtime.endpoint(), &ground.node.name);
    tracing::info!(runtime, node, "waiting for the container runtime");
    let Some(version) = shutdown.run_until_cancelled(ground.runtime.until_ready()).await else {
        return serving.await.context("ending the servers")?;
    };
    let state = ground.state.clone();
    let Some(offer) = admission::follow(&ground.settings, state, shutdown.clone()).await? else {
        return serving.await.context("ending the servers")?;
    };
    let cgroups = match cgroups::prepare(
        &ground.settings,
        &ground.runtime,
        &ground.metrics,
        ground.hierarchies.layout.clone(),
        &ground.shared,
    )
    .await
    {
        Ok(cgroups) => cgroups,
        Err(error) => {
            ground.recording.setup_failed(&error, &shutdown).await;
            return Err(error);
        }
    };
    if let Some(cgroups) = &cgroups {
        cgroups::start_qos_loop(cgroups, &shutdown);
    }
    let (disk_of, told) = (ground.runtime.clone(), ground.recorder.clone());
    tokio::spawn(shutdown.clone().run_until_cancelled_owned(async move { check_disk(&disk_of, &told).await }));
    let (pleg, pleg_task) = ground.observe(cgroups.as_ref()).await;
    let supplies = Supplies { images, objects, cgroups, offer };
    let sync = ground.work(own_node, supplies, pleg, version.runtime_name, &started);
    tracing::info!(node, runtime = %version.runtime_version, "node agent started");
    tokio::select! {
        () = sync => {}
        () = connection.lost() => {
            anyhow::bail!("no client certificate for too long although the API server works; a new start may bootstrap")
        }
    }
    pleg_task.await.context("ending the PLEG")?;
    serving.await.context("ending the servers")?
}

impl Ground {
    async fn lay(settings: Settings, shutdown: CancellationToken) -> anyhow::Result<(Self, apiserver::Connection)> {
        let metrics = Metrics::new();
        let observers = Arc::new(Observers(metrics.clone()));
        let node = node::describe(&settings)?;
        node_object::check(&settings)?;
        let hierarchies = Hierarchies::detect().context("finding the cgroup hierarchies")?;
        let cgroup_version = if hierarchies.layout.is_v2() { 2 } else { 1 };
        observers::announce(&metrics, &node.name, cgroup_version, &settings.gates);
        let connection = apiserver::connect(&settings, &node.name, &metrics, &shutdown).await?;
        let api = connection.api.clone();
        let events_client = api.as_ref().map(|api| api.events.clone());
        let pacing = Pacing::for_this_machine(pacing_policy(&settings));
        let recording = recording::start(&node.name, events_client, &pacing.events, &observers, &shutdown);
        let recorder = recording.recorder.clone();
        recording::announce(&recorder, &settings, cgroup_version);
        let runtime = connect(&settings, &observers)?;
        let board = SensorBoard::default();
        tokio::spawn(observers::follow_sensors(board.clone(), metrics.clone(), shutdown.clone()));
        let (state_sender, state) = watch::channel(RuntimeState::Unknown);
        tokio::spawn(watch_runtime(runtime.clone(), state_sender, board.subscribe(), shutdown.clone()));
        let (shared, down) = (SharedPods::default(), watch::Sender::new(false));
        let ground = Self {
            settings,
            shutdown,
            metrics,
            observers,
            node,
            hierarchies,
            api,
            recorder,
            recording,
            pacing,
            runtime,
            board,
            state,
            shared,
            down,
        };
        Ok((ground, connection))
    }

    /// The Node object, its Lease and the node's addresses.
    fn join_cluster(&self, images: &Images) -> NodeHandles {
        let parts = node_object::Parts {
            settings: &self.settings,
            name: &self.node.name,
            runtime: self.runtime.clone(),
            state: self.state.clone(),
            board: self.board.clone(),
            images: images.changes(),
            shutting_down: self.down.subscribe(),
            recorder: self.recorder.clone(),
            metrics: self.metrics.clone(),
        };
        node_object::start(parts, self.api.as_ref(), self.shutdown.clone())
    }

    /// The HTTP servers.
    fn serve(
        &self,
        verbosity: Verbosity,
        own_node: &NodeHandles,
        later: &pods::Later,
    ) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
        let Self { settings, shutdown, metrics, shared, board, .. } = self;
        let (node, api) = (&self.node.name, self.api.as_ref());
        let read = pods::Server { metrics, board, shared, settings, verbosity };
        let parts = server::Parts {
            node: node.clone(),
            mounted: streams::mounted(
                settings,
                node,
                shared,
                later,
                &self.runtime,
                metrics,
                self.hierarchies.layout.clone(),
            )?,
            handles: read.handles(self.state.clone(), later.clone()),
            reviews: api.map(|api| api.reviews.clone()),
            serving: certificates::serving(settings, node, api, own_node.node.clone(), metrics, shutdown)?,
        };
        Ok(server::start(settings, parts, shutdown.clone()))
    }

    /// The sensors, and the PLEG that they feed.
    async fn observe(&self, cgroups: Option<&Cgroups>) -> (PlegHandle, JoinHandle<()>) {
        let (hints, hint_receiver) = mpsc::channel(events::HINT_CAPACITY);
        let (settings, runtime, shutdown) = (&self.settings, &self.runtime, &self.shutdown);
        let tell = sensors::Tell { metrics: &self.metrics, recorder: &self.recorder };
        let sensing = sensors::start(
            settings,
            runtime,
            &self.hierarchies,
            cgroups,
            tell,
            hints,
            self.board.clone(),
            shutdown.clone(),
        )
        .await;
        let config = PlegConfig {
            periods: relist_periods(settings),
            parallel_inspections: PARALLEL_INSPECTIONS,
            inspection_timeout: INSPECTION_TIMEOUT,
            watch: sensing.watch,
            observer: self.observers.clone(),
            clock: Clock::System,
            board: self.board.clone(),
        };
        pleg::start(runtime.clone(), hint_receiver, config, shutdown.clone())
    }

    /// Desired pods, their workers, and the loop between them; to be awaited until the agent ends.
    fn work(
        &self,
        own_node: NodeHandles,
        supplies: Supplies,
        pleg: PlegHandle,
        runtime_name: String,
        started: &Started,
    ) -> impl Future<Output = ()> + use<> {
        let Self { settings, shutdown, metrics, recorder, shared, .. } = self;
        let (api, gates) = (self.api.as_ref(), restart_gates(settings));
        let parts = status::StatusParts {
            runtime_name,
            addresses: own_node.addresses.clone(),
            node: own_node.node,
            client: api.map(|api| api.main.clone()),
            gates,
            first_status: self.pacing.first_status.clone(),
        };
        let (statuses, mirrors) = status::start(parts, shared, metrics, shutdown);
        let registry = WorkerRegistry::default();
        let volumes = Volumes::new(&settings.flags.root_dir).with_metrics(metrics.clone());
        if let Err(error) = volumes.reconstruct() {
            tracing::warn!(%error, "volumes of an earlier run are not counted");
        }
        recording::announce_volumes(recorder, &volumes);
        started.send_replace(Some(pods::Running {
            statuses: statuses.clone(),
            pleg: pleg.clone(),
            registry: registry.clone(),
            volumes: volumes.clone(),
        }));
        let startups = api.map_or_else(Startups::default, |_| Startups::counting(metrics.clone()));
        let mut act = ActContext::new(
            self.runtime.clone(),
            supplies.images,
            volumes,
            supplies.cgroups,
            self.node.settings(settings, &self.hierarchies, own_node.addresses, self.state.clone()),
            node::files(settings),
            network_of(self.state.clone()),
            recorder.clone(),
            Clock::System,
            self.pacing.clone(),
        )
        .with_objects(supplies.objects);
        act.startups = startups.clone();
        act.metrics = Some(metrics.clone());
        let context = Arc::new(self.workers(act, pleg.clone(), statuses.clone(), gates));
        let config = sources_config(settings, &self.node.name, api);
        let (updates, sources) = sources::start(config, Clock::System, recorder.clone(), shutdown.clone());
        let shutdown_parts = node_shutdown::Parts {
            settings,
            pods: shared.clone(),
            statuses: statuses.clone(),
            recorder: recorder.clone(),
            metrics: metrics.clone(),
            down: self.down.clone(),
        };
        let sync = SyncLoop {
            pods: shared.clone(),
            admission: PodAdmission::new(supplies.offer),
            workers: PodWorkers::counted_by(context.clone(), registry),
            pleg,
            sources,
            statuses,
            clock: Clock::System,
            recorder: recorder.clone(),
            mirrors,
            requests: node_shutdown::start(shutdown_parts, shutdown.clone()),
            startups,
            leftovers: Arc::new(housekeeping::OrphanCleanup::new(context, shared.clone())),
            housekeeping: None,
        };
        sync.run(updates, shutdown.clone())
    }

    /// What all pod workers share.
    fn workers(&self, act: ActContext, pleg: PlegHandle, statuses: Statuses, gates: RestartGates) -> WorkerContext {
        WorkerContext {
            pleg,
            act,
            statuses,
            static_pod_starts: StaticPodStartQueue::default(),
            clock: Clock::System,
            recorder: self.recorder.clone(),
            retries: RetryTracker::new(self.recorder.clone(), Some(self.metrics.clone())),
            runtime: self.state.clone(),
            gates,
            max_backoff: max_backoff(&self.settings),
            sync_frequency: self.settings.kubelet.sync_frequency.std(),
            observer: self.observers.clone(),
            shutdown: CancellationToken::new(),
        }
    }
}

fn connect(settings: &Settings, observers: &Arc<Observers>) -> anyhow::Result<Runtime> {
    let field = &settings.kubelet.container_runtime_endpoint;
    let unset = matches!(settings.origin("containerRuntimeEndpoint"), Origin::Default | Origin::LegacyDefault);
    let endpoint = match RuntimeEndpoint::discover(Path::new("/")) {
        Some(found) if unset => found,
        _ => field.parse().with_context(|| format!("containerRuntimeEndpoint {field:?}"))?,
    };
    let images = &settings.kubelet.image_service_endpoint;
    let images: Option<RuntimeEndpoint> = match images.as_str() {
        "" => None,
        text => Some(text.parse().with_context(|| format!("imageServiceEndpoint {text:?}"))?),
    };
    let options =
        RuntimeOptions { request_timeout: settings.kubelet.runtime_request_timeout.std(), observer: observers.clone() };
    Ok(Runtime::new(&endpoint, images.as_ref(), options))
}

/// What of the runtime's state concerns pods with a network of their own.
fn network_of(mut state: watch::Receiver<RuntimeState>) -> watch::Receiver<Option<String>> {
    let error = |state: &RuntimeState| state.network_error().map(str::to_owned);
    let (sender, network) = watch::channel(error(&state.borrow()));
    tokio::spawn(async move {
        while state.changed().await.is_ok() {
            let now = error(&state.borrow_and_update());
            sender.send_if_modified(|known| std::mem::replace(known, now.clone()) != now);
        }
    });
    network
}

fn relist_periods(settings: &Settings) -> RelistPeriods {
    let relist = &settings.keblet.relist;
    RelistPeriods {
        event_driven: relist.period.std(),
        polling: relist.degraded_period.std(),
        fixed: relist.fixed_period.map(crate::config::duration::GoDuration::std),
    }
}

fn pacing_policy(settings: &Settings) -> PacingPolicy {
    let pacing = &settings.keblet.pacing;
    PacingPolicy {
        stop_limiter: pacing.stop_limiter,
        sandbox_teardown_delay: pacing.sandbox_teardown_delay,
        held_back_statuses: pacing.held_back_statuses,
        deferred_events: pacing.deferred_events,
    }
}

fn restart_gates(settings: &Settings) -> RestartGates {
    RestartGates {
        container_rules: settings.gates.enabled(Feature::ContainerRestartRules),
        all_containers: settings.gates.enabled(Feature::RestartAllContainersOnContainerExits),
    }
}

fn max_backoff(settings: &Settings) -> Duration {
    let configured = settings.kubelet.crash_loop_back_off.max_container_restart_period;
    configured.map_or(crate::workers::backoff::DEFAULT_MAX, crate::config::duration::GoDuration::std)
}

fn sources_config(settings: &Settings, node_name: &str, api: Option<&ApiServer>) -> SourcesConfig {
    let kubelet = &settings.kubelet;
    let set = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    SourcesConfig {
        static_pod_path: set(&kubelet.static_pod_path).map(Into::into),
        file_check_frequency: kubelet.file_check_frequency.std(),
        static_pod_url: set(&kubelet.static_pod_url),
        static_pod_url_headers: kubelet.static_pod_url_header.clone().into_iter().collect(),
        http_check_frequency: kubelet.http_check_frequency.std(),
        node_name: node_name.to_owned(),
        prevent_static_pod_api_references: settings.gates.enabled(Feature::PreventStaticPodAPIReferences),
        api: api.map(|api| (api.main.clone(), api.recovered())),
    }
}
