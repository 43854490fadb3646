//! Relists: periodic lists of all pods. Pods that differ from the cache are inspected, pods that are not listed are
//! removed.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;

use super::inspect;
use super::inspect::Listing;
use super::record::retry_delay;
use super::task::CallResult;
use super::task::PlegTask;
use crate::events::RelistReason;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::Source;
use crate::runtime::Operation;
use crate::runtime::RuntimeError;

/// Schedule of relists.
#[derive(Default)]
pub(super) struct Relists {
    /// Sample time of the newest successful relist: pods not in it did not exist then.
    pub covered_at: Option<Instant>,
    inflight: Option<(Instant, RelistReason)>,
    previous: Option<Instant>,
    wanted: BTreeSet<RelistReason>,
    not_before: Option<Instant>,
    failures: u32,
}

impl Relists {
    /// Requests a relist sampled from now on.
    pub(super) fn request(&mut self, reason: RelistReason, now: Instant) {
        self.wanted.insert(reason);
        self.not_before = Some(self.not_before.map_or(now, |at| at.min(now)));
    }

    /// Sample time of the newest or running relist, else now.
    pub(super) fn began_or_now(&self) -> Instant {
        self.covered_at.or(self.inflight.map(|(at, _)| at)).unwrap_or_else(Instant::now)
    }

    /// Drops a relist whose task ended abnormally.
    pub(super) fn abandon(&mut self) {
        self.inflight = None;
    }
}

impl PlegTask {
    /// When the next relist is due; in the far future while one is in progress.
    pub(super) fn relist_due(&self) -> Instant {
        let now = Instant::now();
        if self.relists.inflight.is_some() {
            return now + Duration::from_secs(3600);
        }
        let period = self.config.periods.current(self.config.sensor_states.get(Sensor::RuntimeEvents).as_ref());
        let periodic = self.relists.previous.map_or(now, |at| at + period);
        match (self.relists.failures, self.relists.not_before) {
            (0, Some(at)) => at.min(periodic),
            (0, None) => periodic,
            (failures, _) => self.relists.previous.map_or(now, |at| at + retry_delay(failures)),
        }
    }

    /// Starts a relist if it is due. At most one runs.
    pub(super) fn relist_if_due(&mut self) {
        let now = Instant::now();
        if self.relist_due() > now {
            return;
        }
        let reason = self.relists.wanted.pop_first().unwrap_or(RelistReason::Period);
        self.relists.wanted.clear();
        self.relists.not_before = None;
        self.relists.inflight = Some((now, reason));
        let runtime = self.runtime.clone();
        let limit = self.config.inspection_timeout;
        self.work.spawn(async move {
            let result = match tokio::time::timeout(limit, inspect::list_all(&runtime)).await {
                Ok(result) => result,
                Err(_) => Err(RuntimeError::Deadline {
                    operation: Operation::ListPodSandbox,
                    object: "".into(),
                    endpoint: runtime.endpoint().into(),
                    deadline: limit,
                }),
            };
            CallResult::Listed { began: now, result }
        });
    }

    pub(super) fn on_listed(
        &mut self,
        began: Instant,
        result: Result<(Instant, HashMap<PodUid, Listing>), RuntimeError>,
    ) {
        let now = Instant::now();
        let reason = self.relists.inflight.take().map_or(RelistReason::Period, |(_, reason)| reason);
        let interval = self.relists.covered_at.map(|covered_at| began.saturating_duration_since(covered_at));
        // The period is the pause between relists, so that a slow runtime is not called all the time.
        self.relists.previous = Some(now);
        self.config.observer.relist(reason, now - began, interval, result.is_ok());
        match result {
            Ok((sampled_at, pods)) => {
                self.relists.failures = 0;
                self.relists.covered_at = Some(sampled_at);
                self.config.sensor_states.set(Sensor::Relist, SensorState::Up);
                let found: Vec<PodUid> = pods.keys().cloned().collect();
                self.compare(sampled_at, pods);
                self.uninspected.found(self.uncached(found, sampled_at));
            }
            Err(error) => {
                self.relists.failures = self.relists.failures.saturating_add(1);
                self.relists.request(reason, now);
                self.uninspected.unknown();
                self.config.sensor_states.set(Sensor::Relist, SensorState::Down(error.to_string()));
            }
        }
    }

    /// Those of the pods listed at `sampled_at` of which the cache has nothing.
    fn uncached(&self, found: Vec<PodUid>, sampled_at: Instant) -> HashSet<PodUid> {
        let outdated = |known: &PodSnapshot| {
            known.containers.is_empty() && known.sandboxes.is_empty() && known.sampled_at <= sampled_at
        };
        let cached = |uid: &PodUid| self.records.get(uid).and_then(|record| record.snapshot.as_deref());
        found.into_iter().filter(|uid| cached(uid).is_none_or(outdated)).collect()
    }

    /// The cache has a snapshot of the pod, sampled at or after `sampled_at`.
    pub(super) fn cached_since(&self, uid: &PodUid, sampled_at: Instant) {
        if self.relists.covered_at.is_some_and(|listed_at| sampled_at >= listed_at) {
            self.uninspected.inspected(uid);
        }
    }

    fn compare(&mut self, sampled_at: Instant, mut pods: HashMap<PodUid, Listing>) {
        let known: Vec<PodUid> = self.records.keys().cloned().collect();
        for uid in known {
            if !pods.contains_key(&uid) {
                self.not_listed(&uid, sampled_at);
            }
        }
        for (uid, listing) in pods.drain() {
            self.listed(&uid, sampled_at, listing);
        }
    }

    fn not_listed(&mut self, uid: &PodUid, sampled_at: Instant) {
        let Some(record) = self.records.get(uid) else { return };
        if record.inflight.is_some() || record.acting_since.is_some() {
            return;
        }
        match &record.snapshot {
            Some(snapshot) if snapshot.sampled_at > sampled_at => {}
            _ if !record.waiters.is_empty() => self.install_absent(uid, sampled_at),
            _ => self.remove_pod(uid),
        }
    }

    fn listed(&mut self, uid: &PodUid, sampled_at: Instant, listing: Listing) {
        let record = self.records.entry(uid.clone()).or_default();
        record.unlabelled = inspect::unlabelled(uid, &listing);
        let newer = record.snapshot.as_ref().is_some_and(|known| known.sampled_at > sampled_at);
        let agrees = record.snapshot.as_ref().is_some_and(|known| inspect::agrees(&listing, known));
        // A listing that agrees costs no call. Installing its snapshot tries to watch the processes that are not watched.
        if newer || (agrees && record.watches_all()) {
            return;
        }
        record.source.get_or_insert(Source::Relist);
        if record.inflight.is_some() {
            record.again = Some(sampled_at);
            return;
        }
        let previous = record.snapshot.clone();
        let (runtime, messages) = (self.runtime.clone(), self.messages.clone());
        let target = uid.clone();
        self.spawn_inspection(uid, sampled_at, async move {
            let early = inspect::PrefetchedStatuses::new();
            inspect::complete(&runtime, &messages, &target, (sampled_at, listing), previous, &early).await
        });
    }
}
