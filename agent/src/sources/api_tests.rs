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
fn told(gathering: &mut Gathering) -> Vec<String> {
    let shown = |pod: &Pod| {
        let label = pod.metadata.labels.as_ref().map_or("", |labels| labels["v"].as_str());
        format!(" {}{label}", pod.metadata.uid.as_deref().unwrap_or_default())
    };
    let text = |news| match news {
        News::Set(pods) => format!("set{}", pods.iter().map(shown).collect::<String>()),
        News::Change { there, gone } => {
            let gone: String = gone.iter().map(|uid| format!(" -{uid}")).collect();
            format!("change{}{gone}", there.iter().map(shown).collect::<String>())
        }
    };
    gathering.news().into_iter().map(text).collect()
}

fn feed(gathering: &mut Gathering, events: Vec<Event<ApiPod>>) -> Vec<String> {
    events.into_iter().for_each(|event| gathering.take(event));
    told(gathering)
}

#[test]
fn nothing_is_told_before_the_list_is_complete() {
    let mut gathering = Gathering::default();
    assert!(feed(&mut gathering, vec![Event::Init, Event::InitApply(pod("a", 1))]).is_empty());
    // It broke off and begins again.
    let again = vec![Event::Init, Event::InitApply(pod("b", 1)), Event::InitDone];
    assert_eq!(feed(&mut gathering, again), ["set b1"]);
    assert_eq!(feed(&mut gathering, vec![Event::Init, Event::InitDone]), ["set"]);
}

#[test]
fn changes_that_wait_together_are_told_once() {
    let mut gathering = Gathering::default();
    let events = vec![
        Event::Apply(pod("a", 1)),
        Event::Apply(pod("b", 1)),
        Event::Apply(pod("a", 2)),
        Event::Delete(pod("b", 2)),
        Event::Delete(pod("c", 1)),
    ];
    assert_eq!(feed(&mut gathering, events), ["change a2 -b -c"]);
    assert!(told(&mut gathering).is_empty());
}

#[test]
fn a_new_list_covers_the_changes_before_it() {
    let mut gathering = Gathering::default();
    let events = vec![
        Event::Apply(pod("a", 1)),
        Event::Init,
        Event::InitApply(pod("b", 2)),
        Event::InitDone,
        Event::Apply(pod("b", 3)),
    ];
    assert_eq!(feed(&mut gathering, events), ["set b2", "change b3"]);
}

#[test]
fn pods_with_hostile_names_are_left_out_and_managed_fields_dropped() {
    assert!(accept(pod("../../x", 1)).is_none());
    let kept = accept(pod("a", 1)).expect("a harmless pod");
    assert!(kept.metadata.managed_fields.is_none());
    let mut gathering = Gathering::default();
    let events = vec![Event::Init, Event::InitApply(pod("..", 1)), Event::InitApply(pod("a", 1)), Event::InitDone];
    assert_eq!(feed(&mut gathering, events), ["set a1"]);
}
