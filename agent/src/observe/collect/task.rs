//! The collector's loop: joins snapshots, kills and measurements to records.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::sync::mpsc;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;

use super::CollectOptions;
use super::Message;
use super::costs;
use super::kills;
use super::kills::KillCounts;
use super::oom;
use super::pods::KnownPod;
use super::pods::existed;
use super::sample::LEAST_WINDOW;
use super::sample::Measurement;
use super::sample::Sampler;
use super::sample::Target;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::events::sensors::SensorStates;
use crate::kernel::bpf::Losses;
use crate::kernel::memory;
use crate::kernel::program_pages;
use crate::model::Clock;
use crate::model::OomVerdict;
use crate::model::PodUid;
use crate::observe::record::ExitRecord;
use crate::observe::record::Line;
use crate::observe::record::Lost;
use crate::observe::record::PressureRecord;
use crate::observe::record::Ready;
use crate::observe::record::Record;
use crate::observe::record::RunState;
use crate::observe::record::RuntimeRecord;
use crate::observe::record::SensorRecord;
use crate::observe::record::Start;
use crate::observe::record::Timestamp;
use crate::pleg::PlegHandle;

/// The node is taken as reported when no pod has changed for this long after the first list, at the latest after the
/// second. Without a runtime nothing is waited for.
const QUIET: Duration = Duration::from_millis(300);
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// A request is answered with the last measurement if it is younger than this, so that requests without pause cost no more.
const FRESH: Duration = Duration::from_secs(1);

/// Verdicts on OOM kills.
type Verdicts = broadcast::Receiver<Arc<OomVerdict>>;

/// What the loop waits for.
pub(super) struct Inputs {
    pub(super) verdicts: Verdicts,
    pub(super) measures: mpsc::Receiver<oneshot::Sender<()>>,
    pub(super) versions: oneshot::Receiver<(String, String)>,
}

/// What the loop works with.
pub(super) struct Parts {
    pub(super) options: CollectOptions,
    /// The node has cgroup v2 only.
    pub(super) v2: bool,
    /// The kernel log is followed: its follower also reports kills that it does not contain, and those while it cannot be
    /// read.
    pub(super) log_is_followed: bool,
    pub(super) pleg: PlegHandle,
    pub(super) sensor_states: SensorStates,
    pub(super) sampler: Sampler,
    pub(super) out: mpsc::Sender<Message>,
}

/// The loop's state.
pub(super) struct Task {
    options: CollectOptions,
    v2: bool,
    log_is_followed: bool,
    pleg: PlegHandle,
    sensor_states: SensorStates,
    sampler: Option<Sampler>,
    out: mpsc::Sender<Message>,
    began: i64,
    pods: HashMap<PodUid, KnownPod>,
    sensors: HashMap<Sensor, SensorState>,
    /// Pods that existed before observing began and were not measured yet, with their OOM-killed containers.
    dead: HashMap<String, Vec<kills::Dead>>,
    ready: bool,
    /// When the last measurement ended.
    measured: Option<Instant>,
    kills: KillCounts,
    losses: Losses,
    reported: HashMap<String, PressureRecord>,
}

/// The receiver of messages is gone.
struct Closed;

impl Task {
    pub(super) fn new(parts: Parts) -> Self {
        Self {
            options: parts.options,
            v2: parts.v2,
            log_is_followed: parts.log_is_followed,
            pleg: parts.pleg,
            sensor_states: parts.sensor_states,
            sampler: Some(parts.sampler),
            out: parts.out,
            began: Clock::System.wall_nanos(),
            pods: HashMap::new(),
            sensors: HashMap::new(),
            dead: HashMap::new(),
            ready: false,
            measured: None,
            kills: KillCounts::default(),
            losses: Losses::default(),
            reported: HashMap::new(),
        }
    }

    pub(super) async fn run(mut self, inputs: Inputs) {
        // It ends when the receiver is dropped.
        let _ = self.follow(inputs).await;
    }

    async fn follow(&mut self, inputs: Inputs) -> Result<(), Closed> {
        let Inputs { mut verdicts, mut measures, mut versions } = inputs;
        self.start().await?;
        let mut sensors = self.sensor_states.subscribe();
        let mut ticks = tokio::time::interval_at(Instant::now() + self.options.interval, self.options.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut quiet, deadline) = (Instant::now() + QUIET, Instant::now() + READ_TIMEOUT);
        let mut named = false;
        loop {
            tokio::select! {
                () = self.out.closed() => return Err(Closed),
                changed = self.pleg.changed_pods() => {
                    // On a busy node some pod changes all the time.
                    quiet = deadline.min(Instant::now() + QUIET);
                    self.pods_changed(changed).await?;
                }
                verdict = verdicts.recv() => self.decided(verdict).await?,
                Ok(()) = sensors.changed() => self.sensors_changed().await?,
                version = &mut versions, if !named => {
                    named = true;
                    if let Ok((name, version)) = version {
                        let endpoint = self.options.endpoint.to_string();
                        self.send(Record::Runtime(RuntimeRecord { name, version, endpoint })).await?;
                    }
                }
                // So soon after a measurement there would be no rates, and the stalls of that one would be over.
                _ = ticks.tick(), if self.ready => self.measure_after(LEAST_WINDOW, &mut verdicts).await?,
                Some(done) = measures.recv(), if self.ready => {
                    self.measure_after(FRESH, &mut verdicts).await?;
                    self.message(Message::Measured(done)).await?;
                }
                () = tokio::time::sleep_until(quiet), if !self.ready => {
                    quiet = Instant::now() + QUIET;
                    if self.listed() || Instant::now() >= deadline {
                        self.become_ready(&mut verdicts).await?;
                        // The first rates are over a whole interval, however long the start has taken.
                        ticks.reset();
                    }
                }
            }
        }
    }

    async fn start(&mut self) -> Result<(), Closed> {
        let sensors = self.changed_sensors();
        let start = Start {
            node: self.options.node.clone(),
            version: self.options.version.to_owned(),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            cgroups: if self.v2 { "v2" } else { "v1" }.to_owned(),
            sensors,
        };
        self.send(Record::Start(start)).await
    }

    fn changed_sensors(&mut self) -> Vec<SensorRecord> {
        let report = self.sensor_states.report();
        let changed = report.into_iter().filter(|(sensor, state)| self.sensors.get(sensor) != Some(state));
        let changed: Vec<(Sensor, SensorState)> = changed.collect();
        let records = changed.iter().map(|(sensor, state)| costs::record(*sensor, state, self.v2)).collect();
        self.sensors.extend(changed);
        records
    }

    async fn sensors_changed(&mut self) -> Result<(), Closed> {
        for sensor in self.changed_sensors() {
            self.send(Record::Sensor(sensor)).await?;
        }
        Ok(())
    }

    fn listed(&self) -> bool {
        matches!(self.sensor_states.get(Sensor::Relist), Some(SensorState::Up))
    }

    /// Neither the probe nor the follower of the kernel log reports OOM kills: counters of pods and the runtime do.
    fn kills_are_counted(&self) -> bool {
        !matches!(self.sensor_states.get(Sensor::Oom), Some(SensorState::Up)) && !self.log_is_followed
    }

    /// The first measurement contains what was counted before; what comes later is new.
    async fn become_ready(&mut self, verdicts: &mut Verdicts) -> Result<(), Closed> {
        self.ready = true;
        self.measure(verdicts).await?;
        // What only the start has needed: the loader of BPF programs, the lists of all pods.
        memory::return_all();
        program_pages::unmap();
        let pods = u64::try_from(self.pods.len()).unwrap_or(u64::MAX);
        self.send(Record::Ready(Ready { pods })).await
    }

    /// Kills before the start in pods that have ended and have no cgroup any more: only the runtime still reports them.
    fn kills_without_cgroup(&mut self) -> Vec<Record> {
        let mut records = Vec::new();
        for (uid, dead) in &mut self.dead {
            let Some(pod) = self.pods.get(&PodUid::from(uid.as_str())) else { continue };
            let kills = self.kills.without_cgroup(pod.name(), &std::mem::take(dead));
            records.extend(kills.into_iter().map(Record::Oom));
        }
        records
    }

    async fn pods_changed(&mut self, changed: Vec<PodUid>) -> Result<(), Closed> {
        for uid in changed {
            let cached = self.pleg.cached(&uid).filter(|snapshot| !snapshot.pod.name.is_empty());
            let records = match cached {
                Some(snapshot) => {
                    // The runtime may have answered long after the start.
                    if !self.pods.contains_key(&uid) && existed(&snapshot, self.began) {
                        self.dead.entry(uid.to_string()).or_default();
                    }
                    self.pods.entry(uid).or_default().update(&snapshot, self.began)
                }
                None => {
                    self.dead.remove(uid.as_str());
                    self.kills.removed(uid.as_str());
                    self.pods.remove(&uid).map(KnownPod::removed).unwrap_or_default()
                }
            };
            for record in records {
                let killed = self.oom_killed_by_runtime_report(&record);
                self.send(record).await?;
                if let Some(kill) = killed {
                    self.send(kill).await?;
                }
            }
        }
        Ok(())
    }

    /// For exits that the runtime reports as OOM kills: records those from before the start, and reports those
    /// without other evidence.
    fn oom_killed_by_runtime_report(&mut self, record: &Record) -> Option<Record> {
        let Record::Exit(ExitRecord { pod, container, id, exit, earlier, .. }) = record else { return None };
        if !exit.oom_killed {
            return None;
        }
        if let Some(dead) = self.dead.get_mut(&pod.uid).filter(|_| *earlier) {
            dead.push((container.clone(), id.clone()));
            return None;
        }
        // cgroup v2 keeps in the pod's counter what v1 drops with the container.
        let is_uncounted = !self.v2 && self.kills_are_counted();
        is_uncounted.then(|| Record::Oom(kills::by_runtime(pod, (container, id), *earlier)))
    }

    async fn decided(&mut self, verdict: Result<Arc<OomVerdict>, RecvError>) -> Result<(), Closed> {
        match verdict {
            Ok(verdict) => {
                let (time, record) = oom::record(&verdict);
                if self.kills.was_counted(&record, verdict.moment.0) {
                    return Ok(());
                }
                self.kills.recorded(&record);
                self.line(Line::new(time, Record::Oom(record))).await
            }
            Err(RecvError::Lagged(exits)) => self.send(Record::Lost(Lost { exits, ..Lost::default() })).await,
            // The PLEG has stopped: so does this task.
            Err(RecvError::Closed) => Err(Closed),
        }
    }

    /// Measures, unless the last measurement is younger than `age`.
    async fn measure_after(&mut self, age: Duration, verdicts: &mut Verdicts) -> Result<(), Closed> {
        match self.measured {
            Some(measured) if measured.elapsed() < age => Ok(()),
            _ => self.measure(verdicts).await,
        }
    }

    /// Takes the verdicts that wait.
    async fn take_decided(&mut self, verdicts: &mut Verdicts) -> Result<(), Closed> {
        for _ in 0..verdicts.len() {
            match verdicts.try_recv() {
                Ok(verdict) => self.decided(Ok(verdict)).await?,
                Err(TryRecvError::Lagged(missed)) => self.decided(Err(RecvError::Lagged(missed))).await?,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        Ok(())
    }

    /// Measures on a blocking thread.
    async fn measure(&mut self, verdicts: &mut Verdicts) -> Result<(), Closed> {
        let Some(mut sampler) = self.sampler.take() else { return Ok(()) };
        let targets: Vec<Target> = self.pods.values().map(target).collect();
        self.kills.measuring(Instant::now());
        let measured = tokio::task::spawn_blocking(move || {
            let measurement = sampler.measure(&targets);
            (sampler, measurement)
        });
        match measured.await {
            Ok((sampler, measurement)) => {
                (self.sampler, self.measured) = (Some(sampler), Some(Instant::now()));
                // Their kills are counted: they are not to be reported as earlier ones as well.
                self.take_decided(verdicts).await?;
                self.report(measurement).await
            }
            Err(error) => {
                self.sensor_states.set(Sensor::Pressure, SensorState::Down(format!("measuring failed: {error}")));
                Ok(())
            }
        }
    }

    async fn report(&mut self, measurement: Measurement) -> Result<(), Closed> {
        let live = self.kills_are_counted();
        for counted in &measurement.oom_kills {
            let dead = self.dead.remove(&counted.pod.uid);
            let mut records = self.kills.measured(counted, dead.is_some(), dead.as_deref().unwrap_or_default());
            records.retain(|record| live || record.earlier);
            for record in records {
                self.send(Record::Oom(record)).await?;
            }
        }
        for record in self.kills_without_cgroup() {
            self.send(record).await?;
        }
        let exists = |uid: &str| measurement.oom_kills.iter().any(|counted| counted.pod.uid == uid);
        self.kills.retain(exists);
        self.reported.retain(|uid, _| exists(uid));
        if let Some(lost) = self.newly_lost(measurement.losses) {
            self.send(Record::Lost(lost)).await?;
        }
        let now = Timestamp::from(SystemTime::now());
        let pods = measurement.pods.into_iter().filter(|record| self.is_news(record)).collect::<Vec<_>>();
        let pods = pods.into_iter().map(Record::Pressure);
        let stalls = measurement.stalls.into_iter().map(Record::Stall);
        let node = measurement.node.map(Record::Pressure);
        for record in pods.chain(stalls).chain(node) {
            self.line(Line::new(now, record)).await?;
        }
        Ok(())
    }

    fn newly_lost(&mut self, now: Losses) -> Option<Lost> {
        let before = std::mem::replace(&mut self.losses, now);
        let lost = Lost {
            exits: now.exits.saturating_sub(before.exits),
            cgroups: now.cgroups.saturating_sub(before.cgroups),
            watches: now.watches.saturating_sub(before.watches),
        };
        (lost != Lost::default()).then_some(lost)
    }

    /// An idle pod's pressure is reported once.
    fn is_news(&mut self, record: &PressureRecord) -> bool {
        let Some(pod) = &record.pod else { return true };
        if self.reported.get(&pod.uid) == Some(record) {
            return false;
        }
        self.reported.insert(pod.uid.clone(), record.clone());
        true
    }

    async fn send(&self, record: Record) -> Result<(), Closed> {
        self.line(Line::new(SystemTime::now().into(), record)).await
    }

    async fn line(&self, line: Line) -> Result<(), Closed> {
        self.message(Message::Line(Box::new(line))).await
    }

    async fn message(&self, message: Message) -> Result<(), Closed> {
        self.out.send(message).await.map_err(|_| Closed)
    }
}

fn target(pod: &KnownPod) -> Target {
    let running = pod.containers().iter().filter(|container| container.state == RunState::Running);
    let containers = running.map(|container| (container.name.clone(), container.id.clone())).collect();
    Target { pod: pod.name().clone(), containers }
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
