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
        probe::check_container(container, spec.termination_grace_period_seconds, &path, findings);
    }
    port::host_port_conflicts(&spec.containers, &containers, findings);
    for (i, container) in spec.init_containers.iter().flatten().enumerate() {
        let path = path.child("initContainers").index(i);
        name(&container.name, &path, &mut seen, findings);
        check(container, spec, volumes, &path, findings);
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

/// What makes no sense for a container that must end before the pod starts.
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
    let host_network = spec.host_network == Some(true);
    port::check_all(container.ports.as_deref().unwrap_or_default(), host_network, &path.child("ports"), findings);
    env::check_all(container, path, findings);
    mount::check_all(container, volumes, path, findings);
    if let Some(requirements) = &container.resources {
        resources::check_container(requirements, &path.child("resources"), findings);
    }
    if let Some(context) = &container.security_context {
        security::check_container(context, spec.host_users, &path.child("securityContext"), findings);
    }
}
