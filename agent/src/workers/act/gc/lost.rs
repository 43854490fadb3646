//! A container in unknown state that garbage collection stops: its pod may be gone, so that grace period and preStop hook
//! come from its own annotations. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Lifecycle;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSpec;
use keblet_proto::cri::v1 as cri;

use crate::model::runtime_keys;

/// The pod of a container, as far as its labels and annotations describe it. What cannot be read is left out.
pub(super) fn pod_of(name: &str, status: &cri::ContainerStatus) -> Pod {
    let label = |key: &str| status.labels.get(key).cloned();
    let mut pod = Pod::default();
    pod.metadata.name = label(runtime_keys::POD_NAME);
    pod.metadata.namespace = label(runtime_keys::POD_NAMESPACE);
    pod.metadata.uid = label(runtime_keys::POD_UID);
    pod.metadata.deletion_grace_period_seconds = parsed(&status.annotations, runtime_keys::DELETION_GRACE);
    let pre_stop = parsed(&status.annotations, runtime_keys::PRE_STOP);
    let ports = parsed(&status.annotations, runtime_keys::PORTS);
    let lifecycle = pre_stop.map(|pre_stop| Lifecycle { pre_stop: Some(pre_stop), ..Lifecycle::default() });
    let container = Container { name: name.to_owned(), lifecycle, ports, ..Container::default() };
    pod.spec = Some(PodSpec {
        containers: vec![container],
        termination_grace_period_seconds: parsed(&status.annotations, runtime_keys::TERMINATION_GRACE),
        ..PodSpec::default()
    });
    pod
}

fn parsed<T: serde::de::DeserializeOwned>(annotations: &BTreeMap<String, String>, key: &str) -> Option<T> {
    serde_json::from_str(annotations.get(key)?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::workers::generate::names;

    #[test]
    fn annotations_are_read_back() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "deletionGracePeriodSeconds": 3},
            "spec": {"terminationGracePeriodSeconds": 7, "containers": [{"name": "c", "image": "i",
                "ports": [{"containerPort": 80, "name": "http"}],
                "lifecycle": {"preStop": {"httpGet": {"port": "http", "path": "/stop"}}}}]},
        }))
        .expect("a pod");
        let container = &pod.spec.as_ref().expect("a spec").containers[0];
        let status = cri::ContainerStatus {
            labels: names::container_labels(&pod, "c"),
            annotations: names::container_annotations(&pod, container, 1, 0),
            ..Default::default()
        };
        let mut expected = pod.clone();
        expected.spec.as_mut().expect("a spec").containers[0].image = None;
        assert_eq!(pod_of("c", &status), expected);
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let annotations = [
            (runtime_keys::PRE_STOP, "{"),
            (runtime_keys::TERMINATION_GRACE, "soon"),
            (runtime_keys::DELETION_GRACE, ""),
        ];
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let pod = pod_of("c", &cri::ContainerStatus { annotations, ..Default::default() });
        let spec = pod.spec.expect("a spec");
        assert_eq!((pod.metadata.deletion_grace_period_seconds, spec.termination_grace_period_seconds), (None, None));
        assert_eq!(spec.containers[0].lifecycle, None);
    }
}
