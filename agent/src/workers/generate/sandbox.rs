//! `PodSandboxConfig` of a pod. Pure.

use std::collections::BTreeMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::ContainerPort;
use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::GenerateError;
use super::NodeSettings;
use super::dns::pod_dns;
use super::hostname::hostname;
use super::hostname::kernel_hostname;
use super::names;
use super::resources;
use super::security;
use crate::model::spec;

/// A sandbox's configuration and its warnings.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxConfig {
    /// For `RunPodSandbox` and `CreateContainer`.
    pub config: cri::PodSandboxConfig,
    /// Warning events due on the pod: reason and message.
    pub warnings: Vec<(&'static str, String)>,
}

/// Generates the configuration of sandbox number `attempt`. `cgroup_parent` is empty without QoS cgroups;
/// `resolv_conf` is the content of the node's resolver file, if the node has one; `users` is the pod's user namespace.
///
/// # Errors
/// An invalid host name, resolver file, quantity or policy of groups.
pub fn sandbox_config(
    pod: &Pod,
    attempt: u32,
    cgroup_parent: &str,
    resolv_conf: Option<&str>,
    users: &cri::UserNamespace,
    settings: &NodeSettings,
) -> Result<SandboxConfig, GenerateError> {
    let dns = pod_dns(pod, &settings.dns, resolv_conf)?;
    let kernel_name =
        if spec::host_network(pod) { String::new() } else { kernel_hostname(pod, &hostname(pod, &settings.dns)?)? };
    let linux = cri::LinuxPodSandboxConfig {
        cgroup_parent: cgroup_parent.to_owned(),
        security_context: Some(security::sandbox_security(pod, users)?),
        sysctls: sysctls(pod),
        overhead: Some(resources::sandbox_overhead(pod, &settings.resources)?),
        resources: Some(resources::sandbox_resources(pod, &settings.resources)?),
    };
    let config = cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: names::pod_name(pod).to_owned(),
            uid: names::pod_uid(pod).to_owned(),
            namespace: names::pod_namespace(pod).to_owned(),
            attempt,
        }),
        hostname: kernel_name,
        log_directory: settings.pod_logs_dir.join(names::log_dir_name(pod)).to_string_lossy().into_owned(),
        dns_config: Some(dns.config),
        port_mappings: port_mappings(pod),
        labels: names::sandbox_labels(pod),
        annotations: names::sandbox_annotations(pod),
        linux: Some(linux),
        windows: None,
    };
    Ok(SandboxConfig { config, warnings: dns.warnings })
}

/// The kernel writes names with dots; the API allows slashes too.
fn sysctls(pod: &Pod) -> BTreeMap<String, String> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let stated = context.and_then(|context| context.sysctls.as_ref());
    stated.into_iter().flatten().map(|sysctl| (spec::dotted_sysctl(&sysctl.name), sysctl.value.clone())).collect()
}

/// Ports of regular containers; within one container, which may list any number, the same port is mapped once.
fn port_mappings(pod: &Pod) -> Vec<cri::PortMapping> {
    let mut mappings = Vec::new();
    for container in spec::regular_containers(pod) {
        let mut seen = HashSet::new();
        for port in container.ports.iter().flatten() {
            if seen.insert(port_identity(&container.name, port)) {
                mappings.push(port_mapping(port));
            }
        }
    }
    mappings
}

fn port_identity(container: &str, port: &ContainerPort) -> String {
    match port.name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => format!("{container}-{name}"),
        None => {
            let ip = port.host_ip.as_deref().unwrap_or_default();
            let family = if ip.contains(':') { "v6" } else { "v4" };
            let host = port.host_port.unwrap_or_default();
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            format!("{container}-{family}-{protocol}-{ip}-{host}-{}", port.container_port)
        }
    }
}

fn port_mapping(port: &ContainerPort) -> cri::PortMapping {
    let protocol = match port.protocol.as_deref() {
        Some("UDP") => cri::Protocol::Udp,
        Some("SCTP") => cri::Protocol::Sctp,
        _ => cri::Protocol::Tcp,
    };
    cri::PortMapping {
        protocol: protocol as i32,
        container_port: port.container_port,
        host_port: port.host_port.unwrap_or_default(),
        host_ip: port.host_ip.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    /// Comparing each with all before it would take minutes.
    #[test]
    fn any_number_of_ports_is_mapped_in_their_order() {
        let port = |container_port| ContainerPort { container_port, ..ContainerPort::default() };
        let mut pod = testing::pod("Always", &[], &["a", "b"]);
        let containers = &mut pod.spec.as_mut().expect("a spec").containers;
        containers[0].ports = Some((0..150_000).chain([7, 0]).map(port).collect());
        containers[1].ports = Some(vec![port(7)]);
        let mapped = port_mappings(&pod).into_iter().map(|mapping| mapping.container_port);
        assert!(mapped.eq((0..150_000).chain([7])), "each port once for each container");
    }

    /// As of a DNS server, which has one port for TCP and UDP.
    #[test]
    fn a_port_is_mapped_for_each_of_its_protocols_and_addresses_once() {
        let port = |name: &str, protocol: &str, host_ip: &str| ContainerPort {
            container_port: 53,
            host_port: Some(5353),
            name: (!name.is_empty()).then(|| name.to_owned()),
            protocol: (!protocol.is_empty()).then(|| protocol.to_owned()),
            host_ip: (!host_ip.is_empty()).then(|| host_ip.to_owned()),
        };
        let mut pod = testing::pod("Always", &[], &["a"]);
        pod.spec.as_mut().expect("a spec").containers[0].ports = Some(vec![
            port("", "TCP", ""),
            port("", "", ""),
            port("", "UDP", ""),
            port("", "SCTP", ""),
            port("", "TCP", "192.0.2.1"),
            port("", "TCP", "fd00::1"),
            port("", "TCP", "fd00::1"),
            port("dns", "TCP", ""),
            port("dns", "UDP", ""),
        ]);
        let mapped = port_mappings(&pod);
        let mapped: Vec<_> =
            mapped.iter().map(|port| (port.protocol(), port.host_ip.as_str(), port.host_port)).collect();
        let expected = [
            (cri::Protocol::Tcp, "", 5353),
            (cri::Protocol::Udp, "", 5353),
            (cri::Protocol::Sctp, "", 5353),
            (cri::Protocol::Tcp, "192.0.2.1", 5353),
            (cri::Protocol::Tcp, "fd00::1", 5353),
            (cri::Protocol::Tcp, "", 5353),
        ];
        assert_eq!(mapped, expected, "TCP is the default, and a name is used once");
    }

    #[test]
    fn sysctl_names_are_dotted() {
        let table = [
            ("kernel.sem", "kernel.sem"),
            ("kernel/sem", "kernel.sem"),
            ("net/ipv4/conf/eth0.1/rp_filter", "net.ipv4.conf.eth0/1.rp_filter"),
            ("net.ipv4.conf.eth0/1.rp_filter", "net.ipv4.conf.eth0/1.rp_filter"),
        ];
        for (given, expected) in table {
            assert_eq!(spec::dotted_sysctl(given), expected);
        }
    }
}
