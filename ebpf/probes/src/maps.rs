//! Maps and globals, and the few ways to use them.

use aya_ebpf::Global;
use aya_ebpf::macros::map;
use aya_ebpf::maps::HashMap;
use aya_ebpf::maps::LruHashMap;
use aya_ebpf::maps::PerCpuArray;
use aya_ebpf::maps::RingBuf;
use core::mem::MaybeUninit;
use keblet_ebpf_common::Config;
use keblet_ebpf_common::Loss;
use keblet_ebpf_common::Offsets;
use keblet_ebpf_common::WatchedCgroup;

/// The agent's choices, written before the programs are loaded.
#[unsafe(no_mangle)]
pub static CONFIG: Global<Config> =
    Global::new(Config { hierarchy: 0, subsystem: 0, memory: 0, reserved: 0, page_kib: 0, victim_is_task: 0 });

/// Where the members of kernel structures lie, written before the programs are loaded.
#[unsafe(no_mangle)]
pub static OFFSETS: Global<Offsets> = Global::new(
    // SAFETY: all fields are plain integers, for which zero is a value.
    unsafe { MaybeUninit::zeroed().assume_init() },
);

/// Exits and OOM kills; separate from cgroup events, so that many of those lose no exit.
#[map]
pub static EXITS: RingBuf = RingBuf::with_byte_size(256 * 1024, 0);

/// Cgroup creations and removals.
#[map]
pub static CGROUPS: RingBuf = RingBuf::with_byte_size(128 * 1024, 0);

/// What was lost, per [`Loss`].
#[map]
pub static DROPS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Loss::COUNT, 0);

/// Cgroups whose processes, children and stalls are reported.
#[map]
pub static WATCHED_CGROUPS: HashMap<u64, WatchedCgroup> = HashMap::with_max_entries(8192, 0);

/// OOM victims that have not exited yet: process id to time of the choice.
#[map]
pub static OOM_VICTIMS: LruHashMap<u32, u64> = LruHashMap::with_max_entries(2048, 0);

/// Threads that are reclaiming memory: thread id to time of the beginning.
#[map]
pub static RECLAIMS: LruHashMap<u32, u64> = LruHashMap::with_max_entries(1024, 0);

/// Reads one field of [`CONFIG`]; the compiler must not fold in the value it sees.
macro_rules! config {
    ($field:ident) => {{
        let config = (&raw const crate::maps::CONFIG).cast::<keblet_ebpf_common::Config>();
        // SAFETY: the global is transparent over the type, initialised and never written again.
        unsafe { core::ptr::read_volatile(&raw const (*config).$field) }
    }};
}
pub(crate) use config;

/// Reads one field of [`OFFSETS`], widened for address arithmetic.
macro_rules! offset {
    ($field:ident) => {{
        let offsets = (&raw const crate::maps::OFFSETS).cast::<keblet_ebpf_common::Offsets>();
        // SAFETY: the global is transparent over the type, initialised and never written again.
        unsafe { core::ptr::read_volatile(&raw const (*offsets).$field) as u64 }
    }};
}
pub(crate) use offset;

/// Counts one lost record.
pub fn lose(what: Loss) {
    if let Some(counter) = DROPS.get_ptr_mut(what as u32) {
        // SAFETY: the slot belongs to this CPU, and the verifier has seen the null check.
        unsafe { *counter += 1 };
    }
}

/// Writes `record` to `ring`, or counts it as lost.
#[inline(always)]
pub fn emit<T: 'static>(ring: &RingBuf, loss: Loss, record: T) {
    match ring.reserve::<T>(0) {
        Some(mut entry) => {
            entry.write(record);
            entry.submit(0);
        }
        None => lose(loss),
    }
}
