//! One probe of one container, as the pod's spec has it.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Probe;

use crate::model::ContainerClass;
use crate::model::ProbeKind;
use crate::model::spec::SpecContainer;

/// All kinds, in the order in which a container's probes matter to each other.
pub(super) const KINDS: [ProbeKind; 3] = [ProbeKind::Startup, ProbeKind::Readiness, ProbeKind::Liveness];

/// A probe of a container, as the pod's spec has it.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Target {
    pub(super) kind: ProbeKind,
    pub(super) is_sidecar: bool,
    /// The container's other probes wait for its startup probe.
    pub(super) has_startup_probe: bool,
    pub(super) probe: Probe,
    /// The parts of the container that the probe depends on.
    pub(super) container: Container,
}

impl Target {
    /// The probe of this kind, if the container has one.
    pub(super) fn of(container: &SpecContainer<'_>, kind: ProbeKind) -> Option<Self> {
        let probe = probe(container.spec, kind)?.clone();
        let container_spec = Container {
            name: container.spec.name.clone(),
            env: container.spec.env.clone(),
            ports: container.spec.ports.clone(),
            ..Container::default()
        };
        let is_sidecar = container.class == ContainerClass::Sidecar;
        let has_startup_probe = container.spec.startup_probe.is_some();
        Some(Self { kind, is_sidecar, has_startup_probe, probe, container: container_spec })
    }

    /// It is sent to the pod's address: neither a command nor a request to a host that it names. Upstream's order of actions.
    pub(super) fn needs_address(&self) -> bool {
        let is_unnamed = |host: &Option<String>| host.as_deref().is_none_or(str::is_empty);
        match &self.probe {
            Probe { exec: Some(_), .. } => false,
            Probe { http_get: Some(action), .. } => is_unnamed(&action.host),
            Probe { tcp_socket: Some(action), .. } => is_unnamed(&action.host),
            Probe { grpc, .. } => grpc.is_some(),
        }
    }

    /// The container for events: `spec.containers{web}`.
    pub(super) fn field_path(&self) -> String {
        let list = if self.is_sidecar { "initContainers" } else { "containers" };
        format!("spec.{list}{{{}}}", self.container.name)
    }
}

/// The probe of this kind, if the container has one.
pub(super) fn probe(container: &Container, kind: ProbeKind) -> Option<&Probe> {
    match kind {
        ProbeKind::Liveness => container.liveness_probe.as_ref(),
        ProbeKind::Readiness => container.readiness_probe.as_ref(),
        ProbeKind::Startup => container.startup_probe.as_ref(),
    }
}

/// The kind as events and metrics spell it.
pub(super) const fn label(kind: ProbeKind) -> &'static str {
    match kind {
        ProbeKind::Liveness => "Liveness",
        ProbeKind::Readiness => "Readiness",
        ProbeKind::Startup => "Startup",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::testing;

    #[test]
    fn only_what_names_no_host_needs_an_address() {
        for (action, expected) in [
            (json!({ "exec": { "command": ["check"] }, "httpGet": { "port": 80 } }), false),
            (json!({ "httpGet": { "port": 80 } }), true),
            (json!({ "httpGet": { "port": 80, "host": "" } }), true),
            (json!({ "httpGet": { "port": 80, "host": "10.0.0.9" } }), false),
            (json!({ "tcpSocket": { "port": 80 } }), true),
            (json!({ "tcpSocket": { "port": 80, "host": "localhost" } }), false),
            (json!({ "grpc": { "port": 80 } }), true),
            (json!({}), false),
        ] {
            let mut container = testing::container("c");
            container.readiness_probe = Some(serde_json::from_value(action.clone()).expect("a probe"));
            let of = SpecContainer { class: ContainerClass::Regular, index: 0, spec: &container };
            let target = Target::of(&of, ProbeKind::Readiness).expect("a probe");
            assert_eq!(target.needs_address(), expected, "{action}");
        }
    }
}
