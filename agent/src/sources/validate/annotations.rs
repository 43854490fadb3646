//! Annotations with a security profile: AppArmor's, which still name the profile of a container, and seccomp's, which no
//! longer do. They must be well formed and agree with the fields. And the cost of deleting the pod, which is a number.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::AppArmorProfile;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::core::v1::SeccompProfile;

use super::super::field::Findings;
use super::super::field::Path;
use crate::model::spec::APP_ARMOR_ANNOTATION;

const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
const LOCALHOST: &str = "localhost/";
const UNCONFINED: &str = "unconfined";
const RUNTIME_DEFAULT: &str = "runtime/default";
/// What `runtime/default` was called before Kubernetes 1.11.
const DOCKER_DEFAULT: &str = "docker/default";

type Annotations = BTreeMap<String, String>;

pub(super) fn check(pod: &Pod, findings: &mut Findings) {
    let (Some(annotations), Some(spec)) = (&pod.metadata.annotations, &pod.spec) else { return };
    let path = Path::root("metadata").child("annotations");
    for (key, value) in annotations {
        if let Some(container) = key.strip_prefix(APP_ARMOR_ANNOTATION) {
            app_armor(container, value, spec, &path.key(key), findings);
        } else if key == SECCOMP_POD || key.starts_with(SECCOMP_CONTAINER) {
            seccomp(value, &path.key(key), findings);
        } else if key == DELETION_COST && !is_cost(value) {
            findings.invalid(&path.key(key), value, "must be a 32bit integer");
        }
    }
    fields_agree(annotations, spec, findings);
}

/// Without a plus sign or leading zeros.
fn is_cost(value: &str) -> bool {
    value.parse::<i32>().is_ok() && !value.starts_with('+') && (value == "0" || !value.starts_with('0'))
}

fn app_armor(container: &str, value: &str, spec: &PodSpec, path: &Path, findings: &mut Findings) {
    if !containers(spec).any(|(_, found)| found.name == container) {
        findings.invalid(path, container, "container not found");
    }
    if !matches!(value, "" | RUNTIME_DEFAULT | UNCONFINED) && !value.starts_with(LOCALHOST) {
        findings.invalid(path, value, "invalid AppArmor profile name");
    }
}

fn seccomp(value: &str, path: &Path, findings: &mut Findings) {
    match value.strip_prefix(LOCALHOST) {
        Some(file) => super::local_path(file, path, findings),
        None if matches!(value, RUNTIME_DEFAULT | DOCKER_DEFAULT | UNCONFINED) => {}
        None => findings.invalid(path, value, "must be a valid seccomp profile"),
    }
}

fn fields_agree(annotations: &Annotations, spec: &PodSpec, findings: &mut Findings) {
    let of_pod = spec.security_context.as_ref();
    let pod_seccomp = of_pod.and_then(|context| context.seccomp_profile.as_ref());
    let context_path = Path::root("spec").child("securityContext");
    agrees(annotations.get(SECCOMP_POD), pod_seccomp.map(Into::into), &context_path.child("seccompProfile"), findings);
    let pod_app_armor = of_pod.and_then(|context| context.app_armor_profile.as_ref());
    for (path, container) in containers(spec) {
        let own = container.security_context.as_ref();
        let path = path.child("securityContext");
        let profile = own.and_then(|context| context.seccomp_profile.as_ref());
        let annotation = annotations.get(&format!("{SECCOMP_CONTAINER}{}", container.name));
        agrees(annotation, profile.map(Into::into), &path.child("seccompProfile"), findings);
        let profile = own.and_then(|context| context.app_armor_profile.as_ref()).or(pod_app_armor);
        let annotation = annotations.get(&format!("{APP_ARMOR_ANNOTATION}{}", container.name));
        agrees(annotation, profile.map(Into::into), &path.child("appArmorProfile"), findings);
    }
}

/// A profile as a field states it.
struct Profile<'a> {
    mechanism: &'static str,
    kind: &'a str,
    local: Option<&'a str>,
}

impl<'a> From<&'a SeccompProfile> for Profile<'a> {
    fn from(profile: &'a SeccompProfile) -> Self {
        Self { mechanism: "seccomp", kind: &profile.type_, local: profile.localhost_profile.as_deref() }
    }
}

impl<'a> From<&'a AppArmorProfile> for Profile<'a> {
    fn from(profile: &'a AppArmorProfile) -> Self {
        Self { mechanism: "apparmor", kind: &profile.type_, local: profile.localhost_profile.as_deref() }
    }
}

/// If there are both, the annotation states the same as the field.
fn agrees(annotation: Option<&String>, field: Option<Profile<'_>>, path: &Path, findings: &mut Findings) {
    let (Some(annotation), Some(field)) = (annotation, field) else { return };
    let annotated = annotation.strip_prefix(LOCALHOST);
    let same_type = match field.kind {
        "Unconfined" => annotation == UNCONFINED,
        "RuntimeDefault" => {
            annotation == RUNTIME_DEFAULT || (field.mechanism == "seccomp" && annotation == DOCKER_DEFAULT)
        }
        "Localhost" => annotated.is_some(),
        // Reported by the rules of the field.
        _ => true,
    };
    if !same_type {
        let detail = format!("{} type in annotation and field must match", field.mechanism);
        findings.forbidden(&path.child("type"), &detail);
    } else if field.kind == "Localhost" && annotated != field.local {
        let detail = format!("{} profile in annotation and field must match", field.mechanism);
        findings.forbidden(&path.child("localhostProfile"), &detail);
    }
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = (Path, &Container)> {
    let lists =
        [("initContainers", spec.init_containers.as_deref().unwrap_or_default()), ("containers", &spec.containers)];
    lists.into_iter().flat_map(|(field, list)| {
        let path = Path::root("spec").child(field);
        list.iter().enumerate().map(move |(i, container)| (path.index(i), container))
    })
}
