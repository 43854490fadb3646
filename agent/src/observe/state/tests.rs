use super::*;
use crate::observe::record::Confidence;
use crate::observe::record::ExitInfo;
use crate::observe::record::ExitSource;
use crate::observe::record::Ready;
use crate::observe::record::Scope;
use crate::observe::record::Stall;
use crate::observe::record::StallCause;
use crate::observe::record::Victim;
use crate::observe::record::Waiting;
use crate::observe::record::samples;

fn name(uid: &str) -> PodName {
    PodName { namespace: "ns".into(), name: uid.into(), uid: uid.into() }
}

fn apply(node: &mut ObservedNode, seconds: i64, record: Record) {
    let time = Timestamp::from_nanos((1_000_000 + seconds) * 1_000_000_000).unwrap();
    node.apply(&Line::new(time, record));
}

fn pod(uid: &str) -> Record {
    Record::Pod(PodRecord { pod: name(uid), ..PodRecord::default() })
}

fn kill(pod: Option<PodName>, earlier: bool) -> Record {
    Record::Oom(OomRecord {
        pod,
        container: Some("c".into()),
        container_id: None,
        victim: Victim::Child,
        process: None,
        scope: Scope::Container,
        limit_bytes: None,
        limit_cgroup: None,
        memory: None,
        kills: 2,
        earlier,
        confidence: Confidence::Kernel,
        missing: Vec::new(),
    })
}

#[test]
fn the_recording_yields_the_node() {
    let node = samples::node();
    assert!(node.ready);
    assert_eq!((node.pods.len(), node.exits.len(), node.oom_kills.len()), (5, 2, 3));
    let cart = node.pods.values().find(|pod| pod.pod.pod.name == "cart-7d9f").unwrap();
    assert_eq!((cart.oom_kills, cart.restarts(), cart.running()), (4, 3, (1, 1)));
    assert_eq!(cart.history.last(Resource::Memory, SAMPLES).len(), 25);
    assert_eq!(node.lost.cgroups, 3);
    assert_eq!(node.lacks().count(), 1);
}

#[test]
fn kills_are_counted_once_even_if_the_pod_comes_later() {
    let mut node = ObservedNode::default();
    apply(&mut node, 0, kill(Some(name("a")), false));
    apply(&mut node, 1, pod("a"));
    apply(&mut node, 2, pod("a"));
    apply(&mut node, 3, kill(Some(name("a")), true));
    assert_eq!(node.pods["a"].oom_kills, 4);
    assert_eq!(node.pods["a"].oom_counts.values().sum::<u64>(), 2, "since observing began");
    assert_eq!(node.oom_counts[&("container", "child", "kernel")], 2);
}

/// The recorder has started again: it reports what it can still count.
#[test]
fn kills_before_a_restart_in_the_recording_are_counted_once() {
    let mut node = ObservedNode::default();
    for seconds in [0, 10] {
        apply(&mut node, seconds, Record::Start(Start::default()));
        apply(&mut node, seconds + 1, pod("a"));
        apply(&mut node, seconds + 2, kill(Some(name("a")), seconds > 0));
    }
    assert_eq!(node.pods["a"].oom_kills, 2);
    assert_eq!(node.pods["a"].oom_counts.values().sum::<u64>(), 0, "none since the restart");
    assert_eq!(node.oom_kills.len(), 2, "what happened is not forgotten");
    apply(&mut node, 20, kill(Some(name("a")), false));
    assert_eq!((node.pods["a"].oom_kills, node.pods["a"].oom_counts.values().sum::<u64>()), (4, 2));
}

#[test]
fn a_kill_of_which_only_the_uid_of_the_pod_is_known_is_counted() {
    let unnamed = || Some(PodName { uid: "a".into(), ..PodName::default() });
    let mut node = ObservedNode::default();
    apply(&mut node, 0, kill(unnamed(), false));
    apply(&mut node, 1, pod("a"));
    apply(&mut node, 2, kill(unnamed(), false));
    let counted = |node: &ObservedNode| {
        let pod = &node.pods["a"];
        (pod.oom_kills, pod.oom_counts.values().sum::<u64>(), node.oom_kills_of(&pod.pod.pod).count())
    };
    assert_eq!(counted(&node), (4, 4, 2));
}

/// In a recording by a pod that was restarted. No record reports the end of pods that have ended in between.
#[test]
fn pods_are_those_since_the_last_start() {
    let mut node = ObservedNode::default();
    apply(&mut node, 0, pod("gone"));
    apply(&mut node, 1, pod("stays"));
    apply(&mut node, 1, kill(Some(name("gone")), false));
    apply(&mut node, 1, Record::Ready(Ready { pods: 2 }));
    apply(&mut node, 2, Record::Start(Start::default()));
    assert!(node.pods.is_empty() && !node.ready);
    apply(&mut node, 3, pod("stays"));
    assert_eq!(node.pods.keys().collect::<Vec<_>>(), ["stays"]);
    assert_eq!(node.oom_kills.len(), 1, "what happened is not forgotten");
}

#[test]
fn everything_is_bounded() {
    let mut node = ObservedNode::default();
    for n in 0..PODS + 5 {
        apply(&mut node, 0, pod(&n.to_string()));
    }
    assert_eq!((node.pods.len(), node.pods_left_out), (PODS, 5));
    for n in 0..i64::try_from(EXITS + 5).unwrap() {
        let exit = ExitInfo { exit_code: Some(1), reason: "Error".into(), ..ExitInfo::default() };
        let (container, id, source) = ("c".to_owned(), n.to_string(), ExitSource::Kernel);
        apply(&mut node, n, Record::Exit(ExitRecord { pod: name("0"), container, id, exit, source, earlier: n == 0 }));
        apply(&mut node, n, kill(None, false));
    }
    assert_eq!((node.exits.len(), node.oom_kills.len()), (EXITS, OOM_KILLS));
    assert_eq!(node.exits.back().unwrap().1.id, (EXITS + 4).to_string());
    assert_eq!(node.pods["0"].exit_counts.values().sum::<u64>(), 516, "without the one before observing began");
}

#[test]
fn the_last_sixty_measurements_are_kept() {
    let mut node = ObservedNode::default();
    for n in 0..65_u8 {
        let some = Stall { avg10: f64::from(n) - 0.9, ..Stall::default() };
        let memory = Some(Waiting { some, ..Waiting::default() });
        let record = PressureRecord { memory, ..PressureRecord::empty(PressureScope::Node, None) };
        apply(&mut node, n.into(), Record::Pressure(record));
    }
    assert_eq!(node.history.last(Resource::Memory, 100), (5..65).collect::<Vec<u8>>(), "a little is not nothing");
    assert_eq!(node.history.last(Resource::Memory, 2), [63, 64]);
    assert_eq!(node.history.last(Resource::Io, 2), [0, 0]);
}

#[test]
fn a_stall_is_over_when_a_measurement_no_longer_has_it() {
    let mut node = ObservedNode::default();
    apply(&mut node, 0, pod("a"));
    let stall = |uid: &str| {
        let (cause, by, evidence) = (StallCause::Unknown, None, String::new());
        Record::Stall(StallRecord { pod: name(uid), resource: Resource::Io, percent: 9.0, cause, by, evidence })
    };
    let measured = || Record::Pressure(PressureRecord::empty(PressureScope::Node, None));
    apply(&mut node, 1, stall("a"));
    apply(&mut node, 1, stall("unknown"));
    apply(&mut node, 1, measured());
    assert_eq!(node.current_stalls().len(), 1);
    apply(&mut node, 3, measured());
    assert_eq!(node.current_stalls().len(), 0);
    apply(&mut node, 5, stall("a"));
    apply(&mut node, 5, measured());
    assert_eq!(node.current_stalls().len(), 1);
    apply(&mut node, 4, measured());
    assert_eq!(node.current_stalls().len(), 0, "the clock was set back");
}

#[test]
fn a_removed_pod_takes_everything_of_it_along_but_what_happened() {
    let mut node = ObservedNode::default();
    apply(&mut node, 0, pod("a"));
    apply(&mut node, 1, kill(Some(name("a")), false));
    apply(&mut node, 2, Record::Pod(PodRecord { pod: name("a"), removed: true, ..PodRecord::default() }));
    assert!(node.pods.is_empty());
    assert_eq!(node.oom_kills.len(), 1);
}
