//! Patches reach the target status and contain no more than needed.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodIP;
use k8s_openapi::api::core::v1::PodStatus;
use proptest::prelude::*;
use serde_json::Value;
use serde_json::json;

use super::condition;
use super::status;
use super::strategic;
use super::time;
use crate::status::conditions;
use crate::status::manager::diff::patch;
use crate::status::manager::merge::MergeInput;
use crate::status::manager::merge::merge;

fn patched(from: &PodStatus, patch: &Value) -> PodStatus {
    let mut value = serde_json::to_value(from).expect("a status");
    strategic::apply(&mut value, &patch["status"]);
    status(value)
}

fn in_order(mut status: PodStatus) -> PodStatus {
    status.conditions.get_or_insert_default().sort_by(|a, b| a.type_.cmp(&b.type_));
    status
}

#[test]
fn no_patch_for_equal_statuses() {
    let sent = json!({
        "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}],
        "conditions": [{"type": "a", "status": "True"}, {"type": "b", "status": "False"}],
    });
    let mut reordered = sent.clone();
    reordered["conditions"] = json!([{"type": "b", "status": "False"}, {"type": "a", "status": "True"}]);
    assert_eq!(patch("u", &status(sent.clone()), &status(sent.clone())), None);
    assert_eq!(patch("u", &status(sent), &status(reordered)), None, "conditions are compared without their order");
}

#[test]
fn empty_and_absent_fields_are_equal() {
    let container = |extra: Value| {
        let mut container = json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0});
        container.as_object_mut().expect("an object").extend(extra.as_object().cloned().unwrap_or_default());
        status(json!({"containerStatuses": [container]}))
    };
    let kept = container(json!({"lastState": {}, "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}}}));
    let sent = container(json!({"resources": {"limits": {"cpu": "0.5", "memory": "1024Mi"}}, "volumeMounts": []}));
    assert_eq!(patch("u", &kept, &sent), None);
    let more = container(json!({"resources": {"limits": {"cpu": "0.6", "memory": "1Gi"}}}));
    assert!(patch("u", &kept, &more).is_some());
    assert_eq!(patch("u", &status(json!({"reason": ""})), &status(json!({}))), None);
}

#[test]
fn only_what_differs_is_sent() {
    let from = status(json!({
        "phase": "Pending", "qosClass": "Burstable", "startTime": "2026-01-01T00:00:00Z", "message": "waiting",
        "conditions": [
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "m",
             "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "Old", "status": "True"},
        ],
        "hostIPs": [{"ip": "192.0.2.1"}],
    }));
    let to = status(json!({
        "phase": "Running", "qosClass": "Burstable", "startTime": "2026-01-01T00:00:00Z", "podIP": "10.0.0.2",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:07Z", "observedGeneration": 1},
            {"type": "New", "status": "True"},
        ],
        "hostIPs": [{"ip": "192.0.2.1"}],
        "podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::2"}],
    }));
    let expected = json!({
        "metadata": {"uid": "u"},
        "status": {
            "phase": "Running", "message": null, "podIP": "10.0.0.2",
            "podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::2"}, {"$patch": "replace"}],
            "conditions": [
                {"type": "Ready", "status": "True", "reason": null, "message": null,
                 "lastTransitionTime": "2026-01-01T00:00:07Z"},
                {"type": "New", "status": "True"},
                {"$patch": "delete", "type": "Old"},
            ],
        },
    });
    assert_eq!(patch("u", &from, &to), Some(expected));
}

#[test]
fn lists_without_a_merge_key_are_sent_whole() {
    let of = |ready: bool| {
        status(json!({"containerStatuses": [
            {"name": "a", "image": "i", "imageID": "x", "ready": true, "restartCount": 0},
            {"name": "b", "image": "i", "imageID": "x", "ready": ready, "restartCount": 0},
        ]}))
    };
    let patch = patch("u", &of(false), &of(true)).expect("a difference");
    assert_eq!(patch["status"]["containerStatuses"].as_array().map(Vec::len), Some(2));
    assert_eq!(patched(&of(false), &patch), of(true));
}

#[test]
fn resources_are_sent_by_field() {
    let from = status(json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1"}}}));
    let to = status(json!({"resources": {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}}));
    let expected = json!({"resources": {"limits": {"cpu": "2", "memory": null}}});
    assert_eq!(patch("u", &from, &to).expect("a difference")["status"], expected);
}

fn text(words: &'static [&'static str]) -> impl Strategy<Value = Option<String>> {
    prop::option::of(prop::sample::select(words).prop_map(str::to_owned))
}

fn any_condition(type_: &'static str) -> impl Strategy<Value = PodCondition> {
    (any::<bool>(), text(&["Why", "How"]), prop::option::of(0u64..3), prop::option::of(0i64..3)).prop_map(
        move |(is_true, reason, since, observed_generation)| PodCondition {
            type_: type_.to_owned(),
            status: if is_true { "True" } else { "False" }.to_owned(),
            reason,
            last_transition_time: since.map(time),
            observed_generation,
            ..PodCondition::default()
        },
    )
}

fn any_conditions() -> impl Strategy<Value = Option<Vec<PodCondition>>> {
    let types =
        ["Ready", "ContainersReady", "PodScheduled", "AllContainersRestarting", "DisruptionTarget", "a/gate", "other"];
    let one = |type_| prop::option::of(any_condition(type_));
    let all: Vec<_> = types.into_iter().map(one).collect();
    (all, any::<bool>()).prop_map(|(all, reordered)| {
        let mut list: Vec<PodCondition> = all.into_iter().flatten().collect();
        if reordered {
            list.reverse();
        }
        (!list.is_empty()).then_some(list)
    })
}

fn any_ips() -> impl Strategy<Value = Option<Vec<PodIP>>> {
    let ips = prop::sample::subsequence(vec!["10.0.0.1", "10.0.0.2", "fd00::1"], 0..=2);
    ips.prop_shuffle().prop_map(|ips| {
        let ips: Vec<PodIP> = ips.into_iter().map(|ip| PodIP { ip: ip.to_owned() }).collect();
        (!ips.is_empty()).then_some(ips)
    })
}

fn any_containers() -> impl Strategy<Value = Option<Vec<ContainerStatus>>> {
    let one = |name: &'static str| {
        (any::<bool>(), 0i32..3).prop_map(move |(ready, restart_count)| ContainerStatus {
            name: name.to_owned(),
            ready,
            restart_count,
            ..ContainerStatus::default()
        })
    };
    prop::option::of((one("a"), one("b")).prop_map(|(a, b)| vec![a, b]))
}

fn any_status() -> impl Strategy<Value = PodStatus> {
    let phase = text(&["Pending", "Running", "Succeeded", "Failed"]);
    let words = (phase, text(&["Evicted"]), text(&["m", "n"]), text(&["Burstable", "BestEffort"]));
    let rest = (any_conditions(), any_ips(), any_containers(), prop::option::of(1i64..4), prop::option::of(0u64..3));
    (words, rest).prop_map(
        |((phase, reason, message, qos_class), (conditions, pod_ips, containers, generation, start))| PodStatus {
            phase,
            reason,
            message,
            qos_class,
            conditions,
            pod_ip: pod_ips.as_ref().and_then(|ips: &Vec<PodIP>| ips.first()).map(|ip| ip.ip.clone()),
            pod_ips,
            container_statuses: containers,
            observed_generation: generation,
            start_time: start.map(time),
            ..PodStatus::default()
        },
    )
}

proptest! {
    #[test]
    fn applying_the_patch_leads_to_the_target(from in any_status(), to in any_status()) {
        let applied = patch("u", &from, &to).map_or_else(|| from.clone(), |patch| patched(&from, &patch));
        prop_assert_eq!(in_order(applied.clone()), in_order(to.clone()));
        prop_assert_eq!(patch("u", &applied, &to), None, "once is enough");
    }

    #[test]
    fn a_patch_touches_nothing_that_agrees(from in any_status(), to in any_status()) {
        let Some(patch) = patch("u", &from, &to) else { return Ok(()) };
        let (from, to) = (serde_json::to_value(&from).expect("json"), serde_json::to_value(&to).expect("json"));
        for key in patch["status"].as_object().expect("an object").keys() {
            prop_assert_ne!(&from[key], &to[key], "{}", key);
        }
    }

    /// Merging again after the patch changes nothing; foreign conditions are unchanged.
    #[test]
    fn merging_is_idempotent_and_keeps_foreign_conditions(api in any_status(), own in any_status(), may_run: bool, is_mirror: bool) {
        let now = time(9);
        let input = MergeInput { may_run, is_mirror, now: &now };
        let wanted = merge(&api, &own, input);
        let after = patch("u", &api, &wanted).map_or_else(|| api.clone(), |patch| patched(&api, &patch));
        for foreign in api.conditions.iter().flatten().filter(|c| !conditions::is_written_by_agent(&c.type_)) {
            prop_assert_eq!(condition(&after, &foreign.type_), Some(foreign));
        }
        let again = patch("u", &after, &merge(&after, &own, input));
        prop_assert_eq!(again, None);
    }

    /// No terminal phase is sent while containers may run, and none is reverted.
    #[test]
    fn terminal_phases_are_sent_once_and_in_time(api in any_status(), own in any_status(), may_run: bool, is_mirror: bool) {
        let ended = |status: &PodStatus| matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        let now = time(9);
        let wanted = merge(&api, &own, MergeInput { may_run, is_mirror, now: &now });
        if may_run && !ended(&api) {
            prop_assert!(!ended(&wanted));
        }
        if ended(&api) && !is_mirror {
            prop_assert!(ended(&wanted));
        }
        if ended(&wanted) {
            let ready = |type_| condition(&wanted, type_).is_some_and(|c| c.status == "True");
            prop_assert!(!ready("Ready") && !ready("ContainersReady"));
        }
    }
}
