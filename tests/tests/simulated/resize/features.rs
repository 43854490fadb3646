//! Updates that require what the node does not declare (KEP-5328); a call that the runtime does not have.

use super::*;

const REASON: &str = "FailedNodeDeclaredFeaturesCheck";

fn messages(events: &RecordedEvents) -> Vec<String> {
    let events = events.lock().expect("not poisoned");
    let all = events.iter().map(|(_, event)| event).filter(|event| event["reason"] == REASON);
    all.map(|event| event["message"].as_str().unwrap_or_default().to_owned()).collect()
}

fn with_pod_limit(generation: i64, cpu: &str) -> Pod {
    let mut object = serde_json::to_value(&*super::cpu("web", generation, "500m")).expect("a pod");
    object["spec"]["resources"] = json!({ "limits": { "cpu": cpu } });
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

#[tokio::test(start_paused = true)]
async fn an_update_that_needs_an_undeclared_feature_is_reported_and_the_pod_runs_on() {
    let mut site = ResizableNode::new(4000);
    site.declared_features = Some(Arc::default());
    let (agent, _, events) = site.start(vec![with_pod_limit(1, "1")]);
    site.until_running("web").await;
    agent.update(with_pod_limit(1, "1")).await;
    agent.update(with_pod_limit(2, "2")).await;
    until_true("the event", || !messages(&events).is_empty()).await;
    let feature = "InPlacePodLevelResourcesVerticalScaling";
    assert_eq!(messages(&events), [format!("Pod requires node features that are not available: {feature}")]);
    assert_eq!(site.instances("web"), 1);
}

/// Some runtimes answer an unknown call with another code than Unimplemented.
#[tokio::test(start_paused = true)]
async fn a_runtime_that_has_not_implemented_the_update_of_sandboxes_fails_no_resize() {
    let site = ResizableNode::new(4000);
    let (agent, _, events) = site.start(vec![cpu("web", 1, "1")]);
    site.until_running("web").await;
    let answer = FaultKind::Fail(tonic::Code::Unknown, "method is Not Implemented yet".to_owned());
    site.sim.faults(|faults| faults.add(CallFault::on(Method::UpdatePodSandboxResources, answer)));
    agent.update(cpu("web", 2, "2")).await;
    until_true("it is done", || is_settled(&agent, "web") && reasons(&events).len() == 2).await;
    assert_eq!(reasons(&events), ["ResizeStarted", "ResizeCompleted"]);
    let shares = site.file("cpu", "kubepods/burstable/podweb-uid", "cpu.shares");
    assert_eq!((site.applied("web")[0], text(&shares).as_str()), (2048, "2048"));
    assert_eq!(site.sim.trace(|trace| trace.count(Method::UpdatePodSandboxResources)), 1);
}
