//! The verdict on one OOM kill, and the reason of a container's exit that follows from verdicts. Pure.

use crate::model::CgroupPlace;
use crate::model::CgroupRole;
use crate::model::ContainerStatus;
use crate::model::OomConfidence;
use crate::model::OomContainer;
use crate::model::OomEvidence;
use crate::model::OomGroup;
use crate::model::OomLimit;
use crate::model::OomRecord;
use crate::model::OomScope;
use crate::model::OomTime;
use crate::model::OomVerdict;
use crate::model::OomVictim;
use crate::model::PodRef;
use crate::model::PodSnapshot;

/// Reason of a container whose main process was killed by the OOM killer.
pub const OOM_KILLED: &str = "OOMKilled";
/// Exit code of a process that SIGKILL ended, as container runtimes report it.
pub const KILLED: i32 = 137;

/// What the runtime reports of the victim's pod and container.
#[derive(Clone, Copy, Debug)]
pub struct VictimOwner<'a> {
    /// The pod.
    pub pod: &'a PodRef,
    /// The container; `None` for the sandbox.
    pub container: Option<&'a ContainerStatus>,
    /// Whether the pod's containers share a PID namespace; `None` if its sandbox is unknown.
    pub shares_pid_namespace: Option<bool>,
}

impl<'a> VictimOwner<'a> {
    /// The owner of a container or sandbox id in a snapshot.
    pub fn of(snapshot: &'a PodSnapshot, id: &str) -> Option<Self> {
        let pod = &snapshot.pod;
        let sandbox = |id: &str| snapshot.sandboxes.iter().find(|sandbox| sandbox.id.as_str() == id);
        let shares = |id: &str| sandbox(id).map(|sandbox| sandbox.shares_pid_namespace);
        match snapshot.containers.iter().find(|container| container.id.as_str() == id) {
            Some(container) => {
                let shares_pid_namespace = shares(container.sandbox_id.as_str());
                Some(Self { pod, container: Some(container), shares_pid_namespace })
            }
            None => sandbox(id).map(|_| Self { pod, container: None, shares_pid_namespace: shares(id) }),
        }
    }
}

/// The verdict on `record`. `is_repeated`: another process of the same group was killed just before, by the same event.
pub fn decide(record: &OomRecord, owner: Option<VictimOwner<'_>>, is_repeated: bool, time: OomTime) -> OomVerdict {
    let victim = victim(record, owner);
    let scope = scope(record);
    let (limit_cgroup, limit_bytes) = match &record.limit {
        OomLimit::Exceeded { place, bytes } => (place.as_ref().map(|place| place.path.clone()), *bytes),
        OomLimit::None | OomLimit::Unknown => (None, None),
    };
    let pod = owner.map(|owner| owner.pod.clone()).or_else(|| {
        let uid = record.pod()?.clone();
        Some(PodRef { uid, namespace: "".into(), name: "".into() })
    });
    let mut verdict = OomVerdict {
        moment: record.moment,
        time,
        pid: record.pid,
        comm: record.comm.clone(),
        pod,
        container: container(record, owner),
        victim,
        scope,
        limit_cgroup,
        limit_bytes,
        memory: record.memory,
        group: match (record.group, is_repeated) {
            (None, _) => OomGroup::Single,
            (Some(_), false) => OomGroup::Chosen,
            (Some(_), true) => OomGroup::Member,
        },
        confidence: record.source,
        missing: Vec::new(),
    };
    verdict.missing = missing(record, &verdict);
    verdict
}

fn container(record: &OomRecord, owner: Option<VictimOwner<'_>>) -> Option<OomContainer> {
    match owner {
        Some(owner) => owner.container.map(|of| OomContainer { id: of.id.clone(), name: of.name.clone() }),
        None => record.container().map(|id| OomContainer { id: id.clone(), name: String::new() }),
    }
}

/// What the process was to its container. The pid of the main process is the runtime's; without it a container with a PID
/// namespace of its own has the namespace's init as main process.
fn victim(record: &OomRecord, owner: Option<VictimOwner<'_>>) -> OomVictim {
    let is_sandbox = owner.is_some_and(|owner| owner.container.is_none());
    match &record.place {
        Some(place) if place.container.is_none() || is_sandbox => return OomVictim::Other,
        None if owner.is_none() => return OomVictim::Unknown,
        _ => {}
    }
    let Some(pid) = record.pid else { return OomVictim::Unknown };
    let main = owner.and_then(|owner| owner.container).and_then(|container| container.pid);
    if main == Some(pid) {
        return OomVictim::Main;
    }
    let Some(root) = record.root else { return OomVictim::Unknown };
    if main == Some(root.pid) {
        return OomVictim::Child;
    }
    // In the host's PID namespace orphans have a parent outside of the container, as the processes of an exec have.
    if record.host_pid_namespace {
        return OomVictim::Unknown;
    }
    let shares = owner.and_then(|owner| owner.shares_pid_namespace);
    match (root.is_init, main.is_some()) {
        // The sandbox's init has adopted it.
        (true, true) => OomVictim::Unknown,
        (true, false) if root.pid == pid => OomVictim::Main,
        (true, false) if root.in_cgroup || shares == Some(false) => OomVictim::Child,
        (true, false) => OomVictim::Unknown,
        (false, true) => OomVictim::Exec,
        // In a shared namespace the main process has such a place too.
        (false, false) if shares == Some(false) => OomVictim::Exec,
        (false, false) => OomVictim::Unknown,
    }
}

fn scope(record: &OomRecord) -> OomScope {
    match &record.limit {
        OomLimit::None => OomScope::Node,
        OomLimit::Unknown | OomLimit::Exceeded { place: None, .. } => OomScope::Unknown,
        OomLimit::Exceeded { place: Some(place), .. } => match place.role {
            CgroupRole::Container => OomScope::Container,
            CgroupRole::Pod => OomScope::Pod,
            CgroupRole::QosClass => OomScope::QosClass,
            CgroupRole::AllPods => OomScope::NodeAllocatable,
            CgroupRole::InContainer if is_of_crun(place) => OomScope::Container,
            CgroupRole::InContainer | CgroupRole::Other => OomScope::OtherCgroup,
        },
    }
}

/// True for the cgroup `container` that crun creates in a container's scope with cgroup v2: it has the container's limits
/// as the scope has, and all processes of the container are in it.
fn is_of_crun(place: &CgroupPlace) -> bool {
    let Some(id) = &place.container else { return false };
    let scope = place.path.strip_suffix("/container").and_then(|above| above.strip_suffix(".scope"));
    scope.is_some_and(|scope| scope.ends_with(id.as_str()))
}

fn missing(record: &OomRecord, verdict: &OomVerdict) -> Vec<OomEvidence> {
    let is_known = |evidence: &OomEvidence| match evidence {
        OomEvidence::Process => verdict.pid.is_some() && !verdict.comm.is_empty(),
        OomEvidence::Pod => {
            let is_named = verdict.pod.as_ref().is_some_and(|pod| !pod.name.is_empty());
            is_named || (record.place.is_some() && record.container().is_none() && verdict.pod.is_none())
        }
        OomEvidence::Container => match &verdict.container {
            Some(container) => !container.name.is_empty(),
            None => record.place.is_some(),
        },
        OomEvidence::Relation => verdict.victim != OomVictim::Unknown,
        OomEvidence::Scope => verdict.scope != OomScope::Unknown,
        OomEvidence::LimitBytes => verdict.limit_bytes.is_some() || verdict.scope == OomScope::Node,
        OomEvidence::Memory => verdict.memory.is_some(),
        OomEvidence::Time => record.is_timed,
    };
    OomEvidence::ALL.iter().copied().filter(|evidence| !is_known(evidence)).collect()
}

/// What is known of a container's exit beside the runtime's report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitEvidence {
    /// A signal ended the main process (`true`), or it exited by itself (`false`), according to the kernel.
    pub signalled: Option<bool>,
    /// The best evidence of an OOM kill of the main process.
    pub main_killed: Option<OomConfidence>,
    /// No OOM kill of the main process can have been missed.
    pub is_complete: bool,
}

/// Whether the OOM killer ended the main process of a container that exited with `code`. `None` if that is not known.
pub fn was_oom_killed(code: i32, evidence: ExitEvidence) -> Option<bool> {
    let by_signal = evidence.signalled.unwrap_or(code == KILLED);
    match evidence.main_killed {
        // The OOM killer sends SIGKILL. A process that had begun to exit keeps its own code.
        _ if !by_signal => Some(false),
        Some(_) => Some(true),
        None => evidence.is_complete.then_some(false),
    }
}

/// The reason that a container's exit should have; `None` if `reason`, the runtime's, stands. containerd reports
/// `OOMKilled` once any process of the container was killed, and may report the exit before it has seen the kill.
pub fn corrected_reason(reason: &str, code: i32, evidence: ExitEvidence) -> Option<&'static str> {
    let is_said = reason == OOM_KILLED;
    match was_oom_killed(code, evidence)? {
        true if matches!(reason, "Error" | "Completed" | "") => Some(OOM_KILLED),
        false if is_said => Some(ordinary_reason(code)),
        _ => None,
    }
}

/// The reason of an exit without special cause.
pub fn ordinary_reason(code: i32) -> &'static str {
    if code == 0 { "Completed" } else { "Error" }
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
