//! Keeps one pair good: watches its age and its template, has it renewed in time, and says which one counts now.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::pair::Pair;
use super::request::{self, RequestError};
use super::rotation::{self, Due};
use super::store::{Store, StoreError};
use super::template::{Purpose, Template};
use crate::apiserver::recovery::Recovered;
use crate::metrics::Metrics;
use crate::model::Clock;

/// How long one request may wait for its signature.
const TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// The wall clock may be set: it is looked at again after so long at the latest.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Whether asking for certificates gets anywhere: the API server answers and says what it thinks of us.
#[derive(Clone, Debug, Default)]
pub struct ServerHealth(Arc<AtomicBool>);

impl ServerHealth {
    /// The API server works, so what is missing is not its fault.
    pub fn healthy(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn note(&self, healthy: bool) {
        self.0.store(healthy, Ordering::Relaxed);
    }

    fn created(&self, outcome: Result<(), &kube::Error>) {
        match outcome {
            Ok(()) => {}
            Err(kube::Error::Api(status)) => self.note(matches!(status.code, 401 | 403 | 404)),
            Err(_) => self.note(false),
        }
    }
}

/// Everything a manager works with.
pub struct RotationManager {
    /// Pairs on disk.
    pub store: Store,
    /// What the certificate must say; `None` as long as that is not known.
    pub template: watch::Receiver<Option<Template>>,
    /// Who sends requests, and tells when an absence of the API server is over: told whether there is a good pair now.
    pub client: Box<dyn Fn(bool) -> (kube::Client, Recovered) + Send + Sync>,
    /// Time.
    pub clock: Clock,
    /// Counted.
    pub metrics: Arc<Metrics>,
    /// How asking goes.
    pub server_health: ServerHealth,
    /// The first pair is to be replaced at once, however good it is.
    pub at_once: bool,
}

/// Why an attempt came to nothing.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("storing the certificate: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl RotationManager {
    /// Keeps the pair until `cancel` is cancelled. `current` holds the pair to begin with, and from then on the one that
    /// counts: `None` while there is none, or only an expired one.
    pub async fn run(mut self, current: watch::Sender<Option<Arc<Pair>>>, cancel: CancellationToken) {
        // The pair stays known after it has expired: its names say whether the next one differs.
        let mut pair = current.borrow().clone();
        self.publish(&current, pair.as_ref());
        let rotating = async {
            loop {
                let Some(template) = self.known_template().await else { return };
                self.measure(template.purpose, pair.as_deref());
                self.wait_until_due(pair.as_deref(), &template, &current).await;
                let wanted = self.template.borrow_and_update().clone();
                if wanted.as_ref() != Some(&template) {
                    continue;
                }
                if let Some(renewed) = self.renew(&template, &current).await {
                    self.count(template.purpose, pair.as_deref());
                    pair = Some(Arc::new(renewed));
                    self.publish(&current, pair.as_ref());
                }
            }
        };
        cancel.run_until_cancelled(rotating).await;
    }

    async fn known_template(&mut self) -> Option<Template> {
        let known = self.template.wait_for(Option::is_some).await.ok()?;
        known.clone()
    }

    /// Until it is due, or the template is another one.
    async fn wait_until_due(
        &mut self,
        pair: Option<&Pair>,
        template: &Template,
        current: &watch::Sender<Option<Arc<Pair>>>,
    ) {
        let due = rotation::due(pair.map(|pair| &pair.leaf), template, fastrand::f64());
        let at_once = std::mem::take(&mut self.at_once);
        let at = match due {
            Due::At(_) if at_once => return,
            Due::Now(why) => {
                tracing::info!(purpose = template.purpose.prefix(), "a certificate is to be requested: {why}");
                return;
            }
            Due::At(at) => at,
        };
        tracing::info!(purpose = template.purpose.prefix(), at = %humantime::format_rfc3339_seconds(at), "next renewal");
        loop {
            let Ok(left) = at.duration_since(self.clock.wall()) else { return };
            if left.is_zero() {
                return;
            }
            let mut others = self.template.clone();
            others.mark_unchanged();
            let other = others.wait_for(|wanted| wanted.as_ref() != Some(template));
            tokio::select! {
                () = tokio::time::sleep(left.min(LONGEST_SLEEP)) => {}
                // A sender that is gone changes nothing any more.
                Ok(_) = other => return,
            }
            self.drop_expired(current);
            self.measure(template.purpose, pair);
        }
    }

    /// Tries until it is done, or somebody has put a good pair in the place of an expired one; `None` if meanwhile
    /// something else is wanted.
    async fn renew(&mut self, template: &Template, current: &watch::Sender<Option<Arc<Pair>>>) -> Option<Pair> {
        let (mut failures, mut last_error) = (0, String::new());
        loop {
            if let Some(pair) = self.replaced(current).await {
                return Some(pair);
            }
            let mut others = self.template.clone();
            let attempt = async {
                let error = match self.attempt(template, current).await {
                    Ok(pair) => return Some(pair),
                    Err(error) => error,
                };
                failures += 1;
                let pause = rotation::pause(failures, fastrand::f64());
                let error = error.to_string();
                if error == last_error {
                    tracing::debug!(purpose = template.purpose.prefix(), ?pause, failures, "no certificate again");
                } else {
                    tracing::warn!(purpose = template.purpose.prefix(), ?pause, "no certificate: {error}");
                }
                last_error = error;
                match template.purpose {
                    Purpose::Client => self.metrics.certificates.client_renewal_failed(),
                    Purpose::Serving => self.metrics.certificates.serving_renewal_failed(),
                }
                tokio::time::sleep(pause).await;
                None
            };
            tokio::select! {
                done = attempt => if done.is_some() { return done },
                Ok(_) = others.wait_for(|wanted| wanted.as_ref() != Some(template)) => return None,
            }
            self.drop_expired(current);
        }
    }

    /// The pair on disk, if there is no valid pair in use and this one is valid.
    async fn replaced(&self, current: &watch::Sender<Option<Arc<Pair>>>) -> Option<Pair> {
        if current.borrow().is_some() {
            return None;
        }
        let store = self.store.clone();
        let found = tokio::task::spawn_blocking(move || store.load()).await.ok()?.ok().flatten();
        let found = found.filter(|pair| !pair.leaf.expired(self.clock.wall()));
        if found.is_some() {
            tracing::info!(file = self.store.place(), "using the valid certificate that was put on disk");
        }
        found
    }

    async fn attempt(
        &self,
        template: &Template,
        current: &watch::Sender<Option<Arc<Pair>>>,
    ) -> Result<Pair, AttemptError> {
        let now = self.clock.wall();
        let good = current.borrow().as_ref().is_some_and(|pair| !pair.leaf.expired(now));
        let (client, recovered) = (self.client)(good);
        let created = |outcome: Result<(), &kube::Error>| self.server_health.created(outcome);
        let pair = request::obtain(&client, recovered, template, TIMEOUT, created).await?;
        let (store, stored, now) = (self.store.clone(), pair.clone(), self.clock.wall());
        tokio::task::spawn_blocking(move || store.replace(&stored, now)).await??;
        self.server_health.note(true);
        Ok(pair)
    }

    fn publish(&self, current: &watch::Sender<Option<Arc<Pair>>>, pair: Option<&Arc<Pair>>) {
        let now = self.clock.wall();
        let good = pair.filter(|pair| !pair.leaf.expired(now)).cloned();
        if pair.is_some() && good.is_none() {
            tracing::error!(file = self.store.place(), "the certificate on disk has expired");
        }
        current.send_replace(good);
    }

    /// An expired certificate counts as missing.
    fn drop_expired(&self, current: &watch::Sender<Option<Arc<Pair>>>) {
        let now = self.clock.wall();
        let dropped = current.send_if_modified(|pair| {
            let expired = pair.as_ref().is_some_and(|pair| pair.leaf.expired(now));
            if expired {
                *pair = None;
            }
            expired
        });
        if dropped {
            tracing::error!(file = self.store.place(), "the certificate has expired and none has come in its place");
        }
    }

    /// How long the pair still lasts.
    fn measure(&self, purpose: Purpose, pair: Option<&Pair>) {
        let now = self.clock.wall();
        let left = pair.map_or(f64::INFINITY, |pair| match pair.leaf.not_after.duration_since(now) {
            Ok(left) => left.as_secs_f64(),
            Err(over) => -over.duration().as_secs_f64(),
        });
        match purpose {
            Purpose::Client => self.metrics.certificates.client_left(left),
            Purpose::Serving => self.metrics.certificates.serving_left(left),
        }
    }

    fn count(&self, purpose: Purpose, replaced: Option<&Pair>) {
        if let (Purpose::Serving, Some(old)) = (purpose, replaced) {
            let age = self.clock.wall().duration_since(old.leaf.not_before).unwrap_or_default();
            self.metrics.certificates.serving_rotated(age);
        }
    }
}

#[cfg(test)]
#[path = "rotation_manager_tests.rs"]
mod tests;
