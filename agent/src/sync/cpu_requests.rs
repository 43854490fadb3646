//! CPU requests of the desired pods, for the weight of the Burstable QoS class.

use super::SharedPods;
use crate::cgroups::BurstableRequests;
use crate::cgroups::QosClass;
use crate::cgroups::RequestedCpu;
use crate::model::Pod;
use crate::workers::generate::qos;
use crate::workers::generate::resources;
use crate::workers::state::is_terminal;

impl BurstableRequests for SharedPods {
    fn requested(&self) -> RequestedCpu {
        let milli_cpu = self.all().iter().fold(0i64, |sum, pod| sum.saturating_add(burstable_milli_cpu(pod)));
        RequestedCpu { milli_cpu, is_complete: self.sources_ready() }
    }
}

/// Request of an active Burstable pod; 0 for other pods, and for one whose quantities are invalid, which never runs.
fn burstable_milli_cpu(pod: &Pod) -> i64 {
    let is_burstable = qos::qos_class(pod).is_ok_and(|class| class == QosClass::Burstable);
    if !is_burstable || is_terminal(pod) {
        return 0;
    }
    resources::requested_milli_cpu(pod).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, resources: Value, phase: &str) -> Pod {
        let spec = json!({ "containers": [{ "name": "main", "resources": resources }], "overhead": { "cpu": "10m" } });
        let metadata = json!({ "name": uid, "namespace": "default", "uid": uid });
        let pod = json!({ "metadata": metadata, "spec": spec, "status": { "phase": phase } });
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn active_burstable_pods_are_summed_with_their_overhead() {
        let pods = SharedPods::default();
        let requests = |milli: &str| json!({ "requests": { "cpu": milli } });
        let guaranteed = json!({ "cpu": "4", "memory": "1Gi" });
        pods.set(pod("a", requests("500m"), "Running"));
        pods.set(pod("b", requests("1"), "Pending"));
        pods.set(pod("ended", requests("2"), "Succeeded"));
        pods.set(pod("guaranteed", json!({ "requests": guaranteed, "limits": guaranteed }), "Running"));
        pods.set(pod("best-effort", json!({}), "Running"));
        assert_eq!(pods.requested(), RequestedCpu { milli_cpu: 1520, is_complete: false });
        pods.set_sources_ready();
        assert!(pods.requested().is_complete);
    }
}
