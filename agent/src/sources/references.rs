//! Static pods must not depend on API objects: which references a pod makes, and which are refused.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EnvFromSource;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeProjection;

/// Refuses a pod that references API objects. With `prevent` off (gate PreventStaticPodAPIReferences) only resource
/// claims and trust bundles are refused.
///
/// # Errors
/// The first reference that is not allowed.
pub(super) fn check(pod: &Pod, prevent: bool) -> Result<(), String> {
    let Some(spec) = &pod.spec else { return Ok(()) };
    let reference = if prevent { first_reference(spec) } else { never_allowed(spec) };
    match reference {
        Some(what) => Err(format!("Forbidden: static pods may not reference {what}")),
        None => Ok(()),
    }
}

fn never_allowed(spec: &PodSpec) -> Option<&'static str> {
    if has(&spec.resource_claims) {
        return Some("resourceclaims");
    }
    let mut projections = spec.volumes.iter().flatten().flat_map(projections);
    projections.any(|p| p.cluster_trust_bundle.is_some()).then_some("clustertrustbundles")
}

fn first_reference(spec: &PodSpec) -> Option<&'static str> {
    let set = |text: &Option<String>| text.as_deref().is_some_and(|t| !t.is_empty());
    let volumes = || spec.volumes.iter().flatten();
    if set(&spec.service_account_name) || set(&spec.service_account) {
        return Some("serviceaccounts");
    }
    let env_secret = |env: &EnvVar| env.value_from.as_ref().is_some_and(|from| from.secret_key_ref.is_some());
    let from_secret = |from: &EnvFromSource| from.secret_ref.is_some();
    // An entry without a name names no secret; templates leave such ones.
    let pulls_with_secret = spec.image_pull_secrets.iter().flatten().any(|secret| !secret.name.is_empty());
    if pulls_with_secret || any_env(spec, env_secret, from_secret) || volumes().any(needs_secret) {
        return Some("secrets");
    }
    let env_map = |env: &EnvVar| env.value_from.as_ref().is_some_and(|from| from.config_map_key_ref.is_some());
    let from_map = |from: &EnvFromSource| from.config_map_ref.is_some();
    let volume_map = |v: &Volume| v.config_map.is_some() || projections(v).any(|p| p.config_map.is_some());
    if any_env(spec, env_map, from_map) || volumes().any(volume_map) {
        return Some("configmaps");
    }
    if has(&spec.resource_claims) {
        return Some("resourceclaims");
    }
    volumes().find_map(volume_reference)
}

fn has<T>(list: &Option<Vec<T>>) -> bool {
    list.as_ref().is_some_and(|l| !l.is_empty())
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

fn any_env(spec: &PodSpec, env: impl Fn(&EnvVar) -> bool, from: impl Fn(&EnvFromSource) -> bool) -> bool {
    containers(spec).any(|c| c.env.iter().flatten().any(&env) || c.env_from.iter().flatten().any(&from))
}

fn projections(volume: &Volume) -> impl Iterator<Item = &VolumeProjection> {
    volume.projected.iter().flat_map(|p| p.sources.iter().flatten())
}

fn needs_secret(volume: &Volume) -> bool {
    volume.secret.is_some()
        || volume.azure_file.is_some()
        || projections(volume).any(|p| p.secret.is_some())
        || volume.cephfs.as_ref().is_some_and(|v| v.secret_ref.is_some())
        || volume.cinder.as_ref().is_some_and(|v| v.secret_ref.is_some())
        || volume.flex_volume.as_ref().is_some_and(|v| v.secret_ref.is_some())
        || volume.rbd.as_ref().is_some_and(|v| v.secret_ref.is_some())
        || volume.scale_io.is_some()
        || volume.iscsi.as_ref().is_some_and(|v| v.secret_ref.is_some())
        || volume.storageos.as_ref().is_some_and(|v| v.secret_ref.is_some())
        || volume.csi.as_ref().is_some_and(|v| v.node_publish_secret_ref.is_some())
}

fn volume_reference(volume: &Volume) -> Option<&'static str> {
    if volume.csi.is_some() {
        return Some("csidrivers (via CSI volumes)");
    }
    if volume.glusterfs.is_some() {
        return Some("endpoints (via glusterFS volumes)");
    }
    if volume.persistent_volume_claim.is_some() {
        return Some("persistentvolumeclaims");
    }
    if volume.ephemeral.is_some() {
        return Some("persistentvolumeclaims (via ephemeral volumes)");
    }
    projections(volume).find_map(|p| {
        if p.service_account_token.is_some() {
            Some("serviceaccounts (via projected volumes)")
        } else if p.cluster_trust_bundle.is_some() {
            Some("clustertrustbundles")
        } else if p.pod_certificate.is_some() {
            Some("podcertificates")
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"apiVersion": "v1", "kind": "Pod", "spec": spec})).expect("a pod")
    }

    fn env(source: Value) -> Value {
        json!({"containers": [{"name": "c", "env": [{"name": "E", "valueFrom": source}]}]})
    }

    fn volume(volume: Value) -> Value {
        json!({"containers": [], "volumes": [volume]})
    }

    fn projected(source: Value) -> Value {
        volume(json!({"name": "v", "projected": {"sources": [source]}}))
    }

    #[test]
    fn every_reference_is_named() {
        for (spec, what) in [
            (json!({"containers": [], "serviceAccountName": "x"}), "serviceaccounts"),
            (json!({"containers": [], "serviceAccount": "x"}), "serviceaccounts"),
            (json!({"containers": [], "imagePullSecrets": [{"name": "x"}]}), "secrets"),
            (env(json!({"secretKeyRef": {"name": "x", "key": "k"}})), "secrets"),
            (json!({"containers": [{"name": "c", "envFrom": [{"secretRef": {"name": "x"}}]}]}), "secrets"),
            (volume(json!({"name": "v", "secret": {"secretName": "x"}})), "secrets"),
            (volume(json!({"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "x"}}})), "secrets"),
            (env(json!({"configMapKeyRef": {"name": "x", "key": "k"}})), "configmaps"),
            (projected(json!({"configMap": {"name": "x"}})), "configmaps"),
            (json!({"containers": [], "resourceClaims": [{"name": "x"}]}), "resourceclaims"),
            (volume(json!({"name": "v", "csi": {"driver": "d"}})), "csidrivers (via CSI volumes)"),
            (
                volume(json!({"name": "v", "glusterfs": {"endpoints": "e", "path": "p"}})),
                "endpoints (via glusterFS volumes)",
            ),
            (volume(json!({"name": "v", "persistentVolumeClaim": {"claimName": "x"}})), "persistentvolumeclaims"),
            (volume(json!({"name": "v", "ephemeral": {}})), "persistentvolumeclaims (via ephemeral volumes)"),
            (projected(json!({"serviceAccountToken": {"path": "t"}})), "serviceaccounts (via projected volumes)"),
            (projected(json!({"clusterTrustBundle": {"path": "t"}})), "clustertrustbundles"),
            (projected(json!({"podCertificate": {"signerName": "a/b", "keyType": "ED25519"}})), "podcertificates"),
        ] {
            let expected = Err(format!("Forbidden: static pods may not reference {what}"));
            assert_eq!(check(&pod(spec), true), expected);
        }
    }

    #[test]
    fn plain_pods_pass() {
        for spec in [
            volume(json!({"name": "v", "hostPath": {"path": "/x"}})),
            projected(json!({"downwardAPI": {"items": []}})),
            env(json!({"fieldRef": {"fieldPath": "metadata.name"}})),
            json!({"containers": [], "imagePullSecrets": [{"name": ""}, {}]}),
        ] {
            assert_eq!(check(&pod(spec), true), Ok(()));
        }
    }

    #[test]
    fn without_the_gate_only_claims_and_bundles_are_refused() {
        assert_eq!(check(&pod(volume(json!({"name": "v", "secret": {"secretName": "x"}}))), false), Ok(()));
        assert!(check(&pod(json!({"containers": [], "resourceClaims": [{"name": "x"}]})), false).is_err());
        assert!(check(&pod(projected(json!({"clusterTrustBundle": {"path": "t"}}))), false).is_err());
    }
}
