//! Counters of a cgroup that an observer compares over time: stalls, kills, limits reached. Few and small files, so that
//! hundreds of cgroups can be read every few seconds.

use super::file::Folder;
use super::place::CgroupPlace;
use super::pressure::Pressure;

/// Counters at one moment. Values without a file are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CgroupCounters {
    /// CPU time over all cores, in nanoseconds.
    pub cpu: Option<u64>,
    /// Time in which CPU quotas were used up, in nanoseconds: see [`CgroupPlace::throttled`].
    pub throttled: u64,
    /// Charged memory, in bytes.
    pub memory: Option<u64>,
    /// Limit on memory, in bytes.
    pub memory_limit: Option<u64>,
    /// How often the limit on memory was reached: of v2 `max` of `memory.events`, limits of descendants included; of v1
    /// `memory.failcnt` of the cgroup itself.
    pub limit_hits: u64,
    /// How often `memory.high`, which is no limit, was exceeded in it or a descendant; none with v1.
    pub high_hits: u64,
    /// Processes killed by the OOM killer; of v2 including those in descendants.
    pub oom_kills: u64,
    /// Bytes read and written.
    pub io_bytes: u64,
    /// CPU pressure.
    pub cpu_pressure: Option<Pressure>,
    /// Memory pressure.
    pub memory_pressure: Option<Pressure>,
    /// IO pressure.
    pub io_pressure: Option<Pressure>,
}

impl CgroupPlace {
    /// Reads the counters; nothing of a cgroup that was removed.
    pub fn counters(&self) -> CgroupCounters {
        if self.v2 { self.counters_v2() } else { self.counters_v1() }
    }

    /// Processes killed by the OOM killer; absent if the cgroup was removed.
    pub fn oom_kills(&self) -> Option<u64> {
        let folder = Folder::open(self.memory.as_deref()?)?;
        folder.table(if self.v2 { "memory.events" } else { "memory.oom_control" }).oom_kills()
    }

    fn counters_v2(&self) -> CgroupCounters {
        let Some(folder) = self.open().memory else { return CgroupCounters::default() };
        let (cpu, events) = (folder.table("cpu.stat"), folder.table("memory.events"));
        let event = |name: &str| events.get(name).unwrap_or(0);
        CgroupCounters {
            cpu: cpu.get("usage_usec").map(|micros| micros.saturating_mul(1000)),
            throttled: self.throttled_nanos(),
            memory: folder.number("memory.current"),
            memory_limit: folder.limit("memory.max"),
            limit_hits: event("max"),
            high_hits: event("high"),
            oom_kills: events.oom_kills().unwrap_or(0),
            io_bytes: self.traffic(),
            cpu_pressure: pressure(&folder, "cpu.pressure"),
            memory_pressure: pressure(&folder, "memory.pressure"),
            io_pressure: pressure(&folder, "io.pressure"),
        }
    }

    fn counters_v1(&self) -> CgroupCounters {
        let folders = self.open();
        let of_memory = |file: &str| folders.memory.as_ref()?.number(file);
        CgroupCounters {
            cpu: folders.cpu.as_deref().and_then(|folder| folder.number("cpuacct.usage")),
            throttled: self.throttled_nanos(),
            memory: of_memory("memory.usage_in_bytes"),
            memory_limit: folders.memory.as_deref().and_then(|folder| folder.limit("memory.limit_in_bytes")),
            limit_hits: of_memory("memory.failcnt").unwrap_or(0),
            oom_kills: self.oom_kills().unwrap_or(0),
            io_bytes: self.traffic(),
            ..CgroupCounters::default()
        }
    }

    fn throttled_nanos(&self) -> u64 {
        u64::try_from(self.throttled().as_nanos()).unwrap_or(u64::MAX)
    }

    fn traffic(&self) -> u64 {
        let disks = self.disks();
        disks.iter().fold(0, |sum, disk| sum.saturating_add(disk.read_bytes).saturating_add(disk.write_bytes))
    }
}

fn pressure(folder: &Folder, name: &str) -> Option<Pressure> {
    folder.text(name).map(|text| Pressure::parse(&text))
}

#[cfg(test)]
mod tests {
    use super::super::basic::tests::write;
    use super::*;
    use crate::cgroups::Layout;

    #[test]
    fn version_2() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        write(
            &dir.path().join("kubepods/poda"),
            &[
                ("cpu.stat", "usage_usec 1500\nnr_throttled 2\nthrottled_usec 30\n"),
                ("memory.current", "1000\n"),
                ("memory.max", "max\n"),
                ("memory.events", "low 0\nhigh 2\nmax 5\noom 1\noom_kill 3\noom_group_kill 0\n"),
                ("memory.pressure", "some avg10=1.00 avg60=0.00 avg300=0.00 total=42\nfull avg10=0.50 total=7\n"),
                ("io.stat", "8:0 rbytes=100 wbytes=20 rios=1 wios=1\n254:0 rbytes=1 wbytes=0\n"),
            ],
        );
        let place = CgroupPlace::at(&layout, "/kubepods/poda");
        let counters = place.counters();
        assert_eq!((counters.cpu, counters.throttled), (Some(1_500_000), 30_000));
        assert_eq!((counters.memory, counters.memory_limit), (Some(1000), None));
        assert_eq!((counters.limit_hits, counters.high_hits), (5, 2), "memory.high is no limit");
        assert_eq!((counters.oom_kills, counters.io_bytes), (3, 121));
        assert_eq!(counters.memory_pressure.map(|pressure| pressure.full.total), Some(7));
        assert_eq!(counters.cpu_pressure, None, "not measured");
        let gone = CgroupPlace::at(&layout, "/kubepods/podb");
        assert_eq!((gone.counters(), gone.oom_kills()), (CgroupCounters::default(), None));
    }

    /// A pod has a quota only if all of its containers have one.
    #[test]
    fn quotas_of_containers_throttle_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        let v2 = Layout::V2 { mount: dir.path().to_owned() };
        write(&dir.path().join("poda"), &[("cpu.stat", "usage_usec 1\nthrottled_usec 0\n")]);
        write(&dir.path().join("poda/one"), &[("cpu.stat", "throttled_usec 9\n")]);
        assert_eq!(CgroupPlace::at(&v2, "/poda").counters().throttled, 9_000);

        let v1 = Layout::V1 { controllers: [("cpu".to_owned(), dir.path().to_owned())].into(), unified: None };
        write(&dir.path().join("podb"), &[("cpu.stat", "throttled_time 0\n")]);
        write(&dir.path().join("podb/one"), &[("cpu.stat", "throttled_time 7\n")]);
        assert_eq!(CgroupPlace::at(&v1, "/podb").counters().throttled, 7);
    }

    #[test]
    fn each_process_of_a_group_counts_once() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        for (pod, events, kills) in [
            ("poda", "oom 1\noom_kill 4\noom_group_kill 1\n", 3),
            // The only process has exited before it is killed a second time.
            ("podb", "oom 1\noom_kill 1\noom_group_kill 1\n", 1),
        ] {
            write(&dir.path().join("kubepods").join(pod), &[("memory.events", events)]);
            let place = CgroupPlace::at(&layout, &format!("/kubepods/{pod}"));
            assert_eq!((place.counters().oom_kills, place.oom_kills()), (kills, Some(kills)), "{pod}");
        }
    }

    #[test]
    fn version_1() {
        let dir = tempfile::tempdir().unwrap();
        let mount = |name: &str| (name.to_owned(), dir.path().join(name));
        let layout = Layout::V1 { controllers: [mount("cpu"), mount("memory")].into(), unified: None };
        write(&dir.path().join("cpu/p"), &[("cpu.stat", "nr_periods 9\nthrottled_time 55\n")]);
        let control = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n";
        write(
            &dir.path().join("memory/p"),
            &[
                ("memory.usage_in_bytes", "77\n"),
                ("memory.limit_in_bytes", "100\n"),
                ("memory.failcnt", "4\n"),
                ("memory.oom_control", control),
            ],
        );
        let counters = CgroupPlace::at(&layout, "/p").counters();
        assert_eq!((counters.throttled, counters.memory, counters.memory_limit), (55, Some(77), Some(100)));
        assert_eq!((counters.limit_hits, counters.oom_kills, counters.memory_pressure), (4, 2, None));
    }
}
