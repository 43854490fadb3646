//! The phase table.

use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::Probe;

use super::Situation;
use crate::model::ContainerState;
use crate::model::testing::*;

#[test]
fn regular_containers_determine_the_phase() {
    let rows = [
        ("Always", vec![], "Pending"),
        ("Always", vec![running("a", 0)], "Pending"),
        ("Always", vec![running("a", 0), running("b", 0)], "Running"),
        ("Always", vec![running("a", 0), exited("b", 0, 1)], "Running"),
        ("Never", vec![running("a", 0), exited("b", 0, 1)], "Running"),
        ("Always", vec![exited("a", 0, 0), exited("b", 0, 0)], "Running"),
        ("OnFailure", vec![exited("a", 0, 0), exited("b", 0, 1)], "Running"),
        ("OnFailure", vec![exited("a", 0, 0), exited("b", 0, 0)], "Succeeded"),
        ("Never", vec![exited("a", 0, 0), exited("b", 0, 0)], "Succeeded"),
        ("Never", vec![exited("a", 0, 0), exited("b", 0, 1)], "Failed"),
        ("Never", vec![running("a", 0), status("b", 0, ContainerState::Created)], "Pending"),
        ("Never", vec![proven("a", 0, None), exited("b", 0, 0)], "Running"),
        ("Never", vec![proven("a", 0, Some(0)), exited("b", 0, 0)], "Succeeded"),
    ];
    for (policy, containers, expected) in rows {
        let situation = Situation::new(pod(policy, &[], &["a", "b"]), containers.clone());
        assert_eq!(situation.phase(), expected, "{policy} {containers:?}");
    }
}

#[test]
fn rules_keep_a_pod_running() {
    let ruled = |code| {
        let situation = Situation::new(pod("Never", &[], &["a"]), vec![exited("a", 0, code)]);
        situation.with(|s| set_rule(&mut s.pod.spec.as_mut().expect("a spec").containers[0], "Never", "Restart"))
    };
    assert_eq!((ruled(42).phase(), ruled(1).phase()), ("Running".into(), "Failed".into()));
}

#[test]
fn init_containers_hold_the_pod_pending_or_fail_it() {
    let rows = [
        ("Always", vec![], "Pending"),
        ("Always", vec![running("one", 0)], "Pending"),
        ("Always", vec![exited("one", 0, 1)], "Pending"),
        ("OnFailure", vec![exited("one", 0, 1)], "Pending"),
        ("Never", vec![exited("one", 0, 1)], "Failed"),
        ("Never", vec![exited("one", 0, 0)], "Pending"),
        ("Never", vec![running("a", 0), exited("one", 0, 0)], "Running"),
        ("Never", vec![running("a", 0)], "Running"),
        ("Always", vec![exited("a", 0, 1), running("one", 0)], "Pending"),
    ];
    for (policy, containers, expected) in rows {
        let situation = Situation::new(pod(policy, &["one"], &["a"]), containers.clone());
        assert_eq!(situation.phase(), expected, "{policy} {containers:?}");
    }
}

/// Of a pod with policy `Never` no sandbox is replaced once it has had containers: nothing is started any more.
#[test]
fn a_pod_that_is_not_restarted_ends_with_its_sandbox() {
    let two = || pod("Never", &[], &["a", "b"]);
    let mut ruled = pod("Never", &[], &["a"]);
    set_rule(&mut ruled.spec.as_mut().expect("a spec").containers[0], "Always", "Restart");
    let mut restarts_all = two();
    set_rule(&mut restarts_all.spec.as_mut().expect("a spec").containers[0], "Never", "RestartAllContainers");
    let rows = [
        (pod("Never", &["one", "two"], &["a"]), vec![exited("one", 0, 0)], "Failed"),
        (pod("Never", &["one", "two"], &["a"]), vec![proven("one", 0, None)], "Pending"),
        (pod("OnFailure", &["one", "two"], &["a"]), vec![exited("one", 0, 0)], "Pending"),
        (pod("Never", &["one", "two"], &["a"]), vec![], "Pending"),
        (two(), vec![exited("a", 0, 0)], "Failed"),
        (two(), vec![exited("a", 0, 0), status("b", 0, ContainerState::Created)], "Failed"),
        (two(), vec![running("a", 0)], "Pending"),
        (ruled.clone(), vec![exited("a", 0, 255)], "Failed"),
        (ruled.clone(), vec![exited("a", 0, 0)], "Succeeded"),
        (into_static(ruled), vec![exited("a", 0, 255)], "Failed"),
        (restarts_all, vec![exited("a", 0, 42)], "Pending"),
    ];
    for (pod, containers, expected) in rows {
        let situation = Situation::new(pod, containers.clone()).with(|s| s.snapshot.sandboxes[0].ready = false);
        assert_eq!(situation.phase(), expected, "{containers:?}");
    }
}

#[test]
fn a_waiting_init_container_counts_by_its_last_state() {
    let failing = Situation::new(pod("Never", &["one"], &["a"]), vec![exited("one", 0, 1)]);
    let failing = failing.with(|s| {
        set_rule(
            &mut s.pod.spec.as_mut().expect("a spec").init_containers.as_mut().expect("one")[0],
            "OnFailure",
            "Restart",
        );
    });
    assert_eq!(failing.failed("one", "CrashLoopBackOff").phase(), "Pending");
}

#[test]
fn sidecars_alone_keep_a_pod_running() {
    let rows = [
        (vec![running("side", 0)], "Pending"),
        (vec![running("a", 0), running("side", 0)], "Running"),
        (vec![running("a", 0), exited("side", 0, 1)], "Running"),
        (vec![exited("a", 0, 0), running("side", 0)], "Running"),
        (vec![exited("a", 0, 0), exited("side", 0, 1)], "Succeeded"),
        (vec![running("a", 0)], "Pending"),
    ];
    for (containers, expected) in rows {
        let situation = Situation::new(pod("Never", &["side"], &["a"]), containers.clone());
        assert_eq!(situation.phase(), expected, "{containers:?}");
    }
}

/// As after a restart of the runtime that has lost a container, while a sidecar awaits its startup probe again.
#[test]
fn a_regular_container_of_unknown_state_was_created() {
    let mut pod = pod("Always", &["side"], &["a"]);
    let spec = pod.spec.as_mut().expect("a spec");
    spec.init_containers.as_mut().expect("one")[0].startup_probe = Some(Probe::default());
    let restarting = |containers| Situation::new(pod.clone(), vec![running("a", 0)]).then(containers);
    let lost = restarting(vec![running("side", 1), status("a", 0, ContainerState::Unknown)]);
    assert_eq!(lost.phase(), "Running");
    let removed = restarting(vec![running("side", 1)]);
    assert_eq!(removed.phase(), "Pending", "the pod is initialized anew");
}

#[test]
fn a_waiting_container_with_last_state_counts_as_stopped() {
    let crashing = Situation::new(pod("Always", &[], &["a"]), vec![exited("a", 0, 1)]);
    assert_eq!(crashing.failed("a", "CrashLoopBackOff").phase(), "Running");
    let never_ran = Situation::new(pod("Always", &[], &["a"]), vec![]);
    assert_eq!(never_ran.failed("a", "ErrImagePull").phase(), "Pending");
}

#[test]
fn a_stopped_pod_becomes_terminal_unless_static() {
    let stopped = |codes: [i32; 2]| {
        let [a, b] = codes;
        let situation = Situation::new(pod("Always", &[], &["a", "b"]), vec![exited("a", 0, a), exited("b", 0, b)]);
        situation.with(|s| s.is_terminal = true)
    };
    assert_eq!(stopped([0, 0]).phase(), "Succeeded");
    assert_eq!(stopped([0, 1]).phase(), "Failed");
    assert_eq!(stopped([0, 1]).with(|s| s.pod = into_static(s.pod.clone())).phase(), "Running");
}

#[test]
fn a_terminal_phase_is_never_left() {
    let running = || Situation::new(pod("Always", &[], &["a"]), vec![running("a", 0)]);
    let before = running().with(|s| s.old.phase = Some("Failed".into()));
    assert_eq!(before.phase(), "Failed");
    let situation = running().with(|s| s.pod.status.get_or_insert_default().phase = Some("Succeeded".into()));
    assert_eq!(situation.phase(), "Succeeded");
    let both = before.with(|s| s.pod.status.get_or_insert_default().phase = Some("Succeeded".into()));
    assert_eq!(both.phase(), "Succeeded", "the API's phase wins");
}

#[test]
fn reason_and_message_stay_with_their_phase() {
    let evicted = Situation::new(pod("Always", &[], &["a"]), vec![running("a", 0)]).with(|s| {
        s.old.phase = Some("Failed".into());
        s.old.reason = Some("Evicted".into());
        s.pod.status.get_or_insert_default().message = Some("The node was low on resource".into());
    });
    let status = evicted.generate();
    assert_eq!(status.reason.as_deref(), Some("Evicted"));
    assert_eq!(status.message.as_deref(), Some("The node was low on resource"));
    let other = evicted.with(|s| s.old.phase = Some("Pending".into())).generate();
    assert_eq!((other.phase.as_deref(), other.reason), (Some("Running"), None));
}

#[test]
fn the_active_deadline_fails_a_pod() {
    let limited = |seconds| {
        Situation::new(pod("Always", &[], &["a"]), vec![running("a", 0)]).with(|s| {
            s.pod.spec.as_mut().expect("a spec").active_deadline_seconds = Some(seconds);
            s.old.start_time = Some(time(std::time::Duration::ZERO));
        })
    };
    assert_eq!(limited(5_001).phase(), "Running");
    let status = limited(5_000).generate();
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("DeadlineExceeded")));
    let not_started = limited(5_000).with(|s| s.old.start_time = None);
    assert_eq!(not_started.phase(), "Running");
}

/// As after a restart of the agent, when the deadline of a pod that has ended passes, or passed before.
#[test]
fn the_active_deadline_does_not_concern_a_pod_that_has_ended() {
    let ended = |phase: &str, reason: Option<&str>, code| {
        Situation::new(pod("Never", &[], &["a"]), vec![exited("a", 0, code)]).with(|s| {
            s.pod.spec.as_mut().expect("a spec").active_deadline_seconds = Some(10);
            s.old = PodStatus {
                phase: Some(phase.to_owned()),
                reason: reason.map(str::to_owned),
                start_time: Some(time(std::time::Duration::ZERO)),
                ..PodStatus::default()
            };
            s.pod.status = Some(s.old.clone());
        })
    };
    let cases = [("Succeeded", None, 0), ("Failed", None, 3), ("Failed", Some("Evicted"), 3)];
    for (phase, reason, code) in cases {
        let status = ended(phase, reason, code).generate();
        assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some(phase), reason));
        assert_eq!(status.message, None, "{phase}");
    }
    let exceeded = ended("Failed", Some("DeadlineExceeded"), 0).with(|s| s.pod.status = None).generate();
    let expected = (Some("Failed"), Some("DeadlineExceeded"));
    assert_eq!((exceeded.phase.as_deref(), exceeded.reason.as_deref()), expected, "its containers succeed as they end");
}
