//! Globals of the probes, written by the agent before it loads them.

use core::mem::size_of;

/// [`Config::subsystem`] of the v2 hierarchy, which no subsystem index names.
pub const SUBSYSTEM_DEFAULT_HIERARCHY: u32 = u32::MAX;

/// An offset or index that the kernel does not have, where that is no obstacle.
pub const ABSENT: u32 = u32::MAX;

/// The agent's choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Config {
    /// Number of the cgroup hierarchy that containers live in, as in `/proc/self/cgroup`.
    pub hierarchy: u32,
    /// Index of a v1 controller of that hierarchy in `css_set.subsys`, or
    /// [`SUBSYSTEM_DEFAULT_HIERARCHY`].
    pub subsystem: u32,
    /// Index of the memory controller in `css_set.subsys`, or [`ABSENT`].
    pub memory: u32,
    /// Always 0.
    pub reserved: u32,
    /// Size of a page in KiB.
    pub page_kib: u32,
    /// 1 if the `mark_victim` tracepoint passes the task (kernel 6.9 and later), 0 if the pid.
    pub victim_is_task: u32,
}

/// Byte offsets in the running kernel's structures, taken from its BTF.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
#[expect(missing_docs, reason = "each field is the kernel's own `struct.member` name")]
pub struct Offsets {
    pub task_pid: u32,
    pub task_tgid: u32,
    pub task_comm: u32,
    pub task_exit_code: u32,
    pub task_start_boottime: u32,
    pub task_group_leader: u32,
    pub task_signal: u32,
    pub task_thread_pid: u32,
    pub task_cgroups: u32,
    pub task_mm: u32,
    pub task_real_parent: u32,
    pub signal_live: u32,
    pub signal_flags: u32,
    pub signal_group_exit_code: u32,
    pub signal_oom_score_adj: u32,
    pub pid_level: u32,
    pub pid_numbers: u32,
    pub upid_nr: u32,
    /// Size of one element of `pid.numbers`.
    pub upid_size: u32,
    pub css_set_dfl_cgrp: u32,
    pub css_set_subsys: u32,
    pub css_cgroup: u32,
    pub css_parent: u32,
    pub cgroup_self: u32,
    pub cgroup_kn: u32,
    pub cgroup_root: u32,
    pub cgroup_root_hierarchy_id: u32,
    pub kernfs_node_id: u32,
    pub kernfs_node_name: u32,
    pub mm_total_vm: u32,
    pub mm_pgtables_bytes: u32,
    /// First counter of `mm_struct.rss_stat`.
    pub mm_rss_first: u32,
    /// Distance between two counters of `mm_struct.rss_stat`.
    pub mm_rss_stride: u32,
    /// Index of the anonymous counter in `mm_struct.rss_stat`.
    pub mm_rss_anon: u32,
    /// Index of the file counter in `mm_struct.rss_stat`.
    pub mm_rss_file: u32,
    /// Index of the shared memory counter in `mm_struct.rss_stat`.
    pub mm_rss_shmem: u32,
    pub mem_cgroup_css: u32,
    /// The kernel's mark of subtrees that are out of memory;
    /// [`ABSENT`] on kernels built without support for cgroup v1.
    pub mem_cgroup_oom_lock: u32,
    pub mem_cgroup_memory: u32,
    /// [`ABSENT`] on kernels that never kill a whole cgroup.
    pub mem_cgroup_oom_group: u32,
    /// The counter of OOM kills in `mem_cgroup.memory_events_local`, or [`ABSENT`].
    pub mem_cgroup_oom_kills: u32,
    pub page_counter_usage: u32,
    pub page_counter_max: u32,
}

const _: () = {
    assert!(size_of::<Config>() == 24);
    assert!(size_of::<Offsets>() == 43 * 4);
};
