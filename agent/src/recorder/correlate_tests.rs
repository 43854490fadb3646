//! Tables and properties of correlation.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use proptest::prelude::*;
use serde_json::json;
use tokio::time::Instant;

use super::correlate::CorrelationResult;
use super::correlate::Correlator;
use super::correlate::patch;
use super::object;
use super::object::EventType;
use super::object::Occurrence;
use crate::model::testing;

const T0: i64 = 1_700_000_000_000_000_000;
const SECOND: i64 = 1_000_000_000;

fn on(pod: &str, reason: &str, message: &str, nanos: i64) -> Occurrence {
    let mut of = testing::pod("Always", &[], &["c"]);
    of.metadata.name = Some(pod.to_owned());
    of.metadata.uid = Some(format!("uid of {pod}"));
    Occurrence {
        object: object::pod(&of, ""),
        kind: EventType::Warning,
        reason: reason.to_owned(),
        message: message.to_owned(),
        annotations: BTreeMap::from([("note".to_owned(), "one".to_owned())]),
        nanos,
        recorded_at: Instant::now(),
        number: nanos,
    }
}

/// With a wall clock that is never set.
fn correlate(correlator: &mut Correlator, occurrence: &Occurrence, now: i64) -> CorrelationResult {
    correlator.correlate(occurrence, now, Duration::from_nanos((now - T0).unsigned_abs()))
}

fn created(result: CorrelationResult) -> Event {
    match result {
        CorrelationResult::Create(event) => event,
        other => panic!("not created: {other:?}"),
    }
}

fn patched(result: CorrelationResult) -> Event {
    match result {
        CorrelationResult::Patch(event) => event,
        other => panic!("not patched: {other:?}"),
    }
}

#[test]
fn the_same_event_again_is_counted_up_under_its_name() {
    let mut correlator = Correlator::new("node");
    let first = created(correlate(&mut correlator, &on("p", "BackOff", "again", T0), T0));
    let later = T0 + 70 * SECOND;
    let second = patched(correlate(&mut correlator, &on("p", "BackOff", "again", later), later));
    let third = patched(correlate(&mut correlator, &on("p", "BackOff", "again", later), later));
    assert_eq!(second.metadata.name, first.metadata.name);
    assert_eq!(second.first_timestamp, first.first_timestamp);
    assert_ne!(second.last_timestamp, first.last_timestamp);
    assert_eq!((second.count, third.count), (Some(2), Some(3)));
    let expected = json!({ "count": 3, "lastTimestamp": "2023-11-14T22:14:30Z", "message": "again" });
    assert_eq!(patch(&third), expected);
}

#[test]
fn other_paths_reasons_and_pods_are_other_events() {
    let mut correlator = Correlator::new("node");
    let plain = on("p", "BackOff", "m", T0);
    let mut on_container = plain.clone();
    on_container.object.field_path = Some("spec.containers{c}".to_owned());
    let mut normal = plain.clone();
    normal.kind = EventType::Normal;
    let others = [plain, on_container, normal, on("p", "Failed", "m", T0), on("q", "BackOff", "m", T0)];
    for occurrence in &others {
        created(correlate(&mut correlator, occurrence, T0));
    }
}

#[test]
fn the_tenth_distinct_message_is_folded() {
    let mut correlator = Correlator::new("node");
    let send = |correlator: &mut Correlator, number: u32, at: i64| {
        correlate(correlator, &on("p", "Failed", &format!("error {number}"), at), at)
    };
    for number in 1..=9 {
        assert_eq!(created(send(&mut correlator, number, T0)).message, Some(format!("error {number}")));
    }
    let folded = created(send(&mut correlator, 10, T0 + SECOND));
    assert_eq!(folded.message.as_deref(), Some("(combined from similar events): error 10"));
    assert_eq!((folded.count, &folded.metadata.annotations), (Some(1), &None));
    assert_eq!((&folded.reporting_component, &folded.reporting_instance), (&None, &None));
    assert_eq!(folded.source.as_ref().and_then(|source| source.component.as_deref()), Some("kubelet"));
    assert_eq!(folded.involved_object, object::pod(&named("p"), ""));
    let again = patched(send(&mut correlator, 11, T0 + 2 * SECOND));
    assert_eq!(again.metadata.name, folded.metadata.name);
    assert_eq!(again.message.as_deref(), Some("(combined from similar events): error 11"));
    assert_eq!(again.count, Some(2));
    // Another reason has not had ten.
    created(correlate(&mut correlator, &on("p", "BackOff", "error 12", T0), T0));
}

fn named(name: &str) -> k8s_openapi::api::core::v1::Pod {
    let mut pod = testing::pod("Always", &[], &["c"]);
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.uid = Some(format!("uid of {name}"));
    pod
}

#[test]
fn ten_minutes_without_an_event_drop_the_messages() {
    let messages = |pause: i64| {
        let mut correlator = Correlator::new("node");
        for number in 1..=9 {
            correlate(&mut correlator, &on("p", "Failed", &format!("error {number}"), T0), T0);
        }
        let at = T0 + pause * SECOND;
        created(correlate(&mut correlator, &on("p", "Failed", "error 10", at), at)).message.unwrap_or_default()
    };
    assert_eq!(messages(600), "(combined from similar events): error 10");
    assert_eq!(messages(601), "error 10");
}

#[test]
fn an_object_has_twenty_five_at_once_and_one_each_five_minutes() {
    let mut correlator = Correlator::new("node");
    let mut passed = |at: i64| correlate(&mut correlator, &on("p", "BackOff", "m", at), at) != CorrelationResult::Drop;
    assert_eq!((0..40).filter(|_| passed(T0)).count(), 25);
    assert!(!passed(T0 + 299 * SECOND));
    assert!(passed(T0 + 300 * SECOND));
    assert!(!passed(T0 + 300 * SECOND));
}

#[test]
fn a_clock_that_is_set_neither_fills_the_spam_filter_nor_keeps_it_from_filling() {
    let mut correlator = Correlator::new("node");
    let mut passed = |at: i64, uptime: u64| {
        let occurrence = on("p", "BackOff", "m", at);
        correlator.correlate(&occurrence, at, Duration::from_secs(uptime)) != CorrelationResult::Drop
    };
    assert_eq!((0..40).filter(|_| passed(T0, 0)).count(), 25);
    assert!(!passed(T0 + 9000 * SECOND, 1));
    assert!(!passed(T0 - 9000 * SECOND, 2));
    assert!(passed(T0 - 9000 * SECOND, 300));
}

#[test]
fn what_is_dropped_has_been_counted() {
    let mut correlator = Correlator::new("node");
    for _ in 0..30 {
        correlate(&mut correlator, &on("p", "BackOff", "m", T0), T0);
    }
    let at = T0 + 300 * SECOND;
    assert_eq!(patched(correlate(&mut correlator, &on("p", "BackOff", "m", at), at)).count, Some(31));
}

#[test]
fn memories_are_bounded() {
    let mut correlator = Correlator::new("node");
    created(correlate(&mut correlator, &on("first", "BackOff", "m", T0), T0));
    for number in 0..4096 {
        created(correlate(&mut correlator, &on(&format!("p{number}"), "BackOff", "m", T0), T0));
    }
    // Forgotten, so it is new.
    created(correlate(&mut correlator, &on("first", "BackOff", "m", T0), T0));
    patched(correlate(&mut correlator, &on("p4095", "BackOff", "m", T0), T0));
}

proptest! {
    /// Whatever comes: names are created once before they are patched, and counts of a name only grow.
    #[test]
    fn patches_follow_their_creation(steps in prop::collection::vec((0_u8..3, 0_u8..3, 0_u8..20, 0_i64..400), 1..200)) {
        let mut correlator = Correlator::new("node");
        let mut names = BTreeSet::new();
        let mut counts: BTreeMap<Option<String>, i32> = BTreeMap::new();
        let mut now = T0;
        for (pod, reason, message, pause) in steps {
            now += pause * SECOND + 1;
            let occurrence = on(&format!("p{pod}"), &format!("r{reason}"), &format!("m{message}"), now);
            let event = match correlate(&mut correlator, &occurrence, now) {
                CorrelationResult::Drop => continue,
                CorrelationResult::Create(event) => {
                    prop_assert!(names.insert(event.metadata.name.clone()));
                    event
                }
                CorrelationResult::Patch(event) => event,
            };
            let before = counts.insert(event.metadata.name.clone(), event.count.unwrap_or(0)).unwrap_or(0);
            prop_assert!(event.count.unwrap_or(0) > before);
            prop_assert!(event.first_timestamp <= event.last_timestamp);
        }
    }
}
