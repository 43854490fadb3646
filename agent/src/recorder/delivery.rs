//! The way of events to the API server: one at a time, tried again while it cannot be reached.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Loss;
use super::RecorderObserver;
use super::correlate;
use super::correlate::Correlator;
use super::correlate::Verdict;
use super::object::Occurrence;
use crate::model::Clock;

/// How often an event is tried, and the pause between two tries; the first pause is a random part of it.
const TRIES: u32 = 12;
const PAUSE: Duration = Duration::from_secs(10);
/// What still waits when the agent ends has this long.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Events on their way. Dropping it turns the recorder into one that counts every event as lost.
pub struct Queue {
    receiver: mpsc::Receiver<Occurrence>,
    correlator: Correlator,
    clock: Clock,
    observer: Arc<dyn RecorderObserver>,
}

impl Queue {
    pub(super) fn new(
        receiver: mpsc::Receiver<Occurrence>,
        node: &str,
        clock: Clock,
        observer: Arc<dyn RecorderObserver>,
    ) -> Self {
        Self { receiver, correlator: Correlator::new(node), clock, observer }
    }

    /// The next event, if one waits.
    #[cfg(test)]
    pub(super) fn waiting(&mut self) -> Option<Occurrence> {
        self.receiver.try_recv().ok()
    }

    /// Delivers by way of `client`, which limits the rate, until every recorder is gone or `shutdown`; what waits then
    /// is tried once more.
    pub async fn deliver(mut self, client: kube::Client, shutdown: CancellationToken) {
        while let Some(Some(occurrence)) = shutdown.run_until_cancelled(self.receiver.recv()).await {
            self.tell(&client, &occurrence, &shutdown).await;
        }
        self.receiver.close();
        let rest = async {
            while let Some(occurrence) = self.receiver.recv().await {
                self.tell(&client, &occurrence, &shutdown).await;
            }
        };
        let _ = tokio::time::timeout(LAST_WORDS, rest).await;
    }

    async fn tell(&mut self, client: &kube::Client, occurrence: &Occurrence, shutdown: &CancellationToken) {
        let verdict = self.correlator.correlate(occurrence, self.clock.wall_nanos());
        for attempt in 1..=TRIES {
            let outcome = match &verdict {
                Verdict::Drop => return self.observer.lost(Loss::Spam),
                Verdict::Create(event) => create(client, event).await,
                Verdict::Patch(event) => patch_or_create(client, event).await,
            };
            let Err(error) = outcome else { return };
            if let kube::Error::Api(status) = &error {
                refused(occurrence, status);
                return self.observer.lost(Loss::Rejected);
            }
            tracing::debug!(target: "keblet::recorder", reason = occurrence.reason, %error, attempt, "event not told yet");
            let pause = if attempt == 1 { PAUSE.mul_f64(fastrand::f64()) } else { PAUSE };
            if attempt < TRIES && shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                break;
            }
        }
        tracing::warn!(target: "keblet::recorder", reason = occurrence.reason, "event given up: no API server");
        self.observer.lost(Loss::Unreachable);
    }
}

/// Refusals that are nobody's fault are told only to who wants everything.
fn refused(occurrence: &Occurrence, status: &kube::core::Status) {
    let ending = status.details.iter().flat_map(|details| &details.causes);
    let ending = ending.into_iter().any(|cause| cause.reason == "NamespaceTerminating");
    let (reason, message) = (&occurrence.reason, &status.message);
    if status.reason == "AlreadyExists" || ending {
        tracing::debug!(target: "keblet::recorder", reason, message, "the API server refused an event");
    } else {
        tracing::error!(target: "keblet::recorder", reason, message, "the API server refused an event");
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
