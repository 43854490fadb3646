//! Environment variables and where their values come from.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EnvFromSource;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::EnvVarSource;
use k8s_openapi::api::core::v1::ObjectFieldSelector;
use k8s_openapi::api::core::v1::ResourceFieldSelector;

use super::super::field::Findings;
use super::super::field::Path;
use super::container::Volumes;
use super::formats;
use super::text;
use super::volume::VolumeKind;
use crate::model::Amount;

const ENV_FIELDS: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
const RESOURCES: [&str; 6] = [
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];
const CPU_DIVISORS: [&str; 3] = ["0", "1", "1m"];
const BYTE_DIVISORS: [&str; 14] =
    ["0", "1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];
const ONE_AT_A_TIME: &str = "may not have more than one field specified at a time";

pub(super) fn check_all(container: &Container, volumes: &Volumes<'_>, path: &Path, findings: &mut Findings) {
    for (i, env) in container.env.iter().flatten().enumerate() {
        let path = path.child("env").index(i);
        if env.name.is_empty() {
            findings.required(&path.child("name"), "");
        } else {
            findings.invalid_each(&path.child("name"), &env.name, formats::env_name(&env.name));
        }
        value(env, volumes, &path, findings);
    }
    for (i, from) in container.env_from.iter().flatten().enumerate() {
        env_from(from, &path.child("envFrom").index(i), findings);
    }
}

fn value(env: &EnvVar, volumes: &Volumes<'_>, path: &Path, findings: &mut Findings) {
    let value = text(&env.value);
    // The kernel ends a variable at the first NUL: the process would see another value.
    if value.contains('\0') {
        findings.invalid(&path.child("value"), value, "must not contain NUL characters");
    }
    let Some(from) = &env.value_from else { return };
    let path = path.child("valueFrom");
    let count = usize::from(from.field_ref.is_some())
        + usize::from(from.resource_field_ref.is_some())
        + usize::from(from.config_map_key_ref.is_some())
        + usize::from(from.secret_key_ref.is_some())
        + usize::from(from.file_key_ref.is_some());
    match count {
        0 => findings.invalid(
            &path,
            "",
            "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`",
        ),
        1 if !value.is_empty() => findings.invalid(&path, "", "may not be specified when `value` is not empty"),
        1 => source(from, volumes, &path, findings),
        _ => findings.invalid(&path, "", ONE_AT_A_TIME),
    }
}

fn source(from: &EnvVarSource, volumes: &Volumes<'_>, path: &Path, findings: &mut Findings) {
    if let Some(field) = &from.field_ref {
        field_ref(field, &ENV_FIELDS, &path.child("fieldRef"), findings);
    }
    if let Some(resource) = &from.resource_field_ref {
        resource_ref(resource, &path.child("resourceFieldRef"), findings);
    }
    let keys = [
        ("configMapKeyRef", from.config_map_key_ref.as_ref().map(|r| (&r.name, &r.key))),
        ("secretKeyRef", from.secret_key_ref.as_ref().map(|r| (&r.name, &r.key))),
    ];
    for (field, reference) in keys {
        let Some((name, key)) = reference else { continue };
        let path = path.child(field);
        if name.is_empty() {
            findings.required(&path.child("name"), "");
        }
        if key.is_empty() {
            findings.required(&path.child("key"), "");
        } else {
            findings.invalid_each(&path.child("key"), key, formats::config_key(key));
        }
    }
    if let Some(file) = &from.file_key_ref {
        let path = path.child("fileKeyRef");
        for (field, value) in [("key", &file.key), ("volumeName", &file.volume_name), ("path", &file.path)] {
            if value.is_empty() {
                findings.required(&path.child(field), "");
            }
        }
        if !file.key.is_empty() {
            findings.invalid_each(&path.child("key"), &file.key, formats::env_name(&file.key));
        }
        // As upstream also with a leading slash: the volume is the root.
        super::no_backsteps(&file.path, &path.child("path"), findings);
        let (path, name) = (path.child("volumeName"), &file.volume_name);
        match volumes.get(name.as_str()) {
            None if !name.is_empty() => findings.not_found(&path, name),
            Some(kind) if *kind != VolumeKind::EmptyDir => {
                findings.invalid(&path, name, "referenced volume must be of type emptyDir");
            }
            _ => {}
        }
    }
}

/// A field of the pod, one of `fields`, or one label or annotation.
pub(super) fn field_ref(field: &ObjectFieldSelector, fields: &[&str], path: &Path, findings: &mut Findings) {
    if text(&field.api_version) != "v1" {
        findings.unsupported(&path.child("apiVersion"), text(&field.api_version), &["v1"]);
    }
    let path = path.child("fieldPath");
    let subscript = |prefix: &str| {
        field.field_path.strip_prefix(prefix).and_then(|r| r.strip_prefix("['")).and_then(|r| r.strip_suffix("']"))
    };
    if field.field_path.is_empty() {
        findings.required(&path, "");
    } else if let Some(key) = subscript("metadata.labels") {
        findings.invalid_each(&path, key, formats::qualified_name(key));
    } else if let Some(key) = subscript("metadata.annotations") {
        findings.invalid_each(&path, key, formats::qualified_name(&key.to_lowercase()));
    } else {
        // `spec.host` is the name from before v1; the API still accepts it where `spec.nodeName` is allowed.
        let name = if field.field_path == "spec.host" { "spec.nodeName" } else { field.field_path.as_str() };
        findings.one_of(&path, name, fields);
    }
}

/// A request or limit of a container.
pub(super) fn resource_ref(reference: &ResourceFieldSelector, path: &Path, findings: &mut Findings) {
    let resource = reference.resource.as_str();
    let huge_pages = resource.starts_with("limits.hugepages-") || resource.starts_with("requests.hugepages-");
    if resource.is_empty() {
        findings.required(&path.child("resource"), "");
    } else if !huge_pages {
        findings.one_of(&path.child("resource"), resource, &RESOURCES);
    }
    let Some(divisor) = &reference.divisor else { return };
    let (allowed, message): (&[&str], _) = if resource.ends_with(".cpu") {
        (&CPU_DIVISORS, "only divisor's values 1m and 1 are supported with the cpu resource")
    } else {
        (
            &BYTE_DIVISORS,
            "only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with the \
             resource",
        )
    };
    // In canonical form: 1000m is 1.
    let canonical = divisor.0.parse::<Amount>().map(|divisor| divisor.to_string());
    if !canonical.is_ok_and(|text| allowed.contains(&text.as_str())) {
        findings.invalid(&path.child("divisor"), &divisor.0, message);
    }
}

fn env_from(from: &EnvFromSource, path: &Path, findings: &mut Findings) {
    let prefix = text(&from.prefix);
    if !prefix.is_empty() {
        findings.invalid_each(&path.child("prefix"), prefix, formats::env_name(prefix));
    }
    match (&from.config_map_ref, &from.secret_ref) {
        (None, None) => findings.invalid(path, "", "must specify one of: `configMapRef` or `secretRef`"),
        (Some(_), Some(_)) => findings.invalid(path, "", ONE_AT_A_TIME),
        (Some(map), None) if map.name.is_empty() => findings.required(&path.child("configMapRef").child("name"), ""),
        (None, Some(secret)) if secret.name.is_empty() => findings.required(&path.child("secretRef").child("name"), ""),
        _ => {}
    }
}
