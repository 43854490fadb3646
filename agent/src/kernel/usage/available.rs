//! Memory that the machine has left, by two definitions. The kubelet counts everything that is not in the working set; the
//! kernel estimates what a new process could get without swapping (`MemAvailable`, proc_meminfo(5)), which also counts
//! slab that can be reclaimed, and not all of the page cache.

use std::fs;

use super::Machine;
use crate::cgroups::Layout;
use crate::cgroups::usage::MemoryUsage;

/// Memory that is left, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AvailableMemory {
    /// The machine's memory without huge pages, which only pods that request them can use.
    pub capacity: u64,
    /// Capacity less the working set of the root cgroup: `memory.available` of the kubelet.
    pub working_set: u64,
    /// `MemAvailable`; kernels before 3.14 lack it.
    pub mem_available: Option<u64>,
}

impl AvailableMemory {
    /// Reads `memory.*` of the root cgroup and `/proc/meminfo`. `None` if the size of the memory is unknown. Blocks.
    pub fn read(layout: &Layout) -> Option<Self> {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let of = |name| super::machine::kibibytes(&meminfo, name);
        Self::of(Machine::memory(layout), of("Hugetlb").unwrap_or(0), of("MemAvailable"))
    }

    /// From readings. `hugepages`: bytes of huge pages of all sizes, which are no part of `MemAvailable`.
    pub fn of(machine: MemoryUsage, hugepages: u64, mem_available: Option<u64>) -> Option<Self> {
        let capacity = machine.limit?.saturating_sub(hugepages);
        let working_set = capacity.saturating_sub(machine.working_set);
        Some(Self { capacity, working_set, mem_available: mem_available.map(|bytes| bytes.min(capacity)) })
    }

    /// Difference of the two; positive if the kernel's estimate is higher than the kubelet's.
    pub fn difference(&self) -> Option<i64> {
        let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
        Some(signed(self.mem_available?) - signed(self.working_set))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_definitions() {
        let machine = MemoryUsage { working_set: 300, limit: Some(1000), ..MemoryUsage::default() };
        let found = AvailableMemory::of(machine, 100, Some(700)).expect("a size");
        assert_eq!(found, AvailableMemory { capacity: 900, working_set: 600, mem_available: Some(700) });
        assert_eq!(found.difference(), Some(100));
        let less = AvailableMemory::of(machine, 0, Some(650)).expect("a size");
        assert_eq!((less.working_set, less.difference()), (700, Some(-50)));
        assert_eq!(AvailableMemory::of(machine, 0, None).and_then(|found| found.difference()), None);
        assert_eq!(AvailableMemory::of(MemoryUsage::default(), 0, Some(1)), None);
    }

    #[test]
    fn this_machine() {
        let layout = crate::cgroups::Hierarchies::detect().expect("hierarchies").layout;
        let found = AvailableMemory::read(&layout).expect("a size");
        assert!(found.working_set > 0 && found.working_set < found.capacity);
        assert!(found.mem_available.is_some_and(|bytes| bytes > 0 && bytes <= found.capacity));
    }
}
