//! Containers and init containers.

use std::collections::HashMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::PodSpec;

use super::super::field::Findings;
use super::super::field::Path;
use super::env;
use super::formats;
use super::mount;
use super::port;
use super::probe;
use super::resources;
use super::restart;
use super::security;
use super::spec::first_of_its_name;
use super::text;
use super::volume::VolumeKind;
use crate::model::resources::RESTART_CONTAINER;

/// The volumes a container may mount, by name.
pub(super) type Volumes<'a> = HashMap<&'a str, VolumeKind>;

pub(super) fn check_all(spec: &PodSpec, volumes: &Volumes<'_>, path: &Path, findings: &mut Findings) {
    let mut seen = HashSet::new();
    let containers = path.child("containers");
    if spec.containers.is_empty() {
        findings.required(&containers, "");
    }
    for (i, container) in spec.containers.iter().enumerate() {
        let path = containers.index(i);
        name(&container.name, &path, &mut seen, findings);
        check(container, spec, volumes, &path, findings);
        if spec.host_network == Some(true) {
            port::host_network(container.ports.as_deref().unwrap_or_default(), &path.child("ports"), findings);
        }
        probe::check_container(container, spec.termination_grace_period_seconds, &path, findings);
    }
    port::host_port_conflicts(&spec.containers, |i| containers.index(i), findings);
    for (i, container) in spec.init_containers.iter().flatten().enumerate() {
        let path = path.child("initContainers").index(i);
        name(&container.name, &path, &mut seen, findings);
        check(container, spec, volumes, &path, findings);
        port::host_port_conflicts(std::slice::from_ref(container), |_| path.clone(), findings);
        if text(&container.restart_policy) == "Always" {
            probe::check_container(container, spec.termination_grace_period_seconds, &path, findings);
        } else {
            plain_init(container, &path, findings);
        }
    }
}

fn name<'a>(name: &'a str, path: &Path, seen: &mut HashSet<&'a str>, findings: &mut Findings) {
    let path = path.child("name");
    if name.is_empty() {
        findings.required(&path, "");
    } else {
        findings.invalid_each(&path, name, formats::dns_label(name));
        first_of_its_name(name, seen, &path, findings);
    }
}

/// Refuses fields that a container which must end before the pod starts cannot have.
fn plain_init(container: &Container, path: &Path, findings: &mut Findings) {
    let set = [
        ("lifecycle", container.lifecycle.is_some()),
        ("livenessProbe", container.liveness_probe.is_some()),
        ("readinessProbe", container.readiness_probe.is_some()),
        ("startupProbe", container.startup_probe.is_some()),
    ];
    for (field, _) in set.into_iter().filter(|(_, set)| *set) {
        findings.forbidden(&path.child(field), "may not be set for init containers without restartPolicy=Always");
    }
    for (i, policy) in container.resize_policy.iter().flatten().enumerate() {
        if policy.restart_policy == RESTART_CONTAINER {
            let message = "must not be set to 'RestartContainer' for non-sidecar initContainers";
            let path = path.child("resizePolicy").index(i).child("restartPolicy");
            findings.invalid(&path, RESTART_CONTAINER, message);
        }
    }
}

fn check(container: &Container, spec: &PodSpec, volumes: &Volumes<'_>, path: &Path, findings: &mut Findings) {
    let image = text(&container.image);
    if image.is_empty() {
        findings.required(&path.child("image"), "");
    } else if image.trim() != image {
        findings.invalid(&path.child("image"), image, "must not have leading or trailing whitespace");
    }
    let pull = text(&container.image_pull_policy);
    findings.one_of(&path.child("imagePullPolicy"), pull, &["Always", "IfNotPresent", "Never"]);
    let policy = text(&container.termination_message_policy);
    findings.one_of(&path.child("terminationMessagePolicy"), policy, &["FallbackToLogsOnError", "File"]);
    super::no_control(text(&container.working_dir), &path.child("workingDir"), findings);
    super::no_control(text(&container.termination_message_path), &path.child("terminationMessagePath"), findings);

    restart::check(container, path, findings);
    stop_signal(container, spec, path, findings);
    resources::resize_policies(container, spec, path, findings);
    port::check_all(container.ports.as_deref().unwrap_or_default(), &path.child("ports"), findings);
    env::check_all(container, volumes, path, findings);
    mount::check_all(container, volumes, path, findings);
    if let Some(requirements) = &container.resources {
        let claims = spec.resource_claims.as_deref().unwrap_or_default();
        resources::check_container(requirements, claims, &path.child("resources"), findings);
    }
    if let Some(context) = &container.security_context {
        security::check_container(context, spec.host_users, &path.child("securityContext"), findings);
    }
}

/// `lifecycle.stopSignal` (KEP-4960). The signals of another operating system are not known here.
fn stop_signal(container: &Container, spec: &PodSpec, path: &Path, findings: &mut Findings) {
    let Some(signal) = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.stop_signal.as_deref()) else {
        return;
    };
    let path = path.child("lifecycle").child("stopSignal");
    match spec.os.as_ref().map(|os| os.name.as_str()) {
        None => findings.forbidden(&path, "may not be set for containers with empty `spec.os.name`"),
        Some("linux") if !formats::signal(signal) => {
            findings.invalid(&path, signal, "must be the name of a signal, such as SIGTERM or SIGRTMIN+1");
        }
        Some(_) => {}
    }
}
