//! Usage of the whole machine. The root cgroup lacks some files; `/proc` replaces them.

use std::fs;
use std::path::Path;

use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::CgroupUsage;
use crate::cgroups::usage::MemoryUsage;
use crate::cgroups::usage::Pressure;

/// Reads the machine.
#[derive(Clone, Copy, Debug)]
pub struct Machine;

/// Processes and threads of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessCounts {
    /// The limit.
    pub max: Option<i64>,
    /// The present number.
    pub current: Option<i64>,
}

impl Machine {
    /// Usage of the root cgroup. The limit of memory is the size of the machine's memory.
    pub fn usage(layout: &Layout) -> CgroupUsage {
        let mut usage = CgroupPlace::at(layout, "/").read();
        usage.memory = Some(of_machine(usage.memory));
        if layout.is_v2() {
            let pressure = |name: &str| Pressure::read(&Path::new("/proc/pressure").join(name));
            usage.cpu_pressure = pressure("cpu");
            usage.memory_pressure = pressure("memory");
            usage.io_pressure = pressure("io");
        }
        usage
    }

    /// The memory of [`Self::usage`] alone.
    pub fn memory(layout: &Layout) -> MemoryUsage {
        of_machine(CgroupPlace::at(layout, "/").read_memory())
    }

    /// Seconds since the Unix epoch at which the machine started.
    pub fn boot_time() -> Option<i64> {
        let table = fs::read_to_string("/proc/stat").ok()?;
        table.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
    }

    /// Processes and threads.
    pub fn processes() -> ProcessCounts {
        let number = |file: &str| fs::read_to_string(file).ok()?.trim().parse::<i64>().ok();
        let limits = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"].map(number);
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let current = load.split(' ').nth(3).and_then(|field| field.split_once('/')?.1.parse().ok());
        ProcessCounts { max: limits.into_iter().flatten().min(), current }
    }
}

/// Memory of the root cgroup, with the machine's own as the limit. Without a memory controller there is none of the cgroup.
fn of_machine(of_root: Option<MemoryUsage>) -> MemoryUsage {
    let table = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let MemoryUsage { limit, swap, swap_limit, .. } = meminfo(&table);
    MemoryUsage { limit, swap, swap_limit, ..of_root.unwrap_or_else(|| meminfo(&table)) }
}

fn meminfo(table: &str) -> MemoryUsage {
    let of = |name: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.unwrap_or(0).saturating_mul(1024)
    };
    let (total, swap_total) = (of("MemTotal"), of("SwapTotal"));
    let usage = total.saturating_sub(of("MemFree"));
    MemoryUsage {
        usage,
        working_set: usage.saturating_sub(of("Inactive(file)")),
        rss: of("AnonPages"),
        limit: Some(total),
        swap: Some(swap_total.saturating_sub(of("SwapFree"))),
        swap_limit: Some(swap_total),
        ..MemoryUsage::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_table() {
        let table = "MemTotal: 1000 kB\nMemFree: 300 kB\nInactive(file): 200 kB\nAnonPages: 50 kB\nSwapTotal: 10 kB\n\
            SwapFree: 4 kB\n";
        let memory = meminfo(table);
        assert_eq!((memory.usage, memory.working_set, memory.rss), (700 << 10, 500 << 10, 50 << 10));
        assert_eq!((memory.limit, memory.swap, memory.swap_limit), (Some(1000 << 10), Some(6 << 10), Some(10 << 10)));
    }

    #[test]
    fn this_machine() {
        let usage = Machine::usage(&crate::cgroups::Hierarchies::detect().unwrap().layout);
        assert!(usage.cpu > Some(0) && usage.memory.unwrap().working_set > 0);
        assert!(Machine::boot_time() > Some(1_500_000_000));
        let processes = Machine::processes();
        assert!(processes.current > Some(0) && processes.max >= processes.current);
    }
}
