//! A real OOM kill in a cgroup of the test.

use keblet::cgroups::Controller;
use keblet::cgroups::HierarchyKind;
use keblet::kernel::bpf::Exit;
use keblet::kernel::bpf::ExitStatus;
use keblet::kernel::bpf::KernelRecord;
use keblet::kernel::bpf::Oom;
use keblet::kernel::bpf::OomLimit;

use crate::support::TestCgroup;
use crate::support::load;
use crate::support::machine_lacks;
use crate::support::next;

/// Allocates memory until the kernel kills it: `tail` keeps the last line, which never ends.
const HOG: &str = "tail /dev/zero";
const LIMIT: u64 = 24 << 20;

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn oom_victim_is_reported_with_cgroup_and_limit() {
    if machine_lacks().is_some() {
        return;
    }
    let pod = TestCgroup::new();
    if pod.hierarchy.kind == HierarchyKind::V1(Controller::Pids) {
        return keblet_skip::skip("the node has no memory controller");
    }
    let mut loaded = load(&pod.hierarchy).await;
    loaded.probes.watch_cgroup(pod.id(), false).expect("room");
    // The limit is in the pod's cgroup, the victim in the container's.
    pod.limit_memory(LIMIT);
    let container = pod.child("container");
    // A child of the main process is killed, the main process keeps running.
    let mut shell = container.shell(&format!("{HOG}; exit 9"));
    shell.go();

    let oom: Oom = next(&mut loaded.records, "the victim", |record| match record {
        KernelRecord::Oom(oom) if oom.cgroup == Some(container.id()) => Some(oom),
        _ => None,
    })
    .await;
    assert!(oom.watched);
    assert_ne!(oom.pid, shell.pid(), "the child was chosen, not the shell");
    let limit = OomLimit::Exceeded { cgroup: pod.id(), kib: LIMIT >> 10 };
    assert_eq!(oom.limit, limit, "the pod's limit fired, not the container's");
    assert_eq!((oom.kills, oom.group), (Some(1), None));
    let root = oom.root.expect("readable");
    assert_eq!(
        (root.pid, root.is_init, root.in_cgroup),
        (shell.pid(), false, true),
        "its parent is outside of the cgroup"
    );
    assert!(oom.host_pid_namespace);
    let victim = oom.victim.expect("this kernel passes the task");
    assert_eq!(victim.comm, "tail");
    assert!(!victim.pid_ns_init);
    assert_eq!(victim.oom_score_adj, own_score());
    let memory = oom.memory.expect("readable");
    assert!(memory.anon_kib > 8 << 10, "{memory:?}");
    assert!(memory.anon_kib <= LIMIT >> 10, "{memory:?}");
    assert!(memory.total_vm_kib >= memory.anon_kib, "{memory:?}");
    assert!(memory.page_tables_kib > 0, "{memory:?}");

    let exit: Exit = next(&mut loaded.records, "the victim's exit", |record| match record {
        KernelRecord::Exit(exit) => Some(exit),
        _ => None,
    })
    .await;
    assert_eq!(exit.pid, oom.pid);
    assert!(exit.oom_victim);
    assert_eq!(exit.status, ExitStatus::Signal(9));
    assert_eq!(exit.started, victim.started);
    assert!(oom.at < exit.at);
    assert_eq!(shell.wait(), 9);

    let stalls = loaded.probes.stalls(container.id()).expect("watched");
    assert!(stalls.count > 0, "memory was reclaimed before the kill: {stalls:?}");
    assert!(!stalls.time.is_zero());
    assert_eq!(loaded.probes.stalls(pod.id()).expect("watched").count, 0, "no process stalled in the pod's own cgroup");
}

fn own_score() -> i32 {
    let text = std::fs::read_to_string("/proc/self/oom_score_adj").expect("readable");
    text.trim().parse().expect("a number")
}
