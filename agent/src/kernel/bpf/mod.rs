//! The kernel probes: load, attach, watch, read. Optional: without type information, permission or a hook, loading returns
//! one reason (or marks one probe as down) and the agent runs without them.
//!
//! Needs Linux 5.8 (ring buffers, boot clock), BTF, and CAP_BPF with CAP_PERFMON (or CAP_SYS_ADMIN). Needs no kprobes,
//! no tracefs and no CAP_SYS_RESOURCE: since 5.11 maps are charged to the memory cgroup, not to a resource limit.

mod load;
mod offsets;
mod record;
mod stream;
mod watch;

use std::path::PathBuf;

pub use load::LoadError;
pub use record::CgroupEvent;
pub use record::Exit;
pub use record::ExitStatus;
pub use record::KernelRecord;
pub use record::Oom;
pub use record::OomLimit;
pub use record::OomMemory;
pub use record::OomProcess;
pub use stream::ProbeOutput;
pub use stream::Records;
pub use watch::Losses;
pub use watch::Probes;
pub use watch::Stalls;
pub use watch::WatchError;

use super::memory;
pub use crate::cgroups::CgroupId;
use crate::cgroups::Hierarchy;

/// Options of loading.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kernel's type information, usually [`super::btf::VMLINUX`].
    pub btf: PathBuf,
    /// The cgroup hierarchy that containers live in.
    pub hierarchy: Hierarchy,
    /// Bytes of the ring buffer of exits and OOM kills, a power of two and whole pages; `None` for 256 KiB.
    pub exits_ring: Option<u32>,
}

impl Options {
    /// The running kernel's own type information and default sizes.
    pub fn new(hierarchy: Hierarchy) -> Self {
        Self { btf: super::btf::VMLINUX.into(), hierarchy, exits_ring: None }
    }
}

/// Loaded probes.
pub struct Loaded {
    /// What to watch, and counters. Probes stay attached until the last clone and the records are dropped.
    pub probes: Probes,
    /// Records of the probes.
    pub records: Records,
    /// Every probe, up or down.
    pub status: Vec<ProbeStatus>,
}

/// One program and whether it works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeStatus {
    /// Name of the program.
    pub program: &'static str,
    /// Why it is down; `None` while it is up.
    pub down: Option<String>,
}

/// Loads and attaches the probes on a blocking thread. Cancelling leaves nothing attached.
///
/// # Errors
/// See [`LoadError`].
pub async fn load(options: Options) -> Result<Loaded, LoadError> {
    let work = move || {
        memory::return_large_blocks();
        let parts = load::load(&options);
        memory::return_all();
        parts
    };
    let parts = tokio::task::spawn_blocking(work).await;
    let load::Parts { probes, rings, status } = parts.map_err(|error| LoadError::Aborted(error.to_string()))??;
    let records = Records::new(rings, probes.clone()).map_err(LoadError::Register)?;
    Ok(Loaded { probes, records, status })
}
