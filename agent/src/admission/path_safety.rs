//! Names and paths of a pod that would lead outside the folders they belong in. The API server validates them too; the
//! node does not rely on that. Pure.
//!
//! Paths inside containers (`mountPath`, `workingDir`, `terminationMessagePath`) are left to the runtime.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::SeccompProfile;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeMount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::Decision;
use super::Input;
use crate::model::quote::Excerpt;
use crate::model::spec;

/// Longer names do not fit into paths.
const MAX_NAME: usize = 253;

/// Reason of events about pods that the API server would not have accepted.
pub const REASON: &str = "FailedValidation";

pub(super) fn check(input: Input<'_>) -> Decision {
    content(input.pod).map_or(Decision::Admit, |problem| Decision::reject(REASON, format!("Pod is invalid: {problem}")))
}

/// What is wrong with UID, name or namespace, all of which become folder names.
pub fn identity(meta: &ObjectMeta) -> Option<String> {
    let fields = [("uid", &meta.uid), ("name", &meta.name), ("namespace", &meta.namespace)];
    fields.into_iter().find_map(|(field, value)| {
        let value = value.as_deref().unwrap_or_default();
        not_a_name(value).map(|problem| format!("metadata.{field}: {:?} {problem}", Excerpt(value).to_string()))
    })
}

/// The first name or path in the pod's spec that would lead outside.
pub fn content(pod: &Pod) -> Option<String> {
    let pod_spec = pod.spec.as_ref()?;
    let profile = pod_spec.security_context.as_ref().and_then(|context| seccomp(context.seccomp_profile.as_ref()));
    let volumes = pod_spec.volumes.iter().flatten().find_map(volume);
    let regular = spec::init_containers(pod).iter().chain(&pod_spec.containers).find_map(container);
    let mut ephemeral = spec::ephemeral_containers(pod).iter();
    let ephemeral = ephemeral.find_map(|c| {
        name("ephemeral container", &c.name)
            .or_else(|| mounts(c.volume_mounts.as_deref()))
            .or_else(|| seccomp(c.security_context.as_ref()?.seccomp_profile.as_ref()))
    });
    profile.or(volumes).or(regular).or(ephemeral)
}

fn container(container: &Container) -> Option<String> {
    name("container", &container.name)
        .or_else(|| mounts(container.volume_mounts.as_deref()))
        .or_else(|| seccomp(container.security_context.as_ref()?.seccomp_profile.as_ref()))
}

/// `localhostProfile` is a path below the agent's `seccomp` folder, to which `workers::generate::security` appends it.
fn seccomp(profile: Option<&SeccompProfile>) -> Option<String> {
    const FIELD: &str = "seccompProfile.localhostProfile";
    let path = profile?.localhost_profile.as_deref()?;
    let absolute =
        path.starts_with('/').then(|| format!("{FIELD} {:?} must be a relative path", Excerpt(path).to_string()));
    absolute.or_else(|| inside(FIELD, Some(path)))
}

fn mounts(mounts: Option<&[VolumeMount]>) -> Option<String> {
    mounts.unwrap_or_default().iter().find_map(|mount| {
        name("volume mount", &mount.name)
            .or_else(|| inside("subPath", mount.sub_path.as_deref()))
            .or_else(|| inside("subPathExpr", mount.sub_path_expr.as_deref()))
    })
}

fn volume(volume: &Volume) -> Option<String> {
    let config_map = volume.config_map.iter().flat_map(|v| v.items.iter().flatten()).map(|item| &item.path);
    let secret = volume.secret.iter().flat_map(|v| v.items.iter().flatten()).map(|item| &item.path);
    let downward = volume.downward_api.iter().flat_map(|v| v.items.iter().flatten()).map(|item| &item.path);
    let mut paths = config_map.chain(secret).chain(downward);
    name("volume", &volume.name)
        .or_else(|| paths.find_map(|path| inside("path", Some(path))))
        .or_else(|| projected(volume))
}

fn projected(volume: &Volume) -> Option<String> {
    let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
    for source in sources {
        let config_map = source.config_map.iter().flat_map(|s| s.items.iter().flatten()).map(|item| &item.path);
        let secret = source.secret.iter().flat_map(|s| s.items.iter().flatten()).map(|item| &item.path);
        let downward = source.downward_api.iter().flat_map(|s| s.items.iter().flatten()).map(|item| &item.path);
        let token = source.service_account_token.iter().map(|token| &token.path);
        let bundle = source.cluster_trust_bundle.iter().map(|bundle| &bundle.path);
        let certificate = source.pod_certificate.iter().flat_map(|source| {
            [&source.credential_bundle_path, &source.key_path, &source.certificate_chain_path].into_iter().flatten()
        });
        let mut paths = config_map.chain(secret).chain(downward).chain(token).chain(bundle).chain(certificate);
        let problem = paths.find_map(|path| inside("path", Some(path)));
        if problem.is_some() {
            return problem;
        }
    }
    None
}

fn name(what: &str, value: &str) -> Option<String> {
    not_a_name(value).map(|problem| format!("{what} {:?} {problem}", Excerpt(value).to_string()))
}

/// One component of a path, and printable.
fn not_a_name(value: &str) -> Option<&'static str> {
    match value {
        "" => Some("is empty"),
        "." | ".." => Some("is no name"),
        _ if value.len() > MAX_NAME => Some("is too long"),
        _ if value.contains('/') => Some("holds a slash"),
        _ if value.chars().any(char::is_control) => Some("holds a control character"),
        _ => None,
    }
}

/// A path that stays below where it starts. An absolute one starts there as well. A line break is legal in it, and
/// upstream's NodeConformance suite has one.
fn inside(what: &str, value: Option<&str>) -> Option<String> {
    let value = value?;
    if value.split('/').any(|part| part == "..") {
        return Some(format!("{what} {:?} leads outside", Excerpt(value).to_string()));
    }
    value.contains('\0').then(|| format!("{what} {:?} holds a NUL", Excerpt(value).to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"spec": spec})).expect("a pod")
    }

    #[test]
    fn identities_are_single_path_components() {
        let with = |uid: &str| ObjectMeta {
            uid: Some(uid.to_owned()),
            name: Some("web".to_owned()),
            namespace: Some("default".to_owned()),
            ..ObjectMeta::default()
        };
        assert_eq!(identity(&with("0b6f2d5e-1")), None);
        for bad in ["", ".", "..", "../../etc", "a/b", "a\nb", "a\0b", &"x".repeat(300)] {
            let error = identity(&with(bad)).expect(bad);
            assert!(error.starts_with("metadata.uid: ") && !error.contains('\n') && error.len() < 300, "{error}");
        }
        assert!(identity(&ObjectMeta { name: None, ..with("u") }).is_some());
    }

    #[test]
    fn paths_that_lead_outside_are_found_wherever_they_are() {
        let container = |extra: serde_json::Value| {
            let mut container = json!({"name": "c", "image": "i"});
            container.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
            container
        };
        let mount = |field: &str, value: &str| {
            let mut mount = json!({"name": "v", "mountPath": "/m"});
            mount[field] = value.into();
            json!({"volumeMounts": [mount]})
        };
        let volume = |source: serde_json::Value| {
            let mut volume = json!({"name": "v"});
            volume.as_object_mut().expect("an object").extend(source.as_object().expect("an object").clone());
            json!({"containers": [], "volumes": [volume]})
        };
        let profile = |path: &str| json!({"seccompProfile": {"type": "Localhost", "localhostProfile": path}});
        let certificate = |field: &str| {
            let mut source = json!({"signerName": "example.com/s", "keyType": "ED25519"});
            source[field] = "../c".into();
            volume(json!({"projected": {"sources": [{"podCertificate": source}]}}))
        };
        let items = json!([{"key": "k", "path": "a/../../b"}]);
        let bad = [
            json!({"containers": [container(json!({"name": "../c"}))]}),
            json!({"containers": [], "initContainers": [container(json!({"name": "c/d"}))]}),
            json!({"containers": [], "ephemeralContainers": [container(json!({"name": ".."}))]}),
            json!({"containers": [container(mount("subPath", "a/../../b"))]}),
            json!({"containers": [container(mount("subPathExpr", "../$(X)"))]}),
            json!({"containers": [], "volumes": [{"name": "../v"}]}),
            json!({"containers": [container(json!({"securityContext": profile("../../etc/x")}))]}),
            json!({"containers": [], "initContainers": [container(json!({"securityContext": profile("/etc/x")}))]}),
            json!({"containers": [], "ephemeralContainers": [container(json!({"securityContext": profile("a/..")}))]}),
            json!({"containers": [], "securityContext": profile("..")}),
            volume(json!({"configMap": {"items": items.clone()}})),
            volume(json!({"secret": {"items": items.clone()}})),
            volume(json!({"downwardAPI": {"items": items.clone()}})),
            volume(json!({"projected": {"sources": [{"secret": {"items": items.clone()}}]}})),
            volume(json!({"projected": {"sources": [{"serviceAccountToken": {"path": "../t"}}]}})),
            json!({"containers": [container(mount("subPath", "a\0b"))]}),
            json!({"containers": [], "initContainers": [container(mount("subPath", "../a"))]}),
            json!({"containers": [], "ephemeralContainers": [container(mount("subPath", "../a"))]}),
            volume(json!({"projected": {"sources": [{"downwardAPI": {"items": items.clone()}}]}})),
            volume(
                json!({"projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"items": items.clone()}}]}}),
            ),
            volume(json!({"projected": {"sources": [{"clusterTrustBundle": {"name": "n", "path": "../b"}}]}})),
            certificate("credentialBundlePath"),
            certificate("keyPath"),
            certificate("certificateChainPath"),
        ];
        for spec in bad {
            assert!(content(&pod(spec.clone())).is_some(), "{spec}");
        }
        let good = container(mount("subPath", "a/..b/c..d"));
        let items = json!({"secretName": "s", "items": [{"key": "k", "path": "value-4\n"}]});
        let volumes = json!([{"name": "v"}, {"name": "w", "secret": items}]);
        let spec = json!({"containers": [good], "volumes": volumes, "securityContext": profile("p/x.json")});
        assert_eq!(content(&pod(spec)), None);
    }
}
