//! What the API server fills in when a pod is created (v1 defaulting). Pure; applying it twice changes nothing.

mod container;
mod resources;
#[cfg(test)]
mod tests;
mod volume;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSecurityContext;

/// Applies the defaults of a new pod.
pub(super) fn apply(pod: &mut Pod) {
    let spec = pod.spec.get_or_insert_default();
    spec.volumes.iter_mut().flatten().for_each(volume::apply);
    spec.init_containers.iter_mut().flatten().for_each(container::apply);
    spec.containers.iter_mut().for_each(container::apply);

    text(&mut spec.dns_policy, "ClusterFirst");
    text(&mut spec.restart_policy, "Always");
    text(&mut spec.scheduler_name, "default-scheduler");
    spec.security_context.get_or_insert_with(PodSecurityContext::default);
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.enable_service_links.get_or_insert(true);
    // The deprecated alias and the field always agree.
    if spec.service_account_name.as_deref().unwrap_or_default().is_empty() {
        spec.service_account_name = spec.service_account.clone();
    }

    resources::requests_from_limits(spec);
    resources::pod_level(spec);
    resources::round_up(spec);
    if spec.host_network == Some(true) {
        spec.init_containers.iter_mut().flatten().chain(&mut spec.containers).for_each(host_ports);
    }
}

/// With the host's network, every container port is a host port.
fn host_ports(container: &mut Container) {
    for port in container.ports.iter_mut().flatten() {
        if port.host_port.unwrap_or(0) == 0 {
            port.host_port = Some(port.container_port);
        }
    }
}

/// Sets an unset (or empty) text.
fn text(slot: &mut Option<String>, default: &str) {
    if slot.as_deref().unwrap_or_default().is_empty() {
        *slot = Some(default.to_owned());
    }
}

/// Sets an unset (or zero) number.
fn number(slot: &mut Option<i32>, default: i32) {
    if slot.unwrap_or(0) == 0 {
        *slot = Some(default);
    }
}

/// `Always` for the tag `latest`, spelled out or implied, else `IfNotPresent`.
fn pull_policy(image: &str) -> &'static str {
    let (name, digest) = match image.split_once('@') {
        Some((name, _)) => (name, true),
        None => (image, false),
    };
    let last = name.rsplit('/').next().unwrap_or(name);
    match last.split_once(':') {
        Some((_, "latest")) => "Always",
        None if !digest && !last.is_empty() => "Always",
        _ => "IfNotPresent",
    }
}
