//! The PLEG under random schedules: exits, lost and malformed events, failing and hanging calls, runtime restarts, and
//! agent restarts. No exit is reported twice, none is missed, and once faults end the cache equals the runtime's state.

use std::time::Duration;

use keblet::model::ContainerState;
use keblet::model::LifecycleKind;
use keblet::model::PodUid;
use keblet_proto::cri::v1;
use keblet_tests::cri::client::Client;
use keblet_tests::cri::client::container;
use keblet_tests::cri::client::sandbox;
use keblet_tests::cri::*;
use keblet_tests::node::PlegHarness;
use keblet_tests::node::SensorSet;
use keblet_tests::seeds;
use tokio::time::sleep;
use tokio::time::timeout;

const PODS: [&str; 3] = ["a", "b", "c"];
const SPAN: Duration = Duration::from_secs(40);
/// Hung calls end by the client's deadline; then the next retry reports the state. If all events of a container are lost, that
/// is the slow relist, every five minutes.
const SETTLE: Duration = Duration::from_secs(400);

/// Launches a container whenever a pod's last one has exited, like a worker without back-off.
async fn restart_for_ever(sim: SimRuntime, mut client: Client, pod: &'static str, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    for attempt in 0.. {
        let program = format!("exit {} {}ms", rng.u8(..), rng.u32(1..20_000));
        let launch = async {
            let sandbox_id = client.run_sandbox(sandbox(pod, attempt)).await?;
            client.launch(&sandbox_id, container("main", attempt, &program)).await
        };
        // A FaultKind may apply to the test's calls as well as to the agent's.
        let launched = timeout(Duration::from_secs(4), launch).await;
        sleep(Duration::from_millis(rng.u64(0..6000))).await;
        if let Ok(Ok(id)) = launched
            && attempt % 4 == 3
        {
            let _ = timeout(Duration::from_secs(4), client.remove(&id)).await;
        }
        if sim.trace(|l| l.history(pod, "main").count() > 12) {
            return;
        }
    }
}

async fn schedule(seed: u64) {
    let features = if (seed / 4).is_multiple_of(2) { Features::containerd_1_7() } else { Features::all() };
    let sim = SimRuntime::new(Options { seed, jitter: 0.3, features, ..Options::default() });
    sim.images(|images| images.store("busybox", 1));
    let client = Client::new(sim.memory().channel());
    let sensors = [SensorSet::ALL, SensorSet::EVENTS, SensorSet { probes: false, ..SensorSet::ALL }, SensorSet::LISTS];
    let sensors = sensors[usize::try_from(seed % 4).unwrap_or(0)];
    let mut harness = PlegHarness::open(&sim, sensors);
    let targets: Vec<_> = PODS.iter().map(|pod| (pod.to_string(), "main".to_owned())).collect();
    let faults = FaultSchedule::random(seed, SPAN, 14, &targets);
    let plan = format!("{faults:#?}");
    let busy: Vec<_> =
        PODS.iter().map(|pod| tokio::spawn(restart_for_ever(sim.clone(), client.clone(), pod, seed))).collect();
    faults
        .run(&sim, async || {
            check_exits(&sim, &harness, seed);
            harness = PlegHarness::open(&sim, sensors);
        })
        .await;
    for task in busy {
        task.abort();
    }
    sleep(SETTLE).await;
    check_exits(&sim, &harness, seed);
    check_cache(&sim, &harness, seed, &plan);
}

/// No exit is reported twice by the same agent.
fn check_exits(sim: &SimRuntime, harness: &PlegHarness, seed: u64) {
    for instance in sim.trace(|l| l.instances().to_vec()) {
        let reports = harness.seen.of(LifecycleKind::ContainerDied, &instance.id);
        assert!(reports.len() <= 1, "seed {seed}: {} was reported twice: {reports:#?}", instance.id);
        let early = reports.iter().any(|(at, _)| instance.gone.is_none_or(|gone| *at < gone));
        let removed = instance.removed.is_some() || instance.started.is_none();
        assert!(
            !early || removed,
            "seed {seed}: {} was reported before its processes had exited: {reports:#?}",
            instance.id
        );
    }
}

/// The cache equals the runtime's state, and every exit in the runtime was reported.
fn check_cache(sim: &SimRuntime, harness: &PlegHarness, seed: u64, plan: &str) {
    for pod in PODS {
        let cached = harness.pleg.cached(&PodUid::from(format!("{pod}-uid")));
        let mut cached: Vec<_> =
            cached.iter().flat_map(|s| &s.containers).map(|c| (c.id.to_string(), c.state)).collect();
        let mut actual: Vec<_> =
            sim.statuses(pod).into_iter().map(|s| (s.id.clone(), container_state(s.state()))).collect();
        // Containers in state Created are not compared: a worker inspects after creating one, and here is no worker.
        let normalise = |states: &mut Vec<(String, ContainerState)>| {
            states.retain(|(_, state)| *state != ContainerState::Created);
            states.sort();
        };
        normalise(&mut cached);
        normalise(&mut actual);
        assert_eq!(cached, actual, "seed {seed}: pod {pod}\n{plan}\n{}", sim.trace(Trace::to_string));
        for (id, _) in actual.iter().filter(|(_, state)| *state == ContainerState::Exited) {
            assert_eq!(harness.seen.exit_count(id), 1, "seed {seed}: the exit of {id} was not reported\n{plan}");
        }
    }
}

fn container_state(state: v1::ContainerState) -> ContainerState {
    match state {
        v1::ContainerState::ContainerCreated => ContainerState::Created,
        v1::ContainerState::ContainerRunning => ContainerState::Running,
        v1::ContainerState::ContainerExited => ContainerState::Exited,
        v1::ContainerState::ContainerUnknown => ContainerState::Unknown,
    }
}

#[test]
fn random_schedules_first_half() {
    seeds::run(0..20, schedule);
}

#[test]
fn random_schedules_second_half() {
    seeds::run(20..40, schedule);
}
