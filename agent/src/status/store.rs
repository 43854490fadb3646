//! Status cache: the last computed status of each pod. Single-threaded; no I/O, no clock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;

use super::IllegalTransition;
use super::final_status;
use super::time;
use super::transition;
use crate::model::PodUid;
use crate::model::restart::RestartGates;
use crate::model::spec;

/// The cached status of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The status. Shared: it is read far more often than it changes.
    pub status: Arc<PodStatus>,
    /// Grows with every change, from 1.
    pub version: u64,
    /// The pod is terminated and its resources are released: its API object may be deleted. Never reset.
    pub is_finished: bool,
    /// Containers of the pod may still run: a terminal phase is held back from the API server.
    pub may_run: bool,
    /// When this version was made.
    pub at: SystemTime,
}

/// The statuses of all pods of this node.
#[derive(Debug, Default)]
pub struct StatusStore {
    gates: RestartGates,
    entries: HashMap<PodUid, Stored>,
}

impl StatusStore {
    /// An empty store.
    pub fn new(gates: RestartGates) -> Self {
        Self { gates, entries: HashMap::new() }
    }

    /// The cached status of a pod.
    pub fn get(&self, uid: &str) -> Option<&Stored> {
        self.entries.get(uid)
    }

    /// The status that a new one of `pod` is compared with: the cached one, else the mirror pod's, else its own.
    pub fn basis<'a>(&'a self, uid: &str, pod: &'a Pod, mirror: Option<&'a Pod>) -> Option<&'a PodStatus> {
        let stored = self.entries.get(uid).map(|entry| &*entry.status);
        stored.or_else(|| mirror.unwrap_or(pod).status.as_ref())
    }

    /// Caches a status. Returns true if there is a new version: the status differs from the cached one, or the pod is
    /// being deleted.
    ///
    /// # Errors
    /// The init containers of the last status are not those of the spec; the cache is unchanged then.
    pub fn set(
        &mut self,
        uid: &PodUid,
        pod: &Pod,
        mirror: Option<&Pod>,
        status: PodStatus,
        now: SystemTime,
    ) -> Result<bool, IllegalTransition> {
        self.update(Subject { uid, pod, mirror }, status, now, Update { force: false, finish: false })
    }

    /// Sets the final status and marks the pod finished (static pods stay unfinished: their source decides). Returns
    /// true if there is a new version, which is so for every legal status.
    ///
    /// # Errors
    /// See [`StatusStore::set`].
    pub fn terminate_pod(
        &mut self,
        uid: &PodUid,
        pod: &Pod,
        mirror: Option<&Pod>,
        now: SystemTime,
    ) -> Result<bool, IllegalTransition> {
        let stored = self.entries.get(uid).map(|entry| &*entry.status);
        let last = stored.or(pod.status.as_ref()).cloned().unwrap_or_default();
        let status = final_status::final_status(pod, last);
        let how = Update { force: true, finish: !spec::is_static(pod) };
        self.update(Subject { uid, pod, mirror }, status, now, how)
    }

    /// Records whether containers of the pod may still run (true until set). Returns true if there is a new version,
    /// which is so when the last container stopped.
    pub fn set_may_run(&mut self, uid: &str, may_run: bool, now: SystemTime) -> bool {
        let Some(entry) = self.entries.get_mut(uid) else { return false };
        let stopped = entry.may_run && !may_run;
        entry.may_run = may_run;
        if stopped {
            entry.version += 1;
            entry.at = now;
        }
        stopped
    }

    /// Removes every pod for which `known` returns false.
    pub fn retain(&mut self, mut known: impl FnMut(&PodUid) -> bool) {
        self.entries.retain(|uid, _| known(uid));
    }

    /// All cached pods, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&PodUid, &Stored)> {
        self.entries.iter()
    }

    fn update(
        &mut self,
        subject: Subject<'_>,
        mut status: PodStatus,
        now: SystemTime,
        how: Update,
    ) -> Result<bool, IllegalTransition> {
        let Subject { uid, pod, mirror } = subject;
        let nothing = PodStatus::default();
        let old = self.basis(uid.as_str(), pod, mirror).unwrap_or(&nothing);
        transition::check(pod, old, self.gates)?;
        let seconds = time::of_wall(now);
        transition::set_condition_times(old, &mut status, &seconds);
        status.start_time = old.start_time.clone().or_else(|| status.start_time.take()).or(Some(seconds));
        status.observed_generation = status.observed_generation.max(old.observed_generation);
        let entry = self.entries.get(uid);
        let forced = how.force || spec::deletion_requested(pod);
        if !forced && entry.is_some_and(|entry| transition::is_same(&entry.status, &status)) {
            return Ok(false);
        }
        let version = entry.map_or(1, |entry| entry.version + 1);
        let is_finished = how.finish || entry.is_some_and(|entry| entry.is_finished);
        let may_run = entry.is_none_or(|entry| entry.may_run);
        let status = Arc::new(status);
        self.entries.insert(uid.clone(), Stored { status, version, is_finished, may_run, at: now });
        Ok(true)
    }
}

/// The pod that a status is of.
#[derive(Clone, Copy)]
struct Subject<'a> {
    uid: &'a PodUid,
    pod: &'a Pod,
    /// Of a static pod, if the API server has one.
    mirror: Option<&'a Pod>,
}

#[derive(Clone, Copy)]
struct Update {
    /// Make a new version even if nothing differs.
    force: bool,
    finish: bool,
}
