//! Exits that the kernel proved and the runtime has not confirmed.

use super::Situation;
use super::brief;
use super::init_container;
use super::regular_container;
use crate::model::testing::*;

#[test]
fn a_known_code_is_acted_on_at_once() {
    for (policy, code, expected) in
        [("Always", 0, "start a"), ("OnFailure", 1, "start a"), ("OnFailure", 0, "kill-pod"), ("Never", 1, "kill-pod")]
    {
        let situation = Situation::new(pod(policy, &[], &["a"]), vec![proven("a", 0, Some(code))]);
        assert_eq!(brief(&situation.plan()), expected, "{policy} {code}");
    }
    let chain = |code| Situation::new(pod("OnFailure", &["one"], &["a"]), vec![proven("one", 0, Some(code))]);
    assert_eq!(brief(&chain(0).plan()), "start a");
    assert_eq!(brief(&chain(1).plan()), "start one");
}

#[test]
fn an_unknown_code_is_awaited_where_it_matters() {
    for (policy, expected) in [("Always", "start a"), ("OnFailure", "await"), ("Never", "await")] {
        let situation = Situation::new(pod(policy, &[], &["a"]), vec![proven("a", 0, None)]);
        assert_eq!(brief(&situation.plan()), expected, "{policy}");
    }
    for policy in ["Always", "OnFailure", "Never"] {
        let chain = Situation::new(pod(policy, &["one", "two"], &["a"]), vec![proven("one", 0, None)]);
        assert_eq!(brief(&chain.plan()), "await", "init success is a matter of the code: {policy}");
        let last = Situation::new(pod(policy, &["one"], &["a"]), vec![proven("one", 0, None)]);
        assert_eq!(brief(&last.plan()), "await", "{policy}");
    }
}

#[test]
fn other_containers_do_not_wait_along() {
    let situation = Situation::new(pod("OnFailure", &[], &["a", "b"]), vec![proven("a", 0, None), exited("b", 0, 1)]);
    assert_eq!(brief(&situation.plan()), "start b, await");
    let sidecar =
        Situation::new(pod("Never", &["side", "one"], &["a"]), vec![proven("one", 0, None), exited("side", 0, 0)]);
    assert_eq!(brief(&sidecar.plan()), "start side, await");
}

#[test]
fn sidecars_come_back_whatever_the_code() {
    let dead = Situation::new(pod("Never", &["side"], &["a"]), vec![running("a", 0), proven("side", 0, None)]);
    assert_eq!(brief(&dead.plan()), "start side");
    let ruled = dead.with_pod(|pod| super::set_rule(init_container(pod, "side"), "Always", "RestartAllContainers"));
    assert_eq!(brief(&ruled.plan()), "await", "the code could restart the whole pod");
}

#[test]
fn a_possible_restart_of_all_waits_for_the_code() {
    let dead = Situation::new(pod("Always", &[], &["a", "b"]), vec![proven("a", 0, None), running("b", 0)])
        .with_pod(|pod| super::set_rule(regular_container(pod, "a"), "Always", "RestartAllContainers"));
    assert_eq!(brief(&dead.plan()), "await");
}

#[test]
fn a_lost_sandbox_waits_where_the_code_decides_on_another() {
    let lost = |policy| {
        let mut situation = Situation::new(pod(policy, &[], &["a"]), vec![proven("a", 0, None)]);
        situation.snapshot.sandboxes[0].ready = false;
        situation
    };
    assert_eq!(brief(&lost("OnFailure").plan()), "await");
    assert_eq!(brief(&lost("Always").plan()), "kill-pod, sandbox 1, start a");
}

#[test]
fn the_kernels_time_counts_for_the_back_off() {
    let dead = Situation::new(pod("Always", &[], &["a"]), vec![proven("a", 3, None)]);
    let start = dead.plan().start.remove(0);
    assert_eq!((start.restart_count, start.last_finished_at), (Some(4), Some(at(310))));
}
