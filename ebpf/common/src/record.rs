//! What the probes write: ring buffer records and map values.

use core::mem::offset_of;
use core::mem::size_of;

/// Bytes of a kernel command name, including the final zero.
pub const COMM_LEN: usize = 16;
/// Bytes kept of a cgroup path, including the final zero.
pub const PATH_LEN: usize = 440;

/// Kinds of record, the first field of each.
pub mod kind {
    /// [`super::ExitRecord`].
    pub const EXIT: u32 = 1;
    /// [`super::OomRecord`].
    pub const OOM: u32 = 2;
    /// [`super::CgroupRecord`]: the cgroup was created.
    pub const CGROUP_CREATED: u32 = 3;
    /// [`super::CgroupRecord`]: the cgroup was removed.
    pub const CGROUP_REMOVED: u32 = 4;
}

/// What is known about a record, bits of [`Head::flags`].
pub mod flags {
    /// The process was pid 1 of a PID namespace other than the host's.
    pub const PID_NS_INIT: u32 = 1 << 0;
    /// The process had been chosen by the OOM killer before it exited.
    pub const OOM_VICTIM: u32 = 1 << 1;
    /// The cgroup was in the set of watched cgroups.
    pub const WATCHED_CGROUP: u32 = 1 << 2;
    /// The cgroup id could be read.
    pub const CGROUP_KNOWN: u32 = 1 << 3;
    /// The memory split of an OOM victim could be read.
    pub const MEMORY_KNOWN: u32 = 1 << 4;
    /// The cgroup whose limit fired could be read.
    pub const LIMIT_KNOWN: u32 = 1 << 5;
    /// The victim's name, times and score could be read.
    pub const TASK_KNOWN: u32 = 1 << 6;
    /// The path did not fit; `path` holds the last component alone.
    pub const NAME_ONLY: u32 = 1 << 7;
    /// The cgroups above an OOM victim were searched for the limit: without [`LIMIT_KNOWN`] no limit was exceeded.
    pub const LIMIT_SEARCHED: u32 = 1 << 8;
    /// The counter of OOM kills could be read.
    pub const KILLS_KNOWN: u32 = 1 << 9;
    /// The kernel kills the whole cgroup `group_cgroup_id` (`memory.oom.group`).
    pub const GROUP_KILL: u32 = 1 << 10;
    /// The uppermost process above an OOM victim in its container could be read.
    pub const ROOT_KNOWN: u32 = 1 << 11;
    /// That process is init of a PID namespace other than the host's.
    pub const ROOT_IS_INIT: u32 = 1 << 12;
    /// The OOM victim is in the host's PID namespace.
    pub const HOST_PID_NS: u32 = 1 << 13;
    /// The uppermost process is in the victim's cgroup.
    pub const ROOT_IN_CGROUP: u32 = 1 << 14;
}

/// How a cgroup is watched, bits of [`WatchedCgroup::flags`].
pub mod watch {
    /// Report every process that ends in the cgroup, not only inits and OOM victims.
    pub const ALL_EXITS: u32 = 1 << 0;
}

/// The beginning of every record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Head {
    /// One of [`kind`].
    pub kind: u32,
    /// Bits of [`flags`].
    pub flags: u32,
    /// When it happened: nanoseconds of `CLOCK_BOOTTIME`.
    pub time_ns: u64,
}

/// A process (thread group) whose last thread is exiting.
///
/// Written before the process closes its files and before its PID namespace is emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ExitRecord {
    /// Kind, flags, time.
    pub head: Head,
    /// Id of the process's cgroup in the chosen hierarchy.
    pub cgroup_id: u64,
    /// When the process started: nanoseconds of `CLOCK_BOOTTIME`. With the pid it names a process
    /// uniquely.
    pub start_ns: u64,
    /// Process id (thread-group id) in the host's PID namespace.
    pub pid: u32,
    /// Thread that ended last.
    pub last_tid: u32,
    /// Exit status as `wait(2)` reports it.
    pub wait_status: u32,
    /// Depth of the process's PID namespace, 0 is the host's.
    pub pid_ns_level: u32,
    /// Command name, zero-padded.
    pub comm: [u8; COMM_LEN],
}

/// A process the OOM killer has chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OomRecord {
    /// Kind, flags, time.
    pub head: Head,
    /// Id of the victim's cgroup in the chosen hierarchy.
    pub cgroup_id: u64,
    /// Id of the cgroup whose limit fired, in the memory hierarchy.
    pub limit_cgroup_id: u64,
    /// When the victim started: nanoseconds of `CLOCK_BOOTTIME`.
    pub start_ns: u64,
    /// Size of the address space in KiB.
    pub total_vm_kib: u64,
    /// Resident anonymous memory in KiB.
    pub anon_kib: u64,
    /// Resident file-backed memory in KiB.
    pub file_kib: u64,
    /// Resident shared memory in KiB.
    pub shmem_kib: u64,
    /// Page tables in KiB.
    pub page_tables_kib: u64,
    /// The limit that fired, in KiB.
    pub limit_kib: u64,
    /// OOM kills in the victim's own memory cgroup since it was created, this one included.
    pub kills: u64,
    /// Id of the cgroup that is killed as a whole, in the memory hierarchy.
    pub group_cgroup_id: u64,
    /// Process id (thread-group id) in the host's PID namespace.
    pub pid: u32,
    /// `oom_score_adj` of the victim, -1000 to 1000.
    pub oom_score_adj: i32,
    /// Process id of the uppermost process above the victim (or the victim itself) whose parent is in the host's PID
    /// namespace; for a victim in the host's PID namespace, whose parent is in another cgroup.
    pub root_pid: u32,
    /// Always 0.
    pub reserved: u32,
    /// Command name, zero-padded.
    pub comm: [u8; COMM_LEN],
}

/// A cgroup below a watched one that was created or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CgroupRecord {
    /// Kind, flags, time.
    pub head: Head,
    /// Id of the cgroup.
    pub cgroup_id: u64,
    /// Id of its parent.
    pub parent_id: u64,
    /// Number of the hierarchy, as in `/proc/self/cgroup`.
    pub hierarchy: u32,
    /// Bytes of `path` that count, without the final zero.
    pub path_len: u32,
    /// Path from the root of the hierarchy.
    pub path: [u8; PATH_LEN],
}

/// Value of the map of watched cgroups; its key is the cgroup id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WatchedCgroup {
    /// Bits of [`watch`].
    pub flags: u32,
    /// Always 0.
    pub reserved: u32,
    /// How often a process of the cgroup had to reclaim memory itself.
    pub stalls: u64,
    /// Nanoseconds spent doing so.
    pub stall_ns: u64,
}

// No hidden padding: each size is the sum of its fields.
const _: () = {
    assert!(size_of::<Head>() == 16);
    assert!(size_of::<ExitRecord>() == 64);
    assert!(size_of::<OomRecord>() == 136);
    assert!(size_of::<CgroupRecord>() == 40 + PATH_LEN);
    assert!(size_of::<CgroupRecord>().is_multiple_of(8));
    assert!(size_of::<WatchedCgroup>() == 24);
    assert!(offset_of!(ExitRecord, comm) == 48);
    assert!(offset_of!(OomRecord, comm) == 120);
    assert!(offset_of!(CgroupRecord, path) == 40);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_kernel_side_writes_them() {
        assert_eq!(offset_of!(Head, kind), 0);
        assert_eq!(offset_of!(Head, flags), 4);
        assert_eq!(offset_of!(Head, time_ns), 8);

        assert_eq!(offset_of!(ExitRecord, cgroup_id), 16);
        assert_eq!(offset_of!(ExitRecord, start_ns), 24);
        assert_eq!(offset_of!(ExitRecord, pid), 32);
        assert_eq!(offset_of!(ExitRecord, last_tid), 36);
        assert_eq!(offset_of!(ExitRecord, wait_status), 40);
        assert_eq!(offset_of!(ExitRecord, pid_ns_level), 44);

        assert_eq!(offset_of!(OomRecord, limit_cgroup_id), 24);
        assert_eq!(offset_of!(OomRecord, total_vm_kib), 40);
        assert_eq!(offset_of!(OomRecord, page_tables_kib), 72);
        assert_eq!(offset_of!(OomRecord, limit_kib), 80);
        assert_eq!(offset_of!(OomRecord, group_cgroup_id), 96);
        assert_eq!(offset_of!(OomRecord, oom_score_adj), 108);
        assert_eq!(offset_of!(OomRecord, root_pid), 112);

        assert_eq!(offset_of!(CgroupRecord, parent_id), 24);
        assert_eq!(offset_of!(CgroupRecord, path_len), 36);

        assert_eq!(offset_of!(WatchedCgroup, stalls), 8);
        assert_eq!(offset_of!(WatchedCgroup, stall_ns), 16);
    }

    #[test]
    fn flags_do_not_overlap() {
        let all = [
            flags::PID_NS_INIT,
            flags::OOM_VICTIM,
            flags::WATCHED_CGROUP,
            flags::CGROUP_KNOWN,
            flags::MEMORY_KNOWN,
            flags::LIMIT_KNOWN,
            flags::TASK_KNOWN,
            flags::NAME_ONLY,
            flags::LIMIT_SEARCHED,
            flags::KILLS_KNOWN,
            flags::GROUP_KILL,
            flags::ROOT_KNOWN,
            flags::ROOT_IS_INIT,
            flags::HOST_PID_NS,
            flags::ROOT_IN_CGROUP,
        ];
        let union = all.iter().fold(0, |seen, flag| {
            assert_eq!(flag.count_ones(), 1);
            assert_eq!(seen & flag, 0);
            seen | flag
        });
        assert_eq!(union.count_ones() as usize, all.len());
    }
}
