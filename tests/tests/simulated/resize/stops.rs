//! Resizes for which containers are stopped.

use super::*;

/// The kernel proves the exit before the runtime has removed the container's cgroup, which has the larger quota.
#[tokio::test(start_paused = true)]
async fn the_cgroup_of_a_pod_shrinks_when_the_runtime_has_stopped_the_container() {
    let site = ResizableNode::new(4000);
    let policy = json!({ "resizePolicy": [{ "resourceName": "cpu", "restartPolicy": "RestartContainer" }] });
    let pod = |generation, cpu: &str| sized("web", generation, both(cpu, "64Mi"), policy.clone());
    let (agent, _, events) = site.start(vec![pod(1, "1")]);
    site.until_running("web").await;
    agent.update(pod(2, "500m")).await;
    until(&site.sim, "it was restarted", |trace| trace.history("web", "main").count() == 2).await;
    until_true("it is done", || is_settled(&agent, "web") && reasons(&events).len() == 2).await;
    site.sim.trace(|trace| {
        let reported = trace.history("web", "main").next().and_then(|main| main.reported).expect("it was reported");
        let is_update = |call: &&Call| call.method == Method::UpdatePodSandboxResources;
        let update = trace.calls().find(is_update).expect("the pod was resized");
        assert!(update.at >= reported, "{trace}");
    });
}
