//! Start latencies of pods over a sequence of observations.

use serde_json::Value;
use serde_json::json;

use super::*;
use crate::model::testing;

const CREATED: u64 = 1_700_000_000;

fn at(seconds: f64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(CREATED) + Duration::from_secs_f64(seconds)
}

fn pod(spec: &Value, status: &Value) -> Pod {
    let mut full = json!({ "containers": [{ "name": "c" }], "initContainers": [{ "name": "i" }] });
    full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "metadata": { "name": "pod", "namespace": "ns", "uid": "uid", "creationTimestamp": "2023-11-14T22:13:20Z" },
        "spec": full,
        "status": status,
    }))
    .unwrap()
}

/// As its source delivers it, half a second after its creation.
fn desired(spec: &Value) -> Pod {
    let mut desired = pod(spec, &json!({}));
    let seen = ("kubernetes.io/config.seen".to_owned(), "2023-11-14T22:13:20.5Z".to_owned());
    desired.metadata.annotations = Some([seen].into());
    desired
}

fn running() -> Value {
    let running = json!({ "running": { "startedAt": "2023-11-14T22:13:26Z" } });
    json!({ "startTime": "2023-11-14T22:13:21Z", "containerStatuses": [
        { "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": running },
    ]})
}

/// An init container that took two seconds, and the given container.
fn view(container: Option<crate::model::ContainerStatus>) -> PodSnapshot {
    let mut init = testing::exited("i", 0, 0);
    init.finished_at = init.started_at + 2_000_000_000;
    testing::snapshot(container.into_iter().chain([init]).collect())
}

fn sum(metrics: &Metrics, family: &str) -> Option<f64> {
    let text = metrics.render().unwrap();
    let value = |name: &str| {
        let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
        line.split(' ').nth(1)?.parse::<f64>().ok()
    };
    let count = value(&format!("{family}_count"))?;
    (count > 0.0).then(|| value(&format!("{family}_sum"))).flatten()
}

/// Starts a pod; returns total, level, and the gauge of the first pod with a network.
fn measured(spec: &Value, first_status: &Value) -> (Option<f64>, Option<f64>, f64) {
    let metrics = Metrics::new();
    let startups = Startups::counting(metrics.clone());
    startups.observed(&pod(spec, first_status), at(0.5));
    // Two pulls that overlap: three seconds.
    startups.pulled("uid", at(1.0), at(3.0));
    startups.pulled("uid", at(2.0), at(4.0));
    let desired = desired(spec);
    startups.published(&desired, &view(None), at(4.5));
    startups.observed(&pod(spec, &running()), at(5.0));
    startups.published(&desired, &view(Some(testing::running("c", 0))), at(7.0));
    startups.published(&desired, &view(Some(testing::running("c", 0))), at(7.5));
    startups.observed(&pod(spec, &json!({ "startTime": "2023-11-14T22:13:21Z", "containerStatuses": [
        { "name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": { "waiting": {} } },
    ]})), at(6.0));
    startups.observed(&pod(spec, &running()), at(8.0));
    startups.observed(&pod(spec, &running()), at(9.0));
    let tracked = sum(&metrics, "kubelet_pod_start_total_duration_seconds").is_some();
    assert_eq!(sum(&metrics, "kubelet_pod_start_duration_seconds"), tracked.then_some(6.5));
    let text = metrics.render().unwrap();
    let gauge =
        text.lines().find_map(|line| line.strip_prefix("kubelet_first_network_pod_start_sli_duration_seconds "));
    (
        sum(&metrics, "kubelet_pod_start_total_duration_seconds"),
        sum(&metrics, "kubelet_pod_start_sli_duration_seconds"),
        gauge.unwrap().parse().unwrap(),
    )
}

#[test]
fn pulls_and_init_containers_do_not_count_against_the_level() {
    assert_eq!(measured(&json!({}), &json!({})), (Some(8.0), Some(3.0), 3.0));
    let host = json!({ "hostNetwork": true });
    assert_eq!(measured(&host, &json!({})), (Some(8.0), Some(3.0), 0.0));
    let plain = json!({ "volumes": [{ "name": "a", "emptyDir": {} }, { "name": "b", "projected": {} }] });
    assert_eq!(measured(&plain, &json!({})), (Some(8.0), Some(3.0), 3.0));
}

#[test]
fn pods_with_state_have_no_level() {
    let spec = json!({ "volumes": [{ "name": "a", "hostPath": { "path": "/" } }] });
    assert_eq!(measured(&spec, &json!({})), (Some(8.0), None, 0.0));
}

#[test]
fn pods_seen_too_late_or_unschedulable_are_not_measured() {
    let none = (None, None, 0.0);
    assert_eq!(measured(&json!({}), &json!({ "startTime": "2023-11-14T22:13:20Z" })), none);
    let condition = json!({ "type": "PodScheduled", "status": "False" });
    assert_eq!(measured(&json!({}), &json!({ "conditions": [condition] })), none);
}

/// Containers: as many as an object of the API server has room for.
#[test]
fn a_pod_of_thousands_of_containers_runs_when_the_last_of_them_does() {
    let names: Vec<String> = (0..20_000).map(|number| format!("c{number}")).collect();
    let containers: Vec<Value> = names.iter().map(|name| json!({ "name": name })).collect();
    let metrics = Metrics::new();
    let (startups, desired) = (Startups::counting(metrics.clone()), desired(&json!({ "containers": containers })));
    startups.added("uid".into());
    for (running, seconds, expected) in [(0, 1.0, None), (19_999, 2.0, None), (20_000, 7.0, Some(6.5))] {
        let view = testing::snapshot(names.iter().take(running).map(|name| testing::running(name, 0)).collect());
        startups.published(&desired, &view, at(seconds));
        assert_eq!(sum(&metrics, "kubelet_pod_start_duration_seconds"), expected, "{running}");
    }
}

#[test]
fn static_pods_are_found_running_unless_an_earlier_agent_has_started_them() {
    let table = [(vec![], Some(6.5)), (vec![testing::running("c", 0)], None), (vec![testing::exited("c", 0, 1)], None)];
    for (first, expected) in table {
        let metrics = Metrics::new();
        let (startups, desired) = (Startups::counting(metrics.clone()), desired(&json!({})));
        startups.added("uid".into());
        startups.published(&desired, &testing::snapshot(first), at(1.0));
        startups.published(&desired, &view(Some(testing::running("c", 0))), at(7.0));
        startups.published(&desired, &view(Some(testing::running("c", 0))), at(8.0));
        assert_eq!(sum(&metrics, "kubelet_pod_start_duration_seconds"), expected);
        assert_eq!(sum(&metrics, "kubelet_pod_start_total_duration_seconds"), None);
        startups.gone(&"uid".into());
        assert_eq!(startups.pods().unwrap().1.records.len(), 0);
    }
}

#[test]
fn the_default_counts_nothing() {
    let startups = Startups::default();
    startups.observed(&pod(&json!({}), &json!({})), at(0.0));
    assert!(startups.pods().is_none(), "no record is kept");
    startups.gone(&"uid".into());
}

#[test]
fn removed_and_terminated_pods_are_dropped() {
    let metrics = Metrics::new();
    let startups = Startups::counting(metrics.clone());
    let fresh = pod(&json!({}), &json!({}));
    let records = || startups.pods().unwrap().1.records.len();
    startups.observed(&fresh, at(0.0));
    assert_eq!(records(), 1);
    startups.observed(&pod(&json!({}), &json!({ "phase": "Succeeded" })), at(1.0));
    assert_eq!(records(), 0);
    startups.observed(&fresh, at(0.0));
    startups.gone(&"uid".into());
    assert_eq!(records(), 0);
}
