//! Container ports and the host ports they claim.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerPort;

use super::super::field::Findings;
use super::super::field::Path;
use super::formats;
use super::spec::first_of_its_name;
use super::text;

pub(super) fn check_all(ports: &[ContainerPort], path: &Path, findings: &mut Findings) {
    let mut names = HashSet::new();
    for (i, port) in ports.iter().enumerate() {
        let path = path.index(i);
        let name = text(&port.name);
        if !name.is_empty() {
            let problems = formats::port_name(name);
            let good = problems.is_empty();
            findings.invalid_each(&path.child("name"), name, problems);
            if good {
                first_of_its_name(name, &mut names, &path.child("name"), findings);
            }
        }
        check(port, &path, findings);
    }
}

fn check(port: &ContainerPort, path: &Path, findings: &mut Findings) {
    let number = port.container_port;
    if number == 0 {
        findings.required(&path.child("containerPort"), "");
    }
    let host_port = port.host_port.unwrap_or(0);
    for (field, value) in [("containerPort", number), ("hostPort", host_port)] {
        if value != 0 {
            formats::port(value).iter().for_each(|c| findings.invalid(&path.child(field), &value, c));
        }
    }
    let protocol = text(&port.protocol);
    if protocol.is_empty() {
        findings.required(&path.child("protocol"), "");
    } else {
        findings.one_of(&path.child("protocol"), protocol, &["SCTP", "TCP", "UDP"]);
    }
    let host_ip = text(&port.host_ip);
    if !host_ip.is_empty() {
        findings.invalid_each(&path.child("hostIP"), host_ip, formats::ip(host_ip));
    }
}

/// Ports of a regular container on the host's network. Upstream has no such rule for init containers.
pub(super) fn host_network(ports: &[ContainerPort], path: &Path, findings: &mut Findings) {
    for (i, port) in ports.iter().enumerate() {
        let host_port = port.host_port.unwrap_or(0);
        if host_port != port.container_port {
            let message = "must match `containerPort` when `hostNetwork` is true";
            findings.invalid(&path.index(i).child("hostPort"), &host_port, message);
        }
    }
}

/// A host port can be had only once per protocol and address.
pub(super) fn host_port_conflicts(containers: &[Container], path: impl Fn(usize) -> Path, findings: &mut Findings) {
    let mut taken = HashSet::new();
    for (i, container) in containers.iter().enumerate() {
        for (j, port) in container.ports.iter().flatten().enumerate() {
            let Some(host_port) = port.host_port.filter(|&p| p != 0) else { continue };
            let claim = format!("{}/{}/{host_port}", text(&port.protocol), text(&port.host_ip));
            if !taken.insert(claim.clone()) {
                findings.duplicate(&path(i).child("ports").index(j).child("hostPort"), &claim);
            }
        }
    }
}
