//! Validation of static pods: the rules of pod creation that protect a node, in the wording of
//! the API server. Pure. The pod has its defaults already.
//!
//! Left out: rules about fields only schedulers read (affinity, spread constraints), Windows, and the inside of volume
//! types that need the API or a storage driver.

mod annotations;
mod container;
mod env;
pub mod formats;
mod meta;
mod mount;
mod port;
mod probe;
mod resources;
mod restart;
mod security;
mod spec;
#[cfg(test)]
mod tests;
mod volume;

use k8s_openapi::api::core::v1::Pod;

use super::field::FieldError;
use super::field::Findings;
use super::field::Path;

/// Everything wrong with the pod (the first fifty things); empty for a valid one.
pub fn pod(pod: &Pod) -> Vec<FieldError> {
    let mut findings = Findings::default();
    meta::check(&pod.metadata, &Path::root("metadata"), &mut findings);
    annotations::check(pod, &mut findings);
    match &pod.spec {
        Some(pod_spec) => {
            let path = Path::root("spec");
            spec::check(pod_spec, &path, &mut findings);
            resources::containers_fit(pod, &path, &mut findings);
        }
        None => findings.required(&Path::root("spec"), ""),
    }
    findings.into_vec()
}

/// An optional text, with unset and empty the same.
fn text(value: &Option<String>) -> &str {
    value.as_deref().unwrap_or_default()
}

/// A path inside something: relative and without `..`.
fn local_path(value: &str, path: &Path, findings: &mut Findings) {
    if value.starts_with('/') {
        findings.invalid(path, value, "must be a relative path");
    }
    no_backsteps(value, path, findings);
}

/// A path that never leaves where it starts, and that the kernel can take.
fn no_backsteps(value: &str, path: &Path, findings: &mut Findings) {
    if value.split('/').any(|part| part == "..") {
        findings.invalid(path, value, "must not contain '..'");
    }
    no_control(value, path, findings);
}

/// Text that ends up in paths or tables must not hold control characters.
fn no_control(value: &str, path: &Path, findings: &mut Findings) {
    if value.chars().any(char::is_control) {
        findings.invalid(path, value, "must not contain control characters");
    }
}

fn not_negative(value: Option<i64>, path: &Path, findings: &mut Findings) {
    if let Some(value) = value.filter(|&v| v < 0) {
        findings.invalid(path, &value, "must be greater than or equal to 0");
    }
}
