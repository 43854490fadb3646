//! What the agent has from its start, and the parts that are made from it.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::admission;
use super::apiserver;
use super::certificates;
use super::cgroups;
use super::daemon_cgroups;
use super::eviction;
use super::iptables;
use super::node;
use super::node_object;
use super::node_object::NodeHandles;
use super::node_shutdown;
use super::observers;
use super::observers::Observers;
use super::oom_score;
use super::open_files;
use super::pod_sources;
use super::pods;
use super::policies;
use super::recording;
use super::recording::Recording;
use super::resizes;
use super::sensors;
use super::server;
use super::streams;
use super::tasks::unless_panicked;
use super::volumes;
use crate::allocation::Allocations;
use crate::apiserver::ApiServer;
use crate::cgroups::Cgroups;
use crate::cgroups::Hierarchies;
use crate::cgroups::LimitWrites;
use crate::cli::endpoints::Endpoints;
use crate::cli::host;
use crate::cli::logging::Verbosity;
use crate::config::Feature;
use crate::config::Settings;
use crate::events;
use crate::events::sensors::SensorStates;
use crate::eviction::Journal;
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
use crate::pipeline::AdmissionInputs;
use crate::pipeline::ClusterServices;
use crate::pipeline::Desired;
use crate::pipeline::Monitoring;
use crate::pipeline::NodeGarbage;
use crate::pipeline::NodeServices;
use crate::pipeline::Observation;
use crate::pipeline::PodRecords;
use crate::pipeline::Running;
use crate::pipeline::RuntimeServices;
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

/// What exists from the start, whether the runtime answers or not.
pub(super) struct Bootstrap {
    pub settings: Settings,
    shutdown: CancellationToken,
    pub metrics: Arc<Metrics>,
    observers: Arc<Observers>,
    pub node: node::Node,
    hierarchies: Hierarchies,
    /// Of limits of cgroups.
    limit_writes: LimitWrites,
    pub api: Option<ApiServer>,
    pub recorder: Recorder,
    recording: Recording,
    pub pacing: Pacing,
    pub runtime: Runtime,
    /// What is allocated to pods, as an earlier agent has left it.
    pub allocations: Allocations,
    sensor_states: SensorStates,
    /// Reports OOM verdicts.
    ooms: OomReporter,
    /// State of the runtime.
    state: watch::Receiver<RuntimeState>,
    pub shared: SharedPods,
    /// True while the machine shuts down.
    down: watch::Sender<bool>,
    /// Resources under pressure.
    pressures: watch::Sender<Pressures>,
    /// Volumes that the control plane must not attach elsewhere.
    pub volumes_in_use: watch::Sender<VolumesInUse>,
}

/// What the pipeline needs beside [`Bootstrap`], once the runtime answers.
pub(super) struct Prepared {
    pub images: Images,
    pub objects: Objects,
    pub volumes: Volumes,
    pub user_namespaces: UserNamespaces,
    pub cgroups: Option<Cgroups>,
    pub offered: admission::Offered,
    pub runtime_name: String,
}

impl Bootstrap {
    /// Makes what needs no runtime, and begins to follow the runtime's state.
    ///
    /// # Errors
    /// What keeps the agent from starting.
    pub(super) async fn prepare(
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
        keep_host_settings(&settings, &hierarchies, tasks, &shutdown);
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
        let shared = SharedPods::default();
        let desired = shared.clone();
        let ooms = OomReporter::new(metrics.clone(), recorder.clone(), Arc::new(move |uid| desired.by_uid(uid)));
        let bootstrap = Self {
            settings,
            shutdown,
            metrics,
            observers,
            node,
            hierarchies,
            limit_writes: LimitWrites::default(),
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
            down: watch::Sender::new(false),
            pressures: watch::Sender::new(Pressures::default()),
            volumes_in_use: watch::Sender::new(None),
        };
        Ok((bootstrap, connection))
    }

    /// The Node object, its Lease and the node's addresses.
    pub(super) fn join_cluster(&self, images: &Images, tasks: &mut JoinSet<()>) -> NodeHandles {
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
    ///
    /// # Errors
    /// `cgroupRoot` is not a name of a cgroup.
    pub(super) fn stats(&self, pipeline: &pods::PipelineHandle) -> anyhow::Result<Stats> {
        let layout = self.hierarchies.layout.clone();
        let ooms = self.ooms.counts();
        let stats = streams::stats(&self.settings, &self.node.name, self.pods(pipeline), &self.runtime, layout, ooms)?;
        Ok(stats.with_metrics(self.metrics.clone()).with_limit_writes(self.limit_writes.clone()))
    }

    /// Pods as the servers see them.
    fn pods(&self, pipeline: &pods::PipelineHandle) -> Arc<streams::Pods> {
        Arc::new(streams::Pods { shared: self.shared.clone(), pipeline: pipeline.clone() })
    }

    /// The HTTP servers; `listener` has the main port.
    ///
    /// # Errors
    /// The serving certificate is there but cannot be used.
    pub(super) fn serve(
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
        let serving = certificates::Parts { settings, node_name: node, api, node: own_node.node.clone(), metrics };
        let parts = server::Parts {
            listener,
            node: node.clone(),
            mounted: streams::mounted(settings, stats, self.pods(pipeline), &self.runtime, metrics),
            handles: read.handles(self.node.configz.clone(), self.state.clone(), pipeline.clone()),
            reviews: api.map(|api| api.reviews.clone()),
            serving: certificates::serving(serving, tasks, shutdown)?,
        };
        Ok(server::start(settings, parts, shutdown.clone()))
    }

    /// Waits until the runtime answers. `None` if the agent ends first.
    ///
    /// # Errors
    /// A task panicked.
    pub(super) async fn runtime_ready(&self, tasks: &mut JoinSet<()>) -> anyhow::Result<Option<cri::VersionResponse>> {
        let (runtime, node) = (self.runtime.endpoint(), &self.node.name);
        tracing::info!(runtime, node, "waiting for the container runtime");
        unless_panicked(tasks, self.shutdown.run_until_cancelled(self.runtime.until_ready())).await
    }

    /// What the node offers to pods, which is followed in `tasks`. `None` if the agent ends first, or if the state of the
    /// runtime is not followed any more.
    ///
    /// # Errors
    /// A setting of admission is invalid; a task panicked.
    pub(super) async fn offered(
        &self,
        own_node: &NodeHandles,
        tasks: &mut JoinSet<()>,
    ) -> anyhow::Result<Option<admission::Offered>> {
        let (config, root_fs) = (self.node.config.clone(), self.node.root_fs.clone());
        let (state, shutdown) = (self.state.clone(), self.shutdown.clone());
        let object = admission::OwnNode::new(own_node.node.clone(), own_node.synced.clone());
        let offered = admission::follow(&self.settings, config, root_fs, state, object, shutdown);
        let Some((offered, following)) = unless_panicked(tasks, offered).await?? else { return Ok(None) };
        tasks.spawn(named("offer of the node", following));
        Ok(Some(offered))
    }

    /// The cgroups of pods, and the QoS loop. A failure is recorded on the node.
    ///
    /// # Errors
    /// They cannot be set up.
    pub(super) async fn cgroups(&self, tasks: &mut JoinSet<()>) -> anyhow::Result<Option<Cgroups>> {
        let shutdown = &self.shutdown;
        let services = cgroups::Services {
            settings: &self.settings,
            node: &self.node,
            runtime: &self.runtime,
            metrics: &self.metrics,
            layout: self.hierarchies.layout.clone(),
            limit_writes: self.limit_writes.clone(),
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
    pub(super) async fn observe(
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

    /// Pods' directories and volumes.
    ///
    /// # Errors
    /// See [`volumes::on_disk`].
    pub(super) async fn volumes(&self) -> anyhow::Result<Volumes> {
        let Self { settings, metrics, recorder, volumes_in_use, .. } = self;
        volumes::on_disk(settings, metrics, recorder, volumes_in_use, &self.node.name).await
    }

    /// Reclaim stalls of pods, if probes count them.
    pub(super) fn stalls(&self, probes: Option<Probes>) -> Option<ReclaimStalls> {
        Some(ReclaimStalls::new(Arc::new(probes?), self.hierarchies.containers.clone()?))
    }

    /// The pod pipeline; its sync loop is to be awaited until the agent ends.
    pub(super) fn start_pipeline(
        &self,
        own_node: NodeHandles,
        prepared: Prepared,
        pleg: PlegHandle,
        adoptions: Adoptions,
        tasks: &mut JoinSet<()>,
    ) -> Started<impl Future<Output = ()> + use<>> {
        let Self { settings, shutdown, recorder, .. } = self;
        let (api, node_known) = (self.api.as_ref(), prepared.offered.node_known.clone());
        let pods = api.map(|api| ApiPods { client: api.main.clone(), recovered: api.recovered(), node_known });
        let config = SourcesConfig { adoptions, api: pods, ..pod_sources::config(settings, &self.node.name) };
        let (updates, sources) = sources::start(config, Clock::System, recorder.clone(), tasks, shutdown.clone());
        let services = self.services(own_node, prepared);
        services.start(Desired { updates, sources }, pleg, tasks, shutdown.clone())
    }

    /// What the pipeline works with.
    fn services(&self, own_node: NodeHandles, prepared: Prepared) -> Services {
        let Self { settings, metrics, recorder, shared, state, .. } = self;
        let api = self.api.as_ref();
        let node = self.node.settings(settings, &self.hierarchies, own_node.addresses.clone(), state.clone());
        Services {
            policies: policies::pipeline(settings, &node),
            runtime: RuntimeServices {
                client: self.runtime.clone(),
                state: state.clone(),
                name: prepared.runtime_name,
                images: prepared.images,
            },
            node: NodeServices {
                settings: node,
                files: node::files(settings),
                addresses: own_node.addresses,
                volumes: prepared.volumes,
                user_namespaces: prepared.user_namespaces,
                cgroups: prepared.cgroups,
            },
            cluster: ClusterServices {
                objects: prepared.objects,
                pods: api.map(|api| Arc::new(KubePods::new(api.main.clone())) as Arc<dyn PodApi>),
                mirrors_of: api.map(|_| own_node.node),
            },
            admission: AdmissionInputs {
                offer: prepared.offered.offer,
                read_node: api.map(|api| admission::read_node(api, &self.node.name)),
                closed: self.down.subscribe(),
                pressures: self.pressures.subscribe(),
            },
            pods: PodRecords {
                desired: shared.clone(),
                allocations: self.allocations.clone(),
                journal: Journal::open(&settings.flags.root_dir),
            },
            monitoring: Monitoring {
                recorder: recorder.clone(),
                metrics: metrics.clone(),
                workers: self.observers.clone(),
                startups: Startups::counting(metrics.clone()),
            },
            pacing: self.pacing.clone(),
            clock: Clock::System,
        }
    }

    /// The graceful shutdown of the machine, which terminates pods through the pipeline.
    pub(super) fn await_node_shutdown(&self, running: &Running, tasks: &mut JoinSet<()>) {
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
    pub(super) async fn watch_resources(
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

/// Applies what the configuration says of the agent's process and of the host, in `tasks` where others may undo it.
fn keep_host_settings(
    settings: &Settings,
    hierarchies: &Hierarchies,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) {
    oom_score::keep(settings.kubelet.oom_score_adj, tasks, shutdown);
    open_files::limit(settings.kubelet.max_open_files);
    daemon_cgroups::keep(settings, &hierarchies.layout, tasks, shutdown);
    iptables::keep(settings.kubelet.make_iptables_util_chains, tasks, shutdown);
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
