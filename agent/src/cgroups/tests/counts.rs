//! What is counted of operations on cgroups.

use super::*;
use crate::metrics::Metrics;

#[tokio::test]
async fn operations_are_counted() {
    let (fixture, metrics) = (V2Fixture::make(), Metrics::new());
    files::create(&fixture.layout(), "/kubepods/burstable/podu-1").expect("folders");
    fixture.settle("/kubepods/burstable/podu-1");
    let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let cgroups = cgroups.with_requests(Requests::new(1500, true), QosPolicy::default()).with_metrics(metrics.clone());
    let counts = || {
        let text = metrics.render().expect("metrics");
        ["create", "update", "destroy"].map(|operation| {
            let name = format!("kubelet_cgroup_manager_duration_seconds_count{{operation_type=\"{operation}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u32>().ok()).unwrap_or(0)
        })
    };
    cgroups.update_qos_classes().await;
    assert_eq!(counts(), [0, 1, 0], "the class has another weight");
    cgroups.update_qos_classes().await;
    assert_eq!(counts(), [0, 1, 0], "nothing is written");
    cgroups.update_pod(QosClass::Burstable, "u-1", &values()).await.expect("resized");
    assert_eq!(counts(), [0, 2, 0]);
    cgroups.ensure_pod(QosClass::BestEffort, "u-2", &values()).await.expect("a pod");
    cgroups.destroy_pod(QosClass::BestEffort, "u-2").await.expect("gone");
    assert_eq!(counts(), [1, 2, 1]);
}

#[tokio::test]
async fn protected_memory_is_shown() {
    let (fixture, metrics, requests) = (V2Fixture::make(), Metrics::new(), Requests::new(100, true));
    files::create(&fixture.layout(), "/kubepods/burstable").expect("folders");
    fixture.settle("/kubepods/burstable");
    let memory = Requested { guaranteed_memory: 8192, burstable_memory: 4096, ..requests.requested() };
    *requests.0.lock().expect("unpoisoned") = memory;
    let shown = || {
        let text = metrics.render().expect("metrics");
        ["min", "low"].map(|kind| {
            let name = format!("kubelet_memory_qos_node_memory_{kind}_bytes ");
            text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok())
        })
    };
    for (protects_memory, expected) in [(false, [Some(0), Some(0)]), (true, [Some(8192), Some(4096)])] {
        let policy = QosPolicy { protects_memory, ..QosPolicy::default() };
        let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
        let cgroups = cgroups.with_requests(requests.clone(), policy).with_metrics(metrics.clone());
        cgroups.update_qos_classes().await;
        assert_eq!(shown(), expected, "{protects_memory}");
    }
}
