//! Resizes that an earlier agent has begun.

use super::*;

/// The last step of a shrink lowers the limits of the pod's own cgroup: the containers do not show that it is missing.
#[tokio::test(start_paused = true)]
async fn the_cgroup_of_a_pod_that_an_earlier_agent_has_begun_to_shrink_is_shrunk() {
    let site = ResizableNode::new(4000);
    let (agent, ..) = site.start(vec![cpu("web", 1, "2")]);
    site.until_running("web").await;
    let failure = FaultKind::Fail(tonic::Code::Unknown, "busy".to_owned());
    site.sim.faults(|faults| faults.add(CallFault::on(Method::UpdatePodSandboxResources, failure)));
    agent.update(cpu("web", 2, "1")).await;
    let failed = || condition(&agent, "web", "PodResizeInProgress").and_then(|condition| condition.reason);
    until_true("it fails", || failed().as_deref() == Some("Error")).await;
    sleep(Duration::from_secs(1)).await;
    let shares = site.file("cpu", "kubepods/burstable/podweb-uid", "cpu.shares");
    assert_eq!((site.applied("web")[0], text(&shares).as_str()), (1024, "2048"), "the container alone has shrunk");
    let mut known = Arc::unwrap_or_clone(cpu("web", 2, "1"));
    known.status = Some(status(&agent, "web"));
    drop(agent);
    site.sim.faults(Faults::clear);

    let (agent, _, events) = site.start(vec![Arc::new(known)]);
    until_true("the event", || !reasons(&events).is_empty()).await;
    assert_eq!((reasons(&events), text(&shares).as_str()), (vec!["ResizeCompleted".to_owned()], "1024"));
    until_true("it is done", || is_settled(&agent, "web")).await;
    assert_eq!(site.instances("web"), 1);
}

/// The resize has changed nothing but the pod's own cgroup, and the agent ended before it could report it.
#[tokio::test(start_paused = true)]
async fn the_cgroup_of_a_pod_whose_resize_is_taken_back_over_a_restart_is_as_before() {
    let site = ResizableNode::new(4000);
    let (agent, ..) = site.start(vec![cpu("web", 1, "1")]);
    site.until_running("web").await;
    sleep(Duration::from_secs(1)).await;
    let failure = FaultKind::Fail(tonic::Code::Unknown, "busy".to_owned());
    site.sim.faults(|faults| faults.add(CallFault::on(Method::UpdateContainerResources, failure)));
    agent.update(cpu("web", 2, "2")).await;
    let shares = site.file("cpu", "kubepods/burstable/podweb-uid", "cpu.shares");
    until_true("the cgroup has grown", || text(&shares) == "2048").await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(site.applied("web")[0], 1024);
    drop(agent);
    site.sim.faults(Faults::clear);

    let (agent, ..) = site.start(vec![cpu("web", 3, "1")]);
    until_true("it is as before", || text(&shares) == "1024").await;
    until_true("it is done", || is_settled(&agent, "web")).await;
    assert_eq!((site.applied("web")[0], site.instances("web")), (1024, 1));
}
