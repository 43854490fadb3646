//! The sync loop: one select over updates of desired pods, PLEG changes, ended workers, mirror pods, requests and
//! housekeeping. Dispatches; decides nothing about containers and never waits for the runtime.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::admit::PodAdmission;
use super::housekeeping::Housekeeping;
use super::kill_requests::SyncRequests;
use super::mirrors::Mirrors;
use super::pods::is_mirror;
use super::resize::PendingResizes;
use super::resize::Trigger;
use super::shared::SharedPods;
use crate::allocation::Allocations;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::ConfigSource;
use crate::model::PodUid;
use crate::model::PodUpdate;
use crate::model::pod_ref;
use crate::model::sleep_until;
use crate::pleg::PlegHandle;
use crate::probes::ProbeResultStore;
use crate::recorder::Recorder;
use crate::sources::SourcesHandle;
use crate::startup::Startups;
use crate::status::Statuses;
use crate::workers::pod_workers::PodWorkers;

/// Housekeeping waits this long for more reasons, so that a burst costs one pass.
const HOUSEKEEPING_DELAY: Duration = Duration::from_millis(100);

/// An iteration begins at least this often.
const MAX_IDLE: Duration = Duration::from_secs(60);
/// How long workers may take to complete their current action when the agent stops.
const DRAIN: Duration = Duration::from_secs(5);

/// The sync loop: handles to what it dispatches between, which have its state.
pub struct SyncLoop {
    /// Desired pods.
    pub pods: SharedPods,
    /// Admission decisions.
    pub admission: PodAdmission,
    /// What is allocated to pods.
    pub allocations: Allocations,
    /// Resizes that wait.
    pub resizes: PendingResizes,
    /// Counts of resizes.
    pub metrics: Arc<Metrics>,
    /// Pod workers.
    pub workers: PodWorkers,
    /// Changes and the pod cache.
    pub pleg: PlegHandle,
    /// Which sources are ready.
    pub sources: SourcesHandle,
    /// Published statuses.
    pub statuses: Statuses,
    /// Published results of probes.
    pub probes: ProbeResultStore,
    /// Time.
    pub clock: Clock,
    /// Events.
    pub recorder: Recorder,
    /// Mirror pods of static pods.
    pub mirrors: Mirrors,
    /// Requests of other modules.
    pub requests: SyncRequests,
    /// Measures how long pods take to start.
    pub startups: Startups,
    /// When housekeeping is due, and the removal of what terminated pods leave.
    pub housekeeping: Housekeeping,
}

impl SyncLoop {
    /// Runs until `shutdown`, or until there is nothing left that sends updates: desired pods would change unnoticed.
    /// Containers are left as they are.
    pub async fn run(mut self, mut updates: mpsc::Receiver<PodUpdate>, shutdown: CancellationToken) {
        let (pleg, probes) = (self.pleg.clone(), self.probes.clone());
        let allocations = self.allocations.clone();
        let mut addresses = self.statuses.node_addresses();
        // Without sources there is no first delivery that would ask for it.
        self.housekeep_soon();
        loop {
            self.pods.record_iteration();
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep(MAX_IDLE) => {}
                update = updates.recv() => match update {
                    Some(update) => self.on_update(update),
                    None => break,
                },
                uids = pleg.changed_pods() => self.on_pleg_change(uids),
                () = pleg.pods_inspected() => self.housekeep_soon(),
                uids = probes.changed_pods() => self.on_probe_results(uids),
                _ = self.workers.finished() => {
                    self.housekeep_soon();
                    self.retry_resizes(Trigger::PodTerminated);
                }
                uids = allocations.applied() => self.on_applied(&uids),
                () = self.resizes.due() => self.retry_resizes(Trigger::Periodic),
                name = self.mirrors.changed() => self.reconcile_mirrors(name),
                awaited = self.admission.awaited() => self.on_awaited(awaited),
                Some(request) = self.requests.kills.recv() => self.kill(request),
                Ok(()) = addresses.changed() => self.workers.request_sync_of_all(),
                Some(at) = self.housekeeping.leftovers_due.recv() => self.housekeep_at(at),
                () = sleep_until(self.housekeeping.due) => self.housekeeping_pass(),
            }
        }
        self.workers.stop(DRAIN).await;
    }

    fn on_update(&mut self, update: PodUpdate) {
        self.observe_starts(&update);
        let source = match update {
            PodUpdate::Add(source, mut pods) => {
                self.sort_for_admission(&mut pods);
                pods.iter().for_each(|pod| self.add(pod.clone()));
                self.find_resizes(&pods);
                source
            }
            PodUpdate::Update(source, pods) | PodUpdate::Delete(source, pods) => {
                pods.into_iter().for_each(|pod| self.update(pod));
                source
            }
            PodUpdate::Remove(source, pods) => {
                pods.iter().for_each(|pod| self.remove(pod));
                self.retry_resizes(Trigger::PodsRemoved);
                source
            }
            PodUpdate::Reconcile(source, pods) => {
                pods.into_iter().for_each(|pod| self.reconcile(pod));
                source
            }
            PodUpdate::Undecodable(_, uids) => {
                self.housekeeping.undecodable = uids.into_iter().collect();
                // Containers of those that are gone are no longer desired.
                return self.housekeep_soon();
            }
        };
        self.mark_seen(source);
    }

    /// Start latency of API pods is measured from the objects as the API server sends them, of others from their delivery.
    fn observe_starts(&self, update: &PodUpdate) {
        let now = self.clock.wall();
        match update {
            PodUpdate::Add(ConfigSource::Api, pods)
            | PodUpdate::Update(ConfigSource::Api, pods)
            | PodUpdate::Delete(ConfigSource::Api, pods)
            | PodUpdate::Reconcile(ConfigSource::Api, pods) => {
                pods.iter().filter(|pod| !is_mirror(pod)).for_each(|pod| self.startups.observed(pod, now));
            }
            PodUpdate::Add(_, pods) => pods.iter().for_each(|pod| self.startups.added(pod_ref(pod).uid)),
            PodUpdate::Remove(_, pods) => pods.iter().for_each(|pod| self.startups.gone(&pod_ref(pod).uid)),
            PodUpdate::Update(..) | PodUpdate::Delete(..) | PodUpdate::Reconcile(..) | PodUpdate::Undecodable(..) => {}
        }
    }

    fn mark_seen(&mut self, source: ConfigSource) {
        let (were_ready, were_complete) = (self.sources.all_ready(), self.sources.all_complete());
        let first_of_api = source == ConfigSource::Api && self.sources.waiting_for().contains(&source);
        self.sources.mark_seen(source);
        self.on_source_seen();
        if first_of_api {
            self.reconcile_mirrors(None);
        }
        if !were_complete && self.sources.all_complete() {
            self.pods.set_sources_ready();
        }
        if !were_ready && self.sources.all_ready() {
            self.pods.set_sources_read();
            self.retry_resizes(Trigger::PodsAdded);
        }
        // Static pods may replace others, or come back, before all sources are complete.
        if first_of_api || (!were_complete && source != ConfigSource::Api) {
            self.housekeep_soon();
        }
    }

    fn on_pleg_change(&mut self, uids: Vec<PodUid>) {
        for uid in uids {
            if self.workers.contains(&uid) {
                self.workers.request_sync(&uid);
            } else {
                self.settle_rejected(&uid);
            }
            if self.pods.by_uid(&uid).is_none() {
                self.housekeep_soon();
            }
        }
    }

    /// Restarts are up to the pods' workers. Readiness does not wait for them.
    fn on_probe_results(&mut self, uids: Vec<PodUid>) {
        for uid in uids {
            self.workers.request_sync(&uid);
            if let Some((pod, snapshot)) = self.pods.by_uid(&uid).zip(self.pleg.cached(&uid)) {
                let results = self.probes.of_pod(&uid);
                self.statuses.set_probe_results(&pod, &snapshot, &results, self.clock.wall());
            }
        }
    }

    pub(super) fn housekeep_soon(&mut self) {
        self.housekeep_at(Instant::now() + HOUSEKEEPING_DELAY);
    }

    pub(super) fn housekeep_at(&mut self, at: Instant) {
        let due = &mut self.housekeeping.due;
        *due = Some(due.map_or(at, |due| due.min(at)));
    }
}
