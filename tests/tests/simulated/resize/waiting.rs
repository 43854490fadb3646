//! Resizes of pods that wait to be started, or for the runtime.

use super::*;

/// The pod's own cgroup is created before its sandbox, which can take any time.
#[tokio::test(start_paused = true)]
async fn the_cgroup_of_a_pod_that_waits_for_its_sandbox_is_resized() {
    let site = ResizableNode::new(4000);
    let failure = FaultKind::Fail(tonic::Code::Unknown, "no free address".to_owned());
    site.sim.faults(|faults| faults.add(CallFault::on(Method::RunPodSandbox, failure)));
    let (agent, _, events) = site.start(vec![cpu("web", 1, "2")]);
    sleep(Duration::from_secs(1)).await;
    let shares = site.file("cpu", "kubepods/burstable/podweb-uid", "cpu.shares");
    assert_eq!(text(&shares), "2048");
    agent.update(cpu("web", 2, "3")).await;
    until_true("it is allocated", || !reasons(&events).is_empty()).await;
    site.sim.faults(Faults::clear);
    site.until_running("web").await;
    assert_eq!((site.applied("web")[0], text(&shares).as_str()), (3072, "3072"));
}

/// The pod's containers would be limited, or could not be started, with what was taken back.
#[tokio::test(start_paused = true)]
async fn the_cgroup_of_a_pod_that_waits_for_its_sandbox_follows_a_resize_that_is_taken_back() {
    let site = ResizableNode::new(4000);
    let failure = FaultKind::Fail(tonic::Code::Unknown, "no free address".to_owned());
    site.sim.faults(|faults| faults.add(CallFault::on(Method::RunPodSandbox, failure)));
    let (agent, ..) = site.start(vec![cpu("web", 1, "2")]);
    sleep(Duration::from_secs(1)).await;
    let shares = site.file("cpu", "kubepods/burstable/podweb-uid", "cpu.shares");
    agent.update(cpu("web", 2, "1")).await;
    until_true("it has shrunk", || text(&shares) == "1024").await;
    agent.update(cpu("web", 3, "2")).await;
    until_true("it is as before", || text(&shares) == "2048").await;
    site.sim.faults(Faults::clear);
    site.until_running("web").await;
    until_true("it is done", || site.applied("web")[0] == 2048 && is_settled(&agent, "web")).await;
}

/// The worker publishes the status meanwhile, which reports resizes that are completed.
#[tokio::test(start_paused = true)]
async fn a_resize_that_is_taken_back_while_the_runtime_does_not_answer_is_completed_once() {
    let site = ResizableNode::new(4000);
    let (agent, _, events) = site.start(vec![cpu("web", 1, "1")]);
    site.until_running("web").await;
    sleep(Duration::from_secs(10)).await;
    site.sim.go_down();
    sleep(Duration::from_secs(5)).await;
    for pod in [cpu("web", 2, "2"), cpu("web", 3, "1")] {
        agent.update(pod).await;
        sleep(Duration::from_secs(1)).await;
    }
    let completed = || reasons(&events).iter().filter(|reason| *reason == "ResizeCompleted").count();
    assert_eq!((reasons(&events)[0].as_str(), completed()), ("ResizeStarted", 0));
    site.sim.come_up(Recovery::default());
    until_true("it is done", || is_settled(&agent, "web")).await;
    sleep(Duration::from_secs(30)).await;
    assert_eq!((completed(), site.applied("web")[0], site.instances("web")), (1, 1024, 1));
}
