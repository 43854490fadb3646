//! The records of all pods, shared by the sync loop and the workers, with the files that they are kept in.
//!
//! One task at a time writes the newest content, again after a while if it fails. No caller waits for a file, but the start
//! of a container with other resources than are on record (see `containers`). First records of containers are collected for
//! a moment, since a busy node starts many. An agent that is killed before they are written finds none of these containers,
//! and uses what the runtime reports: the resources that they were started with. When it allocates something else to one of
//! them, it records what was allocated until then as applied (see `lost`), since not every runtime reports resources, and
//! none reports all. All else is written at once: an outdated record of what was applied would have a container resized, or
//! restarted, once more. What was applied before a resize is on the disk before what the resize allocates, which waits for
//! it also if that write has to be tried again.

mod containers;
mod writing;

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::sync::Notify;

use super::CheckpointError;
use super::Pending;
use super::ResizeGates;
use super::conditions::ResizeConditions;
use super::lost;
use super::records::Records;
use super::records::Urgency;
use crate::model::ContainerClass;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::resources;
use crate::model::resources::PodResources;
use crate::model::spec;

const ALLOCATED: &str = "allocated_pods_state";
const ACTUATED: &str = "actuated_pods_state";

/// A record of an earlier agent cannot be used: the agent does not start, since it would lose the resources that pods hold.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// That of allocated resources.
    #[error("failed to initialize allocation checkpoint: {0}")]
    Allocated(#[source] CheckpointError),
    /// That of applied ones.
    #[error("failed to initialize actuated state checkpoint: {0}")]
    Actuated(#[source] CheckpointError),
}

/// How far the resize of a pod is, as of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There is none.
    None,
    /// Something is still to be applied.
    InProgress,
    /// The last one, of this generation, was completed just now.
    Completed(Option<i64>),
}

/// The records of all pods. Clones share them.
#[derive(Clone, Debug)]
pub struct Allocations(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Some resize was applied.
    applied: Notify,
    /// A task that wrote a file has ended.
    idle: Condvar,
    gates: ResizeGates,
}

#[derive(Debug, Default)]
struct State {
    allocated: Records,
    actuated: Records,
    /// The content of `actuated` that is to be on the disk before `allocated` is, by its number.
    allocated_after: u64,
    conditions: HashMap<PodUid, ResizeConditions>,
    /// Pods that were counted before it was known which of their containers run.
    unseen: HashSet<PodUid>,
    /// Pods whose resizes were applied, or of which it is known now what runs.
    applied: Vec<PodUid>,
}

/// One of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Allocated,
    Actuated,
}

impl State {
    fn records(&mut self, which: Which) -> &mut Records {
        match which {
            Which::Allocated => &mut self.allocated,
            Which::Actuated => &mut self.actuated,
        }
    }
}

impl Default for Allocations {
    /// No records, and no files.
    fn default() -> Self {
        Self::with(State::default(), ResizeGates::default())
    }
}

impl Allocations {
    fn with(state: State, gates: ResizeGates) -> Self {
        Self(Arc::new(Shared { state: Mutex::new(state), applied: Notify::new(), idle: Condvar::new(), gates }))
    }

    /// Reads the records below the agent's root directory, which may be those of a kubelet. Blocks.
    ///
    /// # Errors
    /// One of them cannot be read or is damaged.
    pub fn open(root: &Path, gates: ResizeGates) -> Result<Self, OpenError> {
        let state = State {
            allocated: Records::open(root.join(ALLOCATED)).map_err(OpenError::Allocated)?,
            actuated: Records::open(root.join(ACTUATED)).map_err(OpenError::Actuated)?,
            ..State::default()
        };
        Ok(Self::with(state, gates))
    }

    /// The gate InPlacePodLevelResourcesVerticalScaling is on: pods have resources of their own.
    pub fn has_pod_level(&self) -> bool {
        self.0.gates.pod_level
    }

    /// Resizes cover containers of this class.
    pub fn resizes(&self, class: ContainerClass) -> bool {
        self.0.gates.init_containers || class != ContainerClass::Init
    }

    /// What is allocated to the pod if it gets what its spec states.
    fn stated(&self, pod: &Pod) -> PodResources {
        let mut stated = PodResources::of(pod);
        for container in spec::lasting_containers(pod).filter(|container| !self.resizes(container.class)) {
            stated.containers.remove(container.name());
        }
        stated
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Entries are replaced whole: a panic elsewhere leaves them usable.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod with what is allocated to it in place of what it desires. The same object if that is equal, or nothing is
    /// recorded.
    pub fn allocated_form(&self, pod: Pod) -> Pod {
        let state = self.state();
        let recorded = state.allocated.entries.get(&pod_ref(&pod).uid);
        let changed = recorded.and_then(|recorded| recorded.put_into(&pod, self.0.gates.pod_level));
        changed.map_or(pod, Arc::new)
    }

    /// Something is allocated to the pod.
    pub fn is_allocated(&self, uid: &PodUid) -> bool {
        self.state().allocated.entries.contains_key(uid)
    }

    /// Allocates to the pod what its spec states.
    pub fn allocate(&self, pod: &Pod) {
        let (uid, resources) = (pod_ref(pod).uid, self.stated(pod));
        let mut state = self.state();
        state.allocated.entries.insert(uid, Arc::new(resources));
        self.store(state, Which::Allocated, Urgency::AtOnce);
    }

    /// Frees what was allocated to a pod that its source removed.
    pub fn free(&self, uid: &PodUid) {
        let mut state = self.state();
        state.allocated.entries.remove(uid);
        state.conditions.remove(uid);
        state.unseen.remove(uid);
    }

    /// What was applied to the pod, as far as known.
    pub fn actuated(&self, uid: &PodUid) -> Option<PodResources> {
        let recorded = self.state().actuated.entries.get(uid).cloned();
        recorded.map(Arc::unwrap_or_clone)
    }

    /// The pod's own cgroup was made with, or changed to, these `spec.resources`.
    pub fn pod_actuated(&self, uid: &PodUid, resources: Option<ResourceRequirements>) {
        let mut state = self.state();
        let recorded = state.actuated.entries.get(uid).and_then(|entry| entry.pod.as_ref());
        if recorded != resources.as_ref() {
            Arc::make_mut(state.actuated.entries.entry(uid.clone()).or_default()).pod = resources;
            // The runtime does not report it, and a pod with a record that lacks it was started without.
            self.store(state, Which::Actuated, Urgency::AtOnce);
        }
    }

    /// Drops what is allocated to pods that are not in `keep`.
    pub fn retain_allocated(&self, keep: &HashSet<PodUid>) {
        let mut state = self.state();
        state.allocated.entries.retain(|uid, _| keep.contains(uid));
        state.conditions.retain(|uid, _| keep.contains(uid));
        state.unseen.retain(|uid| keep.contains(uid));
    }

    /// Drops what was applied to pods that are not in `keep`.
    pub fn retain_actuated(&self, keep: &HashSet<PodUid>) {
        self.state().actuated.entries.retain(|uid, _| keep.contains(uid));
    }

    /// Records what a pod has before something else is allocated to it, as far as that is not on record, and has it written
    /// at once with what is collected. What is allocated from then on is written after that. True if not all that was
    /// allocated is on record as applied.
    fn record_before(&self, uid: &PodUid, pod: &Pod) -> bool {
        let mut state = self.state();
        let before = state.allocated.entries.get(uid).and_then(|entry| entry.put_into(pod, self.0.gates.pod_level));
        let recorded = state.actuated.entries.get(uid).map(Arc::as_ref);
        let of_both = before.as_ref().zip(recorded);
        let is_unapplied = of_both.is_some_and(|(before, recorded)| lost::is_unapplied(recorded, before));
        let completed = before.and_then(|before| lost::completed(recorded, &before, pod));
        if let Some(completed) = completed {
            state.actuated.entries.insert(uid.clone(), Arc::new(completed));
            state.actuated.mark_changed(Urgency::AtOnce);
        }
        state.allocated_after = state.actuated.newest();
        if state.actuated.changed.is_some() {
            self.store(state, Which::Actuated, Urgency::AtOnce);
        }
        is_unapplied
    }

    /// The conditions of a pod's resizes, in the order of its status.
    pub fn conditions(&self, uid: &PodUid) -> Vec<PodCondition> {
        self.state().conditions.get(uid).map(ResizeConditions::list).unwrap_or_default()
    }

    /// Since when the pod's resize is pending.
    pub fn pending_since(&self, uid: &PodUid) -> Option<Time> {
        let state = self.state();
        state.conditions.get(uid)?.pending.as_ref()?.last_transition_time.clone()
    }

    /// The pod's resize is pending for this reason.
    pub fn pending(&self, uid: &PodUid) -> Option<Pending> {
        let state = self.state();
        let reason = state.conditions.get(uid)?.pending.as_ref()?.reason.as_deref()?;
        Pending::ALL.into_iter().find(|pending| pending.reason() == reason)
    }

    /// How many resizes are pending for each reason, and how many are in progress.
    pub fn counts(&self) -> (BTreeMap<&'static str, i64>, i64) {
        let state = self.state();
        let mut pending: BTreeMap<&'static str, i64> = Pending::ALL.map(|pending| (pending.reason(), 0)).into();
        for condition in state.conditions.values().filter_map(|conditions| conditions.pending.as_ref()) {
            if let Some(count) = pending.get_mut(condition.reason.as_deref().unwrap_or_default()) {
                *count += 1;
            }
        }
        let in_progress = state.conditions.values().filter(|conditions| conditions.in_progress.is_some()).count();
        (pending, i64::try_from(in_progress).unwrap_or(i64::MAX))
    }

    /// Takes over the conditions that an earlier agent sent, of a pod that has none.
    pub fn read_back(&self, pod: &Pod, now: SystemTime) {
        let conditions = ResizeConditions::read_back(pod, now);
        if !conditions.is_empty() {
            self.state().conditions.entry(pod_ref(pod).uid).or_insert(conditions);
        }
    }

    /// A resize of the pod is allocated and, as far as known, not applied.
    pub fn is_in_progress(&self, uid: &PodUid) -> bool {
        self.state().conditions.get(uid).is_some_and(|conditions| conditions.in_progress.is_some())
    }

    /// The pod's resize is refused. True if an event is to report that.
    pub fn set_pending(&self, pod: &Pod, pending: Pending, message: &str, now: SystemTime) -> bool {
        let mut state = self.state();
        let conditions = state.conditions.entry(pod_ref(pod).uid).or_default();
        conditions.set_pending(pending, message, pod.metadata.generation, now)
    }

    /// The pod's resize is no longer pending. True if it was.
    pub fn clear_pending(&self, uid: &PodUid) -> bool {
        let mut state = self.state();
        state.conditions.get_mut(uid).is_some_and(|conditions| conditions.pending.take().is_some())
    }

    /// Allocates to the pod what it desires now, and sets the conditions accordingly.
    pub fn accept(&self, pod: &Pod, now: SystemTime) {
        let (uid, resources) = (pod_ref(pod).uid, self.stated(pod));
        // Without a record of what the pod has, a change that the runtime does not report would count as applied.
        let is_unapplied = self.record_before(&uid, pod);
        // The pod's worker sees both or neither: with the condition alone it would report the resize as completed.
        let mut state = self.state();
        let conditions = state.conditions.entry(uid.clone()).or_default();
        conditions.accept(pod.metadata.generation, now);
        conditions.has_replaced |= is_unapplied;
        state.allocated.entries.insert(uid, Arc::new(resources));
        self.store(state, Which::Allocated, Urgency::AtOnce);
    }

    /// A resize has replaced one that was not applied completely, whose limits the pod's own cgroup may have. True once.
    pub fn take_replaced(&self, uid: &PodUid) -> bool {
        let mut state = self.state();
        state.conditions.get_mut(uid).is_some_and(|conditions| std::mem::take(&mut conditions.has_replaced))
    }

    /// What the pod holds was counted before it was known which of its containers run: the first pass over it that has
    /// nothing to apply reports it to [`Self::applied`].
    pub fn count_again(&self, uid: &PodUid) {
        self.state().unseen.insert(uid.clone());
    }

    /// What is allocated could not be applied. True if an event is to report that.
    pub fn failed(&self, pod: &Pod, message: &str, now: SystemTime) -> bool {
        let mut state = self.state();
        let conditions = state.conditions.entry(pod_ref(pod).uid).or_default();
        conditions.fail(message, pod.metadata.generation, now)
    }

    /// Compares what is allocated to the pod now with what was applied, and sets its condition. `is_behind`: the pod's own
    /// cgroup could not be changed.
    pub fn track(&self, pod: &Pod, snapshot: &PodSnapshot, is_behind: bool, now: SystemTime) -> Progress {
        let uid = pod_ref(pod).uid;
        let mut state = self.state();
        // The pass may have begun with an older allocation.
        let newest = state.allocated.entries.get(&uid).and_then(|entry| entry.put_into(pod, self.0.gates.pod_level));
        let actuated = state.actuated.entries.get(&uid).map(Arc::as_ref);
        if is_behind || resources::is_resizing(newest.as_ref().unwrap_or(pod), snapshot, actuated) {
            state.conditions.entry(uid).or_default().begin(pod.metadata.generation, now);
            return Progress::InProgress;
        }
        let condition = state.conditions.get_mut(&uid).and_then(|conditions| conditions.in_progress.take());
        if state.unseen.remove(&uid) || condition.is_some() {
            state.applied.push(uid);
            self.0.applied.notify_one();
        }
        condition.map_or(Progress::None, |condition| Progress::Completed(condition.observed_generation))
    }

    /// The pod has terminated: it has no resizes any more.
    pub fn clear_conditions(&self, uid: &PodUid) {
        self.state().conditions.remove(uid);
    }

    /// Waits for pods that may hold less, since their resizes were applied or [`Self::count_again`] asked for it, and takes
    /// them. Cancel-safe.
    pub async fn applied(&self) -> Vec<PodUid> {
        loop {
            let notified = self.0.applied.notified();
            let applied = std::mem::take(&mut self.state().applied);
            if !applied.is_empty() {
                return applied;
            }
            notified.await;
        }
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
