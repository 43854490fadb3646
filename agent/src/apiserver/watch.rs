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
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::Client;
use kube::api::ListParams;
use kube::api::Resource;
use kube::api::ResourceExt as _;
use kube::api::VersionMatch;
use kube::api::WatchParams;
use kube::core::Request;
use kube::runtime::watcher::Config;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::decode;
use super::decode::Decoded;
use super::decode::Ignored;
use super::decode::Lines;
use super::decode::List;
use super::decode::Named;
use super::decode::Optional;
use super::decode::WatchLine;
use super::freshness::Freshness;
use super::pauses::Pauses;
use super::pauses::QUIET;
use super::recovery::Recovered;
use super::watch_errors::LIST_SILENCE;
use super::watch_errors::WATCH_SILENCE;
use super::watch_errors::WatchErrorAction;
use super::watch_errors::action_for;
use super::watch_errors::in_time;
use super::watch_errors::is_denial;
use super::watch_errors::is_forbidden;
use super::watch_errors::is_refusal;
use super::watch_errors::is_silence;
use super::watch_errors::lags_behind;
use super::watch_errors::silence;

pub use super::decode::Identity;

/// Objects per page of a list.
const PAGE: u32 = 500;
/// A watch that ends sooner than this without any event has failed.
const TOO_SHORT: Duration = Duration::from_secs(1);
/// How long after its timeout a watch may end.
const END_GRACE: Duration = Duration::from_secs(15);
/// A streaming list that was refused this often, since the server lags behind or fails, or that broke off, is replaced by a
/// paginated one: some servers never catch up, some cannot serve any, and some proxies let none through.
const MOST_REFUSALS: u32 = 3;

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
    let resource = Request::new(api.resource_url());
    let follower = Follower {
        client: api.into_client(),
        ignored: Ignored::new(kind(&resource), optional),
        resource,
        config,
        recovered,
        state: State::Start,
        streaming: true,
        refusals: 0,
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
    Streaming(Watch<K>),
    /// A paginated list: the rest of this page, and the next page or the list's resource version.
    Paging(std::vec::IntoIter<Decoded<K>>, Page),
    /// Known up to this resource version; no watch is open.
    Known(String),
    /// Known up to this resource version; the watch is open.
    Watching(Watch<K>, String),
}

enum Page {
    First,
    Next(String),
    None { version: String },
}

struct Watch<K> {
    lines: Lines<K>,
    began: Instant,
    until: Instant,
    silent: bool,
}

struct Follower<K> {
    client: Client,
    /// The path of the objects.
    resource: Request,
    config: Config,
    recovered: Recovered,
    state: State<K>,
    /// Whether the server is assumed to support streaming lists.
    streaming: bool,
    /// Streaming lists that were refused or broke off, in a row.
    refusals: u32,
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
        if !self.streaming {
            self.state = State::Paging(Vec::new().into_iter(), Page::First);
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

    /// From a server that has or permits no streaming lists, pages are requested from now on. A server that is unavailable
    /// or lags behind is retried; if it refuses [`MOST_REFUSALS`] times, pages are requested once.
    async fn no_streaming(&mut self, error: &kube::Error) {
        if action_for(error) == WatchErrorAction::Relist && !lags_behind(error) {
            tracing::debug!(kind = kind(&self.resource), "no streaming list, listing in pages: {error}");
            self.streaming = false;
            return;
        }
        if !is_refusal(error) {
            self.report(error);
            return self.pause("list", error).await;
        }
        self.refused(error, is_silence(error)).await;
        // What its cache has may be old. After mere silence the latest state is not asked for: it is read from etcd, and the
        // network of many nodes may have been silent.
        if !self.streaming && matches!(error, kube::Error::Api(_)) {
            self.freshness = Freshness::Latest;
        }
    }

    /// Every streaming list may end in this way. One that was silent has delayed all objects long enough.
    async fn refused(&mut self, error: &(dyn std::fmt::Display + Send + Sync), was_silent: bool) {
        self.pause("list", error).await;
        self.refusals += 1;
        if was_silent || self.refusals >= MOST_REFUSALS {
            self.streaming = false;
        }
    }

    async fn stream(&mut self, mut watch: Watch<K>) -> Option<Event<K>> {
        // No object is delivered until the list is complete, so that it must not take as long as a watch may.
        let Ok(line) = tokio::time::timeout(WATCH_SILENCE, watch.next()).await else {
            self.refused(&silence(WATCH_SILENCE), true).await;
            return None;
        };
        match line {
            Some(Ok(WatchLine::Changed(object))) => {
                self.state = State::Streaming(watch);
                Some(self.listed(object))
            }
            Some(Ok(WatchLine::Bookmark(mark))) => {
                if !mark.metadata.annotations.contains_key("k8s.io/initial-events-end") {
                    self.state = State::Streaming(watch);
                    return None;
                }
                self.refusals = 0;
                self.pauses.progress();
                self.state = State::Watching(watch, mark.metadata.resource_version);
                Some(Event::InitDone)
            }
            Some(Ok(WatchLine::Deleted(_))) => {
                self.state = State::Streaming(watch);
                None
            }
            Some(Ok(WatchLine::Error(status))) => {
                self.no_streaming(&kube::Error::Api(status)).await;
                None
            }
            Some(Err(error)) => {
                self.refused(&error, false).await;
                None
            }
            None => {
                self.refused(&"the server ended it before it was complete", false).await;
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
            // A later list may stream again.
            (self.streaming, self.refusals) = (true, 0);
            self.pauses.progress();
            return Some(Event::InitDone);
        }
        match self.list(&next).await {
            Ok(list) => {
                let version = list.metadata.resource_version.unwrap_or_default();
                let more = list.metadata.continue_.filter(|token| !token.is_empty());
                let next = more.map_or(Page::None { version }, Page::Next);
                self.state = State::Paging(list.items.unwrap_or_default().into_iter(), next);
            }
            Err(error) => {
                if is_forbidden(&error) {
                    // Watching, which a streaming list is, may be permitted by now.
                    self.streaming = true;
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
        match self.open(false, &version).await {
            Ok(watch) => self.state = State::Watching(watch, version),
            Err(error) => self.broken(&error, version).await,
        }
        None
    }

    async fn watch(&mut self, mut watch: Watch<K>, version: String) -> Option<Event<K>> {
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
                if watch.began.elapsed() >= QUIET {
                    self.recovered.broke_off();
                }
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

    async fn open(&mut self, list: bool, version: &str) -> kube::Result<Watch<K>> {
        let seconds = self.config.timeout.unwrap_or_else(|| fastrand::u32(300..600));
        let params = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: list,
        };
        let request = self.resource.watch(&params, version).map_err(kube::Error::BuildRequest)?;
        let lines = in_time(WATCH_SILENCE, decode::watch(&self.client, request)).await?;
        let began = Instant::now();
        let until = began + Duration::from_secs(seconds.into()) + END_GRACE;
        Ok(Watch { lines, began, until, silent: true })
    }

    async fn list(&mut self, page: &Page) -> kube::Result<List<Decoded<K>>> {
        let request = self.resource.list(&self.list_params(page)).map_err(kube::Error::BuildRequest)?;
        in_time(LIST_SILENCE, decode::list(&self.client, request)).await
    }

    fn listed(&mut self, object: Decoded<K>) -> Event<K> {
        self.ignored.check(object).map_or_else(Event::InitKeep, Event::InitApply)
    }

    /// The latest list is read from etcd in pages. Any other may be served from the API server's watch cache, and is not
    /// paginated. That cache may be old: once something is known, its resource version is named.
    fn list_params(&self, page: &Page) -> ListParams {
        let version = matches!(page, Page::First).then(|| self.freshness.version()).flatten();
        ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            version_match: version.is_some().then_some(VersionMatch::NotOlderThan),
            limit: version.is_none().then(|| self.config.page_size.unwrap_or(PAGE)),
            resource_version: version,
            continue_token: match page {
                Page::Next(token) => Some(token.clone()),
                Page::First | Page::None { .. } => None,
            },
            ..ListParams::default()
        }
    }

    /// Logs each change of a denial once: it may last, and without the objects the agent cannot do its work.
    fn report(&mut self, error: &kube::Error) {
        let kube::Error::Api(status) = error else { return };
        if is_denial(status) && self.denial.as_ref() != Some(&status.message) {
            tracing::warn!(kind = kind(&self.resource), error = %status.message, "cannot list or watch; trying again");
            self.denial = Some(status.message.clone());
        }
    }

    async fn pause(&mut self, what: &str, error: &(dyn std::fmt::Display + Send + Sync)) {
        let pause = self.pauses.next(Instant::now(), fastrand::f64());
        self.wait(pause, what, error).await;
    }

    async fn wait(&mut self, pause: Duration, what: &str, error: &(dyn std::fmt::Display + Send + Sync)) {
        tracing::debug!(kind = kind(&self.resource), ?pause, "{what} broke off: {error}");
        let recovered = self.recovered.wait(pause).await;
        self.pauses.over(Instant::now(), recovered);
    }
}

/// As log lines name it.
fn kind(resource: &Request) -> &str {
    resource.url_path.rsplit('/').next().unwrap_or_default()
}

impl<K> Watch<K> {
    /// `None` when it has ended, or is overdue.
    async fn next(&mut self) -> Option<kube::Result<WatchLine<Decoded<K>>>> {
        let line = tokio::time::timeout_at(self.until, self.lines.next()).await.ok().flatten();
        self.silent &= line.is_none();
        line
    }

    /// Whether the server serves the watch, which is silent until something changes.
    fn is_served(&self, line: Option<&kube::Result<WatchLine<Decoded<K>>>>) -> bool {
        match line {
            Some(Ok(line)) => !matches!(line, WatchLine::Error(_)),
            Some(Err(_)) | None => self.began.elapsed() >= QUIET,
        }
    }
}

fn newer(seen: Option<String>, known: String) -> String {
    seen.filter(|version| !version.is_empty()).unwrap_or(known)
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
