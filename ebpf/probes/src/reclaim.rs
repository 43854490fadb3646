//! Memory reclaim that processes of watched cgroups must do themselves: counted, without a record.
//!
//! The kernel's reclaim tracepoints do not name the cgroup on all kernels, but the thread they run
//! in is the one that stalls, and that is what is counted.

use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::bpf_get_current_task;
use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use core::arch::asm;

use crate::maps::RECLAIMS;
use crate::maps::WATCHED_CGROUPS;
use crate::task::Task;

/// The current thread starts to reclaim. For the memory cgroup's and the machine's own tracepoint.
#[raw_tracepoint(tracepoint = "mm_vmscan_memcg_reclaim_begin")]
pub fn reclaim_begin(_ctx: RawTracePointContext) -> i32 {
    begin();
    0
}

/// The current thread has done reclaiming.
#[raw_tracepoint(tracepoint = "mm_vmscan_memcg_reclaim_end")]
pub fn reclaim_end(_ctx: RawTracePointContext) -> i32 {
    end();
    0
}

#[inline(always)]
fn begin() -> Option<()> {
    WATCHED_CGROUPS.get_ptr(current_cgroup_id()?)?;
    let tid = bpf_get_current_pid_tgid() as u32;
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    RECLAIMS.insert(tid, now, 0).ok()
}

#[inline(always)]
fn end() -> Option<()> {
    let tid = bpf_get_current_pid_tgid() as u32;
    // SAFETY: no other thread writes this thread's entry; the value is copied at once.
    let began = *unsafe { RECLAIMS.get(tid) }?;
    let _ = RECLAIMS.remove(tid);
    let watched = WATCHED_CGROUPS.get_ptr_mut(current_cgroup_id()?)?;
    // SAFETY: the helper has no preconditions.
    let stalled = unsafe { bpf_ktime_get_boot_ns() }.saturating_sub(began);
    // SAFETY: the verifier has seen the null check, and both are fields of the map's value.
    unsafe {
        add(&raw mut (*watched).stalls, 1);
        add(&raw mut (*watched).stall_ns, stalled);
    }
    Some(())
}

/// Adds atomically. The target has the instruction, but `core` offers no `fetch_add` for a target
/// without compare-and-swap.
///
/// # Safety
/// `counter` must point into a map value.
#[inline(always)]
unsafe fn add(counter: *mut u64, amount: u64) {
    // SAFETY: one aligned 8-byte addition at an address the verifier has checked.
    unsafe {
        asm!("lock *(u64 *)({counter} + 0) += {amount}", counter = in(reg) counter, amount = in(reg) amount);
    }
}

#[inline(always)]
fn current_cgroup_id() -> Option<u64> {
    // SAFETY: the helper has no preconditions.
    Task(unsafe { bpf_get_current_task() }).cgroup_id()
}
