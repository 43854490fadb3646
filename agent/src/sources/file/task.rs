//! Task of the file source: waits for an event or a tick, scans the path, sends the pods if they changed.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::listing::Listing;
use super::listing::View;
use super::open_files::OpenFiles;
use super::store::Report;
use super::store::Store;
use super::watch::Watch;
use super::watch::WatchResult;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::sleep_until;
use crate::sources::SourceUpdate;
use crate::sources::SourcesHandle;
use crate::sources::adoption::Adoptions;
use crate::sources::decode::FURTHER_DOCUMENTS;

/// Settings of the file source.
#[derive(Clone, Debug)]
pub(crate) struct FileSource {
    /// A folder of manifests or a single one.
    pub path: PathBuf,
    /// Time between two periodic scans (`fileCheckFrequency`).
    pub check_frequency: Duration,
    /// This node's name.
    pub node_name: String,
    /// Feature gate PreventStaticPodAPIReferences.
    pub prevent_api_references: bool,
    /// Pods that run already.
    pub adoptions: Adoptions,
    /// The pods of the API server are to be known before the first set.
    pub after: Option<SourcesHandle>,
}

/// The longest wait for the API server before static pods that run are delivered without their mirror pods. Without
/// those their statuses have to begin anew: start times, and whether they are ready.
const MIRRORS_AWAITED: Duration = Duration::from_secs(2);

impl FileSource {
    /// Sends complete sets until cancelled or until the receiver is dropped.
    pub(crate) async fn run(self, sets: mpsc::Sender<(ConfigSource, SourceUpdate)>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.scan_loop(sets) => {}
        }
    }

    async fn scan_loop(self, sets: mpsc::Sender<(ConfigSource, SourceUpdate)>) {
        if let Some(sources) = &self.after
            && tokio::time::timeout(MIRRORS_AWAITED, sources.until_delivered(ConfigSource::Api)).await.is_err()
        {
            tracing::warn!("no pods from the API server yet, statuses of static pods begin anew");
        }
        let mut scanner = Scanner::new(&self).await;
        let mut tick = tokio::time::interval(self.check_frequency.max(Duration::from_millis(100)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut periodic = true;
        tick.tick().await;
        loop {
            for update in scanner.scan(periodic).await {
                if sets.send((ConfigSource::File, update)).await.is_err() {
                    return;
                }
            }
            periodic = tokio::select! {
                _ = tick.tick() => true,
                () = scanner.wake() => false,
            };
        }
    }
}

/// State between two scans.
struct Scanner {
    view: View,
    store: Store,
    open_files: OpenFiles,
    watch: Option<Watch>,
    /// The last error of setting up the watch; logged once.
    watch_error: Option<String>,
    timer: Option<Instant>,
}

impl Scanner {
    async fn new(source: &FileSource) -> Self {
        // Components, put together again, have no trailing slashes.
        let path: PathBuf = source.path.components().collect();
        let view = View {
            path,
            node_name: source.node_name.clone(),
            prevent_api_references: source.prevent_api_references,
            adoptions: source.adoptions.clone(),
            is_first: true,
        };
        let mut scanner = Self {
            view,
            store: Store::new(source.adoptions.running()),
            open_files: OpenFiles::default(),
            watch: None,
            watch_error: None,
            timer: None,
        };
        scanner.arm().await;
        scanner
    }

    async fn arm(&mut self) {
        self.open_files.clear();
        // Drops the old instance first: inotify instances are limited per user.
        self.watch = None;
        let path = self.view.path.clone();
        let armed = tokio::task::spawn_blocking(move || Watch::arm(&path)).await;
        match armed.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
            Ok(watch) => {
                self.watch = Some(watch);
                self.watch_error = None;
            }
            Err(error) => {
                let reason = error.to_string();
                if self.watch_error.as_ref() != Some(&reason) {
                    let path = self.view.path.display();
                    tracing::warn!(source = "file", %path, %error, "cannot watch for changes, scanning periodically only");
                    self.watch_error = Some(reason);
                }
            }
        }
    }

    /// Scans until the scanned path is also the watched one. Returns the set if it changed or is complete now; before it one
    /// without the pods of files that were deleted meanwhile.
    async fn scan(&mut self, periodic: bool) -> Vec<SourceUpdate> {
        /// A path that is replaced more often is scanned again at the next event or tick.
        const ATTEMPTS: usize = 3;
        let (mut without_deleted, mut set) = (Vec::new(), None);
        let mut kind: fn(Vec<Pod>) -> SourceUpdate = SourceUpdate::Set;
        for _ in 0..ATTEMPTS {
            let now = Instant::now();
            let deleted = self.watch.as_mut().map(Watch::take_deleted).unwrap_or_default();
            if let Some(rest) = self.store.forget(&deleted) {
                without_deleted.extend(set.take());
                without_deleted.push(rest);
            }
            let known = self.store.known();
            let held = self.open_files.held(now, periodic);
            let view = self.view.clone();
            let listing = tokio::task::spawn_blocking(move || {
                if periodic {
                    view.adoptions.write_again();
                }
                view.list(&known, &held)
            });
            let listing = listing.await.unwrap_or_else(|error| Listing::Unusable(format!("scan failed: {error}")));
            let result = self.store.apply(listing, periodic, now);
            result.reports.into_iter().for_each(|report| log(&self.view.path, report));
            set = result.set.or(set);
            kind = if result.is_incomplete { SourceUpdate::Incomplete } else { SourceUpdate::Set };
            self.timer = [result.rescan_at, self.open_files.next_end()].into_iter().flatten().min();
            if let Some(watch) = &self.watch
                && watch.is_current(&self.view.path).await
            {
                break;
            }
            self.arm().await;
            if self.watch.is_none() {
                break;
            }
        }
        let sets: Vec<SourceUpdate> = without_deleted.into_iter().chain(set).map(kind).collect();
        self.view.is_first &= sets.is_empty();
        sets
    }

    /// Waits until a scan is due. Cancel-safe: without a watch, the next scan sets one up.
    async fn wake(&mut self) {
        let timer = sleep_until(self.timer);
        let watch = self.watch.as_mut();
        let open_files = &mut self.open_files;
        let watched = async move {
            match watch {
                Some(watch) => watch.next(open_files).await,
                None => std::future::pending().await,
            }
        };
        let wake = tokio::select! {
            () = timer => WatchResult::Changed,
            wake = watched => wake,
        };
        if wake == WatchResult::Replaced {
            self.arm().await;
        }
    }
}

fn log(folder: &Path, report: Report) {
    let path = |name: &std::ffi::OsStr| if name.is_empty() { folder.to_owned() } else { folder.join(name) };
    match report {
        Report::Path(problem) => {
            tracing::error!(source = "file", path = %folder.display(), "static pod path {problem}")
        }
        Report::PathGood => tracing::info!(source = "file", path = %folder.display(), "static pod path is usable"),
        Report::Bad(name, error) => {
            tracing::error!(source = "file", file = %path(&name).display(), "manifest refused: {error}");
        }
        Report::Good(name) => tracing::info!(source = "file", file = %path(&name).display(), "manifest is good again"),
        Report::Unknown(name, fields) => {
            let fields = fields.join(", ");
            tracing::warn!(source = "file", file = %path(&name).display(), fields, "manifest sets unknown fields, ignored");
        }
        Report::IgnoresDocuments(name) => {
            tracing::warn!(source = "file", file = %path(&name).display(), "{FURTHER_DOCUMENTS}");
        }
        Report::Conflict(pod, files) => {
            let last = files.last().map(|name| path(name)).unwrap_or_default();
            let files = format!("{files:?}");
            tracing::warn!(source = "file", pod, files, used = %last.display(), "several manifests have the same pod");
        }
    }
}
