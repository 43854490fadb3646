//! When the agent acts on a pod: terminations with a deadline, `activeDeadlineSeconds`, pulls that fail, and the status of a
//! pod whose image is being pulled, or could not be pulled until the pod ended.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerState;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::status::TerminationReason;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::folder;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::recorder;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::sleep;
use tonic::Code;

/// Deadline of every wait, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(60);

fn uid(name: &str) -> PodUid {
    PodUid::from(format!("{name}-uid").as_str())
}

fn node_shutdown() -> TerminationReason {
    TerminationReason { reason: "Terminated", message: "node shutdown".to_owned(), disruption: None }
}

/// Thirty pods that ignore SIGTERM, terminated with five seconds: all get the signal at once, and none runs after the
/// time of the node shutdown. With the stop limiter some would get it a second later.
#[tokio::test(start_paused = true)]
async fn a_termination_with_a_deadline_does_not_wait_for_the_stop_limiter() {
    let (sim, folder) = node();
    let names: Vec<String> = (0..30).map(|n| format!("p{n}")).collect();
    let pods = names.iter().map(|name| pod(name).running("main", "term ignore").build()).collect();
    let agent = Arc::new(Agent::start(&sim, SensorSet::ALL, folder.path(), pods));
    sim.until("all run", SOON, |l| l.live_count() == 30).await.unwrap_or_else(|unmet| panic!("{unmet}"));
    sleep(Duration::from_secs(5)).await;
    let begin = Instant::now();
    let mut terminations = JoinSet::new();
    for name in names {
        let agent = agent.clone();
        terminations.spawn(async move { agent.kill(uid(&name), 5, node_shutdown()).await });
    }
    sim.until("all have exited", SOON, |l| l.live_count() == 0).await.unwrap_or_else(|unmet| panic!("{unmet}"));
    assert!(begin.elapsed() < Duration::from_millis(5500), "{:?}", begin.elapsed());
    let stops: Vec<Duration> = sim.trace(|l| {
        let stops = l.calls().filter(|call| call.method == Method::StopContainer);
        stops.map(|call| call.at.saturating_duration_since(begin)).collect()
    });
    assert_eq!(stops.len(), 30);
    assert!(stops.iter().all(|at| *at < Duration::from_millis(200)), "{stops:?}");
    terminations.join_all().await;
}

/// What counts is when the processes have ended, not how long the runtime then takes to remove what is left.
#[tokio::test(start_paused = true)]
async fn only_processes_that_outlast_their_grace_period_are_reported() {
    for (slow, expected) in [(Method::StopPodSandbox, 0), (Method::StopContainer, 1)] {
        let ((sim, folder), (recorder, events)) = (node(), recorder());
        let web = pod("web").running("main", "run").build();
        let agent = Agent::start_with_recorder(&sim, SensorSet::ALL, folder.path(), vec![web], recorder);
        sim.until("it runs", SOON, |l| l.live("web", "main").is_some()).await.expect("it runs");
        sleep(Duration::from_secs(5)).await;
        sim.faults(|faults| faults.add(CallFault::on(slow, FaultKind::Slow(Duration::from_secs(60)))));
        let begin = Instant::now();
        agent.kill(uid("web"), 5, node_shutdown()).await;
        assert!(begin.elapsed() >= Duration::from_secs(60), "{slow:?}: {:?}", begin.elapsed());
        sleep(Duration::from_secs(1)).await;
        let events = events.lock().expect("not poisoned").clone();
        let exceeded = events.iter().filter(|(_, event)| event["reason"] == "ExceededGracePeriod");
        assert_eq!(exceeded.count(), expected, "{slow:?}: {events:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_being_deleted_fails_for_the_shutdown_of_its_node() {
    let ((sim, folder), api) = (node(), Api::default());
    let web = pod("web").from_api().running("main", "term ignore");
    let running = api.put(&web.clone().build());
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![running], &api);
    sim.until("it runs", SOON, |l| l.live("web", "main").is_some()).await.expect("it runs");
    sleep(Duration::from_secs(5)).await;
    let mut deleted = ApiPod::clone(&web.deleting().build());
    deleted.metadata.deletion_grace_period_seconds = Some(3600);
    agent.update(api.put(&Arc::new(deleted))).await;
    sleep(Duration::from_secs(60)).await;
    agent.kill(uid("web"), 5, node_shutdown()).await;
    sleep(Duration::from_secs(5)).await;
    let last = api.deleted().pop().and_then(|pod| pod.status.clone()).expect("it is gone");
    let shown = (last.phase.as_deref(), last.reason.as_deref(), last.message.as_deref());
    assert_eq!(shown, (Some("Failed"), Some("Terminated"), Some("node shutdown")));
}

fn with_deadline(pod: &Pod, seconds: i64) -> Pod {
    let mut pod = ApiPod::clone(pod);
    pod.spec.get_or_insert_default().active_deadline_seconds = Some(seconds);
    Arc::new(pod)
}

/// A pod that never starts, whose next retry is due later, fails as well when its deadline passes.
#[tokio::test(start_paused = true)]
async fn an_active_deadline_is_noticed_when_it_passes() {
    for refused in [false, true] {
        let (sim, folder) = node();
        if refused {
            let fault = FaultKind::Fail(Code::Unknown, "refused".to_owned());
            sim.faults(|faults| faults.add(CallFault::on(Method::CreateContainer, fault)));
        }
        let web = with_deadline(&pod("web").running("main", "run").build(), 100);
        let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web]);
        let begin = Instant::now();
        let reason = || agent.statuses.get(&uid("web")).and_then(|status| status.reason);
        while reason().as_deref() != Some("DeadlineExceeded") {
            assert!(begin.elapsed() < Duration::from_millis(101_500), "refused: {refused}: {:?}", reason());
            sleep(Duration::from_millis(50)).await;
        }
        assert!(begin.elapsed() >= Duration::from_secs(99), "{:?}", begin.elapsed());
    }
}

/// End and previous end of each container of pod `web`, as the API server has them, by container name.
fn ends(api: &Api) -> Vec<String> {
    let end = |state: Option<&ContainerState>| match state.and_then(|state| state.terminated.as_ref()) {
        Some(end) => format!("{} {}", end.exit_code, end.reason.as_deref().unwrap_or_default()),
        None => "none".to_owned(),
    };
    let status = api.pod("web").and_then(|pod| pod.status.clone()).unwrap_or_default();
    let containers = status.container_statuses.iter().flatten();
    containers.map(|c| format!("{}: {} after {}", c.name, end(c.state.as_ref()), end(c.last_state.as_ref()))).collect()
}

/// A pod whose deadline passes while one container cannot be pulled and another is in back-off. The final status ends both;
/// the status of the torn-down sandbox, which follows for a pod on the host's network, keeps these ends and is not rejected.
#[tokio::test(start_paused = true)]
async fn containers_that_wait_for_their_start_at_the_deadline_stay_terminated() {
    let crashed = "crashes: 137 ContainerStatusUnknown after 1 Error";
    for (policy, crashed) in [("Always", crashed), ("OnFailure", crashed), ("Never", "crashes: 1 Error after none")] {
        for own_network in [false, true] {
            let ((sim, folder), api) = (node(), Api::default());
            let web = pod("web").from_api().restarted(policy).running("absent", "run").running("crashes", "exit 1 1s");
            let web = if own_network { web.own_network() } else { web };
            let mut web = ApiPod::clone(&web.running("main", "run").build());
            web.spec.get_or_insert_default().containers[0].image = Some("nowhere".to_owned());
            let web = api.put(&with_deadline(&Arc::new(web), 100));
            let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
            let unknown = "absent: 137 ContainerStatusUnknown after none";
            let begin = Instant::now();
            while !ends(&api).iter().any(|end| end == unknown) {
                assert!(begin.elapsed() < Duration::from_secs(130), "{policy} {own_network}: {:?}", ends(&api));
                sleep(Duration::from_millis(10)).await;
            }
            sleep(Duration::from_secs(60)).await;
            assert_eq!(ends(&api), [unknown, crashed, "main: 143 Error after none"], "{policy} {own_network}");
            let sent = api.phases_sent("web");
            assert_eq!(sent.iter().filter(|phase| *phase == "Failed").count(), 1, "{sent:?}");
            let status = agent.statuses.get(&uid("web")).expect("a status");
            let sandbox = status.conditions.iter().flatten().find(|c| c.type_ == "PodReadyToStartContainers");
            assert_eq!(sandbox.map(|c| c.status.as_str()), Some("False"), "{policy} {own_network}: {status:#?}");
        }
    }
}

/// KEP-3085: the sandbox with its address is ready, however long the pull of the image takes.
#[tokio::test(start_paused = true)]
async fn a_ready_sandbox_is_published_before_the_image_is_pulled() {
    let sim = SimRuntime::new(Options::default());
    sim.images(|images| images.publish("busybox", 1 << 20));
    sim.faults(|faults| {
        faults.add(CallFault::on(Method::PullImage, FaultKind::Slow(Duration::from_secs(120))).times(1));
    });
    let folder = folder();
    let web = pod("web").own_network().running("main", "run").build();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web]);
    let begin = Instant::now();
    while sim.trace(|l| l.count(Method::PullImage)) == 0 {
        assert!(begin.elapsed() < SOON, "the image is not being pulled: {}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(50)).await;
    }
    sleep(Duration::from_secs(1)).await;
    let status = agent.statuses.get(&uid("web")).expect("a status");
    let condition = |kind: &str| {
        let found = status.conditions.iter().flatten().find(|condition| condition.type_ == kind);
        found.map(|condition| condition.status.as_str())
    };
    assert_eq!(condition("PodReadyToStartContainers"), Some("True"), "{status:#?}");
    assert_eq!(condition("Ready"), Some("False"));
    assert!(status.pod_ip.is_some(), "{status:#?}");
    sim.until("it runs", Duration::from_secs(300), |l| l.live("web", "main").is_some()).await.expect("it runs");
}

/// The call to the runtime ends with the pod, as a kubelet's does.
#[tokio::test(start_paused = true)]
async fn a_pod_that_is_removed_does_not_wait_for_a_pull() {
    let sim = SimRuntime::new(Options::default());
    sim.images(|images| images.publish("busybox", 1 << 20));
    sim.faults(|faults| faults.add(CallFault::on(Method::PullImage, FaultKind::Slow(Duration::from_secs(600)))));
    let folder = folder();
    let web = pod("web").own_network().running("main", "run").build();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    let begin = Instant::now();
    while sim.trace(|l| l.count(Method::PullImage)) == 0 {
        assert!(begin.elapsed() < SOON, "the image is not being pulled: {}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(50)).await;
    }
    agent.remove(web).await;
    let begin = Instant::now();
    while !sim.sandboxes("web").is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(10), "{}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 0, "no container is created");
}

/// A pull that fails is repeated when its back-off ends, not at a pause of the pod's retries. Until then the status shows the
/// back-off.
#[tokio::test(start_paused = true)]
async fn a_failed_pull_is_shown_as_held_back_and_repeated_when_its_back_off_ends() {
    let sim = SimRuntime::new(Options::default());
    sim.images(|images| images.publish("busybox", 1 << 20));
    let refused = CallFault::on(Method::PullImage, FaultKind::Fail(Code::Unknown, "refused".to_owned()));
    sim.faults(|faults| faults.add(refused.times(4)));
    let folder = folder();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
    let waiting = || {
        let containers = agent.statuses.get(&uid("web"))?.container_statuses?;
        containers.into_iter().next()?.state?.waiting?.reason
    };
    let begin = Instant::now();
    let mut shown: Vec<(String, Duration)> = Vec::new();
    while sim.trace(|l| l.live("web", "main").is_none()) {
        assert!(begin.elapsed() < Duration::from_secs(200), "{shown:?}");
        let reason = waiting().filter(|reason| reason.contains("Image"));
        if let Some(reason) = reason.filter(|reason| shown.last().is_none_or(|(last, _)| last != reason)) {
            shown.push((reason, begin.elapsed()));
        }
        sleep(Duration::from_millis(10)).await;
    }
    let reasons: Vec<&str> = shown.iter().map(|(reason, _)| reason.as_str()).collect();
    assert_eq!(reasons, ["ErrImagePull", "ImagePullBackOff"].repeat(4), "{shown:?}");
    let pulls: Vec<Instant> = sim.trace(|l| {
        let pulls = l.calls().filter(|call| call.method == Method::PullImage);
        pulls.map(|call| call.at).collect()
    });
    let pauses: Vec<u64> = pulls.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(pauses, [10, 20, 40, 80]);
    for pair in shown.chunks(2) {
        assert!((1..2).contains(&(pair[1].1 - pair[0].1).as_secs()), "{shown:?}");
    }
}

/// Whatever causes the worker's next pass, the cause of a restart that failed is shown for ten seconds before the back-off
/// that holds the next one.
#[tokio::test(start_paused = true)]
async fn why_a_restart_failed_is_shown_before_its_back_off() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "exit 1 1s").build();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    let waiting = || {
        let containers = agent.statuses.get(&uid("web"))?.container_statuses?;
        containers.into_iter().next()?.state?.waiting?.reason
    };
    let crashes = |l: &Trace| l.history("web", "main").filter(|instance| instance.exited.is_some()).count();
    sim.until("it has crashed three times", SOON, |l| crashes(l) == 3).await.expect("it crashes");
    // The next start is due in 20 s, and the one after it 40 s after the crash.
    let refused = CallFault::on(Method::CreateContainer, FaultKind::Fail(Code::Unknown, "refused".to_owned()));
    sim.faults(|faults| faults.add(refused.times(1)));
    let crashed = Instant::now();
    while sim.trace(|l| l.count(Method::CreateContainer)) < 4 {
        assert!(crashed.elapsed() < SOON, "{}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(10)).await;
    }
    let failed = Instant::now();
    sleep(Duration::from_secs(1)).await;
    agent.update(web).await;
    while failed.elapsed() < Duration::from_millis(9900) {
        assert_eq!(waiting().as_deref(), Some("CreateContainerError"), "{:?}", failed.elapsed());
        sleep(Duration::from_millis(100)).await;
    }
    sleep(Duration::from_secs(1)).await;
    assert_eq!(waiting().as_deref(), Some("CrashLoopBackOff"), "{:?}", failed.elapsed());
    sim.until("it is started again", SOON, |l| l.history("web", "main").count() == 4).await.expect("it starts");
    assert!((39..42).contains(&crashed.elapsed().as_secs()), "{:?}", crashed.elapsed());
}

/// The first status that shows the end of a container carries its termination message, though the kernel proves the exit
/// before the runtime reports it.
#[tokio::test(start_paused = true)]
async fn a_proven_exit_is_published_with_its_termination_message() {
    let (sim, folder) = node();
    let web = pod("web").own_network().restarted("Never").running("main", "exit 3 20s").build();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web]);
    sim.until("it runs", SOON, |l| l.live("web", "main").is_some()).await.expect("it runs");
    let mut files = std::fs::read_dir(folder.path().join("pods/web-uid/containers/main")).expect("its folder");
    let file = files.next().expect("the file mounted for the message").expect("a readable folder").path();
    std::fs::write(file, "out of coffee").expect("a message");
    let terminated = || {
        let containers = agent.statuses.get(&uid("web"))?.container_statuses?;
        containers.into_iter().next()?.state?.terminated
    };
    let begin = Instant::now();
    let terminated = loop {
        if let Some(terminated) = terminated() {
            break terminated;
        }
        assert!(begin.elapsed() < SOON, "no exit is published");
        sleep(Duration::from_millis(1)).await;
    };
    assert_eq!((terminated.exit_code, terminated.message.as_deref()), (3, Some("out of coffee")));
}
