use std::os::unix::fs::MetadataExt as _;
use std::sync::Mutex;

use super::*;
use crate::cgroups::Hierarchy;
use crate::cgroups::HierarchyKind;
use crate::cgroups::Layout;
use crate::kernel::bpf::Stalls;
use crate::observe::record::StallCause;
use crate::pressure::StallCounters;

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A cgroup v2 tree of files.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, cgroup: &str, files: &[(&str, &str)]) {
        let folder = self.0.path().join(cgroup);
        fs::create_dir_all(&folder).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }

    fn id(&self, cgroup: &str) -> CgroupId {
        CgroupId(fs::metadata(self.0.path().join(cgroup)).unwrap().ino())
    }

    fn hierarchy(&self) -> Hierarchy {
        let mount = self.0.path().to_owned();
        Hierarchy { kind: HierarchyKind::Unified, number: 0, mount, root: "/".to_owned() }
    }

    fn sampler(&self) -> Sampler {
        let layout = Layout::V2 { mount: self.0.path().to_owned() };
        let containers = Some(self.hierarchy());
        Sampler::new(Hierarchies { layout, containers, limits_swap: false }, "/".to_owned(), None)
    }
}

/// Stalls by cgroup, as the probes count them.
#[derive(Default)]
struct Counted(Mutex<HashMap<CgroupId, Stalls>>);

impl Counted {
    fn set(&self, id: CgroupId, count: u64) {
        self.0.lock().unwrap().insert(id, Stalls { count, time: Duration::from_secs(count) });
    }
}

impl StallCounters for Counted {
    fn stalls(&self, id: CgroupId) -> Option<Stalls> {
        self.0.lock().unwrap().get(&id).copied()
    }
}

fn target(uid: &str) -> Target {
    let pod = PodName { namespace: "ns".into(), name: uid.into(), uid: uid.into() };
    Target { pod, containers: vec![("main".to_owned(), ID.to_owned())] }
}

#[test]
fn pods_are_measured_wherever_their_cgroups_are() {
    let tree = Tree::new();
    tree.write(
        "x/kubepods/burstable/poda",
        &[
            ("memory.current", "1000\n"),
            ("memory.max", "2000\n"),
            ("memory.events", "oom_kill 3\n"),
            ("memory.pressure", "some avg10=1.00 avg60=0 avg300=0 total=1000000\nfull avg10=0.5 total=5\n"),
        ],
    );
    tree.write(&format!("x/kubepods/burstable/poda/{ID}"), &[("memory.events", "oom_kill 2\n")]);
    let mut sampler = tree.sampler();
    let measurement = sampler.measure(&[target("a"), target("unknown")]);
    let [pod] = &measurement.pods[..] else { panic!("{measurement:?}") };
    assert_eq!((pod.memory_bytes, pod.memory_limit_bytes, pod.cpu), (Some(1000), Some(2000), None));
    assert_eq!(pod.memory.unwrap().some.total_seconds, 1.0);
    assert_eq!(pod.reclaim, None, "there is no probe");
    let counted = &measurement.oom_kills[0];
    assert_eq!((counted.of_pod, &counted.of_containers[..]), (Some(3), &[("main".into(), ID.into(), 2)][..]));
    assert!(measurement.stalls.is_empty(), "one measurement has no rates");
    let node = measurement.node.unwrap();
    assert!(node.memory_bytes.unwrap() > 0 && node.memory_limit_bytes > node.memory_bytes);
}

/// crun makes a cgroup `container` in the scope of a container, and starts the processes in it.
#[test]
fn stalls_of_processes_below_a_containers_cgroup_are_the_pods() {
    let tree = Tree::new();
    let scope = |id: &str| format!("kubepods.slice/kubepods-poda.slice/crio-{id}.scope");
    let (first, second) = (scope(ID), scope(&ID.replace('0', "f")));
    tree.write(&format!("{first}/container"), &[]);
    let (mut sampler, counted) = (tree.sampler(), Arc::new(Counted::default()));
    sampler.stalls = Some(ReclaimStalls::new(counted.clone(), tree.hierarchy()));
    let stalls = |sampler: &mut Sampler, target: &Target| {
        let reclaim = sampler.measure(std::slice::from_ref(target)).pods[0].reclaim.unwrap();
        (reclaim.stalls, reclaim.total_seconds)
    };
    let mut pod = target("a");
    counted.set(tree.id(&first), 0);
    counted.set(tree.id(&format!("{first}/container")), 3);
    assert_eq!(stalls(&mut sampler, &pod), (3, 3.0));
    counted.set(tree.id(&format!("{first}/container")), 5);
    counted.set(tree.id(&first), 1);
    assert_eq!(stalls(&mut sampler, &pod), (6, 6.0));
    // The container is restarted: what its cgroups have counted is not lost.
    tree.write(&format!("{second}/container"), &[]);
    counted.set(tree.id(&format!("{second}/container")), 2);
    pod.containers[0].1 = ID.replace('0', "f");
    sampler.searched = None;
    assert_eq!(stalls(&mut sampler, &pod), (8, 8.0));
}

#[test]
fn two_measurements_yield_rates_and_causes() {
    let tree = Tree::new();
    let pressure = |total: u64| format!("some avg10=9.00 avg60=0.00 avg300=0.00 total={total}\n");
    tree.write("kubepods/poda", &[("memory.pressure", &pressure(0)), ("memory.current", "0\n")]);
    tree.write("kubepods/podb", &[("memory.current", "0\n")]);
    let mut sampler = tree.sampler();
    let targets = [target("a"), target("b")];
    sampler.measure(&targets);
    // The time of the first measurement is moved back instead of waiting.
    sampler.taken = sampler.taken.and_then(|taken| taken.checked_sub(Duration::from_secs(10)));
    tree.write("kubepods/poda", &[("memory.pressure", &pressure(3_000_000))]);
    tree.write("kubepods/podb", &[("memory.current", "52428800\n")]);
    let measurement = sampler.measure(&targets);
    let [stall] = &measurement.stalls[..] else { panic!("{measurement:?}") };
    assert_eq!((stall.cause, stall.by.as_ref().unwrap().name.as_str()), (StallCause::OtherPod, "b"));
    assert!((29.0..=30.0).contains(&stall.percent), "{stall:?}");
}

#[test]
fn rates_are_over_the_time_between_measurements() {
    let tree = Tree::new();
    let pressure = |seconds: u64| format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={}\n", seconds * 1_000_000);
    let cpu = |used: u64, throttled: u64| format!("usage_usec {used}000000\nthrottled_usec {throttled}000000\n");
    let write = |waited: [u64; 3], used: u64, throttled: u64, hits: u64, bytes: u64| {
        let [cpu_wait, memory_wait, io_wait] = waited.map(pressure);
        tree.write("kubepods/poda", &[("cpu.pressure", &cpu_wait), ("cpu.stat", &cpu(0, throttled))]);
        let events = format!("high 0\nmax {hits}\n");
        tree.write("kubepods/podb", &[("memory.pressure", &memory_wait), ("memory.events", &events)]);
        tree.write("kubepods/podc", &[("io.pressure", &io_wait)]);
        let moved = format!("8:0 rbytes={bytes} wbytes=0 rios=1 wios=0\n");
        tree.write("kubepods/podd", &[("cpu.stat", &cpu(used, 0)), ("io.stat", &moved)]);
    };
    let (mut sampler, targets) = (tree.sampler(), ["a", "b", "c", "d"].map(target));
    write([100, 100, 100], 1000, 100, 1000, 1 << 30);
    assert!(sampler.measure(&targets).pods.iter().all(|pod| pod.cpus.is_none()));
    // The time of the first measurement is moved back instead of waiting.
    sampler.taken = sampler.taken.and_then(|taken| taken.checked_sub(Duration::from_secs(100)));
    write([140, 130, 120], 1200, 130, 1007, (1 << 30) + (50 << 20));
    let measurement = sampler.measure(&targets);
    let cpus = measurement.pods[3].cpus.unwrap();
    assert!((1.9..=2.0).contains(&cpus), "{cpus}");
    let stalls = measurement.stalls.iter();
    let found =
        stalls.map(|stall| (stall.pod.name.as_str(), stall.percent.round(), stall.cause, stall.evidence.as_str()));
    assert_eq!(
        found.collect::<Vec<_>>(),
        [
            ("a", 40.0, StallCause::OwnLimit, "used up its CPU quota 30 % of the time"),
            ("b", 30.0, StallCause::OwnLimit, "reached its memory limit 7 times in 100 s"),
            ("c", 20.0, StallCause::OtherPod, "moved 50Mi in 100 s"),
        ]
    );
}

#[test]
fn cgroups_that_vanish_are_measured_no_more() {
    let tree = Tree::new();
    tree.write("kubepods/poda", &[("memory.current", "5\n")]);
    let mut sampler = tree.sampler();
    sampler.measure(&[target("a")]);
    fs::remove_dir_all(tree.0.path().join("kubepods")).unwrap();
    let gone = sampler.measure(&[target("a")]);
    assert_eq!(gone.pods[0].memory_bytes, None);
    assert_eq!(gone.oom_kills[0].of_containers, []);
    assert!(sampler.measure(&[]).pods.is_empty());
    assert!(sampler.previous.is_empty());
}

/// A new pod causes a search, by which the cgroup of an ended pod is known to be gone before it is read.
#[test]
fn what_was_measured_of_a_pod_ends_with_its_cgroup() {
    let tree = Tree::new();
    tree.write("kubepods/poda", &[("memory.current", "5\n"), ("memory.pressure", "some avg10=9.00 total=5\n")]);
    let mut sampler = tree.sampler();
    assert_eq!(sampler.measure(&[target("a")]).pods[0].memory_bytes, Some(5));
    fs::remove_dir_all(tree.0.path().join("kubepods/poda")).unwrap();
    tree.write("kubepods/podb", &[("memory.current", "7\n")]);
    sampler.searched = None;
    let targets = [target("a"), target("b")];
    let measurement = sampler.measure(&targets);
    let [gone, new] = &measurement.pods[..] else { panic!("{measurement:?}") };
    assert_eq!((gone.pod.as_ref().unwrap().uid.as_str(), gone.memory_bytes, gone.memory), ("a", None, None));
    assert_eq!(new.memory_bytes, Some(7));
    assert_eq!(sampler.measure(&targets).pods.len(), 1, "once");
}

#[test]
fn the_machine_is_read_from_its_tables() {
    assert_eq!(node_memory("MemTotal:  10 kB\nMemFree: 1 kB\nMemAvailable:   4 kB\n"), Some((6 * 1024, 10 * 1024)));
    assert_eq!(node_memory("MemTotal: 10 kB\n"), None);
    let stat = "cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 5 0 5 35 5 0 0 0 5 5\n";
    assert_eq!(busy_and_total(stat), Some((20, 50)));
    assert_eq!(cpus((20, 50), (40, 60)), Some(2.0));
    assert_eq!(cpus((20, 50), (10, 40)), None, "counters that go backwards");
    assert_eq!(busy_and_total("what"), None);
}
