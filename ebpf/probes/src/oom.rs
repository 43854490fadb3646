//! OOM kills: whom the kernel chose, and whose limit fired.
//!
//! Kernels with support for cgroup v1, whether it is used or not, mark the subtree that is out of memory: the uppermost
//! marked cgroup above the victim is the one whose limit fired. (If two limits on one path fire at once, that names the
//! upper one.) Other kernels tell it nowhere, so the probe repeats their test: the limit that fired is the first full one
//! on the way up from the thread that asked for memory. If that is not above the victim, nothing is claimed: then the
//! machine itself was out of memory, or a limit was lowered by hand.

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
/// Pages that the kernel takes from a cgroup at once, on behalf of a CPU.
const SET_ASIDE: u64 = 64;

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
    if let Some(id) = victim.and_then(limit_above) {
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

/// Id of the cgroup whose limit fired.
#[inline(always)]
fn limit_above(victim: Task) -> Option<u64> {
    if config!(memory) == ABSENT {
        return None;
    }
    let victim = victim.subsystem(config!(memory))?;
    let css = if offset!(mem_cgroup_oom_lock) == ABSENT as u64 {
        // SAFETY: the helper has no preconditions.
        let asking = Task(unsafe { bpf_get_current_task() });
        let full = first_full(asking.subsystem(config!(memory))?);
        if is_above(full, victim) { full } else { 0 }
    } else {
        last_marked(victim)
    };
    if css == 0 {
        return None;
    }
    Cgroup(follow(css, offset!(css_cgroup))?).id()
}

// From here on zero stands for none: the verifier follows each path, and an `Option` that lives through a loop leaves a
// register unset on one of them.

/// The uppermost of `css` and what lies above it that is marked as out of memory.
#[inline(always)]
fn last_marked(mut css: u64) -> u64 {
    let mut marked = 0;
    for _ in 0..MAX_LEVELS {
        let memcg = css - offset!(mem_cgroup_css);
        if read::<u8>(memcg, offset!(mem_cgroup_oom_lock)).unwrap_or(0) != 0 {
            marked = css;
        }
        css = follow(css, offset!(css_parent)).unwrap_or(0);
        if css == 0 {
            break;
        }
    }
    marked
}

/// The lowest of `css` and what lies above it that has no room for another page.
#[inline(always)]
fn first_full(mut css: u64) -> u64 {
    for _ in 0..MAX_LEVELS {
        let counter = css - offset!(mem_cgroup_css) + offset!(mem_cgroup_memory);
        let usage: u64 = read(counter, offset!(page_counter_usage)).unwrap_or(0);
        let max: u64 = read(counter, offset!(page_counter_max)).unwrap_or(u64::MAX);
        // Between its own test and this one the kernel may have taken back what it set aside for a CPU.
        if usage + SET_ASIDE >= max {
            return css;
        }
        css = follow(css, offset!(css_parent)).unwrap_or(0);
        if css == 0 {
            break;
        }
    }
    0
}

#[inline(always)]
fn is_above(upper: u64, mut css: u64) -> bool {
    for _ in 0..MAX_LEVELS {
        if css == upper || css == 0 {
            break;
        }
        css = follow(css, offset!(css_parent)).unwrap_or(0);
    }
    css == upper && css != 0
}
