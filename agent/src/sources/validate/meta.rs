//! Object metadata.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::super::field::Findings;
use super::super::field::Path;
use super::formats;
use super::text;

/// All annotations of an object together, keys and values.
const MAX_ANNOTATION_BYTES: usize = 256 << 10;

pub(super) fn check(meta: &ObjectMeta, path: &Path, findings: &mut Findings) {
    let name = text(&meta.name);
    if name.is_empty() {
        findings.required(&path.child("name"), "name or generateName is required");
    } else {
        findings.invalid_each(&path.child("name"), name, formats::dns_subdomain(name));
    }
    let namespace = text(&meta.namespace);
    if namespace.is_empty() {
        findings.required(&path.child("namespace"), "");
    } else {
        findings.invalid_each(&path.child("namespace"), namespace, formats::dns_label(namespace));
    }
    // The UID names directories and cgroups on this node.
    let uid = text(&meta.uid);
    findings.invalid_each(&path.child("uid"), uid, formats::path_component(uid));

    for (key, value) in meta.labels.iter().flatten() {
        findings.invalid_each(&path.child("labels"), key, formats::qualified_name(key));
        findings.invalid_each(&path.child("labels"), value, formats::label_value(value));
    }
    let annotations = path.child("annotations");
    let mut bytes = 0;
    for (key, value) in meta.annotations.iter().flatten() {
        findings.invalid_each(&annotations, key, formats::qualified_name(&key.to_lowercase()));
        bytes += key.len() + value.len();
    }
    if bytes > MAX_ANNOTATION_BYTES {
        findings.too_long(&annotations, MAX_ANNOTATION_BYTES);
    }
    for (i, finalizer) in meta.finalizers.iter().flatten().enumerate() {
        findings.invalid_each(&path.child("finalizers").index(i), finalizer, formats::qualified_name(finalizer));
    }
    for (i, owner) in meta.owner_references.iter().flatten().enumerate() {
        let path = path.child("ownerReferences").index(i);
        for (field, value) in
            [("apiVersion", &owner.api_version), ("kind", &owner.kind), ("name", &owner.name), ("uid", &owner.uid)]
        {
            if value.is_empty() {
                findings.invalid(&path.child(field), value, "must not be empty");
            }
        }
    }
}
