//! Another sandbox is needed.

use super::Situation;
use super::brief;
use crate::model::ContainerState;
use crate::model::SandboxPlan;
use crate::model::testing::*;

fn lost_sandbox(mut situation: Situation) -> Situation {
    situation.snapshot.sandboxes[0].ready = false;
    situation
}

#[test]
fn a_new_pod_starts_its_first_init_container_or_all_regular_ones() {
    for (init, expected) in [
        (vec![], "kill-pod, sandbox 0, start a, start b"),
        (vec!["one", "two"], "kill-pod, sandbox 0, start one"),
        (vec!["side"], "kill-pod, sandbox 0, start side"),
    ] {
        let mut situation = Situation::new(pod("Always", &init, &["a", "b"]), vec![]);
        situation.snapshot.sandboxes.clear();
        assert_eq!(brief(&situation.plan()), expected);
    }
}

#[test]
fn ephemeral_containers_wait_for_the_sandbox() {
    let mut situation = Situation::new(with_ephemeral(pod("Always", &[], &["a"]), "debug"), vec![]);
    situation.snapshot.sandboxes.clear();
    assert_eq!(brief(&situation.plan()), "kill-pod, sandbox 0, start a");
}

#[test]
fn a_lost_sandbox_is_replaced_by_policy_and_history() {
    let gone = |policy, code| lost_sandbox(Situation::new(pod(policy, &[], &["a"]), vec![exited("a", 0, code)]));
    assert_eq!(brief(&gone("Always", 0).plan()), "kill-pod, sandbox 1, start a");
    assert_eq!(brief(&gone("OnFailure", 1).plan()), "kill-pod, sandbox 1, start a");
    assert_eq!(brief(&gone("OnFailure", 0).plan()), "kill-pod");
    assert_eq!(brief(&gone("Never", 1).plan()), "kill-pod");
    let never_started = lost_sandbox(Situation::new(pod("Never", &[], &["a"]), vec![]));
    assert_eq!(brief(&never_started.plan()), "kill-pod, sandbox 1, start a");
    let running =
        lost_sandbox(Situation::new(pod("OnFailure", &[], &["a", "b"]), vec![running("a", 0), exited("b", 0, 0)]));
    assert_eq!(brief(&running.plan()), "kill-pod, sandbox 1, start a");
    let own_policy = lost_sandbox(Situation::new(pod("Always", &[], &["a", "b"]), vec![exited("a", 0, 0)]));
    let own_policy =
        own_policy.with_pod(|pod| super::regular_container(pod, "a").restart_policy = Some("OnFailure".into()));
    assert_eq!(brief(&own_policy.plan()), "kill-pod, sandbox 1, start b");
    let ruled = lost_sandbox(Situation::new(pod("Always", &[], &["a"]), vec![exited("a", 0, 0)])).with_pod(|pod| {
        let container = super::regular_container(pod, "a");
        set_rule(container, "OnFailure", "Restart");
        let rule = &mut container.restart_policy_rules.as_mut().expect("a rule")[0];
        rule.exit_codes.as_mut().expect("codes").values = Some(vec![0]);
    });
    assert_eq!(brief(&ruled.plan()), "kill-pod, sandbox 1, start a", "a rule restarts it after success");
}

#[test]
fn the_old_sandbox_is_named_when_it_is_replaced() {
    let actions = lost_sandbox(Situation::new(pod("Always", &[], &["a"]), vec![])).plan();
    assert_eq!(actions.sandbox, SandboxPlan::Create { attempt: 1, replaces: Some("sandbox-0".into()) });
    let mut other_network = Situation::new(pod("Always", &[], &["a"]), vec![]);
    other_network.snapshot.sandboxes[0].host_network = true;
    assert_eq!(other_network.plan().sandbox, SandboxPlan::Create { attempt: 1, replaces: None });
}

#[test]
fn a_new_sandbox_prunes_every_init_instance() {
    let history = vec![running("a", 0), running("side", 1), exited("side", 0, 1), exited("one", 0, 0)];
    let actions = lost_sandbox(Situation::new(pod("Always", &["one", "side"], &["a"]), history)).plan();
    assert_eq!(brief(&actions), "kill-pod, prune side-1, prune side-0, prune one-0, sandbox 1, start one");
    assert!(actions.prune.iter().all(|removal| !removal.keep_logs));
}

#[test]
fn an_existing_sandbox_is_kept() {
    let situation = Situation::new(pod("Always", &[], &["a"]), vec![status("a", 0, ContainerState::Running)]);
    let actions = situation.plan();
    assert_eq!(actions.sandbox, SandboxPlan::Keep("sandbox-0".into()));
    assert!(actions.is_idle());
}
