//! Usage of the whole machine. The root cgroup lacks some files; `/proc` replaces them.

use std::fs;
use std::path::Path;

use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::CgroupUsage;
use crate::cgroups::usage::MemoryUsage;
use crate::cgroups::usage::Pressure;

const PROC: &str = "/proc";

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
    /// Usage of the root cgroup, and of the machine by the files of `proc`: the limit of memory is the size of the
    /// machine's memory, and pressure is the machine's, also with cgroup v1.
    pub fn usage(layout: &Layout, proc: &Path) -> CgroupUsage {
        let mut usage = CgroupPlace::at(layout, "/").read();
        usage.memory = Some(of_machine(usage.memory, proc));
        // The node has it with cgroup v1 too.
        let pressure = |name: &str| Pressure::read(&proc.join("pressure").join(name));
        usage.cpu_pressure = pressure("cpu");
        usage.memory_pressure = pressure("memory");
        usage.io_pressure = pressure("io");
        usage
    }

    /// The memory of [`Self::usage`] alone.
    pub fn memory(layout: &Layout) -> MemoryUsage {
        of_machine(CgroupPlace::at(layout, "/").read_memory(), Path::new(PROC))
    }

    /// Bytes of huge pages of all sizes, by the files of `proc`. The kernel charges them to no cgroup's memory, unless cgroups
    /// are mounted with `memory_hugetlb_accounting`.
    pub fn huge_pages(proc: &Path) -> u64 {
        let table = fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
        kibibytes(&table, "Hugetlb").unwrap_or(0)
    }

    /// The kernel provides pressure stall information of the machine.
    pub fn has_pressure(proc: &Path) -> bool {
        // The files exist but cannot be read while PSI is compiled in and disabled.
        fs::read(proc.join("pressure/cpu")).is_ok()
    }

    /// Seconds since the Unix epoch at which the machine started.
    pub fn boot_time(proc: &Path) -> Option<i64> {
        let table = fs::read_to_string(proc.join("stat")).ok()?;
        table.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
    }

    /// Processes and threads.
    pub fn processes() -> ProcessCounts {
        Self::processes_in(Path::new(PROC))
    }

    /// Processes and threads, by the files of `proc`.
    pub fn processes_in(proc: &Path) -> ProcessCounts {
        let number = |file: &str| fs::read_to_string(proc.join(file)).ok()?.trim().parse::<i64>().ok();
        let limits = ["sys/kernel/pid_max", "sys/kernel/threads-max"].map(number);
        let load = fs::read_to_string(proc.join("loadavg")).unwrap_or_default();
        let current = load.split(' ').nth(3).and_then(|field| field.split_once('/')?.1.parse().ok());
        ProcessCounts { max: limits.into_iter().flatten().min(), current }
    }
}

/// Memory of the root cgroup, with the machine's own as the limit. Without a memory controller there is none of the cgroup.
fn of_machine(of_root: Option<MemoryUsage>, proc: &Path) -> MemoryUsage {
    let table = fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
    let MemoryUsage { limit, swap, swap_limit, .. } = meminfo(&table);
    MemoryUsage { limit, swap, swap_limit, ..of_root.unwrap_or_else(|| meminfo(&table)) }
}

fn meminfo(table: &str) -> MemoryUsage {
    let of = |name: &str| kibibytes(table, name).unwrap_or(0);
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

/// The value of a line of `/proc/meminfo`, in bytes.
pub(super) fn kibibytes(table: &str, name: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024))
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
    fn without_a_memory_controller_the_memory_is_that_of_the_table() {
        let proc = tempfile::tempdir().unwrap();
        let table = "MemTotal: 1000 kB\nMemFree: 300 kB\nInactive(file): 200 kB\n";
        fs::write(proc.path().join("meminfo"), table).unwrap();
        let layout = Layout::V1 { controllers: [].into(), unified: None };
        let memory = Machine::usage(&layout, proc.path()).memory.unwrap();
        assert_eq!((memory.working_set, memory.limit), (500 << 10, Some(1000 << 10)));
    }

    #[test]
    fn huge_pages_of_all_sizes() {
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(Machine::huge_pages(proc.path()), 0, "not counted");
        let table = "HugePages_Total:       3\nHugepagesize:       2048 kB\nHugetlb:         1054720 kB\n";
        fs::write(proc.path().join("meminfo"), table).unwrap();
        assert_eq!(Machine::huge_pages(proc.path()), (1 << 30) + (6 << 20), "one of 1 GiB, three of 2 MiB");
    }

    #[test]
    fn this_machine() {
        let usage = Machine::usage(&crate::cgroups::Hierarchies::detect().unwrap().layout, Path::new(PROC));
        assert!(usage.cpu > Some(0) && usage.memory.unwrap().working_set > 0);
        assert!(Machine::boot_time(Path::new(PROC)) > Some(1_500_000_000));
        let processes = Machine::processes();
        assert!(processes.current > Some(0) && processes.max >= processes.current);
    }
}
