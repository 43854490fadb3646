//! The records, globals and map values that the probes and the agent share.
//!
//! Owns their layout and nothing else: every type is plain data with a fixed C layout, without
//! implicit padding, so that the bytes one side writes are the bytes the other side reads.
//! [`LAYOUT`] is compiled into the probe object; `cargo xtask ebpf` refuses an object whose layout
//! differs from the agent's.
#![no_std]

mod config;
mod record;

pub use config::ABSENT;
pub use config::Config;
pub use config::Offsets;
pub use config::SUBSYSTEM_DEFAULT_HIERARCHY;
pub use record::COMM_LEN;
pub use record::CgroupRecord;
pub use record::ExitRecord;
pub use record::Head;
pub use record::OomRecord;
pub use record::PATH_LEN;
pub use record::WatchedCgroup;
pub use record::flags;
pub use record::kind;
pub use record::watch;

use core::mem::offset_of;
use core::mem::size_of;

/// Names of the programs, maps and globals inside the probe object.
pub mod names {
    /// Ring buffer of [`super::ExitRecord`] and [`super::OomRecord`].
    pub const EXITS: &str = "EXITS";
    /// Ring buffer of [`super::CgroupRecord`].
    pub const CGROUPS: &str = "CGROUPS";
    /// Per-CPU counters of what was lost, indexed by [`super::Loss`].
    pub const DROPS: &str = "DROPS";
    /// Cgroup ids whose processes, children and stalls are reported.
    pub const WATCHED_CGROUPS: &str = "WATCHED_CGROUPS";
    /// The global of type [`super::Config`].
    pub const CONFIG: &str = "CONFIG";
    /// The global of type [`super::Offsets`].
    pub const OFFSETS: &str = "OFFSETS";
    /// The constant of type [`super::Layout`].
    pub const LAYOUT: &str = "LAYOUT";
}

/// What a slot of the `DROPS` array counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Loss {
    /// Exit and OOM records that found their ring buffer full.
    Exits = 0,
    /// Cgroup records that found their ring buffer full.
    Cgroups = 1,
    /// New cgroups that could not be watched because the watch map was full.
    Watches = 2,
}

impl Loss {
    /// Number of slots.
    pub const COUNT: u32 = 3;
}

/// Sizes and offsets that both sides must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Layout {
    /// Size of [`ExitRecord`].
    pub exit: u32,
    /// Size of [`OomRecord`].
    pub oom: u32,
    /// Size of [`CgroupRecord`].
    pub cgroup: u32,
    /// Size of [`WatchedCgroup`].
    pub watched: u32,
    /// Size of [`Config`].
    pub config: u32,
    /// Size of [`Offsets`].
    pub offsets: u32,
    /// Offset of the command name in [`ExitRecord`].
    pub exit_comm: u32,
    /// Offset of the command name in [`OomRecord`].
    pub oom_comm: u32,
    /// Offset of the path in [`CgroupRecord`].
    pub cgroup_path: u32,
    /// Raised by hand when a field changes its meaning but not its place.
    pub revision: u32,
}

/// The layout of this build.
pub const LAYOUT: Layout = Layout {
    exit: size_of::<ExitRecord>() as u32,
    oom: size_of::<OomRecord>() as u32,
    cgroup: size_of::<CgroupRecord>() as u32,
    watched: size_of::<WatchedCgroup>() as u32,
    config: size_of::<Config>() as u32,
    offsets: size_of::<Offsets>() as u32,
    exit_comm: offset_of!(ExitRecord, comm) as u32,
    oom_comm: offset_of!(OomRecord, comm) as u32,
    cgroup_path: offset_of!(CgroupRecord, path) as u32,
    revision: 2,
};
