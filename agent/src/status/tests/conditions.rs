//! The condition table.

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodReadinessGate;

use super::Situation;
use super::condition;
use super::describe;
use crate::model::testing::*;
use crate::status::conditions::update_readiness;

fn foreign(type_: &str, status: &str) -> PodCondition {
    PodCondition { type_: type_.into(), status: status.into(), ..PodCondition::default() }
}

#[test]
fn a_running_pod_is_ready() {
    let status =
        Situation::new(pod("Always", &["one", "side"], &["a"]), vec![running("a", 0), running("side", 0)]).generate();
    for type_ in ["PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"] {
        assert_eq!(describe(&status, type_), "True", "{type_}");
    }
    assert!(status.conditions.iter().flatten().all(|condition| condition.type_ != "AllContainersRestarting"));
}

#[test]
fn ready_to_start_containers_follows_the_sandbox() {
    let situation = Situation::new(pod("Always", &[], &["a"]), vec![]);
    assert_eq!(describe(&situation.generate(), "PodReadyToStartContainers"), "True");
    let lost = situation.with(|s| s.snapshot.sandboxes[0].ready = false);
    let shown = describe(&lost.generate(), "PodReadyToStartContainers");
    assert_eq!(shown, "False PodSandboxNotReady pod sandbox is not ready");
}

#[test]
fn initialized_names_incomplete_containers() {
    let rows = [
        (vec![], "False ContainersNotInitialized containers with incomplete status: [one side]"),
        (vec![exited("one", 0, 0)], "False ContainersNotInitialized containers with incomplete status: [side]"),
        (vec![running("side", 0), exited("one", 0, 0)], "True"),
        (vec![running("a", 0)], "True"),
        (vec![exited("a", 0, 1)], "True"),
    ];
    for (containers, expected) in rows {
        let status = Situation::new(pod("Always", &["one", "side"], &["a"]), containers.clone()).generate();
        assert_eq!(describe(&status, "Initialized"), expected, "{containers:?}");
    }
    let done = Situation::new(pod("Never", &["one"], &["a"]), vec![exited("a", 0, 0), exited("one", 0, 0)]).generate();
    assert_eq!(describe(&done, "Initialized"), "True PodCompleted");
}

#[test]
fn initialized_stays_true() {
    let again = Situation::new(pod("Always", &["one"], &["a"]), vec![running("a", 0)]).then(vec![running("one", 1)]);
    assert_eq!(describe(&again.generate(), "Initialized"), "True");
    let off = again.with(|s| s.gates.all_containers = false);
    assert_eq!(
        describe(&off.generate(), "Initialized"),
        "False ContainersNotInitialized containers with incomplete status: [one]"
    );
}

#[test]
fn ready_names_unready_containers() {
    let rows = [
        ("Always", vec![running("a", 0)], "False ContainersNotReady containers with unready status: [side b]"),
        (
            "Always",
            vec![running("a", 0), running("b", 0)],
            "False ContainersNotReady containers with unready status: [side]",
        ),
        ("Never", vec![exited("a", 0, 0), exited("b", 0, 0), exited("side", 0, 0)], "False PodCompleted"),
        ("Never", vec![exited("a", 0, 1), exited("b", 0, 0), exited("side", 0, 0)], "False PodFailed"),
    ];
    for (policy, containers, expected) in rows {
        let status = Situation::new(pod(policy, &["side"], &["a", "b"]), containers.clone()).generate();
        assert_eq!(describe(&status, "ContainersReady"), expected, "{containers:?}");
        assert_eq!(describe(&status, "Ready"), expected, "{containers:?}");
    }
}

#[test]
fn readiness_gates_keep_ready_false() {
    let gated = Situation::new(pod("Always", &[], &["a"]), vec![running("a", 0)]).with(|s| {
        let gates = ["x", "y", "z"].map(|name| PodReadinessGate { condition_type: name.into() });
        s.pod.spec.as_mut().expect("a spec").readiness_gates = Some(gates.to_vec());
        s.pod.status.get_or_insert_default().conditions = Some(vec![foreign("y", "False"), foreign("z", "True")]);
    });
    let status = gated.generate();
    assert_eq!(describe(&status, "ContainersReady"), "True");
    assert_eq!(
        describe(&status, "Ready"),
        r#"False ReadinessGatesNotReady corresponding condition of pod readiness gate "x" does not exist., the status of pod readiness gate "y" is not "True", but False"#
    );
    let open = gated.with(|s| {
        s.pod.status.get_or_insert_default().conditions =
            Some(["x", "y", "z"].map(|name| foreign(name, "True")).to_vec());
    });
    assert_eq!(describe(&open.generate(), "Ready"), "True");
}

#[test]
fn readiness_gates_may_name_what_the_agent_determines_before_ready() {
    let gated = |gate: &str| {
        Situation::new(pod("Always", &["one"], &["a"]), vec![running("a", 0), exited("one", 0, 0)]).with(|s| {
            let gates = vec![PodReadinessGate { condition_type: gate.into() }];
            s.pod.spec.as_mut().expect("a spec").readiness_gates = Some(gates);
        })
    };
    for gate in ["Initialized", "PodReadyToStartContainers"] {
        let situation = gated(gate);
        let mut status = situation.generate();
        assert_eq!(describe(&status, "Ready"), "True", "{gate}");
        update_readiness(&situation.pod, &mut status);
        assert_eq!(describe(&status, "Ready"), "True", "{gate}, after a probe");
    }
    for gate in ["ContainersReady", "PodScheduled", "Ready"] {
        assert!(describe(&gated(gate).generate(), "Ready").starts_with("False ReadinessGatesNotReady"), "{gate}");
    }
}

#[test]
fn foreign_conditions_are_kept() {
    let situation = Situation::new(pod("Always", &[], &["a"]), vec![running("a", 0)]).with(|s| {
        let api = vec![foreign("mine", "True"), foreign("Ready", "Unknown"), foreign("DisruptionTarget", "False")];
        s.pod.status.get_or_insert_default().conditions = Some(api);
        let disrupted =
            PodCondition { reason: Some("TerminationByKubelet".into()), ..foreign("DisruptionTarget", "True") };
        s.old.conditions = Some(vec![disrupted, foreign("stale", "True")]);
    });
    let status = situation.generate();
    assert_eq!(describe(&status, "mine"), "True");
    assert_eq!(describe(&status, "Ready"), "True");
    assert_eq!(describe(&status, "DisruptionTarget"), "True TerminationByKubelet");
    let types: Vec<_> = status.conditions.iter().flatten().map(|c| c.type_.as_str()).collect();
    assert_eq!(
        types,
        [
            "mine",
            "DisruptionTarget",
            "PodReadyToStartContainers",
            "Initialized",
            "Ready",
            "ContainersReady",
            "PodScheduled"
        ]
    );
}

/// The disruption controller sets it to False if the pod was not deleted. A Job that ignores disruptions would not count
/// a later failure of the pod.
#[test]
fn a_disruption_that_another_client_takes_back_is_none() {
    let by_eviction = |status: &str| PodCondition {
        reason: Some("EvictionByEvictionAPI".into()),
        ..foreign("DisruptionTarget", status)
    };
    let situation = Situation::new(pod("Never", &[], &["a"]), vec![running("a", 0)])
        .with(|s| s.pod.status.get_or_insert_default().conditions = Some(vec![by_eviction("True")]))
        .then(vec![exited("a", 0, 1)]);
    assert_eq!(describe(&situation.old, "DisruptionTarget"), "True EvictionByEvictionAPI");
    let reset = situation.with(|s| s.pod.status.get_or_insert_default().conditions = Some(vec![by_eviction("False")]));
    assert_eq!(describe(&reset.generate(), "DisruptionTarget"), "False EvictionByEvictionAPI");
}

#[test]
fn restart_all_containers_has_a_condition() {
    let ruled = |containers| {
        Situation::new(pod("Never", &[], &["a"]), containers).with(|s| {
            set_rule(&mut s.pod.spec.as_mut().expect("a spec").containers[0], "Never", "RestartAllContainers")
        })
    };
    assert_eq!(describe(&ruled(vec![running("a", 0)]).generate(), "AllContainersRestarting"), "False");
    assert_eq!(describe(&ruled(vec![exited("a", 0, 1)]).generate(), "AllContainersRestarting"), "False PodFailed");
    let demanded = ruled(vec![exited("a", 0, 42)]);
    assert_eq!(
        describe(&demanded.generate(), "AllContainersRestarting"),
        "True RestartAllContainersStarted container exited with restart policy rule"
    );
    let gone = demanded.then(vec![]);
    assert_eq!(describe(&gone.generate(), "AllContainersRestarting"), "False");
}

#[test]
fn conditions_carry_the_generation() {
    let status =
        Situation::new(pod("Always", &[], &["a"]), vec![]).with(|s| s.pod.metadata.generation = Some(7)).generate();
    assert_eq!(condition(&status, "Ready").observed_generation, Some(7));
    assert_eq!(status.observed_generation, Some(7));
}
