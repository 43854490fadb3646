//! Full ring buffers and maps: losses are counted and reported.

use keblet::kernel::bpf::CgroupId;
use keblet::kernel::bpf::Losses;
use keblet::kernel::bpf::Options;
use keblet::kernel::bpf::ProbeOutput;

use crate::support::DEADLINE;
use crate::support::TestCgroup;
use crate::support::load_with;
use crate::support::machine_lacks;

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn lost_records_are_counted_and_reported_once() {
    if machine_lacks().is_some() {
        return;
    }
    let cgroup = TestCgroup::new();
    let mut options = Options::new(cgroup.hierarchy.clone());
    options.exits_ring = Some(4096);
    let mut loaded = load_with(options).await;
    loaded.probes.watch_cgroup(cgroup.id(), true).expect("room");
    assert_eq!(loaded.probes.losses(), Losses::default());

    let processes = 200;
    let mut shell = cgroup.shell(&format!("for i in $(seq {processes}); do /bin/true; done; exit 0"));
    shell.go();
    assert_eq!(shell.wait(), 0);

    let mut received = 0;
    let lost = loop {
        let next = tokio::time::timeout(DEADLINE, loaded.records.next()).await;
        match next.expect("losses are reported").expect("readable") {
            ProbeOutput::Record(_) => received += 1,
            ProbeOutput::Lost(losses) => break losses,
        }
    };
    assert!(received > 0, "the buffer held some");
    assert_eq!(lost, loaded.probes.losses());
    assert_eq!((lost.cgroups, lost.watches), (0, 0));
    // Every process, `seq` and the shells that ran them: `true` 200 times, `seq`, its subshell or not, the shell.
    assert!(received + lost.exits >= processes + 2, "{received} received, {} lost", lost.exits);

    // The next process is reported again, and earlier losses are not.
    let mut shell = cgroup.shell("exit 0");
    shell.go();
    let next = tokio::time::timeout(DEADLINE, loaded.records.next()).await.expect("in time").expect("readable");
    assert!(matches!(next, ProbeOutput::Record(_)), "{next:?}");
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn full_map_of_cgroups_is_an_error() {
    if machine_lacks().is_some() {
        return;
    }
    let cgroup = TestCgroup::new();
    let loaded = load_with(Options::new(cgroup.hierarchy.clone())).await;
    // Numbers that no cgroup has.
    let first = 1 << 60;
    let watch = |id| loaded.probes.watch_cgroup(CgroupId(id), false);
    let refused = (first..).find_map(|id| watch(id).err().map(|error| (id, error)));
    let (id, error) = refused.expect("the map has a limit");
    assert_eq!(error.to_string(), format!("cannot watch cgroup {id}: the map of {} entries is full", id - first));
    loaded.probes.unwatch_cgroup(CgroupId(first));
    watch(id).expect("an entry was freed");
}
