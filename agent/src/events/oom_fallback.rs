//! OOM kills without the probe: the kernel log, and the counters of cgroups for what it leaves out.
//!
//! The log names process, cgroup and limit, except while kills are frequent; counters name the cgroup only, as long as it
//! exists.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use nix::time::ClockId;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::Hint;
use super::oom::OomSource;
use super::sensors::Sensor;
use super::sensors::SensorState;
use super::sensors::SensorStates;
use crate::cgroups::CgroupId;
use crate::cgroups::Hierarchy;
use crate::kernel::index::ContainerIndex;
use crate::kernel::kmsg::KernelLog;
use crate::kernel::oom_log::OomLogParser;
use crate::model::KernelMoment;
use crate::model::OomRecord;

/// How often counters are read: nothing announces them.
const PERIOD: Duration = Duration::from_secs(10);

/// Where OOM kills are looked for.
#[derive(Clone, Debug)]
pub struct FallbackOptions {
    /// The cgroup of all pods in the watched hierarchy.
    pub cgroup_root: String,
    /// The kernel log.
    pub log: PathBuf,
}

/// Forwards OOM kills from now on until `shutdown`. Reads the counters of all containers first, which the kernel answers
/// from memory.
pub fn start(
    options: FallbackOptions,
    hierarchy: Hierarchy,
    hints: mpsc::Sender<Hint>,
    sensor_states: &SensorStates,
    shutdown: CancellationToken,
) {
    let log = match KernelLog::open(&options.log) {
        Ok(log) => {
            sensor_states.set(Sensor::KernelLog, SensorState::Up);
            Some(log)
        }
        Err(error) => {
            let reason = format!("{}: {error}", options.log.display());
            sensor_states.set(Sensor::KernelLog, SensorState::Down(reason));
            None
        }
    };
    let mut fallback = Fallback {
        source: OomSource::new(hierarchy.clone()),
        index: ContainerIndex::new(),
        known: HashSet::new(),
        parser: OomLogParser::default(),
        hierarchy,
        root: options.cgroup_root,
    };
    fallback.walk();
    fallback.source.begin(&fallback.index);
    let sensor_states = sensor_states.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = fallback.follow(log, hints, sensor_states) => {}
        }
    });
}

struct Fallback {
    source: OomSource,
    index: ContainerIndex,
    known: HashSet<CgroupId>,
    parser: OomLogParser,
    hierarchy: Hierarchy,
    root: String,
}

impl Fallback {
    async fn follow(&mut self, mut log: Option<KernelLog>, hints: mpsc::Sender<Hint>, sensor_states: SensorStates) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            let records: Vec<OomRecord> = tokio::select! {
                line = next(&mut log) => match line {
                    Ok(line) => self.on_line(&line).into_iter().collect(),
                    Err(error) => {
                        sensor_states.set(Sensor::KernelLog, SensorState::Down(error.to_string()));
                        log = None;
                        continue;
                    }
                },
                _ = ticks.tick() => self.on_tick(),
            };
            for record in records {
                if hints.send(Hint::Oom(Box::new(record))).await.is_err() {
                    return;
                }
            }
        }
    }

    fn on_line(&mut self, line: &str) -> Option<OomRecord> {
        let entry = self.parser.record(line)?;
        let moment = moment(entry.at_micros);
        self.source.on_log(entry, moment)
    }

    /// Kills that the log does not contain.
    fn on_tick(&mut self) -> Vec<OomRecord> {
        for id in self.walk() {
            self.source.created(id);
        }
        let counters = self.source.counters(&self.index);
        self.source.reconcile(&self.index, counters)
    }

    /// Brings the index up to date; returns the new cgroups.
    fn walk(&mut self) -> Vec<CgroupId> {
        let root = self.hierarchy.id_of(&self.root).ok().map(|id| (id, self.root.clone()));
        let mut found: Vec<(CgroupId, String)> = root.into_iter().collect();
        let mut at = 0;
        while let Some((_, path)) = found.get(at).cloned() {
            found.extend(self.hierarchy.children(&path));
            at += 1;
        }
        let present: HashSet<CgroupId> = found.iter().map(|(id, _)| *id).collect();
        self.known.difference(&present).for_each(|id| self.index.cgroup_removed(*id));
        let new: Vec<_> = found.into_iter().filter(|(id, _)| !self.known.contains(id)).collect();
        new.iter().for_each(|(id, path)| self.index.cgroup_created(*id, None, path));
        self.known = present;
        new.into_iter().map(|(id, _)| id).collect()
    }
}

/// The next record of the log; never without one.
async fn next(log: &mut Option<KernelLog>) -> std::io::Result<String> {
    match log {
        Some(log) => log.next().await,
        None => std::future::pending().await,
    }
}

/// A time of the log, whose clock is close to the monotonic one.
pub(super) fn moment(at_micros: u64) -> KernelMoment {
    let now = Instant::now();
    let since_boot = nix::time::clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    let age = since_boot.saturating_sub(Duration::from_micros(at_micros));
    KernelMoment(now.checked_sub(age).unwrap_or(now))
}
