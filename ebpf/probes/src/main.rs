//! The kernel side: four sensors, each a handful of programs.
//!
//! | program | hook | since | reports |
//! |---|---|---|---|
//! | `process_exit` | raw tracepoint `sched_process_exit` | 5.8 | an OOM victim, or an init in a watched cgroup, ended |
//! | `oom_victim` | raw tracepoint `mark_victim` | 5.8, sizes 6.9 | OOM victims, and whose limit fired |
//! | `cgroup_created` | raw tracepoint `cgroup_mkdir` | 5.8 | a cgroup created below a watched one |
//! | `cgroup_removed` | raw tracepoint `cgroup_rmdir` | 5.8 | its removal |
//! | `reclaim_begin`, `reclaim_end` | raw tracepoints `mm_vmscan_*_reclaim_*` | 5.8 | stalls, counted in a map |
//!
//! Everything is filtered here: what is not watched costs a map lookup and wakes no process. The
//! programs decide nothing beyond that. Kernel structures are read at offsets that the agent takes
//! from the running kernel's BTF, so one object fits all kernels. 5.8 is where the ring buffer and
//! the boot clock helper came in.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod cgroup;
mod exit;
mod maps;
mod oom;
mod reclaim;
mod task;

use keblet_ebpf_common::LAYOUT as LAYOUT_OF_THIS_BUILD;
use keblet_ebpf_common::Layout;

/// Lets `cargo xtask ebpf` see that the agent reads records as they are written here.
#[unsafe(no_mangle)]
#[used]
static LAYOUT: Layout = LAYOUT_OF_THIS_BUILD;

/// The verifier lets helpers that read kernel memory only into programs under this licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
#[used]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
