//! Results of probes.

use std::collections::HashMap;

use super::ContainerId;

/// Which probe of a container.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProbeKind {
    /// A failure restarts the container.
    Liveness,
    /// A failure makes the container unready.
    Readiness,
    /// The other probes wait for its success; a failure restarts the container.
    Startup,
}

/// A published probe result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProbeResult {
    /// The probe succeeded.
    Success,
    /// The probe failed as often as its threshold says.
    Failure,
    /// Probing began, nothing is decided.
    Unknown,
}

/// Probe results by container instance. An instance without an entry has no result yet, or no such probe.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ProbeResults {
    /// Liveness probes.
    pub liveness: HashMap<ContainerId, ProbeResult>,
    /// Readiness probes.
    pub readiness: HashMap<ContainerId, ProbeResult>,
    /// Startup probes.
    pub startup: HashMap<ContainerId, ProbeResult>,
}

impl ProbeResults {
    /// The results of one kind of probe.
    pub fn of_kind(&self, kind: ProbeKind) -> &HashMap<ContainerId, ProbeResult> {
        match kind {
            ProbeKind::Liveness => &self.liveness,
            ProbeKind::Readiness => &self.readiness,
            ProbeKind::Startup => &self.startup,
        }
    }

    /// As [`Self::of_kind`], to change them.
    pub fn of_kind_mut(&mut self, kind: ProbeKind) -> &mut HashMap<ContainerId, ProbeResult> {
        match kind {
            ProbeKind::Liveness => &mut self.liveness,
            ProbeKind::Readiness => &mut self.readiness,
            ProbeKind::Startup => &mut self.startup,
        }
    }

    /// False if this probe of the container has a result that is no success.
    pub fn permits(&self, kind: ProbeKind, container: &ContainerId) -> bool {
        self.of_kind(kind).get(container).is_none_or(|result| *result == ProbeResult::Success)
    }
}
