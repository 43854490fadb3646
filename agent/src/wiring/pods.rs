//! What the servers read.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::watch;

use super::observers::sensor_reports;
use crate::cli::logging;
use crate::cli::version::KUBERNETES;
use crate::config::Settings;
use crate::events::sensors::SensorBoard;
use crate::metrics::Metrics;
use crate::metrics::PodOrigin;
use crate::metrics::Working;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pleg::PlegHandle;
use crate::runtime::RuntimeState;
use crate::server;
use crate::server::Handles;
use crate::status::Statuses;
use crate::sync::SharedPods;
use crate::workers::roster;
use crate::workers::roster::Roster;
use crate::workers::state::Phase;

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

/// What can be read once the runtime has been reached.
pub struct Running {
    /// What pods are said to be.
    pub statuses: Statuses,
    /// What the runtime says of them.
    pub pleg: PlegHandle,
    /// Who looks after them.
    pub roster: Roster,
}

/// That, and nothing before.
pub type Later = watch::Receiver<Option<Running>>;

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
                Some(running) => Ok(server::running(&running.pleg.all())),
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
    let statuses = later.borrow().as_ref().map(|running| running.statuses.clone());
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
        let ephemeral = fixed.iter().chain(&api).map(|pod| spec::ephemeral_containers(pod).len()).sum();
        self.metrics.pods.ephemeral(ephemeral);
        let Some(running) = &*self.later.borrow() else { return };
        let desired = fixed.into_iter().chain(api).map(|pod| (pod_ref(&pod).uid, pod)).collect();
        self.count_working(&desired, running);
        let snapshots = running.pleg.all();
        let count_of_pods = snapshots.iter().filter(|s| s.sandboxes.iter().any(|sandbox| sandbox.ready)).count();
        let count = |state| snapshots.iter().flat_map(|s| &s.containers).filter(|c| c.state == state).count();
        let states = [
            ("created", ContainerState::Created),
            ("running", ContainerState::Running),
            ("exited", ContainerState::Exited),
            ("unknown", ContainerState::Unknown),
        ];
        self.metrics.pods.running(count_of_pods, states.map(|(name, state)| (name, count(state))));
    }

    /// Pods by where they are in their life, and those that take up room.
    fn count_working(&self, desired: &HashMap<PodUid, Pod>, running: &Running) {
        let working = running.roster.all();
        let phase_of = |uid: &PodUid, pod: &Pod| {
            let status = running.statuses.get(uid).or_else(|| pod.status.clone());
            status.and_then(|status| status.phase).unwrap_or_default()
        };
        let is_active = |(uid, pod): &(&PodUid, &Pod)| {
            let worker = working.get(*uid);
            let over = matches!(phase_of(uid, pod).as_str(), "Failed" | "Succeeded");
            worker.is_none_or(|worker| worker.phase < Phase::Terminated) && (!over || worker.is_some_and(|w| w.ending))
        };
        let (fixed, api): (Vec<_>, Vec<_>) =
            desired.iter().filter(is_active).partition(|(_, pod)| spec::is_static(pod));
        self.metrics.pods.active(PodOrigin::Static, fixed.len());
        self.metrics.pods.active(PodOrigin::Api, api.len());
        let mut counts: HashMap<Working, usize> = HashMap::new();
        for (uid, worker) in &working {
            *counts.entry(group(worker, desired.contains_key(uid))).or_default() += 1;
        }
        self.metrics.pods.working(counts);
    }
}

/// What a pod with a worker is counted as.
fn group(worker: &roster::Working, desired: bool) -> Working {
    let lifecycle = match worker.phase {
        Phase::Syncing => "sync",
        Phase::Terminating => "terminating",
        Phase::Terminated | Phase::Finished => "terminated",
    };
    let (config, origin) = match &worker.pod {
        None => ("runtime_only", PodOrigin::Unknown),
        Some(pod) => {
            let origin = if spec::is_static(pod) { PodOrigin::Static } else { PodOrigin::Api };
            (if desired { "desired" } else { "orphan" }, origin)
        }
    };
    Working { lifecycle, config, origin }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use crate::model::testing;

    #[test]
    fn pods_with_a_worker_are_grouped_as_upstream_does() {
        let working = |phase, pod: Option<k8s_openapi::api::core::v1::Pod>| roster::Working {
            phase,
            ending: phase > Phase::Syncing,
            pod: pod.map(Arc::new),
        };
        let pod = || testing::pod("Always", &[], &["a"]);
        let seen = [
            (working(Phase::Syncing, Some(testing::into_static(pod()))), true),
            (working(Phase::Syncing, Some(pod())), true),
            (working(Phase::Terminating, Some(pod())), false),
            (working(Phase::Terminating, None), false),
            (working(Phase::Finished, Some(pod())), true),
        ];
        let metrics = Metrics::new();
        metrics.pods.working(seen.iter().map(|(worker, desired)| (group(worker, *desired), 1)));
        let text = metrics.render().expect("metrics");
        for labels in [
            r#"config="desired",lifecycle="sync",static="true""#,
            r#"config="desired",lifecycle="sync",static="""#,
            r#"config="orphan",lifecycle="terminating",static="""#,
            r#"config="runtime_only",lifecycle="terminating",static="unknown""#,
            r#"config="desired",lifecycle="terminated",static="""#,
        ] {
            let line = format!("kubelet_working_pods{{{labels}}} 1");
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }
}
