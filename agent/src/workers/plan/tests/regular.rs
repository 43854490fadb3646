//! Regular and ephemeral containers, back-off and restart counts.

use std::time::Duration;

use serde_json::json;

use super::Situation;
use super::brief;
use super::regular_container;
use crate::model::Blocked;
use crate::model::ContainerClass;
use crate::model::ContainerState;
use crate::model::KillReason;
use crate::model::ProbeResult;
use crate::model::testing::*;
use crate::workers::backoff;

#[test]
fn exited_containers_follow_their_policy() {
    for (policy, code, expected) in [
        ("Always", 0, "start a"),
        ("Always", 1, "start a"),
        ("OnFailure", 0, "idle"),
        ("OnFailure", 1, "start a"),
        ("Never", 1, "idle"),
    ] {
        let situation = Situation::new(pod(policy, &[], &["a", "b"]), vec![running("b", 0), exited("a", 0, code)]);
        assert_eq!(brief(&situation.plan()), expected, "{policy} {code}");
    }
}

#[test]
fn rules_override_policies() {
    for (code, expected) in [(42, "start a"), (1, "idle")] {
        let situation = Situation::new(pod("Always", &[], &["a", "b"]), vec![running("b", 0), exited("a", 0, code)]);
        let situation = situation.with_pod(|pod| super::set_rule(regular_container(pod, "a"), "Never", "Restart"));
        assert_eq!(brief(&situation.plan()), expected, "{code}");
    }
}

#[test]
fn leftovers_of_failed_starts_are_started_again() {
    for policy in ["Always", "Never"] {
        let created = Situation::new(pod(policy, &[], &["a"]), vec![status("a", 0, ContainerState::Created)]);
        let actions = created.plan();
        assert_eq!(brief(&actions), "start a");
        assert_eq!(actions.start[0].replaces, ["a-0".into()], "its start may still succeed: it goes first");
        let lost = Situation::new(pod(policy, &[], &["a"]), vec![status("a", 0, ContainerState::Unknown)]);
        let actions = lost.plan();
        assert_eq!(brief(&actions), "kill a-0, start a");
        assert_eq!(actions.kill[0].message, r#"Container is in "unknown" state, try killing it before restart"#);
        assert_eq!(actions.kill[0].reason, KillReason::UnknownState);
    }
}

#[test]
fn a_finished_pod_is_killed() {
    for (policy, code) in [("Never", 0), ("Never", 1), ("OnFailure", 0)] {
        let done = Situation::new(pod(policy, &[], &["a"]), vec![exited("a", 0, code)]);
        assert_eq!(brief(&done.plan()), "kill-pod", "{policy} {code}");
    }
    let debugged = with_ephemeral(pod("Never", &[], &["a"]), "debug");
    assert_eq!(brief(&Situation::new(debugged, vec![exited("a", 0, 0)]).plan()), "kill-pod");
}

#[test]
fn nothing_is_started_in_a_deleted_pod() {
    let deleted = Situation::new(pod("Always", &[], &["a", "b"]), vec![running("a", 0), exited("b", 0, 1)]).deleting();
    assert_eq!(brief(&deleted.plan()), "idle");
    assert_eq!(
        brief(&Situation::new(pod("Always", &[], &["a"]), vec![exited("a", 0, 1)]).deleting().plan()),
        "kill-pod"
    );
}

#[test]
fn running_containers_are_killed_for_cause() {
    let pod_of = |policy| pod(policy, &[], &["a", "b"]);
    let both = || vec![running("b", 0), running("a", 0)];
    for (policy, liveness, startup, expected, message) in [
        ("Always", true, false, "kill a-0, start a", "Container a failed liveness probe, will be restarted"),
        ("Never", true, false, "kill a-0", "Container a failed liveness probe"),
        ("OnFailure", false, true, "kill a-0, start a", "Container a failed startup probe, will be restarted"),
        ("Always", true, true, "kill a-0, start a", "Container a failed liveness probe, will be restarted"),
    ] {
        let mut situation = Situation::new(pod_of(policy), both());
        if liveness {
            situation = situation.liveness("a-0", ProbeResult::Failure);
        }
        if startup {
            situation = situation.startup("a-0", ProbeResult::Failure);
        }
        let actions = situation.plan();
        assert_eq!((brief(&actions).as_str(), actions.kill[0].message.as_str()), (expected, message));
    }
    let changed = Situation::new(pod_of("Never"), both());
    let changed = changed.with_pod(|pod| regular_container(pod, "a").image = Some("new".into())).plan();
    assert_eq!(brief(&changed), "kill a-0, start a");
    assert_eq!(changed.kill[0].message, "Container a definition changed, will be restarted");
    let mut unlabelled = Situation::new(pod_of("Never"), both());
    unlabelled.snapshot.containers[0].hash = 0;
    assert_eq!(brief(&unlabelled.plan()), "kill b-0, start b");
}

#[test]
fn kills_consult_the_own_policy_but_no_rules() {
    let unwell = Situation::new(pod("Always", &[], &["a", "b"]), vec![running("b", 0), running("a", 0)])
        .liveness("a-0", ProbeResult::Failure)
        .with_pod(|pod| super::set_rule(regular_container(pod, "a"), "Never", "Restart"));
    assert_eq!(brief(&unwell.plan()), "kill a-0");
    assert_eq!(brief(&unwell.deleting().plan()), "kill a-0");
}

#[test]
fn the_last_container_killed_for_good_takes_the_pod_along() {
    let unwell = Situation::new(pod("Never", &[], &["a"]), vec![running("a", 0)]).liveness("a-0", ProbeResult::Failure);
    assert_eq!(brief(&unwell.plan()), "kill-pod");
}

#[test]
fn ephemeral_containers_run_once() {
    let debugged = || with_ephemeral(pod("Always", &["one"], &["a"]), "debug");
    let fresh = Situation::new(debugged(), vec![running("a", 0)]).plan();
    assert_eq!(brief(&fresh), "start debug");
    assert_eq!((fresh.start[0].class, fresh.start[0].index), (ContainerClass::Ephemeral, 0));
    assert_eq!(brief(&Situation::new(debugged(), vec![running("one", 0)]).plan()), "start debug");
    for state in [ContainerState::Created, ContainerState::Running, ContainerState::Exited, ContainerState::Unknown] {
        let tried = Situation::new(debugged(), vec![status("debug", 0, state), running("a", 0)]);
        assert_eq!(brief(&tried.plan()), "idle", "{state:?}");
    }
    let cancelled_first = |newest| vec![newest, cancelled("debug", 0), running("a", 0)];
    for (newest, expected) in
        [(cancelled("debug", 1), "start debug"), (running("debug", 1), "idle"), (exited("debug", 1, 0), "idle")]
    {
        let again = Situation::new(debugged(), cancelled_first(newest)).plan();
        assert_eq!(brief(&again), expected);
        assert!(again.start.iter().all(|start| start.restart_count == Some(2)), "the runtime has the earlier names");
    }
}

#[test]
fn an_ephemeral_container_that_has_ended_is_not_started_again_when_the_runtime_has_lost_it() {
    let reported = |state: serde_json::Value| {
        let debug =
            json!({"name": "debug", "ready": false, "restartCount": 0, "image": "i", "imageID": "", "state": state});
        Situation::new(with_ephemeral(pod("Always", &[], &["a"]), "debug"), vec![running("a", 0)]).with_pod(|pod| {
            let statuses = serde_json::from_value(json!([debug])).expect("statuses");
            pod.status.get_or_insert_default().ephemeral_container_statuses = Some(statuses);
        })
    };
    assert_eq!(brief(&reported(json!({"terminated": {"exitCode": 0}})).plan()), "idle");
    for state in [json!({"waiting": {"reason": "ErrImagePull"}}), json!({"running": {}})] {
        assert_eq!(brief(&reported(state.clone()).plan()), "start debug", "{state}");
    }
}

#[test]
fn starts_carry_counts_and_the_last_end() {
    let situation = Situation::new(pod("Always", &[], &["a", "b"]), vec![exited("a", 7, 1), exited("a", 6, 1)]);
    let starts = situation.plan().start;
    assert_eq!((starts[0].restart_count, starts[0].last_finished_at), (Some(8), Some(at(710))));
    assert_eq!((starts[1].restart_count, starts[1].last_finished_at), (None, None));
    assert_eq!((starts[1].class, starts[1].index), (ContainerClass::Regular, 1));
    let changed = Situation::new(pod("Always", &[], &["a"]), vec![running("a", 7), exited("a", 6, 1)]);
    let changed = changed.with_pod(|pod| regular_container(pod, "a").image = Some("new".into())).plan();
    let start = &changed.start[0];
    assert_eq!((start.restart_count, start.last_finished_at), (Some(8), Some(at(610))), "an older end counts");
}

#[test]
fn crash_loops_are_held_back() {
    let mut situation = Situation::new(pod("Always", &[], &["a"]), vec![exited("a", 0, 1)]);
    let finished = backoff::wall_time(at(10));
    situation.now = finished + Duration::from_secs(1);
    assert_eq!(situation.plan().start[0].blocked, None, "nothing is recorded yet");
    let container = regular_container(&mut situation.pod, "a").clone();
    let key = backoff::crash_loop_key(&situation.pod, &container);
    situation.history.record(&key, backoff::wall_time(at(-100)), backoff::wall_time(at(0)));
    let held = Blocked { backoff: Duration::from_secs(10), until: finished + Duration::from_secs(10) };
    assert_eq!(situation.plan().start[0].blocked, Some(held));
    situation.now = finished + Duration::from_secs(10);
    assert_eq!(situation.plan().start[0].blocked, None, "the delay is over");
}
