//! What was observed before: since when thresholds are met, what was acted on, and when each condition was last seen. Pure;
//! the time is an argument.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::readings::Readings;
use super::readings::Resource;
use super::readings::is_met;
use crate::config::eviction::Signal;
use crate::config::eviction::Threshold;
use crate::model::Pressures;

/// The state of the eviction manager between passes.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// Met thresholds, with the first of the observations without interruption.
    first_met: Vec<(Threshold, Instant)>,
    /// Thresholds whose grace period was over at the last step: they are met until the minimum reclaim is there.
    acted_on: Vec<Threshold>,
    /// The last observation of each condition.
    memory: Option<Instant>,
    disk: Option<Instant>,
    pid: Option<Instant>,
    /// When each signal was measured at the last step.
    measured: BTreeMap<Signal, Instant>,
}

/// What follows from new readings.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct ThresholdStates {
    /// The conditions of the node.
    pub pressures: Pressures,
    /// Thresholds to act on, the most urgent first.
    pub due: Vec<Threshold>,
    /// When the next grace period of a met threshold is over.
    pub next_due: Option<Instant>,
}

impl History {
    /// Takes new readings. A condition is true from the first observation of a met threshold, whatever its grace period, and
    /// until `transition` has passed since the last one.
    pub(super) fn step(
        &mut self,
        thresholds: &[Threshold],
        readings: &Readings,
        transition: Duration,
        now: Instant,
    ) -> ThresholdStates {
        let mut met: Vec<Threshold> = thresholds.iter().filter(|t| is_met(t, readings, false)).copied().collect();
        let unresolved: Vec<Threshold> = self.acted_on.iter().filter(|t| is_met(t, readings, true)).copied().collect();
        let unresolved: Vec<Threshold> = unresolved.into_iter().filter(|threshold| !met.contains(threshold)).collect();
        met.extend(unresolved);
        let since = |threshold: &Threshold| {
            let known = self.first_met.iter().find(|(known, _)| known == threshold);
            known.map_or(now, |(_, since)| *since)
        };
        self.first_met = met.iter().map(|threshold| (*threshold, since(threshold))).collect();
        let pressures = self.conditions(&met, transition, now);
        let ends = self.first_met.iter().map(|(threshold, since)| (*threshold, *since + threshold.grace));
        let (over, pending): (Vec<_>, Vec<_>) = ends.partition(|(_, end)| *end <= now);
        self.acted_on = over.into_iter().map(|(threshold, _)| threshold).collect();
        let is_new = |threshold: &Threshold| {
            let reading = readings.signals.get(&threshold.signal);
            let before = self.measured.get(&threshold.signal);
            reading.is_some_and(|reading| before.is_none_or(|before| reading.at > *before))
        };
        let mut due: Vec<Threshold> = self.acted_on.iter().filter(|threshold| is_new(threshold)).copied().collect();
        // What has to precede an eviction for a disk may take long. Upstream has no order but for memory.
        due.sort_by_key(|threshold| {
            let resource = Resource::of(threshold.signal);
            (resource != Resource::Memory, resource.is_of_disk(), threshold.signal)
        });
        self.measured = readings.signals.iter().map(|(signal, reading)| (*signal, reading.at)).collect();
        ThresholdStates { pressures, due, next_due: pending.into_iter().map(|(_, end)| end).min() }
    }

    fn conditions(&mut self, met: &[Threshold], transition: Duration, now: Instant) -> Pressures {
        for threshold in met {
            let observed = match Resource::of(threshold.signal) {
                Resource::Memory => &mut self.memory,
                Resource::EphemeralStorage | Resource::Inodes => &mut self.disk,
                Resource::Pids => &mut self.pid,
            };
            *observed = Some(now);
        }
        let holds = |observed: Option<Instant>| {
            observed.is_some_and(|at| at == now || now.saturating_duration_since(at) < transition)
        };
        Pressures { memory: holds(self.memory), disk: holds(self.disk), pid: holds(self.pid) }
    }

    /// A pressure policy acts because memory runs short: the condition is true until `transition` has passed.
    pub(super) fn observe_memory(&mut self, transition: Duration, now: Instant) -> Pressures {
        self.memory = Some(now);
        self.conditions(&[], transition, now)
    }

    /// When the next condition ends, if it is not observed again.
    pub(super) fn next_transition(&self, transition: Duration, now: Instant) -> Option<Instant> {
        let ends = [self.memory, self.disk, self.pid].into_iter().flatten().map(|at| at + transition);
        ends.filter(|end| *end > now).min()
    }
}
