//! Creation and removal of cgroups below watched ones.
//!
//! A child of a watched cgroup is watched from the moment it exists, before any process can be in
//! it: a container that lives for a millisecond is seen although the agent never heard of it.

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_ebpf::helpers::bpf_probe_read_kernel_str_bytes;
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use core::ptr::addr_of_mut;
use keblet_ebpf_common::CgroupRecord;
use keblet_ebpf_common::Head;
use keblet_ebpf_common::Loss;
use keblet_ebpf_common::PATH_LEN;
use keblet_ebpf_common::WatchedCgroup;
use keblet_ebpf_common::flags;
use keblet_ebpf_common::kind;

use crate::maps::CGROUPS;
use crate::maps::WATCHED_CGROUPS;
use crate::maps::config;
use crate::maps::lose;
use crate::task::Cgroup;

/// A cgroup directory was made.
#[raw_tracepoint(tracepoint = "cgroup_mkdir")]
pub fn cgroup_created(ctx: RawTracePointContext) -> i32 {
    created(Cgroup(ctx.arg(0)), ctx.arg(1));
    0
}

/// A cgroup directory was removed.
#[raw_tracepoint(tracepoint = "cgroup_rmdir")]
pub fn cgroup_removed(ctx: RawTracePointContext) -> i32 {
    removed(Cgroup(ctx.arg(0)), ctx.arg(1));
    0
}

#[inline(always)]
fn created(cgroup: Cgroup, path: u64) -> Option<()> {
    let parent_id = parent_in_hierarchy(cgroup)?;
    WATCHED_CGROUPS.get_ptr(parent_id)?;
    let id = cgroup.id()?;
    if WATCHED_CGROUPS.insert(id, WatchedCgroup::default(), 0).is_err() {
        lose(Loss::Watches);
    }
    report(kind::CGROUP_CREATED, cgroup, id, parent_id, path);
    Some(())
}

#[inline(always)]
fn removed(cgroup: Cgroup, path: u64) -> Option<()> {
    let parent_id = parent_in_hierarchy(cgroup)?;
    let id = cgroup.id()?;
    WATCHED_CGROUPS.remove(id).ok()?;
    report(kind::CGROUP_REMOVED, cgroup, id, parent_id, path);
    Some(())
}

/// The parent's id, if the cgroup lies in the hierarchy that containers live in.
#[inline(always)]
fn parent_in_hierarchy(cgroup: Cgroup) -> Option<u64> {
    if cgroup.hierarchy()? != config!(hierarchy) {
        return None;
    }
    cgroup.parent()?.id()
}

#[inline(always)]
fn report(kind: u32, cgroup: Cgroup, id: u64, parent_id: u64, path: u64) {
    let Some(mut entry) = CGROUPS.reserve::<CgroupRecord>(0) else {
        lose(Loss::Cgroups);
        return;
    };
    let hierarchy = config!(hierarchy);
    let record = entry.as_mut_ptr();
    // SAFETY: the entry is as large as a record. `path` may stay as it is, since `path_len` is
    // the number of bytes that count.
    let text = unsafe {
        addr_of_mut!((*record).head).write(Head {
            kind,
            flags: flags::WATCHED_CGROUP | flags::CGROUP_KNOWN,
            time_ns: bpf_ktime_get_boot_ns(),
        });
        addr_of_mut!((*record).cgroup_id).write(id);
        addr_of_mut!((*record).parent_id).write(parent_id);
        addr_of_mut!((*record).hierarchy).write(hierarchy);
        &mut *addr_of_mut!((*record).path)
    };
    let mut length = copy_text(path, text);
    // A copy that ends one byte before the final zero was cut off.
    if length >= PATH_LEN - 1 {
        length = cgroup.name().map_or(0, |name| copy_text(name, text));
        // SAFETY: as above; the head has been written.
        unsafe { (*record).head.flags |= flags::NAME_ONLY };
    }
    // SAFETY: as above.
    unsafe { addr_of_mut!((*record).path_len).write(length as u32) };
    entry.submit(0);
}

/// Copies a kernel string and returns its length without the final zero.
#[inline(always)]
fn copy_text(from: u64, to: &mut [u8; PATH_LEN]) -> usize {
    // SAFETY: the helper checks the source itself and writes no more than `to` holds.
    match unsafe { bpf_probe_read_kernel_str_bytes(from as *const u8, to) } {
        Ok(text) => text.len(),
        Err(_) => 0,
    }
}
