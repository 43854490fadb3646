//! Makes the services from the configuration, connects them, runs them until the agent ends. Decides nothing: the pod
//! pipeline is joined in [`crate::pipeline`].

mod admission;
mod adoption;
mod apiserver;
mod certificates;
mod cgroups;
mod daemon_cgroups;
mod eviction;
mod images;
mod iptables;
mod lock_file;
mod log_rotation;
mod memory;
mod node;
mod node_object;
mod node_shutdown;
mod notify;
mod objects;
mod observers;
mod oom_score;
mod open_files;
mod pod_sources;
mod pods;
mod policies;
mod pressure;
mod recording;
mod resizes;
mod sensors;
mod server;
mod spans;
mod streams;
mod tasks;
mod user_namespaces;
mod volumes;

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use futures_util::FutureExt as _;
use futures_util::TryFutureExt as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::allocation::Allocations;
use crate::apiserver::ApiServer;
use crate::cgroups::Cgroups;
use crate::cgroups::Hierarchies;
use crate::cli::endpoints::Endpoints;
use crate::cli::host;
use crate::cli::logging::Verbosity;
use crate::config::Feature;
use crate::config::Settings;
use crate::events;
use crate::events::sensors::SensorStates;
use crate::images::Images;
use crate::kernel::bpf::Probes;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pressures;
use crate::model::named;
use crate::objects::Objects;
use crate::oom::OomReporter;
use crate::pacing::Pacing;
use crate::pipeline;
use crate::pipeline::Desired;
use crate::pipeline::NodeGarbage;
use crate::pipeline::Observation;
use crate::pipeline::Running;
use crate::pipeline::Services;
use crate::pipeline::Started;
use crate::pleg::PlegHandle;
use crate::pressure::ReclaimStalls;
use crate::recorder::Recorder;
use crate::runtime::Runtime;
use crate::runtime::RuntimeOptions;
use crate::runtime::RuntimeState;
use crate::runtime::watch_runtime;
use crate::server::secure;
use crate::sources;
use crate::sources::ApiPods;
use crate::sources::SourcesConfig;
use crate::sources::adoption::Adoptions;
use crate::startup::Startups;
use crate::stats::Stats;
use crate::status::manager::KubePods;
use crate::status::manager::PodApi;
use crate::sync::SharedPods;
use crate::user_namespaces::UserNamespaces;
use crate::volumes::Volumes;
use crate::volumes::VolumesInUse;
use node_object::NodeHandles;
pub use observers::Observers;
use recording::Recording;
pub use spans::spans;
use tasks::panicked;
use tasks::sync_ended;
use tasks::unless_panicked;

/// What exists from the start, whether the runtime answers or not.
struct Bootstrap {
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
    /// What is allocated to pods, as an earlier agent has left it.
    allocations: Allocations,
    sensor_states: SensorStates,
    /// Reports OOM verdicts.
    ooms: OomReporter,
    /// State of the runtime.
    state: watch::Receiver<RuntimeState>,
    shared: SharedPods,
    /// True while the machine shuts down.
    down: watch::Sender<bool>,
    /// Resources under pressure.
    pressures: watch::Sender<Pressures>,
    /// Volumes that the control plane must not attach elsewhere.
    volumes_in_use: watch::Sender<VolumesInUse>,
}

/// What the pipeline needs beside [`Bootstrap`], once the runtime answers.
struct Prepared {
    images: Images,
    objects: Objects,
    volumes: Volumes,
    user_namespaces: UserNamespaces,
    cgroups: Option<Cgroups>,
    offered: admission::Offered,
    runtime_name: String,
}

/// Runs the agent until `shutdown` is cancelled. Containers are left running.
///
/// # Errors
/// What keeps the agent from starting: a port in use, directories that cannot be made, cgroups that cannot be set up.
pub async fn run(settings: Settings, verbosity: Verbosity, shutdown: CancellationToken) -> anyhow::Result<()> {
    let watchdog = notify::watchdog()?;
    let locked = shutdown.run_until_cancelled(lock_file::hold(&settings)).await;
    let Some(_lock) = locked.transpose()? else { return Ok(()) };
    // Aborted when the agent ends.
    let mut tasks = JoinSet::new();
    lock_file::watch_contention(&settings, &mut tasks, &shutdown)?;
    // Before the rest: an agent that is started beside another one must not change its pods, its Node or kernel flags.
    let bound = shutdown.run_until_cancelled(server::bind(&settings)).await;
    let Some(listener) = bound.transpose()? else { return Ok(()) };
    let (bootstrap, mut connection) = Bootstrap::prepare(settings, &mut tasks, shutdown.clone()).await?;
    let user_namespaces = user_namespaces::open(&bootstrap.settings).await?;
    let images = images::prepare(&bootstrap.settings, bootstrap.runtime.clone(), &bootstrap.metrics).await?;
    let own_node = bootstrap.join_cluster(&images, &mut tasks);
    let objects = objects::start(&bootstrap.settings, bootstrap.api.as_ref(), Some(own_node.node.clone()), &mut tasks);
    let credentials = images::credentials(&bootstrap.settings, &objects, &bootstrap.metrics).await?;
    let images = images.with_credentials(credentials);
    let (started, pipeline) = watch::channel(None);
    let stats = bootstrap.stats(&pipeline)?;
    let serving = bootstrap.serve(listener, verbosity, &own_node, &pipeline, stats.clone(), &mut tasks)?;
    notify::start(watchdog, &bootstrap.settings, bootstrap.shared.clone(), &mut tasks, &shutdown);

    let (runtime, node) = (bootstrap.runtime.endpoint(), &bootstrap.node.name);
    let (config, root_fs) = (bootstrap.node.config.clone(), bootstrap.node.root_fs.clone());
    tracing::info!(runtime, node, "waiting for the container runtime");
    let ready = shutdown.run_until_cancelled(bootstrap.runtime.until_ready());
    let Some(version) = unless_panicked(&mut tasks, ready).await? else {
        return serving.await.context("ending the servers")?;
    };
    let state = bootstrap.state.clone();
    let object = admission::OwnNode::new(own_node.node.clone(), own_node.synced.clone());
    let offered = admission::follow(&bootstrap.settings, config, root_fs, state, object, shutdown.clone());
    let Some((offered, following)) = unless_panicked(&mut tasks, offered).await?? else {
        // Also if the state of the runtime is not followed any more.
        return unless_panicked(&mut tasks, serving).await?.context("ending the servers")?;
    };
    tasks.spawn(named("offer of the node", following));
    images.recover().await;
    let cgroups = bootstrap.cgroups(&mut tasks, &shutdown).await?;
    // Loading BPF programs takes seconds on a slow machine. What is loaded after the end is dropped with the process.
    let observing = shutdown.run_until_cancelled(bootstrap.observe(cgroups.as_ref(), &mut tasks));
    let Some((probes, (pleg, pleg_task))) = observing.await else {
        return serving.await.context("ending the servers")?;
    };
    let pleg_task = pleg_task.map_err(Arc::new).shared();
    let Bootstrap { settings, metrics, recorder, volumes_in_use, .. } = &bootstrap;
    let volumes = volumes::on_disk(settings, metrics, recorder, volumes_in_use).await?;
    let pod_cgroups = cgroups.clone();
    let watched = eviction::Watched { cgroups: cgroups.clone(), stalls: bootstrap.stalls(probes) };
    let runtime_name = version.runtime_name;
    let prepared = Prepared { images, objects, volumes, user_namespaces, cgroups, offered, runtime_name };
    log_rotation::start(&bootstrap.settings, pleg.clone(), bootstrap.runtime.clone(), &mut tasks, &shutdown)?;
    let adoptions = shutdown.run_until_cancelled(adoption::find(&bootstrap.settings, &bootstrap.runtime));
    let Some(adoptions) = unless_panicked(&mut tasks, adoptions).await? else {
        pleg_task.await.context("ending the PLEG")?;
        return serving.await.context("ending the servers")?;
    };
    let Started { running, garbage, sync } = bootstrap.start_pipeline(own_node, prepared, pleg, adoptions?, &mut tasks);
    memory::return_at_rest(bootstrap.pacing.priority.clone(), &mut tasks);
    bootstrap.await_node_shutdown(&running, &mut tasks);
    // Before the sync loop runs, which would start pods whose eviction is not finished.
    bootstrap.watch_resources(&running, garbage, watched, stats, &mut tasks).await;
    started.send_replace(Some(running));
    tracing::info!(node, runtime = %version.runtime_version, "node agent started");
    let ended = tokio::select! {
        () = sync => sync_ended(&mut tasks, &shutdown).await,
        () = connection.lost() => Err(anyhow::anyhow!(
            "no client certificate for too long although the API server is healthy; a restart may obtain one"
        )),
        // Without one of them the agent would manage its pods incompletely.
        Err(error) = pleg_task.clone() => Err(error).context("running the PLEG"),
        error = panicked(&mut tasks) => Err(error),
    };
    // The task that would resume a pod that is being evicted ends with the agent.
    if let Some(cgroups) = pod_cgroups {
        cgroups.resume_pods().await;
    }
    bootstrap.allocations.flush().await;
    server::stopped(serving, &shutdown).await?;
    ended?;
    pleg_task.await.context("ending the PLEG")
}

impl Bootstrap {
    async fn prepare(
        settings: Settings,
        tasks: &mut JoinSet<()>,
        shutdown: CancellationToken,
    ) -> anyhow::Result<(Self, apiserver::Connection)> {
        // First: little that keeps the agent from starting may leave a pod suspended.
        let hierarchies = Hierarchies::detect().context("finding the cgroup hierarchies")?;
        cgroups::resume_pods(&settings, &hierarchies.layout).await;
        let metrics = Metrics::new();
        let observers = Arc::new(Observers(metrics.clone()));
        let node = node::describe(&settings, &hierarchies.layout)?;
        host::check_reservations(&settings)?;
        host::set_tunables(&settings);
        secure::check_tls(&settings)?;
        let allocations = resizes::open(&settings)?;
        oom_score::keep(settings.kubelet.oom_score_adj, tasks, &shutdown);
        open_files::limit(settings.kubelet.max_open_files);
        daemon_cgroups::keep(&settings, &hierarchies.layout, tasks, &shutdown);
        iptables::keep(settings.kubelet.make_iptables_util_chains, tasks, &shutdown);
        let cgroup_version = if hierarchies.layout.is_v2() { 2 } else { 1 };
        observers::announce(&metrics, &node.name, cgroup_version, &settings.gates);
        let connection = apiserver::connect(&settings, &node.name, &metrics, tasks, &shutdown).await?;
        let api = connection.api.clone();
        let events_client = api.as_ref().map(|api| api.events.clone());
        let pacing = Pacing::for_this_machine(policies::pacing(&settings));
        let recording = recording::start(&node.name, events_client, &pacing.events, &observers, tasks, &shutdown);
        let recorder = recording.recorder.clone();
        recording::announce(&recorder, &settings, cgroup_version);
        let runtime = connect(&settings, &observers)?;
        let sensor_states = SensorStates::default();
        let following = observers::follow_sensors(sensor_states.clone(), metrics.clone(), shutdown.clone());
        tasks.spawn(named("metrics of the sensors", following));
        let (state_sender, state) = watch::channel(RuntimeState::Unknown);
        let following = watch_runtime(runtime.clone(), state_sender, sensor_states.subscribe(), shutdown.clone());
        tasks.spawn(named("state of the runtime", following));
        let (shared, down) = (SharedPods::default(), watch::Sender::new(false));
        let pressures = watch::Sender::new(Pressures::default());
        let desired = shared.clone();
        let ooms = OomReporter::new(metrics.clone(), recorder.clone(), Arc::new(move |uid| desired.by_uid(uid)));
        let bootstrap = Self {
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
            allocations,
            sensor_states,
            ooms,
            state,
            shared,
            down,
            pressures,
            volumes_in_use: watch::Sender::new(None),
        };
        Ok((bootstrap, connection))
    }

    /// The Node object, its Lease and the node's addresses.
    fn join_cluster(&self, images: &Images, tasks: &mut JoinSet<()>) -> NodeHandles {
        let parts = node_object::Parts {
            settings: &self.settings,
            config: self.node.config.clone(),
            root_fs: &self.node.root_fs,
            runtime: self.runtime.clone(),
            state: self.state.clone(),
            sensor_states: self.sensor_states.clone(),
            images: images.changes(),
            pressures: self.pressures.subscribe(),
            volumes_in_use: self.volumes_in_use.subscribe(),
            shutting_down: self.down.subscribe(),
            recorder: self.recorder.clone(),
            metrics: self.metrics.clone(),
        };
        node_object::start(parts, self.api.as_ref(), tasks, self.shutdown.clone())
    }

    /// Usage of the node and of its pods.
    fn stats(&self, pipeline: &pods::PipelineHandle) -> anyhow::Result<Stats> {
        let layout = self.hierarchies.layout.clone();
        let ooms = self.ooms.counts();
        let stats =
            streams::stats(&self.settings, &self.node.name, &self.shared, pipeline, &self.runtime, layout, ooms)?;
        Ok(stats.with_metrics(self.metrics.clone()))
    }

    /// The HTTP servers; `listener` has the main port.
    fn serve(
        &self,
        listener: Option<TcpListener>,
        verbosity: Verbosity,
        own_node: &NodeHandles,
        pipeline: &pods::PipelineHandle,
        stats: Stats,
        tasks: &mut JoinSet<()>,
    ) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
        let Self { settings, shutdown, metrics, shared, sensor_states, .. } = self;
        let (node, api) = (&self.node.name, self.api.as_ref());
        let layout = self.hierarchies.layout.clone();
        let read = pods::Server { metrics, sensor_states, shared, settings, verbosity, stats: stats.clone(), layout };
        let parts = server::Parts {
            listener,
            node: node.clone(),
            mounted: streams::mounted(settings, stats, shared, pipeline, &self.runtime, metrics),
            handles: read.handles(self.node.configz.clone(), self.state.clone(), pipeline.clone()),
            reviews: api.map(|api| api.reviews.clone()),
            serving: certificates::serving(settings, node, api, own_node.node.clone(), metrics, tasks, shutdown)?,
        };
        Ok(server::start(settings, parts, shutdown.clone()))
    }

    /// The cgroups of pods, and the QoS loop. A failure is recorded on the node.
    async fn cgroups(&self, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) -> anyhow::Result<Option<Cgroups>> {
        let services = cgroups::Services {
            settings: &self.settings,
            node: &self.node,
            runtime: &self.runtime,
            metrics: &self.metrics,
            layout: self.hierarchies.layout.clone(),
            pods: &self.shared,
            recorder: &self.recorder,
        };
        let prepared = cgroups::prepare(services, tasks, shutdown).await;
        match &prepared {
            Ok(Some(cgroups)) => cgroups::start_qos_loop(cgroups, tasks, shutdown),
            Ok(None) => {}
            Err(error) => self.recording.setup_failed(error, shutdown).await,
        }
        prepared
    }

    /// The sensors with their probes, and the PLEG that they feed.
    async fn observe(
        &self,
        cgroups: Option<&Cgroups>,
        tasks: &mut JoinSet<()>,
    ) -> (Option<Probes>, (PlegHandle, JoinHandle<()>)) {
        let (hints, hint_receiver) = mpsc::channel(events::HINT_CAPACITY);
        let Self { settings, runtime, hierarchies, metrics, shutdown, .. } = self;
        let sensor_states = self.sensor_states.clone();
        let parts = sensors::Parts { settings, runtime, hierarchies, cgroups, sensor_states, metrics };
        let sensing = sensors::start(parts, hints, tasks, shutdown.clone()).await;
        let observation = Observation {
            hints: hint_receiver,
            watch: sensing.watch,
            sensor_states: self.sensor_states.clone(),
            periods: policies::relist_periods(settings),
            observer: self.observers.clone(),
            clock: Clock::System,
            ooms: self.ooms.clone(),
        };
        (sensing.probes, pipeline::observe(runtime.clone(), observation, shutdown.clone()))
    }

    /// Reclaim stalls of pods, if probes count them.
    fn stalls(&self, probes: Option<Probes>) -> Option<ReclaimStalls> {
        Some(ReclaimStalls::new(Arc::new(probes?), self.hierarchies.containers.clone()?))
    }

    /// The pod pipeline; its sync loop is to be awaited until the agent ends.
    fn start_pipeline(
        &self,
        own_node: NodeHandles,
        prepared: Prepared,
        pleg: PlegHandle,
        adoptions: Adoptions,
        tasks: &mut JoinSet<()>,
    ) -> Started<impl Future<Output = ()> + use<>> {
        let Self { settings, shutdown, metrics, recorder, shared, state, .. } = self;
        let api = self.api.as_ref();
        let node_known = prepared.offered.node_known;
        let pods = api.map(|api| ApiPods { client: api.main.clone(), recovered: api.recovered(), node_known });
        let config = SourcesConfig { adoptions, api: pods, ..pod_sources::config(settings, &self.node.name) };
        let (updates, sources) = sources::start(config, Clock::System, recorder.clone(), tasks, shutdown.clone());
        let node = self.node.settings(settings, &self.hierarchies, own_node.addresses.clone(), state.clone());
        let services = Services {
            allocations: self.allocations.clone(),
            resize_policy: resizes::policy(settings, node.resources.swap, node.resources.cgroup_v2),
            images: prepared.images,
            image_gc: node::image_gc(settings),
            dead_containers: node::dead_containers(settings),
            runtime_name: prepared.runtime_name,
            objects: prepared.objects,
            volumes: prepared.volumes,
            user_namespaces: prepared.user_namespaces,
            cgroups: prepared.cgroups,
            node,
            files: node::files(settings),
            addresses: own_node.addresses,
            api: api.map(|api| Arc::new(KubePods::new(api.main.clone())) as Arc<dyn PodApi>),
            mirrors_of: api.map(|_| own_node.node),
            pods: shared.clone(),
            closed: self.down.subscribe(),
            pressures: self.pressures.subscribe(),
            offer: prepared.offered.offer,
            read_node: api.map(|api| admission::read_node(api, &self.node.name)),
            recorder: recorder.clone(),
            observer: self.observers.clone(),
            startups: Startups::counting(metrics.clone()),
            pacing: self.pacing.clone(),
            restarts: policies::restart_gates(settings),
            max_backoff: policies::max_backoff(settings),
            sync_frequency: settings.kubelet.sync_frequency.std(),
            ..Services::new(self.runtime.clone(), state.clone(), &settings.flags.root_dir, metrics.clone())
        };
        services.start(Desired { updates, sources }, pleg, tasks, shutdown.clone())
    }

    /// The graceful shutdown of the machine, which terminates pods through the pipeline.
    fn await_node_shutdown(&self, running: &Running, tasks: &mut JoinSet<()>) {
        let parts = node_shutdown::Parts {
            settings: &self.settings,
            pods: self.shared.clone(),
            statuses: running.statuses.clone(),
            kills: running.kills.clone(),
            recorder: self.recorder.clone(),
            metrics: self.metrics.clone(),
            down: self.down.clone(),
        };
        node_shutdown::start(parts, tasks, self.shutdown.clone());
    }

    /// The eviction manager, which terminates pods through the pipeline.
    async fn watch_resources(
        &self,
        running: &Running,
        garbage: NodeGarbage,
        watched: eviction::Watched,
        stats: Stats,
        tasks: &mut JoinSet<()>,
    ) {
        let services = eviction::Services {
            settings: &self.settings,
            layout: self.hierarchies.layout.clone(),
            watched,
            runtime: self.runtime.clone(),
            stats,
            running,
            desired: self.shared.clone(),
            garbage,
            sensor_states: self.sensor_states.clone(),
            pressures: self.pressures.clone(),
            recorder: self.recorder.clone(),
            metrics: self.metrics.clone(),
        };
        eviction::start(services, tasks, self.shutdown.clone()).await;
    }
}

fn connect(settings: &Settings, observers: &Arc<Observers>) -> anyhow::Result<Runtime> {
    let endpoints = Endpoints::choose(settings, Path::new("/"))?;
    let options = RuntimeOptions {
        request_timeout: settings.kubelet.runtime_request_timeout.std(),
        streams_lists: settings.gates.enabled(Feature::CRIListStreaming),
        observer: observers.clone(),
    };
    Ok(Runtime::new(&endpoints.runtime, endpoints.images.as_ref(), options))
}
