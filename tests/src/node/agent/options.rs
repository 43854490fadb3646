//! What an agent is started with beside its pods.

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
use keblet::model::ConfigSource;
use keblet::model::DeadContainerPolicy;
use keblet::objects::Objects;
use keblet::pacing::Pacing;
use keblet::pacing::PacingPolicy;
use keblet::pipeline::AdmissionInputs;
use keblet::pipeline::ClusterServices;
use keblet::pipeline::Monitoring;
use keblet::pipeline::NodeServices;
use keblet::pipeline::PodRecords;
use keblet::pipeline::Policies;
use keblet::pipeline::Services;
use keblet::recorder::Recorder;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeState;
use keblet::sources::ApiPods;
use keblet::sources::SourcesConfig;
use keblet::sources::adoption::Adoptions;
use keblet::startup::Startups;
use keblet::status::manager::PodApi;
use keblet::sync::ReadNode;
use keblet::user_namespaces::IdRange;
use keblet::user_namespaces::UserNamespaces;
use keblet::volumes::PodDirs;
use keblet::volumes::Volumes;
use keblet::workers::act::NodeFiles;
use keblet::workers::generate::HandlerFeatures;
use keblet::workers::generate::NodeSettings;
use keblet::workers::generate::ResourceSettings;
use keblet::workers::generate::SecuritySettings;
use keblet::workers::worker::NoWorkerObserver;
use keblet::workers::worker::WorkerObserver;
use kube::client::Body;
use tokio::sync::watch;

use crate::cri::SimRuntime;
use crate::node::api::Api;
use crate::node::pleg_harness::clock_behind;
use crate::node::seen::Seen;

/// Options of an agent. By default a standalone one with the settings of a kubelet, on a node without cgroups on which any
/// pods fit.
pub(super) struct StartOptions {
    /// Records the reports of the PLEG.
    pub seen: Seen,
    /// Called by the workers.
    pub observer: Arc<dyn WorkerObserver>,
    /// Receives the events.
    pub recorder: Recorder,
    /// Of OOM kills and pod starts.
    pub metrics: Arc<Metrics>,
    /// Of the pipeline.
    pub counted: Arc<Metrics>,
    /// Receives statuses and final deletions.
    pub api: Option<Api>,
    /// There is an API server, which never answers.
    pub unreachable_api: bool,
    /// Static pods have mirror pods.
    pub mirrors: bool,
    /// API objects that pods refer to.
    pub objects: Objects,
    /// Reads the own Node.
    pub read_node: Option<ReadNode>,
    /// The folder of static pods: the first set of pods is then the API server's.
    pub static_pods: Option<PathBuf>,
    /// Static pods that the runtime has already.
    pub adoptions: Adoptions,
    /// The cgroups of pods.
    pub cgroups: Option<Cgroups>,
    /// The node's settings of resources.
    pub resources: ResourceSettings,
    /// What the node offers to pods.
    pub offer: NodeOffer,
    /// Volumes of pods, which get ranges of ids then.
    pub volumes: Option<Volumes>,
    /// How much the clock of the workers is behind the runtime's.
    pub behind: Duration,
    /// When unused images are removed.
    pub image_gc: GcPolicy,
    /// Limits on dead containers.
    pub dead_containers: DeadContainerPolicy,
    /// Resizes that the node can never perform.
    pub resizes: ResizePolicy,
}

impl Default for StartOptions {
    fn default() -> Self {
        Self {
            seen: Seen::default(),
            observer: Arc::new(NoWorkerObserver),
            recorder: Recorder::default(),
            metrics: Metrics::new(),
            counted: Metrics::new(),
            api: None,
            unreachable_api: false,
            mirrors: false,
            objects: Objects::standalone(),
            read_node: None,
            static_pods: None,
            adoptions: Adoptions::default(),
            cgroups: None,
            resources: ResourceSettings::default(),
            offer: NodeOffer::unlimited(),
            volumes: None,
            behind: Duration::ZERO,
            image_gc: GcPolicy::default(),
            dead_containers: DeadContainerPolicy::default(),
            resizes: ResizePolicy::default(),
        }
    }
}

impl StartOptions {
    /// The source of the first set of pods.
    pub(super) fn first_source(&self) -> ConfigSource {
        if self.static_pods.is_some() { ConfigSource::Api } else { ConfigSource::File }
    }

    /// The sources of pods beside the test.
    pub(super) fn sources(&self) -> SourcesConfig {
        SourcesConfig {
            static_pod_path: self.static_pods.clone(),
            file_check_frequency: Duration::from_secs(20),
            static_pod_url: None,
            static_pod_url_headers: Vec::new(),
            http_check_frequency: Duration::from_secs(20),
            node_name: "sim".to_owned(),
            prevent_static_pod_api_references: false,
            adoptions: self.adoptions.clone(),
            api: self.unreachable_api.then(no_answer),
        }
    }

    /// What the pipeline works with, with its files below `root`.
    pub(super) fn services(
        self,
        sim: &SimRuntime,
        root: &Path,
        runtime: Runtime,
        state: watch::Receiver<RuntimeState>,
    ) -> Services {
        let defaults = Services::new(runtime, state.clone(), root, self.counted);
        let gates = ResizeGates { pod_level: self.resizes.pod_level, ..ResizeGates::default() };
        Services {
            node: NodeServices {
                settings: settings(root, self.resources, state),
                files: NodeFiles { resolv_conf: None, hosts: root.join("hosts"), log_links: Some(root.join("links")) },
                user_namespaces: self.volumes.as_ref().map(|_| ranges(root)).unwrap_or_default(),
                volumes: self.volumes.unwrap_or_else(|| Volumes::new(root)),
                cgroups: self.cgroups,
                ..defaults.node
            },
            cluster: ClusterServices {
                objects: self.objects,
                pods: self.api.map(|api| Arc::new(api) as Arc<dyn PodApi>),
                mirrors_of: self.mirrors.then(|| watch::channel(Some(Arc::default())).1),
            },
            admission: AdmissionInputs {
                offer: watch::channel(self.offer).1,
                read_node: self.read_node,
                ..defaults.admission
            },
            pods: PodRecords {
                allocations: Allocations::open(root, gates).expect("records of an earlier agent"),
                ..defaults.pods
            },
            monitoring: Monitoring {
                recorder: self.recorder,
                workers: self.observer,
                startups: Startups::counting(self.metrics),
                ..defaults.monitoring
            },
            policies: Policies {
                image_gc: self.image_gc,
                dead_containers: self.dead_containers,
                resizes: self.resizes,
                ..defaults.policies
            },
            pacing: Pacing::new(PacingPolicy::default(), 2),
            clock: clock_behind(sim, self.behind),
            ..defaults
        }
    }
}

/// Settings for sandboxes and containers, with logs below `root`.
fn settings(root: &Path, resources: ResourceSettings, state: watch::Receiver<RuntimeState>) -> NodeSettings {
    let security = SecuritySettings { handlers: HandlerFeatures::new(state), ..SecuritySettings::default() };
    NodeSettings { pod_logs_dir: root.join("logs"), resources, security, ..NodeSettings::default() }
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
