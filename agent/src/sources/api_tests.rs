use serde_json::json;

use super::*;

fn pod(uid: &str, version: u32) -> ApiPod {
    serde_json::from_value(json!({
        "metadata": {
            "uid": uid, "name": format!("web-{uid}"), "namespace": "default", "labels": {"v": version.to_string()},
            "managedFields": [{"manager": "kubectl"}],
        },
        "spec": {"containers": []},
    }))
    .expect("a pod")
}

/// `set a1 b1`, `change a2 -b`: UID and label of every pod.
fn drained(pending: &mut PendingChanges) -> Vec<String> {
    let shown = |pod: &Pod| {
        let label = pod.metadata.labels.as_ref().map_or("", |labels| labels["v"].as_str());
        format!(" {}{label}", pod.metadata.uid.as_deref().unwrap_or_default())
    };
    let text = |update| match update {
        SourceUpdate::Set(pods) => format!("set{}", pods.iter().map(shown).collect::<String>()),
        SourceUpdate::Change { changed, removed } => {
            let removed: String = removed.iter().map(|uid| format!(" -{uid}")).collect();
            format!("change{}{removed}", changed.iter().map(shown).collect::<String>())
        }
    };
    pending.drain().into_iter().map(text).collect()
}

fn feed(pending: &mut PendingChanges, events: Vec<Event<ApiPod>>) -> Vec<String> {
    events.into_iter().for_each(|event| pending.take(event));
    drained(pending)
}

#[test]
fn nothing_is_sent_before_the_list_is_complete() {
    let mut pending = PendingChanges::default();
    assert!(feed(&mut pending, vec![Event::Init, Event::InitApply(pod("a", 1))]).is_empty());
    // The list broke off and starts again.
    let again = vec![Event::Init, Event::InitApply(pod("b", 1)), Event::InitDone];
    assert_eq!(feed(&mut pending, again), ["set b1"]);
    assert_eq!(feed(&mut pending, vec![Event::Init, Event::InitDone]), ["set"]);
}

#[test]
fn pending_changes_are_merged_by_uid() {
    let mut pending = PendingChanges::default();
    let events = vec![
        Event::Apply(pod("a", 1)),
        Event::Apply(pod("b", 1)),
        Event::Apply(pod("a", 2)),
        Event::Delete(pod("b", 2)),
        Event::Delete(pod("c", 1)),
    ];
    assert_eq!(feed(&mut pending, events), ["change a2 -b -c"]);
    assert!(drained(&mut pending).is_empty());
}

#[test]
fn a_new_list_covers_the_changes_before_it() {
    let mut pending = PendingChanges::default();
    let events = vec![
        Event::Apply(pod("a", 1)),
        Event::Init,
        Event::InitApply(pod("b", 2)),
        Event::InitDone,
        Event::Apply(pod("b", 3)),
    ];
    assert_eq!(feed(&mut pending, events), ["set b2", "change b3"]);
}

#[test]
fn pods_with_unsafe_names_are_left_out_and_managed_fields_dropped() {
    assert!(accept(pod("../../x", 1)).is_none());
    let kept = accept(pod("a", 1)).expect("a valid pod");
    assert!(kept.metadata.managed_fields.is_none());
    let mut pending = PendingChanges::default();
    let events = vec![Event::Init, Event::InitApply(pod("..", 1)), Event::InitApply(pod("a", 1)), Event::InitDone];
    assert_eq!(feed(&mut pending, events), ["set a1"]);
}
