//! The status cache: versions, times, illegal transitions, final status.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::ContainerState as ApiState;
use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;

use super::api_status;
use super::brief;
use super::condition;
use super::has_ended;
use super::is_running;
use super::state;
use crate::model::PodUid;
use crate::model::restart::RestartGates;
use crate::model::testing;
use crate::status::ApiCopies;
use crate::status::IllegalTransition;
use crate::status::NodeAddresses;
use crate::status::StatusStore;
use crate::status::Statuses;
use crate::status::Stored;
use crate::status::transition::is_same;

fn store() -> StatusStore {
    StatusStore::new(RestartGates::default())
}

fn uid() -> PodUid {
    "uid".into()
}

/// `seconds` and a bit after the test's origin.
fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH
        + Duration::from_nanos(testing::T0.unsigned_abs())
        + Duration::from_millis(seconds * 1000 + 400)
}

fn ready(status: &str) -> PodStatus {
    let condition = PodCondition { type_: "Ready".into(), status: status.into(), ..PodCondition::default() };
    PodStatus { phase: Some("Running".into()), conditions: Some(vec![condition]), ..PodStatus::default() }
}

fn of_containers(containers: Vec<ContainerStatus>) -> PodStatus {
    PodStatus { phase: Some("Running".into()), container_statuses: Some(containers), ..PodStatus::default() }
}

fn of_init(containers: Vec<ContainerStatus>) -> PodStatus {
    PodStatus { phase: Some("Pending".into()), init_container_statuses: Some(containers), ..PodStatus::default() }
}

fn stored(store: &StatusStore) -> &Stored {
    store.get("uid").expect("a stored status")
}

#[test]
fn only_changes_make_versions() {
    let pod = testing::pod("Always", &[], &["a"]);
    let mut store = store();
    assert_eq!(store.get("uid"), None);
    assert_eq!(store.set(&uid(), &pod, None, ready("False"), at(0)), Ok(true));
    assert_eq!(store.set(&uid(), &pod, None, ready("False"), at(1)), Ok(false));
    assert_eq!((stored(&store).version, stored(&store).at), (1, at(0)));
    assert_eq!(store.set(&uid(), &pod, None, ready("True"), at(2)), Ok(true));
    assert_eq!((stored(&store).version, stored(&store).at), (2, at(2)));
}

#[test]
fn readers_share_the_status_and_keep_what_they_have_read() {
    let pod = testing::pod("Always", &[], &["a"]);
    let mut store = store();
    store.set(&uid(), &pod, None, ready("True"), at(0)).expect("legal");
    let read = stored(&store).clone();
    assert!(Arc::ptr_eq(&read.status, &stored(&store).status), "it is not copied");
    store.set(&uid(), &pod, None, ready("False"), at(1)).expect("legal");
    assert_eq!((condition(&read.status, "Ready").status.as_str(), read.version), ("True", 1));
    assert_eq!(condition(&stored(&store).status, "Ready").status, "False");
}

#[test]
fn foreign_conditions_make_no_version() {
    let pod = testing::pod("Always", &[], &["a"]);
    let mut store = store();
    store.set(&uid(), &pod, None, ready("True"), at(0)).expect("legal");
    let mut more = ready("True");
    let foreign = PodCondition { type_: "mine".into(), status: "True".into(), ..PodCondition::default() };
    more.conditions.as_mut().expect("conditions").push(foreign);
    assert_eq!(store.set(&uid(), &pod, None, more, at(1)), Ok(false));
    let mut reasoned = ready("True");
    reasoned.conditions.as_mut().expect("conditions")[0].reason = Some("Why".into());
    assert_eq!(store.set(&uid(), &pod, None, reasoned, at(1)), Ok(true));
}

#[test]
fn a_status_differs_only_in_what_the_agent_owns() {
    let same: [fn(&mut PodStatus); 6] = [
        |_| {},
        |status| status.conditions.as_mut().expect("some").reverse(),
        |status| status.conditions.as_mut().expect("some")[0].observed_generation = Some(9),
        |status| status.resource_claim_statuses = Some(Vec::new()),
        |status| status.extended_resource_claim_status = Some(Default::default()),
        |status| status.node_allocatable_resource_claim_statuses = Some(Vec::new()),
    ];
    let other: [fn(&mut PodStatus); 20] = [
        |status| status.phase = None,
        |status| status.reason = Some("other".into()),
        |status| status.message = Some("other".into()),
        |status| status.container_statuses = Some(Vec::new()),
        |status| status.init_container_statuses = Some(Vec::new()),
        |status| status.ephemeral_container_statuses = Some(Vec::new()),
        |status| status.host_ip = Some("10.0.0.1".into()),
        |status| status.host_ips = Some(Vec::new()),
        |status| status.pod_ip = Some("10.0.0.1".into()),
        |status| status.pod_ips = Some(Vec::new()),
        |status| status.qos_class = Some("Burstable".into()),
        |status| status.allocated_resources = Some(Default::default()),
        |status| status.resources = Some(Default::default()),
        |status| status.resize = Some("other".into()),
        |status| status.nominated_node_name = Some("other".into()),
        |status| status.observed_generation = Some(9),
        |status| status.start_time = Some(testing::time(Duration::ZERO)),
        |status| status.conditions = None,
        |status| status.conditions.as_mut().expect("some")[0].message = Some("other".into()),
        |status| status.conditions.as_mut().expect("some")[0].status = "True".into(),
    ];
    let status = || {
        let mut status = ready("False");
        let scheduled = PodCondition { type_: "PodScheduled".into(), status: "True".into(), ..PodCondition::default() };
        status.conditions.as_mut().expect("some").push(scheduled);
        status
    };
    let rows = same.map(|change| (change, true)).into_iter().chain(other.map(|change| (change, false)));
    for (index, (change, expected)) in rows.enumerate() {
        let mut changed = status();
        change(&mut changed);
        assert_eq!(is_same(&status(), &changed), expected, "{index}");
    }
}

#[test]
fn a_pod_being_deleted_is_always_sent() {
    let mut pod = testing::pod("Always", &[], &["a"]);
    let mut store = store();
    store.set(&uid(), &pod, None, ready("True"), at(0)).expect("legal");
    pod.metadata.deletion_timestamp = Some(testing::time(Duration::ZERO));
    assert_eq!(store.set(&uid(), &pod, None, ready("True"), at(1)), Ok(true));
    assert_eq!(stored(&store).version, 2);
}

#[test]
fn transition_times_are_those_of_the_change() {
    let pod = testing::pod("Always", &[], &["a"]);
    let mut store = store();
    let since = |store: &StatusStore| condition(&stored(store).status, "Ready").last_transition_time.clone();
    store.set(&uid(), &pod, None, ready("False"), at(0)).expect("legal");
    assert_eq!(stored(&store).status.start_time, Some(testing::time(Duration::ZERO)), "whole seconds");
    let mut reasoned = ready("False");
    reasoned.message = Some("changed".into());
    store.set(&uid(), &pod, None, reasoned, at(5)).expect("legal");
    assert_eq!(since(&store), Some(testing::time(Duration::ZERO)));
    store.set(&uid(), &pod, None, ready("True"), at(9)).expect("legal");
    assert_eq!(since(&store), Some(testing::time(Duration::from_secs(9))));
    assert_eq!(stored(&store).status.start_time, Some(testing::time(Duration::ZERO)));
}

#[test]
fn the_basis_is_cache_then_mirror_then_pod() {
    let own = Pod { status: Some(ready("own")), ..testing::pod("Always", &[], &["a"]) };
    let mirror = Pod { status: Some(ready("mirror")), ..own.clone() };
    let mut store = store();
    assert_eq!(store.basis("uid", &own, None), own.status.as_ref());
    assert_eq!(store.basis("uid", &own, Some(&mirror)), mirror.status.as_ref());
    store.set(&uid(), &own, Some(&mirror), ready("mirror"), at(3)).expect("legal");
    assert_eq!(store.basis("uid", &own, Some(&mirror)), Some(&*stored(&store).status));
}

/// The mirror pod of a static pod, once it is known.
#[derive(Default)]
struct Mirror(Mutex<Option<crate::model::Pod>>);

impl ApiCopies for Mirror {
    fn api_copy(&self, _: &PodUid) -> Option<crate::model::Pod> {
        self.0.lock().expect("not poisoned").clone()
    }
}

/// A source gives its pods a status, which is not what the API server has.
#[test]
fn an_unmanaged_static_pod_keeps_the_status_of_its_mirror_pod() {
    let pending = PodStatus { phase: Some("Pending".into()), ..PodStatus::default() };
    let pod = Pod { status: Some(pending), ..testing::into_static(testing::pod("Always", &[], &["a"])) };
    let mirror = Arc::new(Mirror::default());
    let node = tokio::sync::watch::channel(NodeAddresses::default()).1;
    let statuses = Statuses::new("test".into(), node, RestartGates::default()).with_api(mirror.clone());
    let uid = crate::model::pod_ref(&pod).uid;
    statuses.keep(&pod, at(0));
    assert_eq!(statuses.get(&uid), None, "the API server's is not known");
    let known = PodStatus { start_time: Some(testing::time(Duration::ZERO)), ..ready("True") };
    *mirror.0.lock().expect("not poisoned") = Some(Arc::new(Pod { status: Some(known.clone()), ..pod.clone() }));
    statuses.keep(&pod, at(9));
    let kept = statuses.get(&uid).expect("a status");
    assert_eq!(condition(&kept, "Ready").status, "True");
    assert_eq!((kept.phase, kept.start_time), (known.phase, known.start_time));
}

/// The source of a static pod gives it no QoS class.
#[test]
fn a_rejected_pod_has_its_qos_class() {
    let node = tokio::sync::watch::channel(NodeAddresses::default()).1;
    let statuses = Statuses::new("test".into(), node, RestartGates::default());
    let class_of = |pod: &Pod| {
        statuses.reject(pod, "OutOfcpu", "why", at(0));
        statuses.get(&crate::model::pod_ref(pod).uid).and_then(|status| status.qos_class)
    };
    let mut pod = testing::into_static(testing::pod("Always", &[], &["a"]));
    assert_eq!(class_of(&pod).as_deref(), Some("BestEffort"));
    let reported = PodStatus { qos_class: Some("Guaranteed".into()), ..PodStatus::default() };
    (pod.status, pod.metadata.uid) = (Some(reported), Some("other".into()));
    assert_eq!(class_of(&pod).as_deref(), Some("Guaranteed"), "kept as it is");
}

#[test]
fn the_generation_never_falls() {
    let pod = testing::pod("Always", &[], &["a"]);
    let mut store = store();
    let of = |generation| PodStatus { observed_generation: generation, ..ready("True") };
    store.set(&uid(), &pod, None, of(Some(4)), at(0)).expect("legal");
    assert_eq!(store.set(&uid(), &pod, None, of(Some(3)), at(1)), Ok(false));
    assert_eq!(stored(&store).status.observed_generation, Some(4));
}

/// As in another sandbox, where init containers run again.
#[test]
fn a_container_that_runs_again_after_a_final_end_does_not_hold_up_the_status() {
    let statuses = |state: ApiState| PodStatus {
        init_container_statuses: Some(vec![api_status("one", state.clone())]),
        container_statuses: Some(vec![api_status("a", state)]),
        ..PodStatus::default()
    };
    for policy in ["Never", "OnFailure"] {
        let pod = testing::pod(policy, &["one"], &["a"]);
        let mut store = store();
        store.set(&uid(), &pod, None, statuses(has_ended(0)), at(0)).expect("legal");
        let again = PodStatus { pod_ip: Some("10.0.0.2".to_owned()), ..statuses(is_running()) };
        assert_eq!(store.set(&uid(), &pod, None, again.clone(), at(1)), Ok(true), "{policy}");
        let kept = &stored(&store).status;
        assert_eq!((&kept.pod_ip, &kept.container_statuses), (&again.pod_ip, &again.container_statuses), "{policy}");
        let waiting = statuses(state::waiting("ErrImagePull", ""));
        assert_eq!(store.set(&uid(), &pod, None, waiting, at(2)), Ok(true), "{policy}");
    }
}

#[test]
fn init_statuses_must_line_up_with_the_spec() {
    let pod = testing::pod("Never", &["one"], &["a"]);
    let mut store = store();
    let shifted = || of_init(vec![api_status("other", is_running())]);
    store.set(&uid(), &pod, None, shifted(), at(0)).expect("nothing to compare with yet");
    let error = store.set(&uid(), &pod, None, shifted(), at(1)).expect_err("misaligned");
    assert_eq!(error, IllegalTransition::Misaligned { index: 0, name: "other".into() });
    assert!(error.to_string().contains("init container other at position 0"), "{error}");
}

#[test]
fn the_final_status_terminates_every_container() {
    let mut pod = testing::pod("Always", &[], &["a", "b"]);
    pod.status = Some(PodStatus::default());
    let mut store = store();
    let last = of_containers(vec![api_status("a", is_running()), api_status("b", has_ended(0))]);
    store.set(&uid(), &pod, None, last, at(0)).expect("legal");
    assert_eq!(store.terminate_pod(&uid(), &pod, None, at(1)), Ok(true));
    let entry = stored(&store).clone();
    let ends: Vec<_> = entry.status.container_statuses.iter().flatten().map(|c| brief(c.state.as_ref())).collect();
    assert_eq!(ends, ["terminated 137 ContainerStatusUnknown", "terminated 0"]);
    assert_eq!((entry.status.phase.as_deref(), entry.is_finished), (Some("Failed"), true));
    assert_eq!(store.terminate_pod(&uid(), &pod, None, at(2)), Ok(true), "always sent");
    let again = PodStatus::clone(&stored(&store).status);
    store.set(&uid(), &pod, None, PodStatus { message: Some("late".into()), ..again }, at(3)).expect("legal");
    assert!(stored(&store).is_finished, "never taken back");
}

#[test]
fn a_static_pod_keeps_its_phase_and_stays_unfinished() {
    let pod = testing::into_static(testing::pod("Always", &[], &["a"]));
    let mut store = store();
    store.set(&uid(), &pod, None, of_containers(vec![api_status("a", is_running())]), at(0)).expect("legal");
    store.terminate_pod(&uid(), &pod, None, at(1)).expect("legal");
    let entry = stored(&store);
    assert_eq!((entry.status.phase.as_deref(), entry.is_finished), (Some("Running"), false));
    assert_eq!(
        brief(entry.status.container_statuses.as_ref().expect("one")[0].state.as_ref()),
        "terminated 137 ContainerStatusUnknown"
    );
}

#[test]
fn init_containers_that_never_started_stay_waiting() {
    let waiting = || state::waiting("PodInitializing", "");
    let rows = [
        (vec![waiting(), waiting(), waiting()], 1),
        (vec![has_ended(0), waiting(), waiting()], 1),
        (vec![has_ended(0), is_running(), waiting()], 2),
        (vec![waiting(), waiting(), is_running()], 3),
    ];
    for (states, lost_until) in rows {
        let pod = testing::pod("Always", &["x", "y", "z"], &["a"]);
        let mut store = store();
        let list: Vec<_> =
            ["x", "y", "z"].into_iter().zip(states).map(|(name, state)| api_status(name, state)).collect();
        let mut last = of_init(list);
        last.container_statuses = Some(vec![api_status("a", waiting())]);
        store.set(&uid(), &pod, None, last, at(0)).expect("legal");
        store.terminate_pod(&uid(), &pod, None, at(1)).expect("legal");
        let status = &stored(&store).status;
        let ended: Vec<_> = status
            .init_container_statuses
            .iter()
            .flatten()
            .map(|c| brief(c.state.as_ref()).starts_with("terminated"))
            .collect();
        assert_eq!(ended, [true, lost_until > 1, lost_until > 2]);
        let regular = brief(status.container_statuses.as_ref().expect("one")[0].state.as_ref());
        assert_eq!(regular, "waiting PodInitializing", "the pod was never initialised");
    }
}

#[test]
fn the_api_status_decides_whether_a_pod_was_initialised() {
    let waiting = || state::waiting("PodInitializing", "");
    let started = |mut status: ContainerStatus| {
        status.started = Some(true);
        status
    };
    let rows = [
        ("one", None, false),
        ("one", Some(of_init(vec![api_status("one", has_ended(1))])), false),
        ("one", Some(of_init(vec![api_status("one", has_ended(0))])), true),
        ("side", Some(of_init(vec![api_status("side", is_running())])), false),
        ("side", Some(of_init(vec![started(api_status("side", is_running()))])), true),
        ("one", Some(of_containers(vec![api_status("a", is_running())])), true),
        ("one", Some(of_containers(vec![api_status("a", waiting())])), false),
    ];
    for (init, reported, initialised) in rows {
        let pod = Pod { status: reported.clone(), ..testing::pod("Always", &[init], &["a"]) };
        let mut store = store();
        let last = PodStatus { container_statuses: Some(vec![api_status("a", waiting())]), ..ready("False") };
        store.set(&uid(), &pod, None, last, at(0)).expect("legal");
        store.terminate_pod(&uid(), &pod, None, at(1)).expect("legal");
        let regular = brief(stored(&store).status.container_statuses.as_ref().expect("one")[0].state.as_ref());
        assert_eq!(regular.starts_with("terminated"), initialised, "{init} {reported:?}");
    }
}

#[test]
fn only_known_pods_are_kept() {
    let pod = testing::pod("Always", &[], &["a"]);
    let mut store = store();
    for name in ["one", "two", "three"] {
        store.set(&name.into(), &pod, None, ready("True"), at(0)).expect("legal");
    }
    store.retain(|uid| uid.as_str() == "two");
    assert_eq!(store.iter().map(|(uid, _)| uid.as_str()).collect::<Vec<_>>(), ["two"]);
}
