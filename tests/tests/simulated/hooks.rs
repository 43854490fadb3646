//! Lifecycle hooks of the whole agent on the simulated node: what waits for a hook, and what happens to it when the agent is
//! killed.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Lifecycle;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::status::TerminationReason;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::PodOf;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The pod with hooks for its container of this name.
fn with_hooks(pod: PodOf, container: &str, hooks: Value) -> Pod {
    let mut pod = Arc::unwrap_or_clone(pod.build());
    let hooks: Lifecycle = serde_json::from_value(hooks).expect("hooks");
    let spec = pod.spec.as_mut().expect("a spec");
    let mut all = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    all.find(|one| one.name == container).expect("the container").lifecycle = Some(hooks);
    Arc::new(pod)
}

fn with_grace(pod: Pod, seconds: i64) -> Pod {
    let mut pod = Arc::unwrap_or_clone(pod);
    pod.spec.as_mut().expect("a spec").termination_grace_period_seconds = Some(seconds);
    Arc::new(pod)
}

fn times(sim: &SimRuntime, method: Method) -> Vec<Instant> {
    sim.trace(|t| t.calls().filter(|call| call.method == method).map(|call| call.at).collect())
}

fn exit_code(sim: &SimRuntime, pod: &str, container: &str) -> Option<i32> {
    sim.trace(|t| t.history(pod, container).last().and_then(|instance| instance.exited).map(|(_, exit)| exit.code()))
}

/// Waits until a hook has begun.
async fn until_hook(sim: &SimRuntime) {
    let deadline = Instant::now() + secs(60);
    while times(sim, Method::ExecSync).is_empty() {
        assert!(Instant::now() < deadline, "no hook ran\n{}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_hanging_post_start_holds_its_own_pod_alone() {
    let (sim, folder) = node();
    let hanging = json!({"postStart": {"exec": {"command": ["hang"]}}});
    let first = with_hooks(pod("first").running("main", "run").running("later", "run"), "main", hanging);
    sim.script_exec("first", "main", ExecResult { takes: secs(600), ..ExecResult::default() });
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![first]);
    until_hook(&sim).await;
    let since = Instant::now();
    agent.add(pod("second").running("main", "run").build()).await;
    until(&sim, "the other pod runs", |t| t.live("second", "main").is_some()).await;
    assert!(since.elapsed() < secs(2), "{:?}", since.elapsed());
    agent.remove(pod("second").running("main", "run").build()).await;
    until(&sim, "it is stopped", |t| t.live("second", "main").is_none()).await;
    sleep(secs(60)).await;
    sim.trace(|t| assert_eq!(t.history("first", "later").count(), 0, "{t}"));
    until(&sim, "the hook has ended", |t| t.live("first", "later").is_some()).await;
}

#[tokio::test(start_paused = true)]
async fn a_container_whose_post_start_fails_restarts_with_back_off() {
    let (sim, folder) = node();
    let failing = json!({"postStart": {"exec": {"command": ["fail"]}}});
    let web = with_hooks(pod("web").running("main", "term 100ms"), "main", failing);
    sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web]);
    let seen = |t: &Trace| t.history("web", "main").filter(|instance| instance.exited.is_some()).count();
    until(&sim, "three instances", |t| seen(t) == 3).await;
    let status = agent.statuses.get(&PodUid::from("web-uid")).expect("a status");
    let main = &status.container_statuses.expect("containers")[0];
    let waiting = main.state.as_ref().and_then(|state| state.waiting.as_ref()).expect("waiting");
    assert!(["PostStartHookError", "CrashLoopBackOff"].contains(&waiting.reason.as_deref().unwrap_or_default()));
    sim.trace(|t| {
        let starts: Vec<_> = t.history("web", "main").filter_map(|instance| instance.started).collect();
        assert!(starts[2] - starts[1] >= secs(9), "{t}");
        assert!(t.duplicates().is_empty(), "{t}");
    });
}

/// The second container of a pod waits for postStart of the first; the sidecar's failure does not keep it from starting.
#[tokio::test(start_paused = true)]
async fn a_sidecar_whose_post_start_fails_does_not_hold_the_others() {
    let (sim, folder) = node();
    let failing = json!({"postStart": {"exec": {"command": ["fail"]}}});
    let web = pod("web").sidecar("proxy", "term 100ms").sidecar("other", "run").running("main", "run");
    sim.script_exec("web", "proxy", ExecResult { code: 1, ..ExecResult::default() });
    let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![with_hooks(web, "proxy", failing)]);
    until(&sim, "the hook failed", |t| t.count(Method::StopContainer) >= 1).await;
    sim.script_exec("web", "proxy", ExecResult::default());
    until(&sim, "all run", |t| ["proxy", "other", "main"].iter().all(|name| t.live("web", name).is_some())).await;
    sim.trace(|t| assert_eq!((t.history("web", "other").count(), t.history("web", "main").count()), (1, 1), "{t}"));
}

#[tokio::test(start_paused = true)]
async fn the_grace_period_is_what_pre_stop_leaves_of_it() {
    for own_network in [false, true] {
        let (sim, folder) = node();
        let hooks = json!({"preStop": {"sleep": {"seconds": 4}}});
        let web = pod("web").running("main", "term 20s");
        let web = if own_network { web.own_network() } else { web };
        let web = with_grace(with_hooks(web, "main", hooks), 10);
        let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
        until(&sim, "it runs", |t| t.live("web", "main").is_some()).await;
        sleep(secs(5)).await;
        let since = Instant::now();
        agent.remove(web).await;
        until(&sim, "it is stopped", |t| t.live_count() == 0).await;
        let stops = times(&sim, Method::StopContainer);
        assert_eq!(stops.len(), 1, "{}", sim.trace(Trace::to_string));
        assert_eq!((stops[0] - since).as_secs(), 4);
        // Killed: it does not end by itself within the rest.
        assert_eq!((since.elapsed().as_secs(), exit_code(&sim, "web", "main")), (10, Some(137)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_shorter_grace_period_does_not_run_pre_stop_again() {
    let (sim, folder) = node();
    let hooks = json!({"preStop": {"exec": {"command": ["drain"]}}});
    let web = with_grace(with_hooks(pod("web").running("main", "run"), "main", hooks), 600);
    sim.script_exec("web", "main", ExecResult { takes: secs(300), ..ExecResult::default() });
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    until(&sim, "it runs", |t| t.live("web", "main").is_some()).await;
    agent.remove(web).await;
    until_hook(&sim).await;
    sleep(secs(60)).await;
    let since = Instant::now();
    let reason = TerminationReason { reason: "Terminated", message: "shutdown".into(), disruption: None };
    agent.kill(PodUid::from("web-uid"), 5, reason).await;
    assert!(since.elapsed() < secs(12), "{:?}\n{}", since.elapsed(), sim.trace(Trace::to_string));
    sim.trace(|t| assert_eq!(t.count(Method::ExecSync), 1, "{t}"));
}

#[tokio::test(start_paused = true)]
async fn an_agent_killed_during_pre_stop_runs_it_again_after_its_restart() {
    let (sim, folder) = node();
    let hooks = json!({"preStop": {"exec": {"command": ["drain"]}}});
    let web = pod("web").running("main", "term 100ms").from_api();
    let deleted = with_grace(with_hooks(web.clone().deleting(), "main", hooks.clone()), 60);
    sim.script_exec("web", "main", ExecResult { takes: secs(3), ..ExecResult::default() });
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![with_grace(with_hooks(web, "main", hooks), 60)]);
    until(&sim, "it runs", |t| t.live("web", "main").is_some()).await;
    sleep(secs(5)).await;
    agent.update(deleted.clone()).await;
    until_hook(&sim).await;
    sleep(secs(1)).await;
    drop(agent);
    let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![deleted]);
    until(&sim, "it is stopped", |t| t.live_count() == 0).await;
    let hooks = times(&sim, Method::ExecSync).len();
    assert_eq!((hooks, exit_code(&sim, "web", "main")), (2, Some(0)), "{}", sim.trace(Trace::to_string));
    let (hook, stop) = (times(&sim, Method::ExecSync)[1], times(&sim, Method::StopContainer)[0]);
    assert_eq!((stop - hook).as_secs(), 3, "{}", sim.trace(Trace::to_string));
}

#[tokio::test(start_paused = true)]
async fn a_sleep_longer_than_any_clock_holds_up_neither_its_pod_nor_another() {
    for (hook, length) in [("postStart", i32::MAX.into()), ("postStart", i64::MAX), ("preStop", i64::MAX)] {
        let (sim, folder) = node();
        let hooks = json!({ hook: { "sleep": { "seconds": length } } });
        let web = with_grace(with_hooks(pod("web").running("main", "term 100ms"), "main", hooks), 3);
        let calm = pod("calm").running("main", "run").build();
        let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone(), calm]);
        until(&sim, "both run", |t| ["web", "calm"].iter().all(|name| t.live(name, "main").is_some())).await;
        sleep(secs(60)).await;
        let since = Instant::now();
        agent.remove(web).await;
        until(&sim, "it is stopped", |t| t.live("web", "main").is_none()).await;
        assert!(since.elapsed() < secs(10), "{hook}: {:?}", since.elapsed());
        sim.trace(|t| assert_eq!(["web", "calm"].map(|name| t.history(name, "main").count()), [1, 1], "{hook}: {t}"));
    }
}
