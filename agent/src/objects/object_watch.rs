//! The watch of one object: a streaming list of one object (KEP-3157), followed by its changes.
//!
//! The field selector `metadata.name` selects the object, as the node authorizer requires. Ends only when its listener
//! breaks; after failures it is resumed from the last resource version if the API server still has it.
//!
//! Unlike [`crate::apiserver::watch`], it reports failures, since pods wait for the object; it tries again soon after the
//! first 403 ([`super::retry`]), and lists instead only if 403 lasts; and as there is such a watch for each object, all of
//! them share the flag that the API server does not support streaming lists.

use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use http::Request;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::core::WatchEvent;
use serde::Deserialize;
use tokio::time::Instant;

use super::error::code;
use super::error::describe;
use super::kind::Kind;
use super::retry::Retry;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::streaming_lists::StreamingLists;
use crate::apiserver::streaming_lists::is_complete;
use crate::apiserver::streaming_lists::overdue_at;
use crate::apiserver::watch_errors::LIST_SILENCE;
use crate::apiserver::watch_errors::WATCH_SILENCE;
use crate::apiserver::watch_errors::in_time;
use crate::apiserver::watch_errors::silence;

/// Seconds after which a watch is renewed.
const LIFETIME: std::ops::Range<u64> = 1800..3600;
/// A watch that ends sooner than this has failed.
const SHORT: Duration = Duration::from_secs(5);

/// Identifies one object of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ObjectKey {
    pub(super) namespace: String,
    pub(super) name: String,
}

/// What a watch reports.
#[derive(Debug)]
pub(super) enum WatchUpdate<K> {
    /// The object as it is now; `None` if it does not exist.
    Now(Option<K>),
    /// The request failed; the last known state stays.
    Failed(String),
}

/// Watches until `listen` breaks; can be cancelled. `streaming` is shared by all watches: cleared when the API server
/// does not support streaming lists (KEP-3157).
pub(super) async fn watch<K: Kind>(
    client: Client,
    mut recovered: Recovered,
    key: ObjectKey,
    streaming: &AtomicBool,
    mut listen: impl FnMut(WatchUpdate<K>) -> ControlFlow<()> + Send,
) {
    let (mut retry, mut lists) = (Retry::default(), StreamingLists::default());
    let mut requests = Requests { client, key, seen: None };
    loop {
        let began = Instant::now();
        let (mut progress, mut opened) = (false, None);
        let mut deliver = |update: WatchUpdate<K>| {
            progress = true;
            listen(update)
        };
        let resumes = requests.seen.is_some();
        let lists_stream = lists.are_wanted() && streaming.load(Relaxed);
        let listed = !resumes && !lists_stream;
        let result = match listed {
            true => requests.list(&mut deliver).await,
            false => requests.stream(&mut opened, &mut deliver).await,
        };
        // A watch cannot continue from a list without a resource version, as a broken proxy may return it.
        let is_unversioned = listed && requests.seen.is_none();
        // A list says nothing of the watch after it. A watch from a known version is silent until something changes.
        if (progress && !listed) || (resumes && opened.is_some_and(|since: Instant| since.elapsed() > SHORT)) {
            retry.reset();
        }
        let is_unfinished = requests.seen.is_none() && !listed;
        if is_unfinished {
            lists.failed(result.as_ref().err(), opened.is_some());
        }
        if requests.seen.is_some() {
            lists.completed();
        }
        let delay = match result {
            Ok(ControlFlow::Break(())) => return,
            // Renewal is no failure, unless the watch ends at once.
            Ok(ControlFlow::Continue(())) if !is_unversioned && (began.elapsed() > SHORT || listed) => Duration::ZERO,
            Ok(ControlFlow::Continue(())) => retry.after(false, fastrand::f64()),
            Err(error) => {
                let status = code(&error);
                if is_unfinished && is_to_be_listed(status, &retry, &mut lists, streaming) {
                    continue;
                }
                let is_forbidden = status == Some(403);
                // A role may permit to watch, as a streaming list does, and not to list.
                if is_forbidden && listed {
                    lists.retry();
                }
                // 410: the resource version is too old. Other errors may mean that too: start over.
                if status.is_some() {
                    requests.seen = None;
                }
                if listen(WatchUpdate::Failed(describe(&error))).is_break() {
                    return;
                }
                retry.after(is_forbidden, fastrand::f64())
            }
        };
        recovered.wait(delay).await;
    }
}

/// True if the object is to be listed at once after a streaming list that failed with this status: the API server does not
/// support such lists, or the role permits to list and not to watch.
fn is_to_be_listed(status: Option<u16>, retry: &Retry, lists: &mut StreamingLists, streaming: &AtomicBool) -> bool {
    match status {
        Some(400 | 422) => stop_streaming(streaming),
        Some(403) if retry.is_long_refused() => lists.unsupported(),
        _ => return false,
    }
    true
}

/// Makes all watches list their object before they watch it. Logs the first call only.
fn stop_streaming(streaming: &AtomicBool) {
    if streaming.swap(false, Relaxed) {
        tracing::info!("the API server does not support streaming lists, listing objects before watching them");
    }
}

/// Requests of one watch, one after the other.
struct Requests {
    client: Client,
    key: ObjectKey,
    /// The version that the next one continues from; none until the object was listed.
    seen: Option<String>,
}

impl Requests {
    /// One watch request, to its end. `opened`: since when it is open.
    async fn stream<K: Kind>(
        &mut self,
        opened: &mut Option<Instant>,
        listen: &mut (impl FnMut(WatchUpdate<K>) -> ControlFlow<()> + Send),
    ) -> Result<ControlFlow<()>, kube::Error> {
        let seconds = fastrand::u64(LIFETIME);
        let from = match &self.seen {
            Some(version) => format!("resourceVersion={version}"),
            None => "sendInitialEvents=true&resourceVersionMatch=NotOlderThan".to_owned(),
        };
        let query = format!("watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}&{from}");
        let request = request::<K>(&self.key, &query)?;
        let send = |request| self.client.request_events::<K>(request);
        let mut events = pin!(in_time(WATCH_SILENCE, request, send).await?);
        *opened = Some(Instant::now());
        let mut exists = self.seen.is_some();
        let until = overdue_at(Instant::now(), seconds);
        loop {
            let limit = if self.seen.is_some() { until } else { Instant::now() + WATCH_SILENCE };
            let event = match tokio::time::timeout_at(limit, events.try_next()).await {
                Ok(event) => event?,
                // A watch whose end does not arrive is abandoned.
                Err(_) if self.seen.is_some() => None,
                Err(_) => return Err(silence(WATCH_SILENCE)),
            };
            let Some(event) = event else { break };
            let flow = take(event, &mut self.seen, &mut exists, listen)?;
            if flow.is_break() {
                return Ok(flow);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Lists the object, for API servers without streaming lists.
    async fn list<K: Kind>(
        &mut self,
        listen: &mut (impl FnMut(WatchUpdate<K>) -> ControlFlow<()> + Send),
    ) -> Result<ControlFlow<()>, kube::Error> {
        #[derive(Deserialize)]
        #[serde(bound = "K: Kind")]
        struct List<K> {
            metadata: ListMeta,
            items: Option<Vec<K>>,
        }
        let request = request::<K>(&self.key, "limit=1")?;
        let list: List<K> = in_time(LIST_SILENCE, request, |request| self.client.request(request)).await?;
        self.seen = list.metadata.resource_version;
        Ok(listen(WatchUpdate::Now(list.items.into_iter().flatten().next())))
    }
}

/// Takes one event of a watch. `exists` becomes true with the first object.
fn take<K: Kind>(
    event: WatchEvent<K>,
    seen: &mut Option<String>,
    exists: &mut bool,
    listen: &mut impl FnMut(WatchUpdate<K>) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, kube::Error> {
    match event {
        WatchEvent::Added(mut object) | WatchEvent::Modified(mut object) => {
            *exists = true;
            advance(seen, object.meta());
            Ok(listen(WatchUpdate::Now(Some(object))))
        }
        WatchEvent::Deleted(mut object) => {
            advance(seen, object.meta());
            Ok(listen(WatchUpdate::Now(None)))
        }
        WatchEvent::Bookmark(bookmark) => {
            let complete = is_complete(&bookmark);
            if complete || seen.is_some() {
                *seen = Some(bookmark.metadata.resource_version);
            }
            Ok(if complete && !*exists { listen(WatchUpdate::Now(None)) } else { ControlFlow::Continue(()) })
        }
        WatchEvent::Error(status) => Err(kube::Error::Api(status)),
    }
}

/// The watch continues from this object's version, once its list is complete.
fn advance(seen: &mut Option<String>, object: &ObjectMeta) {
    if let (Some(seen), Some(version)) = (seen, &object.resource_version) {
        seen.clone_from(version);
    }
}

/// The caller has validated the names: they need no escaping.
fn request<K: Kind>(key: &ObjectKey, query: &str) -> Result<Request<Vec<u8>>, kube::Error> {
    let ObjectKey { namespace, name } = key;
    let plural = K::PLURAL;
    let uri = format!("/api/v1/namespaces/{namespace}/{plural}?fieldSelector=metadata.name%3D{name}&{query}");
    Request::get(uri).body(Vec::new()).map_err(kube::Error::HttpError)
}
