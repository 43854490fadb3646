//! The way of events to the API server: one at a time, tried again while it cannot be reached.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Loss;
use super::RecorderObserver;
use super::correlate;
use super::correlate::Correlator;
use super::correlate::Verdict;
use super::object::Occurrence;
use super::silence::Silence;
use crate::model::Clock;

/// How often an event is tried, and the pause between two tries; the first pause is a random part of it.
const TRIES: u32 = 12;
const PAUSE: Duration = Duration::from_secs(10);
/// What still waits when the agent ends has this long.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// An event of this age gives way to nothing any more.
const PATIENCE: Duration = Duration::from_secs(2);

/// Events on their way. Dropping it turns the recorder into one that counts every event as lost.
pub struct Queue {
    receiver: mpsc::Receiver<Occurrence>,
    urgent: watch::Receiver<usize>,
    correlator: Correlator,
    clock: Clock,
    observer: Arc<dyn RecorderObserver>,
    silence: Silence,
}

impl Queue {
    pub(super) fn new(
        receiver: mpsc::Receiver<Occurrence>,
        urgent: watch::Receiver<usize>,
        node: &str,
        clock: Clock,
        observer: Arc<dyn RecorderObserver>,
    ) -> Self {
        let (correlator, silence) = (Correlator::new(node), Silence::default());
        Self { receiver, urgent, correlator, clock, observer, silence }
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
            let _ = shutdown.run_until_cancelled(self.give_way(occurrence.nanos)).await;
            self.tell(&client, &occurrence, &shutdown).await;
        }
        self.receiver.close();
        let rest = async {
            while let Some(occurrence) = self.receiver.recv().await {
                self.tell(&client, &occurrence, &shutdown).await;
            }
        };
        let _ = tokio::time::timeout(LAST_WORDS, rest).await;
        if let Some(line) = self.silence.rest() {
            tracing::warn!(target: "keblet::recorder", lost = line.untold, "more events were not told");
        }
    }

    /// Lets what is urgent go first, until an event of `nanos` is old enough.
    async fn give_way(&mut self, nanos: i64) {
        let age = u64::try_from(self.clock.wall_nanos().saturating_sub(nanos)).unwrap_or_default();
        let patience = PATIENCE.saturating_sub(Duration::from_nanos(age));
        // Neither the end of patience nor that of all recorders is a reason not to tell.
        let _ = tokio::time::timeout(patience, self.urgent.wait_for(|urgent| *urgent == 0)).await;
    }

    async fn tell(&mut self, client: &kube::Client, occurrence: &Occurrence, shutdown: &CancellationToken) {
        let verdict = self.correlator.correlate(occurrence, self.clock.wall_nanos());
        for attempt in 1..=TRIES {
            let outcome = match &verdict {
                Verdict::Drop => return self.observer.lost(Loss::Spam),
                Verdict::Create(event) => create(client, event).await,
                Verdict::Patch(event) => patch_or_create(client, event).await,
            };
            let Err(error) = outcome else { return self.delivered() };
            if let kube::Error::Api(status) = &error {
                self.refused(occurrence, status);
                return self.observer.lost(Loss::Rejected);
            }
            tracing::debug!(target: "keblet::recorder", reason = occurrence.reason, %error, attempt, "event not told yet");
            let pause = if attempt == 1 { PAUSE.mul_f64(fastrand::f64()) } else { PAUSE };
            if attempt < TRIES && shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                break;
            }
        }
        let (reason, line) = (&occurrence.reason, self.silence.lost("unreachable", Instant::now()));
        if let Some(line) = line {
            let others = line.untold;
            tracing::warn!(target: "keblet::recorder", reason, others, "event given up: no API server");
        }
        self.observer.lost(Loss::Unreachable);
    }

    /// If events were lost before this one, it is said how many.
    fn delivered(&mut self) {
        if let Some(line) = self.silence.delivered(Instant::now()) {
            tracing::warn!(target: "keblet::recorder", lost = line.untold, "events are told again, after some were not");
        }
    }

    /// What the server refuses is not sent again. Refusals that are nobody's fault are told only to who wants everything.
    fn refused(&mut self, occurrence: &Occurrence, status: &kube::core::Status) {
        let ending = status.details.iter().flat_map(|details| &details.causes);
        let ending = ending.into_iter().any(|cause| cause.reason == "NamespaceTerminating");
        let (reason, code, message) = (&occurrence.reason, status.code, &status.message);
        if status.reason == "AlreadyExists" || ending {
            tracing::debug!(target: "keblet::recorder", reason, message, "the API server refused an event");
        } else if let Some(line) = self.silence.lost(&code.to_string(), Instant::now()) {
            let others = line.untold;
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
