//! Sidecars (restartable init containers, KEP-753) on the simulated node: start order, restart, termination order, and
//! completion of a pod whose main containers have exited.

use std::time::Duration;

use keblet::model::PodUid;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tokio::time::Instant;
use tokio::time::sleep;

/// Deadline of every wait, on the simulated node's clock.
const TIMEOUT: Duration = Duration::from_secs(300);

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

async fn until(sim: &SimRuntime, what: &str, met: impl Fn(&Trace) -> bool) {
    sim.until(what, TIMEOUT, met).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
}

fn started(trace: &Trace, pod: &str, container: &str) -> Vec<Instant> {
    trace.history(pod, container).filter_map(|instance| instance.started).collect()
}

fn exited(trace: &Trace, pod: &str, container: &str) -> Vec<Instant> {
    trace.history(pod, container).filter_map(|instance| instance.exited.map(|(at, _)| at)).collect()
}

#[tokio::test(start_paused = true)]
async fn sidecar_starts_before_later_init_containers_and_keeps_running() {
    let (sim, folder) = node();
    let web = pod("web").after("first", "exit 0 1s").sidecar("proxy", "run").after("second", "exit 0 1s");
    let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.running("main", "run").build()]);
    until(&sim, "main runs", |t| t.live("web", "main").is_some()).await;
    sleep(secs(30)).await;
    sim.trace(|t| {
        let order: Vec<&str> = t.instances().iter().map(|instance| instance.container.as_str()).collect();
        assert_eq!(order, ["first", "proxy", "second", "main"], "{t}");
        assert!(exited(t, "web", "first")[0] <= started(t, "web", "proxy")[0], "{t}");
        assert!(started(t, "web", "proxy")[0] <= started(t, "web", "second")[0], "{t}");
        assert!(exited(t, "web", "second")[0] <= started(t, "web", "main")[0], "{t}");
        assert!(t.live("web", "proxy").is_some(), "{t}");
    });
}

/// A sidecar restarts whatever the pod's restart policy is, and no other container restarts with it.
#[tokio::test(start_paused = true)]
async fn crashed_sidecar_restarts_under_every_restart_policy() {
    for policy in ["Always", "OnFailure", "Never"] {
        let (sim, folder) = node();
        let web = pod("web").restarted(policy).after("init", "exit 0").sidecar("proxy", "exit 1 5s until 2");
        let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.running("main", "run").build()]);
        let third = |t: &Trace| t.live("web", "proxy").is_some_and(|instance| instance.attempt == 2);
        until(&sim, "third instance of the sidecar", third).await;
        sleep(secs(30)).await;
        sim.trace(|t| {
            assert_eq!(started(t, "web", "proxy").len(), 3, "{policy}\n{t}");
            assert_eq!((started(t, "web", "main").len(), started(t, "web", "init").len()), (1, 1), "{policy}\n{t}");
            assert!(t.duplicates().is_empty() && t.fallen_attempts().is_empty(), "{policy}\n{t}");
        });
    }
}

/// Main containers terminate first, then sidecars in reverse order of their start.
#[tokio::test(start_paused = true)]
async fn sidecars_terminate_after_main_containers_in_reverse_order() {
    let (sim, folder) = node();
    let web = pod("web").sidecar("one", "term 100ms").sidecar("two", "term 100ms").running("main", "term 1s");
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone().build()]);
    until(&sim, "main runs", |t| t.live("web", "main").is_some()).await;
    sleep(secs(5)).await;
    agent.remove(web.build()).await;
    until(&sim, "all exited", |t| t.live_count() == 0).await;
    sim.trace(|t| {
        let [main, two, one] = ["main", "two", "one"].map(|name| exited(t, "web", name)[0]);
        assert!(main < two && two < one, "{t}");
        let codes: Vec<i32> = ["main", "two", "one"]
            .map(|name| t.history("web", name).next().and_then(|i| i.exited).map_or(-1, |(_, exit)| exit.code()))
            .to_vec();
        assert_eq!(codes, [0, 0, 0], "each received SIGTERM and exited within the grace period\n{t}");
    });
}

/// The exit of a sidecar that is stopped does not decide the phase.
#[tokio::test(start_paused = true)]
async fn pod_completes_when_main_containers_exit_beside_a_sidecar() {
    for (program, phase) in [("exit 0 3s", "Succeeded"), ("exit 4 3s", "Failed")] {
        let (sim, folder) = node();
        let job = pod("job").restarted("Never").sidecar("proxy", "term 50ms").running("main", program);
        let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![job.build()]);
        let begin = Instant::now();
        until(&sim, "main exited", |t| !exited(t, "job", "main").is_empty()).await;
        until(&sim, "sidecar stopped", |t| t.live_count() == 0).await;
        assert!(begin.elapsed() < secs(10), "{:?}", begin.elapsed());
        sleep(secs(60)).await;
        let status = agent.statuses.get(&PodUid::from("job-uid")).expect("a status");
        assert_eq!(status.phase.as_deref(), Some(phase), "{}", sim.trace(Trace::to_string));
        sim.trace(|t| {
            assert_eq!((started(t, "job", "main").len(), started(t, "job", "proxy").len()), (1, 1), "{t}");
            assert!(exited(t, "job", "main")[0] < exited(t, "job", "proxy")[0], "{t}");
        });
    }
}
