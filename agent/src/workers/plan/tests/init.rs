//! Init containers and sidecars, row by row.

use k8s_openapi::api::core::v1::Probe;

use super::Situation;
use super::brief;
use super::init_container;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::KillReason;
use crate::model::ProbeResult;
use crate::model::testing::*;

/// A pod with init containers `one` and `two`, then `main`.
fn chain(policy: &str, containers: Vec<ContainerStatus>) -> Situation {
    Situation::new(pod(policy, &["one", "two"], &["main"]), containers)
}

/// A pod with sidecar `side`, init container `two`, then `main`.
fn with_sidecar(policy: &str, containers: Vec<ContainerStatus>) -> Situation {
    Situation::new(pod(policy, &["side", "two"], &["main"]), containers)
}

fn probe() -> Option<Probe> {
    Some(Probe::default())
}

#[test]
fn a_chain_runs_one_by_one() {
    for (containers, expected) in [
        (vec![], "start one"),
        (vec![running("one", 0)], "idle"),
        (vec![exited("one", 0, 0)], "start two"),
        (vec![running("two", 0), exited("one", 0, 0)], "idle"),
        (vec![exited("two", 0, 0), exited("one", 0, 0)], "start main"),
        (vec![exited("two", 0, 0)], "start main"),
        (vec![running("two", 0)], "idle"),
        (vec![running("main", 0)], "idle"),
    ] {
        assert_eq!(brief(&chain("Always", containers.clone()).plan()), expected, "{containers:?}");
    }
}

#[test]
fn init_states_decide() {
    let oom = |mut status: ContainerStatus| {
        status.reason = "OOMKilled".into();
        status
    };
    for (policy, newest, expected) in [
        ("Always", status("one", 0, ContainerState::Created), "start one"),
        ("Never", status("one", 0, ContainerState::Created), "start one"),
        ("Always", exited("one", 0, 1), "start one"),
        ("OnFailure", exited("one", 0, 1), "start one"),
        ("Never", exited("one", 0, 1), "kill-pod"),
        ("OnFailure", oom(exited("one", 0, 0)), "kill-pod"),
        ("Always", oom(exited("one", 0, 0)), "start one"),
        ("Never", exited("one", 0, 0), "start two"),
        ("Always", status("one", 0, ContainerState::Unknown), "kill one-0, start one"),
        ("OnFailure", status("one", 0, ContainerState::Unknown), "kill one-0, start one"),
        ("Never", status("one", 0, ContainerState::Unknown), "kill-pod"),
    ] {
        assert_eq!(brief(&chain(policy, vec![newest.clone()]).plan()), expected, "{policy} {newest:?}");
    }
}

#[test]
fn an_init_containers_own_policy_counts() {
    let failed = |own: &str, pod_policy: &str| {
        let situation = chain(pod_policy, vec![exited("one", 0, 42)]);
        situation.with_pod(|pod| super::set_rule(init_container(pod, "one"), own, "Restart"))
    };
    assert_eq!(brief(&failed("Never", "Never").plan()), "start one", "the rule matches");
    let mut other_code = failed("Never", "Always");
    other_code.snapshot.containers[0].exit_code = Some(1);
    assert_eq!(brief(&other_code.plan()), "kill-pod");
    let mut lost = failed("OnFailure", "Never");
    lost.snapshot.containers[0] = status("one", 0, ContainerState::Unknown);
    assert_eq!(brief(&lost.plan()), "kill one-0, start one");
    let message = r#"Init container is in "unknown" state, try killing it before restart"#;
    assert_eq!(lost.plan().kill[0].message, message);
}

#[test]
fn success_does_not_consult_rules() {
    let situation = chain("Always", vec![exited("one", 0, 0)]);
    let situation = situation.with_pod(|pod| {
        let one = init_container(pod, "one");
        super::set_rule(one, "Never", "Restart");
        one.restart_policy_rules.as_mut().expect("set")[0].exit_codes.as_mut().expect("set").values = Some(vec![0]);
    });
    assert_eq!(brief(&situation.plan()), "start two");
}

#[test]
fn a_failed_init_container_of_a_deleted_pod_ends_it() {
    assert_eq!(brief(&chain("Always", vec![exited("one", 0, 1)]).deleting().plan()), "kill-pod");
}

#[test]
fn a_regular_container_proves_that_initialisation_was_done() {
    for main in [exited("main", 0, 1), exited("main", 0, 0), status("main", 0, ContainerState::Created)] {
        assert_eq!(brief(&chain("Always", vec![main.clone()]).plan()), "start main", "{main:?}");
    }
}

/// The agent can have been killed between the creation of a sandbox and that of its first container.
#[test]
fn a_new_sandbox_is_initialised_anew() {
    let before = vec![running("main", 0), exited("two", 0, 0), exited("one", 0, 0)];
    for containers in [before.clone(), vec![exited("main", 0, 0), exited("two", 0, 0)], vec![exited("one", 0, 0)]] {
        let mut replaced = chain("Always", containers);
        replaced.snapshot.sandboxes[0].ready = false;
        replaced.snapshot.sandboxes.insert(0, sandbox(1));
        assert_eq!(brief(&replaced.plan()), "start one", "{:?}", replaced.snapshot.containers);
    }
    let mut again = chain("Always", before);
    again.snapshot.sandboxes[0].ready = false;
    again.snapshot.sandboxes.insert(0, sandbox(1));
    again.snapshot.containers.insert(0, exited("one", 1, 0));
    again.snapshot.containers[0].sandbox_id = "sandbox-1".into();
    assert_eq!(brief(&again.plan()), "prune one-0, start two");
}

#[test]
fn an_init_container_that_runs_in_a_replaced_sandbox_ends_before_it_starts_again() {
    for name in ["side", "two"] {
        let mut replaced = with_sidecar("Always", vec![running(name, 0)]);
        replaced.snapshot.sandboxes[0].ready = false;
        replaced.snapshot.sandboxes.insert(0, sandbox(1));
        assert_eq!(brief(&replaced.plan()), format!("kill {name}-0"));
    }
}

#[test]
fn sidecars_are_kept_running() {
    for (policy, containers, expected) in [
        ("Always", vec![], "start side"),
        ("Always", vec![running("side", 0)], "start two"),
        ("Always", vec![running("two", 0), running("side", 0)], "idle"),
        ("Always", vec![running("two", 0), exited("side", 0, 0)], "start side"),
        ("Never", vec![running("two", 0), exited("side", 0, 1)], "start side"),
        ("Always", vec![running("two", 0)], "start side"),
        ("Always", vec![exited("two", 0, 0), exited("side", 0, 0)], "start side, start main"),
        ("Always", vec![exited("side", 0, 0)], "start side"),
        ("Always", vec![status("side", 0, ContainerState::Created)], "start side"),
        ("Never", vec![status("side", 0, ContainerState::Unknown)], "kill side-0, start side"),
        ("Never", vec![running("main", 0)], "start side"),
        ("Never", vec![running("main", 0), exited("side", 0, 7)], "start side"),
        ("Never", vec![exited("main", 0, 0), exited("two", 0, 0), exited("side", 0, 0)], "kill-pod"),
        ("Never", vec![exited("main", 0, 0), exited("two", 0, 0), running("side", 0)], "kill-pod"),
    ] {
        assert_eq!(brief(&with_sidecar(policy, containers.clone()).plan()), expected, "{policy} {containers:?}");
    }
}

#[test]
fn a_last_sidecar_initialises_the_pod_when_it_runs() {
    let last = |containers| Situation::new(pod("Always", &["one", "side"], &["main"]), containers);
    assert_eq!(brief(&last(vec![running("side", 0), exited("one", 0, 0)]).plan()), "start main");
    assert_eq!(brief(&last(vec![exited("side", 0, 0), exited("one", 0, 0)]).plan()), "start side");
}

#[test]
fn startup_probes_hold_the_next_one_back() {
    let probed = with_sidecar("Never", vec![running("side", 0)])
        .with_pod(|pod| init_container(pod, "side").startup_probe = probe());
    assert_eq!(brief(&probed.plan()), "idle");
    for (result, expected) in [
        (ProbeResult::Unknown, "idle"),
        (ProbeResult::Success, "start two"),
        (ProbeResult::Failure, "kill side-0, start side"),
    ] {
        assert_eq!(brief(&probed.clone().startup("side-0", result).plan()), expected);
    }
    let kill = probed.startup("side-0", ProbeResult::Failure).plan().kill.remove(0);
    assert_eq!((kill.message.as_str(), kill.reason), ("Init container side failed startup probe", KillReason::Startup));
}

#[test]
fn running_sidecars_are_replaced_when_unwell_or_changed() {
    let probed = with_sidecar("Never", vec![running("two", 0), running("side", 0)])
        .with_pod(|pod| init_container(pod, "side").liveness_probe = probe());
    assert_eq!(brief(&probed.plan()), "idle");
    let unwell = probed.clone().liveness("side-0", ProbeResult::Failure).plan();
    assert_eq!(brief(&unwell), "kill side-0, start side");
    assert_eq!(unwell.kill[0].message, "Init container side failed liveness probe");
    assert_eq!(brief(&probed.clone().liveness("side-0", ProbeResult::Success).plan()), "idle");
    let changed = probed.with_pod(|pod| init_container(pod, "side").image = Some("other".into()));
    let changed = changed.liveness("side-0", ProbeResult::Failure).deleting().plan();
    assert_eq!(brief(&changed), "kill side-0, start side");
    assert_eq!(changed.kill[0].message, "Init container side definition changed");
    assert_eq!(changed.kill[0].reason, KillReason::DefinitionChanged);
}

#[test]
fn a_changed_sidecar_still_lets_the_next_one_start() {
    let changed = with_sidecar("Always", vec![running("side", 0)])
        .with_pod(|pod| init_container(pod, "side").image = Some("other".into()));
    assert_eq!(brief(&changed.plan()), "kill side-0, start side, start two");
}

#[test]
fn only_the_newest_exited_instance_of_an_init_container_stays() {
    let history = vec![
        running("main", 0),
        running("side", 2),
        exited("side", 1, 1),
        exited("side", 0, 1),
        exited("two", 1, 0),
        status("two", 0, ContainerState::Unknown),
    ];
    let actions = with_sidecar("Always", history).plan();
    assert_eq!(brief(&actions), "prune side-0, prune two-0");
    assert!(actions.prune.iter().all(|removal| !removal.keep_logs));
}
