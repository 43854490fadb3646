//! Reclaim of the machine's memory, from `/proc/vmstat`.

use std::fs;

use crate::cgroups::arithmetic::page_size;

const VMSTAT: &str = "/proc/vmstat";

/// Counters since the machine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaim {
    /// Pages that were looked at because the machine ran short of memory. The kernel does not count reclaim for the limit of
    /// a cgroup here.
    pub scanned: u64,
    /// Bytes that were read again after they had been evicted, whatever the reason.
    pub refaulted: u64,
}

impl Reclaim {
    /// Reads the counters; zero if there are none. Blocks for the time of a file of the kernel.
    pub fn read() -> Self {
        Self::parse(&fs::read_to_string(VMSTAT).unwrap_or_default(), page_size())
    }

    fn parse(text: &str, page: u64) -> Self {
        let mut found = Self::default();
        for (name, value) in text.lines().filter_map(|line| line.split_once(' ')) {
            let value = || value.trim().parse::<u64>().unwrap_or(0);
            match name {
                "pgscan_kswapd" | "pgscan_direct" => found.scanned = found.scanned.saturating_add(value()),
                // Kernels before 5.9 do not distinguish pages of files from others.
                "workingset_refault" | "workingset_refault_anon" | "workingset_refault_file" => {
                    found.refaulted = found.refaulted.saturating_add(value().saturating_mul(page));
                }
                _ => {}
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_table() {
        let text = "nr_free_pages 1\nworkingset_refault_anon 2\nworkingset_refault_file 3\npgscan_kswapd 10\n\
            pgscan_direct 20\npgscan_direct_throttle 400\npgscan_anon 999\n";
        assert_eq!(Reclaim::parse(text, 4096), Reclaim { scanned: 30, refaulted: 5 * 4096 });
        assert_eq!(
            Reclaim::parse("workingset_refault 1\nbroken\npgscan_direct x\n", 1),
            Reclaim { scanned: 0, refaulted: 1 }
        );
    }
}
