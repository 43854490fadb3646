//! `pressure` of `KebletConfiguration`: when the kernel reports that tasks wait for a resource (pressure stall information,
//! <https://docs.kernel.org/accounting/psi.html>), and what is done about it. Pure.

use std::fmt;
use std::time::Duration;

use super::duration::GoDuration;
use super::schema::document;

/// Shortest and longest window of a trigger that the kernel accepts.
pub const WINDOWS: (GoDuration, GoDuration) = (GoDuration::millis(500), GoDuration::secs(10));
/// Longest window of a policy, and longest `leaveAfter` of a trigger.
pub const LONGEST: GoDuration = GoDuration::secs(60);
/// Triggers at most: each is a descriptor, and with a window below two seconds wakes a thread of the kernel.
pub const MAX_TRIGGERS: usize = 16;
/// Policies at most.
pub const MAX_POLICIES: usize = 8;

document! {
    /// `pressure`
    #[derive(Eq)]
    pub struct PressureSettings {
        triggers "triggers": Vec<TriggerSettings> = default_triggers(), value, used, "When the kernel notifies of pressure; none with an empty list.";
        policies "policies": Vec<PolicySettings>, value, used, "When pods are evicted because tasks wait for memory; none by default.";
    }
}

document! {
    /// An entry of `pressure.triggers`
    #[derive(Eq)]
    pub struct TriggerSettings {
        resource "resource": String = "memory", value, used, "memory, io or cpu.";
        kind "kind": String = "some", value, used, "some (at least one task waited) or full (all did).";
        scope "scope": String = "node", value, used, "node, kubepods, burstable or besteffort; all but node need cgroup v2.";
        stall "stall": GoDuration = GoDuration::millis(100), value, used, "Waiting within the window at which the level is entered.";
        window "window": GoDuration = GoDuration::secs(2), value, used, "500ms to 10s; other than multiples of 2s need CAP_SYS_RESOURCE.";
        leave_stall "leaveStall": Option<GoDuration>, pointer, used, "Waiting per window below which the level is left; half of stall by default.";
        leave_after "leaveAfter": GoDuration = GoDuration::secs(10), value, used, "For how long there must be less waiting than leaveStall.";
    }
}

document! {
    /// An entry of `pressure.policies`
    #[derive(Eq)]
    pub struct PolicySettings {
        name "name": String, value, used, "Name in events, metrics and logs; unique.";
        mode "mode": String = "DryRun", value, used, "DryRun (report only) or Enforce.";
        kind "kind": String = "full", value, used, "some or full.";
        scope "scope": String = "node", value, used, "node, or kubepods (cgroup v2).";
        threshold "threshold": i32 = 20, value, used, "Percent of both windows for which tasks waited.";
        leave_threshold "leaveThreshold": Option<i32>, pointer, used, "Percent of the long window below which the policy is at rest again; half of threshold by default.";
        short_window "shortWindow": GoDuration = GoDuration::secs(1), value, used, "The short window.";
        long_window "longWindow": GoDuration = GoDuration::secs(5), value, used, "The long window.";
        relax "relax": bool = true, pointer, used, "Raise memory.high of the pod that it throttles before any pod is evicted.";
    }
}

/// What tasks wait for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum PressureResource {
    /// Memory: reclaim, pages that were evicted before, swap, `memory.high`.
    Memory,
    /// Block devices.
    Io,
    /// A processor.
    Cpu,
}

impl PressureResource {
    /// All resources.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Io, Self::Cpu];

    /// The name in the configuration, in files of the kernel and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Io => "io",
            Self::Cpu => "cpu",
        }
    }
}

/// How many tasks wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum StallKind {
    /// At least one.
    Some,
    /// All that are not idle.
    Full,
}

impl StallKind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Some, Self::Full];

    /// The name in the configuration, in files of the kernel and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Some => "some",
            Self::Full => "full",
        }
    }
}

/// Whose tasks wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum PressureScope {
    /// All tasks of the machine.
    Node,
    /// Those of all pods.
    Kubepods,
    /// Those of Burstable pods.
    Burstable,
    /// Those of BestEffort pods.
    BestEffort,
}

impl PressureScope {
    /// All scopes.
    pub const ALL: [Self; 4] = [Self::Node, Self::Kubepods, Self::Burstable, Self::BestEffort];

    /// The name in the configuration and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Kubepods => "kubepods",
            Self::Burstable => "burstable",
            Self::BestEffort => "besteffort",
        }
    }
}

/// What a policy does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyMode {
    /// Reports only.
    DryRun,
    /// Acts.
    Enforce,
}

impl PolicyMode {
    /// All modes.
    pub const ALL: [Self; 2] = [Self::DryRun, Self::Enforce];

    /// The name in the configuration and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DryRun => "DryRun",
            Self::Enforce => "Enforce",
        }
    }
}

/// A trigger of the kernel, and when its level is left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trigger {
    /// What tasks wait for.
    pub resource: PressureResource,
    /// Whether at least one task waits, or all.
    pub kind: StallKind,
    /// The cgroup or machine whose tasks wait.
    pub scope: PressureScope,
    /// Waiting within the window at which the level is entered.
    pub stall: Duration,
    /// The window.
    pub window: Duration,
    /// Waiting per window below which the level is left.
    pub leave_stall: Duration,
    /// For how long waiting stays below `leave_stall` until the level is left.
    pub leave_after: Duration,
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {}", self.resource.as_str(), self.kind.as_str(), self.scope.as_str())
    }
}

/// When tasks wait for memory for too long, and what is done then.
#[derive(Clone, PartialEq, Debug)]
pub struct PressurePolicy {
    /// Name in events, metrics and logs.
    pub name: String,
    /// Whether it acts.
    pub mode: PolicyMode,
    /// Whether at least one task waits, or all.
    pub kind: StallKind,
    /// The cgroup or machine whose tasks wait: all pods, or the node.
    pub scope: PressureScope,
    /// The part of both windows, 0.2 for 20 %.
    pub threshold: f64,
    /// The part of the long window below which the policy is at rest again.
    pub leave: f64,
    /// The short window.
    pub short: Duration,
    /// The long window.
    pub long: Duration,
    /// `memory.high` is raised before a pod is evicted.
    pub relax: bool,
}

/// The value of this name among all.
pub(super) fn named<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, text: &str) -> Option<T> {
    all.iter().copied().find(|value| name(*value) == text)
}

impl TriggerSettings {
    /// The trigger; `None` for names that do not exist, which validation reports.
    pub fn trigger(&self) -> Option<Trigger> {
        Some(Trigger {
            resource: named(&PressureResource::ALL, PressureResource::as_str, &self.resource)?,
            kind: named(&StallKind::ALL, StallKind::as_str, &self.kind)?,
            scope: named(&PressureScope::ALL, PressureScope::as_str, &self.scope)?,
            stall: self.stall.std(),
            window: self.window.std(),
            leave_stall: self.leave_stall.map_or(self.stall.std() / 2, GoDuration::std),
            leave_after: self.leave_after.std(),
        })
    }
}

impl PolicySettings {
    /// The policy; `None` for names that do not exist, which validation reports.
    pub fn policy(&self) -> Option<PressurePolicy> {
        let part = |percent: i32| f64::from(percent) / 100.0;
        let threshold = part(self.threshold);
        Some(PressurePolicy {
            name: self.name.clone(),
            mode: named(&PolicyMode::ALL, PolicyMode::as_str, &self.mode)?,
            kind: named(&StallKind::ALL, StallKind::as_str, &self.kind)?,
            scope: named(&PressureScope::ALL, PressureScope::as_str, &self.scope)?,
            threshold,
            leave: self.leave_threshold.map_or(threshold / 2.0, part),
            short: self.short_window.std(),
            long: self.long_window.std(),
            relax: self.relax,
        })
    }
}

impl PressureSettings {
    /// All triggers of a valid configuration.
    pub fn triggers(&self) -> Vec<Trigger> {
        self.triggers.iter().filter_map(TriggerSettings::trigger).collect()
    }

    /// All policies of a valid configuration.
    pub fn policies(&self) -> Vec<PressurePolicy> {
        self.policies.iter().filter_map(PolicySettings::policy).collect()
    }
}

/// Memory is watched closely, since the eviction manager is woken by it; windows of disk and processor need no capability.
fn default_triggers() -> Vec<TriggerSettings> {
    let trigger = |resource: &str, kind: &str, stall, window| TriggerSettings {
        resource: resource.to_owned(),
        kind: kind.to_owned(),
        stall: GoDuration::millis(stall),
        window: GoDuration::millis(window),
        ..TriggerSettings::default()
    };
    vec![
        trigger("memory", "some", 50, 500),
        trigger("memory", "full", 100, 1000),
        trigger("io", "full", 400, 2000),
        trigger("cpu", "some", 1600, 2000),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn defaults_follow_from_the_thresholds() {
        let settings: PressureSettings = serde_json::from_value(json!({
            "triggers": [{"resource": "io", "kind": "full", "stall": "300ms", "window": "4s"}],
            "policies": [{"name": "thrash", "threshold": 30}],
        }))
        .expect("a section");
        let trigger = settings.triggers()[0];
        assert_eq!((trigger.leave_stall, trigger.leave_after), (Duration::from_millis(150), Duration::from_secs(10)));
        assert_eq!(trigger.to_string(), "io full of node");
        let policy = &settings.policies()[0];
        assert_eq!((policy.mode, policy.kind, policy.relax), (PolicyMode::DryRun, StallKind::Full, true));
        assert!((policy.threshold - 0.3).abs() < 1e-9 && (policy.leave - 0.15).abs() < 1e-9);
        assert_eq!(PressureSettings::default().triggers().len(), 4);
        assert_eq!(PressureSettings::default().policies(), [], "a kubelet evicts no pod for pressure");
    }
}
