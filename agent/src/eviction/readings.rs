//! Readings of the signals, and what each signal stands for. Pure.

use std::collections::BTreeMap;

use tokio::time::Instant;

use crate::config::eviction::Signal;
use crate::config::eviction::Threshold;
use crate::model::Amount;

/// A signal at one moment. Bytes, or numbers of inodes and process ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reading {
    /// What is left.
    pub available: i64,
    /// What there is in all.
    pub capacity: i64,
    /// When it was measured.
    pub at: Instant,
}

/// Which file systems the node has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DiskLayout {
    /// One for all.
    #[default]
    Shared,
    /// One of its own for images and writable layers.
    Dedicated,
    /// One of its own for images; writable layers are on the node's.
    Split,
}

/// All signals that could be measured: a threshold on another one cannot be met.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Readings {
    /// By signal.
    pub signals: BTreeMap<Signal, Reading>,
    /// The file systems; `None` before the runtime has reported where its images are.
    pub disks: Option<DiskLayout>,
}

/// What runs short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Resource {
    /// Memory.
    Memory,
    /// Bytes on disk.
    EphemeralStorage,
    /// Inodes.
    Inodes,
    /// Process ids.
    Pids,
}

impl Resource {
    /// The resource of a signal.
    pub(super) fn of(signal: Signal) -> Self {
        match signal {
            Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable => Self::Memory,
            Signal::NodeFsAvailable | Signal::ImageFsAvailable | Signal::ContainerFsAvailable => Self::EphemeralStorage,
            Signal::NodeFsInodesFree | Signal::ImageFsInodesFree | Signal::ContainerFsInodesFree => Self::Inodes,
            Signal::PidAvailable => Self::Pids,
        }
    }

    /// What runs short is a disk.
    pub(super) fn is_of_disk(self) -> bool {
        matches!(self, Self::EphemeralStorage | Self::Inodes)
    }

    /// Its name in events and statuses.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::EphemeralStorage => "ephemeral-storage",
            Self::Inodes => "inodes",
            Self::Pids => "pids",
        }
    }

    /// An amount of this resource.
    pub(super) fn amount(self, value: i64) -> Amount {
        match self {
            Self::Memory | Self::EphemeralStorage => Amount::bytes(value),
            Self::Inodes | Self::Pids => Amount::units(value),
        }
    }
}

/// The amount below which a threshold is met; `with_reclaim`: below which it is still met once it was acted on.
pub(super) fn limit(threshold: &Threshold, reading: &Reading, with_reclaim: bool) -> Amount {
    let capacity = Resource::of(threshold.signal).amount(reading.capacity);
    let value = threshold.value.of(capacity);
    match threshold.min_reclaim.filter(|_| with_reclaim) {
        Some(reclaim) => value + reclaim.of(capacity),
        None => value,
    }
}

/// The signal is below its threshold.
pub(super) fn is_met(threshold: &Threshold, readings: &Readings, with_reclaim: bool) -> bool {
    readings.signals.get(&threshold.signal).is_some_and(|reading| {
        let available = Resource::of(threshold.signal).amount(reading.available);
        available < limit(threshold, reading, with_reclaim)
    })
}

/// The thresholds on a node with these file systems: those of `containerfs` follow from those of the file system that
/// writable layers are on. Configured ones are replaced.
pub(super) fn for_layout(configured: &[Threshold], layout: DiskLayout) -> Vec<Threshold> {
    let copies = |signal: Signal| match (layout, signal) {
        (DiskLayout::Dedicated, Signal::ImageFsAvailable) => Some(Signal::ContainerFsAvailable),
        (DiskLayout::Dedicated, Signal::ImageFsInodesFree) => Some(Signal::ContainerFsInodesFree),
        (DiskLayout::Shared | DiskLayout::Split, Signal::NodeFsAvailable) => Some(Signal::ContainerFsAvailable),
        (DiskLayout::Shared | DiskLayout::Split, Signal::NodeFsInodesFree) => Some(Signal::ContainerFsInodesFree),
        _ => None,
    };
    let own = configured.iter().filter(|threshold| !is_of_containers(threshold.signal)).copied();
    let copied = own.clone().filter_map(|threshold| Some(Threshold { signal: copies(threshold.signal)?, ..threshold }));
    own.clone().chain(copied).collect()
}

/// A signal of the file system of writable layers.
pub(super) fn is_of_containers(signal: Signal) -> bool {
    matches!(signal, Signal::ContainerFsAvailable | Signal::ContainerFsInodesFree)
}
