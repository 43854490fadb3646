//! Which pods are preempted.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::json;

use super::*;
use crate::admission::needs::Quantities;

/// `name:cpu:memory`, in thousandths and bytes.
fn candidates(list: &[&str]) -> Vec<Candidate> {
    let candidate = |text: &&str| {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let mut number = || parts.next().map_or(0, |text| text.parse().expect(text));
        let request = Quantities { pods: 1, milli_cpu: number(), memory: number(), ..Quantities::default() };
        let pod = serde_json::from_value(json!({ "metadata": { "name": name } })).expect("a pod");
        Candidate { pod: Arc::new(pod), needs: Needs { request, ..Needs::default() } }
    };
    list.iter().map(candidate).collect()
}

fn missing(list: &[(&str, i64)]) -> Vec<Insufficient> {
    let lack = |(resource, quantity): &(&str, i64)| Insufficient {
        resource: (*resource).to_owned(),
        requested: *quantity,
        used: 100,
        capacity: 100,
    };
    list.iter().map(lack).collect()
}

/// Names of the victims of BestEffort, Burstable and Guaranteed pods.
fn chosen(lack: &[(&str, i64)], pods: [&[&str]; 3]) -> Result<Vec<String>, String> {
    let [best_effort, burstable, guaranteed] = pods.map(candidates);
    let victims = victims(&missing(lack), Candidates { best_effort, burstable, guaranteed });
    let name = |victim: &Candidate| victim.pod.metadata.name.clone().unwrap_or_default();
    victims.map(|victims| victims.iter().map(name).collect()).map_err(|rejection| rejection.message)
}

#[test]
fn lower_classes_go_first_and_no_more_than_needed() {
    let (best_effort, burstable, guaranteed): (&[&str], &[&str], &[&str]) =
        (&["x", "y"], &["b:100", "c:300"], &["g:500"]);
    let all = [best_effort, burstable, guaranteed];
    for (lack, expected) in [
        (vec![("pods", 1)], vec!["y"]),
        (vec![("cpu", 50)], vec!["b"]),
        (vec![("cpu", 200)], vec!["c"]),
        (vec![("cpu", 400)], vec!["c", "b"]),
        (vec![("cpu", 600)], vec!["b", "g"]),
        (vec![("cpu", 900)], vec!["c", "b", "g"]),
        (vec![("pods", 3)], vec!["y", "x", "b"]),
        (vec![("pods", 1), ("cpu", 50)], vec!["b"]),
    ] {
        assert_eq!(chosen(&lack, all).expect("enough"), expected, "{lack:?}");
    }
}

#[test]
fn the_nearest_pod_goes_then_the_smaller_then_the_later() {
    let of = |lack: &[(&str, i64)], burstable: &[&str]| chosen(lack, [&[], burstable, &[]]).expect("enough");
    assert_eq!(of(&[("cpu", 300)], &["a:200", "b:300", "c:250"]), ["b"]);
    assert_eq!(of(&[("cpu", 300)], &["a:300:9", "b:300:5", "c:400:7"]), ["b"]);
    assert_eq!(of(&[("cpu", 300)], &["a:500:5", "b:400:5"]), ["b"]);
    assert_eq!(of(&[("cpu", 300)], &["a:300:5", "b:300:5"]), ["b"]);
    assert_eq!(of(&[("cpu", 300)], &["a:500:5", "b:400:9"]), ["a"], "memory before cpu");
    // Both resources together: a has all of the cpu and none of the memory, b has most of both.
    assert_eq!(of(&[("cpu", 100), ("memory", 100)], &["a:100:0", "b:90:90", "c:10:100"]), ["b", "c"]);
    // What is missing counts by its square: b leaves less of each, although a leaves less in all.
    assert_eq!(of(&[("cpu", 100), ("memory", 100)], &["a:100:40", "b:60:60"]), ["b", "a"]);
}

#[test]
fn too_little_to_preempt_is_an_error_that_names_what_is_missing() {
    let message =
        chosen(&[("cpu", 150), ("memory", 10), ("pods", 1)], [&["x"], &["b:50"], &[]]).expect_err("too little");
    assert_eq!(
        message,
        "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to \
         preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 100), (res: memory, q: 10), ]"
    );
}

#[test]
fn extended_resources_are_reclaimed_too() {
    let mut candidates = Candidates { burstable: candidates(&["a:100", "b:100"]), ..Candidates::default() };
    candidates.burstable[0].needs.request.scalar = BTreeMap::from([("example.com/gpu".to_owned(), 1)]);
    let victims = victims(&missing(&[("example.com/gpu", 1)]), candidates).expect("enough");
    assert_eq!(victims.len(), 1);
    assert_eq!(victims[0].pod.metadata.name.as_deref(), Some("a"));
}

#[test]
fn critical_pods_preempt_others_and_priorities_count_where_both_have_one() {
    let pod = |source: &str, priority: Option<i32>| -> Pod {
        let metadata: Value = json!({ "annotations": { "kubernetes.io/config.source": source } });
        let spec = json!({ "containers": [], "priority": priority });
        serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).expect("a pod")
    };
    let (fixed, critical) = (pod("file", None), pod("api", Some(2_000_000_000)));
    for (own, other, preemptable) in [
        (&fixed, &pod("api", Some(1_999_999_999)), true),
        (&fixed, &pod("api", None), true),
        (&fixed, &fixed, false),
        (&fixed, &critical, false),
        (&critical, &fixed, false),
        (&pod("api", Some(2_000_001_000)), &critical, true),
        (&critical, &pod("api", Some(2_000_001_000)), false),
        (&critical, &critical, false),
        (&pod("api", Some(5)), &pod("api", Some(4)), true),
        (&pod("api", Some(5)), &pod("api", None), false),
    ] {
        assert_eq!(is_preemptable(own, other), preemptable, "{own:?} {other:?}");
    }
}
