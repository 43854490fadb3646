//! What has been observed so far: a fold over records. Everything in it is bounded. Pure.

mod history;

use std::collections::BTreeMap;
use std::collections::VecDeque;

use super::record::ExitRecord;
use super::record::Line;
use super::record::Lost;
use super::record::OomRecord;
use super::record::PodName;
use super::record::PodRecord;
use super::record::PressureRecord;
use super::record::PressureScope;
use super::record::Record;
use super::record::Resource;
use super::record::RunState;
use super::record::RuntimeRecord;
use super::record::SensorRecord;
use super::record::StallRecord;
use super::record::Start;
use super::record::Timestamp;
pub use history::History;
pub use history::SAMPLES;

/// Exits that are kept.
pub const EXITS: usize = 512;
/// OOM kills that are kept.
pub const OOM_KILLS: usize = 256;
/// Pods that are kept, far more than a node runs.
pub const PODS: usize = 4096;
/// Exits of one container for one reason.
pub type ExitCounts = BTreeMap<(String, String), u64>;
/// OOM kills by scope, victim and confidence.
pub type OomCounts = BTreeMap<(&'static str, &'static str, &'static str), u64>;

/// The node as observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedNode {
    /// Identity of the node; empty before the first record.
    pub start: Start,
    /// The container runtime, once it has answered.
    pub runtime: Option<RuntimeRecord>,
    /// Sources of evidence.
    pub sensors: BTreeMap<String, SensorRecord>,
    /// What was there at start has been reported.
    pub ready: bool,
    /// Time of the newest record.
    pub now: Timestamp,
    /// Pods by UID.
    pub pods: BTreeMap<String, ObservedPod>,
    /// The last exits, newest last.
    pub exits: VecDeque<(Timestamp, ExitRecord)>,
    /// The last OOM kills, newest last.
    pub oom_kills: VecDeque<(Timestamp, OomRecord)>,
    /// How many of them, the newest, were recorded since the last start.
    kills_since_start: usize,
    /// OOM kills since observing began.
    pub oom_counts: OomCounts,
    /// Waiting pods, by UID and by resource.
    pub stalls: BTreeMap<(String, Resource), (Timestamp, StallRecord)>,
    /// Records of pods beyond the limit of those that are kept.
    pub pods_left_out: u64,
    /// Pressure of the node.
    pub pressure: Option<PressureRecord>,
    /// Pressure of the node over time.
    pub history: History,
    /// Records of the kernel that were lost.
    pub lost: Lost,
}

/// A pod as observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedPod {
    /// Its newest record.
    pub pod: PodRecord,
    /// Its pressure.
    pub pressure: Option<PressureRecord>,
    /// Its pressure over time.
    pub history: History,
    /// OOM kills, those before observing began included.
    pub oom_kills: u64,
    /// OOM kills since observing began, by container, victim and scope.
    pub oom_counts: OomCountsByContainer,
    /// Exits since observing began.
    pub exit_counts: ExitCounts,
}

/// OOM kills of a pod by container, victim and scope.
pub type OomCountsByContainer = BTreeMap<(String, &'static str, &'static str), u64>;

impl ObservedPod {
    /// Running containers and all containers, of their newest instances.
    pub fn running(&self) -> (usize, usize) {
        let running = self.pod.containers.iter().filter(|container| container.state == RunState::Running);
        (running.count(), self.pod.containers.len())
    }

    /// Restarts of all containers.
    pub fn restarts(&self) -> u32 {
        self.pod.containers.iter().map(|container| container.restarts).fold(0, u32::saturating_add)
    }

    /// The latest exit of a container.
    pub fn last_exit(&self) -> Option<&super::record::ExitInfo> {
        let exits = self.pod.containers.iter().filter_map(|container| container.last_exit.as_ref());
        exits.max_by_key(|exit| exit.finished_at)
    }

    /// Percent of the last ten seconds in which some task waited.
    pub fn percent(&self, resource: Resource) -> Option<f64> {
        Some(self.pressure.as_ref()?.waiting(resource)?.some.avg10)
    }
}

impl ObservedNode {
    /// Takes a record.
    pub fn apply(&mut self, line: &Line) {
        self.now = self.now.max(line.time);
        match &line.record {
            Record::Start(start) => {
                // A recording may go on after a restart: what is still there is reported again.
                self.pods.clear();
                self.stalls.clear();
                // Kills before it are reported again too, as earlier ones of their pods.
                self.kills_since_start = 0;
                self.ready = false;
                self.sensors = start.sensors.iter().map(|sensor| (sensor.sensor.clone(), sensor.clone())).collect();
                self.start = start.clone();
            }
            Record::Runtime(runtime) => self.runtime = Some(runtime.clone()),
            Record::Sensor(sensor) => {
                self.sensors.insert(sensor.sensor.clone(), sensor.clone());
            }
            Record::Ready(_) => self.ready = true,
            Record::Pod(pod) => self.pod(pod),
            Record::Exit(exit) => self.exit(line.time, exit),
            Record::Oom(oom) => self.oom(line.time, oom),
            Record::Pressure(pressure) => self.pressure(line.time, pressure),
            Record::Stall(stall) => {
                let key = (stall.pod.uid.clone(), stall.resource);
                if self.pods.contains_key(&key.0) {
                    self.stalls.insert(key, (line.time, stall.clone()));
                }
            }
            Record::Lost(lost) => {
                self.lost.exits = self.lost.exits.saturating_add(lost.exits);
                self.lost.cgroups = self.lost.cgroups.saturating_add(lost.cgroups);
                self.lost.watches = self.lost.watches.saturating_add(lost.watches);
            }
        }
    }

    fn pod(&mut self, record: &PodRecord) {
        if record.removed {
            self.pods.remove(&record.pod.uid);
            self.stalls.retain(|(uid, _), _| *uid != record.pod.uid);
            return;
        }
        if let Some(known) = self.pods.get_mut(&record.pod.uid) {
            known.pod = record.clone();
        } else if self.pods.len() < PODS {
            let mut pod = ObservedPod { pod: record.clone(), ..ObservedPod::default() };
            // A process may be killed before the runtime has reported its pod: then only the UID is known.
            let is_own = |oom: &OomRecord| oom.pod.as_ref().is_some_and(|of| of.uid == record.pod.uid);
            let kills = self.oom_kills.iter().rev().take(self.kills_since_start);
            for (_, oom) in kills.filter(|(_, oom)| is_own(oom)) {
                count(&mut pod, oom);
            }
            self.pods.insert(record.pod.uid.clone(), pod);
        } else {
            self.pods_left_out = self.pods_left_out.saturating_add(1);
        }
    }

    fn exit(&mut self, time: Timestamp, exit: &ExitRecord) {
        push(&mut self.exits, EXITS, (time, exit.clone()));
        let pod = self.pods.get_mut(&exit.pod.uid).filter(|_| !exit.earlier);
        if let Some(pod) = pod {
            let key = (exit.container.clone(), exit.exit.reason.clone());
            *pod.exit_counts.entry(key).or_default() += 1;
        }
    }

    fn oom(&mut self, time: Timestamp, oom: &OomRecord) {
        push(&mut self.oom_kills, OOM_KILLS, (time, oom.clone()));
        self.kills_since_start = self.oom_kills.len().min(self.kills_since_start + 1);
        if !oom.earlier {
            let key = (oom.scope.as_str(), oom.victim.as_str(), oom.confidence.as_str());
            *self.oom_counts.entry(key).or_default() += oom.kills;
        }
        if let Some(pod) = oom.pod.as_ref().and_then(|pod| self.pods.get_mut(&pod.uid)) {
            count(pod, oom);
        }
    }

    /// The node's record ends a measurement of all pods: stalls of the measurement before are over.
    fn pressure(&mut self, time: Timestamp, record: &PressureRecord) {
        match (record.scope, &record.pod) {
            (PressureScope::Pod, Some(pod)) => {
                if let Some(pod) = self.pods.get_mut(&pod.uid) {
                    pod.pressure = Some(record.clone());
                }
            }
            (PressureScope::Pod, None) => {}
            (PressureScope::Node, _) => {
                self.pressure = Some(record.clone());
                self.history.push(Some(record));
                for pod in self.pods.values_mut() {
                    pod.history.push(pod.pressure.as_ref());
                }
                // All records of a measurement have its time. That of an earlier one is later if the clock was set back.
                self.stalls.retain(|_, (measured, _)| *measured == time);
            }
        }
    }

    /// What waits now, the longest wait first.
    pub fn current_stalls(&self) -> Vec<&StallRecord> {
        let mut current: Vec<&StallRecord> = self.stalls.values().map(|(_, stall)| stall).collect();
        current.sort_by(|a, b| b.percent.total_cmp(&a.percent).then_with(|| a.pod.cmp(&b.pod)));
        current
    }

    /// The OOM kills of a pod, newest first.
    pub fn oom_kills_of<'a>(&'a self, pod: &'a PodName) -> impl Iterator<Item = &'a (Timestamp, OomRecord)> {
        self.oom_kills.iter().rev().filter(move |(_, oom)| oom.pod.as_ref().is_some_and(|one| one.uid == pod.uid))
    }

    /// Sources of evidence that are not complete, with what that costs.
    pub fn lacks(&self) -> impl Iterator<Item = &SensorRecord> {
        self.sensors.values().filter(|sensor| sensor.cost.is_some())
    }
}

fn count(pod: &mut ObservedPod, oom: &OomRecord) {
    pod.oom_kills = pod.oom_kills.saturating_add(oom.kills);
    if !oom.earlier {
        let container = oom.container.clone().unwrap_or_default();
        *pod.oom_counts.entry((container, oom.victim.as_str(), oom.scope.as_str())).or_default() += oom.kills;
    }
}

fn push<T>(ring: &mut VecDeque<T>, limit: usize, item: T) {
    if ring.len() >= limit {
        ring.pop_front();
    }
    ring.push_back(item);
}

#[cfg(test)]
mod tests;
