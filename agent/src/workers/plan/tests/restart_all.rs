//! RestartAllContainers (KEP-5532).

use super::Situation;
use super::brief;
use super::init_container;
use super::regular_container;
use crate::model::ContainerState;
use crate::model::KillReason;
use crate::model::SandboxPlan;
use crate::model::testing::*;

/// Init `one`, sidecar `side`, regular `a` (whose exit code 42 restarts all) and `b`.
fn demanded() -> Situation {
    let history = vec![
        exited("a", 1, 42),
        running("b", 0),
        exited("a", 0, 1),
        status("side", 0, ContainerState::Unknown),
        exited("one", 0, 0),
    ];
    Situation::new(with_ephemeral(pod("Never", &["one", "side"], &["a", "b"]), "debug"), history)
        .with_pod(|pod| super::set_rule(regular_container(pod, "a"), "Never", "RestartAllContainers"))
}

#[test]
fn everything_goes_and_the_source_goes_last() {
    let actions = demanded().plan();
    let expected = "kill b-0, kill side-0, remove a-0, remove b-0, remove one-0, remove side-0, remove a-1";
    assert_eq!(brief(&actions), expected);
    assert_eq!(actions.sandbox, SandboxPlan::Keep("sandbox-0".into()));
    assert!(actions.remove.iter().all(|removal| removal.keep_logs), "logs stay");
    assert!(actions.kill.iter().all(|kill| {
        kill.reason == KillReason::RestartAll && kill.grace_override == Some(0) && kill.message == "killing"
    }));
}

#[test]
fn an_init_source_goes_after_a_regular_one() {
    let both = demanded().with_pod(|pod| super::set_rule(init_container(pod, "one"), "Never", "RestartAllContainers"));
    let mut both = both;
    let one = both.snapshot.containers.iter_mut().find(|c| c.name == "one").expect("one");
    one.exit_code = Some(42);
    let expected = "kill b-0, kill side-0, remove a-0, remove b-0, remove side-0, remove a-1, remove one-0";
    assert_eq!(brief(&both.plan()), expected);
}

#[test]
fn an_announced_restart_goes_on_until_nothing_is_left() {
    let mut half_way = demanded();
    half_way.restarting_all = true;
    half_way.snapshot.containers.retain(|c| c.name == "one" || c.name == "b");
    assert_eq!(brief(&half_way.plan()), "kill b-0, remove b-0, remove one-0");
    half_way.snapshot.containers.clear();
    assert_eq!(brief(&half_way.plan()), "start debug, start one");
}

#[test]
fn only_the_newest_instance_demands_it() {
    let mut restarted = demanded();
    restarted.snapshot.containers.insert(0, running("a", 2));
    assert!(restarted.plan().remove.is_empty());
}

#[test]
fn the_gate_turns_it_off() {
    let mut off = demanded();
    off.gates.all_containers = false;
    off.restarting_all = true;
    assert!(off.plan().remove.is_empty());
}

#[test]
fn a_lost_sandbox_is_replaced_first() {
    let mut lost = demanded();
    lost.snapshot.sandboxes[0].ready = false;
    assert_eq!(brief(&lost.plan()), "kill-pod, prune side-0, prune one-0, sandbox 1");
}
