//! OOM kills: the victim, its place among the processes of its container, and the limit that fired.
//!
//! Limit: kernels with support for cgroup v1, whether it is used or not, mark the subtree that is out of memory: the
//! uppermost marked cgroup above the victim is the one whose limit fired. (If two limits on one path fire at once, that
//! names the upper one.) On other kernels the probe repeats the kernel's test: the limit that fired is the first full one
//! on the way up from the thread that asked for memory, if that is above the victim. On all kernels a cgroup that uses
//! more than its limit had it lowered, which kills without a mark. Otherwise no limit fired: the node is out of memory.
//!
//! Place: a process that is started in a container by an exec has a parent outside of the container's PID namespace, as the
//! container's init has; children of either have their parents inside. So the uppermost process above the victim whose
//! parent is outside identifies the main process or the exec. Orphans are adopted by the init of their namespace.

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

use crate::maps::EXITS;
use crate::maps::OOM_VICTIMS;
use crate::maps::WATCHED_CGROUPS;
use crate::maps::config;
use crate::maps::lose;
use crate::maps::offset;
use crate::task::Cgroup;
use crate::task::Task;
use crate::task::follow;
use crate::task::read;

/// How far up the tree of cgroups is searched; container cgroups lie about five levels deep.
const MAX_LEVELS: u32 = 16;
/// How far up the tree of processes is searched.
const MAX_ANCESTORS: u32 = 32;
/// Pages that the kernel takes from a cgroup at once, on behalf of a CPU.
const SET_ASIDE: u64 = 64;

/// The kernel has chosen its victim.
#[raw_tracepoint(tracepoint = "mark_victim")]
pub fn oom_victim(ctx: RawTracePointContext) -> i32 {
    if config!(victim_is_task) == 1 {
        report(Some(Task(ctx.arg(0))), 0);
        return 0;
    }
    // Before 6.9 the tracepoint passes the pid alone. Often the victim is the one that asked for memory.
    let pid: u32 = ctx.arg(0);
    // SAFETY: the helper has no preconditions.
    let current = Task(unsafe { bpf_get_current_task() });
    report((current.tid() == pid).then_some(current), pid);
    0
}

/// Fills in the record where it lies in the ring: the verifier follows what stands on the stack, and each combination of
/// known fields there would be a path of its own through all loops.
#[inline(always)]
fn report(victim: Option<Task>, pid: u32) {
    // SAFETY: the helper has no preconditions.
    let time_ns = unsafe { bpf_ktime_get_boot_ns() };
    // The record of the victim's exit is flagged.
    let _ = OOM_VICTIMS.insert(victim.and_then(Task::tgid).unwrap_or(pid), time_ns, 0);
    let Some(mut entry) = EXITS.reserve::<OomRecord>(0) else {
        lose(Loss::Exits);
        return;
    };
    let head = Head { kind: kind::OOM, flags: 0, time_ns };
    let record = entry.write(OomRecord { pid, head, ..OomRecord::default() });
    if let Some(victim) = victim {
        describe(record, victim);
        find_root(record, victim);
        charge(record, victim);
    }
    entry.submit(0);
}

/// Sets a flag. The compiler must not keep the flags in a register, where the verifier would follow them.
#[inline(always)]
fn set(record: &mut OomRecord, flag: u32) {
    let flags = &raw mut record.head.flags;
    // SAFETY: the pointer is that of a live reference.
    unsafe { flags.write_volatile(flags.read_volatile() | flag) };
}

/// Whether a flag is set.
#[inline(always)]
fn is_set(record: &OomRecord, flag: u32) -> bool {
    // SAFETY: the pointer is that of a live reference.
    unsafe { (&raw const record.head.flags).read_volatile() & flag != 0 }
}

#[inline(always)]
fn describe(record: &mut OomRecord, victim: Task) {
    if let Some(identity) = victim.identity() {
        record.pid = identity.pid;
        record.start_ns = identity.start_ns;
        record.comm = identity.comm;
        record.oom_score_adj = victim.oom_score_adj();
        set(record, flags::TASK_KNOWN);
        if identity.is_pid_ns_init {
            set(record, flags::PID_NS_INIT);
        }
    }
    if let Some(id) = victim.cgroup_id() {
        record.cgroup_id = id;
        set(record, flags::CGROUP_KNOWN);
        if WATCHED_CGROUPS.get_ptr(id).is_some() {
            set(record, flags::WATCHED_CGROUP);
        }
    }
    if measure(record, victim).is_some() {
        set(record, flags::MEMORY_KNOWN);
    }
}

/// Sizes as the kernel's own message gives them: the sums without what CPUs still hold back.
#[inline(always)]
fn measure(record: &mut OomRecord, victim: Task) -> Option<()> {
    let mm = follow(victim.0, offset!(task_mm))?;
    record.total_vm_kib = kib(read(mm, offset!(mm_total_vm))?);
    record.anon_kib = kib(resident(mm, offset!(mm_rss_anon))?);
    record.file_kib = kib(resident(mm, offset!(mm_rss_file))?);
    record.shmem_kib = kib(resident(mm, offset!(mm_rss_shmem))?);
    record.page_tables_kib = read::<u64>(mm, offset!(mm_pgtables_bytes))? / 1024;
    Some(())
}

#[inline(always)]
fn resident(mm: u64, index: u64) -> Option<i64> {
    read(mm, offset!(mm_rss_first) + index * offset!(mm_rss_stride))
}

/// Size of so many pages.
#[inline(always)]
fn kib(pages: i64) -> u64 {
    if pages < 0 {
        return 0;
    }
    pages as u64 * config!(page_kib) as u64
}

/// Finds the uppermost process above the victim that belongs to the container.
#[inline(always)]
fn find_root(record: &mut OomRecord, victim: Task) -> Option<()> {
    let victim = victim.leader()?;
    let (level, _) = victim.pid_ns()?;
    if level == 0 {
        set(record, flags::HOST_PID_NS);
    }
    let root = Task(if level == 0 { last_in_cgroup(victim, record.cgroup_id) } else { last_in_namespaces(victim) });
    if root.0 == 0 {
        return None;
    }
    record.root_pid = root.tgid()?;
    set(record, flags::ROOT_KNOWN);
    if root.is_pid_ns_init() {
        set(record, flags::ROOT_IS_INIT);
    }
    if is_set(record, flags::CGROUP_KNOWN) && root.cgroup_id() == Some(record.cgroup_id) {
        set(record, flags::ROOT_IN_CGROUP);
    }
    Some(())
}

/// What was charged: counter of kills, limit, and the cgroup that is killed as a whole.
#[inline(always)]
fn charge(record: &mut OomRecord, victim: Task) -> Option<()> {
    if config!(memory) == ABSENT {
        return None;
    }
    let own = victim.subsystem(config!(memory))?;
    if offset!(mem_cgroup_oom_kills) != ABSENT as u64 {
        record.kills = read(own - offset!(mem_cgroup_css), offset!(mem_cgroup_oom_kills))?;
        set(record, flags::KILLS_KNOWN);
    }
    let limit = limit_above(own);
    if limit != 0 {
        record.limit_cgroup_id = Cgroup(follow(limit, offset!(css_cgroup))?).id()?;
        record.limit_kib = kib(read(limit, counter() + offset!(page_counter_max))?);
        set(record, flags::LIMIT_KNOWN);
    }
    set(record, flags::LIMIT_SEARCHED);
    if offset!(mem_cgroup_oom_group) != ABSENT as u64 {
        let group = last_in_group(own, limit);
        if group != 0 {
            record.group_cgroup_id = Cgroup(follow(group, offset!(css_cgroup))?).id()?;
            set(record, flags::GROUP_KILL);
        }
    }
    Some(())
}

/// From the css of a memory cgroup to its counter of pages. The css may lie behind it.
#[inline(always)]
fn counter() -> u64 {
    offset!(mem_cgroup_memory).wrapping_sub(offset!(mem_cgroup_css))
}

// From here on zero stands for none: the verifier follows each path, and an `Option` that lives through a loop leaves a
// register unset on one of them.

/// The uppermost of `task` and its ancestors in PID namespaces below the host's.
#[inline(always)]
fn last_in_namespaces(mut task: Task) -> u64 {
    for _ in 0..MAX_ANCESTORS {
        let parent = task.parent().unwrap_or(Task(0));
        let Some((level, _)) = parent.pid_ns() else { return 0 };
        if level == 0 {
            return task.0;
        }
        task = parent;
    }
    0
}

/// The uppermost of `task` and its ancestors in this cgroup.
#[inline(always)]
fn last_in_cgroup(mut task: Task, cgroup_id: u64) -> u64 {
    for _ in 0..MAX_ANCESTORS {
        let parent = task.parent().unwrap_or(Task(0));
        let Some(id) = parent.cgroup_id() else { return 0 };
        if id != cgroup_id {
            return task.0;
        }
        task = parent;
    }
    0
}

/// The css of the cgroup above `own`, or `own` itself, whose limit fired.
#[inline(always)]
fn limit_above(own: u64) -> u64 {
    if offset!(mem_cgroup_oom_lock) == ABSENT as u64 {
        // SAFETY: the helper has no preconditions.
        let asking = Task(unsafe { bpf_get_current_task() });
        let full = first_full(asking.subsystem(config!(memory)).unwrap_or(0), SET_ASIDE);
        if full != 0 && is_above(full, own) {
            return full;
        }
    } else {
        let marked = last_marked(own);
        if marked != 0 {
            return marked;
        }
    }
    first_full(own, 0)
}

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

/// The lowest of `css` and what lies above it that uses more than its limit, or will with `more` pages.
#[inline(always)]
fn first_full(mut css: u64, more: u64) -> u64 {
    for _ in 0..MAX_LEVELS {
        if css == 0 {
            break;
        }
        let counter = css - offset!(mem_cgroup_css) + offset!(mem_cgroup_memory);
        let usage: u64 = read(counter, offset!(page_counter_usage)).unwrap_or(0);
        let max: u64 = read(counter, offset!(page_counter_max)).unwrap_or(u64::MAX);
        // Between its own test and this one the kernel may have taken back what it set aside for a CPU.
        if usage + more > max {
            return css;
        }
        css = follow(css, offset!(css_parent)).unwrap_or(0);
    }
    0
}

/// The uppermost of `css` and what lies above it, up to `limit`, that is killed as a whole.
#[inline(always)]
fn last_in_group(mut css: u64, limit: u64) -> u64 {
    let mut group = 0;
    for _ in 0..MAX_LEVELS {
        let memcg = css - offset!(mem_cgroup_css);
        if read::<u8>(memcg, offset!(mem_cgroup_oom_group)).unwrap_or(0) != 0 {
            group = css;
        }
        if css == limit {
            break;
        }
        css = follow(css, offset!(css_parent)).unwrap_or(0);
        if css == 0 {
            break;
        }
    }
    group
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
