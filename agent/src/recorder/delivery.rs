//! Delivery of events to the API server: one at a time, warnings first, retried while it cannot be reached.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::EventType;
use super::Loss;
use super::QUEUE;
use super::RecorderObserver;
use super::correlate;
use super::correlate::CorrelationResult;
use super::correlate::Correlator;
use super::log_rate_limit::LogRateLimit;
use super::object::Occurrence;
use crate::model::Clock;

/// Attempts per event, and the pause between two; the first pause is a random part of it (client-go: `maxTriesPerEvent`).
const TRIES: u32 = 12;
const PAUSE: Duration = Duration::from_secs(10);
/// Time for events that are queued when the agent stops.
const DRAIN: Duration = Duration::from_secs(1);

/// Defers the delivery of events.
pub trait Deferral: Send + Sync + 'static {
    /// Waits until an event of this age may be delivered; dropped when the agent stops.
    fn ready(&self, age: Duration) -> impl Future<Output = ()> + Send;
}

/// Queued events. Without it the recorder counts every event as lost.
pub struct Queue {
    receiver: mpsc::Receiver<Occurrence>,
    correlator: Correlator,
    clock: Clock,
    started: Instant,
    observer: Arc<dyn RecorderObserver>,
    log_limit: LogRateLimit,
}

impl Queue {
    pub(super) fn new(
        receiver: mpsc::Receiver<Occurrence>,
        node: &str,
        clock: Clock,
        observer: Arc<dyn RecorderObserver>,
    ) -> Self {
        let (correlator, log_limit) = (Correlator::new(node), LogRateLimit::default());
        Self { receiver, correlator, clock, started: Instant::now(), observer, log_limit }
    }

    /// The next event, if one waits.
    #[cfg(test)]
    pub(super) fn waiting(&mut self) -> Option<Occurrence> {
        self.receiver.try_recv().ok()
    }

    /// Delivers through `client`, which limits the rate, until every recorder is dropped or `shutdown`; queued events then
    /// have one attempt within a second. `deferral` is awaited before each event but warnings, which overtake those that are
    /// deferred.
    pub async fn deliver(mut self, client: kube::Client, deferral: impl Deferral, shutdown: CancellationToken) {
        let mut deferred = VecDeque::new();
        while let Some(Some(occurrence)) = shutdown.run_until_cancelled(self.due(&mut deferred, &deferral)).await {
            self.send(&client, &occurrence, &shutdown).await;
        }
        self.receiver.close();
        let rest = async {
            for occurrence in deferred {
                self.send(&client, &occurrence, &shutdown).await;
            }
            while let Some(occurrence) = self.receiver.recv().await {
                self.send(&client, &occurrence, &shutdown).await;
            }
        };
        let _ = tokio::time::timeout(DRAIN, rest).await;
        if let Some(line) = self.log_limit.rest() {
            tracing::warn!(target: "keblet::recorder", lost = line.unlogged, "more events were not delivered");
        }
    }

    /// The next event that may be delivered; `None` once every recorder is dropped and all that waited was delivered. Nothing is
    /// lost if the future is dropped.
    async fn due(&mut self, deferred: &mut VecDeque<Occurrence>, deferral: &impl Deferral) -> Option<Occurrence> {
        let mut is_open = true;
        while is_open || !deferred.is_empty() {
            let age = deferred.front().map(|first| first.recorded_at.elapsed());
            let ready = async {
                match age {
                    Some(age) => deferral.ready(age).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                received = self.receiver.recv(), if is_open && deferred.len() < QUEUE => match received {
                    Some(warning) if warning.kind == EventType::Warning => return Some(warning),
                    Some(occurrence) => deferred.push_back(occurrence),
                    None => is_open = false,
                },
                () = ready => return deferred.pop_front(),
            }
        }
        None
    }

    async fn send(&mut self, client: &kube::Client, occurrence: &Occurrence, shutdown: &CancellationToken) {
        let result = self.correlator.correlate(occurrence, self.clock.wall_nanos(), self.started.elapsed());
        for attempt in 1..=TRIES {
            let outcome = match &result {
                CorrelationResult::Drop => return self.observer.lost(Loss::Spam),
                CorrelationResult::Create(event) => create(client, event).await,
                CorrelationResult::Patch(event) => patch_or_create(client, event).await,
            };
            let Err(error) = outcome else { return self.delivered() };
            if let kube::Error::Api(status) = &error {
                self.refused(occurrence, status);
                return self.observer.lost(Loss::Rejected);
            }
            tracing::debug!(target: "keblet::recorder", reason = occurrence.reason, %error, attempt, "event not delivered, retrying");
            let pause = if attempt == 1 { PAUSE.mul_f64(fastrand::f64()) } else { PAUSE };
            if attempt < TRIES && shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                break;
            }
        }
        let (reason, line) = (&occurrence.reason, self.log_limit.lost("unreachable", Instant::now()));
        if let Some(line) = line {
            let others = line.unlogged;
            tracing::warn!(target: "keblet::recorder", reason, others, "event dropped: the API server cannot be reached");
        }
        self.observer.lost(Loss::Unreachable);
    }

    /// Logs how many events were lost before this one.
    fn delivered(&mut self) {
        if let Some(line) = self.log_limit.delivered(Instant::now()) {
            tracing::warn!(target: "keblet::recorder", lost = line.unlogged, "events are delivered again");
        }
    }

    /// A refused event is not sent again. Expected refusals are logged at debug level.
    fn refused(&mut self, occurrence: &Occurrence, status: &kube::core::Status) {
        let terminating = status.details.iter().flat_map(|details| &details.causes);
        let terminating = terminating.into_iter().any(|cause| cause.reason == "NamespaceTerminating");
        let (reason, code, message) = (&occurrence.reason, status.code, &status.message);
        if status.reason == "AlreadyExists" || terminating {
            tracing::debug!(target: "keblet::recorder", reason, message, "the API server refused an event");
        } else if let Some(line) = self.log_limit.lost(&code.to_string(), Instant::now()) {
            let others = line.unlogged;
            tracing::error!(target: "keblet::recorder", reason, code, message, others, "the API server refused an event");
        }
    }
}

fn api(client: &kube::Client, event: &Event) -> Api<Event> {
    Api::namespaced(client.clone(), event.metadata.namespace.as_deref().unwrap_or("default"))
}

async fn create(client: &kube::Client, event: &Event) -> Result<(), kube::Error> {
    api(client, event).create(&PostParams::default(), event).await.map(drop)
}

async fn patch_or_create(client: &kube::Client, event: &Event) -> Result<(), kube::Error> {
    let name = event.metadata.name.as_deref().unwrap_or_default();
    let patch = Patch::Strategic(correlate::patch(event));
    match api(client, event).patch(name, &PatchParams::default(), &patch).await {
        Err(kube::Error::Api(status)) if status.code == 404 => create(client, event).await,
        outcome => outcome.map(drop),
    }
}
