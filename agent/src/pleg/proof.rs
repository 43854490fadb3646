//! Proving deaths: pins of container init processes, exit records of the kernel, and what both say together.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::time::Instant;

use super::death;
use super::record::recheck_delay;
use super::task::PlegTask;
use crate::events::ExitFacts;
use crate::events::RelistReason;
use crate::events::process::Gone;
use crate::events::process::Pinned;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::ProvenDeath;
use crate::model::Source;

/// Exit records kept for containers that no snapshot has shown yet. An init that dies within a millisecond of its
/// start is recorded before the runtime has even answered the start call.
const MAX_EXIT_RECORDS: usize = 4096;

pub(super) type PinFuture = Pin<Box<dyn Future<Output = PinGone> + Send>>;

/// A pinned init process is gone.
pub(super) struct PinGone {
    pub uid: PodUid,
    pub id: ContainerId,
    pub gone: Gone,
}

/// The newest exit records and OOM victims, bounded.
#[derive(Default)]
pub(super) struct Exits {
    /// By container and pid: a container may hold further PID namespaces, whose inits die too.
    facts: HashMap<(ContainerId, u32), ExitFacts>,
    order: VecDeque<(ContainerId, u32)>,
    oom_victims: VecDeque<u32>,
}

impl Exits {
    fn insert(&mut self, facts: ExitFacts) {
        let key = (facts.container.clone(), facts.pid);
        if self.facts.insert(key.clone(), facts).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > MAX_EXIT_RECORDS {
            if let Some(oldest) = self.order.pop_front() {
                self.facts.remove(&oldest);
            }
        }
    }

    fn get(&self, container: &ContainerStatus) -> Option<&ExitFacts> {
        self.facts.get(&(container.id.clone(), container.pid?))
    }

    pub(super) fn record_oom_victim(&mut self, pid: u32) {
        self.oom_victims.push_back(pid);
        if self.oom_victims.len() > 256 {
            self.oom_victims.pop_front();
        }
    }
}

impl PlegTask {
    /// Pins the init process of every running container that is not pinned yet. One that is already gone is a death.
    pub(super) fn pin_running(&mut self, uid: &PodUid, snapshot: &PodSnapshot) {
        for container in snapshot.running() {
            let Some(pid) = container.pid.filter(|_| provable(snapshot, container)) else { continue };
            let Some(record) = self.records.get_mut(uid) else { return };
            if !record.pins.insert(container.id.clone()) {
                continue;
            }
            match self.config.watch.pin(pid, &container.id) {
                Pinned::Watching(gone) => {
                    let (uid, id) = (uid.clone(), container.id.clone());
                    self.pins.push(Box::pin(async move { PinGone { uid, id, gone: gone.await } }));
                }
                Pinned::Gone => {
                    let death = self.death(container, None);
                    self.remember_death(uid, container.id.clone(), death);
                }
                Pinned::Ineligible(reason) if self.exits.get(container).is_none() => {
                    tracing::debug!(pod = %snapshot.pod, container = container.name, reason, "death will not be proven");
                }
                // The kernel itself has recorded the end of this container's init.
                Pinned::Ineligible(_) => {
                    let death = self.death(container, None);
                    self.remember_death(uid, container.id.clone(), death);
                }
            }
        }
        if let Some(record) = self.records.get_mut(uid) {
            record.pins.retain(|id| snapshot.by_id(id).is_some());
        }
    }

    fn remember_death(&mut self, uid: &PodUid, id: ContainerId, death: ProvenDeath) {
        if let Some(record) = self.records.get_mut(uid) {
            record.deaths.insert(id, death);
        }
    }

    fn death(&self, container: &ContainerStatus, told: Option<i32>) -> ProvenDeath {
        let now = Instant::now();
        let facts = self.exits.get(container);
        ProvenDeath {
            seen_at: now,
            kernel_age: facts.map(|f| f.at.age(now)),
            exit_code: facts.map(|f| f.exit_code).or(told),
            oom_killed: facts.is_some_and(|f| self.exits.oom_victims.contains(&f.pid)),
        }
    }

    /// The pidfd says "gone": the next one may start.
    pub(super) fn on_gone(&mut self, pinned: PinGone) {
        let Some(known) = self.records.get(&pinned.uid).and_then(|r| r.snapshot.clone()) else { return };
        let running = known.by_id(&pinned.id).filter(|c| c.state == ContainerState::Running);
        let Some(container) = running else { return };
        let death = self.death(container, pinned.gone.exit_code);
        self.remember_death(&pinned.uid, pinned.id, death);
        self.republish(&pinned.uid, &known);
        let attempt = self.records.get(&pinned.uid).map_or(0, |r| r.rechecks);
        self.recheck_later(&pinned.uid, recheck_delay(attempt, self.events_up()));
    }

    /// A probe's record. Explains a death that is or will be proven by the pidfd; proves nothing alone, because the
    /// process may still hold its files.
    pub(super) fn on_exit_facts(&mut self, facts: ExitFacts) {
        let (id, pid, code) = (facts.container.clone(), facts.pid, facts.exit_code);
        let owner = self.records.iter().find(|(_, record)| {
            record.deaths.get(&id).is_some_and(|death| death.exit_code.is_none())
                && record.snapshot.as_ref().and_then(|s| s.by_id(&id)).is_some_and(|c| c.pid == Some(pid))
        });
        let owner = owner.map(|(uid, _)| uid.clone());
        self.exits.insert(facts);
        let Some(uid) = owner else { return };
        let Some(record) = self.records.get_mut(&uid) else { return };
        if let Some(death) = record.deaths.get_mut(&id) {
            death.exit_code = Some(code);
        }
        if let Some(known) = record.snapshot.clone() {
            self.republish(&uid, &known);
        }
    }

    /// The cached snapshot once more, with the deaths known by now.
    fn republish(&mut self, uid: &PodUid, known: &Arc<PodSnapshot>) {
        let mut snapshot = PodSnapshot::clone(known);
        self.overlay_pending_exits(uid, &mut snapshot);
        self.publish(uid, snapshot, Source::Kernel);
    }

    /// Lays deaths over a snapshot, forgets the settled ones, and gives way to the runtime where the contradiction
    /// has lasted. Returns true if deaths are still unconfirmed.
    pub(super) fn overlay_pending_exits(&mut self, uid: &PodUid, snapshot: &mut PodSnapshot) -> bool {
        let Some(record) = self.records.get_mut(uid) else { return false };
        let clock = self.config.clock;
        let overlay = death::overlay_exits(snapshot, &record.deaths, |death| {
            clock.wall_nanos_before(death.seen_at.elapsed() + death.kernel_age.unwrap_or_default())
        });
        for id in overlay.settled.iter().chain(&overlay.contradicted) {
            record.deaths.remove(id);
        }
        for id in &overlay.contradicted {
            tracing::warn!(pod = %snapshot.pod, id = %id, "the runtime denies a death the kernel proved; the runtime wins");
            self.config.observer.contradiction();
            self.relists.request(RelistReason::Contradiction, Instant::now());
        }
        overlay.pending
    }
}

/// Deaths prove nothing where processes may outlive their init.
fn provable(snapshot: &PodSnapshot, container: &ContainerStatus) -> bool {
    snapshot.sandboxes.iter().any(|s| s.id == container.sandbox_id && !s.shares_pid_namespace)
}
