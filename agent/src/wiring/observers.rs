//! Metrics of the runtime client, PLEG, workers, recorder and sensors.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::cli::version::KUBERNETES;
use crate::config::Feature;
use crate::config::FeatureGates;
use crate::events::RelistReason;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::events::sensors::SensorStates;
use crate::metrics::BuildInfo;
use crate::metrics::Metrics;
use crate::metrics::PodOrigin;
use crate::metrics::SensorLevel;
use crate::metrics::SyncKind;
use crate::model::ContainerClass;
use crate::model::LifecycleEvent;
use crate::model::Pod;
use crate::model::spec;
use crate::node::architecture;
use crate::pleg::PlegObserver;
use crate::recorder::Loss;
use crate::recorder::RecorderObserver;
use crate::runtime::CallObserver;
use crate::runtime::FinishedCall;
use crate::runtime::Operation;
use crate::server::SensorReport;
use crate::workers::act::SyncOutcome;
use crate::workers::worker::WorkerObserver;

/// Updates metrics.
#[derive(Clone, Debug)]
pub struct Observers(
    /// The metrics.
    pub Arc<Metrics>,
);

impl CallObserver for Observers {
    fn finished(&self, call: FinishedCall) {
        self.0.runtime.call(call.operation.metric(), call.duration, call.error.is_none());
        if call.operation == Operation::Status && call.error.is_none() {
            self.0.pleg.runtime_answered();
        }
    }
}

impl PlegObserver for Observers {
    fn event(&self, event: &LifecycleEvent, latency: Option<Duration>) {
        self.0.pleg.event(event.source, event.kind, latency);
    }

    fn relist(&self, reason: RelistReason, took: Duration, interval: Option<Duration>, ok: bool) {
        self.0.pleg.relist(reason.as_str(), took, interval, ok);
    }

    fn inspection(&self, took: Duration, ok: bool) {
        self.0.pleg.inspection(took, ok);
    }

    fn contradiction(&self) {
        self.0.pleg.contradiction();
    }
}

impl WorkerObserver for Observers {
    fn planned(&self, took: Duration) {
        self.0.workers.planned(took);
    }

    fn acted(&self, took: Duration, outcome: &SyncOutcome) {
        self.0.workers.acted("sync", took, outcome.is_ok());
        for start in &outcome.starts {
            let error = start.result.as_ref().err().map(|failure| failure.token.as_str());
            self.0.containers.started(container_type(start.class), error);
        }
        outcome.sandbox.into_iter().for_each(|ok| self.0.pods.sandbox_started(ok));
    }

    fn pass(&self, operation: &'static str, took: Duration) {
        let kind = match operation {
            "terminating" => SyncKind::Kill,
            "terminated" => SyncKind::Terminated,
            "create" => SyncKind::Create,
            "update" => SyncKind::Update,
            _ => SyncKind::Sync,
        };
        self.0.workers.synced(kind, took);
    }

    fn begun(&self, pod: &Pod, since_seen: Option<Duration>) {
        self.0.containers.of_new_pod(spec::regular_containers(pod).len());
        since_seen.into_iter().for_each(|since_seen| self.0.workers.started(since_seen));
    }

    fn container_exited(&self, class: ContainerClass, exit_code: i32, reason: &str) {
        self.0.containers.terminated(container_type(class), exit_code, reason);
    }

    fn restarted(&self, fixed: bool) {
        self.0.pods.restarted(if fixed { PodOrigin::Static } else { PodOrigin::Api });
    }

    fn orphaned(&self) {
        self.0.pods.orphaned();
    }

    fn rejected(&self, reason: &str) {
        self.0.pods.rejected(reason);
    }

    fn preempted(&self, resource: &str) {
        self.0.eviction.preempted(resource);
    }
}

/// Upstream's `container_type`.
fn container_type(class: ContainerClass) -> &'static str {
    match class {
        ContainerClass::Regular => "container",
        ContainerClass::Init | ContainerClass::Sidecar => "init_container",
        ContainerClass::Ephemeral => "ephemeral_container",
    }
}

impl RecorderObserver for Observers {
    fn lost(&self, why: Loss) {
        self.0.recorder.lost(why.as_str());
    }
}

/// The sensors' states for the health pages.
pub(super) fn sensor_reports(sensor_states: &SensorStates) -> Vec<SensorReport> {
    let report = |(sensor, state): (Sensor, SensorState)| SensorReport {
        sensor: sensor.as_str(),
        state: state.as_str(),
        reason: state.reason().map(str::to_owned),
    };
    sensor_states.report().into_iter().map(report).collect()
}

/// Keeps `keblet_sensor_state` up to date until `shutdown`.
pub(super) async fn follow_sensors(sensor_states: SensorStates, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut changes = sensor_states.subscribe();
    loop {
        changes.mark_unchanged();
        for (sensor, state) in sensor_states.report() {
            let level = match state {
                SensorState::Up => SensorLevel::Up,
                SensorState::Degraded(_) => SensorLevel::Degraded,
                SensorState::Down(_) => SensorLevel::Down,
                SensorState::Off => SensorLevel::Off,
            };
            metrics.sensors.state(sensor.as_str(), level);
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = shutdown.cancelled() => return,
        }
    }
}

/// Sets what does not change while the process runs: its build, the node's name, the feature gates.
pub(super) fn announce(metrics: &Metrics, node: &str, cgroup_version: i64, gates: &FeatureGates) {
    metrics.node.name(node);
    metrics.node.cgroup_version(cgroup_version);
    metrics.node.metrics_provider("cadvisor");
    for gate in Feature::all() {
        let spec = gate.spec();
        metrics.node.feature(spec.name, spec.stage.label(), gates.enabled(gate));
    }
    for (name, stage, on) in gates.stages() {
        metrics.node.feature(name, stage.label(), on);
    }
    let mut numbers = KUBERNETES.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let platform = format!("{}/{}", std::env::consts::OS, architecture());
    metrics.node.build(&BuildInfo { git_version: KUBERNETES, major, minor, platform: &platform, compiler: "rustc" });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_under_upstreams_names() {
        let metrics = Metrics::new();
        let took = Duration::from_millis(2);
        let operation = Operation::RunPodSandbox;
        Observers(metrics.clone()).finished(FinishedCall { operation, duration: took, error: None });
        let text = metrics.render().unwrap();
        assert!(text.contains("kubelet_runtime_operations_total{operation_type=\"run_podsandbox\"} 1\n"), "{text}");
        assert!(!text.contains("kubelet_runtime_operations_errors_total{"));
    }

    #[test]
    fn a_runtime_that_answers_its_checks_renews_when_the_pleg_was_seen() {
        let observers = Observers(Metrics::new());
        let seen = || {
            let text = observers.0.render().unwrap();
            let value = text.lines().find_map(|line| line.strip_prefix("kubelet_pleg_last_seen_seconds "));
            value.expect("the family").parse::<f64>().unwrap()
        };
        let checked = |error| {
            observers.finished(FinishedCall { operation: Operation::Status, duration: Duration::ZERO, error });
        };
        checked(None);
        assert_eq!(seen(), 0.0, "no list of all pods yet");
        observers.relist(RelistReason::Start, Duration::ZERO, None, true);
        let listed = seen();
        checked(Some(tonic::Code::Unavailable));
        assert_eq!(seen(), listed);
        checked(None);
        let answered = seen();
        assert!(answered > listed, "also while nothing happens on the node");
        observers.relist(RelistReason::Period, Duration::ZERO, None, false);
        checked(None);
        assert_eq!(seen(), answered, "it cannot list its pods");
    }

    #[test]
    fn workers_are_counted_under_upstreams_names() {
        let metrics = Metrics::new();
        let (counting, pod) =
            (Observers(metrics.clone()), crate::model::testing::pod("Always", &["init"], &["a", "b"]));
        counting.begun(&pod.into(), Some(Duration::from_millis(7)));
        counting.container_exited(ContainerClass::Sidecar, 137, "OOMKilled");
        counting.container_exited(ContainerClass::Ephemeral, 0, "Completed");
        counting.restarted(false);
        counting.rejected("NodeShutdown");
        counting.rejected("OutOfexample.com/gpu");
        counting.rejected("UnsupportedFields");
        counting.preempted("cpu");
        let text = metrics.render().unwrap();
        for line in [
            "kubelet_pod_worker_start_duration_seconds_bucket{le=\"0.005\"} 0",
            "kubelet_pod_worker_start_duration_seconds_bucket{le=\"0.01\"} 1",
            "kubelet_containers_per_pod_count_bucket{le=\"1\"} 0",
            "kubelet_containers_per_pod_count_bucket{le=\"2\"} 1",
            "kubelet_terminated_containers_total{container_type=\"init_container\",exit_code=\"137\",reason=\"OOMKilled\"} 1",
            "kubelet_terminated_containers_total{container_type=\"ephemeral_container\",exit_code=\"0\",reason=\"Completed\"} 1",
            "kubelet_restarted_pods_total{static=\"\"} 1",
            "kubelet_admission_rejections_total{reason=\"NodeShutdown\"} 1",
            "kubelet_admission_rejections_total{reason=\"OutOfExtendedResources\"} 1",
            "kubelet_admission_rejections_total{reason=\"Other\"} 1",
            "kubelet_preemptions{preemption_signal=\"cpu\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn node_and_gates() {
        let metrics = Metrics::new();
        announce(&metrics, "node-1", 1, &FeatureGates::default());
        let text = metrics.render().unwrap();
        for line in [
            "kubelet_node_name{node=\"node-1\"} 1",
            "kubelet_cgroup_version 1",
            "kubelet_metrics_provider{provider=\"cadvisor\"} 1",
            "kubernetes_feature_enabled{name=\"EventedPLEG\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"NodeSwap\",stage=\"\"} 1",
            "kubernetes_feature_enabled{name=\"AllAlpha\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"AllBeta\",stage=\"BETA\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}");
        }
        assert!(text.contains("git_version=\"v1.36.3\"") && text.contains("minor=\"36\""));
    }

    #[tokio::test]
    async fn metrics_follow_the_states_of_sensors() {
        let (sensor_states, metrics, shutdown) = (SensorStates::default(), Metrics::new(), CancellationToken::new());
        sensor_states.set(Sensor::Exits, SensorState::Up);
        let task = tokio::spawn(follow_sensors(sensor_states.clone(), metrics.clone(), shutdown.clone()));
        let shows = async |line: &str| {
            let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
            while !metrics.render().unwrap().contains(line) {
                assert!(tokio::time::Instant::now() < deadline, "{line} never shows");
                tokio::task::yield_now().await;
            }
        };
        shows("keblet_sensor_state{sensor=\"exits\",state=\"up\"} 1").await;
        sensor_states.set(Sensor::Exits, SensorState::Down("gone".to_owned()));
        shows("keblet_sensor_state{sensor=\"exits\",state=\"down\"} 1").await;
        shows("keblet_sensor_state{sensor=\"exits\",state=\"up\"} 0").await;
        assert_eq!(sensor_reports(&sensor_states)[0].reason.as_deref(), Some("gone"));
        shutdown.cancel();
        task.await.unwrap();
    }
}
