//! The merge of own and API status.

use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::condition;
use super::status;
use super::time;
use crate::status::manager::merge::MergeInput;
use crate::status::manager::merge::merge;

fn merged(api: &PodStatus, own: &PodStatus, may_run: bool) -> PodStatus {
    merge(api, own, MergeInput { may_run, is_mirror: false, now: &time(9) })
}

#[test]
fn foreign_conditions_stay_and_owned_ones_are_replaced() {
    let api = status(json!({"conditions": [
        {"type": "Ready", "status": "True", "message": "old"},
        {"type": "example.com/gate", "status": "True"},
        {"type": "PodResizePending", "status": "True"},
    ]}));
    let own = status(json!({"conditions": [
        {"type": "example.com/gate", "status": "False"},
        {"type": "Ready", "status": "False"},
    ]}));
    let merged = merged(&api, &own, true);
    let list: Vec<_> = merged.conditions.iter().flatten().map(|c| (c.type_.as_str(), c.status.as_str())).collect();
    assert_eq!(list, [("example.com/gate", "True"), ("Ready", "False")]);
}

#[test]
fn fields_of_others_stay() {
    let api = status(json!({
        "nominatedNodeName": "n", "qosClass": "Guaranteed", "observedGeneration": 5,
        "resourceClaimStatuses": [{"name": "c", "resourceClaimName": "x"}],
    }));
    let merged = merged(&api, &status(json!({"phase": "Running", "observedGeneration": 3})), true);
    assert_eq!(
        merged,
        status(json!({
            "phase": "Running", "nominatedNodeName": "n", "qosClass": "Guaranteed", "observedGeneration": 5,
            "resourceClaimStatuses": [{"name": "c", "resourceClaimName": "x"}], "conditions": [],
        }))
    );
}

/// A static pod has no status in its manifest, so that its class is computed by the agent, and by the API server for the
/// mirror pod.
#[test]
fn the_qos_class_of_the_api_server_stays() {
    let own = status(json!({"phase": "Running", "qosClass": "Burstable"}));
    let class = |api: serde_json::Value| merged(&status(api), &own, true).qos_class;
    assert_eq!(class(json!({"qosClass": "BestEffort"})).as_deref(), Some("BestEffort"));
    assert_eq!(class(json!({})).as_deref(), Some("Burstable"));
}

#[test]
fn a_terminal_phase_is_held_back_while_containers_may_run() {
    let api = status(json!({"phase": "Running", "reason": "r"}));
    let own = status(json!({"phase": "Failed", "reason": "Evicted", "message": "m", "podIP": "10.0.0.1"}));
    let held = merged(&api, &own, true);
    assert_eq!(
        (held.phase.as_deref(), held.reason.as_deref(), held.message.as_deref()),
        (Some("Running"), Some("r"), None)
    );
    assert_eq!(held.pod_ip.as_deref(), Some("10.0.0.1"), "the rest goes out");
    let sent = merged(&api, &own, false);
    assert_eq!((sent.phase.as_deref(), sent.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    let both_ended = merged(&status(json!({"phase": "Failed"})), &own, true);
    assert_eq!(both_ended.reason.as_deref(), Some("Evicted"), "it is no transition any more");
}

#[test]
fn a_terminal_phase_set_by_others_is_not_reverted() {
    let api = status(json!({"phase": "Failed", "reason": "NodeLost"}));
    let own = status(json!({"phase": "Running"}));
    let kept = merged(&api, &own, true);
    assert_eq!((kept.phase.as_deref(), kept.reason.as_deref()), (Some("Failed"), Some("NodeLost")));
    let mirror = merge(&api, &own, MergeInput { may_run: true, is_mirror: true, now: &time(9) });
    assert_eq!(mirror.phase.as_deref(), Some("Running"), "a static pod may run again");
}

#[test]
fn a_terminal_pod_is_not_ready() {
    let is = |type_: &str, status: &str| {
        json!({"type": type_, "status": status, "reason": "former", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 2})
    };
    let sent = |phase: &str, conditions: &serde_json::Value| {
        let own = status(json!({"phase": phase, "conditions": conditions}));
        merged(&status(json!({"phase": "Running"})), &own, false)
    };
    let partly = [
        (json!([is("Ready", "True"), is("ContainersReady", "True")]), [time(9), time(9)]),
        (json!([is("Ready", "False"), is("ContainersReady", "True")]), [time_of("2026-01-01T00:00:00Z"), time(9)]),
        (json!([is("Ready", "True"), is("PodScheduled", "True")]), [time(9), time(9)]),
    ];
    for (phase, reason) in [("Succeeded", "PodCompleted"), ("Failed", "PodFailed")] {
        for (conditions, since) in &partly {
            let merged = sent(phase, conditions);
            for (type_, since) in ["Ready", "ContainersReady"].into_iter().zip(since) {
                let denied = condition(&merged, type_).expect("the condition");
                let shown = (denied.status.as_str(), denied.reason.as_deref(), &denied.message);
                assert_eq!(shown, ("False", Some(reason), &None), "{type_} {conditions}");
                assert_eq!(denied.last_transition_time.as_ref(), Some(since), "{type_} {conditions}");
            }
        }
    }
    let unready = json!([is("Ready", "False"), is("ContainersReady", "False")]);
    assert_eq!(condition(&sent("Failed", &unready), "Ready").and_then(|c| c.reason.as_deref()), Some("former"));
}

fn time_of(text: &str) -> Time {
    serde_json::from_value(json!(text)).expect("a time")
}

#[test]
fn a_disruption_is_sent_with_the_terminal_phase() {
    let api = status(json!({"phase": "Running"}));
    let own = status(json!({"phase": "Failed", "conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet",
         "lastTransitionTime": "2020-01-01T00:00:00Z"}]}));
    assert_eq!(condition(&merged(&api, &own, true), "DisruptionTarget"), None);
    let sent = merged(&api, &own, false);
    let disruption = condition(&sent, "DisruptionTarget").expect("sent");
    assert_eq!(
        (disruption.reason.as_deref(), &disruption.last_transition_time),
        (Some("TerminationByKubelet"), &Some(time(9)))
    );

    let known = status(json!({"phase": "Running", "conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
         "lastTransitionTime": "2025-01-01T00:00:00Z"}]}));
    let kept = merged(&known, &own, true);
    assert_eq!(condition(&kept, "DisruptionTarget"), condition(&known, "DisruptionTarget"));
    let after = merged(&sent, &own, false);
    assert_eq!(condition(&after, "DisruptionTarget"), condition(&sent, "DisruptionTarget"), "sent once");

    let reset = status(json!({"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "False"}]}));
    let copied = status(json!({"phase": "Failed", "conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}));
    let ended = merged(&reset, &copied, false);
    assert_eq!(condition(&ended, "DisruptionTarget"), condition(&reset, "DisruptionTarget"), "taken back by its owner");
}
