//! The PLEG alone on the simulated runtime; the test acts on the runtime itself, as a pod worker would.

mod exits;
mod failure_modes;
mod random;

use keblet::events::sensors::Sensor;
use keblet::events::sensors::SensorState;
use keblet::model::ContainerState;
use keblet::model::LifecycleKind;
use keblet::model::PodSnapshot;
use keblet::model::PodUid;
use keblet_tests::cri::client::Client;
use keblet_tests::cri::client::container;
use keblet_tests::cri::client::sandbox;
use keblet_tests::cri::*;
use keblet_tests::node::PlegHarness;
use keblet_tests::node::Seen;
use keblet_tests::node::SensorSet;
use std::time::Duration;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn uid(pod: &str) -> PodUid {
    PodUid::from(format!("{pod}-uid"))
}

/// Starts sensors and PLEG and waits until the event stream is up and the first relist done.
async fn awake(sim: &SimRuntime, sensors: SensorSet) -> PlegHarness {
    let harness = PlegHarness::open(sim, sensors);
    let is_up = || !sensors.events || harness.sensor_states.get(Sensor::RuntimeEvents) == Some(SensorState::Up);
    let relisted = |seen: &Seen| seen.relists().iter().filter(|(_, _, ok)| *ok).count() >= 2;
    let up = harness.seen.until(secs(5), |seen| is_up() && relisted(seen)).await;
    assert!(up || !sensors.events, "{:?}", harness.sensor_states.report());
    harness
}

/// State of a container in the pod cache.
fn cached(harness: &PlegHarness, pod: &str, id: &str) -> Option<ContainerState> {
    state(harness.pleg.cached(&uid(pod)).as_deref()?, id)
}

fn state(snapshot: &PodSnapshot, id: &str) -> Option<ContainerState> {
    snapshot.containers.iter().find(|c| c.id.as_str() == id).map(|c| c.state)
}

async fn run(client: &mut Client, pod: &str, program: &str) -> (String, String) {
    let sandbox_id = client.run_sandbox(sandbox(pod, 0)).await.expect("sandbox");
    let id = client.launch(&sandbox_id, container("main", 0, program)).await.expect("launch");
    (sandbox_id, id)
}

/// Time from a container's exit to its first report.
fn latency(sim: &SimRuntime, harness: &PlegHarness, id: &str) -> Duration {
    let (exited_at, _) = sim.trace(|l| l.instance(id).and_then(|i| i.exited)).expect("exited");
    let (reported_at, _) = harness.seen.of(LifecycleKind::ContainerDied, id).first().expect("reported").clone();
    reported_at.saturating_duration_since(exited_at)
}
