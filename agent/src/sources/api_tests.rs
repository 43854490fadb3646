use std::convert::Infallible;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use std::time::SystemTime;

use bytes::Bytes;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use http_body_util::StreamBody;
use hyper::body::Frame;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;

use super::*;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch::Identity;
use crate::model::PodUid;
use crate::model::PodUpdate;
use crate::sources::apply;
use crate::sources::merge::PodMap;

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

fn identity(uid: &str) -> Identity {
    Identity { uid: uid.to_owned(), ..Identity::default() }
}

/// `set a1 b1 ~c`, `change a2 -b`: UID and label of every pod, and UIDs of pods that cannot be decoded.
fn drained(pending: &mut PendingChanges) -> Vec<String> {
    let shown = |pod: &Pod| {
        let label = pod.metadata.labels.as_ref().map_or("", |labels| labels["v"].as_str());
        format!(" {}{label}", pod.metadata.uid.as_deref().unwrap_or_default())
    };
    let text = |update| match update {
        SourceUpdate::Set(_) | SourceUpdate::Incomplete(_) => panic!("not of the API source"),
        SourceUpdate::List { pods, kept } => {
            let kept: String = kept.iter().map(|uid| format!(" ~{uid}")).collect();
            format!("set{}{kept}", pods.iter().map(shown).collect::<String>())
        }
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
        Event::Delete(identity("b")),
        Event::Delete(identity("c")),
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
fn a_list_keeps_changes_of_pods_in_it_that_cannot_be_decoded() {
    let mut pending = PendingChanges::default();
    let events = vec![
        Event::Apply(pod("a", 1)),
        Event::Apply(pod("b", 1)),
        Event::Init,
        Event::InitKeep(identity("x")),
        Event::Init,
        Event::InitKeep(identity("a")),
        Event::InitDone,
    ];
    assert_eq!(feed(&mut pending, events), ["set ~a", "change a1"]);
}

#[test]
fn a_pod_that_can_no_longer_be_decoded_is_not_removed_by_a_list() {
    let (mut pending, mut map) = (PendingChanges::default(), PodMap::default());
    let mut merged = |events: Vec<Event<ApiPod>>| -> Vec<PodUpdate> {
        events.into_iter().for_each(|event| pending.take(event));
        let updates = pending.drain().into_iter();
        updates.flat_map(|update| apply(&mut map, ConfigSource::Api, update, SystemTime::UNIX_EPOCH).updates).collect()
    };
    let both = [pod("a", 1), pod("b", 1)].map(Event::InitApply);
    let first = merged([vec![Event::Init], both.to_vec(), vec![Event::InitDone]].concat());
    assert!(matches!(&first[..], [PodUpdate::Add(_, pods)] if pods.len() == 2), "{first:?}");
    let undecodable = ["a", "new"].map(|uid| Event::InitKeep(identity(uid)));
    let kept = merged([vec![Event::Init], undecodable.to_vec(), vec![Event::InitDone]].concat());
    let [PodUpdate::Remove(_, gone), PodUpdate::Undecodable(_, unknown)] = &kept[..] else { panic!("{kept:?}") };
    assert_eq!(unknown[..], [PodUid::from("new")]);
    assert_eq!(gone.iter().filter_map(|pod| pod.metadata.uid.as_deref()).collect::<Vec<_>>(), ["b"]);
    let deleted = merged(vec![Event::Delete(identity("a"))]);
    assert!(matches!(&deleted[..], [PodUpdate::Remove(_, pods)] if pods.len() == 1), "{deleted:?}");
    let decoded = merged(vec![Event::Apply(pod("new", 1))]);
    let [PodUpdate::Add(_, added), PodUpdate::Undecodable(_, unknown)] = &decoded[..] else { panic!("{decoded:?}") };
    assert!(unknown.is_empty() && added.len() == 1, "it is always desired, or spared: {decoded:?}");
}

#[test]
fn a_deleted_pod_that_cannot_be_decoded_ends_and_others_are_known_before_the_first_list() {
    let (mut pending, mut map) = (PendingChanges::default(), PodMap::default());
    let deleted = Identity { deletion_timestamp: Some("9999-12-31T23:59:59Z".to_owned()), ..identity("deleted") };
    let kept = [identity("runs"), deleted].map(Event::InitKeep);
    for event in [vec![Event::Init], kept.to_vec(), vec![Event::InitDone]].concat() {
        pending.take(event);
    }
    let updates = pending.drain().into_iter();
    let updates: Vec<PodUpdate> =
        updates.flat_map(|update| apply(&mut map, ConfigSource::Api, update, SystemTime::UNIX_EPOCH).updates).collect();
    let [PodUpdate::Undecodable(_, spared), PodUpdate::Add(_, none)] = &updates[..] else { panic!("{updates:?}") };
    assert!(spared[..] == [PodUid::from("runs")] && none.is_empty(), "{updates:?}");
}

/// Sends these lines for each request, counted in `requests`, and then nothing.
fn server(lines: String, requests: Arc<AtomicUsize>) -> kube::Client {
    let service = tower::service_fn(move |_: Request<Body>| {
        requests.fetch_add(1, SeqCst);
        let first = futures_util::stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from(lines.clone())))]);
        let body = StreamBody::new(first.chain(futures_util::stream::pending())).boxed_unsync();
        async move { Ok::<_, Infallible>(Response::new(body)) }
    });
    kube::Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn pods_are_watched_at_once_and_sent_when_the_node_is_known() {
    let line = |kind: &str, object: Value| format!("{}\n", json!({"type": kind, "object": object}));
    let mark = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": "2",
        "annotations": {"k8s.io/initial-events-end": "true"}}});
    let pods = line("ADDED", json!(pod("a", 1))) + &line("BOOKMARK", mark) + &line("ADDED", json!(pod("b", 2)));
    let (requests, (knows, node_known)) = (Arc::<AtomicUsize>::default(), tokio::sync::watch::channel(false));
    let pods = ApiPods { client: server(pods, requests.clone()), recovered: Recovered::default(), node_known };
    let (updates, mut received) = mpsc::channel(1);
    tokio::spawn(ApiSource { pods, node_name: "n".to_owned() }.run(updates, CancellationToken::new()));
    let early = tokio::time::timeout(Duration::from_secs(60), received.recv()).await;
    assert!(early.is_err() && requests.load(SeqCst) == 1, "{early:?}");
    knows.send_replace(true);
    let list = received.recv().await;
    assert!(matches!(&list, Some((_, SourceUpdate::List { pods, .. })) if pods.len() == 1), "{list:?}");
    let change = received.recv().await;
    assert!(matches!(&change, Some((_, SourceUpdate::Change { changed, .. })) if changed.len() == 1), "{change:?}");
}

/// Such a pod is run, or stopped and deleted at the API server, as any other.
#[tokio::test(start_paused = true)]
async fn a_pod_with_undecodable_times_in_its_status_or_deletion_is_not_ignored() {
    let beyond = "9999-12-31T23:59:59Z";
    let (mut odd, mut deleted) = (json!(pod("a", 1)), json!(pod("b", 1)));
    odd["status"] = json!({"phase": "Running", "startTime": beyond});
    deleted["metadata"]["deletionTimestamp"] = json!(beyond);
    let mark = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": "2",
        "annotations": {"k8s.io/initial-events-end": "true"}}});
    let lines = [("ADDED", odd), ("ADDED", deleted), ("BOOKMARK", mark)];
    let lines = lines.map(|(kind, object)| format!("{}\n", json!({"type": kind, "object": object}))).concat();
    // Dropped, the sender would say that the agent ends.
    let (_knows, node_known) = tokio::sync::watch::channel(true);
    let pods = ApiPods { client: server(lines, Arc::default()), recovered: Recovered::default(), node_known };
    let (updates, mut received) = mpsc::channel(1);
    tokio::spawn(ApiSource { pods, node_name: "n".to_owned() }.run(updates, CancellationToken::new()));
    let list = tokio::time::timeout(Duration::from_secs(60), received.recv()).await.expect("in time");
    let Some((_, SourceUpdate::List { pods, kept })) = list else { panic!("{list:?}") };
    assert!(kept.is_empty(), "{kept:?}");
    let seen = pods.iter().map(|pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        (phase, pod.metadata.deletion_timestamp.is_some())
    });
    assert_eq!(seen.collect::<Vec<_>>(), [(Some("Running"), false), (None, true)]);
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
