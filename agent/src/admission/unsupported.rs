//! Fields, and resources of device plugins, that this agent does not support yet. A pod that needs one is rejected with
//! every such field named, instead of being run without it. Pure.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::api::core::v1::Volume;

use super::Decision;
use super::Input;
use crate::model::spec;

/// Upstream rejects pods that need node features it does not declare (KEP-5328) with this reason.
const REASON: &str = "PodFeatureUnsupported";

pub(super) fn check(input: Input<'_>) -> Decision {
    let mut fields = unsupported(input.pod);
    fields.extend(devices(input));
    if fields.is_empty() {
        return Decision::Admit;
    }
    Decision::reject(REASON, format!("Pod needs what this node does not support yet: {}", fields.join(", ")))
}

/// The pod's resources of device plugins. A new pod lacks them anyway: the node has none. One that runs got its devices from
/// the kubelet that started it; a container of it that starts again would be without them.
fn devices(input: Input<'_>) -> impl Iterator<Item = String> {
    let wanted = input.needs.request.scalar.keys();
    wanted.filter(move |name| input.node.device_resources.contains(*name)).map(|name| format!("devices of {name}"))
}

/// Paths of all unsupported fields that the pod sets.
fn unsupported(pod: &Pod) -> Vec<String> {
    let Some(spec) = pod.spec.as_ref() else { return Vec::new() };
    let mut fields = Fields::default();
    fields.pod(spec);
    // The scheduler allocated devices for an extended resource through DRA. The Node may not have this resource.
    let claim = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    fields.note(claim.is_some(), "status.extendedResourceClaimStatus");
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        fields.volume(&format!("spec.volumes[{index}]"), volume);
    }
    for (list, containers) in [("initContainers", spec::init_containers(pod)), ("containers", &spec.containers)] {
        for (index, container) in containers.iter().enumerate() {
            fields.container(&format!("spec.{list}[{index}]"), container.resources.as_ref());
        }
    }
    for (index, container) in spec::ephemeral_containers(pod).iter().enumerate() {
        fields.container(&format!("spec.ephemeralContainers[{index}]"), container.resources.as_ref());
    }
    fields.0
}

/// Paths of the unsupported fields found so far.
#[derive(Default)]
struct Fields(Vec<String>);

impl Fields {
    fn note(&mut self, found: bool, path: impl Into<String>) {
        if found {
            self.0.push(path.into());
        }
    }

    fn pod(&mut self, spec: &PodSpec) {
        self.note(spec.resource_claims.as_ref().is_some_and(|l| !l.is_empty()), "spec.resourceClaims");
    }

    fn volume(&mut self, path: &str, volume: &Volume) {
        let known = volume.empty_dir.is_some()
            || volume.host_path.is_some()
            || volume.persistent_volume_claim.is_some()
            || volume.ephemeral.is_some()
            || volume.nfs.is_some()
            || volume.iscsi.is_some()
            || volume.fc.is_some()
            || volume.flex_volume.is_some()
            || volume.config_map.is_some()
            || volume.secret.is_some()
            || volume.downward_api.is_some()
            || volume.projected.is_some()
            || volume.image.is_some();
        if !known {
            self.note(true, format!("{path}.{}", volume_type(volume)));
        }
    }

    fn container(&mut self, path: &str, resources: Option<&ResourceRequirements>) {
        let claims = resources.and_then(|resources| resources.claims.as_ref());
        self.note(claims.is_some_and(|claims| !claims.is_empty()), format!("{path}.resources.claims"));
    }
}

/// The API's field name of a volume's source: whatever is set beside its name.
fn volume_type(volume: &Volume) -> String {
    let fields = serde_json::to_value(volume).ok();
    let set = fields.as_ref().and_then(|value| value.as_object());
    let source = set.and_then(|fields| fields.keys().find(|field| *field != "name"));
    source.map_or_else(|| "(no source)".to_owned(), Clone::clone)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({ "metadata": { "name": "p" }, "spec": spec })).expect("a pod")
    }

    fn container(extra: serde_json::Value) -> serde_json::Value {
        let mut container = json!({ "name": "c", "image": "i" });
        let fields = container.as_object_mut().expect("an object");
        fields.extend(extra.as_object().expect("an object").clone());
        container
    }

    #[test]
    fn unsupported_container_fields_are_named() {
        for (extra, path) in [(json!({ "resources": { "claims": [{ "name": "n" }] } }), "resources.claims")] {
            for list in ["initContainers", "containers", "ephemeralContainers"] {
                let mut spec = json!({ "containers": [container(json!({}))] });
                let plain = container(json!({}));
                spec[list] = json!([plain, container(extra.clone())]);
                assert_eq!(unsupported(&pod(spec)), [format!("spec.{list}[1].{path}")]);
            }
        }
    }

    /// The requests alone do not show it: an extended resource that the Node does not have is one of the cluster.
    #[test]
    fn a_claim_of_the_scheduler_for_an_extended_resource_is_named() {
        let gpu = container(json!({ "resources": { "requests": { "example.com/gpu": "1" } } }));
        let mut pod = pod(json!({ "containers": [gpu] }));
        assert_eq!(unsupported(&pod), Vec::<String>::new());
        let request = json!({ "containerName": "c", "resourceName": "example.com/gpu", "requestName": "r" });
        let claim = json!({ "resourceClaimName": "p-extended-resources-abcde", "requestMappings": [request] });
        pod.status = serde_json::from_value(json!({ "extendedResourceClaimStatus": claim })).expect("a status");
        assert_eq!(unsupported(&pod), ["status.extendedResourceClaimStatus"]);
    }

    #[test]
    fn unsupported_volumes_are_named() {
        for (volume, path) in
            [(json!({ "name": "v", "csi": { "driver": "d" } }), "csi"), (json!({ "name": "v" }), "(no source)")]
        {
            let spec =
                json!({ "containers": [container(json!({}))], "volumes": [{ "name": "e", "emptyDir": {} }, volume] });
            assert_eq!(unsupported(&pod(spec)), [format!("spec.volumes[1].{path}")]);
        }
    }

    #[test]
    fn all_unsupported_fields_are_in_one_message() {
        let pod = pod(json!({
            "resourceClaims": [{ "name": "n", "resourceClaimName": "m" }],
            "containers": [
                container(json!({ "resources": { "claims": [{ "name": "n" }] } })),
            ],
        }));
        let message = "Pod needs what this node does not support yet: spec.resourceClaims, \
             spec.containers[0].resources.claims";
        let decision = check(super::super::testing::input(&pod, &super::super::NodeOffer::default()));
        assert_eq!(decision, Decision::reject("PodFeatureUnsupported", message));
    }

    #[test]
    fn supported_fields_are_admitted() {
        let env = json!([
            { "name": "A", "value": "1" },
            { "name": "B", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } },
            { "name": "C", "valueFrom": { "resourceFieldRef": { "resource": "limits.cpu" } } },
            { "name": "D", "valueFrom": { "configMapKeyRef": { "name": "n", "key": "k" } } },
            { "name": "E", "valueFrom": { "secretKeyRef": { "name": "n", "key": "k" } } },
            { "name": "F", "valueFrom": { "fileKeyRef": { "volumeName": "e", "path": "p", "key": "k" } } },
        ]);
        let env_from = json!([{ "configMapRef": { "name": "n" } }, { "secretRef": { "name": "n" } }]);
        let mounts = json!([{ "name": "e", "mountPath": "/e", "subPathExpr": "$(A)" }]);
        let hook = json!({ "exec": { "command": ["true"] } });
        let hooks = json!({ "postStart": hook, "preStop": hook, "stopSignal": "SIGUSR1" });
        let full = container(
            json!({ "env": env, "envFrom": env_from, "volumeMounts": mounts, "lifecycle": hooks, "resources": { "claims": [] },
                "volumeDevices": [{ "name": "k", "devicePath": "/dev/x" }] }),
        );
        let pod = pod(json!({
            "hostNetwork": true,
            "hostUsers": false,
            "containers": [full],
            "initContainers": [full],
            "ephemeralContainers": [full],
            "volumes": [
                { "name": "e", "emptyDir": { "sizeLimit": "1Gi" } },
                { "name": "m", "emptyDir": { "medium": "Memory" } },
                { "name": "h", "hostPath": { "path": "/" } },
                { "name": "k", "persistentVolumeClaim": { "claimName": "n" } },
                { "name": "g", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } },
                { "name": "n", "nfs": { "server": "s", "path": "/" } },
                { "name": "t", "iscsi": { "targetPortal": "192.0.2.1", "iqn": "iqn.2001-04.com.example:a", "lun": 0 } },
                { "name": "f", "flexVolume": { "driver": "example.com/d" } },
                { "name": "f", "fc": { "targetWWNs": ["50060e801049cfd1"], "lun": 0 } },
                { "name": "c", "configMap": { "name": "n" } },
                { "name": "s", "secret": { "secretName": "n" } },
                { "name": "d", "downwardAPI": { "items": [] } },
                { "name": "i", "image": { "reference": "r" } },
                { "name": "p", "projected": { "sources": [
                    { "serviceAccountToken": { "path": "t" } },
                    { "clusterTrustBundle": { "path": "b", "name": "n" } },
                    { "podCertificate": { "signerName": "s", "keyType": "ED25519", "credentialBundlePath": "c" } },
                ] } },
            ],
        }));
        assert_eq!(unsupported(&pod), Vec::<String>::new());
        assert_eq!(unsupported(&Pod::default()), Vec::<String>::new());
    }
}
