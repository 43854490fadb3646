//! All probes of the node and the order in which they are due. No I/O, no tasks; publishes results. All pods share it:
//! a search among a pod's probes or containers for each of them would delay every pod.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::PodStatus;
use tokio::task;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::ProbeResultStore;
use super::initial::PriorState;
use super::initial::Record;
use super::state::Beginning;
use super::state::ProbeSpec;
use super::state::ProbeState;
use super::state::RunResult;
use super::target::KINDS;
use super::target::Target;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::ProbeKind;
use crate::model::ProbeResult;
use crate::model::pod_ref;
use crate::model::spec;
use crate::model::spec::SpecContainer;

/// A probe of the table, never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct ProbeId(u64);

/// A probe that is due.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) probe: ProbeId,
    pub(super) pod: Pod,
    pub(super) container: ContainerId,
    pub(super) target: Arc<Target>,
    pub(super) timeout: Duration,
}

/// The time of an observation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) now: Instant,
    pub(super) wall: SystemTime,
    /// When the agent started. `None`: no instance that appears is older.
    pub(super) agent: Option<SystemTime>,
}

/// Labels of a probe that has ended, for its metrics.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub(super) pod: Pod,
    pub(super) target: Arc<Target>,
    /// Another pod has a probe of the same name, which shares the series that do not name the pod's UID.
    pub(super) has_namesake: bool,
}

struct ScheduledProbe {
    uid: PodUid,
    target: Arc<Target>,
    state: ProbeState,
    /// The run in progress.
    running: Option<AbortHandle>,
    /// Its place in the queue.
    queued: Option<Instant>,
}

/// The probes of a pod by the name of their container.
type ProbesByContainer = HashMap<String, Vec<ProbeId>>;

struct PodEntry {
    pod: Pod,
    probes: ProbesByContainer,
    /// Containers that ran when the pod was first observed: any of them may be older than the agent.
    first: Arc<HashSet<ContainerId>>,
}

/// All probes.
pub(super) struct Table {
    results: ProbeResultStore,
    pods: HashMap<PodUid, PodEntry>,
    probes: HashMap<ProbeId, ScheduledProbe>,
    queue: BTreeSet<(Instant, ProbeId)>,
    next: u64,
}

impl Table {
    pub(super) fn new(results: ProbeResultStore) -> Self {
        let (pods, probes, queue) = Default::default();
        Self { results, pods, probes, queue, next: 0 }
    }

    /// The pod has been observed, and not been removed.
    pub(super) fn contains(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// Takes the probes of a pod as of this snapshot: begins with new instances, and ends with those that no longer run.
    /// Every running instance has a result for each of its probes from then on. Returns the probes that its spec no
    /// longer has.
    pub(super) fn observe(
        &mut self,
        pod: &Pod,
        snapshot: &PodSnapshot,
        last_status: &dyn Fn() -> Option<PodStatus>,
        moment: Moment,
    ) -> Vec<Ended> {
        let uid = pod_ref(pod).uid;
        let targets: Vec<Target> = probed(pod).collect();
        if targets.is_empty() && !self.pods.contains_key(&uid) {
            return Vec::new();
        }
        let (mut all, first) = match self.pods.remove(&uid) {
            Some(entry) => (entry.probes, entry.first),
            None => (HashMap::new(), Arc::new(snapshot.running().map(|container| container.id.clone()).collect())),
        };
        let probes: Vec<ProbeId> = targets.into_iter().map(|target| self.find_or_add(&uid, &mut all, target)).collect();
        let current: HashSet<ProbeId> = probes.iter().copied().collect();
        self.pods.insert(uid.clone(), PodEntry { pod: pod.clone(), probes: all, first: first.clone() });
        let ended = self.retain(&uid, |id, _| current.contains(&id));
        let existing: HashSet<&ContainerId> = snapshot.containers.iter().map(|container| &container.id).collect();
        self.results.retain_containers(&uid, |id| existing.contains(id));
        // The list is newest first, and a map keeps the last of each name.
        let named = snapshot.containers.iter().rev().map(|container| (container.name.as_str(), container));
        let newest: HashMap<&str, &ContainerStatus> = named.collect();
        // What did not run when the pod was first observed is new, also by a clock that was set back since then.
        let moment_of = |id: &ContainerId| Moment { agent: moment.agent.filter(|_| first.contains(id)), ..moment };
        let mut record = None;
        for id in probes {
            self.observe_probe(id, &newest, &moment_of, &mut |instance| {
                let of_last_status = || last_status().as_ref().map(Record::of).unwrap_or_default();
                let record = record.get_or_insert_with(of_last_status);
                PriorState::of(record, &instance.name, &instance.id, instance.started_at, moment_of(&instance.id).agent)
            });
            self.requeue(id);
        }
        ended
    }

    /// The entry for this probe among `all` of the pod. A changed probe (of a static pod) has none: it begins anew.
    fn find_or_add(&mut self, uid: &PodUid, all: &mut ProbesByContainer, target: Target) -> ProbeId {
        let is_same = |id: &ProbeId| self.probes.get(id).is_some_and(|entry| *entry.target == target);
        let siblings = all.get(&target.container.name);
        if let Some(id) = siblings.and_then(|siblings| siblings.iter().copied().find(is_same)) {
            return id;
        }
        let id = ProbeId(self.next);
        self.next += 1;
        all.entry(target.container.name.clone()).or_default().push(id);
        let state = ProbeState::new(target.kind, ProbeSpec::of(&target.probe));
        let target = Arc::new(target);
        self.probes.insert(id, ScheduledProbe { uid: uid.clone(), target, state, running: None, queued: None });
        id
    }

    fn observe_probe(
        &mut self,
        id: ProbeId,
        newest: &HashMap<&str, &ContainerStatus>,
        moment_of: &dyn Fn(&ContainerId) -> Moment,
        known: &mut dyn FnMut(&ContainerStatus) -> PriorState,
    ) {
        let Some(entry) = self.probes.get_mut(&id) else { return };
        let (kind, name) = (entry.target.kind, entry.target.container.name.as_str());
        let running = newest.get(name).copied().filter(|newest| newest.state == ContainerState::Running);
        let Some(running) = running.filter(|running| entry.state.instance() != Some(&running.id)) else {
            if running.is_none() {
                entry.end();
            }
            return;
        };
        let known = known(running);
        entry.end();
        let initial = known.initial(kind);
        let gated = kind != ProbeKind::Startup
            && entry.target.has_startup_probe
            && known.initial(ProbeKind::Startup) != ProbeResult::Success;
        let first_run = first_run(running, &entry.state, known, moment_of(&running.id));
        entry.state.begin(Beginning { id: running.id.clone(), first_run, gated, initial });
        self.results.set(&entry.uid, &running.id, kind, initial);
    }

    /// The pod is being terminated: liveness and startup of its regular containers end, their results stay.
    pub(super) fn terminating(&mut self, uid: &PodUid) -> Vec<Ended> {
        self.retain(uid, |_, target| target.is_sidecar || target.kind == ProbeKind::Readiness)
    }

    /// None of the pod's containers runs any more.
    pub(super) fn remove(&mut self, uid: &PodUid) -> Vec<Ended> {
        let ended = self.retain(uid, |_, _| false);
        self.pods.remove(uid);
        ended
    }

    /// Removes probes of a pod.
    fn retain(&mut self, uid: &PodUid, keep: impl Fn(ProbeId, &Target) -> bool) -> Vec<Ended> {
        let Some(pod) = self.pods.get_mut(uid) else { return Vec::new() };
        let entries = &self.probes;
        let is_kept = |id: &ProbeId| entries.get(id).is_some_and(|entry| keep(*id, &entry.target));
        let mut removed: Vec<ProbeId> = Vec::new();
        pod.probes.retain(|_, ids| {
            removed.extend(ids.extract_if(.., |id| !is_kept(id)));
            !ids.is_empty()
        });
        let pod = pod.pod.clone();
        let removed = removed.into_iter().filter_map(|id| {
            let mut entry = self.probes.remove(&id)?;
            entry.end();
            if let Some(at) = entry.queued {
                self.queue.remove(&(at, id));
            }
            Some(entry.target)
        });
        let removed: Vec<Arc<Target>> = removed.collect();
        if removed.is_empty() {
            return Vec::new();
        }
        let namesakes = self.namesakes(uid, &pod);
        let ended = |target: Arc<Target>| Ended {
            pod: pod.clone(),
            has_namesake: namesakes.contains(&name_of(&target)),
            target,
        };
        removed.into_iter().map(ended).collect()
    }

    /// The probes of other pods with this pod's name.
    fn namesakes(&self, uid: &PodUid, pod: &Pod) -> HashSet<(ProbeKind, &str)> {
        let (name, namespace) = (&pod.metadata.name, &pod.metadata.namespace);
        let others = self.pods.iter().filter(|(other, entry)| {
            let is_named = &entry.pod.metadata.name == name && &entry.pod.metadata.namespace == namespace;
            *other != uid && is_named
        });
        let probes = others.flat_map(|(_, entry)| entry.probes.values().flatten()).filter_map(|id| self.probes.get(id));
        probes.map(|entry| name_of(&entry.target)).collect()
    }

    /// When the next probe is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Takes a probe that is due by `now`. It is due again once it is completed.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Job> {
        while let Some((at, id)) = self.queue.first().copied().filter(|(at, _)| *at <= now) {
            self.queue.remove(&(at, id));
            let Some(entry) = self.probes.get_mut(&id) else { continue };
            entry.queued = None;
            let pod = self.pods.get(&entry.uid);
            if let Some((pod, container)) = pod.zip(entry.state.instance()) {
                let (pod, container, target) = (pod.pod.clone(), container.clone(), entry.target.clone());
                return Some(Job { probe: id, pod, container, target, timeout: entry.state.spec().timeout });
            }
        }
        None
    }

    /// A run of the probe is in progress. It is aborted with its instance or its probe.
    pub(super) fn running(&mut self, id: ProbeId, run: AbortHandle) {
        match self.probes.get_mut(&id) {
            Some(entry) => entry.running = Some(run),
            None => run.abort(),
        }
    }

    /// A run has ended. Returns false if it was about an instance or a probe that is gone.
    pub(super) fn complete(&mut self, id: ProbeId, run: task::Id, ended: RunResult, now: Instant) -> bool {
        let Some(entry) = self.probes.get_mut(&id) else { return false };
        if entry.running.as_ref().is_none_or(|running| running.id() != run) {
            return false;
        }
        entry.running = None;
        let result = entry.state.complete(ended, now);
        if let Some((result, instance)) = result.zip(entry.state.instance()) {
            self.results.set(&entry.uid, instance, entry.target.kind, result);
            if entry.target.kind == ProbeKind::Startup && result == ProbeResult::Success {
                self.open_gates(id, now);
            }
        }
        self.requeue(id);
        true
    }

    /// The startup probe of a container has succeeded.
    fn open_gates(&mut self, startup: ProbeId, now: Instant) {
        let Some(entry) = self.probes.get(&startup) else { return };
        let siblings = self.pods.get(&entry.uid).and_then(|pod| pod.probes.get(&entry.target.container.name));
        for id in siblings.cloned().unwrap_or_default() {
            if let Some(entry) = self.probes.get_mut(&id) {
                entry.state.open_gate(now);
                self.requeue(id);
            }
        }
    }

    /// Gives the probe its place in the queue.
    fn requeue(&mut self, id: ProbeId) {
        let Some(entry) = self.probes.get_mut(&id) else { return };
        let due = entry.state.due().filter(|_| entry.running.is_none());
        let before = std::mem::replace(&mut entry.queued, due);
        if let Some(at) = before.filter(|_| before != due) {
            self.queue.remove(&(at, id));
        }
        if let Some(at) = due {
            self.queue.insert((at, id));
        }
    }
}

impl ScheduledProbe {
    /// The instance no longer runs: so does its probe.
    fn end(&mut self) {
        self.state.end();
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }
}

/// What no two probes of a pod share.
fn name_of(target: &Target) -> (ProbeKind, &str) {
    (target.kind, target.container.name.as_str())
}

/// The probes of regular containers and sidecars.
fn probed(pod: &Pod) -> impl Iterator<Item = Target> {
    let lasting = |container: &SpecContainer<'_>| container.class != ContainerClass::Init;
    spec::lasting_containers(pod)
        .filter(lasting)
        .flat_map(|container| KINDS.into_iter().filter_map(move |kind| Target::of(&container, kind)))
}

/// When an instance is probed first: after the initial delay; without one, a probe that may kill the container runs after a
/// period, so that a server has as long to begin as a kubelet gives it at most. Instances that ran before the agent are
/// spread over a period, since they would all be due at once.
fn first_run(running: &ContainerStatus, state: &ProbeState, known: PriorState, moment: Moment) -> Instant {
    let probe = state.spec();
    let started = u64::try_from(running.started_at).unwrap_or_default();
    let started = SystemTime::UNIX_EPOCH + Duration::from_nanos(started);
    let age = moment.wall.duration_since(started).unwrap_or_default();
    let delay = if started > moment.wall && known.older && known.ready {
        // The clock was set back and gives no age. A container that has served is past its delay.
        Duration::ZERO
    } else {
        probe.initial_delay.saturating_sub(age)
    };
    let wait = if known.older || moment.agent.is_some_and(|agent| started < agent) {
        probe.period.mul_f64(fastrand::f64())
    } else if probe.initial_delay.is_zero() && state.first_failure_may_kill() {
        probe.period.saturating_sub(age)
    } else {
        Duration::ZERO
    };
    moment.now + delay.max(wait)
}
