//! Exits seen by the kernel: pidfds of container init processes, and exit records of probes.
//!
//! Where the init leads a PID namespace of its own, its end proves that of the container. With a host or shared PID
//! namespace other processes may outlive it: there its end is a hint, and the pod is inspected until the runtime reports
//! the exit, a bounded number of times. So is an init that is not found, as one that ended while the agent was starting.
//! Containers of runtimes with a kernel of their own (Kata Containers, gVisor) have no init on the node: once that was seen
//! of a runtime handler, only events and relists report their exits.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::HashSet;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::exit_code::lacks_code;
use super::proven_exits;
use super::record::PodRecord;
use super::record::recheck_delay;
use super::task::PlegTask;
use crate::events::ExitFacts;
use crate::events::RelistReason;
use crate::events::process::Gone;
use crate::events::process::GoneFuture;
use crate::events::process::Pinned;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::ProvenExit;
use crate::model::SandboxStatus;
use crate::model::Source;

/// Exit records kept for containers that no snapshot has shown yet. An init that ends within a millisecond of its start
/// is recorded before the runtime has answered the start call.
const MAX_EXIT_RECORDS: usize = 4096;
/// Those of one container: its processes may create PID namespaces without end (sandboxed builds), whose inits end too.
const MAX_OF_CONTAINER: usize = 64;
/// Records of one process are less apart, also if its memory takes long to be freed; the kernel uses no pid again so soon.
const ONE_EXIT: Duration = Duration::from_secs(10);

pub(super) type PinFuture = Pin<Box<dyn Future<Output = PinGone> + Send>>;

/// Inspections after a hint, beginning with [`recheck_delay`]: about half a minute. Later the relist covers it.
const HINT_RECHECKS: u32 = 6;
/// After so many of them a container that still runs, and whose init was not found, has none on the node.
const PROCESSLESS_RECHECKS: u32 = 2;

/// Why a container may have exited.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExitHint {
    /// Its init process ended.
    Ended,
    /// Its init process was not found.
    NotFound,
}

/// A watched init process is gone.
pub(super) struct PinGone {
    pub uid: PodUid,
    pub id: ContainerId,
    pub gone: Gone,
    /// All processes of the container are gone with it.
    pub is_proof: bool,
}

/// The newest exit records, bounded.
#[derive(Default)]
pub(super) struct Exits {
    /// By container, each record of another pid and with its number, oldest first.
    facts: HashMap<ContainerId, VecDeque<(u64, ExitFacts)>>,
    /// The records of all containers, by number.
    order: BTreeMap<u64, ContainerId>,
    next_number: u64,
}

impl Exits {
    /// The exit of a process with several threads may be recorded more than once, where threads end at the same time: one
    /// of the records has the mark of the OOM killer, and only the last one has the exit code for certain.
    ///
    /// `init`: the container's init process if it is known. Its record is displaced by none of the container's others.
    fn insert(&mut self, mut facts: ExitFacts, init: Option<u32>) {
        let of_container = self.facts.entry(facts.container.clone()).or_default();
        if let Some((_, known)) = of_container.iter_mut().find(|(_, known)| known.pid == facts.pid) {
            if apart(known, &facts) < ONE_EXIT {
                facts.oom_victim |= known.oom_victim;
                facts.at.0 = facts.at.0.min(known.at.0);
            }
            *known = facts;
            return;
        }
        self.order.insert(self.next_number, facts.container.clone());
        of_container.push_back((self.next_number, facts));
        self.next_number += 1;
        if of_container.len() > MAX_OF_CONTAINER {
            let oldest = of_container.iter().position(|(_, known)| Some(known.pid) != init);
            if let Some((number, _)) = oldest.and_then(|at| of_container.remove(at)) {
                self.order.remove(&number);
            }
        }
        if self.order.len() > MAX_EXIT_RECORDS {
            self.remove_oldest();
        }
    }

    fn remove_oldest(&mut self) {
        let Some((oldest, id)) = self.order.pop_first() else { return };
        if let Some(of_container) = self.facts.get_mut(&id) {
            of_container.retain(|(number, _)| *number != oldest);
            if of_container.is_empty() {
                self.facts.remove(&id);
            }
        }
    }

    pub(super) fn get(&self, container: &ContainerStatus) -> Option<&ExitFacts> {
        let pid = container.pid?;
        let of_container = self.facts.get(&container.id)?;
        of_container.iter().map(|(_, facts)| facts).find(|facts| facts.pid == pid)
    }

    /// The record of a container that has only one.
    pub(super) fn only_of(&self, id: &ContainerId) -> Option<&ExitFacts> {
        let of_container = self.facts.get(id).filter(|of_container| of_container.len() == 1)?;
        of_container.front().map(|(_, facts)| facts)
    }
}

impl PlegTask {
    /// Watches the init process of every running container that is not watched yet. One that is already gone has ended.
    /// Removes pids that are not those of inits.
    pub(super) fn pin_running(&mut self, uid: &PodUid, snapshot: &mut PodSnapshot) {
        let mut misnamed = HashSet::new();
        for container in snapshot.running() {
            let Some(pid) = container.pid else { continue };
            let Some(record) = self.records.get_mut(uid) else { return };
            if record.pins.insert(container.id.clone()) && !self.pin(uid, snapshot, container, pid) {
                misnamed.insert(container.id.clone());
            }
        }
        for container in snapshot.containers.iter_mut().filter(|container| misnamed.contains(&container.id)) {
            container.pid = None;
        }
        if let Some(record) = self.records.get_mut(uid) {
            let present = snapshot.containers_by_id();
            // Tried again when a status has another pid.
            record.pins.retain(|id| present.contains_key(id) && !misnamed.contains(id));
        }
    }

    /// Watches the init process of a container. False if it is known to have another pid.
    fn pin(&mut self, uid: &PodUid, snapshot: &PodSnapshot, container: &ContainerStatus, pid: u32) -> bool {
        let is_proof = provable(&snapshot.sandboxes, container);
        let handler = runtime_handler(snapshot, container);
        let id = container.id.clone();
        let pinned = self.config.watch.pin(pid, &id);
        if matches!(pinned, Pinned::Watching(_) | Pinned::Hint(_)) {
            self.processless.remove(handler);
        }
        match pinned {
            Pinned::Watching(gone) => self.await_gone(uid, id, gone, is_proof),
            Pinned::Hint(gone) => self.await_gone(uid, id, gone, false),
            Pinned::Gone if is_proof => self.record_exit(uid, container, None),
            Pinned::Gone => self.record_exit_hint(uid, id, ExitHint::Ended),
            Pinned::Monitor(reason) => {
                tracing::debug!(pod = %snapshot.pod, container = container.name, reason, "init process is not known");
                return false;
            }
            // The kernel itself has recorded the end of this container's init.
            Pinned::NotFound(_) | Pinned::Ineligible(_) | Pinned::Failed(_)
                if is_proof && self.exits.get(container).is_some() =>
            {
                self.record_exit(uid, container, None);
            }
            Pinned::NotFound(reason) => {
                tracing::debug!(pod = %snapshot.pod, container = container.name, reason, "init process not found");
                if !self.processless.contains(handler) {
                    self.record_exit_hint(uid, id, ExitHint::NotFound);
                }
            }
            Pinned::Ineligible(reason) => {
                tracing::debug!(pod = %snapshot.pod, container = container.name, reason, "init process is not watched");
            }
            Pinned::Failed(reason) => {
                tracing::debug!(pod = %snapshot.pod, container = container.name, reason, "init process is not watched yet");
                // Tried again with the next snapshot; that of a relist is the last resort.
                if let Some(record) = self.records.get_mut(uid) {
                    record.pins.remove(&id);
                }
            }
        }
        true
    }

    fn await_gone(&mut self, uid: &PodUid, id: ContainerId, gone: GoneFuture, is_proof: bool) {
        let uid = uid.clone();
        self.pins.push(Box::pin(async move { PinGone { uid, id, gone: gone.await, is_proof } }));
    }

    fn record_exit(&mut self, uid: &PodUid, container: &ContainerStatus, exit_code: Option<i32>) {
        let exit = self.proven_exit(container, exit_code);
        if let Some(record) = self.records.get_mut(uid) {
            record.proven_exits.insert(container.id.clone(), exit);
        }
    }

    /// The container may have exited. Normally the runtime's event follows within milliseconds; if it is lost, the pod
    /// is inspected.
    fn record_exit_hint(&mut self, uid: &PodUid, id: ContainerId, hint: ExitHint) {
        let delay = recheck_delay(0, self.events_up());
        let Some(record) = self.records.get_mut(uid) else { return };
        record.exit_hints.insert(id, hint);
        // Those for other exits of the pod are no evidence of this one.
        record.rechecks = 0;
        self.recheck_later(uid, delay);
    }

    /// Drops hints that a new snapshot has answered, or that the runtime has not confirmed for too long. True if some
    /// are left, and another inspection is due.
    pub(super) fn settle_exit_hints(&mut self, uid: &PodUid) -> bool {
        let Some(record) = self.records.get_mut(uid).filter(|record| !record.exit_hints.is_empty()) else {
            return false;
        };
        let Some(snapshot) = record.snapshot.clone() else { return false };
        let containers = snapshot.containers_by_id();
        let running = |id: &ContainerId| containers.get(id).filter(|c| c.state == ContainerState::Running);
        record.exit_hints.retain(|id, _| running(id).is_some());
        if record.rechecks >= PROCESSLESS_RECHECKS {
            let not_found = record.exit_hints.iter().filter(|(_, hint)| **hint == ExitHint::NotFound);
            for container in not_found.filter_map(|(id, _)| running(id)) {
                let handler = runtime_handler(&snapshot, container);
                if self.processless.insert(handler.to_owned()) {
                    tracing::info!(
                        runtime_handler = handler,
                        "containers have no process on the node; their exits are not watched"
                    );
                }
            }
        }
        if record.rechecks >= HINT_RECHECKS && !record.exit_hints.is_empty() {
            tracing::info!(pod = %snapshot.pod, "the runtime still reports a container as running whose init process ended or was not found");
            record.exit_hints.clear();
        }
        !record.exit_hints.is_empty()
    }

    fn proven_exit(&self, container: &ContainerStatus, exit_code: Option<i32>) -> ProvenExit {
        let now = Instant::now();
        let facts = self.exits.get(container);
        let exit_code = facts.map(|f| f.exit_code).or(exit_code);
        ProvenExit {
            seen_at: now,
            kernel_age: facts.map(|f| f.at.age(now)),
            exit_code,
            oom_killed: self.is_oom_killed(container, exit_code),
        }
    }

    /// A pidfd became readable: the next instance may start, if that proves the container's end.
    pub(super) fn on_gone(&mut self, pinned: PinGone) {
        let Some(known) = self.records.get(&pinned.uid).and_then(|r| r.snapshot.clone()) else { return };
        let Some(container) = known.by_id(&pinned.id) else { return };
        if let Some(code) = pinned.gone.exit_code.filter(|_| lacks_code(container)) {
            return self.publish_code(&pinned.uid, &known, &pinned.id, code);
        }
        if container.state != ContainerState::Running {
            return;
        }
        if !pinned.is_proof {
            return self.record_exit_hint(&pinned.uid, pinned.id, ExitHint::Ended);
        }
        self.record_exit(&pinned.uid, container, pinned.gone.exit_code);
        self.republish(&pinned.uid, &known);
        let attempt = self.records.get(&pinned.uid).map_or(0, |r| r.rechecks);
        self.recheck_later(&pinned.uid, recheck_delay(attempt, self.events_up()));
    }

    /// A probe's record. Adds code and time to an exit that a pidfd proves, or corrects what an earlier record of it had;
    /// proves nothing alone, because the process may still hold its files.
    pub(super) fn on_exit_facts(&mut self, facts: ExitFacts) {
        let (id, pid, code) = (facts.container.clone(), facts.pid, facts.exit_code);
        let is_proven = |record: &PodRecord| {
            record.proven_exits.contains_key(&id)
                && record.snapshot.as_ref().and_then(|s| s.by_id(&id)).is_some_and(|c| c.pid == Some(pid))
        };
        let owner = self.owners.of(&id).filter(|uid| self.records.get(*uid).is_some_and(is_proven)).cloned();
        let init = self.snapshot_of(&id).and_then(|known| known.by_id(&id)?.pid);
        self.exits.insert(facts, init);
        let Some(uid) = owner else { return self.recheck_reason(&id) };
        let Some(known) = self.records.get(&uid).and_then(|record| record.snapshot.clone()) else { return };
        let is_oom = known.by_id(&id).is_some_and(|container| self.is_oom_killed(container, Some(code)));
        let Some(exit) = self.records.get_mut(&uid).and_then(|record| record.proven_exits.get_mut(&id)) else { return };
        if (exit.exit_code, exit.oom_killed) != (Some(code), is_oom) {
            exit.exit_code = Some(code);
            exit.oom_killed = is_oom;
            self.republish(&uid, &known);
        }
    }

    /// Publishes the cached snapshot with the exits known by now.
    fn republish(&mut self, uid: &PodUid, known: &Arc<PodSnapshot>) {
        let mut snapshot = PodSnapshot::clone(known);
        self.overlay_pending_exits(uid, &mut snapshot);
        self.publish(uid, snapshot, Source::Kernel);
    }

    /// Applies proven exits to a snapshot, drops confirmed ones, and accepts the runtime's state where the contradiction has
    /// lasted. True if exits are still unconfirmed.
    pub(super) fn overlay_pending_exits(&mut self, uid: &PodUid, snapshot: &mut PodSnapshot) -> bool {
        let Some(record) = self.records.get_mut(uid) else { return false };
        let (clock, known) = (self.config.clock, record.snapshot.clone());
        let known = known.as_deref().filter(|_| !record.proven_exits.is_empty());
        let known = known.map(PodSnapshot::containers_by_id).unwrap_or_default();
        let overlay = proven_exits::overlay_exits(snapshot, &record.proven_exits, &record.denied_since, |id, exit| {
            let shown = known.get(id).and_then(|container| finish_shown(container, exit));
            let now = || clock.wall_nanos_before(exit.seen_at.elapsed() + exit.kernel_age.unwrap_or_default());
            shown.unwrap_or_else(now)
        });
        for id in overlay.settled.iter().chain(&overlay.contradicted) {
            record.proven_exits.remove(id);
        }
        for id in overlay.denied {
            record.denied_since.entry(id).or_insert_with(Instant::now);
        }
        record.denied_since.retain(|id, _| record.proven_exits.contains_key(id));
        for id in &overlay.contradicted {
            tracing::warn!(
                pod = %snapshot.pod, id = %id,
                "the runtime still reports a container as running whose exit the kernel proved; using the runtime's state"
            );
            self.config.observer.contradiction();
            self.relists.request(RelistReason::Contradiction, Instant::now());
        }
        self.correct_proven_reasons(snapshot);
        overlay.pending
    }
}

/// Time between two exits.
fn apart(a: &ExitFacts, b: &ExitFacts) -> Duration {
    a.at.age(b.at.0).max(b.at.age(a.at.0))
}

/// The finish time of an exit that the snapshot before shows. It is kept: a second computation yields another time, since the
/// clocks are read at two moments and the wall clock may have been set, and each change wakes the pod's worker.
fn finish_shown(known: &ContainerStatus, exit: &ProvenExit) -> Option<i64> {
    known.proven.filter(|shown| shown.seen_at == exit.seen_at).map(|_| known.finished_at)
}

/// The end of an init proves nothing where other processes may outlive it.
pub(super) fn provable(sandboxes: &[SandboxStatus], container: &ContainerStatus) -> bool {
    sandboxes.iter().any(|s| s.id == container.sandbox_id && !s.shares_pid_namespace)
}

fn runtime_handler<'a>(snapshot: &'a PodSnapshot, container: &ContainerStatus) -> &'a str {
    let sandbox = snapshot.sandboxes.iter().find(|sandbox| sandbox.id == container.sandbox_id);
    sandbox.map_or("", |sandbox| &sandbox.runtime_handler)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KernelMoment;
    use crate::pleg::testing::container;

    #[test]
    fn a_further_record_of_an_exit_does_not_erase_the_mark_of_the_oom_killer() {
        let (mut exits, first) = (Exits::default(), Instant::now());
        let facts = |exit_code: i32, oom_victim: bool, at: Instant| {
            let (container, at) = ("a".into(), KernelMoment(at));
            ExitFacts { container, pid: 4711, exit_code, signalled: exit_code > 128, oom_victim, at }
        };
        let of = |exits: &Exits| {
            let facts = exits.get(&container("a", "main", ContainerState::Running)).expect("known").clone();
            (facts.exit_code, facts.signalled, facts.oom_victim, facts.at.0)
        };
        exits.insert(facts(0, true, first), None);
        exits.insert(facts(137, false, first + Duration::from_secs(2)), None);
        assert_eq!(of(&exits), (137, true, true, first));
        exits.insert(facts(137, false, first - Duration::from_millis(1)), None);
        assert_eq!(of(&exits), (137, true, true, first - Duration::from_millis(1)), "in any order");
        assert_eq!((exits.facts.len(), exits.order.len()), (1, 1));
        let later = first + ONE_EXIT;
        exits.insert(facts(1, false, later), None);
        assert_eq!(of(&exits), (1, false, false, later), "another process with that pid");
    }

    #[test]
    fn exits_in_nested_namespaces_displace_no_record_of_an_init() {
        let (mut exits, at) = (Exits::default(), KernelMoment(Instant::now()));
        let exit = |id: &str, pid| ExitFacts {
            container: id.into(),
            pid,
            exit_code: 0,
            signalled: false,
            oom_victim: false,
            at,
        };
        let known = |exits: &Exits, id: &str| exits.get(&container(id, "main", ContainerState::Running)).is_some();
        exits.insert(exit("other", 4711), None);
        exits.insert(exit("nesting", 4711), Some(4711));
        (10_000..20_000).for_each(|pid| exits.insert(exit("nesting", pid), Some(4711)));
        assert!(known(&exits, "other"), "of another container");
        assert!(known(&exits, "nesting"), "of the same container");
        assert_eq!(exits.order.len(), 1 + MAX_OF_CONTAINER);
        for number in 0..MAX_EXIT_RECORDS {
            exits.insert(exit(&format!("c{number}"), 4711), None);
        }
        assert!(!known(&exits, "other") && exits.only_of(&"c0".into()).is_some());
        let records: usize = exits.facts.values().map(VecDeque::len).sum();
        assert_eq!([exits.order.len(), exits.facts.len(), records], [MAX_EXIT_RECORDS; 3]);
    }
}
