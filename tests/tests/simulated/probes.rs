//! Probes on the whole agent: what restarts a container, what makes it ready, and when.

mod numbers;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PodStatus;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::status::TerminationReason;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::PodOf;
use keblet_tests::node::RecordedEvents;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::recorder;
use serde_json::Value;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;
use tokio::time::sleep;
use tonic::Code;

const SOON: Duration = Duration::from_secs(60);

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The pod with these fields set in its container of this name.
fn with(pod: PodOf, container: &str, fields: &Value) -> Pod {
    let mut pod = serde_json::to_value(&*pod.build()).expect("a pod");
    let lists = ["initContainers", "containers"];
    for list in lists {
        for found in pod["spec"][list].as_array_mut().into_iter().flatten().filter(|found| found["name"] == container) {
            let own = found.as_object_mut().expect("a container");
            own.extend(fields.as_object().expect("fields").clone());
        }
    }
    Arc::new(serde_json::from_value(pod).expect("a pod"))
}

fn exec(extra: &Value) -> Value {
    let mut probe = json!({ "exec": { "command": ["check"] } });
    probe.as_object_mut().expect("a probe").extend(extra.as_object().expect("fields").clone());
    probe
}

/// A node with one agent whose events are recorded.
struct World {
    sim: SimRuntime,
    folder: TempDir,
    agent: Agent,
    events: RecordedEvents,
}

impl World {
    fn start(pods: Vec<Pod>, prepare: impl FnOnce(&SimRuntime)) -> Self {
        let (sim, folder) = node();
        prepare(&sim);
        let (agent, events) = agent(&sim, folder.path(), pods);
        Self { sim, folder, agent, events }
    }

    /// What the commands of a container's probes answer from now on.
    fn answers(&self, pod: &str, container: &str, code: i32) {
        self.sim.script_exec(pod, container, ExecResult { code, ..ExecResult::default() });
    }

    async fn until(&self, what: &str, met: impl Fn(&Trace) -> bool) {
        self.sim.until(what, SOON, met).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    }

    /// Until StopContainer has been called, which may take the whole grace period.
    async fn until_stopping(&self) {
        while self.sim.trace(|l| l.count(Method::StopContainer)) == 0 {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Events with this reason, repetitions included.
    fn messages(&self, reason: &str, text: &str) -> usize {
        let requests = self.events.lock().expect("not poisoned");
        let of_reason = |event: &Value| event["reason"].is_null() || event["reason"] == reason;
        let says = |event: &Value| event["message"].as_str().is_some_and(|message| message.contains(text));
        requests.iter().filter(|(_, event)| of_reason(event) && says(event)).count()
    }

    fn status(&self, pod: &str) -> PodStatus {
        self.agent.statuses.get(&PodUid::from(format!("{pod}-uid").as_str())).expect("a status")
    }

    fn ready(&self, pod: &str) -> bool {
        let status = self.agent.statuses.get(&PodUid::from(format!("{pod}-uid").as_str())).unwrap_or_default();
        status.conditions.iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }

    /// How long it takes until the pod's readiness is this.
    async fn until_ready(&self, pod: &str, ready: bool) -> Duration {
        let since = Instant::now();
        while self.ready(pod) != ready {
            assert!(since.elapsed() < seconds(600), "it never is");
            sleep(Duration::from_millis(10)).await;
        }
        since.elapsed()
    }

    fn probed(&self) -> u64 {
        self.sim.trace(|l| l.count(Method::ExecSync))
    }
}

fn agent(sim: &SimRuntime, folder: &Path, pods: Vec<Pod>) -> (Agent, RecordedEvents) {
    let (recorder, events) = recorder();
    (Agent::start_with_recorder(sim, SensorSet::ALL, folder, pods, recorder), events)
}

fn attempts(l: &Trace, pod: &str) -> usize {
    l.history(pod, "main").count()
}

#[tokio::test(start_paused = true)]
async fn a_container_is_restarted_when_liveness_fails_as_often_as_its_threshold_says() {
    let web = with(pod("web").running("main", "run"), "main", &json!({ "livenessProbe": exec(&json!({})) }));
    let world = World::start(vec![web], |_| ());
    world.until("it runs", |l| l.live("web", "main").is_some()).await;
    sleep(seconds(25)).await;
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1);
    world.answers("web", "main", 1);
    sleep(seconds(19)).await;
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1, "two failures change nothing");
    world.until("it is stopped", |l| l.count(Method::StopContainer) == 1).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(world.messages("Unhealthy", "Liveness probe failed: "), 3);
    assert_eq!(world.messages("Killing", "Container main failed liveness probe, will be restarted"), 1);
    world.until("it is restarted", |l| attempts(l, "web") == 2).await;
    sleep(seconds(15)).await;
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 2, "the next instance has the full threshold");
    world.until("it is restarted again", |l| attempts(l, "web") == 3).await;
}

/// A runtime answers a stop 45 ms after the end of the process, which the kernel proves at once.
#[tokio::test(start_paused = true)]
async fn a_restart_after_a_failed_probe_does_not_wait_for_the_runtime() {
    let liveness = exec(&json!({ "periodSeconds": 1, "failureThreshold": 1 }));
    let world = World::start(
        vec![with(pod("web").running("main", "run"), "main", &json!({ "livenessProbe": liveness }))],
        |_| (),
    );
    world.until("it runs", |l| l.live("web", "main").is_some()).await;
    world.answers("web", "main", 1);
    world.until("it is restarted", |l| attempts(l, "web") == 2).await;
    world.answers("web", "main", 0);
    let (gone, created) = world.sim.trace(|l| {
        let instances: Vec<_> = l.history("web", "main").collect();
        (instances[0].gone.expect("gone"), instances[1].created)
    });
    let pause = created.saturating_duration_since(gone);
    assert!(pause < Duration::from_millis(20), "{pause:?}");
    world
        .until("the first one is reported", |l| l.history("web", "main").next().is_some_and(|i| i.reported.is_some()))
        .await;
    assert_eq!(world.sim.trace(|l| l.count(Method::StopContainer)), 1, "and not stopped again");
    sleep(seconds(5)).await;
    assert_eq!(world.status("web").container_statuses.expect("statuses")[0].restart_count, 1);
}

#[tokio::test(start_paused = true)]
async fn a_container_without_restart_policy_is_killed_and_stays_so() {
    let once = pod("web").running("main", "run").restarted("Never");
    let web = with(once, "main", &json!({ "livenessProbe": exec(&json!({ "failureThreshold": 1 })) }));
    let world = World::start(vec![web], |sim| {
        sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
    });
    world.until("it has run", |l| l.history("web", "main").next().is_some_and(|i| i.gone.is_some())).await;
    sleep(seconds(600)).await;
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1);
    assert_eq!(world.status("web").phase.as_deref(), Some("Failed"));
    // It was the last container: the pod is killed, as upstream does.
    assert_eq!(world.messages("Killing", "Stopping container main"), 1);
    assert_eq!(world.messages("Killing", "will be restarted"), 0);
    assert_eq!(world.probed(), 1);
}

/// Rules do not concern what a probe ends, and without a container to keep the pod loses its sandbox.
#[tokio::test(start_paused = true)]
async fn a_pod_whose_last_container_only_rules_would_restart_ends_when_its_probe_fails() {
    let rule = json!({ "action": "Restart", "exitCodes": { "operator": "NotIn", "values": [0] } });
    let liveness = exec(&json!({ "failureThreshold": 1 }));
    let fields = json!({ "livenessProbe": liveness, "restartPolicy": "Never", "restartPolicyRules": [rule] });
    let once = pod("web").running("main", "run").restarted("Never");
    let world = World::start(vec![with(once, "main", &fields)], |sim| {
        sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
    });
    world.until("it has run", |l| l.history("web", "main").next().is_some_and(|i| i.gone.is_some())).await;
    sleep(seconds(60)).await;
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1);
    assert_eq!(world.status("web").phase.as_deref(), Some("Failed"), "not Running for good");
}

#[tokio::test(start_paused = true)]
async fn readiness_follows_the_probe() {
    let probe = exec(&json!({ "periodSeconds": 30 }));
    let web = with(pod("web").running("main", "run"), "main", &json!({ "readinessProbe": probe }));
    let world = World::start(vec![web], |sim| {
        sim.script_exec("web", "main", ExecResult { code: 1, stdout: b"not yet".to_vec(), ..ExecResult::default() });
    });
    world.until("it runs", |l| l.live("web", "main").is_some()).await;
    sleep(seconds(2)).await;
    assert!(!world.ready("web"));
    assert!(world.messages("Unhealthy", "Readiness probe failed: not yet") > 0);
    world.answers("web", "main", 0);
    let took = world.until_ready("web", true).await;
    assert!(took < seconds(5), "it is asked early while it is not ready: {took:?}");
    world.answers("web", "main", 1);
    let took = world.until_ready("web", false).await;
    assert!((60..=91).contains(&took.as_secs()), "three failures: {took:?}");
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1, "it is not restarted");
}

#[tokio::test(start_paused = true)]
async fn a_container_is_never_ready_before_its_probe_has_succeeded() {
    let fields = json!({ "readinessProbe": exec(&json!({})), "startupProbe": exec(&json!({ "periodSeconds": 1 })) });
    let web = with(pod("web").running("main", "exit 1 20s"), "main", &fields);
    let world = World::start(vec![web], |sim| {
        sim.script_exec("web", "main", ExecResult { takes: Duration::from_millis(900), ..ExecResult::default() });
    });
    let mut seen = Vec::new();
    let until = Instant::now() + seconds(100);
    while Instant::now() < until {
        sleep(Duration::from_millis(1)).await;
        let Some(status) = world.agent.statuses.get(&PodUid::from("web-uid")) else { continue };
        let Some(container) = status.container_statuses.into_iter().flatten().next() else { continue };
        let now = (container.container_id.clone(), container.started, container.ready);
        if seen.last() != Some(&now) {
            seen.push(now);
        }
    }
    let of_instance =
        |id: &Option<String>| seen.iter().filter(|seen| seen.0 == *id && id.is_some()).collect::<Vec<_>>();
    let third = of_instance(&seen.iter().rev().find(|seen| seen.2).expect("it was ready").0);
    assert_eq!((third[0].1, third[0].2), (Some(false), false), "{seen:#?}");
    assert_eq!((third[1].1, third[1].2), (Some(true), false), "{seen:#?}");
    assert_eq!((third[2].1, third[2].2), (Some(true), true), "{seen:#?}");
}

#[tokio::test(start_paused = true)]
async fn a_failed_startup_restarts_with_the_grace_period_of_its_probe() {
    let startup = exec(&json!({ "periodSeconds": 1, "terminationGracePeriodSeconds": 5 }));
    let liveness = exec(&json!({ "periodSeconds": 1, "failureThreshold": 1 }));
    let fields = json!({ "startupProbe": startup, "livenessProbe": liveness });
    let web = with(pod("web").running("main", "term ignore"), "main", &fields);
    let mut web = Arc::unwrap_or_clone(web);
    web.spec.as_mut().expect("a spec").termination_grace_period_seconds = Some(500);
    let world = World::start(vec![Arc::new(web)], |sim| {
        sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
    });
    world.until("it is restarted", |l| attempts(l, "web") == 2).await;
    let (stop, exited) = world.sim.trace(|l| {
        let stop = l.calls().find(|call| call.method == Method::StopContainer).expect("a stop").at;
        (stop, l.history("web", "main").next().expect("an instance").exited.expect("it exited").0)
    });
    let grace = exited.duration_since(stop);
    assert!((5..7).contains(&grace.as_secs()), "{grace:?}");
    assert_eq!(world.messages("Unhealthy", "Startup probe failed"), 3);
    assert_eq!(world.messages("Unhealthy", "Liveness"), 0, "it waits for startup");
    assert_eq!(world.messages("Killing", "Container main failed startup probe, will be restarted"), 1);
}

/// That of the probe is not lost if it is the shorter one.
#[tokio::test(start_paused = true)]
async fn a_pod_that_is_terminated_during_a_restart_ends_with_the_shorter_grace_period() {
    for (of_probe, of_termination) in [(300, 1), (5, 300)] {
        let grace = json!({ "periodSeconds": 1, "failureThreshold": 1, "terminationGracePeriodSeconds": of_probe });
        let fields = json!({ "livenessProbe": exec(&grace) });
        let world = World::start(vec![with(pod("web").running("main", "term ignore"), "main", &fields)], |sim| {
            sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
        });
        world.until_stopping().await;
        let since = Instant::now();
        let reason = TerminationReason { reason: "Terminated", message: "shutdown".to_owned(), disruption: None };
        world.agent.kill(PodUid::from("web-uid"), of_termination, reason).await;
        assert!(since.elapsed() < seconds(10), "{:?}\n{}", since.elapsed(), world.sim.trace(Trace::to_string));
        assert_eq!(world.sim.trace(|l| (attempts(l, "web"), l.live_count())), (1, 0));
    }
}

/// Its status does not wait for the grace period of a container that is not restarted.
#[tokio::test(start_paused = true)]
async fn a_pod_that_is_terminated_during_a_restart_shows_that_when_the_restart_is_over() {
    let grace = json!({ "periodSeconds": 1, "failureThreshold": 1, "terminationGracePeriodSeconds": 5 });
    let web = pod("web").running("main", "term ignore").running("side", "term ignore");
    let world = World::start(vec![with(web, "main", &json!({ "livenessProbe": exec(&grace) }))], |sim| {
        sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
    });
    world.until_stopping().await;
    let reason = TerminationReason { reason: "Terminated", message: "shutdown".to_owned(), disruption: None };
    let killed = world.agent.kill(PodUid::from("web-uid"), 300, reason);
    tokio::time::timeout(seconds(20), killed).await.expect_err("a container uses its grace period");
    assert_eq!(world.sim.trace(|l| (attempts(l, "web"), l.live_count())), (1, 1));
    assert_eq!(world.status("web").reason.as_deref(), Some("Terminated"));
}

#[tokio::test(start_paused = true)]
async fn readiness_is_probed_as_soon_as_the_container_has_started() {
    let fields = json!({
        "startupProbe": exec(&json!({ "periodSeconds": 5, "failureThreshold": 60 })),
        "readinessProbe": exec(&json!({ "periodSeconds": 30 })),
    });
    let web = with(pod("web").running("main", "run"), "main", &fields);
    let world = World::start(vec![web], |sim| {
        sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
    });
    world.until("it runs", |l| l.live("web", "main").is_some()).await;
    sleep(seconds(32)).await;
    world.answers("web", "main", 0);
    let took = world.until_ready("web", true).await;
    assert!(took < seconds(6), "no more than a period of the startup probe: {took:?}");
    assert_eq!(world.status("web").container_statuses.expect("a container")[0].started, Some(true));
    let before = world.probed();
    sleep(seconds(29)).await;
    assert_eq!(world.probed(), before, "startup is not probed again");
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_cannot_be_carried_out_counts_for_nothing() {
    let probe = exec(&json!({ "failureThreshold": 1 }));
    let web = with(pod("web").running("main", "run"), "main", &json!({ "livenessProbe": probe }));
    let world = World::start(vec![web], |sim| {
        let refused = FaultKind::Fail(Code::Unknown, "no such binary".to_owned());
        sim.faults(|faults| faults.add(CallFault::on(Method::ExecSync, refused)));
    });
    world.until("it runs", |l| l.live("web", "main").is_some()).await;
    sleep(seconds(15)).await;
    assert_eq!(world.probed(), 3, "attempts of one run");
    let text = "Liveness probe errored and resulted in unknown state: rpc error: code = Unknown desc = no such binary";
    assert_eq!(world.messages("Unhealthy", text), 1);
    sleep(seconds(600)).await;
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1);
}

#[tokio::test(start_paused = true)]
async fn a_command_that_takes_too_long_fails() {
    let probe = exec(&json!({ "failureThreshold": 1 }));
    let web = with(pod("web").running("main", "run"), "main", &json!({ "livenessProbe": probe }));
    let world = World::start(vec![web], |sim| {
        sim.script_exec("web", "main", ExecResult { takes: seconds(10), ..ExecResult::default() });
    });
    world.until("it is restarted", |l| attempts(l, "web") == 2).await;
    let text = "Liveness probe failed: command timed out: \"check\" timed out after 1s";
    assert_eq!(world.messages("Unhealthy", text), 1);
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_hangs_holds_only_itself() {
    let of = |name: &str| {
        with(
            pod(name).running("main", "run"),
            "main",
            &json!({ "readinessProbe": exec(&json!({ "periodSeconds": 1 })) }),
        )
    };
    let world = World::start(vec![of("hangs"), of("web")], |_| ());
    world.until_ready("web", true).await;
    world.until_ready("hangs", true).await;
    let id = world.sim.trace(|l| l.live("hangs", "main").expect("it runs").id.clone());
    world.sim.faults(|faults| faults.add(CallFault::on(Method::ExecSync, FaultKind::Hang).about("_hangs_")));
    world.sim.faults(|faults| faults.add(CallFault::on(Method::ExecSync, FaultKind::Hang).about(&id)));
    sleep(seconds(3)).await;
    let before = world.probed();
    sleep(seconds(20)).await;
    assert!((18..=22).contains(&(world.probed() - before)), "{} runs", world.probed() - before);
    world.answers("web", "main", 1);
    let took = world.until_ready("web", false).await;
    assert!(took < seconds(5), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_sidecar_lets_the_next_container_start_once_it_has_started() {
    let main = pod("web").sidecar("side", "run").running("main", "run");
    let fields = json!({ "startupProbe": exec(&json!({ "periodSeconds": 2, "failureThreshold": 3 })) });
    let world = World::start(vec![with(main, "side", &fields)], |sim| {
        sim.script_exec("web", "side", ExecResult { code: 1, ..ExecResult::default() });
    });
    world.until("the sidecar is restarted", |l| l.history("web", "side").count() == 2).await;
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 0);
    assert_eq!(world.messages("Killing", "Init container side failed startup probe"), 1);
    world.answers("web", "side", 0);
    world.until("main runs", |l| l.live("web", "main").is_some()).await;
    assert_eq!(world.sim.trace(|l| l.history("web", "side").count()), 2);
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_the_agent_changes_neither_readiness_nor_startup() {
    let fields = json!({
        "startupProbe": exec(&json!({})),
        "readinessProbe": exec(&json!({ "periodSeconds": 20 })),
    });
    let web = with(pod("web").from_api().running("main", "run"), "main", &fields);
    let world = World::start(vec![web.clone()], |_| ());
    world.until_ready("web", true).await;
    sleep(seconds(300)).await;
    let status = world.status("web");
    let World { sim, folder, agent: former, .. } = world;
    drop(former);
    sim.script_exec("web", "main", ExecResult { takes: seconds(50), ..ExecResult::default() });
    let mut known = Arc::unwrap_or_clone(web);
    known.status = Some(status);
    let (agent, events) = agent(&sim, folder.path(), vec![Arc::new(known)]);
    let world = World { sim, folder, agent, events };
    sleep(Duration::from_millis(500)).await;
    for _ in 0..100 {
        assert!(world.ready("web"), "{:?}", world.status("web"));
        assert_eq!(world.status("web").container_statuses.expect("a container")[0].started, Some(true));
        sleep(Duration::from_millis(1)).await;
    }
    let took = world.until_ready("web", false).await;
    assert!((40..=64).contains(&took.as_secs()), "it is probed on, spread over a period: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_container_that_ends_slowly_is_not_ready_and_not_restarted() {
    let fields = json!({
        "readinessProbe": exec(&json!({ "periodSeconds": 1, "failureThreshold": 1 })),
        "livenessProbe": exec(&json!({ "periodSeconds": 1, "failureThreshold": 1 })),
    });
    let base = pod("web").from_api().running("main", "term 4s");
    let world = World::start(vec![with(base.clone(), "main", &fields)], |_| ());
    world.until_ready("web", true).await;
    world.agent.update(with(base.deleting(), "main", &fields)).await;
    sleep(Duration::from_millis(200)).await;
    world.answers("web", "main", 1);
    let took = world.until_ready("web", false).await;
    assert!(took < seconds(2), "readiness is probed while it ends: {took:?}");
    assert!(world.sim.trace(|l| l.live("web", "main").is_some()), "it still runs");
    world.until("it ends", |l| l.live("web", "main").is_none()).await;
    let probed = world.probed();
    sleep(seconds(60)).await;
    assert_eq!(world.probed(), probed, "nothing is probed after the end");
    assert_eq!(world.messages("Unhealthy", "Liveness"), 0);
    assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1);
}
