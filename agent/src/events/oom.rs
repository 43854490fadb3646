//! OOM kills as evidence: records of the probe with the cgroups they name, counters of cgroups, and lines of the kernel
//! log.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::cgroups::CgroupId;
use crate::cgroups::Controller;
use crate::cgroups::Hierarchy;
use crate::cgroups::HierarchyKind;
use crate::cgroups::arithmetic;
use crate::kernel::bpf;
use crate::kernel::bpf::Exit;
use crate::kernel::bpf::Oom;
use crate::kernel::clock::BootTime;
use crate::kernel::index::ContainerIndex;
use crate::kernel::index::place_of;
use crate::kernel::oom_log::OomLogEntry;
use crate::kernel::oom_log::OomLogLimit;
use crate::kernel::proc;
use crate::kernel::read;
use crate::model::CgroupPlace;
use crate::model::KernelMoment;
use crate::model::OomConfidence;
use crate::model::OomLimit;
use crate::model::OomMemory;
use crate::model::OomRecord;
use crate::oom::CounterChange;
use crate::oom::KillCounters;

/// Victims that are remembered, to recognise their exits, and kills that the log reports too.
const MAX_RECENT: usize = 4096;
/// How far the times of one kill by two sources lie apart at most, soon after the boot.
const ONE_KILL: Duration = Duration::from_secs(600);
/// The clock of the kernel log is not adjusted. It drifts from the others by less than this part of the time since the boot.
const DRIFT: u64 = 1000;
/// Unreported kills of one cgroup that are reported one by one; more can be lost only while nothing is read for long.
const MAX_UNREPORTED: u64 = 10_000;
/// A counter file has a few lines.
const COUNTER_FILE_LIMIT: u64 = 4096;
/// From here on a limit is none.
const UNLIMITED_KIB: u64 = 1 << 52;

/// Converts what the kernel reports of OOM kills to evidence.
#[derive(Debug)]
pub(super) struct OomSource {
    hierarchy: Hierarchy,
    /// Pids of the kernel are those of `/proc`: not in a node that is a container (kind).
    sees_kernel_pids: bool,
    counters: KillCounters,
    /// When the counters were first read: they contain earlier kills.
    begun: Option<BootTime>,
    /// Processes that were exiting when the kernel marked them.
    exiting: VecDeque<u32>,
    /// Pids of killed processes, and when they were killed: another process may have the pid later.
    killed: VecDeque<(u32, KernelMoment)>,
}

impl OomSource {
    pub(super) fn new(hierarchy: Hierarchy) -> Self {
        let (counters, exiting, killed) = (KillCounters::default(), VecDeque::new(), VecDeque::new());
        let sees_kernel_pids = proc::in_host_pid_namespace();
        Self { hierarchy, sees_kernel_pids, counters, begun: None, exiting, killed }
    }

    /// A cgroup was created, and has no kills yet.
    pub(super) fn created(&mut self, id: CgroupId) {
        self.counters.begin(id.0, 0);
    }

    /// A cgroup was removed, and has no more kills.
    pub(super) fn removed(&mut self, id: CgroupId) {
        self.counters.remove(id.0);
    }

    /// Cgroups that exist when watching begins: earlier kills are not reported.
    pub(super) fn begin(&mut self, index: &ContainerIndex) {
        for (id, counter) in self.counters(index) {
            self.counters.begin(id.0, counter);
        }
        self.begun = BootTime::now();
    }

    /// Evidence of a record of the probe: none if it is no kill, more than one if records before it were lost.
    pub(super) fn on_record(&mut self, index: &ContainerIndex, oom: &Oom, moment: KernelMoment) -> Vec<OomRecord> {
        let is_early = self.begun.is_some_and(|begun| oom.at <= begun);
        let counted = oom.cgroup.zip(oom.kills).filter(|_| self.sees_memory_cgroups() && !is_early);
        let unreported = match counted.map(|(cgroup, kills)| self.counters.record(cgroup.0, kills, oom.group.is_some()))
        {
            Some(CounterChange::NotAKill) => {
                tracing::debug!(pid = oom.pid, "the OOM killer chose a process that was exiting already");
                push(&mut self.exiting, oom.pid);
                return Vec::new();
            }
            Some(CounterChange::Kill { unreported }) => unreported,
            None if is_early => 0,
            None => {
                oom.cgroup.into_iter().for_each(|cgroup| self.counters.uncounted(cgroup.0));
                0
            }
        };
        // The process that was exiting has gone unnoticed, and this one has its pid.
        self.exiting.retain(|pid| *pid != oom.pid);
        push(&mut self.killed, (oom.pid, moment));
        let record = self.record_of(index, oom, moment);
        let mut records = counter_records(unreported, record.place.clone());
        records.push(record);
        records
    }

    fn record_of(&self, index: &ContainerIndex, oom: &Oom, moment: KernelMoment) -> OomRecord {
        let known = oom.cgroup.and_then(|id| index.by_cgroup(id)).cloned();
        let place = known.or_else(|| self.cgroup_of(oom.pid).map(|path| place_of(&path)));
        OomRecord {
            pid: Some(oom.pid),
            comm: oom.victim.as_ref().map(|victim| victim.comm.clone()).unwrap_or_default(),
            limit: self.limit_of(index, oom, place.as_ref()),
            place,
            memory: oom.memory.map(|memory| bytes([memory.anon_kib, memory.file_kib, memory.shmem_kib])),
            root: oom.root,
            host_pid_namespace: oom.host_pid_namespace,
            group: oom.group.map(|group| group.0),
            ..OomRecord::new(OomConfidence::Kernel, moment)
        }
    }

    fn limit_of(&self, index: &ContainerIndex, oom: &Oom, victim: Option<&CgroupPlace>) -> OomLimit {
        let (cgroup, kib) = match oom.limit {
            bpf::OomLimit::Exceeded { cgroup, kib } => (cgroup, kib),
            bpf::OomLimit::None => return OomLimit::None,
            bpf::OomLimit::Unknown => return OomLimit::Unknown,
        };
        let known = || index.by_cgroup(cgroup).cloned().or_else(|| self.place_above(victim?, cgroup));
        let place = if self.sees_memory_cgroups() { known() } else { None };
        OomLimit::Exceeded { place, bytes: (kib < UNLIMITED_KIB).then_some(kib * 1024) }
    }

    /// Whether the ids of memory cgroups are those of the hierarchy that identifies containers.
    fn sees_memory_cgroups(&self) -> bool {
        self.hierarchy.kind != HierarchyKind::V1(Controller::Pids)
    }

    /// The path of the cgroup of a process, while it exists: the kernel has only just chosen it. In another PID namespace
    /// the pid is that of another process.
    pub(super) fn cgroup_of(&self, pid: u32) -> Option<String> {
        if !self.sees_kernel_pids {
            return None;
        }
        let text = read::text(format!("/proc/{pid}/cgroup").as_ref(), read::PROC_FILE_LIMIT).ok()?;
        let path = self.hierarchy.path_in(&text)?;
        Some(path.strip_suffix(" (deleted)").unwrap_or(path).to_owned())
    }

    /// The id of the cgroup at a path of the kernel log, which begins at the root of the hierarchy. A node that is a
    /// container itself (kind) sees a part of the hierarchy as the whole.
    pub(super) fn id_in_log(&self, path: &str) -> Option<CgroupId> {
        path.match_indices('/').find_map(|(at, _)| self.hierarchy.id_of(&path[at..]).ok())
    }

    /// The cgroup above `below` with this id.
    fn place_above(&self, below: &CgroupPlace, id: CgroupId) -> Option<CgroupPlace> {
        let mut path = below.path.as_str();
        loop {
            let of = if path.is_empty() { "/" } else { path };
            if self.hierarchy.id_of(of).is_ok_and(|found| found == id) {
                return Some(place_of(of));
            }
            path = &path[..path.rfind('/')?];
        }
    }

    /// The exit of a process that was exiting when it was marked is no victim's.
    pub(super) fn is_victim(&mut self, exit: &Exit) -> bool {
        let known = self.exiting.iter().position(|pid| *pid == exit.pid);
        known.and_then(|at| self.exiting.remove(at)).is_none() && exit.oom_victim
    }

    /// The counters of all cgroups of containers.
    pub(super) fn counters(&self, index: &ContainerIndex) -> Vec<(CgroupId, u64)> {
        let read = |(id, place): (CgroupId, &CgroupPlace)| Some((id, kills_of(&self.hierarchy, &place.path)?));
        index.containers().filter_map(read).collect()
    }

    /// Evidence of kills that counters show and that were not reported. `counters` were read before the last record that
    /// was converted.
    pub(super) fn reconcile(&mut self, index: &ContainerIndex, counters: Vec<(CgroupId, u64)>) -> Vec<OomRecord> {
        let unreported = |(id, counter): (CgroupId, u64)| {
            let count = self.counters.reconcile(id.0, counter);
            counter_records(count, index.by_cgroup(id).cloned())
        };
        counters.into_iter().flat_map(unreported).collect()
    }

    /// The kill of this line is known, and not only one of an earlier process with its pid.
    fn is_reported(&self, entry: &OomLogEntry, moment: KernelMoment) -> bool {
        let longest = ONE_KILL.max(Duration::from_micros(entry.at_micros / DRIFT));
        let is_same =
            |(pid, at): &(u32, KernelMoment)| *pid == entry.pid && at.age(moment.0).max(moment.age(at.0)) <= longest;
        self.killed.iter().any(is_same)
    }

    /// Evidence of a line of the kernel log, unless the probe has reported the kill.
    pub(super) fn on_log(&mut self, entry: OomLogEntry, moment: KernelMoment) -> Option<OomRecord> {
        if self.is_reported(&entry, moment) {
            return None;
        }
        // Without a cgroup the counters are the better evidence: they name the container.
        let place = place_of(entry.cgroup.as_deref()?);
        push(&mut self.killed, (entry.pid, moment));
        if let Some(id) = self.id_in_log(&place.path) {
            self.counters.uncounted(id.0);
        }
        let limit = match entry.limit {
            OomLogLimit::Cgroup(path, kib) => {
                let bytes = kib.filter(|kib| *kib < UNLIMITED_KIB).map(|kib| kib * 1024);
                OomLimit::Exceeded { place: Some(place_of(&path)), bytes }
            }
            OomLogLimit::Node => OomLimit::None,
            OomLogLimit::Unknown => OomLimit::Unknown,
        };
        Some(OomRecord {
            pid: Some(entry.pid),
            comm: entry.comm,
            place: Some(place),
            limit,
            memory: entry.memory_kib.map(bytes),
            group: entry.group.map(|path| crate::model::fnv1a_64(path.bytes())),
            ..OomRecord::new(OomConfidence::Log, moment)
        })
    }
}

fn bytes([anon, file, shmem]: [u64; 3]) -> OomMemory {
    OomMemory { anon_bytes: anon * 1024, file_bytes: file * 1024, shmem_bytes: shmem * 1024 }
}

/// Evidence of `count` kills in a cgroup of which nothing else is known.
fn counter_records(count: u64, place: Option<CgroupPlace>) -> Vec<OomRecord> {
    if count > MAX_UNREPORTED {
        tracing::warn!(count, "more OOM kills were not recorded than are reported");
    }
    let record =
        OomRecord { is_timed: false, place, ..OomRecord::new(OomConfidence::Counter, KernelMoment(Instant::now())) };
    (0..count.min(MAX_UNREPORTED)).map(|_| record.clone()).collect()
}

/// OOM kills that the cgroup at `path` has counted for its own processes; `None` if it is gone, or has no counter.
pub(super) fn kills_of(hierarchy: &Hierarchy, path: &str) -> Option<u64> {
    let file = match hierarchy.kind {
        HierarchyKind::Unified => "memory.events.local",
        HierarchyKind::V1(Controller::Memory) => "memory.oom_control",
        HierarchyKind::V1(Controller::Pids) => return None,
    };
    let text = read::text(&hierarchy.directory(path)?.join(file), COUNTER_FILE_LIMIT).ok()?;
    let count = |name| text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
    Some(arithmetic::oom_kills(count("oom_kill ")?, count("oom_group_kill ").unwrap_or_default()))
}

fn push<T>(queue: &mut VecDeque<T>, item: T) {
    queue.push_back(item);
    if queue.len() > MAX_RECENT {
        queue.pop_front();
    }
}

#[cfg(test)]
#[path = "oom_tests.rs"]
mod tests;
