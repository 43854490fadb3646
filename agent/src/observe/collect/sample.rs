//! Measures pods and the node. Keeps the previous values, so that a measurement yields rates and causes. Blocks, but reads
//! no disk.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use super::paths::PodPaths;
use super::stalls;
use super::stalls::PodWindow;
use crate::cgroups::CgroupId;
use crate::cgroups::Hierarchies;
use crate::cgroups::usage::CgroupCounters;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::Pressure;
use crate::cgroups::usage::PressureLine;
use crate::kernel::bpf::Losses;
use crate::kernel::bpf::Probes;
use crate::observe::record::PodName;
use crate::observe::record::PressureRecord;
use crate::observe::record::PressureScope;
use crate::observe::record::Reclaim;
use crate::observe::record::Stall;
use crate::observe::record::StallRecord;
use crate::observe::record::Waiting;
use crate::pressure::ReclaimStalls;

/// The least time between two searches for cgroups of pods that were not found.
const SEARCH: Duration = Duration::from_secs(10);
/// Rates over less than this are not computed.
pub(super) const LEAST_WINDOW: Duration = Duration::from_millis(100);

/// A pod to be measured, with the names and ids of its containers.
#[derive(Clone, Debug, Default)]
pub(super) struct Target {
    pub(super) pod: PodName,
    pub(super) containers: Vec<(String, String)>,
}

/// One measurement.
#[derive(Debug, Default)]
pub(super) struct Measurement {
    /// Pressure of the pods.
    pub(super) pods: Vec<PressureRecord>,
    /// Which pods wait, and why.
    pub(super) stalls: Vec<StallRecord>,
    /// OOM kills of each pod.
    pub(super) oom_kills: Vec<CountedKills>,
    /// Records that the probes have lost since they were loaded.
    pub(super) losses: Losses,
    /// Pressure of the node, which ends the measurement.
    pub(super) node: Option<PressureRecord>,
}

/// OOM kills that the cgroups of a pod have counted since they were created.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct CountedKills {
    pub(super) pod: PodName,
    /// In all its cgroups, removed ones included; absent with v1.
    pub(super) of_pod: Option<u64>,
    /// In containers that exist, by name and id.
    pub(super) of_containers: Vec<(String, String, u64)>,
}

/// Measures.
pub(super) struct Sampler {
    hierarchies: Hierarchies,
    root: String,
    probes: Option<Probes>,
    /// Counted by the probes.
    stalls: Option<ReclaimStalls>,
    paths: PodPaths,
    searched: Option<Instant>,
    previous: HashMap<String, Previous>,
    node_cpu: Option<(u64, u64)>,
    taken: Option<Instant>,
}

/// What was measured of a pod before.
#[derive(Clone, Debug, Default)]
struct Previous {
    counters: CgroupCounters,
    /// Since the pod is observed.
    reclaim: Reclaim,
    /// By cgroup of the containers, as the kernel counts.
    reclaims: HashMap<CgroupId, (u64, Duration)>,
}

impl Sampler {
    pub(super) fn new(hierarchies: Hierarchies, root: String, probes: Option<Probes>) -> Self {
        let stalls = probes.clone().zip(hierarchies.containers.clone());
        Self {
            stalls: stalls.map(|(probes, hierarchy)| ReclaimStalls::new(Arc::new(probes), hierarchy)),
            hierarchies,
            root,
            probes,
            paths: PodPaths::default(),
            searched: None,
            previous: HashMap::new(),
            node_cpu: None,
            taken: None,
        }
    }

    /// Measures these pods and the node.
    pub(super) fn measure(&mut self, targets: &[Target]) -> Measurement {
        self.find_paths(targets);
        let now = Instant::now();
        let elapsed = self.taken.replace(now).map(|before| now - before).filter(|elapsed| *elapsed >= LEAST_WINDOW);
        let mut measurement = Measurement::default();
        let mut windows = Vec::new();
        let mut previous = std::mem::take(&mut self.previous);
        for target in targets {
            let before = previous.remove(&target.pod.uid);
            let Some(path) = self.paths.pods.get(&target.pod.uid).cloned() else {
                // Its cgroup is gone: what was measured last is no longer true.
                measurement.pods.extend(before.map(|before| self.vanished(target, &before)));
                continue;
            };
            let place = CgroupPlace::at(&self.hierarchies.layout, &path);
            let counters = place.counters();
            let mut current = Previous { counters, ..before.clone().unwrap_or_default() };
            self.count_reclaim(&mut current, target);
            let window = before.zip(elapsed).map(|(before, elapsed)| window(target, &before, &current, elapsed));
            measurement.pods.push(self.pod_record(target, &current, window.as_ref()));
            measurement.oom_kills.push(self.oom_kills(target, counters));
            windows.extend(window);
            self.previous.insert(target.pod.uid.clone(), current);
        }
        if let Some(elapsed) = elapsed {
            measurement.stalls = stalls::attribute(&windows, elapsed.as_secs_f64());
        }
        measurement.losses = self.probes.as_ref().map(Probes::losses).unwrap_or_default();
        measurement.node = Some(self.node_record());
        measurement
    }

    /// Looks for cgroups if some pod or container is not known, but not all the time: a pod that was created just now has
    /// none, and pods outside of `kubepods` never have one.
    fn find_paths(&mut self, targets: &[Target]) {
        let Some(hierarchy) = &self.hierarchies.containers else { return };
        let known = |target: &Target| {
            self.paths.pods.contains_key(&target.pod.uid)
                && target.containers.iter().all(|(_, id)| self.paths.containers.contains_key(id))
        };
        let pods: HashSet<&str> = targets.iter().map(|target| target.pod.uid.as_str()).collect();
        if targets.iter().all(known) && self.paths.pods.len() <= 2 * pods.len() + 64 {
            return;
        }
        let unknown_pod = targets.iter().any(|target| !self.paths.pods.contains_key(&target.pod.uid));
        if self.searched.is_none_or(|at| at.elapsed() >= if unknown_pod { SEARCH / 10 } else { SEARCH }) {
            self.paths = PodPaths::find(hierarchy, &self.root);
            self.searched = Some(Instant::now());
        }
    }

    /// Adds the stalls of the containers since the last measurement: a container's counts end with it.
    fn count_reclaim(&self, current: &mut Previous, target: &Target) {
        let Some(counted) = &self.stalls else { return };
        let mut reclaims = HashMap::new();
        let paths = target.containers.iter().filter_map(|(_, id)| self.paths.containers.get(id));
        for (id, stalls) in paths.flat_map(|path| counted.by_cgroup(path)) {
            let (count, time) = current.reclaims.get(&id).copied().unwrap_or_default();
            current.reclaim.stalls += stalls.count.saturating_sub(count);
            current.reclaim.total_seconds += stalls.time.saturating_sub(time).as_secs_f64();
            reclaims.insert(id, (stalls.count, stalls.time));
        }
        current.reclaims = reclaims;
    }

    fn pod_record(&self, target: &Target, current: &Previous, window: Option<&PodWindow>) -> PressureRecord {
        let counters = &current.counters;
        PressureRecord {
            cpu: counters.cpu_pressure.map(waiting),
            memory: counters.memory_pressure.map(waiting),
            io: counters.io_pressure.map(waiting),
            reclaim: self.stalls.is_some().then_some(current.reclaim),
            cpus: window.map(|window| rounded(window.cpus)),
            memory_bytes: counters.memory,
            memory_limit_bytes: counters.memory_limit,
            ..PressureRecord::empty(PressureScope::Pod, Some(target.pod.clone()))
        }
    }

    /// What is left of a pod without a cgroup: what was counted for it.
    fn vanished(&self, target: &Target, before: &Previous) -> PressureRecord {
        PressureRecord {
            reclaim: self.stalls.is_some().then_some(before.reclaim),
            ..PressureRecord::empty(PressureScope::Pod, Some(target.pod.clone()))
        }
    }

    fn oom_kills(&self, target: &Target, counters: CgroupCounters) -> CountedKills {
        let layout = &self.hierarchies.layout;
        let of_container = |(name, id): &(String, String)| {
            let path = self.paths.containers.get(id)?;
            Some((name.clone(), id.clone(), CgroupPlace::at(layout, path).oom_kills()?))
        };
        CountedKills {
            pod: target.pod.clone(),
            of_pod: layout.is_v2().then_some(counters.oom_kills),
            of_containers: target.containers.iter().filter_map(of_container).collect(),
        }
    }

    fn node_record(&mut self) -> PressureRecord {
        let file = |name: &str| fs::read_to_string(Path::new("/proc/pressure").join(name)).ok();
        let pressure = |name: &str| file(name).map(|text| waiting(Pressure::parse(&text)));
        let memory = node_memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
        let cpu = busy_and_total(&fs::read_to_string("/proc/stat").unwrap_or_default());
        let before = std::mem::replace(&mut self.node_cpu, cpu);
        PressureRecord {
            cpu: pressure("cpu"),
            memory: pressure("memory"),
            io: pressure("io"),
            cpus: cpu.zip(before).and_then(|(now, before)| cpus(before, now)),
            memory_bytes: memory.map(|(used, _)| used),
            memory_limit_bytes: memory.map(|(_, total)| total),
            ..PressureRecord::empty(PressureScope::Node, None)
        }
    }
}

fn window(target: &Target, before: &Previous, now: &Previous, elapsed: Duration) -> PodWindow {
    let seconds = elapsed.as_secs_f64();
    let percent = |time: f64| (time / seconds * 100.0).clamp(0.0, 100.0);
    let waited = |of: fn(&CgroupCounters) -> Option<Pressure>| {
        let (then, now) = (of(&before.counters)?.some.total, of(&now.counters)?.some.total);
        Some(percent(now.saturating_sub(then) as f64 / 1e6))
    };
    let reclaimed = percent(now.reclaim.total_seconds - before.reclaim.total_seconds);
    let (then, now) = (&before.counters, &now.counters);
    PodWindow {
        pod: target.pod.clone(),
        cpu_wait: waited(|counters| counters.cpu_pressure),
        memory_wait: waited(|counters| counters.memory_pressure).or(Some(reclaimed)),
        io_wait: waited(|counters| counters.io_pressure),
        cpus: now.cpu.unwrap_or(0).saturating_sub(then.cpu.unwrap_or(0)) as f64 / 1e9 / seconds,
        throttled: percent(now.throttled.saturating_sub(then.throttled) as f64 / 1e9),
        growth: now.memory.unwrap_or(0).saturating_sub(then.memory.unwrap_or(0)),
        limit_hits: now.limit_hits.saturating_sub(then.limit_hits),
        high_hits: now.high_hits.saturating_sub(then.high_hits),
        io_bytes: now.io_bytes.saturating_sub(then.io_bytes),
    }
}

fn waiting(pressure: Pressure) -> Waiting {
    let line = |line: PressureLine| Stall {
        avg10: line.avg10,
        avg60: line.avg60,
        avg300: line.avg300,
        total_seconds: line.total as f64 / 1e6,
    };
    Waiting { some: line(pressure.some), full: line(pressure.full) }
}

/// To thousandths.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Memory in use and all memory, in bytes, from `/proc/meminfo`.
fn node_memory(table: &str) -> Option<(u64, u64)> {
    let of = |name: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    let (total, available) = (of("MemTotal")?, of("MemAvailable")?);
    Some((total.saturating_sub(available).saturating_mul(1024), total.saturating_mul(1024)))
}

/// Busy ticks of all processors, and all ticks of one: the first two lines of `/proc/stat`.
fn busy_and_total(table: &str) -> Option<(u64, u64)> {
    let ticks = |name: &str| -> Option<Vec<u64>> {
        let line = table.lines().find(|line| line.split(' ').next() == Some(name))?;
        // Times of guests are part of user and nice.
        line.split_ascii_whitespace().skip(1).take(8).map(|tick| tick.parse().ok()).collect()
    };
    let (all, one) = (ticks("cpu")?, ticks("cpu0")?);
    let idle = all.get(3)?.saturating_add(*all.get(4)?);
    Some((all.iter().sum::<u64>().saturating_sub(idle), one.iter().sum()))
}

fn cpus(before: (u64, u64), now: (u64, u64)) -> Option<f64> {
    let elapsed = now.1.checked_sub(before.1).filter(|elapsed| *elapsed > 0)?;
    Some(rounded(now.0.saturating_sub(before.0) as f64 / elapsed as f64))
}

#[cfg(test)]
#[path = "sample_tests.rs"]
mod tests;
