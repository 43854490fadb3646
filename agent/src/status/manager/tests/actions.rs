//! The next request for one pod.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::copy;
use super::status;
use super::time;
use crate::model::PodUid;
use crate::status::Stored;
use crate::status::manager::action;
use crate::status::manager::action::SyncAction;

fn stored(phase: &str, is_finished: bool) -> Stored {
    let status = Arc::new(status(json!({"phase": phase})));
    Stored { status, version: 1, is_finished, may_run: false, at: std::time::SystemTime::UNIX_EPOCH }
}

fn next(uid: &str, stored: &Stored, phase: &str, deletion: Option<Time>) -> SyncAction {
    let mut copy = copy("p", "u", 1, status(json!({"phase": phase})));
    copy.metadata.deletion_timestamp = deletion;
    action::next(&PodUid::from(uid), stored, &copy, &time(9))
}

#[test]
fn no_request_when_the_api_copy_is_up_to_date() {
    assert_eq!(next("u", &stored("Running", false), "Running", None), SyncAction::None);
    assert_eq!(next("u", &stored("Succeeded", true), "Succeeded", None), SyncAction::None, "not deleted");
    assert_eq!(
        next("u", &stored("Failed", false), "Failed", Some(time(1))),
        SyncAction::None,
        "resources not yet released"
    );
}

#[test]
fn the_status_is_sent_before_the_deletion() {
    let patch = json!({"metadata": {"uid": "u"}, "status": {"phase": "Failed"}});
    assert_eq!(next("u", &stored("Failed", true), "Running", Some(time(1))), SyncAction::Patch(patch));
    assert_eq!(next("u", &stored("Failed", true), "Failed", Some(time(1))), SyncAction::Delete);
}

#[test]
fn a_mirror_pod_is_patched_and_never_deleted() {
    let patch = json!({"metadata": {"uid": "u"}, "status": {"phase": "Failed"}});
    assert_eq!(next("static", &stored("Failed", true), "Running", Some(time(1))), SyncAction::Patch(patch));
    assert_eq!(next("static", &stored("Failed", true), "Failed", Some(time(1))), SyncAction::None);
}

#[test]
fn an_observed_generation_alone_is_deferrable_during_termination() {
    let seen = |generation: i64| {
        json!({"phase": "Running", "observedGeneration": generation,
            "conditions": [{"type": "Ready", "status": "True", "observedGeneration": generation}]})
    };
    let mut copy = copy("p", "u", 1, status(seen(1)));
    let mut stored = stored("Running", false);
    stored.status = Arc::new(status(seen(2)));
    let next = |stored: &Stored, copy: &Pod| action::next(&PodUid::from("u"), stored, copy, &time(9));
    assert!(matches!(next(&stored, &copy), SyncAction::Patch(_)), "not terminating");
    copy.metadata.deletion_timestamp = Some(time(1));
    assert!(matches!(next(&stored, &copy), SyncAction::DeferrablePatch(_)));
    Arc::make_mut(&mut stored.status).pod_ip = Some("10.0.0.1".to_owned());
    assert!(matches!(next(&stored, &copy), SyncAction::Patch(_)), "another field differs");
}

#[test]
fn a_status_without_container_results_is_a_first_status() {
    let waiting = |reason: &str| {
        json!({"name": "c", "ready": false, "restartCount": 0, "image": "i", "imageID": "",
            "state": {"waiting": {"reason": reason}}})
    };
    let waiting_for = |reason: &str| status(json!({"phase": "Pending", "containerStatuses": [waiting(reason)]}));
    let next = |wanted: PodStatus, api: PodStatus| {
        let stored = Stored { status: Arc::new(wanted), ..stored("Pending", false) };
        action::next(&PodUid::from("u"), &stored, &copy("p", "u", 1, api), &time(9))
    };
    let unset = || status(json!({"phase": "Pending"}));
    assert!(matches!(next(waiting_for("ContainerCreating"), unset()), SyncAction::FirstPatch(_)));
    assert!(matches!(next(waiting_for("ErrImagePull"), unset()), SyncAction::Patch(_)), "a start failure");
    assert!(matches!(next(status(json!({"phase": "Failed"})), unset()), SyncAction::Patch(_)));
    let more =
        status(json!({"phase": "Pending", "podIP": "10.0.0.1", "containerStatuses": [waiting("PodInitializing")]}));
    assert!(matches!(next(more, waiting_for("PodInitializing")), SyncAction::Patch(_)), "not the first status");
    let mut init = waiting_for("PodInitializing");
    let run = json!([{"name": "i", "ready": false, "restartCount": 0, "image": "i", "imageID": "", "state": {"running": {}}}]);
    init.init_container_statuses = serde_json::from_value(run).unwrap();
    assert!(matches!(next(init, unset()), SyncAction::Patch(_)), "an init container runs");
}

/// A status of container `c`.
fn one(state: &serde_json::Value) -> serde_json::Value {
    json!([{"name": "c", "ready": false, "restartCount": 0, "image": "i", "imageID": "", "state": state}])
}

#[test]
fn a_container_that_runs_again_after_its_final_end_does_not_hold_up_the_status() {
    let (ended, again) = (json!({"terminated": {"exitCode": 1}}), json!({"running": {}}));
    let lasting = |own: &str| json!({"containers": [{"name": "c", "restartPolicy": own}], "restartPolicy": "Always"});
    let init = json!({"containers": [{"name": "a"}], "initContainers": [{"name": "c", "restartPolicy": "Never"}]});
    let ephemeral = json!({"containers": [{"name": "a"}], "ephemeralContainers": [{"name": "c"}]});
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let mut all = lasting("Never");
    all["containers"][0]["restartPolicyRules"] = json!([rule]);
    let once = json!({"containers": [{"name": "c"}], "restartPolicy": "Never"});
    for (list, spec, is_final) in [
        ("containerStatuses", lasting("Never"), true),
        ("containerStatuses", once, true),
        ("containerStatuses", lasting("OnFailure"), false),
        ("containerStatuses", all, false),
        ("initContainerStatuses", init, true),
        ("ephemeralContainerStatuses", ephemeral, true),
    ] {
        let mut copy = copy("p", "u", 1, status(json!({"phase": "Running", list: one(&ended)})));
        copy.spec = serde_json::from_value(spec.clone()).expect("a spec");
        let next = |state: &serde_json::Value| {
            let wanted = status(json!({"phase": "Running", "podIP": "10.0.0.1", list: one(state)}));
            let stored = Stored { status: Arc::new(wanted), ..stored("Running", false) };
            action::next(&PodUid::from("u"), &stored, &copy, &time(9))
        };
        let SyncAction::Patch(patch) = next(&again) else { panic!("no patch: {spec}") };
        let sent = patch["status"].as_object().expect("an object");
        assert_eq!(sent["podIP"], "10.0.0.1", "{spec}");
        assert_eq!(sent.get(list).is_none(), is_final, "{spec}");
        let SyncAction::Patch(patch) = next(&json!({"terminated": {"exitCode": 7}})) else {
            panic!("no patch: {spec}")
        };
        assert_eq!(patch["status"][list][0]["state"]["terminated"]["exitCode"], 7, "its next end: {spec}");
    }
}

/// Naive: the container keeps its end at the API server, while the conditions still say that it is ready.
#[test]
fn a_pod_with_a_kept_end_is_not_ready() {
    let container = |name: &str, state: serde_json::Value| {
        let ready = state.get("running").is_some();
        json!({"name": name, "ready": ready, "restartCount": 0, "image": "i", "imageID": "", "state": state})
    };
    let (runs, ended) = (json!({"running": {}}), json!({"terminated": {"exitCode": 0}}));
    let with = |first: &serde_json::Value, ready: bool, since: u64| {
        let condition = |type_: &str| {
            let text = if ready { "True" } else { "False" };
            let mut condition =
                json!({"type": type_, "status": text, "observedGeneration": 3, "lastTransitionTime": time(since)});
            if !ready {
                condition["reason"] = json!("ContainersNotReady");
                condition["message"] = json!("containers with unready status: [c]");
            }
            condition
        };
        status(json!({"phase": "Running", "conditions": [condition("Ready"), condition("ContainersReady")],
            "containerStatuses": [container("c", first.clone()), container("other", runs.clone())]}))
    };
    let next = |api: PodStatus| {
        let mut copy = copy("p", "u", 1, api);
        copy.metadata.generation = Some(4);
        let spec = json!({"containers": [{"name": "c"}, {"name": "other"}], "restartPolicy": "Never"});
        copy.spec = serde_json::from_value(spec).expect("a spec");
        let stored = Stored { status: Arc::new(with(&runs, true, 5)), ..stored("Running", false) };
        action::next(&PodUid::from("u"), &stored, &copy, &time(9))
    };
    assert_eq!(next(with(&ended, false, 1)), SyncAction::None, "the API server has it already");
    let SyncAction::Patch(patch) = next(with(&ended, true, 1)) else { panic!("no patch") };
    let sent = patch["status"]["conditions"].as_array().expect("conditions");
    let changed: Vec<_> = sent.iter().map(|c| [&c["type"], &c["status"], &c["lastTransitionTime"]]).collect();
    let denied = ["Ready", "ContainersReady"].map(|type_| [json!(type_), json!("False"), json!(time(9))]);
    assert_eq!(changed, denied.iter().map(|values| values.each_ref()).collect::<Vec<_>>());
    assert!(matches!(next(with(&runs, false, 1)), SyncAction::Patch(_)), "without an end the pod becomes ready");
}
