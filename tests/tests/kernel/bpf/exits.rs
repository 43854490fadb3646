//! Process exits and cgroups, as the probes report them.

use std::time::Duration;
use std::time::Instant;

use keblet::kernel::bpf::CgroupEvent;
use keblet::kernel::bpf::ExitStatus;
use keblet::kernel::bpf::KernelRecord;
use keblet::kernel::bpf::ProbeOutput;
use keblet::kernel::bpf::Records;
use keblet::kernel::clock::BootTime;
use keblet::kernel::pidfd;
use nix::sys::signal::Signal;

use crate::support::DEADLINE;
use crate::support::TestCgroup;
use crate::support::exit_of;
use crate::support::load;
use crate::support::machine_lacks;
use crate::support::next;

async fn created(records: &mut Records, name: &str) -> CgroupEvent {
    next(records, &format!("the creation of {name}"), |record| match record {
        KernelRecord::CgroupCreated(event) if event.path.ends_with(name) => Some(event),
        _ => None,
    })
    .await
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn exit_reports_code_and_times() {
    if machine_lacks().is_some() {
        return;
    }
    let cgroup = TestCgroup::new();
    let mut loaded = load(&cgroup.hierarchy).await;
    let before = BootTime::now().expect("a clock");
    let mut shell = cgroup.shell("exit 42");
    loaded.probes.watch_cgroup(cgroup.id(), true).expect("room");
    shell.go();
    let exit = exit_of(&mut loaded.records, shell.pid()).await;
    let after = BootTime::now().expect("a clock");
    assert_eq!(shell.wait(), 42);

    assert_eq!(exit.status, ExitStatus::Code(42));
    assert!(!exit.pid_ns_init);
    assert!(!exit.oom_victim);
    assert_eq!(exit.comm, "sh");
    assert_eq!(exit.cgroup, Some(cgroup.id()), "the cgroup in the hierarchy of containers");
    assert!(before <= exit.started && exit.started < exit.at && exit.at <= after, "{before:?} {exit:?} {after:?}");
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn signal_exit_is_reported_as_signal() {
    if machine_lacks().is_some() {
        return;
    }
    let cgroup = TestCgroup::new();
    let mut loaded = load(&cgroup.hierarchy).await;
    let shell = cgroup.shell("exit 0");
    loaded.probes.watch_cgroup(cgroup.id(), true).expect("room");
    shell.signal(Signal::SIGTERM);
    let exit = exit_of(&mut loaded.records, shell.pid()).await;
    assert_eq!(exit.status, ExitStatus::Signal(15));
    assert_eq!(exit.status.code(), 143);
}

/// A process whose first thread exits before the others: the process exits with the last one, and is reported once.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn process_exit_is_reported_with_its_last_thread() {
    if machine_lacks().is_some() {
        return;
    }
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        return keblet_skip::skip("python3, which starts the threads, is not installed");
    }
    let cgroup = TestCgroup::new();
    let mut loaded = load(&cgroup.hierarchy).await;
    loaded.probes.watch_cgroup(cgroup.id(), true).expect("room");
    let script = "exec python3 -c 'import ctypes, os, threading, time\n\
                  threading.Thread(target=lambda: (time.sleep(0.2), os._exit(5))).start()\n\
                  ctypes.CDLL(None).pthread_exit(None)'";
    let mut shell = cgroup.shell(script);
    shell.go();
    let exit = exit_of(&mut loaded.records, shell.pid()).await;
    assert_eq!(exit.status, ExitStatus::Code(5), "the code of the group, not of the first thread");
    assert!(exit.started < exit.at);
    assert!(exit.started.until(exit.at) >= Duration::from_millis(200), "reported when the last thread exited");
    assert_eq!(shell.wait(), 5);
}

/// The init process of a PID namespace, in a cgroup that only the kernel knows: it exits less than a millisecond after
/// its start, while the agent does not read records.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn short_lived_container_exit_is_reported() {
    if machine_lacks().is_some() {
        return;
    }
    let parent = TestCgroup::new();
    let mut loaded = load(&parent.hierarchy).await;
    loaded.probes.watch_cgroup(parent.id(), false).expect("room");

    let pod = parent.child("pod1");
    let name = "a".repeat(64);
    let container = pod.child(&name);
    // `unshare` itself exits in the cgroup too, but it is neither an init process nor watched.
    let mut shell = container.shell("exec unshare --pid --fork sh -c 'exit 7'");
    let outer = shell.pid();
    shell.go();
    assert_eq!(shell.wait(), 7);
    let (pod_id, container_id) = (pod.id(), container.id());
    drop(container);

    let records = &mut loaded.records;
    let pod_record = created(records, "pod1").await;
    assert_eq!((pod_record.id, pod_record.parent), (pod_id, parent.id()));
    let record = created(records, &name).await;
    assert_eq!((record.id, record.parent), (container_id, pod_id));
    assert_eq!(record.path, format!("{}/{name}", pod.path));

    let exit = next(records, "the exit of the init", |record| match record {
        KernelRecord::Exit(exit) => Some(exit),
        _ => None,
    })
    .await;
    assert!(exit.pid_ns_init);
    assert_ne!(exit.pid, outer);
    assert_eq!(exit.status, ExitStatus::Code(7));
    assert_eq!(exit.cgroup, Some(container_id));
    assert!(record.at <= exit.started, "the cgroup is reported before its processes");

    let removed = next(records, "the removal", |record| match record {
        KernelRecord::CgroupRemoved(event) => Some(event),
        other => panic!("an unwatched process was reported: {other:?}"),
    })
    .await;
    assert_eq!(removed.id, container_id);
    assert!(!loaded.probes.watches_cgroup(container_id), "a removed cgroup frees its place");
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn unwatched_cgroups_report_nothing() {
    if machine_lacks().is_some() {
        return;
    }
    let watched = TestCgroup::new();
    let other = TestCgroup::new();
    let mut loaded = load(&watched.hierarchy).await;
    loaded.probes.watch_cgroup(watched.id(), true).expect("room");
    let _unheard = other.child("unheard");
    let mut shell = other.shell("exec unshare --pid --fork sh -c 'exit 1'");
    shell.go();
    shell.wait();
    // Records of the others would be received before this one.
    let mut last = watched.shell("exit 0");
    last.go();
    let record = tokio::time::timeout(DEADLINE, loaded.records.next()).await.expect("in time").expect("readable");
    let ProbeOutput::Record(KernelRecord::Exit(exit)) = record else { panic!("not an exit: {record:?}") };
    assert_eq!(exit.pid, last.pid());
}

/// Cgroups that exist already when the agent starts are watched as well.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn cgroup_tree_is_watched_with_its_processes() {
    if machine_lacks().is_some() {
        return;
    }
    let parent = TestCgroup::new();
    let pod = parent.child("pod");
    let container = pod.child("container");
    let loaded = load(&parent.hierarchy).await;
    let found = loaded.probes.watch_tree(&parent.hierarchy, &parent.path).expect("readable");
    let mut ids: Vec<_> = found.iter().map(|(id, _)| *id).collect();
    ids.sort();
    let mut expected = vec![parent.id(), pod.id(), container.id()];
    expected.sort();
    assert_eq!(ids, expected);
    for id in expected {
        assert!(loaded.probes.watches_cgroup(id));
    }
    // A second walk finds them watched and changes nothing.
    assert_eq!(loaded.probes.watch_tree(&parent.hierarchy, &parent.path).expect("readable").len(), 3);
    loaded.probes.unwatch_cgroup(pod.id());
    assert!(!loaded.probes.watches_cgroup(pod.id()));
    assert!(loaded.probes.watch_tree(&parent.hierarchy, "/keblet-no-such-cgroup").is_err());
}

/// The order in the kernel: first the record, then the readable pidfd, when the process is gone; the agent sees both.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn exit_record_precedes_pidfd_readiness() {
    if machine_lacks().is_some() {
        return;
    }
    let cgroup = TestCgroup::new();
    let mut loaded = load(&cgroup.hierarchy).await;
    loaded.probes.watch_cgroup(cgroup.id(), true).expect("room");
    let mut delays = Vec::new();
    for _ in 0..20 {
        let mut shell = cgroup.shell("exit 3");
        let pinned = pidfd::pin(shell.pid()).expect("the shell waits");
        assert_eq!(pinned.cgroup_path(&cgroup.hierarchy), Some(cgroup.path.as_str()));
        shell.go();
        tokio::time::timeout(DEADLINE, pinned.gone()).await.expect("it ends").expect("readable");
        let gone = BootTime::now().expect("a clock");
        let started = Instant::now();
        let exit = exit_of(&mut loaded.records, shell.pid()).await;
        assert!(exit.at < gone);
        delays.push((exit.at.until(gone), started.elapsed()));
    }
    delays.sort();
    let (to_pidfd, to_record) = delays[delays.len() / 2];
    println!("median: exit to pidfd readable {to_pidfd:?}; then to the record, which was there already, {to_record:?}");
    assert!(to_pidfd < Duration::from_millis(50), "pidfds are late: {to_pidfd:?}");
}
