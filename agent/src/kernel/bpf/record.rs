//! Decodes records of the ring buffers. Pure.

use std::mem::size_of;

use keblet_ebpf_common as common;
use keblet_ebpf_common::CgroupRecord;
use keblet_ebpf_common::ExitRecord;
use keblet_ebpf_common::Head;
use keblet_ebpf_common::OomRecord;
use keblet_ebpf_common::flags;
use keblet_ebpf_common::kind;

use crate::cgroups::CgroupId;
use crate::kernel::clock::BootTime;
use crate::model::OomRoot;

/// A record of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelRecord {
    /// A process ended.
    Exit(Exit),
    /// The OOM killer chose a process.
    Oom(Oom),
    /// A cgroup was created below a watched one, and is watched from now on.
    CgroupCreated(CgroupEvent),
    /// A watched cgroup was removed.
    CgroupRemoved(CgroupEvent),
}

impl KernelRecord {
    /// When it happened.
    pub fn at(&self) -> BootTime {
        match self {
            Self::Exit(exit) => exit.at,
            Self::Oom(oom) => oom.at,
            Self::CgroupCreated(event) | Self::CgroupRemoved(event) => event.at,
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl ExitStatus {
    /// From the status that `wait(2)` reports.
    pub fn from_wait_status(status: u32) -> Self {
        match (status & 0x7f) as i32 {
            0 => Self::Code(((status >> 8) & 0xff) as i32),
            signal => Self::Signal(signal),
        }
    }

    /// The code as container runtimes report it: 128 + signal for signals.
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// A process (thread group) whose last thread is exiting. Its files may still be open and its PID namespace populated:
/// wait for its pidfd before something else takes its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Process id in the host's PID namespace.
    pub pid: u32,
    /// When the process started; with the pid it names a process uniquely.
    pub started: BootTime,
    /// When it ended.
    pub at: BootTime,
    /// Its exit code or signal.
    pub status: ExitStatus,
    /// Its cgroup in the chosen hierarchy.
    pub cgroup: Option<CgroupId>,
    /// It was pid 1 of a PID namespace other than the host's.
    pub pid_ns_init: bool,
    /// The OOM killer had chosen it.
    pub oom_victim: bool,
    /// Command name.
    pub comm: String,
}

/// A process chosen by the OOM killer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Oom {
    /// Process id in the host's PID namespace.
    pub pid: u32,
    /// When it was chosen.
    pub at: BootTime,
    /// Its cgroup in the chosen hierarchy.
    pub cgroup: Option<CgroupId>,
    /// That cgroup is watched.
    pub watched: bool,
    /// The exceeded limit; unknown with the process.
    pub limit: OomLimit,
    /// OOM kills in the process's own memory cgroup since its creation, this one included. If the process was exiting
    /// already and the kernel only let it go on, it does not count.
    pub kills: Option<u64>,
    /// The cgroup (of the memory hierarchy) that the kernel kills as a whole.
    pub group: Option<CgroupId>,
    /// The uppermost process above this one in its container.
    pub root: Option<OomRoot>,
    /// It is in the host's PID namespace.
    pub host_pid_namespace: bool,
    /// The process; often unknown before Linux 6.9.
    pub victim: Option<OomProcess>,
    /// Its memory when it was chosen.
    pub memory: Option<OomMemory>,
}

/// The limit that a kill enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomLimit {
    /// The limit of a cgroup of the memory hierarchy was exceeded.
    Exceeded {
        /// The cgroup.
        cgroup: CgroupId,
        /// The limit in KiB.
        kib: u64,
    },
    /// No limit was exceeded: the node was out of memory.
    None,
    /// The process, and thereby its cgroup, could not be read.
    Unknown,
}

/// The victim as a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomProcess {
    /// When it started.
    pub started: BootTime,
    /// Command name.
    pub comm: String,
    /// `oom_score_adj`, -1000 to 1000.
    pub oom_score_adj: i32,
    /// It was pid 1 of a PID namespace other than the host's.
    pub pid_ns_init: bool,
}

/// The victim's memory in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OomMemory {
    /// Address space.
    pub total_vm_kib: u64,
    /// Resident anonymous memory.
    pub anon_kib: u64,
    /// Resident file-backed memory.
    pub file_kib: u64,
    /// Resident shared memory.
    pub shmem_kib: u64,
    /// Page tables.
    pub page_tables_kib: u64,
}

/// A cgroup that was created or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupEvent {
    /// The cgroup.
    pub id: CgroupId,
    /// Its parent.
    pub parent: CgroupId,
    /// When it happened, since the machine booted.
    pub at: BootTime,
    /// Path from the root of the hierarchy with a leading slash; if it was too long for a record, the last component
    /// alone, without a slash.
    pub path: String,
}

/// Decodes one entry of a ring buffer. `None` for an unknown record.
pub(super) fn decode(bytes: &[u8]) -> Option<KernelRecord> {
    let head: Head = plain(bytes)?;
    match head.kind {
        kind::EXIT => plain(bytes).map(|record| KernelRecord::Exit(exit(&record))),
        kind::OOM => plain(bytes).map(|record| KernelRecord::Oom(oom(&record))),
        kind::CGROUP_CREATED => plain(bytes).map(|record| KernelRecord::CgroupCreated(cgroup(&record))),
        kind::CGROUP_REMOVED => plain(bytes).map(|record| KernelRecord::CgroupRemoved(cgroup(&record))),
        _ => None,
    }
}

/// The records a ring buffer can hold.
///
/// # Safety
/// Implementors are plain data: every bit pattern is a value.
unsafe trait Plain: Copy {}
// SAFETY: integers and arrays of integers only.
unsafe impl Plain for Head {}
// SAFETY: integers and arrays of integers only.
unsafe impl Plain for ExitRecord {}
// SAFETY: integers and arrays of integers only.
unsafe impl Plain for OomRecord {}
// SAFETY: integers and arrays of integers only.
unsafe impl Plain for CgroupRecord {}

fn plain<T: Plain>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.get(..size_of::<T>())?;
    // SAFETY: the slice holds as many bytes as a `T` has, and any bytes are a `T`.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

fn exit(record: &ExitRecord) -> Exit {
    let has = |flag| record.head.flags & flag != 0;
    Exit {
        pid: record.pid,
        started: BootTime(record.start_ns),
        at: BootTime(record.head.time_ns),
        status: ExitStatus::from_wait_status(record.wait_status),
        cgroup: has(flags::CGROUP_KNOWN).then_some(CgroupId(record.cgroup_id)),
        pid_ns_init: has(flags::PID_NS_INIT),
        oom_victim: has(flags::OOM_VICTIM),
        comm: text(&record.comm),
    }
}

fn oom(record: &OomRecord) -> Oom {
    let has = |flag| record.head.flags & flag != 0;
    let limit = match (has(flags::LIMIT_KNOWN), has(flags::LIMIT_SEARCHED)) {
        (true, _) => OomLimit::Exceeded { cgroup: CgroupId(record.limit_cgroup_id), kib: record.limit_kib },
        (false, true) => OomLimit::None,
        (false, false) => OomLimit::Unknown,
    };
    Oom {
        pid: record.pid,
        at: BootTime(record.head.time_ns),
        cgroup: has(flags::CGROUP_KNOWN).then_some(CgroupId(record.cgroup_id)),
        watched: has(flags::WATCHED_CGROUP),
        limit,
        kills: has(flags::KILLS_KNOWN).then_some(record.kills),
        group: has(flags::GROUP_KILL).then_some(CgroupId(record.group_cgroup_id)),
        root: has(flags::ROOT_KNOWN).then(|| OomRoot {
            pid: record.root_pid,
            is_init: has(flags::ROOT_IS_INIT),
            in_cgroup: has(flags::ROOT_IN_CGROUP),
        }),
        host_pid_namespace: has(flags::HOST_PID_NS),
        victim: has(flags::TASK_KNOWN).then(|| OomProcess {
            started: BootTime(record.start_ns),
            comm: text(&record.comm),
            oom_score_adj: record.oom_score_adj,
            pid_ns_init: has(flags::PID_NS_INIT),
        }),
        memory: has(flags::MEMORY_KNOWN).then_some(OomMemory {
            total_vm_kib: record.total_vm_kib,
            anon_kib: record.anon_kib,
            file_kib: record.file_kib,
            shmem_kib: record.shmem_kib,
            page_tables_kib: record.page_tables_kib,
        }),
    }
}

fn cgroup(record: &CgroupRecord) -> CgroupEvent {
    let len = (record.path_len as usize).min(common::PATH_LEN);
    CgroupEvent {
        id: CgroupId(record.cgroup_id),
        parent: CgroupId(record.parent_id),
        at: BootTime(record.head.time_ns),
        path: String::from_utf8_lossy(&record.path[..len]).into_owned(),
    }
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
