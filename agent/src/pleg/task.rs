//! The PLEG's loop, the only writer of the cache. It never waits for the runtime: every call runs in a task of its own and
//! returns a `CallResult`, so a pod with a hung call delays only itself.

use std::collections::HashMap;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Semaphore;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::time::DelayQueue;

use super::DirtyPods;
use super::PlegObserver;
use super::exit_code::CodelessExit;
use super::exit_code::is_placeholder;
use super::exited::add_exit_times;
use super::exited::keep_exits;
use super::handle::COMMAND_CAPACITY;
use super::handle::Command;
use super::handle::InspectError;
use super::handle::PlegHandle;
use super::handle::Published;
use super::handle::Reply;
use super::inspect;
use super::inspect::Listing;
use super::oom::Ooms;
use super::owners::Owners;
use super::proof::Exits;
use super::proof::PinFuture;
use super::record::ACTING_LIMIT;
use super::record::PendingHint;
use super::record::PodRecord;
use super::record::Waiter;
use super::record::recheck_delay;
use super::record::retry_delay;
use super::relist::Relists;
use super::termination::MessageReader;
use super::uninspected::Uninspected;
use crate::events::Hint;
use crate::events::process::ProcessWatch;
use crate::events::sensors::RelistPeriods;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::events::sensors::SensorStates;
use crate::model::Clock;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::Source;
use crate::model::sleep_until;
use crate::oom::OomReporter;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;

/// Parts of the PLEG.
pub struct PlegConfig {
    /// How often all pods are listed.
    pub periods: RelistPeriods,
    /// Concurrent inspections of single pods. A hung one keeps its slot.
    pub parallel_inspections: usize,
    /// Deadline of one inspection.
    pub inspection_timeout: Duration,
    /// Watches init processes.
    pub watch: Arc<dyn ProcessWatch>,
    /// Metrics.
    pub observer: Arc<dyn PlegObserver>,
    /// Wall clock for the finish time of proven exits.
    pub clock: Clock,
    /// States of the sensors.
    pub sensor_states: SensorStates,
    /// Reports OOM verdicts.
    pub ooms: OomReporter,
}

/// Starts the PLEG. It ends when `shutdown` is cancelled.
pub fn start(
    runtime: Runtime,
    hints: mpsc::Receiver<Hint>,
    config: PlegConfig,
    shutdown: CancellationToken,
) -> (PlegHandle, tokio::task::JoinHandle<()>) {
    let (sender, commands) = mpsc::channel(COMMAND_CAPACITY);
    let handle = PlegHandle {
        published: Published::default(),
        commands: sender,
        dirty: DirtyPods::default(),
        messages: MessageReader::default(),
        uninspected: Uninspected::default(),
    };
    let task = PlegTask {
        slots: Arc::new(Semaphore::new(config.parallel_inspections)),
        runtime,
        records: HashMap::new(),
        owners: Owners::default(),
        published: handle.published.clone(),
        dirty: handle.dirty.clone(),
        messages: handle.messages.clone(),
        uninspected: handle.uninspected.clone(),
        work: JoinSet::new(),
        pins: FuturesUnordered::new(),
        exits: Exits::default(),
        processless: HashSet::new(),
        ooms: Ooms::default(),
        rechecks: DelayQueue::new(),
        relists: Relists::default(),
        config,
    };
    (handle, tokio::spawn(task.run(hints, commands, shutdown)))
}

/// Result of a spawned call.
pub(super) enum CallResult {
    Inspected { uid: PodUid, sampled_at: Instant, result: Result<PodSnapshot, InspectError> },
    Exited { uid: PodUid, container: Box<ContainerStatus> },
    Listed { began: Instant, result: Result<(Instant, HashMap<PodUid, Listing>), RuntimeError> },
}

pub(super) struct PlegTask {
    pub(super) config: PlegConfig,
    pub(super) runtime: Runtime,
    pub(super) records: HashMap<PodUid, PodRecord>,
    pub(super) owners: Owners,
    published: Published,
    pub(super) dirty: DirtyPods,
    pub(super) messages: MessageReader,
    pub(super) uninspected: Uninspected,
    pub(super) work: JoinSet<CallResult>,
    pub(super) pins: FuturesUnordered<PinFuture>,
    pub(super) exits: Exits,
    /// Runtime handlers whose containers have no process of their own on the node.
    pub(super) processless: HashSet<String>,
    pub(super) ooms: Ooms,
    rechecks: DelayQueue<PodUid>,
    pub(super) relists: Relists,
    slots: Arc<Semaphore>,
}

impl PlegTask {
    async fn run(
        mut self,
        mut hints: mpsc::Receiver<Hint>,
        mut commands: mpsc::Receiver<Command>,
        shutdown: CancellationToken,
    ) {
        let mut sensors = self.config.sensor_states.subscribe();
        self.relists.request(crate::events::RelistReason::Start, Instant::now());
        loop {
            self.relist_if_due();
            let relist_at = self.relist_due();
            let oom_due = self.ooms.due();
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                // Hints before pidfds: an exit record contains the exit code of the process that is gone.
                Some(hint) = hints.recv() => self.on_hint(hint),
                Some(pinned) = self.pins.next(), if !self.pins.is_empty() => self.on_gone(pinned),
                Some(done) = self.work.join_next(), if !self.work.is_empty() => self.on_done(done),
                Some(command) = commands.recv() => self.on_command(command),
                Some(due) = self.rechecks.next(), if !self.rechecks.is_empty() => self.on_recheck(due.into_inner()),
                Ok(()) = sensors.changed() => {}
                () = sleep_until(oom_due) => self.conclude_overdue(),
                () = tokio::time::sleep_until(relist_at) => {}
            }
        }
        self.work.shutdown().await;
    }

    fn on_hint(&mut self, hint: Hint) {
        match hint {
            Hint::Runtime { uid, exited: Some(status), .. }
                if !is_placeholder(status.exit_code) && self.runs(&uid, &status.id) =>
            {
                self.take_exit(uid, *status);
            }
            Hint::Runtime { uid, id, expect, .. } => {
                let record = self.records.entry(uid.clone()).or_default();
                record.hint(PendingHint { id, expect, at: Instant::now() });
                record.settle_now();
                record.source.get_or_insert(Source::Runtime);
                self.inspect_or_defer(&uid);
            }
            Hint::Exit(facts) => self.on_exit_facts(facts),
            Hint::Oom(record) => self.on_oom_record(*record),
            Hint::Gap(reason) => self.relists.request(reason, Instant::now()),
        }
    }

    fn on_command(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::View(uid, reply) => self.on_view(uid, reply),
            Command::Inspect(uid, fresh, reply) => {
                let record = self.records.entry(uid.clone()).or_default();
                record.acting_since = None;
                record.source = Some(Source::Worker);
                record.fresh.extend(fresh);
                record.waiters.push(Waiter { since: now, reply });
                self.inspect_if_wanted(&uid);
            }
            Command::Acting(uid) => self.records.entry(uid).or_default().acting_since = Some(now),
            Command::Exit(uid, id, exited) => {
                if let Some(record) = self.records.get_mut(&uid) {
                    record.exit_waiters.push((id, exited));
                    record.answer_exits();
                }
            }
        }
    }

    fn on_view(&mut self, uid: PodUid, reply: Reply) {
        let record = self.records.entry(uid.clone()).or_default();
        if let Some(snapshot) = &record.snapshot {
            // Fails if the caller was cancelled.
            let _ = reply.send(Ok(snapshot.clone()));
            return;
        }
        record.waiters.push(Waiter { since: self.relists.began_or_now(), reply });
        match self.relists.covered_at.filter(|_| record.inflight.is_none()) {
            // It was listed, and its inspection has failed.
            Some(_) if self.uninspected.contains(&uid) => self.inspect_if_wanted(&uid),
            Some(sampled_at) => self.install_absent(&uid, sampled_at),
            None => {}
        }
    }

    /// Installs an empty snapshot: the pod was not listed at `sampled_at`.
    pub(super) fn install_absent(&mut self, uid: &PodUid, sampled_at: Instant) {
        let pod = crate::model::PodRef { uid: uid.clone(), namespace: "".into(), name: "".into() };
        self.install(uid, PodSnapshot::empty(pod, sampled_at));
    }

    /// Inspects a pod that has hints, unless its worker is acting: then its own inspection answers them, or a recheck if
    /// that takes too long.
    fn inspect_or_defer(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if let Some(limit) = record.acting_since.and_then(|_| record.hint_timeout()) {
            let at = Instant::now() + limit;
            match &record.recheck {
                None => record.recheck = Some(self.rechecks.insert_at(uid.clone(), at)),
                Some(key) if self.rechecks.deadline(key) > at => self.rechecks.reset_at(key, at),
                Some(_) => {}
            }
        }
        self.inspect_if_wanted(uid);
    }

    fn on_recheck(&mut self, uid: PodUid) {
        let now = Instant::now();
        let Some(record) = self.records.get_mut(&uid) else { return };
        record.recheck = None;
        if let Some(limit) = record.acting_since.map(|since| since + ACTING_LIMIT).filter(|limit| now < *limit) {
            // It was scheduled before the worker began to act.
            record.recheck = Some(self.rechecks.insert_at(uid, limit));
            return;
        }
        record.acting_since = None;
        record.rechecks = record.rechecks.saturating_add(1);
        record.again = Some(now);
        self.inspect_if_wanted(&uid);
    }

    pub(super) fn recheck_later(&mut self, uid: &PodUid, delay: Duration) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if record.recheck.is_none() {
            record.recheck = Some(self.rechecks.insert(uid.clone(), delay));
        }
    }

    pub(super) fn inspect_if_wanted(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if !record.wants_inspection() {
            return;
        }
        let previous = record.snapshot.clone();
        let (fresh, unlabelled) = (std::mem::take(&mut record.fresh), record.unlabelled.clone());
        let (runtime, messages) = (self.runtime.clone(), self.messages.clone());
        let target = uid.clone();
        self.spawn_inspection(uid, Instant::now(), async move {
            let listing = inspect::list_one(&runtime, &target, &unlabelled);
            let (listed, early) = tokio::join!(listing, inspect::prefetch_statuses(&runtime, fresh));
            inspect::complete(&runtime, &messages, &target, listed?, previous, &early).await
        });
    }

    /// Runs an inspection of a pod, bounded in number and time.
    pub(super) fn spawn_inspection(
        &mut self,
        uid: &PodUid,
        began: Instant,
        inspection: impl Future<Output = Result<PodSnapshot, RuntimeError>> + Send + 'static,
    ) {
        let Some(record) = self.records.get_mut(uid) else { return };
        record.inflight = Some(began);
        let uid = uid.clone();
        let slots = self.slots.clone();
        let limit = self.config.inspection_timeout;
        let observer = self.config.observer.clone();
        self.work.spawn(async move {
            let _slot = slots.acquire().await;
            let start = Instant::now();
            let failed = |message: String| InspectError::Runtime { uid: uid.clone(), message: message.into() };
            // A panic would otherwise leave the callers of the inspection without an answer.
            let inspection = AssertUnwindSafe(inspection).catch_unwind();
            let result = match tokio::time::timeout(limit, inspection).await {
                Ok(Ok(result)) => result.map_err(|error| failed(error.to_string())),
                Ok(Err(_)) => Err(failed("the inspection panicked".to_owned())),
                Err(_) => Err(failed(format!("no answer within {limit:?}"))),
            };
            observer.inspection(start.elapsed(), result.is_ok());
            CallResult::Inspected { uid, sampled_at: began, result }
        });
    }

    fn on_done(&mut self, done: Result<CallResult, tokio::task::JoinError>) {
        match done {
            Ok(CallResult::Inspected { uid, sampled_at, result }) => self.on_inspected(&uid, sampled_at, result),
            Ok(CallResult::Exited { uid, container }) => self.on_exited(&uid, *container),
            Ok(CallResult::Listed { began, result }) => self.on_listed(began, result),
            // A panic in a list or in the message of an exit; the relist finds what was missed. Inspections return theirs.
            Err(error) => {
                tracing::error!(%error, "a task of the PLEG ended abnormally");
                self.relists.abandon();
                self.relists.request(crate::events::RelistReason::Dropped, Instant::now());
            }
        }
    }

    fn on_inspected(&mut self, uid: &PodUid, began: Instant, result: Result<PodSnapshot, InspectError>) {
        let Some(record) = self.records.get_mut(uid) else { return };
        record.inflight = None;
        match result {
            Ok(snapshot) => {
                record.failures = 0;
                record.failed.clear();
                self.install(uid, snapshot);
            }
            Err(error) => {
                let reason = error.to_string();
                if record.failed == reason {
                    tracing::debug!(pod_uid = %uid, reason, "inspection failed again");
                } else {
                    tracing::warn!(pod_uid = %uid, %error, "inspection failed");
                    record.failed = reason;
                }
                record.failures = record.failures.saturating_add(1);
                let delay = retry_delay(record.failures);
                for waiter in std::mem::take(&mut record.waiters) {
                    if waiter.since <= began {
                        // Fails if the caller was cancelled.
                        let _ = waiter.reply.send(Err(error.clone()));
                    } else {
                        record.waiters.push(waiter);
                    }
                }
                // The retry is not the worker's: a worker that has got the error must be woken by what the retry finds.
                if record.waiters.is_empty() {
                    record.source.take_if(|source| *source == Source::Worker);
                }
                self.recheck_later(uid, delay);
            }
        }
        self.inspect_if_wanted(uid);
    }

    /// The only way into the cache. Watches running init processes, applies proven exits, reports changes.
    pub(super) fn install(&mut self, uid: &PodUid, mut snapshot: PodSnapshot) {
        let Some(record) = self.records.get(uid) else { return };
        let sampled_at = snapshot.sampled_at;
        let source = record.source.unwrap_or(Source::Relist);
        if record.snapshot.as_ref().is_some_and(|known| known.sampled_at > sampled_at) {
            self.answer(uid, sampled_at);
            return;
        }
        let known = record.snapshot.clone();
        if let Some(known) = &known {
            keep_exits(known, &mut snapshot);
        }
        self.correct_reasons(
            known.as_deref().unwrap_or(&PodSnapshot::empty(snapshot.pod.clone(), sampled_at)),
            &mut snapshot,
        );
        let are_held_back = self.hold_back_codes(uid, known.as_deref(), &mut snapshot);
        add_exit_times(known.as_deref(), &mut snapshot, self.config.clock.wall_nanos());
        self.pin_running(uid, &mut snapshot);
        let pending = self.overlay_pending_exits(uid, &mut snapshot) || are_held_back;
        self.publish(uid, snapshot, source);
        let pending = self.settle_exit_hints(uid) || pending;
        self.attribute_oom_kills(uid);
        self.answer(uid, sampled_at);
        if let Some(record) = self.records.get_mut(uid).filter(|r| r.hints.is_empty() && r.again.is_none()) {
            record.source = None;
        }
        self.schedule_confirmation(uid, pending);
        if self.records.get(uid).is_some_and(PodRecord::is_vacant) {
            self.remove_pod(uid);
        }
    }

    /// After a successful inspection: inspect again only while an exit is unconfirmed, or has no code.
    fn schedule_confirmation(&mut self, uid: &PodUid, pending: bool) {
        let events_up = self.events_up();
        let Some(record) = self.records.get_mut(uid) else { return };
        if let Some(key) = record.recheck.take_if(|_| record.hints.is_empty()) {
            self.rechecks.try_remove(&key);
        }
        if pending {
            let delay = recheck_delay(record.rechecks, events_up);
            let held_back = record.codeless_exits.values().filter_map(CodelessExit::remaining).min();
            self.recheck_later(uid, held_back.map_or(delay, |left| delay.min(left)));
        } else {
            record.rechecks = 0;
        }
    }

    /// Replaces the cached snapshot and emits the difference.
    pub(super) fn publish(&mut self, uid: &PodUid, snapshot: PodSnapshot, source: Source) {
        let Some(record) = self.records.get_mut(uid) else { return };
        let old = record.snapshot.take();
        let new = Arc::new(snapshot);
        record.snapshot = Some(new.clone());
        record.answer_exits();
        self.owners.replaced(old.as_deref(), Some(&new));
        self.published.write().unwrap_or_else(PoisonError::into_inner).insert(uid.clone(), new.clone());
        self.emit(old.as_deref(), Some(&new), source);
    }

    fn answer(&mut self, uid: &PodUid, sampled_at: Instant) {
        // After the cache was written: a reader that finds the pod in neither takes it for gone.
        self.cached_since(uid, sampled_at);
        let Some(record) = self.records.get_mut(uid) else { return };
        record.settle(sampled_at);
        let Some(snapshot) = record.snapshot.clone() else { return };
        for waiter in std::mem::take(&mut record.waiters) {
            if waiter.since <= snapshot.sampled_at {
                // Fails if the caller was cancelled.
                let _ = waiter.reply.send(Ok(snapshot.clone()));
            } else {
                record.waiters.push(waiter);
            }
        }
    }

    /// Removes a pod that the runtime no longer has.
    pub(super) fn remove_pod(&mut self, uid: &PodUid) {
        if let Some(record) = self.records.remove(uid) {
            if let Some(key) = &record.recheck {
                self.rechecks.try_remove(key);
            }
            self.published.write().unwrap_or_else(PoisonError::into_inner).remove(uid);
            self.uninspected.inspected(uid);
            self.owners.replaced(record.snapshot.as_deref(), None);
            self.config.ooms.pod_removed(uid);
            self.emit(record.snapshot.as_deref(), None, Source::Relist);
        }
    }

    pub(super) fn events_up(&self) -> bool {
        self.config.sensor_states.get(Sensor::RuntimeEvents) == Some(SensorState::Up)
    }
}
