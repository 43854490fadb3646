//! Tables of verdicts and of reasons.

use tokio::time::Instant;

use super::*;
use crate::metrics::Metrics;
use crate::model::ContainerState;
use crate::model::KernelMoment;
use crate::model::OomMemory;
use crate::model::OomRoot;
use crate::model::SandboxStatus;
use crate::model::testing::status;

const MAIN: u32 = 100;

fn place(path: &str, role: CgroupRole) -> CgroupPlace {
    let container = matches!(role, CgroupRole::Container | CgroupRole::InContainer).then(|| "id".into());
    let pod = (path.contains("/pod")).then(|| "uid".into());
    CgroupPlace { path: path.to_owned(), role, pod, container }
}

fn at(role: CgroupRole) -> CgroupPlace {
    let path = match role {
        CgroupRole::AllPods => "/kubepods",
        CgroupRole::QosClass => "/kubepods/burstable",
        CgroupRole::Pod => "/kubepods/burstable/poduid",
        CgroupRole::Container => "/kubepods/burstable/poduid/id",
        CgroupRole::InContainer => "/kubepods/burstable/poduid/id/inner",
        CgroupRole::Other => "/system.slice/x.service",
    };
    place(path, role)
}

fn root(pid: u32, is_init: bool, in_cgroup: bool) -> Option<OomRoot> {
    Some(OomRoot { pid, is_init, in_cgroup })
}

fn record() -> OomRecord {
    OomRecord {
        pid: Some(7),
        comm: "hungry".to_owned(),
        place: Some(at(CgroupRole::Container)),
        limit: OomLimit::Exceeded { place: Some(at(CgroupRole::Container)), bytes: Some(1 << 20) },
        memory: Some(OomMemory { anon_bytes: 1, file_bytes: 2, shmem_bytes: 3 }),
        root: root(MAIN, true, true),
        ..OomRecord::new(OomConfidence::Kernel, KernelMoment(Instant::now()))
    }
}

/// A pod whose container `c` has this main process.
fn snapshot(main: Option<u32>, shares_pid_namespace: bool) -> PodSnapshot {
    let pod = PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() };
    let mut container = status("c", 0, ContainerState::Running);
    (container.id, container.sandbox_id, container.pid) = ("id".into(), "sandbox".into(), main);
    let sandbox = SandboxStatus {
        id: "sandbox".into(),
        attempt: 0,
        ready: true,
        created_at: 0,
        ips: Vec::new(),
        reports_network: true,
        host_network: false,
        shares_pid_namespace,
        runtime_handler: String::new(),
        is_static: false,
    };
    PodSnapshot { containers: vec![container], sandboxes: vec![sandbox], ..PodSnapshot::empty(pod, Instant::now()) }
}

fn verdict(record: &OomRecord, snapshot: Option<&PodSnapshot>) -> OomVerdict {
    let owner = snapshot.and_then(|snapshot| VictimOwner::of(snapshot, record.container()?.as_str()));
    decide(record, owner, false, OomTime(1))
}

#[test]
fn a_complete_record_lacks_nothing() {
    let snapshot = snapshot(Some(MAIN), false);
    let verdict = verdict(&record(), Some(&snapshot));
    assert_eq!(
        (verdict.victim, verdict.scope, verdict.confidence),
        (OomVictim::Child, OomScope::Container, OomConfidence::Kernel)
    );
    assert_eq!((verdict.pid, verdict.limit_bytes), (Some(7), Some(1 << 20)));
    assert_eq!(verdict.pod.as_ref().map(|pod| &*pod.name), Some("pod"));
    assert_eq!(verdict.container.as_ref().map(|container| container.name.as_str()), Some("c"));
    assert_eq!(verdict.missing, []);
}

#[test]
fn main_child_and_exec() {
    use OomVictim::*;
    let private = Some(false);
    let shared = Some(true);
    // Victim, root, main process known to the runtime, namespace (none: the container is in no snapshot yet), verdict.
    for (pid, root, main, shares, expected) in [
        (MAIN, root(MAIN, true, true), Some(MAIN), private, Main),
        (7, root(MAIN, true, true), Some(MAIN), private, Child),
        (7, root(7, false, true), Some(MAIN), private, Exec),
        (8, root(7, false, true), Some(MAIN), private, Exec),
        (7, None, Some(MAIN), private, Unknown),
        (MAIN, None, Some(MAIN), private, Main),
        // The runtime does not report the main process.
        (MAIN, root(MAIN, true, true), None, private, Main),
        (7, root(MAIN, true, true), None, private, Child),
        (7, root(7, false, true), None, private, Exec),
        // A shared namespace: the main process is no init, and its children have it above them.
        (MAIN, root(MAIN, false, true), Some(MAIN), shared, Main),
        (7, root(MAIN, false, true), Some(MAIN), shared, Child),
        (7, root(7, false, true), Some(MAIN), shared, Exec),
        (7, root(50, true, false), Some(MAIN), shared, Unknown),
        (7, root(7, false, true), None, shared, Unknown),
        (7, root(50, true, false), None, shared, Unknown),
        // No snapshot has the container.
        (MAIN, root(MAIN, true, true), None, None, Main),
        (7, root(MAIN, true, true), None, None, Child),
        (7, root(50, true, false), None, None, Unknown),
        (7, root(7, false, true), None, None, Unknown),
        (7, None, None, None, Unknown),
    ] {
        let snapshot = shares.map(|shares| snapshot(main, shares));
        let record = OomRecord { pid: Some(pid), root, ..record() };
        let found = verdict(&record, snapshot.as_ref());
        assert_eq!(found.victim, expected, "{pid} {root:?} {main:?} {shares:?}");
        assert_eq!(found.missing.contains(&OomEvidence::Relation), expected == Unknown);
    }
}

#[test]
fn in_the_hosts_pid_namespace_only_descent_from_the_main_process_is_proof() {
    for (pid, top, expected) in [(MAIN, MAIN, OomVictim::Main), (7, MAIN, OomVictim::Child), (7, 7, OomVictim::Unknown)]
    {
        let record = OomRecord { pid: Some(pid), root: root(top, false, true), host_pid_namespace: true, ..record() };
        assert_eq!(verdict(&record, Some(&snapshot(Some(MAIN), true))).victim, expected);
    }
}

#[test]
fn processes_of_no_container() {
    let of = |place, snapshot| {
        let record = OomRecord { place, ..record() };
        let found = verdict(&record, snapshot);
        (found.victim, found.pod.is_some(), found.container.is_some(), found.missing)
    };
    assert_eq!(of(Some(at(CgroupRole::Other)), None), (OomVictim::Other, false, false, vec![]));
    let unnamed = vec![OomEvidence::Pod];
    assert_eq!(of(Some(at(CgroupRole::Pod)), None), (OomVictim::Other, true, false, unnamed), "only the UID is known");
    let nothing = vec![OomEvidence::Pod, OomEvidence::Container, OomEvidence::Relation];
    assert_eq!(of(None, None), (OomVictim::Unknown, false, false, nothing));
    // The sandbox.
    let known = snapshot(Some(MAIN), false);
    let sandbox = CgroupPlace { container: Some("sandbox".into()), ..at(CgroupRole::Container) };
    assert_eq!(of(Some(sandbox), Some(&known)), (OomVictim::Other, true, false, vec![]));
}

#[test]
fn whose_limit() {
    let exceeded = |role| OomLimit::Exceeded { place: Some(at(role)), bytes: Some(5) };
    for (limit, scope, path) in [
        (exceeded(CgroupRole::Container), OomScope::Container, Some("/kubepods/burstable/poduid/id")),
        (exceeded(CgroupRole::Pod), OomScope::Pod, Some("/kubepods/burstable/poduid")),
        (exceeded(CgroupRole::QosClass), OomScope::QosClass, Some("/kubepods/burstable")),
        (exceeded(CgroupRole::AllPods), OomScope::NodeAllocatable, Some("/kubepods")),
        (exceeded(CgroupRole::InContainer), OomScope::OtherCgroup, Some("/kubepods/burstable/poduid/id/inner")),
        (exceeded(CgroupRole::Other), OomScope::OtherCgroup, Some("/system.slice/x.service")),
        (OomLimit::Exceeded { place: None, bytes: Some(5) }, OomScope::Unknown, None),
        (OomLimit::None, OomScope::Node, None),
        (OomLimit::Unknown, OomScope::Unknown, None),
    ] {
        let bytes = matches!(limit, OomLimit::Exceeded { .. }).then_some(5);
        let found = verdict(&OomRecord { limit, ..record() }, None);
        assert_eq!((found.scope, found.limit_cgroup.as_deref(), found.limit_bytes), (scope, path, bytes));
        assert_eq!(found.missing.contains(&OomEvidence::Scope), scope == OomScope::Unknown);
        let is_known = bytes.is_some() || scope == OomScope::Node;
        assert_eq!(found.missing.contains(&OomEvidence::LimitBytes), !is_known);
    }
}

#[test]
fn the_limits_of_a_container_are_in_two_cgroups_with_crun() {
    let scope = "/kubepods.slice/kubepods-pod1_2.slice/crio-id.scope";
    for (path, role, expected) in [
        (scope.to_owned(), CgroupRole::Container, OomScope::Container),
        (format!("{scope}/container"), CgroupRole::InContainer, OomScope::Container),
        // Cgroups that the container has made.
        (format!("{scope}/container/inner"), CgroupRole::InContainer, OomScope::OtherCgroup),
        (format!("{scope}/container/x.scope/container"), CgroupRole::InContainer, OomScope::OtherCgroup),
        (format!("{scope}/inner"), CgroupRole::InContainer, OomScope::OtherCgroup),
        ("/kubepods/pod1-2/id/container".to_owned(), CgroupRole::InContainer, OomScope::OtherCgroup),
    ] {
        let of = place(&path, role);
        let limit = OomLimit::Exceeded { place: Some(of.clone()), bytes: Some(5) };
        let found = verdict(&OomRecord { place: Some(of), limit, ..record() }, Some(&snapshot(Some(MAIN), false)));
        assert_eq!((found.scope, found.limit_cgroup.as_deref()), (expected, Some(path.as_str())));
        assert_eq!((found.victim, found.missing), (OomVictim::Child, vec![]), "{path}");
    }
}

#[test]
fn a_cgroup_that_is_gone_loses_nothing() {
    // The place comes from the index, which keeps removed cgroups; the rest from the record.
    let found = verdict(&record(), None);
    assert_eq!(found.scope, OomScope::Container);
    assert_eq!(
        found.container.map(|container| (container.id.to_string(), container.name)),
        Some(("id".to_owned(), String::new()))
    );
    assert_eq!(found.missing, [OomEvidence::Pod, OomEvidence::Container], "their names");
}

#[test]
fn counters_and_log_name_less() {
    let counter = OomRecord {
        is_timed: false,
        place: Some(at(CgroupRole::Container)),
        ..OomRecord::new(OomConfidence::Counter, KernelMoment(Instant::now()))
    };
    let snapshot = snapshot(Some(MAIN), false);
    let found = verdict(&counter, Some(&snapshot));
    assert_eq!(
        (found.victim, found.scope, found.confidence),
        (OomVictim::Unknown, OomScope::Unknown, OomConfidence::Counter)
    );
    use OomEvidence::*;
    assert_eq!(found.missing, [Process, Relation, Scope, LimitBytes, Memory, Time]);

    let log = OomRecord { source: OomConfidence::Log, root: None, ..record() };
    assert_eq!(verdict(&log, Some(&snapshot)).missing, [Relation]);
    let of_main = OomRecord { pid: Some(MAIN), ..log };
    let found = verdict(&of_main, Some(&snapshot));
    assert_eq!((found.victim, found.missing), (OomVictim::Main, vec![]));
}

#[test]
fn groups() {
    let of = |group, is_repeated| decide(&OomRecord { group, ..record() }, None, is_repeated, OomTime(0)).group;
    assert_eq!(
        (of(None, false), of(Some(3), false), of(Some(3), true)),
        (OomGroup::Single, OomGroup::Chosen, OomGroup::Member)
    );
}

#[test]
fn reasons_of_exits() {
    let none = ExitEvidence::default();
    let complete = |signalled| ExitEvidence { signalled: Some(signalled), main_killed: None, is_complete: true };
    let killed = |signalled| ExitEvidence { signalled, main_killed: Some(OomConfidence::Kernel), is_complete: true };
    let logged = ExitEvidence { signalled: None, main_killed: Some(OomConfidence::Log), is_complete: false };
    let counted = Metrics::new().render().unwrap();
    for (reason, code, evidence, expected) in [
        // The main process was killed.
        ("OOMKilled", 137, killed(Some(true)), None),
        ("Error", 137, killed(Some(true)), Some("OOMKilled")),
        ("", 137, killed(Some(true)), Some("OOMKilled")),
        ("Error", 137, logged, Some("OOMKilled")),
        ("Unknown", 255, killed(Some(true)), None),
        ("Error", 255, killed(Some(true)), Some("OOMKilled")),
        ("StartError", 128, killed(Some(true)), None),
        // A child was killed earlier; the container exits by itself or is killed from outside.
        ("OOMKilled", 0, none, Some("Completed")),
        ("OOMKilled", 0, complete(false), Some("Completed")),
        ("OOMKilled", 1, none, Some("Error")),
        ("OOMKilled", 143, complete(true), Some("Error")),
        ("OOMKilled", 137, complete(true), Some("Error")),
        // A shell returns 128 + 9 for its child that was killed.
        ("OOMKilled", 137, complete(false), Some("Error")),
        ("Error", 137, complete(false), None),
        // The main process had begun to exit when it was chosen.
        ("OOMKilled", 0, killed(Some(false)), Some("Completed")),
        // Evidence is missing: the runtime's reason stands.
        ("OOMKilled", 137, none, None),
        ("Error", 137, none, None),
        ("Completed", 0, complete(false), None),
        ("Error", 1, killed(None), None),
    ] {
        assert_eq!(corrected_reason(reason, code, evidence), expected, "{reason} {code} {evidence:?}");
        if let Some(to) = expected {
            let line = format!("keblet_oom_reasons_corrected_total{{from={reason:?},to={to:?}}} 0");
            assert!(counted.lines().any(|found| found == line), "an increase sees the first one: {line}");
        }
    }
}
