//! Process exits: those of OOM victims, and in watched cgroups those of inits, or all where asked for.

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use keblet_ebpf_common::ExitRecord;
use keblet_ebpf_common::Head;
use keblet_ebpf_common::Loss;
use keblet_ebpf_common::flags;
use keblet_ebpf_common::kind;
use keblet_ebpf_common::watch;

use crate::maps::EXITS;
use crate::maps::OOM_VICTIMS;
use crate::maps::WATCHED_CGROUPS;
use crate::maps::emit;
use crate::task::Task;

/// Last thread of a process is exiting.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn process_exit(ctx: RawTracePointContext) -> i32 {
    let task = Task(ctx.arg(0));
    if task.group_is_dead() {
        report(task);
    }
    0
}

#[inline(always)]
fn report(task: Task) -> Option<()> {
    let pid = task.tgid()?;
    let cgroup_id = task.cgroup_id();
    let mut flags = why(task, pid, cgroup_id)?;
    let identity = task.identity()?;
    if identity.is_pid_ns_init {
        flags |= flags::PID_NS_INIT;
    }
    if cgroup_id.is_some() {
        flags |= flags::CGROUP_KNOWN;
    }
    let record = ExitRecord {
        head: Head {
            kind: kind::EXIT,
            flags,
            // SAFETY: the helper has no preconditions.
            time_ns: unsafe { bpf_ktime_get_boot_ns() },
        },
        cgroup_id: cgroup_id.unwrap_or(0),
        start_ns: identity.start_ns,
        pid,
        last_tid: task.tid(),
        wait_status: task.wait_status()?,
        pid_ns_level: identity.pid_ns_level,
        comm: identity.comm,
    };
    emit(&EXITS, Loss::Exits, record);
    Some(())
}

/// The reasons to report this exit; none if it is not reported.
#[inline(always)]
fn why(task: Task, pid: u32, cgroup_id: Option<u64>) -> Option<u32> {
    let mut why = 0;
    let mut wanted = false;
    if OOM_VICTIMS.remove(pid).is_ok() {
        why |= flags::OOM_VICTIM;
        wanted = true;
    }
    if let Some(watched) = cgroup_id.and_then(|id| WATCHED_CGROUPS.get_ptr(id)) {
        why |= flags::WATCHED_CGROUP;
        // SAFETY: the verifier has seen the null check; the field is only written by the agent.
        let all = unsafe { (*watched).flags } & watch::ALL_EXITS != 0;
        wanted = wanted || all || task.is_pid_ns_init();
    }
    wanted.then_some(why)
}
