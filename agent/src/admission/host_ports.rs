//! Ports on the host that pods ask for. Pure.

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
    /// The same port and protocol, and the same address or one of them on all.
    fn conflicts(&self, other: &Self) -> bool {
        let is_same_ip = self.ip == other.ip || self.ip == ANY || other.ip == ANY;
        self.port == other.port && self.protocol == other.protocol && is_same_ip
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

/// None of the ports is taken.
pub(super) fn are_free(wanted: &[HostPort], taken: &[HostPort]) -> bool {
    !wanted.iter().any(|port| taken.iter().any(|other| port.conflicts(other)))
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
    fn init_containers_do_not_hold_ports() {
        let port = json!({ "containerPort": 1, "hostPort": 80 });
        assert_eq!(ports("initContainers", "", &port), []);
        assert_eq!(ports("initContainers", "Always", &port).len(), 1);
    }
}
