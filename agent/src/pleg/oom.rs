//! OOM kills of the pods in the cache: adds the runtime's view of the container to a record, and the verdict to the
//! container's exit.
//!
//! A process may be killed within milliseconds of its container's start, before any snapshot contains it. Such records wait
//! for the inspection of their pod, bounded in number and time; then they are reported with what is known.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::proof::provable;
use super::task::PlegTask;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::OomConfidence;
use crate::model::OomRecord;
use crate::model::OomTime;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::Source;
use crate::oom::OomHistory;
use crate::oom::verdict;
use crate::oom::verdict::ExitEvidence;
use crate::oom::verdict::KILLED;
use crate::oom::verdict::OOM_KILLED;
use crate::oom::verdict::VictimOwner;

/// Records that wait for a snapshot; beyond that the oldest is reported as it is.
const MAX_WAITING: usize = 1024;
/// How long a record waits.
const ATTRIBUTION_TIMEOUT: Duration = Duration::from_secs(2);

/// Earlier kills, and records of containers that no snapshot contains yet.
#[derive(Default)]
pub(super) struct Ooms {
    history: OomHistory,
    waiting: VecDeque<(Instant, OomRecord)>,
}

impl Ooms {
    /// When the oldest waiting record is reported as it is.
    pub(super) fn due(&self) -> Option<Instant> {
        self.waiting.front().map(|(until, _)| *until)
    }
}

impl PlegTask {
    /// The OOM killer chose a process.
    pub(super) fn on_oom_record(&mut self, record: OomRecord) {
        if record.source == OomConfidence::Log && self.ooms.history.is_known(&record) {
            return;
        }
        let Some(id) = record.container() else { return self.conclude(record, None) };
        if let Some(snapshot) = self.snapshot_of(id) {
            return self.conclude(record, Some(snapshot));
        }
        let uid = record.pod().cloned();
        self.ooms.waiting.push_back((Instant::now() + ATTRIBUTION_TIMEOUT, record));
        if self.ooms.waiting.len() > MAX_WAITING {
            self.conclude_oldest();
        }
        if let Some(uid) = uid {
            let known = self.records.entry(uid.clone()).or_default();
            known.source.get_or_insert(Source::Kernel);
            known.again = Some(Instant::now());
            self.inspect_if_wanted(&uid);
        }
    }

    /// Reports the waiting records whose container is in the new snapshot.
    pub(super) fn attribute_oom_kills(&mut self, uid: &PodUid) {
        if self.ooms.waiting.is_empty() {
            return;
        }
        let Some(snapshot) = self.records.get(uid).and_then(|record| record.snapshot.clone()) else { return };
        let is_owned = |record: &OomRecord| record.container().is_some_and(|id| has(&snapshot, id));
        let (owned, rest): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.ooms.waiting).into_iter().partition(|(_, record)| is_owned(record));
        self.ooms.waiting = rest;
        for (_, record) in owned {
            self.conclude(record, Some(snapshot.clone()));
        }
    }

    /// Reports records that have waited too long.
    pub(super) fn conclude_overdue(&mut self) {
        while self.ooms.due().is_some_and(|due| due <= Instant::now()) {
            self.conclude_oldest();
        }
    }

    fn conclude_oldest(&mut self) {
        if let Some((_, record)) = self.ooms.waiting.pop_front() {
            self.conclude(record, None);
        }
    }

    pub(super) fn snapshot_of(&self, id: &ContainerId) -> Option<Arc<PodSnapshot>> {
        self.records.get(self.owners.of(id)?)?.snapshot.clone()
    }

    fn conclude(&mut self, record: OomRecord, snapshot: Option<Arc<PodSnapshot>>) {
        let owner = snapshot.as_deref().zip(record.container()).and_then(|(of, id)| VictimOwner::of(of, id.as_str()));
        let time = OomTime(self.config.clock.wall_nanos_before(record.moment.age(Instant::now())));
        let verdict = verdict::decide(&record, owner, self.ooms.history.is_repeated(&record), time);
        self.ooms.history.add(&record, &verdict);
        let exits = verdict.container.as_ref().filter(|_| verdict.killed_main()).map(|container| container.id.clone());
        self.config.ooms.report(verdict);
        if let Some(id) = exits {
            self.apply_main_kill(&id);
        }
    }

    /// The exit may have been published before the kill was known.
    fn apply_main_kill(&mut self, id: &ContainerId) {
        let Some(known) = self.snapshot_of(id) else { return };
        let uid = &known.pod.uid;
        let Some(container) = known.by_id(id).filter(|container| container.state == ContainerState::Exited) else {
            return;
        };
        let is_oom = self.is_oom_killed(container, container.exit_code);
        let Some(record) = self.records.get_mut(uid) else { return };
        if let Some(exit) = record.proven_exits.get_mut(id) {
            exit.oom_killed = is_oom;
        }
        let mut snapshot = PodSnapshot::clone(&known);
        self.overlay_pending_exits(uid, &mut snapshot);
        self.correct_reasons(&known, &mut snapshot);
        self.publish(uid, snapshot, Source::Kernel);
    }

    /// Whether the OOM killer ended the main process, as far as known by now.
    pub(super) fn is_oom_killed(&self, container: &ContainerStatus, exit_code: Option<i32>) -> bool {
        let evidence = self.exit_evidence(container);
        exit_code.is_some_and(|code| verdict::was_oom_killed(code, evidence) == Some(true))
    }

    /// The record of an exit may come after the runtime's report, on a busy machine.
    pub(super) fn recheck_reason(&mut self, id: &ContainerId) {
        let Some(known) = self.snapshot_of(id) else { return };
        let is_confirmed = |of: &ContainerStatus| of.state == ContainerState::Exited && of.proven.is_none();
        if !known.by_id(id).is_some_and(is_confirmed) {
            return;
        }
        let mut snapshot = PodSnapshot::clone(&known);
        self.correct_reasons(&known, &mut snapshot);
        if snapshot.containers != known.containers {
            self.publish(&known.pod.uid, snapshot, Source::Kernel);
        }
    }

    fn exit_evidence(&self, container: &ContainerStatus) -> ExitEvidence {
        // The runtime does not report the process of a container that was first seen as exited.
        let facts = match container.pid {
            Some(_) => self.exits.get(container),
            None => self.exits.only_of(&container.id),
        };
        let marked = facts.filter(|facts| facts.oom_victim).map(|_| OomConfidence::Kernel);
        ExitEvidence {
            signalled: facts.map(|facts| facts.signalled),
            main_killed: self.ooms.history.main_killed(&container.id).or(marked),
            // The probe of exits flags victims, so the record of this exit contains all there is.
            is_complete: facts.is_some(),
        }
    }

    /// Removes `OOMKilled` from proven exits that are none. containerd gives this reason to a running container once any of
    /// its processes was killed, so it says nothing of the exit.
    pub(super) fn correct_proven_reasons(&self, snapshot: &mut PodSnapshot) {
        for container in snapshot.containers.iter_mut().filter(|container| container.proven.is_some()) {
            let was_killed = |code| verdict::was_oom_killed(code, self.exit_evidence(container));
            if container.reason == OOM_KILLED && container.exit_code.and_then(was_killed) == Some(false) {
                container.reason.clear();
            }
        }
    }

    /// Replaces the runtime's reasons of confirmed exits where the kernel's evidence contradicts them, and codes that the
    /// runtime does not know. `known` is the snapshot before, whose containers were corrected already.
    pub(super) fn correct_reasons(&self, known: &PodSnapshot, snapshot: &mut PodSnapshot) {
        let (pod, sandboxes) = (&snapshot.pod, &snapshot.sandboxes);
        let known = known.containers_by_id();
        for container in &mut snapshot.containers {
            if container.state != ContainerState::Exited || container.proven.is_some() {
                continue;
            }
            let before = known.get(&container.id).copied();
            let was_there = |before: &ContainerStatus| {
                before.exit_observed || before.proven.is_some() || before.state == ContainerState::Running
            };
            container.exit_observed = before.is_some_and(was_there);
            if container.pid.is_none() {
                container.pid = before.and_then(|before| before.pid);
            }
            let leads_namespace = provable(sandboxes, container);
            self.add_exit_code(container, before, leads_namespace);
            let Some(code) = container.exit_code else { continue };
            let is_killed = code == KILLED || self.ooms.history.main_killed(&container.id).is_some();
            if !is_killed && container.reason != OOM_KILLED {
                continue;
            }
            let Some(reason) = verdict::corrected_reason(&container.reason, code, self.exit_evidence(container)) else {
                continue;
            };
            let is_counted = before.is_some_and(|before| before.proven.is_none() && before.reason == reason);
            let reported = std::mem::replace(&mut container.reason, reason.to_owned());
            if !is_counted {
                self.config.ooms.corrected(pod, &container.name, &reported, reason);
            }
        }
    }
}

/// The snapshot contains the container or sandbox.
fn has(snapshot: &PodSnapshot, id: &ContainerId) -> bool {
    snapshot.by_id(id).is_some() || snapshot.sandboxes.iter().any(|sandbox| sandbox.id.as_str() == id.as_str())
}
