//! Starts of an agent, with what a test needs beside pods.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keblet::admission::NodeOffer;
use keblet::allocation::ResizePolicy;
use keblet::cgroups::Cgroups;
use keblet::images::GcPolicy;
use keblet::metrics::Metrics;
use keblet::model::DeadContainerPolicy;
use keblet::model::Pod;
use keblet::objects::Objects;
use keblet::recorder::Recorder;
use keblet::sources::adoption::Adoptions;
use keblet::sources::adoption::StaticSandbox;
use keblet::sync::ReadNode;
use keblet::volumes::Volumes;
use keblet::wiring::Observers;
use keblet::workers::generate::ResourceSettings;
use keblet::workers::worker::WorkerObserver;

use super::Agent;
use super::StartOptions;
use crate::cri::SimRuntime;
use crate::node::api::Api;
use crate::node::pleg_harness::SensorSet;
use crate::node::seen::Seen;

impl Agent {
    /// Starts an agent with its root directory in `root` and these desired pods.
    pub fn start(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>) -> Self {
        Self::start_observed(sim, sensors, root, pods, Seen::default())
    }

    /// As [`Agent::start`], with reports of the PLEG recorded in `seen`.
    pub fn start_observed(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>, seen: Seen) -> Self {
        Self::begin(sim, sensors, root, pods, StartOptions { seen, ..StartOptions::default() })
    }

    /// As [`Agent::start`], with `observer` called by the workers.
    pub fn start_with_observer(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
        observer: Arc<dyn WorkerObserver>,
    ) -> Self {
        Self::begin(sim, sensors, root, pods, StartOptions { observer, ..StartOptions::default() })
    }

    /// As [`Agent::start`], with events sent to `recorder`.
    pub fn start_with_recorder(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
        recorder: Recorder,
    ) -> Self {
        Self::begin(sim, sensors, root, pods, StartOptions { recorder, ..StartOptions::default() })
    }

    /// As [`Agent::start`], with periodic garbage collection of images.
    pub fn start_collecting_images(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
        image_gc: GcPolicy,
    ) -> Self {
        Self::begin(sim, sensors, root, pods, StartOptions { image_gc, ..StartOptions::default() })
    }

    /// As [`Agent::start_in_cluster`], with these limits on dead containers.
    pub fn start_limiting_dead_containers(
        sim: &SimRuntime,
        root: &Path,
        pods: Vec<Pod>,
        dead_containers: DeadContainerPolicy,
        api: &Api,
    ) -> Self {
        let options = StartOptions { dead_containers, api: Some(api.clone()), ..StartOptions::default() };
        Self::begin(sim, SensorSet::ALL, root, pods, options)
    }

    /// As [`Agent::start`], with statuses and final deletions sent to `api`.
    pub fn start_in_cluster(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>, api: &Api) -> Self {
        Self::begin(sim, sensors, root, pods, StartOptions { api: Some(api.clone()), ..StartOptions::default() })
    }

    /// As [`Agent::start_in_cluster`], with reports of the PLEG recorded in `seen`.
    pub fn start_observed_in_cluster(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
        seen: Seen,
        api: &Api,
    ) -> Self {
        Self::begin(sim, sensors, root, pods, StartOptions { seen, api: Some(api.clone()), ..StartOptions::default() })
    }

    /// As [`Agent::start`], with the metrics that the real agent has.
    pub fn start_with_metrics(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
    ) -> (Self, Arc<Metrics>) {
        let metrics = Metrics::new();
        let observer = Arc::new(Observers(metrics.clone()));
        let options =
            StartOptions { observer, metrics: metrics.clone(), counted: metrics.clone(), ..StartOptions::default() };
        (Self::begin(sim, sensors, root, pods, options), metrics)
    }

    /// As [`Agent::start`], with events sent to `recorder`, the metrics that the real agent has, and reports of the PLEG
    /// recorded in `seen`.
    pub fn start_reporting(
        sim: &SimRuntime,
        sensors: SensorSet,
        root: &Path,
        pods: Vec<Pod>,
        recorder: Recorder,
        seen: Seen,
    ) -> (Self, Arc<Metrics>) {
        let metrics = Metrics::new();
        let observer = Arc::new(Observers(metrics.clone()));
        let metrics_of = metrics.clone();
        let options = StartOptions { seen, observer, recorder, metrics: metrics_of, ..StartOptions::default() };
        (Self::begin(sim, sensors, root, pods, options), metrics)
    }

    /// As [`Agent::start`], with cgroups of pods and settings of resources.
    pub fn start_with_cgroups(
        sim: &SimRuntime,
        root: &Path,
        pods: Vec<Pod>,
        cgroups: Cgroups,
        resources: ResourceSettings,
    ) -> Self {
        let options = StartOptions { cgroups: Some(cgroups), resources, ..StartOptions::default() };
        Self::begin(sim, SensorSet::ALL, root, pods, options)
    }

    /// As [`Agent::start_reporting`], on a node that offers this to pods. `read_node` is the API server's.
    pub fn start_offering(
        sim: &SimRuntime,
        root: &Path,
        pods: Vec<Pod>,
        recorder: Recorder,
        (offer, read_node): (NodeOffer, Option<ReadNode>),
    ) -> (Self, Arc<Metrics>) {
        let metrics = Metrics::new();
        let observer = Arc::new(Observers(metrics.clone()));
        let metrics_of = metrics.clone();
        let options =
            StartOptions { observer, recorder, metrics: metrics_of, offer, read_node, ..StartOptions::default() };
        (Self::begin(sim, SensorSet::ALL, root, pods, options), metrics)
    }

    /// As [`Agent::start_in_cluster`], on a node that offers this to pods.
    pub fn start_in_full_cluster(sim: &SimRuntime, root: &Path, pods: Vec<Pod>, offer: NodeOffer, api: &Api) -> Self {
        let options = StartOptions { offer, api: Some(api.clone()), ..StartOptions::default() };
        Self::begin(sim, SensorSet::ALL, root, pods, options)
    }

    /// As [`Agent::start`], on a node that offers this to pods. The pods are the API server's; static ones are expected
    /// until [`Agent::add`] delivers some.
    pub fn start_before_static_pods(sim: &SimRuntime, root: &Path, pods: Vec<Pod>, offer: NodeOffer) -> Self {
        let static_pods = Some(root.join("manifests"));
        Self::begin(sim, SensorSet::ALL, root, pods, StartOptions { offer, static_pods, ..StartOptions::default() })
    }

    /// As [`Agent::start_before_static_pods`], with these sandboxes of static pods that run.
    pub fn start_beside_static_pods(
        sim: &SimRuntime,
        root: &Path,
        pods: Vec<Pod>,
        running: Vec<StaticSandbox>,
    ) -> Self {
        let (static_pods, adoptions) = (Some(root.join("manifests")), Adoptions::new(running, root));
        Self::begin(sim, SensorSet::ALL, root, pods, StartOptions { static_pods, adoptions, ..StartOptions::default() })
    }

    /// As [`Agent::start_before_static_pods`], with mirror pods at this API server.
    pub fn start_with_mirrors(sim: &SimRuntime, root: &Path, pods: Vec<Pod>, api: &Api) -> Self {
        let static_pods = Some(root.join("manifests"));
        let options = StartOptions { static_pods, mirrors: true, api: Some(api.clone()), ..StartOptions::default() };
        Self::begin(sim, SensorSet::ALL, root, pods, options)
    }

    /// As [`Agent::start`], with an API server that never answers. Static pods are expected until [`Agent::add`] delivers
    /// some.
    pub fn start_without_answers(sim: &SimRuntime, root: &Path) -> Self {
        let static_pods = Some(root.join("manifests"));
        let options = StartOptions { static_pods, unreachable_api: true, ..StartOptions::default() };
        Self::begin(sim, SensorSet::ALL, root, Vec::new(), options)
    }

    /// As [`Agent::start`], on a node that offers this to pods, has these cgroups and settings, and rules out these resizes.
    /// Returns the metrics of the pipeline and its workers.
    pub fn start_resizing(
        sim: &SimRuntime,
        root: &Path,
        pods: Vec<Pod>,
        recorder: Recorder,
        (offer, resizes): (NodeOffer, ResizePolicy),
        (cgroups, resources): (Option<Cgroups>, ResourceSettings),
    ) -> (Self, Arc<Metrics>) {
        let metrics = Metrics::new();
        let (observer, counted) = (Arc::new(Observers(metrics.clone())), metrics.clone());
        let options =
            StartOptions { observer, recorder, offer, resizes, cgroups, resources, counted, ..StartOptions::default() };
        (Self::begin(sim, SensorSet::ALL, root, pods, options), metrics)
    }

    /// As [`Agent::start`], with these API objects, which pods may refer to.
    pub fn start_with_objects(sim: &SimRuntime, root: &Path, pods: Vec<Pod>, objects: Objects) -> Self {
        Self::begin(sim, SensorSet::ALL, root, pods, StartOptions { objects, ..StartOptions::default() })
    }

    /// As [`Agent::start_in_cluster`], with these volumes below `root`, and with ranges of ids for pods with a user namespace of
    /// their own.
    pub fn start_with_volumes(sim: &SimRuntime, root: &Path, pods: Vec<Pod>, api: &Api, volumes: Volumes) -> Self {
        let options = StartOptions { api: Some(api.clone()), volumes: Some(volumes), ..StartOptions::default() };
        Self::begin(sim, SensorSet::ALL, root, pods, options)
    }

    /// As [`Agent::start`], with a clock that is so much behind the times of exits, as after it was set back.
    pub fn start_behind(sim: &SimRuntime, root: &Path, pods: Vec<Pod>, behind: Duration) -> Self {
        Self::begin(sim, SensorSet::ALL, root, pods, StartOptions { behind, ..StartOptions::default() })
    }
}
