//! Which probes are due, for which instances, and what becomes of their results.

use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::Probe;
use serde_json::json;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::after;
use crate::model::ContainerId;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::ProbeKind;
use crate::model::ProbeResult;
use crate::model::testing;
use crate::model::testing::exited;
use crate::model::testing::running;
use crate::model::testing::snapshot;
use crate::probes::ProbeResultStore;
use crate::probes::state::RunResult;
use crate::probes::table::Moment;
use crate::probes::table::Table;

/// A pod whose container `a` has these probes, and a sidecar with the same.
fn pod(probes: &[&str]) -> Pod {
    let mut pod = testing::pod("Always", &["side"], &["a", "plain"]);
    let spec = pod.spec.as_mut().expect("a spec");
    let sidecar = &mut spec.init_containers.as_mut().expect("init containers")[0];
    for container in [sidecar, &mut spec.containers[0]] {
        for kind in probes {
            let probe = serde_json::from_value(json!({ "exec": { "command": ["x"] } })).expect("a probe");
            match *kind {
                "liveness" => container.liveness_probe = Some(probe),
                "readiness" => container.readiness_probe = Some(probe),
                _ => container.startup_probe = Some(probe),
            }
        }
    }
    Arc::new(pod)
}

/// The pod with this initial delay of the readiness probe of container `a`.
fn delayed(pod: Pod, seconds: i32) -> Pod {
    let mut pod = Pod::unwrap_or_clone(pod);
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[0].readiness_probe.as_mut().expect("a probe").initial_delay_seconds = Some(seconds);
    Arc::new(pod)
}

struct World {
    table: Table,
    results: ProbeResultStore,
    origin: Instant,
    last_status: Option<PodStatus>,
}

/// The agent started when the instances with attempt 1 did.
const AGENT: u64 = 100;

impl World {
    fn new() -> Self {
        let results = ProbeResultStore::default();
        Self { table: Table::new(results.clone()), results, origin: Instant::now(), last_status: None }
    }

    /// Observes this many seconds after the agent's start.
    fn observe(&mut self, pod: &Pod, snapshot: &PodSnapshot, seconds: f64) -> usize {
        let agent =
            SystemTime::UNIX_EPOCH + Duration::from_nanos(testing::T0.unsigned_abs()) + Duration::from_secs(AGENT);
        let wall = agent + Duration::from_secs_f64(seconds);
        let moment = Moment { now: self.at(seconds), wall, agent: Some(agent) };
        let last_status = self.last_status.clone();
        self.table.observe(pod, snapshot, &|| last_status.clone(), moment).len()
    }

    fn at(&self, seconds: f64) -> Instant {
        after(self.origin, seconds)
    }

    /// The probes that are due, as `CONTAINER KIND`.
    fn due(&mut self, seconds: f64) -> Vec<String> {
        let now = self.at(seconds);
        let mut due = Vec::new();
        while let Some(job) = self.table.take_due(now) {
            due.push(format!("{} {:?}", job.container.as_str(), job.target.kind));
        }
        due.sort();
        due
    }

    fn result(&self, kind: ProbeKind, id: &str) -> Option<ProbeResult> {
        self.results.of_pod(&uid()).of_kind(kind).get(&ContainerId::from(id)).copied()
    }

    /// Runs everything that is due with this outcome. Returns how many.
    fn run(&mut self, seconds: f64, outcome: RunResult) -> usize {
        let now = self.at(seconds);
        let mut jobs = Vec::new();
        while let Some(job) = self.table.take_due(now) {
            let run = run();
            self.table.running(job.probe, run.clone());
            jobs.push((job.probe, run.id()));
        }
        for (probe, run) in &jobs {
            assert!(self.table.complete(*probe, *run, outcome, now));
        }
        jobs.len()
    }
}

/// A run in progress, of which only the handle matters.
fn run() -> AbortHandle {
    tokio::spawn(std::future::pending::<()>()).abort_handle()
}

fn uid() -> PodUid {
    PodUid::from("uid")
}

#[tokio::test]
async fn new_instances_have_results_at_once_and_are_probed() {
    let (mut world, pod) = (World::new(), pod(&["liveness", "readiness"]));
    let first = snapshot(vec![running("plain", 1), running("a", 1), exited("side", 1, 0)]);
    world.observe(&pod, &first, 0.0);
    assert_eq!(world.result(ProbeKind::Liveness, "a-1"), Some(ProbeResult::Success));
    assert_eq!(world.result(ProbeKind::Readiness, "a-1"), Some(ProbeResult::Failure));
    assert_eq!(world.result(ProbeKind::Readiness, "plain-1"), None, "it has no probe");
    assert_eq!(world.result(ProbeKind::Readiness, "side-1"), None, "it does not run");
    assert_eq!(world.due(9.0), ["a-1 Readiness"], "a server that begins may not be killed yet");
    assert_eq!(world.due(10.0), ["a-1 Liveness"]);
    assert_eq!(world.due(100.0), [""; 0], "they are still in progress");
}

#[tokio::test]
async fn another_instance_replaces_results_and_ends_runs() {
    let (mut world, pod) = (World::new(), pod(&["liveness"]));
    world.observe(&pod, &snapshot(vec![running("a", 1)]), 0.0);
    let now = world.at(10.0);
    let job = world.table.take_due(now).expect("it is due");
    let run = run();
    world.table.running(job.probe, run.clone());
    world.observe(&pod, &snapshot(vec![running("a", 2), exited("a", 1, 1)]), 11.0);
    assert!(!world.table.complete(job.probe, run.id(), RunResult::Failure, now), "its instance is gone");
    assert_eq!(world.result(ProbeKind::Liveness, "a-2"), Some(ProbeResult::Success));
    world.observe(&pod, &snapshot(vec![running("a", 2)]), 12.0);
    assert_eq!(world.result(ProbeKind::Liveness, "a-1"), None, "the runtime no longer has it");
    tokio::task::yield_now().await;
    assert!(run.is_finished(), "it is aborted");
}

#[tokio::test]
async fn a_startup_probe_lets_the_others_begin() {
    let (mut world, pod) = (World::new(), pod(&["startup", "liveness", "readiness"]));
    world.observe(&pod, &snapshot(vec![running("a", 1)]), 0.0);
    assert_eq!(world.result(ProbeKind::Startup, "a-1"), Some(ProbeResult::Unknown));
    assert_eq!(world.run(0.0, RunResult::Failure), 1);
    assert_eq!(world.run(10.0, RunResult::Success), 1);
    assert_eq!(world.result(ProbeKind::Startup, "a-1"), Some(ProbeResult::Success));
    assert_eq!(world.due(10.0), ["a-1 Liveness", "a-1 Readiness"]);
}

#[tokio::test]
async fn a_startup_probe_that_may_fail_once_waits_for_a_period() {
    let (mut world, pod) = (World::new(), pod(&["startup"]));
    let mut strict = Pod::unwrap_or_clone(pod);
    let spec = strict.spec.as_mut().expect("a spec");
    spec.containers[0].startup_probe.as_mut().expect("a probe").failure_threshold = Some(1);
    world.observe(&Arc::new(strict), &snapshot(vec![running("a", 1)]), 0.0);
    assert_eq!(world.table.next_due(), Some(world.at(10.0)));
}

#[tokio::test]
async fn failures_are_published_at_the_threshold() {
    let (mut world, pod) = (World::new(), pod(&["liveness"]));
    world.observe(&pod, &snapshot(vec![running("a", 1)]), 0.0);
    for (seconds, expected) in
        [(10.0, ProbeResult::Success), (20.0, ProbeResult::Success), (30.0, ProbeResult::Failure)]
    {
        assert_eq!(world.run(seconds, RunResult::Failure), 1);
        assert_eq!(world.result(ProbeKind::Liveness, "a-1"), Some(expected), "after {seconds} s");
    }
    world.observe(&pod, &snapshot(vec![running("a", 1)]), 35.0);
    assert_eq!(world.run(60.0, RunResult::Failure), 0, "it is on hold");
}

#[tokio::test]
async fn a_termination_ends_liveness_and_startup_of_regular_containers() {
    let (mut world, pod) = (World::new(), pod(&["startup", "liveness", "readiness"]));
    world.observe(&pod, &snapshot(vec![running("a", 1), running("side", 1)]), 0.0);
    world.run(0.0, RunResult::Success);
    assert_eq!(world.table.terminating(&uid()).len(), 2);
    assert_eq!(world.result(ProbeKind::Startup, "a-1"), Some(ProbeResult::Success), "it stays started");
    assert_eq!(world.due(100.0), ["a-1 Readiness", "side-1 Liveness", "side-1 Readiness"]);
    assert_eq!(world.table.terminating(&uid()).len(), 0);
    assert_eq!(world.table.remove(&uid()).len(), 4);
    assert!(!world.table.contains(&uid()));
    assert_eq!(world.table.next_due(), None);
}

#[tokio::test]
async fn a_restart_of_the_agent_spreads_probes_over_a_period_and_keeps_what_was_known() {
    let (mut world, pod) = (World::new(), pod(&["startup", "readiness"]));
    world.last_status = serde_json::from_value(json!({ "conditions": [{ "type": "Ready", "status": "True" }] })).ok();
    world.observe(&pod, &snapshot(vec![running("a", 0)]), 0.0);
    assert_eq!(world.result(ProbeKind::Startup, "a-0"), Some(ProbeResult::Success));
    assert_eq!(world.result(ProbeKind::Readiness, "a-0"), Some(ProbeResult::Success));
    let due = world.table.next_due().expect("readiness is due");
    assert!(due < world.at(10.0), "within a period");
    assert_eq!(world.due(10.0), ["a-0 Readiness"], "it has started");
}

#[tokio::test]
async fn a_restart_after_the_clock_was_set_back_keeps_what_the_status_has_of_an_instance() {
    for (known, readiness, is_spread) in [("a-37", ProbeResult::Success, true), ("a-36", ProbeResult::Failure, false)] {
        let (mut world, pod) = (World::new(), delayed(pod(&["readiness"]), 30));
        let status = json!({
            "conditions": [{ "type": "Ready", "status": "True" }],
            "containerStatuses": [{ "name": "a", "containerID": format!("containerd://{known}"), "started": true,
                "image": "", "imageID": "", "ready": true, "restartCount": 0 }],
        });
        world.last_status = Some(serde_json::from_value(status).expect("a status"));
        // By its time it was started an hour after the agent.
        world.observe(&pod, &snapshot(vec![running("a", 37)]), 0.0);
        assert_eq!(world.result(ProbeKind::Readiness, "a-37"), Some(readiness), "{known}");
        let due = world.table.next_due().expect("readiness is due");
        assert_eq!(due < world.at(10.0), is_spread, "{known}: within a period, or after the initial delay");
    }
}

#[tokio::test]
async fn an_instance_that_appears_after_the_clock_was_set_back_is_new() {
    let (mut world, pod) = (World::new(), pod(&["startup", "readiness"]));
    world.last_status = serde_json::from_value(json!({ "conditions": [{ "type": "Ready", "status": "True" }] })).ok();
    world.observe(&pod, &snapshot(vec![exited("a", 1, 1)]), 0.0);
    // By its time it was started before the agent.
    world.observe(&pod, &snapshot(vec![running("a", 0)]), 1.0);
    assert_eq!(world.result(ProbeKind::Startup, "a-0"), Some(ProbeResult::Unknown));
    assert_eq!(world.result(ProbeKind::Readiness, "a-0"), Some(ProbeResult::Failure));
    assert_eq!(world.due(1.0), ["a-0 Startup"], "at once");
}

#[tokio::test]
async fn the_initial_delay_counts_from_the_start_of_the_instance() {
    let (mut world, pod) = (World::new(), delayed(pod(&["readiness"]), 30));
    world.observe(&pod, &snapshot(vec![running("a", 1)]), 12.0);
    assert_eq!(world.table.next_due(), Some(world.at(30.0)));
}

#[tokio::test]
async fn a_liveness_probe_with_an_initial_delay_waits_for_no_period() {
    let (mut world, pod) = (World::new(), pod(&["liveness"]));
    let mut delayed = Pod::unwrap_or_clone(pod);
    let spec = delayed.spec.as_mut().expect("a spec");
    spec.containers[0].liveness_probe.as_mut().expect("a probe").initial_delay_seconds = Some(3);
    world.observe(&Arc::new(delayed), &snapshot(vec![running("a", 1)]), 0.0);
    assert_eq!(world.table.next_due(), Some(world.at(3.0)));
}

#[tokio::test]
async fn a_changed_probe_begins_anew_and_a_removed_one_ends() {
    let (mut world, all) = (World::new(), pod(&["liveness", "readiness"]));
    let runs = snapshot(vec![running("a", 1)]);
    world.observe(&all, &runs, 0.0);
    world.run(0.0, RunResult::Success);
    let mut changed = Pod::unwrap_or_clone(all);
    let spec = changed.spec.as_mut().expect("a spec");
    spec.containers[0].liveness_probe.as_mut().expect("a probe").period_seconds = Some(7);
    spec.containers[0].readiness_probe = None;
    assert_eq!(world.observe(&Arc::new(changed), &runs, 1.0), 2);
    assert_eq!(world.due(6.0), [""; 0]);
    assert_eq!(world.due(7.0), ["a-1 Liveness"], "a period after the start of the instance");
    assert_eq!(world.due(100.0), [""; 0]);
}

#[tokio::test]
async fn pods_without_probes_cost_nothing() {
    let mut world = World::new();
    world.observe(&pod(&[]), &snapshot(vec![running("a", 1)]), 0.0);
    assert!(!world.table.contains(&uid()));
    assert_eq!(world.table.next_due(), None);
}

/// Looking for each probe and each container among all others would take minutes, for which all pods would wait.
#[tokio::test]
async fn a_pod_may_have_any_number_of_probes() {
    const PROBES: usize = 15_000;
    let (mut world, mut many) = (World::new(), testing::pod("Always", &[], &[]));
    let names: Vec<String> = (0..PROBES).map(|index| format!("c{index}")).collect();
    let readiness_probe: Option<Probe> = serde_json::from_value(json!({ "exec": { "command": ["x"] } })).ok();
    let probed = |name: &String| Container { readiness_probe: readiness_probe.clone(), ..testing::container(name) };
    many.spec.as_mut().expect("a spec").containers = names.iter().map(probed).collect();
    let mut namesake = many.clone();
    namesake.metadata.uid = Some("another".into());
    let (many, namesake) = (Arc::new(many), Arc::new(namesake));
    let runs = snapshot(names.iter().map(|name| running(name, 1)).collect());
    for seconds in [0.0, 1.0] {
        assert_eq!(world.observe(&many, &runs, seconds), 0, "each is found again after {seconds} s");
    }
    assert_eq!(world.due(1.0).len(), PROBES, "each is probed once");
    world.observe(&namesake, &runs, 2.0);
    let ended = world.table.remove(&uid());
    assert_eq!(ended.iter().filter(|ended| ended.has_namesake).count(), PROBES);
    assert!(world.table.remove(&"another".into()).iter().all(|ended| !ended.has_namesake), "it was the last");
}

/// Looking for each container among all others would take half a minute, for which all pods would wait.
#[tokio::test]
async fn any_number_of_containers_may_start_at_once() {
    const CONTAINERS: usize = 15_000;
    let (mut world, mut many) = (World::new(), testing::pod("Always", &[], &[]));
    let names: Vec<String> = (0..CONTAINERS).map(|index| format!("c{index}")).collect();
    let probe: Option<Probe> = serde_json::from_value(json!({ "exec": { "command": ["x"] } })).ok();
    let probed = |name: &String| Container {
        startup_probe: probe.clone(),
        readiness_probe: probe.clone(),
        ..testing::container(name)
    };
    many.spec.as_mut().expect("a spec").containers = names.iter().map(probed).collect();
    // An earlier agent saw every second container start.
    let reported = |(index, name): (usize, &String)| ContainerStatus {
        name: name.clone(),
        container_id: Some(format!("containerd://{name}-1")),
        started: Some(index % 2 == 0),
        ..ContainerStatus::default()
    };
    let reported = names.iter().enumerate().map(reported).collect();
    world.last_status = Some(PodStatus { container_statuses: Some(reported), ..PodStatus::default() });
    let runs = snapshot(names.iter().map(|name| running(name, 1)).collect());
    let began = std::time::Instant::now();
    world.observe(&Arc::new(many), &runs, 0.0);
    assert_eq!(world.run(10.0, RunResult::Success), CONTAINERS, "half for startup, half for readiness");
    assert_eq!(world.run(10.0, RunResult::Success), CONTAINERS / 2, "readiness of those that have just started");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// 1,000 probes of one node may cost a fiftieth of a core; this is a minute of them, in an unoptimized build.
#[tokio::test]
async fn scheduling_a_thousand_probes_is_cheap() {
    let mut world = World::new();
    for index in 0..500 {
        let mut pod = testing::pod("Always", &[], &["a"]);
        pod.metadata.uid = Some(format!("uid-{index}"));
        let spec = pod.spec.as_mut().expect("a spec");
        let probe = json!({ "exec": { "command": ["x"] } });
        spec.containers[0].liveness_probe = serde_json::from_value(probe.clone()).ok();
        spec.containers[0].readiness_probe = serde_json::from_value(probe).ok();
        world.observe(&Arc::new(pod), &snapshot(vec![running("a", 0)]), 0.0);
    }
    let began = std::time::Instant::now();
    let handle = run();
    let mut runs = 0;
    // The table is read every 20 ms, the period of the prober's timer.
    for tick in 0..3000 {
        let now = world.at(f64::from(tick) * 0.02);
        while let Some(job) = world.table.take_due(now) {
            world.table.running(job.probe, handle.clone());
            assert!(world.table.complete(job.probe, handle.id(), RunResult::Success, now));
            runs += 1;
        }
    }
    assert!((5500..=6500).contains(&runs), "{runs} runs");
    assert!(began.elapsed() < Duration::from_millis(1200), "{:?}", began.elapsed());
}
