//! What a pod may ask for that this agent does not do yet. Such a pod is refused as a whole, never half run. Pure.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EphemeralContainer;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;

use super::ContainerSpec;
use crate::model::spec;

/// Fields of `pod` that would have to be ignored, each as a path in the spec; empty if the pod can be run.
pub fn unsupported(pod: &Pod) -> Vec<String> {
    let Some(pod_spec) = &pod.spec else { return vec!["spec (missing)".to_owned()] };
    let mut found = Vec::new();
    let mut note = |wanted: bool, path: &str| {
        if wanted {
            found.push(path.to_owned());
        }
    };
    note(pod_spec.image_pull_secrets.iter().flatten().next().is_some(), "spec.imagePullSecrets");
    note(pod_spec.resource_claims.iter().flatten().next().is_some(), "spec.resourceClaims");
    note(pod_spec.runtime_class_name.as_deref().is_some_and(|name| !name.is_empty()), "spec.runtimeClassName");
    note(pod_spec.host_users == Some(false), "spec.hostUsers: false");
    for volume in pod_spec.volumes.iter().flatten() {
        note(!is_supported_volume(volume), &format!("spec.volumes[{}]", volume.name));
    }
    for (list, containers) in
        [("initContainers", spec::init_containers(pod)), ("containers", spec::regular_containers(pod))]
    {
        for container in containers {
            note_container(&mut found, list, container);
        }
    }
    for container in spec::ephemeral_containers(pod) {
        note_ephemeral(&mut found, pod, container);
    }
    found
}

/// hostPath, and emptyDir on disk.
fn is_supported_volume(volume: &Volume) -> bool {
    let on_disk = |medium: Option<&str>| medium.unwrap_or_default().is_empty();
    volume.host_path.is_some() || volume.empty_dir.as_ref().is_some_and(|source| on_disk(source.medium.as_deref()))
}

fn note_ephemeral(found: &mut Vec<String>, pod: &Pod, container: &EphemeralContainer) {
    if let Some(view) = ContainerSpec::named(pod, &container.name) {
        note_container(found, "ephemeralContainers", &view.container);
    }
}

fn note_container(found: &mut Vec<String>, list: &str, container: &Container) {
    let mut note = |wanted: bool, field: &str| {
        if wanted {
            found.push(format!("spec.{list}[{}].{field}", container.name));
        }
    };
    note(container.liveness_probe.is_some(), "livenessProbe");
    note(container.readiness_probe.is_some(), "readinessProbe");
    note(container.startup_probe.is_some(), "startupProbe");
    let lifecycle = container.lifecycle.as_ref();
    note(lifecycle.is_some_and(|lifecycle| lifecycle.post_start.is_some()), "lifecycle.postStart");
    note(lifecycle.is_some_and(|lifecycle| lifecycle.pre_stop.is_some()), "lifecycle.preStop");
    note(container.volume_devices.iter().flatten().next().is_some(), "volumeDevices");
    note(container.env_from.iter().flatten().next().is_some(), "envFrom");
    let claims = container.resources.as_ref().and_then(|resources| resources.claims.as_ref());
    note(claims.into_iter().flatten().next().is_some(), "resources.claims");
    for variable in container.env.iter().flatten() {
        let source = variable.value_from.as_ref();
        let kept_elsewhere =
            source.is_some_and(|source| source.field_ref.is_none() && source.resource_field_ref.is_none());
        note(
            kept_elsewhere && variable.value.as_deref().unwrap_or_default().is_empty(),
            &format!("env[{}]", variable.name),
        );
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod")
    }

    #[test]
    fn what_can_be_run_is_not_refused() {
        let spec = json!({
            "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/b", "type": "Directory"}}],
            "initContainers": [{"name": "side", "image": "i", "restartPolicy": "Always"}],
            "containers": [{"name": "c", "image": "i", "env": [{"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}],
            "ephemeralContainers": [{"name": "e", "image": "i", "targetContainerName": "c"}],
        });
        assert_eq!(unsupported(&pod(spec)), Vec::<String>::new());
    }

    #[test]
    fn every_unsupported_field_is_named() {
        let spec = json!({
            "imagePullSecrets": [{"name": "s"}], "hostUsers": false, "runtimeClassName": "kata",
            "volumes": [{"name": "m", "emptyDir": {"medium": "Memory"}}, {"name": "t", "secret": {"secretName": "x"}}],
            "containers": [{"name": "c", "image": "i", "livenessProbe": {"tcpSocket": {"port": 1}},
                "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}, "envFrom": [{"configMapRef": {"name": "m"}}],
                "env": [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}],
            "ephemeralContainers": [{"name": "e", "image": "i", "volumeDevices": [{"name": "d", "devicePath": "/d"}]}],
        });
        let expected = [
            "spec.imagePullSecrets",
            "spec.runtimeClassName",
            "spec.hostUsers: false",
            "spec.volumes[m]",
            "spec.volumes[t]",
            "spec.containers[c].livenessProbe",
            "spec.containers[c].lifecycle.preStop",
            "spec.containers[c].envFrom",
            "spec.containers[c].env[K]",
            "spec.ephemeralContainers[e].volumeDevices",
        ];
        assert_eq!(unsupported(&pod(spec)), expected);
    }
}
