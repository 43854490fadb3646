//! What the servers read.

use std::sync::Arc;

use tokio::sync::watch;

use super::observers::sensor_reports;
use crate::cli::logging;
use crate::cli::version::KUBERNETES;
use crate::config::Settings;
use crate::events::sensors::SensorBoard;
use crate::metrics::Metrics;
use crate::metrics::PodOrigin;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pleg::PlegHandle;
use crate::runtime::RuntimeState;
use crate::server;
use crate::server::Handles;
use crate::status::Statuses;
use crate::sync::SharedPods;

/// What the handles are made from.
pub struct Server<'a> {
    /// Everything that is counted.
    pub metrics: &'a Arc<Metrics>,
    /// Sensors.
    pub board: &'a SensorBoard,
    /// Desired pods.
    pub shared: &'a SharedPods,
    /// Configuration and flags, to be shown.
    pub settings: &'a Settings,
    /// How much is logged.
    pub verbosity: logging::Verbosity,
}

/// Statuses and pod cache, once the runtime has been reached.
pub type Later = watch::Receiver<Option<(Statuses, PlegHandle)>>;

impl Server<'_> {
    /// Read-only handles for the servers.
    pub fn handles(&self, runtime: watch::Receiver<RuntimeState>, later: Later) -> Handles {
        let (shared, statuses) = (self.shared.clone(), later.clone());
        let board = self.board.clone();
        let age = self.shared.clone();
        let gauges = Gauges { metrics: self.metrics.clone(), shared: self.shared.clone(), later };
        let ready = runtime;
        let running = gauges.later.clone();
        let verbosity = self.verbosity.clone();
        Handles {
            pods: Arc::new(move || pods(&shared, &statuses)),
            running_pods: Arc::new(move || match &*running.borrow() {
                Some((_, pleg)) => Ok(server::running(&pleg.all())),
                None => Err("the container runtime has not answered yet".to_owned()),
            }),
            sensors: Arc::new(move || sensor_reports(&board)),
            sync_loop_age: Arc::new(move || age.last_turn().map(|at| at.elapsed())),
            ready: Arc::new(move || match &*ready.borrow() {
                RuntimeState::Ready { .. } => Ok(()),
                RuntimeState::Unreachable(reason) | RuntimeState::NotReady(reason) => Err(reason.clone()),
                RuntimeState::Unknown => Err("the container runtime has not answered yet".to_owned()),
            }),
            refresh: Arc::new(move || gauges.refresh()),
            verbosity: Arc::new(move |level| verbosity.set(level)),
            configz: Arc::new(self.settings.configz()),
            version: KUBERNETES,
            flags: Arc::new(self.settings.flag_values()),
            metrics: self.metrics.clone(),
        }
    }
}

fn pods(shared: &SharedPods, later: &Later) -> Vec<Pod> {
    let statuses = later.borrow().as_ref().map(|(statuses, _)| statuses.clone());
    // A pod of the API server is shown as it was last received.
    let own = |pod: &Pod| spec::is_static(pod);
    let with_status = |pod: Pod| match statuses.as_ref().filter(|_| own(&pod)).and_then(|s| s.get(&pod_ref(&pod).uid)) {
        Some(status) => {
            let mut shown = k8s_openapi::api::core::v1::Pod::clone(&pod);
            shown.status = Some(status);
            Arc::new(shown)
        }
        None => pod,
    };
    shared.all().into_iter().map(with_status).collect()
}

/// Gauges are read off the agent's state when somebody asks for metrics.
struct Gauges {
    metrics: Arc<Metrics>,
    shared: SharedPods,
    later: Later,
}

impl Gauges {
    fn refresh(&self) {
        let (fixed, api): (Vec<Pod>, Vec<Pod>) = self.shared.all().into_iter().partition(|pod| spec::is_static(pod));
        self.metrics.pods.desired(PodOrigin::Static, fixed.len());
        self.metrics.pods.desired(PodOrigin::Api, api.len());
        self.metrics.pods.mirrors(self.shared.mirrors().len());
        let Some((_, pleg)) = &*self.later.borrow() else { return };
        let snapshots = pleg.all();
        let running = snapshots.iter().filter(|s| s.sandboxes.iter().any(|sandbox| sandbox.ready)).count();
        let count = |state| snapshots.iter().flat_map(|s| &s.containers).filter(|c| c.state == state).count();
        let states = [
            ("created", ContainerState::Created),
            ("running", ContainerState::Running),
            ("exited", ContainerState::Exited),
            ("unknown", ContainerState::Unknown),
        ];
        self.metrics.pods.running(running, states.map(|(name, state)| (name, count(state))));
    }
}
