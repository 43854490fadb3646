//! What pods hold while they are resized: containers that do not run, and pods that wait for others to end.

use super::*;

/// Has the pod's container crash twice: the second time it waits to be restarted.
async fn crash_twice(site: &ResizableNode, name: &'static str) {
    site.sim.kill(name, "main", Exit::Code(1)).expect("it runs");
    until(&site.sim, "it was restarted", |trace| trace.history(name, "main").count() == 2).await;
    site.until_running(name).await;
    site.sim.kill(name, "main", Exit::Code(1)).expect("it runs");
    sleep(Duration::from_secs(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_container_that_does_not_run_holds_what_is_allocated_to_it() {
    let site = ResizableNode::new(4000);
    let (agent, metrics, _) = site.start(vec![cpu("one", 1, "1"), cpu("two", 1, "3")]);
    site.until_running("one").await;
    site.until_running("two").await;
    crash_twice(&site, "two").await;
    agent.update(cpu("one", 2, "2")).await;
    until_true("it waits", || pending(&agent, "one").is_some()).await;
    agent.update(cpu("two", 2, "1")).await;
    until_true("it has grown", || site.applied("one")[0] == 2048 && is_settled(&agent, "one")).await;
    assert_eq!(site.instances("two"), 2, "the other one is still waiting to be restarted");
    let families = metrics.render().expect("metrics");
    let accepted = r#"kubelet_pod_deferred_accepted_resizes_total{retry_trigger="pod_resized"} 1"#;
    assert!(families.contains(accepted), "{families}");
}

/// Every pod that ends is a reason to try all resizes that wait again.
#[tokio::test(start_paused = true)]
async fn a_resize_that_is_refused_again_is_no_work_for_its_worker() {
    let site = ResizableNode::new(4000);
    let (agent, metrics, _) = site.start(vec![cpu("one", 1, "1"), cpu("two", 1, "2")]);
    site.until_running("one").await;
    site.until_running("two").await;
    agent.update(cpu("one", 2, "2500m")).await;
    until_true("it waits", || pending(&agent, "one").is_some()).await;
    sleep(Duration::from_secs(1)).await;
    let passes = || {
        let families = metrics.render().expect("metrics");
        let counts = families.lines().filter(|line| line.starts_with("kubelet_pod_worker_duration_seconds_count{"));
        let count = |line: &str| line.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok()).expect("a count");
        counts.map(count).sum::<u64>()
    };
    let before = passes();
    sleep(LONG).await;
    assert_eq!(passes(), before, "it is tried several times");
    agent.remove(cpu("two", 1, "2")).await;
    until_true("it has grown", || site.applied("one")[0] == 2560 && is_settled(&agent, "one")).await;
    assert!(passes() > before);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_counts_a_container_that_does_not_run_by_its_allocation() {
    let site = ResizableNode::new(4000);
    let (agent, _, events) = site.start(vec![cpu("one", 1, "1"), cpu("two", 1, "3")]);
    site.until_running("one").await;
    site.until_running("two").await;
    crash_twice(&site, "two").await;
    agent.update(cpu("two", 2, "1")).await;
    until_true("it is done", || reasons(&events) == ["ResizeStarted", "ResizeCompleted"]).await;
    sleep(Duration::from_secs(1)).await;
    drop(agent);

    let (agent, ..) = site.start(vec![cpu("one", 1, "1"), cpu("two", 2, "1")]);
    sleep(Duration::from_secs(1)).await;
    agent.update(cpu("one", 2, "2")).await;
    until_true("it has grown", || site.applied("one")[0] == 2048 && is_settled(&agent, "one")).await;
}

#[tokio::test(start_paused = true)]
async fn a_resize_of_a_pod_that_waits_for_its_victims_is_not_lost() {
    let site = ResizableNode::new(4000);
    let stubborn = json!({ "command": ["term", "ignore"] });
    let (agent, ..) = site.start(vec![sized("victim", 1, json!({ "requests": { "cpu": "3" } }), stubborn)]);
    site.until_running("victim").await;
    let critical = |generation, amount: &str| {
        let mut pod = Arc::unwrap_or_clone(cpu("critical", generation, amount));
        pod.spec.as_mut().expect("a spec").priority = Some(2_000_000_000);
        Arc::new(pod)
    };
    agent.add(critical(1, "2")).await;
    sleep(Duration::from_secs(1)).await;
    agent.update(critical(2, "3")).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(site.instances("critical"), 0, "it waits");
    site.until_running("critical").await;
    until_true("it has grown", || site.applied("critical")[0] == 3072 && is_settled(&agent, "critical")).await;
}
