//! The requests of a watch, and the open watch that answers one of them.

use std::time::Duration;

use futures_util::StreamExt as _;
use kube::Api;
use kube::Client;
use kube::api::ListParams;
use kube::api::Resource;
use kube::api::VersionMatch;
use kube::api::WatchParams;
use kube::core::Request;
use kube::runtime::watcher::Config;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::decode;
use super::decode::Decoded;
use super::decode::Lines;
use super::decode::List;
use super::decode::WatchLine;
use super::freshness::Freshness;
use super::pauses::QUIET;
use super::streaming_lists::overdue_at;
use super::watch_errors::LIST_SILENCE;
use super::watch_errors::WATCH_SILENCE;
use super::watch_errors::in_time;

/// Objects per page of a list.
const PAGE: u32 = 500;
/// A watch that ends sooner than this without any event has failed.
const TOO_SHORT: Duration = Duration::from_secs(1);

/// A page of a list.
pub(super) enum Page {
    First,
    Next(String),
    None { version: String },
}

/// Requests lists and watches of the selected objects.
pub(super) struct WatchRequests {
    client: Client,
    /// The path of the objects.
    resource: Request,
    config: Config,
}

impl WatchRequests {
    pub(super) fn new<K: Resource>(api: Api<K>, config: Config) -> Self {
        let resource = Request::new(api.resource_url());
        Self { client: api.into_client(), resource, config }
    }

    /// The kind of the objects, as log lines name it.
    pub(super) fn kind(&self) -> &str {
        self.resource.url_path.rsplit('/').next().unwrap_or_default()
    }

    /// Opens a watch from a resource version, or with `list` a streaming list.
    ///
    /// # Errors
    /// The API server does not open it.
    pub(super) async fn open<K>(&self, list: bool, version: &str) -> kube::Result<OpenWatch<K>>
    where
        K: DeserializeOwned + Send + 'static,
    {
        let seconds = self.config.timeout.unwrap_or_else(|| fastrand::u32(300..600));
        let params = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: list,
        };
        let request = self.resource.watch(&params, version).map_err(kube::Error::BuildRequest)?;
        let lines = in_time(WATCH_SILENCE, request, |request| decode::watch(&self.client, request)).await?;
        let began = Instant::now();
        Ok(OpenWatch { lines, began, until: overdue_at(began, seconds.into()), silent: true })
    }

    /// Requests a page of a list.
    ///
    /// # Errors
    /// The API server does not answer with a list.
    pub(super) async fn list<K>(&self, page: &Page, freshness: &Freshness) -> kube::Result<List<Decoded<K>>>
    where
        K: DeserializeOwned,
    {
        let params = self.list_params(page, freshness);
        let request = self.resource.list(&params).map_err(kube::Error::BuildRequest)?;
        in_time(LIST_SILENCE, request, |request| decode::list(&self.client, request)).await
    }

    /// The latest list is read from etcd in pages. Any other may be served from the API server's watch cache, and is not
    /// paginated. That cache may be old: once something is known, its resource version is named.
    fn list_params(&self, page: &Page, freshness: &Freshness) -> ListParams {
        let version = matches!(page, Page::First).then(|| freshness.version()).flatten();
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
}

/// A watch that is open.
pub(super) struct OpenWatch<K> {
    lines: Lines<K>,
    began: Instant,
    until: Instant,
    silent: bool,
}

impl<K> OpenWatch<K> {
    /// `None` when it has ended, or is overdue.
    pub(super) async fn next(&mut self) -> Option<kube::Result<WatchLine<Decoded<K>>>> {
        let line = tokio::time::timeout_at(self.until, self.lines.next()).await.ok().flatten();
        self.silent &= line.is_none();
        line
    }

    /// Whether it has been open for so long that its server was available.
    pub(super) fn is_long(&self) -> bool {
        self.began.elapsed() >= QUIET
    }

    /// Whether a watch that has ended was of no use.
    pub(super) fn is_useless(&self) -> bool {
        self.silent && self.began.elapsed() < TOO_SHORT
    }

    /// Whether the server serves the watch, which is silent until something changes.
    pub(super) fn is_served(&self, line: Option<&kube::Result<WatchLine<Decoded<K>>>>) -> bool {
        match line {
            Some(Ok(line)) => !matches!(line, WatchLine::Error(_)),
            Some(Err(_)) | None => self.is_long(),
        }
    }
}
