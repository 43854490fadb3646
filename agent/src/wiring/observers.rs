//! What the rooms tell, turned into numbers: the ends of the ports that `runtime`, `pleg` and `events` offer.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::cli::version::KUBERNETES;
use crate::config::{FeatureGates, Gate};
use crate::events::RelistReason;
use crate::events::sensors::{Sensor, SensorBoard, SensorState};
use crate::metrics::{BuildInfo, Metrics, SensorLevel, SyncKind};
use crate::model::{ContainerClass, LifecycleEvent, SyncOutcome};
use crate::pleg::PlegObserver;
use crate::recorder::{Loss, RecorderObserver};
use crate::runtime::{CallObserver, FinishedCall};
use crate::server::SensorReport;
use crate::workers::worker::WorkerObserver;

/// Counts what it is told.
#[derive(Clone, Debug)]
pub struct Observers(
    /// Where it is counted.
    pub Arc<Metrics>,
);

impl CallObserver for Observers {
    fn finished(&self, call: FinishedCall) {
        self.0.runtime.call(call.operation.metric(), call.duration, call.error.is_none());
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

    fn oom_kill(&self, is_init: Option<bool>) {
        let victim = match is_init {
            Some(true) => "init",
            Some(false) => "child",
            None => "other",
        };
        self.0.sensors.oom_kill(victim);
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
            let kind = match start.class {
                ContainerClass::Regular => "container",
                ContainerClass::Init | ContainerClass::Sidecar => "init_container",
                ContainerClass::Ephemeral => "ephemeral_container",
            };
            self.0.pods.container_started(kind, error);
        }
        outcome.sandbox.into_iter().for_each(|ok| self.0.pods.sandbox_started(ok));
    }

    fn pass(&self, operation: &'static str, took: Duration) {
        let kind = match operation {
            "terminating" => SyncKind::Kill,
            "terminated" => SyncKind::Terminated,
            _ => SyncKind::Sync,
        };
        self.0.workers.synced(kind, took);
    }
}

impl RecorderObserver for Observers {
    fn lost(&self, why: Loss) {
        self.0.recorder.lost(why.as_str());
    }
}

/// The sensors' states for the health pages.
pub fn sensor_reports(board: &SensorBoard) -> Vec<SensorReport> {
    let report = |(sensor, state): (Sensor, SensorState)| SensorReport {
        sensor: sensor.as_str(),
        state: state.as_str(),
        reason: state.reason().map(str::to_owned),
    };
    board.report().into_iter().map(report).collect()
}

/// Keeps `keblet_sensor_state` up to date until `shutdown`.
pub async fn follow_sensors(board: SensorBoard, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut changes = board.subscribe();
    loop {
        changes.mark_unchanged();
        for (sensor, state) in board.report() {
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
pub fn announce(metrics: &Metrics, node: &str, cgroup_version: i64, gates: &FeatureGates) {
    metrics.node.name(node);
    metrics.node.cgroup_version(cgroup_version);
    for gate in Gate::all() {
        let spec = gate.spec();
        metrics.node.feature(spec.name, spec.stage.label(), gates.enabled(gate));
    }
    let mut numbers = KUBERNETES.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let platform = format!("{}/{architecture}", std::env::consts::OS);
    metrics.node.build(&BuildInfo { git_version: KUBERNETES, major, minor, platform: &platform, compiler: "rustc" });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Operation;

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
    fn node_and_gates() {
        let metrics = Metrics::new();
        announce(&metrics, "node-1", 1, &FeatureGates::default());
        let text = metrics.render().unwrap();
        for line in [
            "kubelet_node_name{node=\"node-1\"} 1",
            "kubelet_cgroup_version 1",
            "kubernetes_feature_enabled{name=\"EventedPLEG\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"NodeSwap\",stage=\"\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}");
        }
        assert!(text.contains("git_version=\"v1.36.3\"") && text.contains("minor=\"36\""));
    }

    #[tokio::test]
    async fn sensor_states_follow_the_board() {
        let (board, metrics, shutdown) = (SensorBoard::default(), Metrics::new(), CancellationToken::new());
        board.set(Sensor::Exits, SensorState::Up);
        let task = tokio::spawn(follow_sensors(board.clone(), metrics.clone(), shutdown.clone()));
        let shows = async |line: &str| {
            let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
            while !metrics.render().unwrap().contains(line) {
                assert!(tokio::time::Instant::now() < deadline, "{line} never shows");
                tokio::task::yield_now().await;
            }
        };
        shows("keblet_sensor_state{sensor=\"exits\",state=\"up\"} 1").await;
        board.set(Sensor::Exits, SensorState::Down("gone".to_owned()));
        shows("keblet_sensor_state{sensor=\"exits\",state=\"down\"} 1").await;
        shows("keblet_sensor_state{sensor=\"exits\",state=\"up\"} 0").await;
        assert_eq!(sensor_reports(&board)[0].reason.as_deref(), Some("gone"));
        shutdown.cancel();
        task.await.unwrap();
    }
}
