//! What the pipeline works with, in groups of what is used together.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use crate::admission::NodeOffer;
use crate::allocation::Allocations;
use crate::allocation::ResizePolicy;
use crate::cgroups::Cgroups;
use crate::eviction::Journal;
use crate::images::GcPolicy;
use crate::images::Images;
use crate::images::PullLimits;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::DeadContainerPolicy;
use crate::model::Pressures;
use crate::model::restart::RestartGates;
use crate::objects::Objects;
use crate::pacing::Pacing;
use crate::pacing::PacingPolicy;
use crate::recorder::Recorder;
use crate::retry::RetryTracker;
use crate::runtime::Runtime;
use crate::runtime::RuntimeState;
use crate::startup::Startups;
use crate::status::NodeAddresses;
use crate::status::manager::PodApi;
use crate::sync::ReadNode;
use crate::sync::SharedPods;
use crate::user_namespaces::UserNamespaces;
use crate::volumes::Volumes;
use crate::workers::act::NodeFiles;
use crate::workers::backoff;
use crate::workers::generate::NodeSettings;
use crate::workers::worker::NoWorkerObserver;
use crate::workers::worker::WorkerObserver;

/// What the pipeline works with. [`Services::new`] is a standalone node with the defaults of a kubelet; every field can
/// be replaced.
pub struct Services {
    /// The container runtime.
    pub runtime: RuntimeServices,
    /// What pods use of the node.
    pub node: NodeServices,
    /// The API server.
    pub cluster: ClusterServices,
    /// What new pods are admitted by.
    pub admission: AdmissionInputs,
    /// What is known of pods beside the runtime.
    pub pods: PodRecords,
    /// Events and metrics.
    pub monitoring: Monitoring,
    /// The configuration of limits and periods.
    pub policies: Policies,
    /// Permits and priorities.
    pub pacing: Pacing,
    /// Time.
    pub clock: Clock,
}

/// The container runtime and its images.
pub struct RuntimeServices {
    /// Calls of the runtime.
    pub client: Runtime,
    /// Its state, followed by [`crate::runtime::watch_runtime`].
    pub state: watch::Receiver<RuntimeState>,
    /// Its name, the part of container ids before `://`.
    pub name: String,
    /// Images and the limits on pulling them.
    pub images: Images,
}

/// What pods use of the node.
pub struct NodeServices {
    /// The node's settings for sandboxes and containers.
    pub settings: NodeSettings,
    /// Files of the node.
    pub files: NodeFiles,
    /// Addresses of the node, none while unknown.
    pub addresses: watch::Receiver<NodeAddresses>,
    /// Pods' directories and volumes.
    pub volumes: Volumes,
    /// Ranges of ids of pods with a user namespace of their own; none by default, so that such pods fail.
    pub user_namespaces: UserNamespaces,
    /// The cgroup tree; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<Cgroups>,
}

/// The API server, as far as the pods of this node concern it.
pub struct ClusterServices {
    /// API objects that pods refer to.
    pub objects: Objects,
    /// The API server's pods; `None` when standalone.
    pub pods: Option<Arc<dyn PodApi>>,
    /// The own Node object, the owner of mirror pods; `None` for no mirror pods.
    pub mirrors_of: Option<watch::Receiver<Option<Arc<Node>>>>,
}

/// What new pods are admitted by.
#[derive(Clone)]
pub struct AdmissionInputs {
    /// What the node offers to pods.
    pub offer: watch::Receiver<NodeOffer>,
    /// Reads the own Node; `None` without an API server.
    pub read_node: Option<ReadNode>,
    /// True while the machine shuts down: new pods are rejected.
    pub closed: watch::Receiver<bool>,
    /// Resources of the node under pressure: some new pods are rejected.
    pub pressures: watch::Receiver<Pressures>,
}

/// What is known of pods beside the runtime.
#[derive(Clone)]
pub struct PodRecords {
    /// Desired pods, shared with readers.
    pub desired: SharedPods,
    /// What is allocated to pods, and what was applied.
    pub allocations: Allocations,
    /// Evictions and preemptions that are not finished.
    pub journal: Journal,
}

/// Events and metrics.
#[derive(Clone)]
pub struct Monitoring {
    /// Events.
    pub recorder: Recorder,
    /// Metrics of volumes, images, cgroups and the status manager.
    pub metrics: Arc<Metrics>,
    /// Metrics of workers.
    pub workers: Arc<dyn WorkerObserver>,
    /// Durations of pod starts.
    pub startups: Startups,
}

/// The configuration of limits and periods.
pub struct Policies {
    /// When unused images are removed; by default only for the eviction manager.
    pub image_gc: GcPolicy,
    /// Limits on dead containers.
    pub dead_containers: DeadContainerPolicy,
    /// Resizes that this node can never perform.
    pub resizes: ResizePolicy,
    /// Feature gates of restarts.
    pub restarts: RestartGates,
    /// Longest crash-loop back-off.
    pub max_backoff: Duration,
    /// `syncFrequency`.
    pub sync_frequency: Duration,
}

impl Services {
    /// A standalone node with its files below `root`, without cgroups and limits on pulls, on which any pods fit. Reads the
    /// record of evictions there.
    pub fn new(runtime: Runtime, state: watch::Receiver<RuntimeState>, root: &Path, metrics: Arc<Metrics>) -> Self {
        Self {
            runtime: RuntimeServices::new(runtime, state),
            node: NodeServices::new(root),
            cluster: ClusterServices::standalone(),
            admission: AdmissionInputs::unlimited(),
            pods: PodRecords::open(root),
            monitoring: Monitoring::new(metrics),
            policies: Policies::default(),
            pacing: Pacing::for_this_machine(PacingPolicy::default()),
            clock: Clock::System,
        }
    }
}

impl RuntimeServices {
    /// Without limits on pulls.
    fn new(client: Runtime, state: watch::Receiver<RuntimeState>) -> Self {
        let limits = PullLimits { parallel: None, per_second: 0, burst: 0 };
        Self { images: Images::new(client.clone(), limits), client, state, name: "containerd".to_owned() }
    }
}

impl NodeServices {
    /// With volumes below `root`, without cgroups.
    fn new(root: &Path) -> Self {
        Self {
            settings: NodeSettings::default(),
            files: NodeFiles::default(),
            addresses: watch::channel(NodeAddresses::default()).1,
            volumes: Volumes::new(root),
            user_namespaces: UserNamespaces::default(),
            cgroups: None,
        }
    }
}

impl ClusterServices {
    /// No API server.
    fn standalone() -> Self {
        Self { objects: Objects::standalone(), pods: None, mirrors_of: None }
    }
}

impl AdmissionInputs {
    /// Any pods fit.
    fn unlimited() -> Self {
        Self {
            offer: watch::channel(NodeOffer::unlimited()).1,
            read_node: None,
            closed: watch::channel(false).1,
            pressures: watch::channel(Pressures::default()).1,
        }
    }
}

impl PodRecords {
    /// No pods. Reads the record of evictions below `root`.
    fn open(root: &Path) -> Self {
        Self { desired: SharedPods::default(), allocations: Allocations::default(), journal: Journal::open(root) }
    }
}

impl Monitoring {
    /// Only these metrics.
    fn new(metrics: Arc<Metrics>) -> Self {
        let workers = Arc::new(NoWorkerObserver);
        Self { recorder: Recorder::default(), metrics, workers, startups: Startups::default() }
    }

    /// Failed operations, which are reported here.
    pub(super) fn retries(&self) -> RetryTracker {
        RetryTracker::new(self.recorder.clone(), Some(self.metrics.clone()))
    }
}

impl Default for Policies {
    fn default() -> Self {
        Self {
            image_gc: GcPolicy::default(),
            dead_containers: DeadContainerPolicy::default(),
            resizes: ResizePolicy::default(),
            restarts: RestartGates::default(),
            max_backoff: backoff::DEFAULT_MAX,
            sync_frequency: Duration::from_secs(60),
        }
    }
}
