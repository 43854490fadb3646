//! What comes next for one pod.

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
