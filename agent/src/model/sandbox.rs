//! Decides whether a pod needs a new sandbox. One pure rule, used by the plan and by the pod's condition
//! `PodReadyToStartContainers`.

use k8s_openapi::api::core::v1::Pod;

use super::PodSnapshot;
use super::SandboxId;
use super::spec;

/// Whether a sandbox of a pod can be used, or a new one is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxNeed {
    /// The newest one serves.
    Keep(SandboxId),
    /// Another one is needed.
    Create {
        /// `metadata.attempt` of the new one.
        attempt: u32,
        /// The sandbox it replaces; `None` if there is none, or if that one has another network mode.
        replaces: Option<SandboxId>,
        /// Why none of those there serves.
        defect: SandboxDefect,
    },
}

/// Why the sandboxes of a pod do not serve: message of the condition, as upstream since 1.37.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxDefect {
    /// There is none.
    Missing,
    /// More than one is ready.
    Several,
    /// The newest one is not ready.
    NotReady,
    /// The network mode of the pod is another one.
    NetworkMode,
    /// It has a network of its own and no address, as far as the runtime reports on that.
    NoAddress,
}

impl SandboxDefect {
    /// Text of the condition's message.
    pub fn message(self) -> &'static str {
        match self {
            Self::Missing => "no pod sandbox exists",
            Self::Several => "multiple pod sandboxes are ready and need to be reconciled",
            Self::NotReady => "pod sandbox is not ready",
            Self::NetworkMode => "network namespace mode changed and sandbox needs to be recreated",
            Self::NoAddress => "pod sandbox has no IP address",
        }
    }
}

impl SandboxNeed {
    /// Compares the sandboxes that the runtime has with the pod's spec.
    pub fn of(pod: &Pod, snapshot: &PodSnapshot) -> Self {
        let Some(newest) = snapshot.sandboxes.first() else {
            return Self::Create { attempt: 0, replaces: None, defect: SandboxDefect::Missing };
        };
        let ready = snapshot.sandboxes.iter().filter(|sandbox| sandbox.ready).count();
        let host_network = spec::host_network(pod);
        let defect = if ready > 1 {
            SandboxDefect::Several
        } else if !newest.ready {
            SandboxDefect::NotReady
        } else if newest.host_network != host_network {
            SandboxDefect::NetworkMode
        } else if !host_network && newest.reports_network && newest.ips.is_empty() {
            SandboxDefect::NoAddress
        } else {
            return Self::Keep(newest.id.clone());
        };
        let replaces = (defect != SandboxDefect::NetworkMode).then(|| newest.id.clone());
        Self::Create { attempt: newest.attempt.saturating_add(1), replaces, defect }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    fn need(host_network: bool, change: impl FnOnce(&mut PodSnapshot)) -> SandboxNeed {
        let mut pod = testing::pod("Always", &[], &["main"]);
        pod.spec.get_or_insert_default().host_network = Some(host_network);
        let mut snapshot = testing::snapshot(vec![]);
        snapshot.sandboxes[0].host_network = host_network;
        change(&mut snapshot);
        SandboxNeed::of(&pod, &snapshot)
    }

    fn create(attempt: u32, replaces: Option<&str>, defect: SandboxDefect) -> SandboxNeed {
        SandboxNeed::Create { attempt, replaces: replaces.map(SandboxId::from), defect }
    }

    #[test]
    fn keeps_a_good_sandbox() {
        assert_eq!(need(false, |_| ()), SandboxNeed::Keep("sandbox-0".into()));
        assert_eq!(need(true, |s| s.sandboxes[0].ips.clear()), SandboxNeed::Keep("sandbox-0".into()));
        let unreported = |s: &mut PodSnapshot| {
            s.sandboxes[0].ips.clear();
            s.sandboxes[0].reports_network = false;
        };
        assert_eq!(need(false, unreported), SandboxNeed::Keep("sandbox-0".into()), "a new one would be no better");
    }

    #[test]
    fn replaces_what_cannot_serve() {
        assert_eq!(need(false, |s| s.sandboxes.clear()), create(0, None, SandboxDefect::Missing));
        assert_eq!(
            need(false, |s| s.sandboxes[0].ready = false),
            create(1, Some("sandbox-0"), SandboxDefect::NotReady)
        );
        assert_eq!(need(false, |s| s.sandboxes[0].ips.clear()), create(1, Some("sandbox-0"), SandboxDefect::NoAddress));
        assert_eq!(need(false, |s| s.sandboxes[0].host_network = true), create(1, None, SandboxDefect::NetworkMode));
        assert_eq!(need(true, |s| s.sandboxes[0].host_network = false), create(1, None, SandboxDefect::NetworkMode));
        let two_ready = |s: &mut PodSnapshot| s.sandboxes.insert(0, testing::sandbox(1));
        assert_eq!(need(false, two_ready), create(2, Some("sandbox-1"), SandboxDefect::Several));
    }

    #[test]
    fn an_older_dead_sandbox_does_not_matter() {
        let replaced = |s: &mut PodSnapshot| {
            s.sandboxes[0].ready = false;
            s.sandboxes.insert(0, testing::sandbox(1));
        };
        assert_eq!(need(false, replaced), SandboxNeed::Keep("sandbox-1".into()));
    }
}
