//! Reading tasks and cgroups out of kernel memory.
//!
//! Every read goes through `bpf_probe_read_kernel` at an offset from BTF: a wrong pointer gives
//! `None`, never a fault.

use aya_ebpf::helpers::bpf_probe_read_kernel;
use keblet_ebpf_common::COMM_LEN;
use keblet_ebpf_common::SUBSYSTEM_DEFAULT_HIERARCHY;

use crate::maps::config;
use crate::maps::offset;

/// `SIGNAL_GROUP_EXIT`: the whole thread group exits with one code. Not in BTF, since it is a
/// preprocessor constant; its value has been 4 since the flag exists.
const SIGNAL_GROUP_EXIT: u32 = 4;

/// Reads a `T` at `base + offset`.
#[inline(always)]
pub fn read<T>(base: u64, offset: u64) -> Option<T> {
    // SAFETY: the helper checks the address itself and fails instead of faulting.
    unsafe { bpf_probe_read_kernel((base + offset) as *const T) }.ok()
}

/// Reads a pointer at `base + offset` and takes null for none.
#[inline(always)]
pub fn follow(base: u64, offset: u64) -> Option<u64> {
    read::<u64>(base, offset).filter(|pointer| *pointer != 0)
}

/// Address of a `struct task_struct`.
#[derive(Clone, Copy)]
pub struct Task(pub u64);

/// Identity of a thread group.
#[derive(Clone, Copy, Default)]
pub struct Identity {
    /// Thread-group id in the host's PID namespace.
    pub pid: u32,
    /// Start in nanoseconds of `CLOCK_BOOTTIME`.
    pub start_ns: u64,
    /// Depth of the PID namespace.
    pub pid_ns_level: u32,
    /// Pid 1 of a PID namespace that is not the host's.
    pub is_pid_ns_init: bool,
    /// Command name.
    pub comm: [u8; COMM_LEN],
}

impl Task {
    /// Thread id.
    #[inline(always)]
    pub fn tid(self) -> u32 {
        read(self.0, offset!(task_pid)).unwrap_or(0)
    }

    /// Thread-group id.
    #[inline(always)]
    pub fn tgid(self) -> Option<u32> {
        read(self.0, offset!(task_tgid))
    }

    /// The first thread of the thread group.
    #[inline(always)]
    pub fn leader(self) -> Option<Task> {
        follow(self.0, offset!(task_group_leader)).map(Task)
    }

    #[inline(always)]
    fn signal(self) -> Option<u64> {
        follow(self.0, offset!(task_signal))
    }

    /// True once no thread of the group is alive. The kernel counts down before the tracepoint:
    /// the last thread sees this, and others too if they exit at the same moment.
    #[inline(always)]
    pub fn group_is_dead(self) -> bool {
        let live = self.signal().and_then(|signal| read::<i32>(signal, offset!(signal_live)));
        live == Some(0)
    }

    /// The status that `wait(2)` will report for the thread group.
    #[inline(always)]
    pub fn wait_status(self) -> Option<u32> {
        let signal = self.signal()?;
        let flags: u32 = read(signal, offset!(signal_flags))?;
        if flags & SIGNAL_GROUP_EXIT != 0 {
            return read(signal, offset!(signal_group_exit_code));
        }
        read(self.leader()?.0, offset!(task_exit_code))
    }

    /// The thread group of the process that waits for this one's exit.
    #[inline(always)]
    pub fn parent(self) -> Option<Task> {
        Task(follow(self.0, offset!(task_real_parent))?).leader()
    }

    /// `oom_score_adj`.
    #[inline(always)]
    pub fn oom_score_adj(self) -> i32 {
        self.signal().and_then(|signal| read::<i16>(signal, offset!(signal_oom_score_adj))).unwrap_or(0) as i32
    }

    /// Identity of the thread group.
    #[inline(always)]
    pub fn identity(self) -> Option<Identity> {
        let leader = self.leader()?;
        let (pid_ns_level, is_pid_ns_init) = leader.pid_ns().unwrap_or((0, false));
        Some(Identity {
            pid: self.tgid()?,
            start_ns: read(leader.0, offset!(task_start_boottime))?,
            pid_ns_level,
            is_pid_ns_init,
            comm: read(leader.0, offset!(task_comm))?,
        })
    }

    /// Depth of the task's PID namespace, and whether it is that namespace's init.
    #[inline(always)]
    pub fn pid_ns(self) -> Option<(u32, bool)> {
        let pid = follow(self.0, offset!(task_thread_pid))?;
        let level: u32 = read(pid, offset!(pid_level))?;
        let number = offset!(pid_numbers) + level as u64 * offset!(upid_size) + offset!(upid_nr);
        let nr: u32 = read(pid, number)?;
        Some((level, level > 0 && nr == 1))
    }

    /// Whether the thread group is init of a PID namespace below the host's.
    #[inline(always)]
    pub fn is_pid_ns_init(self) -> bool {
        match self.leader().and_then(Task::pid_ns) {
            Some((_, init)) => init,
            None => false,
        }
    }

    /// The task's `cgroup_subsys_state` of the controller with this index.
    #[inline(always)]
    pub fn subsystem(self, index: u32) -> Option<u64> {
        let css_set = follow(self.0, offset!(task_cgroups))?;
        follow(css_set, offset!(css_set_subsys) + index as u64 * 8)
    }

    /// Id of the task's cgroup in the chosen hierarchy.
    #[inline(always)]
    pub fn cgroup_id(self) -> Option<u64> {
        let subsystem = config!(subsystem);
        let cgroup = if subsystem == SUBSYSTEM_DEFAULT_HIERARCHY {
            let css_set = follow(self.0, offset!(task_cgroups))?;
            follow(css_set, offset!(css_set_dfl_cgrp))?
        } else {
            follow(self.subsystem(subsystem)?, offset!(css_cgroup))?
        };
        Cgroup(cgroup).id()
    }
}

/// Address of a `struct cgroup`.
#[derive(Clone, Copy)]
pub struct Cgroup(pub u64);

impl Cgroup {
    #[inline(always)]
    fn node(self) -> Option<u64> {
        follow(self.0, offset!(cgroup_kn))
    }

    /// The id that user space sees as inode number of the directory.
    #[inline(always)]
    pub fn id(self) -> Option<u64> {
        read(self.node()?, offset!(kernfs_node_id))
    }

    /// Address of the directory's name.
    #[inline(always)]
    pub fn name(self) -> Option<u64> {
        follow(self.node()?, offset!(kernfs_node_name))
    }

    /// Number of the hierarchy it belongs to.
    #[inline(always)]
    pub fn hierarchy(self) -> Option<u32> {
        let root = follow(self.0, offset!(cgroup_root))?;
        read(root, offset!(cgroup_root_hierarchy_id))
    }

    /// The cgroup above.
    #[inline(always)]
    pub fn parent(self) -> Option<Cgroup> {
        let css = follow(self.0, offset!(cgroup_self) + offset!(css_parent))?;
        Some(Cgroup(css - offset!(cgroup_self)))
    }
}
