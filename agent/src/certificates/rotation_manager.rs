//! Rotates one certificate: compares it with its template, requests a new one in time, and publishes the current one.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::SystemTime;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::pair::Pair;
use super::request;
use super::request::RequestError;
use super::rotation;
use super::rotation::Due;
use super::store::Store;
use super::store::StoreError;
use super::template::Purpose;
use super::template::Template;
use crate::apiserver::ApiServer;
use crate::apiserver::recovery::Recovered;
use crate::metrics::Metrics;
use crate::model::Clock;

/// How long one request may wait until a certificate is issued.
const TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// The wall clock may be set, so it is read again after this.
const MAX_SLEEP: Duration = Duration::from_secs(60);

/// Whether the API server counts as healthy: it answers our requests for certificates, even if it denies them.
#[derive(Clone, Debug, Default)]
pub struct ServerHealth(Arc<AtomicBool>);

impl ServerHealth {
    /// The last request was answered by a working API server.
    pub fn healthy(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn note(&self, healthy: bool) {
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

/// The clients that request certificates.
pub trait RequestClients: Send + Sync {
    /// The client for the next request, and the end of outages. `is_certified`: there is a valid certificate now.
    fn next(&self, is_certified: bool) -> (kube::Client, Recovered);
}

/// One client for all requests, which needs no certificate of this manager.
impl RequestClients for ApiServer {
    fn next(&self, _: bool) -> (kube::Client, Recovered) {
        (self.main.clone(), self.recovered())
    }
}

/// Rotates one certificate; see [`Self::run`].
pub struct RotationManager {
    /// The pairs on disk.
    pub store: Store,
    /// The required contents of the certificate; `None` until they are known.
    pub template: watch::Receiver<Option<Template>>,
    /// The clients for requests.
    pub clients: Box<dyn RequestClients>,
    /// The wall clock.
    pub clock: Clock,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Updated with the outcome of each request.
    pub server_health: ServerHealth,
    /// Replaces the first pair at once, even if it is valid.
    pub at_once: bool,
}

/// A pair that is not stored, and when that was tried first: by this time its file is named.
type Unstored = (Arc<Pair>, SystemTime);

/// Why a pair is not stored.
#[derive(Debug, thiserror::Error)]
enum UnstoredError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("storing the certificate: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl RotationManager {
    /// Rotates until `cancel` is cancelled. `current` holds the initial pair, and from then on the one in use: `None`
    /// while there is none, or only an expired one.
    pub async fn run(mut self, current: watch::Sender<Option<Arc<Pair>>>, cancel: CancellationToken) {
        // An expired pair is kept: its age is a metric of the next rotation.
        let mut pair = current.borrow().clone();
        self.publish(&current, pair.as_ref());
        let (mut useless, mut unstored) = (0, None);
        let rotating = async {
            loop {
                let Some(template) = self.known_template().await else { return };
                self.wait_until_due(pair.as_deref(), &template, &current, &mut unstored).await;
                let wanted = self.template.borrow_and_update().clone();
                if wanted.as_ref() != Some(&template) {
                    continue;
                }
                if let Some((renewed, is_stored)) = self.renew(&template, &current).await {
                    self.count(template.purpose, pair.as_deref());
                    let renewed = &*pair.insert(Arc::new(renewed));
                    unstored = (!is_stored).then(|| (renewed.clone(), self.clock.wall()));
                    self.publish(&current, Some(renewed));
                    useless = self.pause_if_useless(renewed, &template, useless).await;
                }
            }
        };
        cancel.run_until_cancelled(rotating).await;
    }

    async fn known_template(&mut self) -> Option<Template> {
        let known = self.template.wait_for(Option::is_some).await.ok()?;
        known.clone()
    }

    /// Waits until a new certificate is due, or the template changes. Meanwhile tries to store the pair that is not stored.
    async fn wait_until_due(
        &mut self,
        pair: Option<&Pair>,
        template: &Template,
        current: &watch::Sender<Option<Arc<Pair>>>,
        unstored: &mut Option<Unstored>,
    ) {
        let due = rotation::due(pair.map(|pair| &pair.leaf), template, fastrand::f64());
        let at_once = std::mem::take(&mut self.at_once);
        let at = match due {
            Due::At(_) if at_once => return,
            Due::Now(why) => {
                tracing::info!(purpose = template.purpose.prefix(), "requesting a certificate: {why}");
                return;
            }
            Due::At(at) => at,
        };
        tracing::info!(purpose = template.purpose.prefix(), at = %humantime::format_rfc3339_seconds(at), "next rotation");
        loop {
            let Ok(left) = at.duration_since(self.clock.wall()) else { return };
            if left.is_zero() {
                return;
            }
            let mut others = self.template.clone();
            others.mark_unchanged();
            let other = others.wait_for(|wanted| wanted.as_ref() != Some(template));
            tokio::select! {
                () = tokio::time::sleep(left.min(MAX_SLEEP)) => {}
                // A dropped sender means that the template does not change any more.
                Ok(_) = other => return,
            }
            self.drop_expired(current);
            if let Some(pair) = unstored.take() {
                *unstored = self.store_again(pair).await;
            }
        }
    }

    /// Tries until a certificate is issued, or a valid pair was put on disk in place of an expired one; `None` if the
    /// template changes meanwhile. With the pair whether it is stored.
    async fn renew(&mut self, template: &Template, current: &watch::Sender<Option<Arc<Pair>>>) -> Option<(Pair, bool)> {
        let (mut failures, mut last_error) = (0, String::new());
        loop {
            if let Some(pair) = self.replaced(current).await {
                return Some((pair, true));
            }
            let mut others = self.template.clone();
            let attempt = async {
                let error = match self.attempt(template, current).await {
                    Ok(done) => return Some(done),
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
                self.count_failure();
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

    /// Pauses after a certificate that is to be replaced as soon as it is issued, unless the template changes. Takes the
    /// number of those in a row before it, and returns the new one.
    async fn pause_if_useless(&self, pair: &Pair, template: &Template, before: u32) -> u32 {
        if !rotation::is_useless(&pair.leaf, template, self.clock.wall()) {
            return 0;
        }
        let in_row = before.saturating_add(1);
        let pause = rotation::pause(in_row, fastrand::f64());
        tracing::warn!(purpose = template.purpose.prefix(), ?pause, in_row, "the new certificate is to be replaced");
        let mut others = self.template.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A dropped sender means that the template does not change any more.
            Ok(_) = others.wait_for(|wanted| wanted.as_ref() != Some(template)) => {}
        }
        in_row
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
    ) -> Result<(Pair, bool), RequestError> {
        let now = self.clock.wall();
        let good = current.borrow().as_ref().is_some_and(|pair| !pair.leaf.expired(now));
        let (client, recovered) = self.clients.next(good);
        let created = |outcome: Result<(), &kube::Error>| self.server_health.created(outcome);
        let pair = request::obtain(&client, recovered, template, TIMEOUT, created).await?;
        self.server_health.note(true);
        // Another request would help nothing, as on a full disk, and the signer would issue one certificate after the other.
        let stored = self.store(&pair, self.clock.wall()).await;
        if let Err(error) = &stored {
            self.count_failure();
            let purpose = template.purpose.prefix();
            tracing::warn!(purpose, %error, "the new certificate is used without being stored; trying again");
        }
        Ok((pair, stored.is_ok()))
    }

    async fn store(&self, pair: &Pair, now: SystemTime) -> Result<(), UnstoredError> {
        let (store, stored) = (self.store.clone(), pair.clone());
        Ok(tokio::task::spawn_blocking(move || store.replace(&stored, now)).await??)
    }

    /// Returns the pair if it cannot be stored.
    async fn store_again(&self, (pair, tried): Unstored) -> Option<Unstored> {
        let file = self.store.current_path();
        match self.store(&pair, tried).await {
            Ok(()) => {
                tracing::info!(file = %file.display(), "the certificate is stored now");
                None
            }
            Err(error) => {
                self.count_failure();
                tracing::debug!(file = %file.display(), %error, "the certificate is still not stored");
                Some((pair, tried))
            }
        }
    }

    fn publish(&self, current: &watch::Sender<Option<Arc<Pair>>>, pair: Option<&Arc<Pair>>) {
        self.measure(pair.map(|pair| &**pair));
        let now = self.clock.wall();
        let good = pair.filter(|pair| !pair.leaf.expired(now)).cloned();
        if pair.is_some() && good.is_none() {
            tracing::error!(file = self.store.place(), "the certificate on disk has expired");
        }
        current.send_replace(good);
    }

    /// Withdraws an expired certificate.
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
            tracing::error!(file = self.store.place(), "the certificate has expired and was not replaced");
        }
    }

    /// Metric: when the certificate expires. An expired one is measured until it is replaced, so that alerts last.
    fn measure(&self, pair: Option<&Pair>) {
        let end = pair.map(|pair| pair.leaf.not_after);
        match self.store.purpose() {
            Purpose::Client => self.metrics.certificates.client_expires(end, self.clock),
            Purpose::Serving => self.metrics.certificates.serving_expires(end, self.clock),
        }
    }

    fn count_failure(&self) {
        match self.store.purpose() {
            Purpose::Client => self.metrics.certificates.client_renewal_failed(),
            Purpose::Serving => self.metrics.certificates.serving_renewal_failed(),
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
