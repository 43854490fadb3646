//! Evidence from records, counters and lines of the log, on files that look like a cgroup hierarchy.

use std::fs;

use super::*;
use crate::kernel::bpf::OomProcess;
use crate::kernel::clock::BootTime;
use crate::model::CgroupRole;
use crate::model::OomRoot;

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A v2 hierarchy with one container.
struct Node {
    dir: tempfile::TempDir,
    source: OomSource,
    index: ContainerIndex,
    container: CgroupId,
    path: String,
}

fn node() -> Node {
    let dir = tempfile::tempdir().unwrap();
    let hierarchy =
        Hierarchy { kind: HierarchyKind::Unified, number: 0, mount: dir.path().to_owned(), root: "/".to_owned() };
    let path = format!("/kubepods/burstable/poduid/{ID}");
    fs::create_dir_all(dir.path().join(&path[1..])).unwrap();
    let (mut index, mut source) = (ContainerIndex::new(), OomSource::new(hierarchy.clone()));
    let container = hierarchy.id_of(&path).unwrap();
    index.cgroup_created(container, None, &path);
    source.created(container);
    Node { dir, source, index, container, path }
}

impl Node {
    fn count(&self, kills: u64) {
        self.count_groups(kills, 0);
    }

    fn count_groups(&self, kills: u64, groups: u64) {
        let file = self.dir.path().join(&self.path[1..]).join("memory.events.local");
        fs::write(file, format!("low 0\noom 9\noom_kill {kills}\noom_group_kill {groups}\n")).unwrap();
    }

    fn on_record(&mut self, oom: &Oom) -> Vec<OomRecord> {
        self.source.on_record(&self.index, oom, KernelMoment(Instant::now()))
    }

    fn reconcile(&mut self) -> usize {
        let counters = self.source.counters(&self.index);
        self.source.reconcile(&self.index, counters).len()
    }

    /// A record of a process in the container, whose own limit was exceeded.
    fn oom(&self, pid: u32, kills: u64) -> Oom {
        Oom {
            pid,
            at: BootTime(1),
            cgroup: Some(self.container),
            watched: true,
            limit: bpf::OomLimit::Exceeded { cgroup: self.container, kib: 1024 },
            kills: Some(kills),
            group: None,
            root: Some(OomRoot { pid: 1, is_init: true, in_cgroup: true }),
            host_pid_namespace: false,
            victim: Some(OomProcess {
                started: BootTime(0),
                comm: "hungry".to_owned(),
                oom_score_adj: 0,
                pid_ns_init: false,
            }),
            memory: Some(bpf::OomMemory {
                total_vm_kib: 9,
                anon_kib: 1,
                file_kib: 2,
                shmem_kib: 3,
                page_tables_kib: 4,
            }),
        }
    }
}

#[tokio::test]
async fn a_record_names_cgroup_and_limit() {
    let mut node = node();
    let found = node.on_record(&node.oom(7, 1));
    let [record] = &found[..] else { panic!("{found:?}") };
    assert_eq!((record.pid, record.comm.as_str(), record.source), (Some(7), "hungry", OomConfidence::Kernel));
    assert_eq!(record.container().map(|id| id.as_str()), Some(ID));
    let OomLimit::Exceeded { place: Some(place), bytes: Some(1_048_576) } = &record.limit else { panic!("{record:?}") };
    assert_eq!(place.role, CgroupRole::Container);
    assert_eq!(record.memory.map(|memory| memory.shmem_bytes), Some(3072));
}

#[tokio::test]
async fn a_limit_above_the_watched_cgroups_is_found_by_its_id() {
    let mut node = node();
    let pods = node.source.hierarchy.id_of("/kubepods").unwrap();
    for (cgroup, role) in [(pods, Some(CgroupRole::AllPods)), (CgroupId(u64::MAX), None)] {
        let limit = bpf::OomLimit::Exceeded { cgroup, kib: u64::MAX / 1024 };
        let oom = Oom { limit, kills: None, ..node.oom(7, 1) };
        let found = node.on_record(&oom);
        let OomLimit::Exceeded { place, bytes: None } = &found[0].limit else { panic!("{found:?}") };
        assert_eq!(place.as_ref().map(|place| place.role), role);
    }
}

#[tokio::test]
async fn a_removed_cgroup_is_still_named() {
    let mut node = node();
    node.index.cgroup_removed(node.container);
    fs::remove_dir_all(node.dir.path().join("kubepods")).unwrap();
    let found = node.on_record(&node.oom(7, 1));
    assert_eq!(found[0].container().map(|id| id.as_str()), Some(ID));
    assert!(matches!(found[0].limit, OomLimit::Exceeded { place: Some(_), .. }));
}

#[tokio::test]
async fn a_process_that_was_exiting_is_no_victim() {
    let mut node = node();
    assert_eq!(node.on_record(&node.oom(7, 0)), []);
    assert!(!node.source.is_victim(&marked_exit(7)));
    assert!(node.source.is_victim(&marked_exit(7)), "another process with that pid");
}

/// The exit of a process that the OOM killer has marked.
fn marked_exit(pid: u32) -> Exit {
    Exit {
        pid,
        started: BootTime(0),
        at: BootTime(2),
        status: crate::kernel::bpf::ExitStatus::Code(0),
        cgroup: None,
        pid_ns_init: true,
        oom_victim: true,
        comm: String::new(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_pid_that_is_used_again_is_that_of_another_process() {
    let mut node = node();
    assert_eq!(node.on_record(&node.oom(7, 0)), [], "it was exiting, and its exit is never recorded");
    assert_eq!(node.on_record(&node.oom(7, 1)).len(), 1);
    assert!(node.source.is_victim(&marked_exit(7)));
    let day = 24 * 3600;
    let line = |days: u64| OomLogEntry {
        at_micros: days * day * 1_000_000,
        pid: 7,
        comm: "hungry".to_owned(),
        memory_kib: None,
        cgroup: Some(node.path.clone()),
        limit: OomLogLimit::Unknown,
        group: None,
    };
    let (soon, weeks) = (line(1), line(30));
    let mut logged = |entry: &OomLogEntry| node.source.on_log(entry.clone(), KernelMoment(Instant::now())).is_some();
    tokio::time::advance(Duration::from_secs(1800)).await;
    assert!(!logged(&weeks), "clocks drift apart");
    tokio::time::advance(Duration::from_secs(day)).await;
    assert!(logged(&soon), "the pid was used again");
    assert!(!logged(&soon), "the same line");
}

#[tokio::test]
async fn each_process_of_a_group_is_reported_once() {
    let mut node = node();
    node.count(0);
    // The second of three processes is chosen, and counted once more before the third one.
    for (pid, kills) in [(8, 1), (7, 2), (9, 4)] {
        let oom = Oom { group: Some(node.container), ..node.oom(pid, kills) };
        let pids: Vec<_> = node.on_record(&oom).iter().map(|record| record.pid).collect();
        assert_eq!(pids, [Some(pid)]);
    }
    node.count_groups(4, 1);
    assert_eq!(node.reconcile(), 0);
}

#[tokio::test]
async fn the_only_process_of_a_group_is_counted_though_it_ends_at_once() {
    let mut node = node();
    node.count(0);
    node.source.begin(&node.index);
    node.count_groups(1, 1);
    assert_eq!(node.reconcile(), 1, "the kernel has not come to it again");
    node.count_groups(3, 2);
    assert_eq!(node.reconcile(), 1, "it has");
    node.count_groups(3, 2);
    assert_eq!(node.reconcile(), 0);
}

#[tokio::test]
async fn lost_records_are_counted_once() {
    let mut node = node();
    node.count(0);
    assert_eq!(node.on_record(&node.oom(7, 1)).len(), 1);
    node.count(4);
    assert_eq!(node.reconcile(), 3, "the counter is the second witness");
    assert_eq!(node.reconcile(), 0);
    let found = node.on_record(&node.oom(8, 7));
    let sources: Vec<OomConfidence> = found.iter().map(|record| record.source).collect();
    use OomConfidence::*;
    assert_eq!(sources, [Counter, Counter, Kernel], "those before it are known from the counter");
    assert!(found.iter().all(|record| record.container().is_some()));
    // The log knows more of one of the lost.
    node.count(9);
    let line = |pid, cgroup: &str| OomLogEntry {
        at_micros: 0,
        pid,
        comm: "hungry".to_owned(),
        memory_kib: Some([1, 2, 3]),
        cgroup: Some(cgroup.to_owned()),
        limit: OomLogLimit::Cgroup("/kubepods".to_owned(), Some(1)),
        group: None,
    };
    let (moment, path) = (KernelMoment(Instant::now()), node.path.clone());
    assert_eq!(node.source.on_log(line(8, &path), moment), None, "the probe has recorded it");
    let logged = node.source.on_log(line(9, &path), moment).expect("a kill");
    assert_eq!((logged.source, logged.container().map(|id| id.as_str())), (Log, Some(ID)));
    assert!(matches!(logged.limit, OomLimit::Exceeded { bytes: Some(1024), .. }));
    assert_eq!(node.reconcile(), 1);
}

/// The log has paths of the machine, whose cgroup of the node is the root that the node sees.
#[tokio::test]
async fn a_kill_in_a_node_that_is_a_container_is_reported_once() {
    let mut node = node();
    node.count(1);
    let entry = OomLogEntry {
        at_micros: 0,
        pid: 9,
        comm: "hungry".to_owned(),
        memory_kib: None,
        cgroup: Some(format!("/docker/{}{}", ID.replace('0', "f"), node.path)),
        limit: OomLogLimit::Unknown,
        group: None,
    };
    let record = node.source.on_log(entry, KernelMoment(Instant::now())).expect("a kill");
    let found = (record.pod().map(|uid| uid.as_str()), record.container().map(|id| id.as_str()));
    assert_eq!(found, (Some("uid"), Some(ID)));
    assert_eq!(node.reconcile(), 0, "the counter contains the kill of the log");
}

/// The log of a kernel without the line of the cgroups has pids of the machine.
#[tokio::test]
async fn a_pid_of_another_namespace_names_no_cgroup() {
    let mut node = node();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = node.source.hierarchy.path_in(&own).map(str::to_owned);
    for (sees_kernel_pids, expected) in [(true, own), (false, None)] {
        node.source.sees_kernel_pids = sees_kernel_pids;
        assert_eq!(node.source.cgroup_of(std::process::id()), expected);
    }
}

#[test]
fn counters_of_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n").unwrap();
    fs::write(dir.path().join("memory.events.local"), "oom_kill x\n").unwrap();
    let of = |kind| Hierarchy { kind, number: 0, mount: dir.path().to_owned(), root: "/".to_owned() };
    assert_eq!(kills_of(&of(HierarchyKind::V1(Controller::Memory)), "/"), Some(3));
    assert_eq!(kills_of(&of(HierarchyKind::V1(Controller::Pids)), "/"), None);
    assert_eq!(kills_of(&of(HierarchyKind::Unified), "/"), None, "malformed");
    assert_eq!(kills_of(&of(HierarchyKind::Unified), "/gone"), None);
}
