//! What comes next for one pod.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::copy;
use super::status;
use super::time;
use crate::model::PodUid;
use crate::status::Stored;
use crate::status::manager::step;
use crate::status::manager::step::Step;

fn stored(phase: &str, is_finished: bool) -> Stored {
    let status = status(json!({"phase": phase}));
    Stored { status, version: 1, is_finished, may_run: false, at: std::time::SystemTime::UNIX_EPOCH }
}

fn next(uid: &str, stored: &Stored, phase: &str, deletion: Option<Time>) -> Step {
    let mut copy = copy("p", "u", 1, status(json!({"phase": phase})));
    copy.metadata.deletion_timestamp = deletion;
    step::next(&PodUid::from(uid), stored, &copy, &time(9))
}

#[test]
fn nothing_where_the_api_agrees() {
    assert_eq!(next("u", &stored("Running", false), "Running", None), Step::Nothing);
    assert_eq!(
        next("u", &stored("Succeeded", true), "Succeeded", None),
        Step::Nothing,
        "nobody asked for its deletion"
    );
    assert_eq!(next("u", &stored("Failed", false), "Failed", Some(time(1))), Step::Nothing, "something is still held");
}

#[test]
fn the_status_goes_before_the_deletion() {
    let patch = json!({"metadata": {"uid": "u"}, "status": {"phase": "Failed"}});
    assert_eq!(next("u", &stored("Failed", true), "Running", Some(time(1))), Step::Patch(patch));
    assert_eq!(next("u", &stored("Failed", true), "Failed", Some(time(1))), Step::Delete);
}

#[test]
fn a_mirror_is_told_and_never_deleted_for_its_pod() {
    let patch = json!({"metadata": {"uid": "u"}, "status": {"phase": "Failed"}});
    assert_eq!(next("static", &stored("Failed", true), "Running", Some(time(1))), Step::Patch(patch));
    assert_eq!(next("static", &stored("Failed", true), "Failed", Some(time(1))), Step::Nothing);
}

#[test]
fn a_new_generation_alone_can_wait_for_the_end() {
    let seen = |generation: i64| {
        json!({"phase": "Running", "observedGeneration": generation,
            "conditions": [{"type": "Ready", "status": "True", "observedGeneration": generation}]})
    };
    let mut copy = copy("p", "u", 1, status(seen(1)));
    let mut stored = stored("Running", false);
    stored.status = status(seen(2));
    let next = |stored: &Stored, copy: &Pod| step::next(&PodUid::from("u"), stored, copy, &time(9));
    assert!(matches!(next(&stored, &copy), Step::Patch(_)), "nothing ends");
    copy.metadata.deletion_timestamp = Some(time(1));
    assert!(matches!(next(&stored, &copy), Step::Later(_)));
    stored.status.pod_ip = Some("10.0.0.1".to_owned());
    assert!(matches!(next(&stored, &copy), Step::Patch(_)), "there is more to say");
}

#[test]
fn the_first_word_of_a_pod_that_starts_can_wait_for_the_next_one() {
    let waiting = |reason: &str| {
        json!({"name": "c", "ready": false, "restartCount": 0, "image": "i", "imageID": "",
            "state": {"waiting": {"reason": reason}}})
    };
    let saying = |reason: &str| status(json!({"phase": "Pending", "containerStatuses": [waiting(reason)]}));
    let next = |wanted: PodStatus, api: PodStatus| {
        let stored = Stored { status: wanted, ..stored("Pending", false) };
        step::next(&PodUid::from("u"), &stored, &copy("p", "u", 1, api), &time(9))
    };
    let untold = || status(json!({"phase": "Pending"}));
    assert!(matches!(next(saying("ContainerCreating"), untold()), Step::Starting(_)));
    assert!(matches!(next(saying("ErrImagePull"), untold()), Step::Patch(_)), "something is wrong");
    assert!(matches!(next(status(json!({"phase": "Failed"})), untold()), Step::Patch(_)));
    let more =
        status(json!({"phase": "Pending", "podIP": "10.0.0.1", "containerStatuses": [waiting("PodInitializing")]}));
    assert!(matches!(next(more, saying("PodInitializing")), Step::Patch(_)), "it is not the first");
    let mut init = saying("PodInitializing");
    let run = json!([{"name": "i", "ready": false, "restartCount": 0, "image": "i", "imageID": "", "state": {"running": {}}}]);
    init.init_container_statuses = serde_json::from_value(run).unwrap();
    assert!(matches!(next(init, untold()), Step::Patch(_)), "something runs");
}
