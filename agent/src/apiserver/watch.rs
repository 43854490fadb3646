//! Watches that never end: the list first, then every change, whatever becomes of connections and of the server.
//!
//! The list comes as a streaming watch where the server can do that, else in pages. A watch is asked for five to ten
//! minutes and then asked for again from the last version seen, so that nothing is missed and nothing is listed twice.
//! Errors are waited out: 0.8 s, doubling to 30 s, with as much jitter again; ten quiet seconds start anew. A pause ends
//! early when the server is back. Upstream starts anew after two minutes; but where a watch breaks now and then and is
//! had again at once, nothing is gained by a pause that has grown.

use std::fmt::Debug;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _};
use kube::Api;
use kube::api::{ListParams, Resource, ResourceExt as _, VersionMatch, WatchEvent, WatchParams};
use kube::core::Status;
use kube::runtime::watcher::{Config, Event};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::recovery::Recovered;

/// First pause after an error, without jitter.
const FIRST_PAUSE: Duration = Duration::from_millis(800);
/// Longest pause after an error, without jitter.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// Without an error for so long after a pause, pauses start short again.
const QUIET: Duration = Duration::from_secs(10);
/// Objects per page of a list.
const PAGE: u32 = 500;
/// A watch that ends sooner than this without any event was no watch.
const TOO_SHORT: Duration = Duration::from_secs(1);
/// A watch whose end does not arrive is given up so long after it was due.
const END_GRACE: Duration = Duration::from_secs(15);
/// The head of an answer must come within this time; API servers themselves give up after a minute.
const HEAD: Duration = Duration::from_secs(90);

/// All objects that `config` selects, then every change to them. Never ends and never fails.
///
/// `Init`, any number of `InitApply` and `InitDone` are a complete list: what is not in it is gone. Until the first
/// `InitDone` nothing is known; a list that breaks off starts again with `Init`. Of `config` the selectors, the page
/// size and, if set, the timeout (in seconds, instead of the random one) count.
pub fn follow<K>(api: Api<K>, config: Config, recovered: Recovered) -> impl Stream<Item = Event<K>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let backoff = Backoff::default();
    let follower = Follower { api, config, recovered, state: State::Start, streaming: true, backoff };
    futures_util::stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await;
        Some((event, follower))
    })
}

type Events<K> = BoxStream<'static, kube::Result<WatchEvent<K>>>;

/// How far a list or watch has come.
enum State<K> {
    /// Nothing is known, or what is known is no longer worth anything.
    Start,
    /// The list arrives as a watch; its end is marked.
    Streaming(Watch<K>),
    /// The list arrives in pages: what is left of this one, and where the next one starts, or the list's version.
    Paging(std::vec::IntoIter<K>, Page),
    /// Known up to this version; no watch is open.
    Known(String),
    /// Known up to this version, and more to come.
    Watching(Watch<K>, String),
}

enum Page {
    First { any_version: bool },
    Next(String),
    None { version: String },
}

struct Watch<K> {
    events: Events<K>,
    began: Instant,
    until: Instant,
    silent: bool,
}

struct Follower<K> {
    api: Api<K>,
    config: Config,
    recovered: Recovered,
    state: State<K>,
    /// The server can send lists as watches, as far as we know.
    streaming: bool,
    backoff: Backoff,
}

impl<K> Follower<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    /// One step at a time until there is something to tell.
    async fn next(&mut self) -> Event<K> {
        loop {
            let event = match std::mem::replace(&mut self.state, State::Start) {
                State::Start => self.start().await,
                State::Streaming(watch) => self.stream(watch).await,
                State::Paging(objects, next) => self.page(objects, next).await,
                State::Known(version) => self.resume(version).await,
                State::Watching(watch, version) => self.watch(watch, version).await,
            };
            if let Some(event) = event {
                return event;
            }
        }
    }

    async fn start(&mut self) -> Option<Event<K>> {
        if !self.streaming {
            self.state = State::Paging(Vec::new().into_iter(), Page::First { any_version: true });
            return Some(Event::Init);
        }
        match self.open(true, "").await {
            Ok(watch) => {
                self.state = State::Streaming(watch);
                return Some(Event::Init);
            }
            Err(error) => self.no_streaming(&error).await,
        }
        None
    }

    /// A server that does not know streaming lists is asked for pages from now on; one that is away is waited for.
    async fn no_streaming(&mut self, error: &kube::Error) {
        match action_for(error) {
            WatchErrorAction::Resume => self.pause("list", error).await,
            WatchErrorAction::Relist => {
                tracing::debug!(kind = self.kind(), "no streaming list, listing in pages: {error}");
                self.streaming = false;
            }
        }
    }

    async fn stream(&mut self, mut watch: Watch<K>) -> Option<Event<K>> {
        match watch.next().await {
            Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                self.state = State::Streaming(watch);
                Some(Event::InitApply(object))
            }
            Some(Ok(WatchEvent::Bookmark(mark))) => {
                let complete = mark.metadata.annotations.contains_key("k8s.io/initial-events-end");
                self.state = match complete {
                    true => State::Watching(watch, mark.metadata.resource_version),
                    false => State::Streaming(watch),
                };
                complete.then_some(Event::InitDone)
            }
            Some(Ok(WatchEvent::Deleted(_))) => {
                self.state = State::Streaming(watch);
                None
            }
            Some(Ok(WatchEvent::Error(status))) => {
                self.no_streaming(&kube::Error::Api(status)).await;
                None
            }
            Some(Err(error)) => {
                self.pause("list", &error).await;
                None
            }
            None => {
                self.pause("list", &"the server ended it before it was complete").await;
                None
            }
        }
    }

    async fn page(&mut self, mut objects: std::vec::IntoIter<K>, next: Page) -> Option<Event<K>> {
        if let Some(object) = objects.next() {
            self.state = State::Paging(objects, next);
            return Some(Event::InitApply(object));
        }
        if let Page::None { version } = next {
            self.state = State::Known(version);
            // The next list, if there has to be one, may stream again.
            self.streaming = true;
            return Some(Event::InitDone);
        }
        match in_time(self.api.list(&self.list_params(&next))).await {
            Ok(list) => {
                let version = list.metadata.resource_version.unwrap_or_default();
                let more = list.metadata.continue_.filter(|token| !token.is_empty());
                let next = more.map_or(Page::None { version }, Page::Next);
                self.state = State::Paging(list.items.into_iter(), next);
            }
            Err(error) => self.pause("list", &error).await,
        }
        None
    }

    async fn resume(&mut self, version: String) -> Option<Event<K>> {
        match self.open(false, &version).await {
            Ok(watch) => self.state = State::Watching(watch, version),
            Err(error) => self.broken(&error, version).await,
        }
        None
    }

    async fn watch(&mut self, mut watch: Watch<K>, version: String) -> Option<Event<K>> {
        match watch.next().await {
            Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                self.state = State::Watching(watch, newer(&object, version));
                Some(Event::Apply(object))
            }
            Some(Ok(WatchEvent::Deleted(object))) => {
                self.state = State::Watching(watch, newer(&object, version));
                Some(Event::Delete(object))
            }
            Some(Ok(WatchEvent::Bookmark(mark))) => {
                self.state = State::Watching(watch, mark.metadata.resource_version);
                None
            }
            Some(Ok(WatchEvent::Error(status))) => {
                self.broken(&kube::Error::Api(status), version).await;
                None
            }
            Some(Err(error)) => {
                self.broken(&error, version).await;
                None
            }
            None => {
                let useless = watch.silent && watch.began.elapsed() < TOO_SHORT;
                self.state = State::Known(version);
                if useless {
                    self.pause("watch", &"it ended at once and without any event").await;
                }
                None
            }
        }
    }

    /// After an error of a watch: on from the version known, or all over.
    async fn broken(&mut self, error: &kube::Error, version: String) {
        self.pause("watch", error).await;
        self.state = match action_for(error) {
            WatchErrorAction::Resume => State::Known(version),
            WatchErrorAction::Relist => State::Start,
        };
    }

    async fn open(&mut self, list: bool, version: &str) -> kube::Result<Watch<K>> {
        let seconds = self.config.timeout.unwrap_or_else(|| fastrand::u32(300..600));
        let params = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: list,
        };
        let events = in_time(self.api.watch(&params, version)).await?.boxed();
        let began = Instant::now();
        let until = began + Duration::from_secs(seconds.into()) + END_GRACE;
        Ok(Watch { events, began, until, silent: true })
    }

    /// The first page may come from the server's memory, at any version, and is whole then; later ones and those after
    /// a failure come from the store.
    fn list_params(&self, page: &Page) -> ListParams {
        let any = matches!(page, Page::First { any_version: true });
        ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            version_match: any.then_some(VersionMatch::NotOlderThan),
            resource_version: any.then(|| "0".to_owned()),
            limit: (!any).then(|| self.config.page_size.unwrap_or(PAGE)),
            continue_token: match page {
                Page::Next(token) => Some(token.clone()),
                Page::First { .. } | Page::None { .. } => None,
            },
            ..ListParams::default()
        }
    }

    async fn pause(&mut self, what: &str, error: &(dyn std::fmt::Display + Send + Sync)) {
        let pause = self.backoff.next(Instant::now(), fastrand::f64());
        tracing::debug!(kind = self.kind(), ?pause, "{what} broke off: {error}");
        self.recovered.wait(pause).await;
        self.backoff.over(Instant::now());
    }

    fn kind(&self) -> &str {
        self.api.resource_url().rsplit('/').next().unwrap_or_default()
    }
}

impl<K> Watch<K> {
    /// `None` when it has ended, or should have ended long ago.
    async fn next(&mut self) -> Option<kube::Result<WatchEvent<K>>> {
        let event = tokio::time::timeout_at(self.until, self.events.next()).await.ok().flatten();
        self.silent &= event.is_none();
        event
    }
}

/// A server that takes a request and never answers must not hold us for ever.
async fn in_time<T>(asking: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    let overdue = |_| kube::Error::Service(format!("no answer within {HEAD:?}").into());
    tokio::time::timeout(HEAD, asking).await.unwrap_or_else(|elapsed| Err(overdue(elapsed)))
}

fn newer<K: Resource>(object: &K, version: String) -> String {
    object.resource_version().filter(|version| !version.is_empty()).unwrap_or(version)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WatchErrorAction {
    /// The version known is still good.
    Resume,
    /// It is not: too old, from the future, or nobody can say.
    Relist,
}

/// What an error means for the version known. Servers that are away, overloaded or refuse us say nothing about it.
fn action_for(error: &kube::Error) -> WatchErrorAction {
    let kube::Error::Api(status) = error else { return WatchErrorAction::Resume };
    match status.code {
        _ if too_new(status) => WatchErrorAction::Relist,
        401 | 403 | 429 | 500..=599 => WatchErrorAction::Resume,
        _ => WatchErrorAction::Relist,
    }
}

/// The server has been set back to an earlier state.
fn too_new(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "ResourceVersionTooLarge")
}

/// How long to wait after errors in a row.
#[derive(Clone, Debug, Default)]
struct Backoff {
    /// The last pause without its jitter, and when it was over.
    last: Option<(Duration, Instant)>,
}

impl Backoff {
    /// The pause from `now` on; `random` is in [0, 1).
    fn next(&mut self, now: Instant, random: f64) -> Duration {
        let base = match self.last {
            Some((pause, over)) if now.saturating_duration_since(over) < QUIET => (pause * 2).min(LAST_PAUSE),
            _ => FIRST_PAUSE,
        };
        self.last = Some((base, now));
        base.mul_f64(1.0 + random)
    }

    /// The pause has been waited out.
    fn over(&mut self, now: Instant) {
        if let Some((_, over)) = &mut self.last {
            *over = now;
        }
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
