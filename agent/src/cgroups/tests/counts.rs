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
