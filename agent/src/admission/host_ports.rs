//! Ports on the host that pods ask for. Pure.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod;

use super::needs::lasting;
use crate::model::spec;

/// The address that stands for all addresses of the host.
const ANY: &str = "0.0.0.0";

/// A port on the host (`ports[].hostPort`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    ip: String,
    protocol: String,
    port: i32,
}

impl HostPort {
    fn number(&self) -> (i32, &str) {
        (self.port, &self.protocol)
    }
}

/// Host ports of regular containers and sidecars.
pub(super) fn host_ports(pod: &Pod) -> Vec<HostPort> {
    let text = |field: &Option<String>, default: &str| match field.as_deref() {
        None | Some("") => default.to_owned(),
        Some(text) => text.to_owned(),
    };
    let containers = lasting(spec::init_containers(pod), spec::regular_containers(pod));
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    let host_port = ports.filter_map(|port| {
        let number = port.host_port.filter(|number| *number > 0)?;
        Some(HostPort { ip: text(&port.host_ip, ANY), protocol: text(&port.protocol, "TCP"), port: number })
    });
    host_port.collect()
}

/// None of the ports is taken: the same number and protocol at the same address, or one of the two at all addresses. The time it
/// takes grows with the sum of both lists, since a pod may list any number of ports.
pub(super) fn are_free(wanted: &[HostPort], taken: &[HostPort]) -> bool {
    if wanted.is_empty() {
        return true;
    }
    let at_any: HashSet<_> = taken.iter().filter(|port| port.ip == ANY).map(HostPort::number).collect();
    let numbers: HashSet<_> = taken.iter().map(HostPort::number).collect();
    let with_address: HashSet<_> = taken.iter().map(|port| (port.number(), port.ip.as_str())).collect();
    let is_taken = |port: &HostPort| match port.ip.as_str() {
        ANY => numbers.contains(&port.number()),
        ip => at_any.contains(&port.number()) || with_address.contains(&(port.number(), ip)),
    };
    !wanted.iter().any(is_taken)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn ports(list: &str, restart: &str, port: &Value) -> Vec<HostPort> {
        let mut spec = json!({ "containers": [] });
        spec[list] = json!([{ "name": "c", "restartPolicy": restart, "ports": [port] }]);
        host_ports(&serde_json::from_value(json!({ "metadata": {}, "spec": spec })).expect("a pod"))
    }

    #[test]
    fn ports_conflict_by_address_protocol_and_number() {
        let of = |port: Value| ports("containers", "", &port);
        let tcp = of(json!({ "containerPort": 1, "hostPort": 80 }));
        for (port, is_free) in [
            (json!({ "containerPort": 2, "hostPort": 80 }), false),
            (json!({ "containerPort": 2, "hostPort": 80, "protocol": "TCP", "hostIP": "0.0.0.0" }), false),
            (json!({ "containerPort": 2, "hostPort": 80, "hostIP": "127.0.0.1" }), false),
            (json!({ "containerPort": 2, "hostPort": 80, "protocol": "UDP" }), true),
            (json!({ "containerPort": 80, "hostPort": 81 }), true),
            (json!({ "containerPort": 80 }), true),
            (json!({ "containerPort": 80, "hostPort": 0 }), true),
        ] {
            assert_eq!(are_free(&of(port.clone()), &tcp), is_free, "{port}");
            assert_eq!(are_free(&tcp, &of(port.clone())), is_free, "{port}");
        }
        let local = |ip: &str| of(json!({ "containerPort": 1, "hostPort": 80, "hostIP": ip }));
        assert!(are_free(&local("127.0.0.1"), &local("127.0.0.2")));
        assert!(!are_free(&local("127.0.0.1"), &local("127.0.0.1")));
    }

    #[test]
    fn many_ports_are_compared_in_time() {
        let of = |protocol: &str| -> Vec<HostPort> {
            let addresses = (0..40).flat_map(|low| (1..10_000).map(move |port| (format!("10.0.0.{low}"), port)));
            addresses.map(|(ip, port)| HostPort { ip, protocol: protocol.to_owned(), port }).collect()
        };
        let (tcp, udp) = (of("TCP"), of("UDP"));
        assert!(are_free(&tcp, &udp), "in pairs: 160 billion comparisons");
        assert!(!are_free(&tcp, &tcp));
    }

    #[test]
    fn init_containers_do_not_hold_ports() {
        let port = json!({ "containerPort": 1, "hostPort": 80 });
        assert_eq!(ports("initContainers", "", &port), []);
        assert_eq!(ports("initContainers", "Always", &port).len(), 1);
    }
}
