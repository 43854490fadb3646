use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use proptest::prelude::*;
use serde_json::Value;
use serde_json::json;

use super::merge::PodMap;
use super::merge::merge;
use super::static_pod::CONFIG_MIRROR;
use super::static_pod::CONFIG_SEEN;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::PodUpdate;

const SOURCE: ConfigSource = ConfigSource::Api;

fn pod(uid: &str, patch: Value) -> Pod {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"uid": uid, "name": uid, "namespace": "n"},
        "spec": {"containers": [{"name": "c"}]}, "status": {"phase": "Pending"}});
    merge_json(&mut pod, patch);
    Pod::new(serde_json::from_value::<ApiPod>(pod).expect("a pod"))
}

fn merge_json(into: &mut Value, patch: Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            patch.into_iter().for_each(|(k, v)| merge_json(into.entry(k).or_insert(Value::Null), v));
        }
        (into, patch) => *into = patch,
    }
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// "add a b", "remove c": kinds and UIDs.
fn shown(updates: &[PodUpdate]) -> Vec<String> {
    updates
        .iter()
        .map(|update| {
            let (kind, pods) = match update {
                PodUpdate::Add(_, pods) => ("add", pods),
                PodUpdate::Update(_, pods) => ("update", pods),
                PodUpdate::Delete(_, pods) => ("delete", pods),
                PodUpdate::Remove(_, pods) => ("remove", pods),
                PodUpdate::Reconcile(_, pods) => ("reconcile", pods),
                PodUpdate::Undecodable(..) => panic!("all pods can be decoded"),
            };
            let uids = pods.iter().filter_map(|p| p.metadata.uid.clone());
            std::iter::once(kind.to_owned()).chain(uids).collect::<Vec<_>>().join(" ")
        })
        .collect()
}

fn step(map: &mut PodMap, set: Vec<Pod>, now: u64) -> Vec<PodUpdate> {
    merge(map, SOURCE, set, at(now)).updates
}

fn pods_of(update: &PodUpdate) -> &[Pod] {
    match update {
        PodUpdate::Add(_, p)
        | PodUpdate::Update(_, p)
        | PodUpdate::Delete(_, p)
        | PodUpdate::Remove(_, p)
        | PodUpdate::Reconcile(_, p) => p,
        PodUpdate::Undecodable(..) => &[],
    }
}

#[test]
fn the_first_set_always_marks_the_source_as_ready() {
    let mut map = PodMap::default();
    assert_eq!(shown(&step(&mut map, vec![], 1)), ["add"]);
    assert_eq!(shown(&step(&mut map, vec![], 2)), Vec::<String>::new());
    let mut map = PodMap::default();
    assert_eq!(shown(&step(&mut map, vec![pod("a", json!({}))], 1)), ["add a"]);
}

#[test]
fn each_difference_has_its_step() {
    for (patch, expected) in [
        (json!({}), None),
        (json!({"spec": {"nodeName": "x"}}), Some("update a")),
        (json!({"metadata": {"labels": {"l": "1"}}}), Some("update a")),
        (json!({"metadata": {"annotations": {"x": "1"}}}), Some("update a")),
        (json!({"metadata": {"annotations": {CONFIG_SEEN: "other", CONFIG_MIRROR: "m"}}}), None),
        (json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), Some("delete a")),
        (json!({"metadata": {"deletionGracePeriodSeconds": 1}}), Some("update a")),
        (json!({"status": {"phase": "Running"}}), Some("reconcile a")),
        (json!({"spec": {"nodeName": "x"}, "status": {"phase": "Running"}}), Some("update a")),
        (json!({"metadata": {"resourceVersion": "9", "generation": 2, "finalizers": ["a/b"]}}), None),
        (json!({"metadata": {"labels": {}}}), None),
    ] {
        let mut map = PodMap::default();
        step(&mut map, vec![pod("a", json!({}))], 1);
        let result = shown(&step(&mut map, vec![pod("a", patch.clone())], 2));
        assert_eq!(result, expected.into_iter().collect::<Vec<_>>(), "{patch}");
    }
}

#[test]
fn local_annotations_keep_their_first_values_and_versions_move_on() {
    let mut map = PodMap::default();
    let first = pod("a", json!({"metadata": {"resourceVersion": "1", "annotations": {"x": "1"}}}));
    let added = step(&mut map, vec![first], 1);
    let seen = "1970-01-01T00:00:01.000000000Z";
    let annotations = |update: &PodUpdate| pods_of(update)[0].metadata.annotations.clone().unwrap_or_default();
    assert_eq!(annotations(&added[0])[CONFIG_SEEN], seen);
    let patch =
        json!({"metadata": {"resourceVersion": "2", "generation": 3, "annotations": {"y": "1", CONFIG_SEEN: "z"}}});
    let updated = step(&mut map, vec![pod("a", patch)], 9);
    let got = annotations(&updated[0]);
    assert_eq!(got[CONFIG_SEEN], seen);
    assert!(got.contains_key("y") && !got.contains_key("x"), "{got:?}");
    let meta = &pods_of(&updated[0])[0].metadata;
    assert_eq!((meta.resource_version.as_deref(), meta.generation), (Some("2"), Some(3)));
}

#[test]
fn steps_come_in_the_order_of_delivery() {
    let mut map = PodMap::default();
    let old = ["gone", "upd", "del", "rec"].map(|uid| pod(uid, json!({})));
    step(&mut map, old.to_vec(), 1);
    let set = vec![
        pod("rec", json!({"status": {"phase": "Running"}})),
        pod("del", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
        pod("upd", json!({"spec": {"nodeName": "x"}})),
        pod("new", json!({})),
    ];
    assert_eq!(shown(&step(&mut map, set, 2)), ["remove gone", "add new", "update upd", "delete del", "reconcile rec"]);
}

#[test]
fn the_first_of_two_pods_with_one_name_wins() {
    let mut map = PodMap::default();
    let second = pod("b", json!({"metadata": {"name": "a"}}));
    let result = merge(&mut map, SOURCE, vec![pod("a", json!({})), second], at(1));
    assert_eq!(shown(&result.updates), ["add a"]);
    assert_eq!(result.duplicates.len(), 1);
}

#[test]
fn a_pod_that_is_new_with_a_deletion_timestamp_is_an_addition() {
    let mut map = PodMap::default();
    let dying = pod("a", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert_eq!(shown(&step(&mut map, vec![dying], 1)), ["add a"]);
}

proptest! {
    /// Replaying the updates gives the set, whatever the history.
    #[test]
    fn steps_lead_to_the_set(history in prop::collection::vec(prop::collection::btree_map(0u8..6, 0u8..3, 0..6), 1..8)) {
        let mut map = PodMap::default();
        let mut replica = std::collections::BTreeMap::new();
        for (i, set) in history.into_iter().enumerate() {
            let version = |v: &u8| json!({"metadata": {"labels": {"v": v.to_string()}}});
            let pods = set.iter().map(|(uid, v)| pod(&uid.to_string(), version(v))).collect();
            for update in step(&mut map, pods, i as u64) {
                for pod in pods_of(&update) {
                    let uid = pod.metadata.uid.clone().unwrap_or_default();
                    let known = replica.contains_key(&uid);
                    let label = pod.metadata.labels.clone().unwrap_or_default();
                    match &update {
                        PodUpdate::Remove(..) => prop_assert!(replica.remove(&uid).is_some()),
                        PodUpdate::Add(..) => prop_assert!(replica.insert(uid, label).is_none()),
                        _ => {
                            prop_assert!(known);
                            replica.insert(uid, label);
                        }
                    }
                }
            }
            let expected: std::collections::BTreeMap<String, _> = set
                .iter()
                .map(|(uid, v)| (uid.to_string(), std::collections::BTreeMap::from([("v".to_owned(), v.to_string())])))
                .collect();
            prop_assert_eq!(&replica, &expected);
        }
    }
}
