//! Updates that require what the node does not declare (KEP-5328).

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
