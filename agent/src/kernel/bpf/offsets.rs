//! Offsets of kernel structures that the probes read, from the running kernel's type information. What is missing is listed
//! per group of programs, so that a kernel without one member loses one sensor, not all.

use keblet_ebpf_common::ABSENT;
use keblet_ebpf_common::Offsets;

use crate::kernel::btf::Btf;
use crate::kernel::btf::BtfError;

/// Offsets found, and why others are missing.
#[derive(Debug, Default)]
pub(super) struct Resolved {
    /// The offsets; those not found are zero.
    pub offsets: Offsets,
    /// The tracepoint `mark_victim` passes the task (Linux 6.9 and later).
    pub victim_is_task: bool,
    /// Why the programs that read tasks and their cgroups cannot work.
    pub task: Option<String>,
    /// Why the programs that read cgroups cannot work.
    pub cgroup: Option<String>,
    /// Why the OOM program cannot work.
    pub oom: Option<String>,
}

/// Looks up all offsets.
pub(super) fn resolve(btf: &Btf) -> Resolved {
    let mut resolved = Resolved::default();
    let offsets = &mut resolved.offsets;
    resolved.cgroup = cgroup(btf, offsets).err().map(|error| error.to_string());
    resolved.task = task(btf, offsets).err().map(|error| error.to_string());
    resolved.oom = memory(btf, offsets).err().map(|error| error.to_string());
    match btf.tracepoint_takes_pointer("mark_victim", 0) {
        Ok(is_task) => resolved.victim_is_task = is_task,
        Err(error) => resolved.oom = Some(error.to_string()),
    }
    resolved
}

fn task(btf: &Btf, to: &mut Offsets) -> Result<(), BtfError> {
    to.task_pid = btf.offset("task_struct.pid")?;
    to.task_tgid = btf.offset("task_struct.tgid")?;
    to.task_comm = btf.offset("task_struct.comm")?;
    to.task_exit_code = btf.offset("task_struct.exit_code")?;
    to.task_start_boottime = btf.offset("task_struct.start_boottime")?;
    to.task_group_leader = btf.offset("task_struct.group_leader")?;
    to.task_signal = btf.offset("task_struct.signal")?;
    to.task_thread_pid = btf.offset("task_struct.thread_pid")?;
    to.task_cgroups = btf.offset("task_struct.cgroups")?;
    to.signal_live = btf.offset("signal_struct.live")?;
    to.signal_flags = btf.offset("signal_struct.flags")?;
    to.signal_group_exit_code = btf.offset("signal_struct.group_exit_code")?;
    to.signal_oom_score_adj = btf.offset("signal_struct.oom_score_adj")?;
    to.pid_level = btf.offset("pid.level")?;
    let numbers = btf.place("pid.numbers")?;
    let (first, size) = btf.elements(numbers).ok_or_else(|| missing("array pid.numbers"))?;
    to.pid_numbers = first.offset;
    to.upid_size = size;
    to.upid_nr = btf.offset("upid.nr")?;
    Ok(())
}

fn cgroup(btf: &Btf, to: &mut Offsets) -> Result<(), BtfError> {
    to.css_set_dfl_cgrp = btf.offset("css_set.dfl_cgrp")?;
    to.css_set_subsys = btf.offset("css_set.subsys")?;
    to.css_cgroup = btf.offset("cgroup_subsys_state.cgroup")?;
    to.css_parent = btf.offset("cgroup_subsys_state.parent")?;
    to.cgroup_self = btf.offset("cgroup.self")?;
    to.cgroup_kn = btf.offset("cgroup.kn")?;
    to.cgroup_root = btf.offset("cgroup.root")?;
    to.cgroup_root_hierarchy_id = btf.offset("cgroup_root.hierarchy_id")?;
    to.kernfs_node_id = btf.offset("kernfs_node.id")?;
    to.kernfs_node_name = btf.offset("kernfs_node.name")?;
    Ok(())
}

fn memory(btf: &Btf, to: &mut Offsets) -> Result<(), BtfError> {
    to.task_mm = btf.offset("task_struct.mm")?;
    to.task_real_parent = btf.offset("task_struct.real_parent")?;
    to.mm_total_vm = btf.offset("mm_struct.total_vm")?;
    to.mm_pgtables_bytes = btf.offset("mm_struct.pgtables_bytes")?;
    to.mm_rss_anon = btf.constant("MM_ANONPAGES")?;
    to.mm_rss_file = btf.constant("MM_FILEPAGES")?;
    to.mm_rss_shmem = btf.constant("MM_SHMEMPAGES")?;
    to.mem_cgroup_css = btf.offset("mem_cgroup.css")?;
    to.mem_cgroup_memory = btf.offset("mem_cgroup.memory")?;
    to.page_counter_usage = btf.offset("page_counter.usage")?;
    to.page_counter_max = btf.offset("page_counter.max")?;
    // Missing in kernels without cgroup v1: the probe then compares the counters.
    to.mem_cgroup_oom_lock = btf.offset("mem_cgroup.oom_lock").unwrap_or(ABSENT);
    to.mem_cgroup_oom_group = btf.offset("mem_cgroup.oom_group").unwrap_or(ABSENT);
    to.mem_cgroup_oom_kills = kill_counter(btf).unwrap_or(ABSENT);
    let (first, stride) = resident_counters(btf)?;
    to.mm_rss_first = first;
    to.mm_rss_stride = stride;
    Ok(())
}

/// The cgroup's own counter of OOM kills (Linux 5.3 and later): processes of cgroups below do not count.
fn kill_counter(btf: &Btf) -> Result<u32, BtfError> {
    let counters = btf.place("mem_cgroup.memory_events_local")?;
    let (first, stride) = btf.elements(counters).ok_or_else(|| missing("array mem_cgroup.memory_events_local"))?;
    Ok(first.offset + btf.constant("MEMCG_OOM_KILL")? * stride)
}

/// Since 6.2 `rss_stat` is an array of per-CPU counters, before it was a structure with an array of plain ones.
fn resident_counters(btf: &Btf) -> Result<(u32, u32), BtfError> {
    let unknown = || missing("counters in mm_struct.rss_stat");
    let rss = btf.place("mm_struct.rss_stat")?;
    if let Some((first, stride)) = btf.elements(rss) {
        let count = btf.within(first, "count").ok_or_else(unknown)?;
        return Ok((count.offset, stride));
    }
    let counts = btf.within(rss, "count").ok_or_else(unknown)?;
    let (first, stride) = btf.elements(counts).ok_or_else(unknown)?;
    Ok((first.offset, stride))
}

fn missing(what: &str) -> BtfError {
    BtfError::Missing(what.to_owned())
}
