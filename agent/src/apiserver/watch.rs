//! Watches that never end: the list first, then every change, across failures of connections and of the server.
//!
//! The list is a streaming list (KEP-3157) where the server supports it, else a paginated one. A watch is requested for
//! five to ten minutes and then again from the last resource version, so that no change is missed and nothing is listed
//! twice. No list is older than what is known, unless the server was restored to an earlier state.
//!
//! An object that cannot be decoded is logged and left out; it does not delay other objects, and a list does not count it as
//! deleted. A change does if its deletion was requested.
//!
//! After errors there is a pause: 0.8 s, doubling to 30 s, with up to as much jitter; ten seconds without an error reset
//! it, if the server has served something (client-go: two minutes; but a pause that has grown gains nothing for watches
//! that break now and then). A pause ends early when the server has recovered.

use std::time::Duration;

use futures_util::Stream;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::Resource;
use kube::api::ResourceExt as _;
use kube::runtime::watcher::Config;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::decode::Decoded;
use super::decode::Ignored;
use super::decode::Named;
use super::decode::Optional;
use super::decode::WatchLine;
use super::freshness::Freshness;
use super::pauses::Pauses;
use super::recovery::Recovered;
use super::streaming_lists::StreamingLists;
use super::streaming_lists::is_complete;
use super::watch_errors::WATCH_SILENCE;
use super::watch_errors::WatchErrorAction;
use super::watch_errors::action_for;
use super::watch_errors::is_denial;
use super::watch_errors::is_forbidden;
use super::watch_errors::lags_behind;
use super::watch_errors::silence;
use super::watch_requests::OpenWatch;
use super::watch_requests::Page;
use super::watch_requests::WatchRequests;

pub use super::decode::Identity;

/// What becomes known of the objects.
#[derive(Clone, Debug)]
pub enum Event<K> {
    /// A list begins.
    Init,
    /// An object of the list.
    InitApply(K),
    /// An object of the list that cannot be decoded: what was known of it stays.
    InitKeep(Identity),
    /// The list is complete: objects that are not in it are gone.
    InitDone,
    /// An object was created or changed.
    Apply(K),
    /// An object was deleted; or its deletion was requested and it cannot be decoded, so that its grace period is not known.
    Delete(Identity),
}

/// All objects that `config` selects, then every change to them. Never ends and never fails.
///
/// Until the first `InitDone` nothing is known; a list that breaks off starts again with `Init`. Of `config` the
/// selectors, the page size and, if set, the timeout (in seconds, instead of the random one) count.
pub fn follow<K>(api: Api<K>, config: Config, recovered: Recovered) -> impl Stream<Item = Event<K>> + Send
where
    K: Resource + DeserializeOwned + Send + 'static,
{
    events(api, config, recovered, Optional::Nothing)
}

/// As [`follow`], but of an object that cannot be decoded only the fields are left out that are the reason, if it can be
/// decoded without them.
pub fn follow_in_part<K>(api: Api<K>, config: Config, recovered: Recovered) -> impl Stream<Item = Event<K>> + Send
where
    K: Resource + DeserializeOwned + Send + 'static,
{
    events(api, config, recovered, Optional::All)
}

/// As [`follow`], but without a status that cannot be decoded, such as that of a service with a condition without a time.
pub fn follow_specs<K>(api: Api<K>, config: Config, recovered: Recovered) -> impl Stream<Item = Event<K>> + Send
where
    K: Resource + DeserializeOwned + Send + 'static,
{
    events(api, config, recovered, Optional::Status)
}

/// As [`follow`], of pods: without fields of the status that cannot be decoded, and with the grace period of the spec if the
/// `deletionTimestamp` cannot be decoded.
pub fn follow_pods(api: Api<Pod>, config: Config, recovered: Recovered) -> impl Stream<Item = Event<Pod>> + Send {
    events(api, config, recovered, Optional::OfPods)
}

fn events<K>(
    api: Api<K>,
    config: Config,
    recovered: Recovered,
    optional: Optional,
) -> impl Stream<Item = Event<K>> + Send
where
    K: Resource + DeserializeOwned + Send + 'static,
{
    let requests = WatchRequests::new(api, config);
    let follower = Follower {
        ignored: Ignored::new(requests.kind(), optional),
        requests,
        recovered,
        state: State::Start,
        lists: StreamingLists::default(),
        freshness: Freshness::Any,
        pauses: Pauses::default(),
        denial: None,
    };
    futures_util::stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await;
        Some((event, follower))
    })
}

/// The state of a list or watch.
enum State<K> {
    /// Nothing is known, or the known resource version cannot be resumed.
    Start,
    /// A streaming list; a bookmark marks its end.
    Streaming(OpenWatch<K>),
    /// A paginated list: the rest of this page, and the next page or the list's resource version.
    Paging(std::vec::IntoIter<Decoded<K>>, Page),
    /// Known up to this resource version; no watch is open.
    Known(String),
    /// Known up to this resource version; the watch is open.
    Watching(OpenWatch<K>, String),
}

struct Follower<K> {
    requests: WatchRequests,
    recovered: Recovered,
    state: State<K>,
    lists: StreamingLists,
    /// Of the next paginated list.
    freshness: Freshness,
    pauses: Pauses,
    /// The denial that was logged last.
    denial: Option<String>,
    ignored: Ignored,
}

impl<K> Follower<K>
where
    K: Resource + DeserializeOwned + Send + 'static,
{
    /// Advances until there is an event.
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
        if !self.lists.are_wanted() {
            self.state = State::Paging(Vec::new().into_iter(), Page::First);
            return Some(Event::Init);
        }
        match self.requests.open(true, "").await {
            Ok(watch) => {
                self.state = State::Streaming(watch);
                return Some(Event::Init);
            }
            Err(error) => self.not_streamed(Some(&error), false).await,
        }
        None
    }

    /// A streaming list has failed, or the server has ended it before it was complete; `is_opened`: it had begun. From a
    /// server that has or permits none, pages are requested. A server that is unavailable or lags behind is asked again, until
    /// too many have failed.
    async fn not_streamed(&mut self, error: Option<&kube::Error>, is_opened: bool) {
        if let Some(error) = error {
            if action_for(error) == WatchErrorAction::Relist && !lags_behind(error) {
                tracing::debug!(kind = self.requests.kind(), "no streaming list, listing in pages: {error}");
                return self.lists.unsupported();
            }
            self.report(error);
        }
        match error {
            Some(error) => self.pause("list", error).await,
            None => self.pause("list", &"the server ended it before it was complete").await,
        }
        self.lists.failed(error, is_opened);
        // What its cache has may be old. After mere silence the latest state is not asked for: it is read from etcd, and the
        // network of many nodes may have been silent.
        if !self.lists.are_wanted() && matches!(error, Some(kube::Error::Api(_))) {
            self.freshness = Freshness::Latest;
        }
    }

    async fn stream(&mut self, mut watch: OpenWatch<K>) -> Option<Event<K>> {
        // No object is delivered until the list is complete, so that it must not take as long as a watch may.
        let Ok(line) = tokio::time::timeout(WATCH_SILENCE, watch.next()).await else {
            self.not_streamed(Some(&silence(WATCH_SILENCE)), true).await;
            return None;
        };
        match line {
            Some(Ok(WatchLine::Changed(object))) => {
                self.state = State::Streaming(watch);
                Some(self.listed(object))
            }
            Some(Ok(WatchLine::Bookmark(mark))) if is_complete(&mark) => {
                self.lists.completed();
                self.pauses.progress();
                self.state = State::Watching(watch, mark.metadata.resource_version);
                Some(Event::InitDone)
            }
            Some(Ok(WatchLine::Bookmark(_) | WatchLine::Deleted(_))) => {
                self.state = State::Streaming(watch);
                None
            }
            Some(Ok(WatchLine::Error(status))) => {
                self.not_streamed(Some(&kube::Error::Api(status)), true).await;
                None
            }
            Some(Err(error)) => {
                self.not_streamed(Some(&error), true).await;
                None
            }
            None => {
                self.not_streamed(None, true).await;
                None
            }
        }
    }

    async fn page(&mut self, mut objects: std::vec::IntoIter<Decoded<K>>, next: Page) -> Option<Event<K>> {
        if let Some(object) = objects.next() {
            self.state = State::Paging(objects, next);
            return Some(self.listed(object));
        }
        if let Page::None { version } = next {
            self.state = State::Known(version);
            self.lists.completed();
            self.pauses.progress();
            return Some(Event::InitDone);
        }
        match self.requests.list(&next, &self.freshness).await {
            Ok(list) => {
                let version = list.metadata.resource_version.unwrap_or_default();
                let more = list.metadata.continue_.filter(|token| !token.is_empty());
                let next = more.map_or(Page::None { version }, Page::Next);
                self.state = State::Paging(list.items.unwrap_or_default().into_iter(), next);
            }
            Err(error) => {
                if is_forbidden(&error) {
                    // Watching, which a streaming list is, may be permitted by now.
                    self.lists.retry();
                } else if action_for(&error) == WatchErrorAction::Relist {
                    self.freshness = Freshness::Latest;
                }
                self.report(&error);
                self.pause("list", &error).await;
            }
        }
        None
    }

    async fn resume(&mut self, version: String) -> Option<Event<K>> {
        match self.requests.open(false, &version).await {
            Ok(watch) => self.state = State::Watching(watch, version),
            Err(error) => self.broken(&error, version).await,
        }
        None
    }

    async fn watch(&mut self, mut watch: OpenWatch<K>, version: String) -> Option<Event<K>> {
        let line = watch.next().await;
        if watch.is_served(line.as_ref()) {
            self.pauses.progress();
            self.denial = None;
        }
        match line {
            Some(Ok(WatchLine::Changed(object))) => {
                let object = self.ignored.check(object);
                let seen = match &object {
                    Ok(object) => object.resource_version(),
                    Err(ignored) => Some(ignored.resource_version.clone()),
                };
                self.state = State::Watching(watch, newer(seen, version));
                match object {
                    Ok(object) => Some(Event::Apply(object)),
                    Err(ignored) => ignored.deletion_timestamp.is_some().then_some(Event::Delete(ignored)),
                }
            }
            Some(Ok(WatchLine::Deleted(Named { metadata }))) => {
                self.ignored.remove(&metadata.uid);
                self.state = State::Watching(watch, newer(Some(metadata.resource_version.clone()), version));
                Some(Event::Delete(metadata))
            }
            Some(Ok(WatchLine::Bookmark(mark))) => {
                self.state = State::Watching(watch, mark.metadata.resource_version);
                None
            }
            Some(Ok(WatchLine::Error(status))) => {
                self.broken(&kube::Error::Api(status), version).await;
                None
            }
            Some(Err(error)) => {
                if watch.is_long() {
                    self.recovered.broke_off();
                }
                self.broken(&error, version).await;
                None
            }
            None => {
                let useless = watch.is_useless();
                self.state = State::Known(version);
                if useless {
                    self.pause("watch", &"it ended at once and without any event").await;
                }
                None
            }
        }
    }

    /// After an error of a watch: resumes from the known resource version, or lists again.
    async fn broken(&mut self, error: &kube::Error, version: String) {
        self.report(error);
        let (action, now, random) = (action_for(error), Instant::now(), fastrand::f64());
        let pause = match action {
            WatchErrorAction::Resume => self.pauses.next(now, random),
            WatchErrorAction::Relist => self.pauses.before_list(now, random),
        };
        self.wait(pause, "watch", error).await;
        self.state = match action {
            WatchErrorAction::Resume => State::Known(version),
            WatchErrorAction::Relist => {
                self.freshness = Freshness::after(error, version);
                State::Start
            }
        };
    }

    fn listed(&mut self, object: Decoded<K>) -> Event<K> {
        self.ignored.check(object).map_or_else(Event::InitKeep, Event::InitApply)
    }

    /// Logs each change of a denial once: it may last, and without the objects the agent cannot do its work.
    fn report(&mut self, error: &kube::Error) {
        let kube::Error::Api(status) = error else { return };
        if is_denial(status) && self.denial.as_ref() != Some(&status.message) {
            tracing::warn!(kind = self.requests.kind(), error = %status.message, "cannot list or watch; trying again");
            self.denial = Some(status.message.clone());
        }
    }

    async fn pause(&mut self, what: &str, error: &(dyn std::fmt::Display + Send + Sync)) {
        let pause = self.pauses.next(Instant::now(), fastrand::f64());
        self.wait(pause, what, error).await;
    }

    async fn wait(&mut self, pause: Duration, what: &str, error: &(dyn std::fmt::Display + Send + Sync)) {
        tracing::debug!(kind = self.requests.kind(), ?pause, "{what} broke off: {error}");
        let recovered = self.recovered.wait(pause).await;
        self.pauses.over(Instant::now(), recovered);
    }
}

fn newer(seen: Option<String>, known: String) -> String {
    seen.filter(|version| !version.is_empty()).unwrap_or(known)
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
