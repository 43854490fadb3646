//! Host and pod addresses in a status.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::HostIP;
use k8s_openapi::api::core::v1::PodIP;
use k8s_openapi::api::core::v1::PodStatus;

use super::StatusInput;
use super::phase;
use crate::model::one_per_family;
use crate::model::spec;

/// Sets `hostIP(s)` and `podIP(s)`. Host-network pods have the node's addresses, also when those change: probes and services
/// would use one that the node no longer has. Upstream follows with the next change of a container, or its next start.
pub(super) fn set(input: &StatusInput<'_>, status: &mut PodStatus) {
    let node = input.node.ips.as_slice();
    let mut ips = one_per_family(&input.snapshot.ips, input.node.prefers_v6);
    let previous = input.old.pod_ips.iter().flatten().map(|ip| ip.ip.clone());
    let has_ended = input.is_terminal || input.old.phase.as_deref().is_some_and(phase::is_terminal);
    if has_ended && ips.is_empty() {
        // A terminated pod keeps the addresses of its removed sandbox, also if it ended under an earlier agent.
        ips = previous.collect();
    } else if spec::host_network(input.pod) {
        if ips.is_empty() && node.is_empty() {
            ips = previous.collect();
        } else if ips.is_empty() {
            ips.extend(node.first().cloned());
        }
        let second = node.get(1).filter(|second| ips.len() == 1 && family(second) != family(&ips[0]));
        ips.extend(second.cloned());
    }
    if node.is_empty() {
        // Keeps what was reported before a restart of the agent until the addresses are known again.
        status.host_ip.clone_from(&input.old.host_ip);
        status.host_ips.clone_from(&input.old.host_ips);
    } else {
        status.host_ip = node.first().cloned();
        status.host_ips = Some(node.iter().map(|ip| HostIP { ip: ip.clone() }).collect());
    }
    status.pod_ip = ips.first().cloned();
    status.pod_ips = (!ips.is_empty()).then(|| ips.into_iter().map(|ip| PodIP { ip }).collect());
}

/// True for IPv6.
fn family(ip: &str) -> Option<bool> {
    ip.parse::<IpAddr>().ok().map(|ip| ip.is_ipv6())
}
