//! OOM kills: whom the kernel chose, and whose limit fired.
//!
//! Kernels with support for cgroup v1, whether it is used or not, mark the subtree that is out of memory: the uppermost
//! marked cgroup above the victim is the one whose limit fired. (If two limits on one path fire at once, that names the
//! upper one.) Without a mark - the machine itself was out of memory, a limit was lowered, or the kernel was built without
//! v1 - the victim is told without a limit.

use aya_ebpf::helpers::bpf_get_current_task;
use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use keblet_ebpf_common::ABSENT;
use keblet_ebpf_common::Head;
use keblet_ebpf_common::Loss;
use keblet_ebpf_common::OomRecord;
use keblet_ebpf_common::flags;
use keblet_ebpf_common::kind;

use crate::maps::DEATHS;
use crate::maps::OOM_VICTIMS;
use crate::maps::WATCHED_CGROUPS;
use crate::maps::config;
use crate::maps::emit;
use crate::maps::offset;
use crate::task::Cgroup;
use crate::task::Task;
use crate::task::follow;
use crate::task::read;

/// How far up the tree is searched; container cgroups lie about five levels deep.
const MAX_LEVELS: u32 = 16;

/// The kernel has chosen its victim.
#[raw_tracepoint(tracepoint = "mark_victim")]
pub fn oom_victim(ctx: RawTracePointContext) -> i32 {
    if config!(victim_is_task) == 1 {
        report(Some(Task(ctx.arg(0))), 0);
        return 0;
    }
    // Before 6.9 only the pid is handed over. Often the victim is the one that asked for memory.
    let pid: u32 = ctx.arg(0);
    // SAFETY: the helper has no preconditions.
    let current = Task(unsafe { bpf_get_current_task() });
    report((current.tid() == pid).then_some(current), pid);
    0
}

#[inline(always)]
fn report(victim: Option<Task>, pid: u32) {
    let mut record = OomRecord {
        pid,
        head: Head {
            kind: kind::OOM,
            flags: 0,
            // SAFETY: the helper has no preconditions.
            time_ns: unsafe { bpf_ktime_get_boot_ns() },
        },
        ..OomRecord::default()
    };
    if let Some(victim) = victim {
        describe(&mut record, victim);
    }
    if let Some(id) = victim.and_then(marked_above) {
        record.head.flags |= flags::LIMIT_KNOWN;
        record.limit_cgroup_id = id;
    }
    // The exit of the victim is told too, and says that it was one.
    let _ = OOM_VICTIMS.insert(record.pid, record.head.time_ns, 0);
    emit(&DEATHS, Loss::Deaths, record);
}

#[inline(always)]
fn describe(record: &mut OomRecord, victim: Task) {
    if let Some(identity) = victim.identity() {
        record.pid = identity.pid;
        record.start_ns = identity.start_ns;
        record.comm = identity.comm;
        record.oom_score_adj = victim.oom_score_adj();
        record.head.flags |= flags::TASK_KNOWN;
        if identity.is_pid_ns_init {
            record.head.flags |= flags::PID_NS_INIT;
        }
    }
    if let Some(id) = victim.cgroup_id() {
        record.cgroup_id = id;
        record.head.flags |= flags::CGROUP_KNOWN;
        if WATCHED_CGROUPS.get_ptr(id).is_some() {
            record.head.flags |= flags::WATCHED_CGROUP;
        }
    }
    if measure(record, victim).is_some() {
        record.head.flags |= flags::MEMORY_KNOWN;
    }
}

/// Sizes as the kernel's own message gives them: the sums without what CPUs still hold back.
#[inline(always)]
fn measure(record: &mut OomRecord, victim: Task) -> Option<()> {
    let mm = follow(victim.0, offset!(task_mm))?;
    record.total_vm_kib = pages(read(mm, offset!(mm_total_vm))?);
    record.anon_kib = pages(resident(mm, offset!(mm_rss_anon))?);
    record.file_kib = pages(resident(mm, offset!(mm_rss_file))?);
    record.shmem_kib = pages(resident(mm, offset!(mm_rss_shmem))?);
    record.page_tables_kib = read::<u64>(mm, offset!(mm_pgtables_bytes))? / 1024;
    Some(())
}

#[inline(always)]
fn resident(mm: u64, index: u64) -> Option<i64> {
    read(mm, offset!(mm_rss_first) + index * offset!(mm_rss_stride))
}

#[inline(always)]
fn pages(count: i64) -> u64 {
    if count < 0 {
        return 0;
    }
    count as u64 * config!(page_kib) as u64
}

#[inline(always)]
fn memcg_cgroup_id(memcg: u64) -> Option<u64> {
    let css = memcg + offset!(mem_cgroup_css);
    Cgroup(follow(css, offset!(css_cgroup))?).id()
}

/// The uppermost cgroup above the victim that is marked as out of memory.
#[inline(always)]
fn marked_above(victim: Task) -> Option<u64> {
    if config!(memory) == ABSENT || offset!(mem_cgroup_oom_lock) == ABSENT as u64 {
        return None;
    }
    let mut css = victim.subsystem(config!(memory))?;
    // Zero for none: the verifier follows each path, and an `Option` here leaves a register unset on one.
    let mut marked = 0;
    for _ in 0..MAX_LEVELS {
        let memcg = css - offset!(mem_cgroup_css);
        if read::<u8>(memcg, offset!(mem_cgroup_oom_lock)).unwrap_or(0) != 0 {
            marked = memcg;
        }
        css = follow(css, offset!(css_parent)).unwrap_or(0);
        if css == 0 {
            break;
        }
    }
    if marked == 0 {
        return None;
    }
    memcg_cgroup_id(marked)
}
