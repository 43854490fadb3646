//! What one probe asks of one container.

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
