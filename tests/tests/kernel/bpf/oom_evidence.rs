//! Evidence of real OOM kills in a tree of cgroups like that of pods: place, limit, relation to the main process, lost
//! records, the kernel log.

use std::path::Path;
use std::sync::Arc;

use keblet::cgroups::Controller;
use keblet::cgroups::HierarchyKind;
use keblet::events::ExitFacts;
use keblet::events::Hint;
use keblet::events::kernel;
use keblet::events::kernel::KernelOptions;
use keblet::events::oom_fallback;
use keblet::events::oom_fallback::FallbackOptions;
use keblet::events::sensors::Sensor;
use keblet::events::sensors::SensorState;
use keblet::events::sensors::SensorStates;
use keblet::kernel::kmsg::KMSG;
use keblet::metrics::Metrics;
use keblet::model::OomConfidence;
use keblet::model::OomRecord;
use keblet::model::OomScope;
use keblet::model::OomTime;
use keblet::model::OomVerdict;
use keblet::model::OomVictim;
use keblet::oom::verdict::decide;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;

use crate::support::DEADLINE;
use crate::support::TestCgroup;
use crate::support::machine_lacks;

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const LIMIT: u64 = 24 << 20;
/// Allocates memory until the kernel kills it.
const HOG: &str = "tail /dev/zero";

/// Cgroups of a Burstable pod with one container.
struct Tree {
    container: TestCgroup,
    pod: TestCgroup,
    class: TestCgroup,
    pods: TestCgroup,
    root: TestCgroup,
}

impl Tree {
    /// `None` where the machine cannot run the test.
    fn new() -> Option<Self> {
        if machine_lacks().is_some() {
            return None;
        }
        let root = TestCgroup::new();
        if root.hierarchy.kind == HierarchyKind::V1(Controller::Pids) {
            keblet_skip::skip("the node has no memory controller");
            return None;
        }
        let pods = root.child("kubepods");
        let class = pods.child("burstable");
        let pod = class.child("poduid");
        let container = pod.child(ID);
        Some(Self { container, pod, class, pods, root })
    }
}

/// The sensors of a tree.
struct Sensors {
    hints: mpsc::Receiver<Hint>,
    /// Fills the channel.
    sender: mpsc::Sender<Hint>,
    metrics: Arc<Metrics>,
    _shutdown: DropGuard,
}

impl Sensors {
    async fn start(tree: &Tree, capacity: usize, exits_ring: Option<u32>) -> Self {
        let (sender, hints) = mpsc::channel(capacity);
        let (sensor_states, shutdown, metrics) = (SensorStates::default(), CancellationToken::new(), Metrics::new());
        let options = KernelOptions {
            cgroup_root: tree.root.path.clone(),
            btf: keblet::kernel::btf::VMLINUX.into(),
            log: KMSG.into(),
            exits_ring,
            announce_containers: false,
            metrics: metrics.clone(),
        };
        let hierarchy = tree.root.hierarchy.clone();
        let loaded = kernel::start(options, hierarchy, sender.clone(), sensor_states.clone(), shutdown.clone()).await;
        let forwarding = loaded.map(|(_, forwarding)| tokio::spawn(forwarding));
        assert!(
            forwarding.is_some() && sensor_states.get(Sensor::Oom) == Some(SensorState::Up),
            "{:?}",
            sensor_states.report()
        );
        Self { hints, sender, metrics, _shutdown: shutdown.drop_guard() }
    }

    async fn next(&mut self) -> Hint {
        let next = tokio::time::timeout(DEADLINE, self.hints.recv()).await;
        next.expect("a hint in time").expect("the sensors run")
    }

    /// The next evidence of a kill in the tree: others may happen on the machine.
    async fn kill(&mut self) -> OomRecord {
        loop {
            if let Hint::Oom(record) = self.next().await
                && record.container().is_some_and(|id| id.as_str() == ID)
            {
                return *record;
            }
        }
    }

    /// The next evidence of a kill of [`HOG`]. A process that starts beside it can be killed too, while the kernel has not
    /// yet got back all of its memory.
    async fn kill_of_hog(&mut self) -> OomRecord {
        loop {
            let record = self.kill().await;
            if record.comm == "tail" {
                return record;
            }
        }
    }
}

fn verdict(record: &OomRecord) -> OomVerdict {
    decide(record, None, false, OomTime(0))
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn the_exceeded_limit_is_named_at_every_level() {
    let Some(tree) = Tree::new() else { return };
    let mut sensors = Sensors::start(&tree, 64, None).await;
    for (cgroup, scope) in [
        (&tree.container, OomScope::Container),
        (&tree.pod, OomScope::Pod),
        (&tree.class, OomScope::QosClass),
        (&tree.pods, OomScope::NodeAllocatable),
        (&tree.root, OomScope::OtherCgroup),
    ] {
        cgroup.limit_memory(LIMIT);
        let mut shell = tree.container.shell(&format!("{HOG}; exit 0"));
        shell.go();
        let record = sensors.kill().await;
        let verdict = verdict(&record);
        assert_eq!((verdict.scope, verdict.limit_bytes), (scope, Some(LIMIT)), "{record:?}");
        assert_eq!(verdict.limit_cgroup.as_deref(), Some(cgroup.path.as_str()));
        assert_eq!((verdict.comm.as_str(), verdict.confidence), ("tail", OomConfidence::Kernel));
        assert_eq!(verdict.pod.map(|pod| pod.uid.to_string()), Some("uid".to_owned()));
        assert!(verdict.memory.expect("known").anon_bytes > 8 << 20);
        assert_eq!(shell.wait(), 0);
        cgroup.limit_memory(1 << 40);
    }
}

/// A script that starts the init of a PID namespace, and then runs `then` with its pid in `$init`.
fn beside_init(then: &str) -> String {
    let wait = "init=; while [ -z \"$init\" ]; do init=$(cat /proc/$!/task/$!/children); done";
    format!("{{ unshare --pid --fork sleep 60 & {wait}; {then}; }}")
}

/// Places of processes in a PID namespace of their own, as containers have them.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn main_child_and_exec_differ_by_their_ancestors() {
    let Some(tree) = Tree::new() else { return };
    tree.container.limit_memory(LIMIT);
    let mut sensors = Sensors::start(&tree, 64, None).await;

    let mut main = tree.container.shell(&format!("unshare --pid --fork {HOG}"));
    main.go();
    let record = sensors.kill_of_hog().await;
    assert_eq!(verdict(&record).victim, OomVictim::Main, "{record:?}");
    main.wait();

    let mut child = tree.container.shell(&format!("unshare --pid --fork sh -c '{HOG}; exit 0'"));
    child.go();
    let record = sensors.kill_of_hog().await;
    assert_eq!(verdict(&record).victim, OomVictim::Child, "{record:?}");
    assert_eq!(child.wait(), 0);

    // An orphan is adopted by the init of its namespace.
    let script = format!("unshare --pid --fork sh -c '(sh -c \"{HOG}\" &); sleep 60'");
    let mut orphan = tree.container.shell(&script);
    orphan.go();
    let record = sensors.kill_of_hog().await;
    assert_eq!(verdict(&record).victim, OomVictim::Child, "{record:?}");
    drop(orphan);

    let mut exec = tree.container.shell(&beside_init(&format!("nsenter -t $init -p {HOG}; kill -9 $init")));
    exec.go();
    let record = sensors.kill_of_hog().await;
    let root = record.root.expect("readable");
    assert_eq!(
        (Some(root.pid), root.is_init),
        (record.pid, false),
        "its parent is outside of the namespace: {record:?}"
    );
    assert!(!record.host_pid_namespace);
    exec.wait();
}

/// The records of a kill are read after its cgroups were removed.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn a_removed_cgroup_loses_nothing() {
    let Some(tree) = Tree::new() else { return };
    tree.pod.limit_memory(LIMIT);
    let mut sensors = Sensors::start(&tree, 1, None).await;
    let filler = || Hint::Gap(keblet::events::RelistReason::Start);
    sensors.sender.send(filler()).await.expect("open");
    // The exit of an init blocks the reader: the channel is full.
    let mut first = tree.container.shell("unshare --pid --fork true");
    first.go();
    first.wait();
    let mut shell = tree.container.shell(&format!("{HOG}; exit 0"));
    shell.go();
    assert_eq!(shell.wait(), 0);
    let Tree { container, pod, .. } = tree;
    let path = container.path.clone();
    drop(container);
    drop(pod);

    let verdict = verdict(&sensors.kill().await);
    assert_eq!((verdict.scope, verdict.limit_bytes), (OomScope::Pod, Some(LIMIT)));
    assert!(path.starts_with(verdict.limit_cgroup.as_deref().expect("known")));
    assert_eq!(verdict.container.map(|container| container.id.to_string()), Some(ID.to_owned()));
}

/// The exit of an OOM victim is marked, that of a killed process is not.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn exits_tell_oom_kills_from_other_signals() {
    let Some(tree) = Tree::new() else { return };
    tree.container.limit_memory(LIMIT);
    let mut sensors = Sensors::start(&tree, 64, None).await;
    for (script, exit_code, signalled, oom_victim) in [
        (format!("unshare --pid --fork {HOG}"), 137, true, true),
        ("unshare --pid --fork sh -c 'exit 137'".to_owned(), 137, false, false),
        (format!("unshare --pid --fork sh -c '{HOG}; exit $?'"), 137, false, false),
        (beside_init("kill -9 $init; wait"), 137, true, false),
    ] {
        let mut shell = tree.container.shell(&script);
        shell.go();
        let exit: ExitFacts = loop {
            match sensors.next().await {
                // That of a child that was killed comes first.
                Hint::Exit(exit) if exit.oom_victim == oom_victim && exit.container.as_str() == ID => break exit,
                _ => {}
            }
        };
        assert_eq!((exit.exit_code, exit.signalled), (exit_code, signalled), "{script}");
        shell.wait();
    }
}

/// Kills while the ring buffer is full: each is reported once, from the log or from the counter.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn kills_without_a_record_are_reported_once() {
    let Some(tree) = Tree::new() else { return };
    tree.container.limit_memory(LIMIT);
    let mut sensors = Sensors::start(&tree, 1, Some(4096)).await;
    sensors.sender.send(Hint::Gap(keblet::events::RelistReason::Start)).await.expect("open");
    let kills = 40;
    let mut shell = tree.container.shell(&format!("for i in $(seq {kills}); do {HOG}; done; exit 0"));
    shell.go();
    assert_eq!(shell.wait(), 0);

    let mut sources = Vec::new();
    while sources.len() < kills {
        sources.push(sensors.kill().await.source);
    }
    let of = |source| sources.iter().filter(|found| **found == source).count();
    eprintln!(
        "{} by the probe, {} by the log, {} by the counter",
        of(OomConfidence::Kernel),
        of(OomConfidence::Log),
        of(OomConfidence::Counter)
    );
    assert!(of(OomConfidence::Kernel) > 0 && of(OomConfidence::Kernel) < kills, "the buffer held some: {sources:?}");
    let text = sensors.metrics.render().expect("metrics");
    assert!(text.contains("keblet_hints_dropped_total{queue=\"exits\"}"), "{text}");
    // Nothing more: the next kill is the next record.
    let mut shell = tree.container.shell(&format!("{HOG}; exit 0"));
    shell.go();
    assert_eq!(sensors.kill().await.source, OomConfidence::Kernel);
    assert_eq!(shell.wait(), 0);
}

/// As after a failure for lack of memory.
#[tokio::test(start_paused = true)]
#[ignore = "needs root and BPF"]
async fn cgroups_that_could_not_be_watched_are_watched_later() {
    let Some(tree) = Tree::new() else { return };
    let (sender, mut hints) = mpsc::channel(64);
    let (sensor_states, shutdown) = (SensorStates::default(), CancellationToken::new());
    let options = KernelOptions {
        cgroup_root: format!("{}/later", tree.root.path),
        btf: keblet::kernel::btf::VMLINUX.into(),
        log: KMSG.into(),
        exits_ring: None,
        announce_containers: false,
        metrics: Metrics::new(),
    };
    let hierarchy = tree.root.hierarchy.clone();
    let loaded = kernel::start(options, hierarchy, sender, sensor_states.clone(), shutdown.clone()).await;
    let (_probes, forwarding) = loaded.expect("the probes are loaded");
    assert!(matches!(sensor_states.get(Sensor::Exits), Some(SensorState::Degraded(_))), "it is not there");
    let _later = tree.root.child("later");
    let _guard = shutdown.drop_guard();
    tokio::spawn(forwarding);
    // Kills elsewhere on the machine are hints as well.
    while !matches!(hints.recv().await.expect("it runs"), Hint::Gap(_)) {}
    assert_eq!(sensor_states.get(Sensor::Exits), Some(SensorState::Up));
}

/// Without the probe: the kernel log, or where it is not readable the counters.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn without_bpf_the_log_and_counters_are_evidence() {
    let Some(tree) = Tree::new() else { return };
    tree.pod.limit_memory(LIMIT);
    let kill = async |log: &str| {
        let (sender, mut hints) = mpsc::channel(64);
        let (sensor_states, shutdown) = (SensorStates::default(), CancellationToken::new());
        let guard = shutdown.clone().drop_guard();
        let options = FallbackOptions { cgroup_root: tree.root.path.clone(), log: Path::new(log).to_owned() };
        tokio::spawn(oom_fallback::start(options, tree.root.hierarchy.clone(), sender, &sensor_states, shutdown));
        let mut shell = tree.container.shell(&format!("{HOG}; exit 0"));
        shell.go();
        let record = loop {
            let hint = tokio::time::timeout(DEADLINE, hints.recv()).await.expect("in time").expect("it runs");
            let Hint::Oom(record) = hint else { panic!("{hint:?}") };
            if record.container().is_some_and(|id| id.as_str() == ID) {
                break *record;
            }
        };
        shell.wait();
        drop(guard);
        (record, sensor_states.get(Sensor::KernelLog))
    };
    let (record, state) = kill("/no/such/log").await;
    assert!(matches!(state, Some(SensorState::Down(reason)) if reason.starts_with("/no/such/log: ")));
    assert_eq!((record.source, record.pid), (OomConfidence::Counter, None));
    // The kernel leaves out cgroups while kills are frequent, as in other tests that run now.
    for _ in 0..5 {
        let (record, state) = kill(KMSG).await;
        if state != Some(SensorState::Up) {
            return keblet_skip::skip("the kernel log is not readable");
        }
        let verdict = verdict(&record);
        if verdict.confidence == OomConfidence::Counter || verdict.scope == OomScope::Unknown {
            continue;
        }
        assert_eq!((verdict.confidence, verdict.comm.as_str()), (OomConfidence::Log, "tail"), "{record:?}");
        assert_eq!((verdict.scope, verdict.limit_bytes), (OomScope::Pod, Some(LIMIT)));
        assert!(verdict.memory.expect("logged").anon_bytes > 8 << 20);
        return;
    }
    panic!("no kill was logged with its cgroup");
}
