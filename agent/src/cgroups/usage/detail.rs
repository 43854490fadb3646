//! Further counters and limits of one cgroup, for cAdvisor's metrics.
//!
//! ```text
//!  v2  cpu.{max,weight} memory.{peak,min,events} pids.max cgroup.procs io.stat
//!  v1  cpuacct.stat cpu.{stat,cfs_*,shares} memory.{max_usage,soft_limit,oom_control,...} pids.max cgroup.procs
//!      blkio.throttle.io_{service_bytes,serviced}_recursive
//! ```

use std::collections::BTreeMap;
use std::fs;

use nix::unistd::SysconfVar;
use nix::unistd::sysconf;

use super::basic::CgroupUsage;
use super::basic::FileCounters;
use super::basic::Throttling;
use super::file::Folder;
use super::place::CgroupPlace;
use super::place::OpenCgroup;
use super::place::process_ids;
use crate::cgroups::arithmetic;

/// Values beside [`super::CgroupUsage`]. Those without a file are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupDetail {
    /// CPU time in user mode, in nanoseconds.
    pub cpu_user: Option<u64>,
    /// CPU time in kernel mode, in nanoseconds.
    pub cpu_system: Option<u64>,
    /// Throttling by the quota; absent without a quota.
    pub throttling: Option<Throttling>,
    /// Limits and weights.
    pub limits: CgroupLimits,
    /// Memory.
    pub memory: Option<MemoryDetail>,
    /// Ids of the processes in the cgroup itself.
    pub processes: Option<Vec<u32>>,
    /// Input and output by disk.
    pub disks: Vec<DiskTraffic>,
}

/// What a cgroup may use, apart from the limits in [`super::MemoryUsage`]. The kernel does not change it by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// `cpu.shares`; converted from `cpu.weight` with v2.
    pub cpu_shares: Option<u64>,
    /// The period of the quota, in microseconds.
    pub cpu_period: Option<u64>,
    /// The quota per period, in microseconds.
    pub cpu_quota: Option<u64>,
    /// The soft limit of memory, in bytes; absent without one.
    pub memory_reservation: Option<u64>,
    /// Processes and threads at most; absent without a limit.
    pub tasks_max: Option<u64>,
}

/// Memory of a cgroup and its descendants, in bytes unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryDetail {
    /// Kernel memory.
    pub kernel: Option<u64>,
    /// The highest usage.
    pub peak: Option<u64>,
    /// How often the limit was reached.
    pub limit_hits: Option<u64>,
    /// How often `memory.high` was exceeded; absent with v1.
    pub high_hits: Option<u64>,
    /// Processes killed by the OOM killer.
    pub oom_kills: Option<u64>,
}

/// Traffic with one disk since the cgroup was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskTraffic {
    /// The device's number.
    pub major: u32,
    /// The device's number.
    pub minor: u32,
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

impl DiskTraffic {
    /// The device's file, such as `/dev/sda`, if it has one.
    pub fn device(&self) -> Option<String> {
        let link = fs::read_link(format!("/sys/dev/block/{}:{}", self.major, self.minor)).ok()?;
        Some(format!("/dev/{}", link.file_name()?.to_string_lossy()))
    }
}

impl OpenCgroup {
    /// Reads the limits; none of a cgroup that was removed.
    pub fn limits(&self) -> CgroupLimits {
        let mut limits = CgroupLimits::default();
        if let Some(folder) = &self.cpu_shares {
            if self.v2 { cpu_limits_v2(folder, &mut limits) } else { cpu_limits_v1(folder, &mut limits) }
        }
        let reservation = if self.v2 { "memory.min" } else { "memory.soft_limit_in_bytes" };
        limits.memory_reservation = self.memory.as_ref().and_then(|folder| folder.limit(reservation));
        limits.tasks_max = self.pids.as_ref().and_then(|folder| folder.number("pids.max"));
        limits
    }

    /// Reads the values beside `usage`, which was read of the same cgroup; nothing of a cgroup that was removed.
    pub fn detail(&self, usage: &CgroupUsage) -> CgroupDetail {
        self.detail_with(usage, self.limits())
    }

    /// As [`Self::detail`], with limits that are known.
    pub fn detail_with(&self, usage: &CgroupUsage, limits: CgroupLimits) -> CgroupDetail {
        let mut detail = CgroupDetail { limits, ..CgroupDetail::default() };
        if let Some(folder) = &self.cpu {
            if self.v2 { cpu_times_v2(&usage.counters, &mut detail) } else { cpu_times_v1(folder, &mut detail) }
        }
        let has_quota = limits.cpu_quota.is_some();
        if let Some(folder) = self.cpu_shares.as_ref().filter(|_| has_quota) {
            detail.throttling = Some(if self.v2 { usage.counters.throttling } else { throttling_v1(folder) });
        }
        if let Some(folder) = self.memory.as_ref().filter(|_| usage.memory.is_some()) {
            let kernel = usage.counters.kernel;
            detail.memory = Some(if self.v2 { memory_v2(folder, kernel) } else { memory_v1(folder) });
        }
        if let Some(folder) = &self.pids {
            detail.processes = folder.text("cgroup.procs").map(|list| process_ids(&list));
        }
        detail.disks = self.io.as_ref().map(|folder| disks_in(folder, self.v2)).unwrap_or_default();
        detail
    }
}

impl CgroupPlace {
    /// Reads the traffic with disks.
    pub(super) fn disks(&self) -> Vec<DiskTraffic> {
        let folder = self.io.as_deref().and_then(Folder::open);
        folder.map(|folder| disks_in(&folder, self.v2)).unwrap_or_default()
    }
}

fn disks_in(folder: &Folder, v2: bool) -> Vec<DiskTraffic> {
    if v2 { disks_v2(folder) } else { disks_v1(folder) }
}

fn cpu_times_v2(counters: &FileCounters, detail: &mut CgroupDetail) {
    (detail.cpu_user, detail.cpu_system) = (counters.cpu_user, counters.cpu_system);
}

fn cpu_times_v1(folder: &Folder, detail: &mut CgroupDetail) {
    let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten().and_then(|ticks| u64::try_from(ticks).ok()).unwrap_or(100);
    let stat = folder.table("cpuacct.stat");
    let nanos = |name: &str| stat.get(name).map(|count| count.saturating_mul(1_000_000_000 / ticks.max(1)));
    (detail.cpu_user, detail.cpu_system) = (nanos("user"), nanos("system"));
}

fn cpu_limits_v2(folder: &Folder, limits: &mut CgroupLimits) {
    let max = folder.text("cpu.max").unwrap_or_default();
    let mut max = max.split_ascii_whitespace().map(|word| word.parse().ok());
    (limits.cpu_quota, limits.cpu_period) = (max.next().flatten(), max.next().flatten());
    limits.cpu_shares = folder.number("cpu.weight").map(arithmetic::shares_of_weight);
}

fn cpu_limits_v1(folder: &Folder, limits: &mut CgroupLimits) {
    limits.cpu_shares = folder.number("cpu.shares");
    limits.cpu_period = folder.number("cpu.cfs_period_us");
    limits.cpu_quota = folder.number("cpu.cfs_quota_us");
}

fn throttling_v1(folder: &Folder) -> Throttling {
    let stat = folder.table("cpu.stat");
    let of = |name: &str| stat.get(name).unwrap_or(0);
    Throttling {
        periods: of("nr_periods"),
        throttled_periods: of("nr_throttled"),
        throttled: of("throttled_time"),
        burst_periods: of("nr_bursts"),
        burst: of("burst_time"),
    }
}

fn memory_v2(folder: &Folder, kernel: Option<u64>) -> MemoryDetail {
    let events = folder.table("memory.events");
    MemoryDetail {
        kernel,
        peak: folder.number("memory.peak"),
        limit_hits: events.get("max"),
        high_hits: events.get("high"),
        oom_kills: events.oom_kills(),
    }
}

fn memory_v1(folder: &Folder) -> MemoryDetail {
    MemoryDetail {
        kernel: folder.number("memory.kmem.usage_in_bytes"),
        peak: folder.number("memory.max_usage_in_bytes"),
        limit_hits: folder.number("memory.failcnt"),
        high_hits: None,
        oom_kills: folder.table("memory.oom_control").oom_kills(),
    }
}

/// `major:minor` at the beginning of a line.
fn device(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn disks_v2(folder: &Folder) -> Vec<DiskTraffic> {
    let text = folder.text("io.stat").unwrap_or_default();
    let disk = |line: &str| {
        let (number, rest) = line.split_once(' ')?;
        let (major, minor) = device(number)?;
        let of = |name: &str| {
            let value = rest.split(' ').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            value.and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        let (reads, writes) = (of("rios"), of("wios"));
        Some(DiskTraffic { major, minor, reads, writes, read_bytes: of("rbytes"), write_bytes: of("wbytes") })
    };
    text.lines().filter_map(disk).collect()
}

fn disks_v1(folder: &Folder) -> Vec<DiskTraffic> {
    let read = |name: &str| {
        let recursive = folder.text(format!("{name}_recursive").as_str());
        recursive.or_else(|| folder.text(name)).unwrap_or_default()
    };
    let bytes = read("blkio.throttle.io_service_bytes");
    // Both files have the same devices, and most cgroups have none.
    if !bytes.starts_with(|first: char| first.is_ascii_digit()) {
        return Vec::new();
    }
    let mut disks: BTreeMap<(u32, u32), DiskTraffic> = BTreeMap::new();
    let mut each = |text: &str, add: fn(&mut DiskTraffic, &str, u64)| {
        for line in text.lines() {
            let mut words = line.split(' ');
            let (number, operation, value) = (words.next().and_then(device), words.next(), words.next());
            let Some(((major, minor), (operation, value))) = number.zip(operation.zip(value)) else { continue };
            let disk = disks.entry((major, minor)).or_insert(DiskTraffic { major, minor, ..DiskTraffic::default() });
            add(disk, operation, value.parse().unwrap_or(0));
        }
    };
    each(&bytes, |disk, operation, value| match operation {
        "Read" => disk.read_bytes = value,
        "Write" => disk.write_bytes = value,
        _ => {}
    });
    each(&read("blkio.throttle.io_serviced"), |disk, operation, value| match operation {
        "Read" => disk.reads = value,
        "Write" => disk.writes = value,
        _ => {}
    });
    disks.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::Layout;
    use crate::cgroups::usage::ReclaimCounters;
    use crate::cgroups::usage::basic::tests::write;

    #[test]
    fn version_2() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        write(
            &dir.path().join("a"),
            &[
                (
                    "cpu.stat",
                    "usage_usec 3\nuser_usec 2\nsystem_usec 1\nnr_periods 9\nnr_throttled 4\nthrottled_usec 5\n\
                     nr_bursts 2\nburst_usec 3\n",
                ),
                ("cpu.max", "50000 100000\n"),
                ("cpu.weight", "100\n"),
                (
                    "memory.stat",
                    "file 10\nfile_mapped 4\nfile_dirty 12\nfile_writeback 13\nactive_file 3\ninactive_file 7\n\
                     kernel 2\nworkingset_refault_anon 14\nworkingset_refault_file 15\npgscan 16\npgsteal 17\n\
                     pgfault 8\n",
                ),
                ("memory.peak", "99\n"),
                ("memory.current", "50\n"),
                ("memory.min", "64\n"),
                ("memory.events", "low 0\nhigh 5\nmax 6\noom 1\noom_kill 2\noom_group_kill 1\n"),
                ("cgroup.procs", "7\n8\n"),
                ("pids.max", "max\n"),
                ("io.stat", "8:16 rbytes=512 wbytes=1024 rios=1 wios=2 dbytes=0 dios=0\n"),
            ],
        );
        let place = CgroupPlace::at(&layout, "/a");
        let usage = place.read();
        let detail = place.open().detail(&usage);
        let expected = CgroupDetail {
            cpu_user: Some(2000),
            cpu_system: Some(1000),
            throttling: Some(Throttling {
                periods: 9,
                throttled_periods: 4,
                throttled: 5000,
                burst_periods: 2,
                burst: 3000,
            }),
            limits: CgroupLimits {
                cpu_shares: Some(2597),
                cpu_period: Some(100_000),
                cpu_quota: Some(50_000),
                memory_reservation: Some(64),
                tasks_max: None,
            },
            memory: Some(MemoryDetail {
                kernel: Some(2),
                peak: Some(99),
                limit_hits: Some(6),
                high_hits: Some(5),
                oom_kills: Some(1),
            }),
            processes: Some(vec![7, 8]),
            disks: vec![DiskTraffic { major: 8, minor: 16, reads: 1, writes: 2, read_bytes: 512, write_bytes: 1024 }],
        };
        assert_eq!(detail, expected);
        let FileCounters { cache, mapped_file, active_file, inactive_file, own_page_faults, .. } = usage.counters;
        assert_eq!((cache, mapped_file, active_file, inactive_file, own_page_faults), (10, 4, 3, 7, 8));
        let reclaim = ReclaimCounters {
            file_dirty: 12,
            file_writeback: 13,
            refaults_anon: 14,
            refaults_file: 15,
            scanned: 16,
            reclaimed: 17,
        };
        assert_eq!(usage.counters.reclaim, Some(reclaim));
        let none = CgroupPlace::at(&layout, "/none");
        assert_eq!(none.open().detail(&none.read()), CgroupDetail::default());
    }

    #[test]
    fn version_1() {
        let dir = tempfile::tempdir().unwrap();
        let mount = |name: &str| (name.to_owned(), dir.path().join(name));
        let controllers = [mount("cpu"), mount("cpuacct"), mount("memory"), mount("blkio")].into();
        let layout = Layout::V1 { controllers, unified: None };
        write(&dir.path().join("cpuacct/a"), &[("cpuacct.stat", "user 300\nsystem 100\n")]);
        write(
            &dir.path().join("cpu/a"),
            &[
                ("cpu.stat", "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n"),
                ("cpu.cfs_period_us", "100000\n"),
                ("cpu.cfs_quota_us", "-1\n"),
                ("cpu.shares", "2\n"),
            ],
        );
        write(
            &dir.path().join("memory/a"),
            &[
                ("memory.stat", "cache 1\ntotal_cache 5\npgfault 3\ntotal_pgfault 4\n"),
                ("memory.usage_in_bytes", "70\n"),
                ("memory.max_usage_in_bytes", "77\n"),
                ("memory.failcnt", "2\n"),
                ("memory.soft_limit_in_bytes", "9223372036854771712\n"),
                ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
            ],
        );
        write(
            &dir.path().join("blkio/a"),
            &[
                (
                    "blkio.throttle.io_service_bytes_recursive",
                    "8:0 Read 4096\n8:0 Write 0\n8:0 Total 4096\nTotal 4096\n",
                ),
                ("blkio.throttle.io_serviced", "8:0 Read 1\n8:0 Write 0\n"),
            ],
        );
        let place = CgroupPlace::at(&layout, "/a");
        let usage = place.read();
        let detail = place.open().detail(&usage);
        let CgroupLimits { cpu_shares, cpu_period, cpu_quota, memory_reservation, .. } = detail.limits;
        assert_eq!((cpu_shares, cpu_period, cpu_quota, memory_reservation), (Some(2), Some(100_000), None, None));
        assert_eq!((detail.throttling, detail.cpu_user), (None, detail.cpu_system.map(|system| system * 3)));
        let memory = detail.memory.expect("memory");
        assert_eq!((usage.counters.cache, usage.counters.own_page_faults, memory.peak), (5, 3, Some(77)));
        assert_eq!((memory.oom_kills, memory.limit_hits), (Some(3), Some(2)));
        assert_eq!((memory.high_hits, usage.counters.reclaim), (None, None), "not counted");
        let disk = DiskTraffic { major: 8, minor: 0, reads: 1, writes: 0, read_bytes: 4096, write_bytes: 0 };
        assert_eq!((detail.disks, detail.processes), (vec![disk], None));
    }
}
