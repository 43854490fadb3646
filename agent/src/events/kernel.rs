//! Records of the probes as hints: exits of init processes, OOM kills.
//!
//! Loads the probes, watches the cgroups of pods (the probes watch those created below), maps cgroups to containers, and
//! forwards what concerns a container. If the probes cannot be loaded, their sensors are down with a reason.

use std::collections::HashSet;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ExitFacts;
use super::Expect;
use super::Hint;
use super::RelistReason;
use super::oom::OomSource;
use super::oom::kills_of;
use super::oom_fallback;
use super::readings::Readings;
use super::readings::Step;
use super::sensors::Sensor;
use super::sensors::SensorState;
use super::sensors::SensorStates;
use crate::cgroups::CgroupId;
use crate::cgroups::Hierarchy;
use crate::kernel::bpf;
use crate::kernel::bpf::Exit;
use crate::kernel::bpf::ExitStatus;
use crate::kernel::bpf::KernelRecord;
use crate::kernel::bpf::Loaded;
use crate::kernel::bpf::Losses;
use crate::kernel::bpf::ProbeOutput;
use crate::kernel::bpf::ProbeStatus;
use crate::kernel::bpf::Probes;
use crate::kernel::bpf::Records;
use crate::kernel::bpf::WatchError;
use crate::kernel::clock::BootTime;
use crate::kernel::index::ContainerIndex;
use crate::kernel::index::place_of;
use crate::kernel::kmsg::KernelLog;
use crate::kernel::oom_log::OomLogParser;
use crate::metrics::Metrics;
use crate::model::CgroupRole;
use crate::model::KernelMoment;

/// Options of the kernel sensors.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// The cgroup of all pods in the watched hierarchy (`/kubepods`, `/` for all cgroups).
    pub cgroup_root: String,
    /// The kernel's type information.
    pub btf: PathBuf,
    /// The kernel log, for OOM kills whose records were lost.
    pub log: PathBuf,
    /// Bytes of the ring buffer of exits and OOM kills; `None` for the default size.
    pub exits_ring: Option<u32>,
    /// Cgroups of containers that are created or removed are hints as well: for an observer, which starts none itself.
    pub announce_containers: bool,
    /// Counts lost records.
    pub metrics: Arc<Metrics>,
}

/// Counters that were read after a loss are compared when all records written before have been read: the kernel counts a
/// kill before the probe records it.
const SETTLE: Duration = Duration::from_millis(20);
/// How often cgroups of pods that could not be watched are tried again: for lack of memory, or as there were too many.
const WATCH_AGAIN: Duration = Duration::from_secs(60);
/// Lines of the kernel log that are read after a loss.
const MAX_LOG_LINES: usize = 20_000;
/// Lines after which other tasks have the thread: reading this many takes less than a millisecond.
const LOG_LINES_AT_ONCE: usize = 128;

/// Loads the probes. `None` if they cannot be loaded. The future forwards their records until `shutdown`, and is to be run
/// in a task.
pub async fn start(
    options: KernelOptions,
    hierarchy: Hierarchy,
    hints: mpsc::Sender<Hint>,
    sensor_states: SensorStates,
    shutdown: CancellationToken,
) -> Option<(Probes, impl Future<Output = ()> + Send + 'static)> {
    let loading =
        bpf::Options { btf: options.btf.clone(), hierarchy: hierarchy.clone(), exits_ring: options.exits_ring };
    let Loaded { probes, records, status } = match bpf::load(loading).await {
        Ok(loaded) => loaded,
        Err(error) => {
            for sensor in [Sensor::Exits, Sensor::Oom, Sensor::Cgroups, Sensor::Reclaim] {
                sensor_states.set(sensor, SensorState::Down(error.to_string()));
            }
            return None;
        }
    };
    report(&sensor_states, &status);
    let mut follower = Follower {
        exits: probes_state(&status, "process"),
        records,
        probes: probes.clone(),
        index: ContainerIndex::new(),
        ooms: OomSource::new(hierarchy.clone()),
        log: KernelLog::open(&options.log).ok(),
        lost: None,
        watch_again: None,
        readings: Readings::new(),
        known: HashSet::new(),
        removed: Vec::new(),
        hierarchy,
        hints,
        sensor_states,
        options,
    };
    let walked = probes.watch_tree(&follower.hierarchy, &follower.options.cgroup_root);
    follower.walked(walked);
    follower.ooms.begin(&follower.index);
    let forwarding = async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = follower.follow() => {}
        }
    };
    Some((probes, forwarding))
}

fn report(sensor_states: &SensorStates, status: &[ProbeStatus]) {
    for (sensor, prefix) in
        [(Sensor::Exits, "process"), (Sensor::Oom, "oom"), (Sensor::Cgroups, "cgroup"), (Sensor::Reclaim, "reclaim")]
    {
        sensor_states.set(sensor, probes_state(status, prefix));
    }
}

/// The state of a sensor whose programs have this prefix.
fn probes_state(status: &[ProbeStatus], prefix: &str) -> SensorState {
    let programs = status.iter().filter(|probe| probe.program.starts_with(prefix));
    state(&programs.collect::<Vec<_>>())
}

/// Up with all its programs, down without any, degraded in between.
fn state(programs: &[&ProbeStatus]) -> SensorState {
    let down: Vec<String> =
        programs.iter().filter_map(|p| p.down.as_ref().map(|why| format!("{}: {why}", p.program))).collect();
    match down.len() {
        0 => SensorState::Up,
        some if some < programs.len() => SensorState::Degraded(down.join("; ")),
        _ => SensorState::Down(down.join("; ")),
    }
}

/// What is to be read of the cgroups of pods.
#[derive(Clone, Copy, Debug, Default)]
struct Request {
    /// Watch all of them.
    walk: bool,
    /// Counters of OOM kills in containers.
    counters: bool,
}

/// What was read.
struct Reading {
    /// The cgroups of pods.
    walked: Option<Result<CgroupPaths, WatchError>>,
    counters: Option<Vec<(CgroupId, u64)>>,
}

/// Cgroups with their paths.
type CgroupPaths = Vec<(CgroupId, String)>;

/// Reads what is requested; `containers` are the known ones. Blocks.
fn read(probes: &Probes, hierarchy: &Hierarchy, root: &str, request: Request, containers: CgroupPaths) -> Reading {
    let walked = request.walk.then(|| probes.watch_tree(hierarchy, root));
    let counters = request.counters.then(|| {
        let found = walked.as_ref().and_then(|walked| walked.as_ref().ok());
        let of_containers = |found: &CgroupPaths| -> CgroupPaths {
            found.iter().filter(|(_, path)| place_of(path).container.is_some()).cloned().collect()
        };
        let containers = found.map_or(containers, of_containers).into_iter();
        containers.filter_map(|(id, path)| Some((id, kills_of(hierarchy, &path)?))).collect()
    });
    Reading { walked, counters }
}

struct Follower {
    records: Records,
    probes: Probes,
    index: ContainerIndex,
    ooms: OomSource,
    log: Option<KernelLog>,
    /// Records were lost: counters of OOM kills, and when to compare them.
    lost: Option<(Instant, Vec<(CgroupId, u64)>)>,
    /// Not all cgroups of pods are watched: when that is tried again.
    watch_again: Option<Instant>,
    readings: Readings<Request, Reading>,
    /// The cgroups that were known when a walk began.
    known: HashSet<CgroupId>,
    /// Those whose removal was recorded since.
    removed: Vec<CgroupId>,
    hierarchy: Hierarchy,
    hints: mpsc::Sender<Hint>,
    sensor_states: SensorStates,
    /// The state of that sensor while all cgroups of pods are watched.
    exits: SensorState,
    options: KernelOptions,
}

impl Follower {
    async fn follow(mut self) {
        loop {
            let due = self.lost.as_ref().map(|(due, _)| *due);
            let again = self.watch_again;
            let hints = tokio::select! {
                biased;
                step = self.readings.next() => self.on_step(step),
                // Before the counters are compared, which contain the kills of these records.
                next = self.records.next() => match next {
                    Ok(ProbeOutput::Record(record)) => self.hints(record),
                    Ok(ProbeOutput::Lost(lost)) => vec![self.on_loss(&lost)],
                    Err(error) => {
                        let reason = format!("reading the ring buffers: {error}");
                        self.sensor_states.set(Sensor::Exits, SensorState::Down(reason.clone()));
                        self.sensor_states.set(Sensor::Oom, SensorState::Down(reason));
                        return;
                    }
                },
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.unrecorded_kills().await
                }
                () = tokio::time::sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {
                    self.watch_again = None;
                    self.readings.request(|request| request.walk = true);
                    Vec::new()
                }
            };
            if send(&self.hints, hints).await.is_err() {
                return;
            }
        }
    }

    fn on_step(&mut self, step: Step<Request, Reading>) -> Vec<Hint> {
        match step {
            Step::Begin(request) => self.begin(request),
            Step::Ended(Ok(Reading { walked, counters })) => {
                if let Some(counters) = counters {
                    self.lost = Some((Instant::now() + SETTLE, counters));
                }
                if walked.is_some_and(|walked| self.walked(walked)) {
                    // Exits in cgroups that were not watched have no record.
                    return vec![Hint::Gap(RelistReason::Dropped)];
                }
            }
            Step::Ended(Err(error)) if error.is_panic() => resume_unwind(error.into_panic()),
            // The agent is shutting down.
            Step::Ended(Err(_)) => {}
        }
        Vec::new()
    }

    fn begin(&mut self, request: Request) {
        // From before the walk: what is created meanwhile has a record.
        self.known = if request.walk { self.index.existing() } else { HashSet::new() };
        self.removed.clear();
        let containers = self.index.containers().map(|(id, place)| (id, place.path.clone())).collect();
        let (probes, hierarchy) = (self.probes.clone(), self.hierarchy.clone());
        let root = self.options.cgroup_root.clone();
        self.readings.begin(move || read(&probes, &hierarchy, &root, request, containers));
    }

    /// Adds the cgroups of all pods to the index, and notes as removed those whose removal was not recorded. False if not
    /// all are watched.
    fn walked(&mut self, walked: Result<CgroupPaths, WatchError>) -> bool {
        match walked {
            Ok(found) => {
                self.index.found(&std::mem::take(&mut self.known), &found);
                // They may have been found before.
                self.removed.drain(..).for_each(|id| self.index.cgroup_removed(id));
                self.watch_again = None;
                self.sensor_states.set(Sensor::Exits, self.exits.clone());
                true
            }
            Err(error) => {
                self.watch_again = Some(Instant::now() + WATCH_AGAIN);
                self.sensor_states.set(Sensor::Exits, SensorState::Degraded(error.to_string()));
                false
            }
        }
    }

    fn on_loss(&mut self, lost: &Losses) -> Hint {
        let Losses { exits, cgroups, watches } = *lost;
        for (queue, count) in [("exits", exits), ("cgroups", cgroups), ("watches", watches)] {
            if count > 0 {
                self.options.metrics.sensors.dropped(queue, count);
            }
        }
        tracing::warn!(exits, cgroups, watches, "kernel records lost");
        self.readings.request(|request| {
            request.walk |= cgroups > 0 || watches > 0;
            request.counters = true;
        });
        Hint::Gap(RelistReason::Dropped)
    }

    /// OOM kills whose records were lost: from the kernel log, then from counters what that does not contain.
    async fn unrecorded_kills(&mut self) -> Vec<Hint> {
        let Some((_, counters)) = self.lost.take() else { return Vec::new() };
        let (mut parser, mut entries) = (OomLogParser::default(), Vec::new());
        for count in 1..=MAX_LOG_LINES {
            if count.is_multiple_of(LOG_LINES_AT_ONCE) {
                tokio::task::yield_now().await;
            }
            let Some(line) = self.log.as_mut().and_then(|log| log.try_next().ok().flatten()) else { break };
            entries.extend(parser.record(&line, |pid| self.ooms.cgroup_of(pid)));
        }
        entries.extend(parser.release());
        let mut records = Vec::new();
        for entry in entries {
            let moment = oom_fallback::moment(entry.at_micros);
            records.extend(self.ooms.on_log(entry, moment));
        }
        records.extend(self.ooms.reconcile(&self.index, counters));
        records.into_iter().map(|record| Hint::Oom(Box::new(record))).collect()
    }

    fn hints(&mut self, record: KernelRecord) -> Vec<Hint> {
        let at = moment(record.at());
        match record {
            KernelRecord::CgroupCreated(event) => {
                self.index.cgroup_created(event.id, Some(event.parent), &event.path);
                self.ooms.created(event.id);
                self.announcement(event.id, Expect::Started).into_iter().collect()
            }
            KernelRecord::CgroupRemoved(event) => {
                self.index.cgroup_removed(event.id);
                // Counters that are read for a comparison are those of cgroups that may be gone by now.
                if self.readings.is_running() {
                    self.removed.push(event.id);
                } else if self.lost.is_none() {
                    self.ooms.removed(event.id);
                }
                self.announcement(event.id, Expect::Stopped).into_iter().collect()
            }
            KernelRecord::Exit(exit) => self.exit(&exit, at).into_iter().collect(),
            KernelRecord::Oom(oom) => {
                let records = self.ooms.on_record(&self.index, &oom, at);
                records.into_iter().map(|record| Hint::Oom(Box::new(record))).collect()
            }
        }
    }

    /// The hint that the cgroup of a container was created or removed, if such hints are wanted.
    fn announcement(&self, id: CgroupId, expect: Expect) -> Option<Hint> {
        let place = self.index.by_cgroup(id).filter(|place| place.role == CgroupRole::Container)?;
        let (uid, id) = (place.pod.clone()?, place.container.clone()?);
        self.options.announce_containers.then_some(Hint::Runtime { uid, id, expect, exited: None })
    }

    /// Exits of inits of PID namespaces, and of OOM victims, which may be main processes without a namespace of their own.
    fn exit(&mut self, exit: &Exit, at: KernelMoment) -> Option<Hint> {
        let oom_victim = self.ooms.is_victim(exit);
        if !exit.pid_ns_init && !oom_victim {
            return None;
        }
        let container = self.index.by_cgroup(exit.cgroup?)?.container.clone()?;
        Some(Hint::Exit(ExitFacts {
            container,
            pid: exit.pid,
            exit_code: exit.status.code(),
            signalled: matches!(exit.status, ExitStatus::Signal(_)),
            oom_victim,
            at,
        }))
    }
}

/// Waits while the channel is full; records that the kernel drops meanwhile are counted.
async fn send(to: &mpsc::Sender<Hint>, hints: Vec<Hint>) -> Result<(), mpsc::error::SendError<Hint>> {
    for hint in hints {
        to.send(hint).await?;
    }
    Ok(())
}

fn moment(at: BootTime) -> KernelMoment {
    let now = Instant::now();
    BootTime::now().map_or(KernelMoment(now), |boot_now| at.to_moment(boot_now, now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sensor_is_degraded_without_some_of_its_programs_and_down_without_all() {
        let probe = |program: &'static str, down: Option<&str>| ProbeStatus { program, down: down.map(str::to_owned) };
        let status = [
            probe("process_exit", None),
            probe("oom_mark_victim", Some("no tracepoint")),
            probe("oom_kill", None),
            probe("cgroup_mkdir", Some("no BTF")),
            probe("cgroup_rmdir", Some("not permitted")),
        ];
        let sensor_states = SensorStates::default();
        report(&sensor_states, &status);
        for (sensor, expected) in [
            (Sensor::Exits, SensorState::Up),
            (Sensor::Oom, SensorState::Degraded("oom_mark_victim: no tracepoint".to_owned())),
            (Sensor::Cgroups, SensorState::Down("cgroup_mkdir: no BTF; cgroup_rmdir: not permitted".to_owned())),
        ] {
            assert_eq!(sensor_states.get(sensor), Some(expected));
        }
    }
}
