//! The task behind the file source: waits for a reason to look, looks, hands on what changed.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::holds::Holds;
use super::listing::Listing;
use super::listing::View;
use super::store::Report;
use super::store::Store;
use super::watch::Wake;
use super::watch::Watch;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::sources::News;

/// Settings of the file source.
#[derive(Clone, Debug)]
pub struct FileSource {
    /// A folder of manifests or a single one.
    pub path: PathBuf,
    /// How often to look without being told (`fileCheckFrequency`).
    pub check_frequency: Duration,
    /// This node's name.
    pub node_name: String,
    /// Feature gate PreventStaticPodAPIReferences.
    pub prevent_api_references: bool,
}

impl FileSource {
    /// Sends complete sets until cancelled or until nobody listens.
    pub async fn run(self, sets: mpsc::Sender<(ConfigSource, News)>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.looks(sets) => {}
        }
    }

    async fn looks(self, sets: mpsc::Sender<(ConfigSource, News)>) {
        let mut looker = Looker::new(&self);
        let mut tick = tokio::time::interval(self.check_frequency.max(Duration::from_millis(100)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut periodic = true;
        tick.tick().await;
        loop {
            if let Some(set) = looker.look(periodic).await
                && sets.send((ConfigSource::File, News::Set(set))).await.is_err()
            {
                return;
            }
            periodic = tokio::select! {
                _ = tick.tick() => true,
                () = looker.wake() => false,
            };
        }
    }
}

/// What the task keeps between looks.
struct Looker {
    view: View,
    store: Store,
    holds: Holds,
    watch: Option<Watch>,
    /// The last reason why there is no watch, to say it once.
    deaf: Option<String>,
    alarm: Option<Instant>,
}

impl Looker {
    fn new(source: &FileSource) -> Self {
        // Components, put together again, have no trailing slashes.
        let path: PathBuf = source.path.components().collect();
        let view =
            View { path, node_name: source.node_name.clone(), prevent_api_references: source.prevent_api_references };
        let mut looker =
            Self { view, store: Store::default(), holds: Holds::default(), watch: None, deaf: None, alarm: None };
        looker.arm();
        looker
    }

    fn arm(&mut self) {
        self.holds.clear();
        // The old instance goes first: a node may be short of them.
        self.watch = None;
        match Watch::arm(&self.view.path) {
            Ok(watch) => {
                self.watch = Some(watch);
                self.deaf = None;
            }
            Err(error) => {
                let reason = error.to_string();
                if self.deaf.as_ref() != Some(&reason) {
                    let path = self.view.path.display();
                    tracing::warn!(source = "file", %path, %error, "cannot watch for changes, looking periodically only");
                    self.deaf = Some(reason);
                }
            }
        }
    }

    /// Looks until what was looked at is also what is being watched. The set, if it changed.
    async fn look(&mut self, periodic: bool) -> Option<Vec<Pod>> {
        /// A path that changes faster than this is looked at again by the next event or tick.
        const ATTEMPTS: usize = 3;
        let mut set = None;
        for _ in 0..ATTEMPTS {
            let now = Instant::now();
            let known = self.store.known();
            let held = self.holds.held(now, periodic);
            let view = self.view.clone();
            let listing = tokio::task::spawn_blocking(move || view.list(&known, &held)).await;
            let listing = listing.unwrap_or_else(|error| Listing::Unusable(format!("look failed: {error}")));
            let verdict = self.store.apply(listing, periodic, now);
            verdict.reports.into_iter().for_each(|report| log(&self.view.path, report));
            set = verdict.set.or(set);
            self.alarm = [verdict.look_again, self.holds.next_end()].into_iter().flatten().min();
            if self.watch.as_ref().is_some_and(|watch| watch.is_current(&self.view.path)) {
                break;
            }
            self.arm();
            if self.watch.is_none() {
                break;
            }
        }
        set
    }

    /// Waits until there is a reason to look.
    async fn wake(&mut self) {
        let alarm = self.alarm;
        let alarm = async move {
            match alarm {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let watch = self.watch.as_mut();
        let holds = &mut self.holds;
        let heard = async move {
            match watch {
                Some(watch) => watch.next(holds).await,
                None => std::future::pending().await,
            }
        };
        let wake = tokio::select! {
            () = alarm => Wake::Look,
            wake = heard => wake,
        };
        if wake == Wake::Rearm {
            self.arm();
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
        Report::Conflict(pod, files) => {
            let last = files.last().map(|name| path(name)).unwrap_or_default();
            let files = format!("{files:?}");
            tracing::warn!(source = "file", pod, files, used = %last.display(), "several manifests have the same pod");
        }
    }
}
