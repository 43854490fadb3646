//! Reports of the PLEG: every lifecycle event, relist and contradiction, for assertions.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use keblet::events::RelistReason;
use keblet::model::LifecycleEvent;
use keblet::model::LifecycleKind;
use keblet::model::OomVerdict;
use keblet::model::OomVictim;
use keblet::pleg::PlegObserver;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use tokio::time::Instant;

/// Reports of one agent's PLEG. Clones share them; consecutive agents may share them too.
#[derive(Clone, Debug)]
pub struct Seen {
    log: Arc<Mutex<Log>>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Log {
    events: Vec<(Instant, LifecycleEvent)>,
    relists: Vec<(Instant, RelistReason, bool)>,
    inspections: u64,
    contradictions: u64,
    oom_kills: Vec<Arc<OomVerdict>>,
}

impl Default for Seen {
    fn default() -> Self {
        Self { log: Arc::default(), changes: watch::Sender::new(0) }
    }
}

impl Seen {
    /// All events of one kind about one container instance, with the time of the report.
    pub fn of(&self, kind: LifecycleKind, container: &str) -> Vec<(Instant, LifecycleEvent)> {
        let about = |event: &LifecycleEvent| event.container.as_str() == container;
        self.log().events.iter().filter(|(_, event)| event.kind == kind && about(event)).cloned().collect()
    }

    /// Number of reported exits of a container instance.
    pub fn exit_count(&self, container: &str) -> usize {
        self.of(LifecycleKind::ContainerDied, container).len()
    }

    /// All events, oldest first.
    pub fn events(&self) -> Vec<(Instant, LifecycleEvent)> {
        self.log().events.clone()
    }

    /// Finished relists: time, reason, success.
    pub fn relists(&self) -> Vec<(Instant, RelistReason, bool)> {
        self.log().relists.clone()
    }

    /// Number of finished inspections of single pods.
    pub fn inspections(&self) -> u64 {
        self.log().inspections
    }

    /// Number of times the runtime contradicted a proven exit.
    pub fn contradictions(&self) -> u64 {
        self.log().contradictions
    }

    /// Verdicts on OOM kills.
    pub fn oom_kills(&self) -> Vec<Arc<OomVerdict>> {
        self.log().oom_kills.clone()
    }

    /// Victims of OOM kills.
    pub fn oom_victims(&self) -> Vec<OomVictim> {
        self.log().oom_kills.iter().map(|verdict| verdict.victim).collect()
    }

    /// Records verdicts until the agent ends.
    pub(super) async fn follow(self, mut verdicts: broadcast::Receiver<Arc<OomVerdict>>) {
        loop {
            match verdicts.recv().await {
                Ok(verdict) => self.note(|log| log.oom_kills.push(verdict)),
                Err(RecvError::Lagged(missed)) => panic!("{missed} verdicts were missed"),
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// Waits until the reports meet a condition; false if they do not within `limit`.
    pub async fn until(&self, limit: Duration, met: impl Fn(&Self) -> bool) -> bool {
        let mut changes = self.changes.subscribe();
        let wait = async {
            while !met(self) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(limit, wait).await.is_ok()
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, note: impl FnOnce(&mut Log)) {
        note(&mut self.log());
        self.changes.send_modify(|count| *count += 1);
    }
}

impl PlegObserver for Seen {
    fn event(&self, event: &LifecycleEvent, _latency: Option<Duration>) {
        self.note(|log| log.events.push((Instant::now(), event.clone())));
    }

    fn relist(&self, reason: RelistReason, _took: Duration, _interval: Option<Duration>, ok: bool) {
        self.note(|log| log.relists.push((Instant::now(), reason, ok)));
    }

    fn inspection(&self, _took: Duration, _ok: bool) {
        self.note(|log| log.inspections += 1);
    }

    fn contradiction(&self) {
        self.note(|log| log.contradictions += 1);
    }
}
