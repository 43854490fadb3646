//! CPU time, memory, processes and pressure of one cgroup.
//!
//! ```text
//!  v2  cpu.stat memory.{current,stat,max} memory.swap.{current,max} pids.current {cpu,memory,io}.pressure
//!  v1  cpuacct.usage memory.{usage,limit}_in_bytes memory.stat memory.memsw.{usage,limit}_in_bytes pids.current
//! ```

use super::file::Folder;
use super::place::CgroupPlace;
use super::place::OpenCgroup;
use super::pressure::Pressure;

/// Usage at one moment. Values without a file are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CgroupUsage {
    /// CPU time since the cgroup was created, over all cores, in nanoseconds.
    pub cpu: Option<u64>,
    /// CPU pressure.
    pub cpu_pressure: Pressure,
    /// Memory.
    pub memory: Option<MemoryUsage>,
    /// Memory pressure.
    pub memory_pressure: Pressure,
    /// IO pressure.
    pub io_pressure: Pressure,
    /// Processes and threads.
    pub tasks: Option<u64>,
    /// Counters that are in the same files.
    pub counters: FileCounters,
}

/// Further counters in `memory.stat` and, with v2, `cpu.stat`, which are read anyway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileCounters {
    /// CPU time in user mode, in nanoseconds.
    pub cpu_user: Option<u64>,
    /// CPU time in kernel mode, in nanoseconds.
    pub cpu_system: Option<u64>,
    /// Throttling by a quota.
    pub throttling: Throttling,
    /// Pages of files, in bytes.
    pub cache: u64,
    /// Mapped pages of files, in bytes.
    pub mapped_file: u64,
    /// Active file pages, in bytes.
    pub active_file: u64,
    /// Inactive file pages, in bytes.
    pub inactive_file: u64,
    /// Kernel memory, in bytes, where `memory.stat` has it.
    pub kernel: Option<u64>,
    /// Page faults of the cgroup without its descendants, where the kernel distinguishes them.
    pub own_page_faults: u64,
    /// Page faults that read from a disk, likewise.
    pub own_major_page_faults: u64,
    /// Reclaim and write-back of pages; absent with v1, which does not count them.
    pub reclaim: Option<ReclaimCounters>,
}

/// Reclaim and write-back of the pages of a cgroup (v2: `memory.stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimCounters {
    /// File pages that are not written back yet, in bytes.
    pub file_dirty: u64,
    /// File pages that are being written back, in bytes.
    pub file_writeback: u64,
    /// Pages that were looked at since the cgroup was created.
    pub scanned: u64,
    /// Pages that were reclaimed.
    pub reclaimed: u64,
    /// File pages that were needed again after they had been reclaimed.
    pub refaults_file: u64,
    /// Anonymous pages, likewise.
    pub refaults_anon: u64,
}

/// Throttling by a CPU quota since the cgroup was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Periods in which a task ran.
    pub periods: u64,
    /// Periods in which the quota was exhausted.
    pub throttled_periods: u64,
    /// Time for which tasks were throttled, in nanoseconds.
    pub throttled: u64,
    /// Periods in which more than the quota was used (`cpu.max.burst`).
    pub burst_periods: u64,
    /// Time that was used beyond the quota, in nanoseconds.
    pub burst: u64,
}

/// Memory of a cgroup, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// All charged memory.
    pub usage: u64,
    /// Usage without inactive file pages.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: u64,
    /// Page faults since the start.
    pub page_faults: u64,
    /// Page faults that read from a disk.
    pub major_page_faults: u64,
    /// The limit, if there is one.
    pub limit: Option<u64>,
    /// Swap in use, if known; none where the kernel does not count it.
    pub swap: Option<u64>,
    /// The limit on swap, if there is one.
    pub swap_limit: Option<u64>,
}

impl CgroupPlace {
    /// Reads the memory alone.
    pub fn read_memory(&self) -> Option<MemoryUsage> {
        memory_in(&Folder::open(self.memory.as_deref()?)?, self.v2, &mut FileCounters::default())
    }

    /// Reads the usage; nothing of a cgroup that was removed.
    pub fn read(&self) -> CgroupUsage {
        self.open().read()
    }
}

impl OpenCgroup {
    /// Reads the usage; nothing of a cgroup that was removed.
    pub fn read(&self) -> CgroupUsage {
        let pressure = |file: &str| {
            let text = self.memory.as_ref().filter(|_| self.v2).and_then(|folder| folder.text(file));
            text.map(|text| Pressure::parse(&text)).unwrap_or_default()
        };
        let mut counters = FileCounters::default();
        let cpu = |folder: &Folder| if self.v2 { cpu_v2(folder, &mut counters) } else { cpu_v1(folder) };
        let cpu = self.cpu.as_deref().and_then(cpu);
        CgroupUsage {
            cpu,
            cpu_pressure: pressure("cpu.pressure"),
            memory: self.memory.as_deref().and_then(|folder| memory_in(folder, self.v2, &mut counters)),
            memory_pressure: pressure("memory.pressure"),
            io_pressure: pressure("io.pressure"),
            tasks: self.pids.as_deref().and_then(|folder| folder.number("pids.current")),
            counters,
        }
    }
}

impl CgroupUsage {
    /// False for a cgroup that was removed.
    pub fn is_there(&self) -> bool {
        self.cpu.is_some() || self.memory.is_some()
    }

    /// Has values of each controller of which `other` has any.
    pub fn has_controllers_of(&self, other: &Self) -> bool {
        let has = |usage: &Self| [usage.cpu.is_some(), usage.memory.is_some(), usage.tasks.is_some()];
        has(self).into_iter().zip(has(other)).all(|(own, others)| own || !others)
    }
}

impl MemoryUsage {
    /// Bytes left below the limit.
    pub fn available(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.working_set))
    }
}

impl std::ops::Add for MemoryUsage {
    type Output = Self;

    /// Of two cgroups together. There is a limit only if both have one.
    fn add(self, other: Self) -> Self {
        let known = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).reduce(u64::saturating_add);
        let both = |one: Option<u64>, other: Option<u64>| Some(one?.saturating_add(other?));
        Self {
            usage: self.usage.saturating_add(other.usage),
            working_set: self.working_set.saturating_add(other.working_set),
            rss: self.rss.saturating_add(other.rss),
            page_faults: self.page_faults.saturating_add(other.page_faults),
            major_page_faults: self.major_page_faults.saturating_add(other.major_page_faults),
            limit: both(self.limit, other.limit),
            swap: known(self.swap, other.swap),
            swap_limit: both(self.swap_limit, other.swap_limit),
        }
    }
}

fn memory_in(folder: &Folder, v2: bool, counters: &mut FileCounters) -> Option<MemoryUsage> {
    if v2 { memory_v2(folder, counters) } else { memory_v1(folder, counters) }
}

fn cpu_v2(folder: &Folder, counters: &mut FileCounters) -> Option<u64> {
    let stat = folder.table("cpu.stat");
    let nanos = |name: &str| stat.get(name).map(|micros| micros.saturating_mul(1000));
    (counters.cpu_user, counters.cpu_system) = (nanos("user_usec"), nanos("system_usec"));
    counters.throttling = Throttling {
        periods: stat.get("nr_periods").unwrap_or(0),
        throttled_periods: stat.get("nr_throttled").unwrap_or(0),
        throttled: nanos("throttled_usec").unwrap_or(0),
        burst_periods: stat.get("nr_bursts").unwrap_or(0),
        burst: nanos("burst_usec").unwrap_or(0),
    };
    nanos("usage_usec")
}

fn cpu_v1(folder: &Folder) -> Option<u64> {
    folder.number("cpuacct.usage")
}

fn memory_v2(folder: &Folder, counters: &mut FileCounters) -> Option<MemoryUsage> {
    let stat = folder.table("memory.stat");
    let of = |name: &str| stat.get(name).unwrap_or(0);
    // The root has no memory.current.
    let of_root = || stat.get("anon")?.checked_add(stat.get("file")?);
    let usage = folder.number("memory.current").or_else(of_root)?;
    // In the order of the file.
    let (rss, cache, kernel, mapped_file) = (of("anon"), of("file"), stat.get("kernel"), of("file_mapped"));
    let (file_dirty, file_writeback) = (of("file_dirty"), of("file_writeback"));
    let (inactive_file, active_file) = (of("inactive_file"), of("active_file"));
    let (refaults_anon, refaults_file) = (of("workingset_refault_anon"), of("workingset_refault_file"));
    let (scanned, reclaimed) = (of("pgscan"), of("pgsteal"));
    let (page_faults, major_page_faults) = (of("pgfault"), of("pgmajfault"));
    *counters = FileCounters {
        cache,
        mapped_file,
        active_file,
        inactive_file,
        kernel,
        own_page_faults: page_faults,
        own_major_page_faults: major_page_faults,
        reclaim: Some(ReclaimCounters { file_dirty, file_writeback, scanned, reclaimed, refaults_file, refaults_anon }),
        ..*counters
    };
    Some(MemoryUsage {
        usage,
        working_set: usage.saturating_sub(inactive_file),
        rss,
        page_faults,
        major_page_faults,
        limit: folder.limit("memory.max"),
        swap: Some(folder.number("memory.swap.current").unwrap_or(NO_SWAP)),
        swap_limit: folder.limit("memory.swap.max"),
    })
}

/// Swap of a cgroup where the kernel does not count it, as with cAdvisor: the series of a node are the same everywhere.
const NO_SWAP: u64 = 0;

fn memory_v1(folder: &Folder, counters: &mut FileCounters) -> Option<MemoryUsage> {
    let stat = folder.table("memory.stat");
    let of = |name: &str| stat.get(name).unwrap_or(0);
    let usage = folder.number("memory.usage_in_bytes")?;
    // These files count memory and swap together.
    let both = folder.number("memory.memsw.usage_in_bytes");
    let both_limit = folder.limit("memory.memsw.limit_in_bytes");
    let memory_limit = folder.limit("memory.limit_in_bytes");
    // In the order of the file.
    let (own_page_faults, own_major_page_faults) = (of("pgfault"), of("pgmajfault"));
    let (cache, rss, mapped_file) = (of("total_cache"), of("total_rss"), of("total_mapped_file"));
    let (inactive_file, active_file) = (of("total_inactive_file"), of("total_active_file"));
    *counters = FileCounters {
        cache,
        mapped_file,
        active_file,
        inactive_file,
        own_page_faults,
        own_major_page_faults,
        ..*counters
    };
    Some(MemoryUsage {
        usage,
        working_set: usage.saturating_sub(inactive_file),
        rss,
        // As cAdvisor, whose counters with v1 are those of the cgroup alone, also for a hierarchy.
        page_faults: own_page_faults,
        major_page_faults: own_major_page_faults,
        limit: memory_limit,
        swap: Some(both.map_or(NO_SWAP, |both| both.saturating_sub(usage))),
        swap_limit: both_limit.zip(memory_limit).map(|(both, memory)| both.saturating_sub(memory)),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::cgroups::Layout;

    /// Creates the folder of a cgroup with these files.
    pub(crate) fn write(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }

    #[test]
    fn version_2() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        write(
            &dir.path().join("kubepods/poda-b/c1"),
            &[
                ("cpu.stat", "usage_usec 1500\nuser_usec 1000\n"),
                ("memory.current", "1000\n"),
                ("memory.stat", "anon 300\ninactive_file 400\npgfault 7\npgmajfault 2\n"),
                ("memory.max", "4096\n"),
                ("memory.swap.current", "5\n"),
                ("memory.swap.max", "max\n"),
                ("pids.current", "3\n"),
                ("cgroup.procs", "7\n8\n"),
                ("cpu.pressure", "some avg10=1.00 avg60=0.00 avg300=0.00 total=42\n"),
            ],
        );
        let place = CgroupPlace::at(&layout, "/kubepods/poda-b/c1");
        assert_eq!((place.path(&layout).as_deref(), place.exists()), (Some("/kubepods/poda-b/c1"), true));
        let usage = place.read();
        assert_eq!((usage.cpu, usage.tasks, usage.cpu_pressure.some.total), (Some(1_500_000), Some(3), 42));
        assert_eq!((usage.counters.cpu_user, usage.counters.inactive_file), (Some(1_000_000), 400));
        assert_eq!(place.processes(), [7, 8]);
        let memory = MemoryUsage {
            usage: 1000,
            working_set: 600,
            rss: 300,
            page_faults: 7,
            major_page_faults: 2,
            limit: Some(4096),
            swap: Some(5),
            swap_limit: None,
        };
        assert_eq!(usage.memory, Some(memory));
        assert_eq!(memory.available(), Some(3496));
        write(dir.path(), &[("memory.stat", "anon 300\nfile 500\ninactive_file 200\n")]);
        let root = CgroupPlace::at(&layout, "/").read().memory.expect("the usage of the root");
        assert_eq!((root.usage, root.working_set), (800, 600), "without what the kernel itself uses");
        let slice = CgroupPlace::at(&layout, "/kubepods.slice/kubepods-poda_b.slice/cri-1.scope");
        assert!(!slice.exists());
        assert_eq!(slice.read(), CgroupUsage::default(), "a cgroup that does not exist uses nothing");
    }

    #[test]
    fn version_1() {
        let dir = tempfile::tempdir().unwrap();
        let mount = |name: &str| (name.to_owned(), dir.path().join(name));
        let controllers = [mount("cpuacct"), mount("memory"), mount("pids")].into();
        let layout = Layout::V1 { controllers, unified: None };
        write(&dir.path().join("cpuacct/a/c"), &[("cpuacct.usage", "77\n")]);
        write(
            &dir.path().join("memory/b/c"),
            &[
                ("memory.usage_in_bytes", "1000\n"),
                ("memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory.stat", "inactive_file 1\ntotal_inactive_file 1200\ntotal_rss 9\npgfault 4\ntotal_pgfault 5\n"),
                ("memory.memsw.usage_in_bytes", "1100\n"),
            ],
        );
        let place = CgroupPlace::named(&layout, "4:cpu,cpuacct:/a/c\n3:memory:/b/c/d\n0::/\n", "c").unwrap();
        let usage = place.read();
        assert_eq!((usage.cpu, usage.tasks), (Some(77), None));
        let memory = MemoryUsage { usage: 1000, rss: 9, page_faults: 4, swap: Some(100), ..MemoryUsage::default() };
        assert_eq!(usage.memory, Some(memory), "inactive pages beyond the usage are not subtracted twice");
    }

    /// The same lines, beginning with each of them in turn, in both directions.
    fn in_other_orders(lines: &str) -> Vec<String> {
        let lines: Vec<&str> = lines.split(", ").collect();
        let rotated = |by: usize| lines.iter().cycle().skip(by).take(lines.len()).map(|line| format!("{line}\n"));
        let both = |by: usize| {
            let forward: Vec<String> = rotated(by).collect();
            [forward.concat(), forward.iter().rev().map(String::as_str).collect()]
        };
        (0..lines.len()).flat_map(both).collect()
    }

    #[test]
    fn the_order_of_memory_stat_is_that_of_any_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        let reclaim = |refaults_file, refaults_anon| {
            let (file_dirty, file_writeback, scanned, reclaimed) = (5, 6, 11, 12);
            Some(ReclaimCounters { file_dirty, file_writeback, scanned, reclaimed, refaults_file, refaults_anon })
        };
        let old = FileCounters {
            cache: 2,
            mapped_file: 4,
            active_file: 8,
            inactive_file: 7,
            own_page_faults: 13,
            own_major_page_faults: 14,
            reclaim: reclaim(0, 0),
            ..FileCounters::default()
        };
        let new = FileCounters { kernel: Some(3), reclaim: reclaim(10, 9), ..old };
        let linux_4_18 = "anon 1, file 2, kernel_stack 90, file_mapped 4, file_dirty 5, file_writeback 6, \
                          inactive_file 7, active_file 8, pgfault 13, pgmajfault 14, pgscan 11, pgsteal 12, \
                          workingset_refault 91";
        let linux_6_18 = "anon 1, file 2, kernel 3, kernel_stack 90, file_mapped 4, file_dirty 5, file_writeback 6, \
                          inactive_file 7, active_file 8, workingset_refault_anon 9, workingset_refault_file 10, \
                          pgscan 11, pgsteal 12, pgscan_kswapd 91, pgfault 13, pgmajfault 14";
        for (lines, counters) in [(linux_4_18, old), (linux_6_18, new)] {
            for stat in in_other_orders(lines) {
                write(&dir.path().join("c"), &[("memory.current", "1000\n"), ("memory.stat", &stat)]);
                let usage = CgroupPlace::at(&layout, "/c").read();
                assert_eq!(usage.counters, counters, "{stat}");
                let memory = usage.memory.expect("memory");
                assert_eq!((memory.rss, memory.working_set, memory.page_faults), (1, 993, 13), "{stat}");
            }
        }
    }

    #[test]
    fn a_kernel_that_does_not_count_swap_is_one_without_swap() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("c"), &[("memory.current", "1000\n"), ("memory.usage_in_bytes", "1000\n")]);
        let v1 = Layout::V1 { controllers: [("memory".to_owned(), dir.path().to_owned())].into(), unified: None };
        for layout in [Layout::V2 { mount: dir.path().to_owned() }, v1] {
            let memory = CgroupPlace::at(&layout, "/c").read().memory.expect("memory");
            assert_eq!((memory.usage, memory.swap, memory.swap_limit), (1000, Some(0), None), "{layout:?}");
        }
    }

    #[test]
    fn the_order_of_memory_stat_is_any_with_version_1() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V1 { controllers: [("memory".to_owned(), dir.path().to_owned())].into(), unified: None };
        let counters = FileCounters {
            cache: 3,
            mapped_file: 5,
            active_file: 7,
            inactive_file: 6,
            own_page_faults: 1,
            own_major_page_faults: 2,
            ..FileCounters::default()
        };
        let lines = "cache 90, rss 91, mapped_file 92, pgfault 1, pgmajfault 2, inactive_file 93, active_file 94, \
                     total_cache 3, total_rss 4, total_mapped_file 5, total_pgfault 95, total_inactive_file 6, \
                     total_active_file 7";
        for stat in in_other_orders(lines) {
            write(&dir.path().join("c"), &[("memory.usage_in_bytes", "1000\n"), ("memory.stat", &stat)]);
            let usage = CgroupPlace::at(&layout, "/c").read();
            assert_eq!((usage.counters, usage.memory.map(|memory| memory.rss)), (counters, Some(4)), "{stat}");
        }
    }

    #[test]
    fn memory_of_two_cgroups() {
        let one = MemoryUsage { usage: 5, working_set: 4, limit: Some(10), swap: Some(2), ..MemoryUsage::default() };
        let other = MemoryUsage { usage: 1, working_set: 1, limit: Some(20), rss: 3, ..MemoryUsage::default() };
        let sum =
            MemoryUsage { usage: 6, working_set: 5, rss: 3, limit: Some(30), swap: Some(2), ..MemoryUsage::default() };
        assert_eq!(one + other, sum);
        assert_eq!((one + MemoryUsage::default()).limit, None, "one is not limited");
    }
}
