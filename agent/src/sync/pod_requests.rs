//! Requests of the desired pods, by which the QoS classes are weighed and protected.

use super::SharedPods;
use crate::cgroups::PodRequests;
use crate::cgroups::Requested;
use crate::model::Pod;
use crate::model::QosClass;
use crate::model::qos;
use crate::workers::generate::resources;
use crate::workers::state::is_terminal;

impl PodRequests for SharedPods {
    fn requested(&self) -> Requested {
        let none = Requested { is_complete: self.sources_ready(), ..Requested::default() };
        self.all().iter().filter(|pod| !is_terminal(pod)).fold(none, with_pod)
    }
}

/// Adds the requests of a pod; nothing of one whose quantities are invalid, which never runs.
fn with_pod(mut sum: Requested, pod: &Pod) -> Requested {
    let Some(class) = qos::qos_class(pod).ok().filter(|class| *class != QosClass::BestEffort) else { return sum };
    let Ok(request) = resources::requested(pod) else { return sum };
    match class {
        QosClass::Guaranteed => sum.guaranteed_memory = sum.guaranteed_memory.saturating_add(request.memory),
        QosClass::Burstable => {
            sum.burstable_milli_cpu = sum.burstable_milli_cpu.saturating_add(request.milli_cpu);
            sum.burstable_memory = sum.burstable_memory.saturating_add(request.memory);
        }
        QosClass::BestEffort => {}
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, resources: Value, phase: &str) -> Pod {
        let spec = json!({ "containers": [{ "name": "main", "resources": resources }],
            "overhead": { "cpu": "10m", "memory": "1Ki" } });
        let metadata = json!({ "name": uid, "namespace": "default", "uid": uid });
        let pod = json!({ "metadata": metadata, "spec": spec, "status": { "phase": phase } });
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn active_pods_are_summed_by_class_with_their_overhead() {
        let pods = SharedPods::default();
        let requests = |milli: &str| json!({ "requests": { "cpu": milli, "memory": "1Mi" } });
        let guaranteed = json!({ "cpu": "4", "memory": "1Gi" });
        pods.set(pod("a", requests("500m"), "Running"));
        pods.set(pod("b", requests("1"), "Pending"));
        pods.set(pod("ended", requests("2"), "Succeeded"));
        pods.set(pod("invalid", requests("much"), "Pending"));
        pods.set(pod("guaranteed", json!({ "requests": guaranteed, "limits": guaranteed }), "Running"));
        pods.set(pod("best-effort", json!({}), "Running"));
        let expected = Requested {
            burstable_milli_cpu: 1520,
            guaranteed_memory: (1 << 30) + 1024,
            burstable_memory: (2 << 20) + 2048,
            is_complete: false,
        };
        assert_eq!(pods.requested(), expected);
        pods.set_sources_ready();
        assert!(pods.requested().is_complete);
    }
}
