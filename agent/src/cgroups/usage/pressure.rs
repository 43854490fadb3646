//! Pressure stall information (<https://docs.kernel.org/accounting/psi.html>).

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::file::Folder;
use super::place::CgroupPlace;

/// Children of a cgroup that are looked at, at most: a container may create many.
const MAX_CHILDREN: usize = 64;

/// Both lines of a pressure file; zero on kernels without it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: PressureLine,
    /// All tasks waited.
    pub full: PressureLine,
}

/// One line of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PressureLine {
    /// Microseconds of waiting since the start.
    pub total: u64,
    /// Percent of the last 10 seconds.
    pub avg10: f64,
    /// Of the last minute.
    pub avg60: f64,
    /// Of the last five minutes.
    pub avg300: f64,
}

impl Pressure {
    /// From the text of a pressure file.
    pub fn parse(text: &str) -> Self {
        let line = |name: &str| {
            let fields = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            let percent = |text: &str| text.parse().unwrap_or(0.0);
            let mut found = PressureLine::default();
            for (key, value) in fields.split(' ').filter_map(|field| field.split_once('=')) {
                match key {
                    "avg10" => found.avg10 = percent(value),
                    "avg60" => found.avg60 = percent(value),
                    "avg300" => found.avg300 = percent(value),
                    "total" => found.total = value.parse().unwrap_or(0),
                    _ => {}
                }
            }
            found
        };
        Self { some: line("some "), full: line("full ") }
    }

    /// From a pressure file; zero if it is not readable.
    pub(crate) fn read(file: &Path) -> Self {
        Self::try_read(file).unwrap_or_default()
    }

    /// From a pressure file.
    ///
    /// # Errors
    /// The kernel has no pressure stall information, it is disabled, or the cgroup was removed.
    pub fn try_read(file: &Path) -> io::Result<Self> {
        fs::read_to_string(file).map(|text| Self::parse(&text))
    }
}

/// Why tasks of a cgroup wait: counters since it was created. Those without a file are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CgroupStalls {
    /// Waiting for memory; absent with cgroup v1.
    pub memory: Option<Pressure>,
    /// Pages that were read again after they had been evicted.
    pub refaulted_pages: u64,
    /// How often `memory.high` of the cgroup or one below it has throttled tasks.
    pub high_hits: u64,
    /// How often the memory limit of the cgroup, and with cgroup v2 of one below it, was reached.
    pub max_hits: u64,
    /// How often the memory limit of the cgroup alone was reached.
    pub own_max_hits: u64,
    /// For how long CPU quotas have throttled tasks, summed over processors.
    pub throttled: Duration,
}

impl CgroupPlace {
    /// Reads why tasks wait; zero for a cgroup that was removed. Blocks.
    pub fn stalls(&self) -> CgroupStalls {
        let folder = self.memory.as_deref().and_then(Folder::open);
        let memory = folder.map(|folder| if self.v2 { memory_v2(&folder) } else { memory_v1(&folder) });
        CgroupStalls { throttled: self.throttled(), ..memory.unwrap_or_default() }
    }

    /// For how long CPU quotas have throttled tasks, summed over processors: the quota of the cgroup, or those of its children
    /// if that is longer, since the kernel counts each for itself. Zero for a cgroup that was removed. Blocks.
    pub fn throttled(&self) -> Duration {
        let quotas = if self.v2 { &self.cpu } else { &self.cpu_shares };
        let Some((path, folder)) = quotas.as_deref().and_then(|path| Some((path, Folder::open(path)?))) else {
            return Duration::ZERO;
        };
        let of = |file: &Path| {
            let stat = folder.table(file);
            let of = |name: &str| stat.get(name).unwrap_or(0);
            if self.v2 {
                Duration::from_micros(of("throttled_usec"))
            } else {
                Duration::from_nanos(of("throttled_time"))
            }
        };
        let children = fs::read_dir(path).into_iter().flatten().flatten();
        let children = children.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).take(MAX_CHILDREN);
        let of_children = children.map(|child| of(&Path::new(&child.file_name()).join("cpu.stat"))).sum();
        of(Path::new("cpu.stat")).max(of_children)
    }

    /// The folder in the hierarchy of the memory controller.
    pub fn memory_folder(&self) -> Option<&Path> {
        self.memory.as_deref()
    }
}

fn memory_v2(folder: &Folder) -> CgroupStalls {
    let stat = folder.table("memory.stat");
    let (events, own) = (folder.table("memory.events"), folder.table("memory.events.local"));
    CgroupStalls {
        memory: folder.text("memory.pressure").map(|text| Pressure::parse(&text)),
        // Kernels before 5.9 do not distinguish pages of files from others.
        refaulted_pages: stat.sum_of("workingset_refault"),
        high_hits: events.get("high").unwrap_or(0),
        max_hits: events.get("max").unwrap_or(0),
        own_max_hits: own.get("max").unwrap_or(0),
        throttled: Duration::ZERO,
    }
}

fn memory_v1(folder: &Folder) -> CgroupStalls {
    let stat = folder.table("memory.stat");
    let hits = folder.number("memory.failcnt").unwrap_or(0);
    CgroupStalls {
        refaulted_pages: stat.sum_of("total_workingset_refault"),
        max_hits: hits,
        own_max_hits: hits,
        ..CgroupStalls::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::Layout;

    #[test]
    fn both_lines() {
        let text =
            "some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\nfull avg10=0.00 avg60=0.00 avg300=3.00 total=99\n";
        let pressure = Pressure::parse(text);
        assert_eq!(pressure.some, PressureLine { total: 1234, avg10: 1.5, avg60: 0.25, avg300: 0.0 });
        assert_eq!((pressure.full.total, pressure.full.avg300), (99, 3.0));
        assert_eq!(Pressure::parse("what"), Pressure::default());
        let incomplete = Pressure::parse("some avg10 avg60=x other=1 total=5 avg300=2.00\n");
        assert_eq!(incomplete.some, PressureLine { total: 5, avg300: 2.0, ..PressureLine::default() });
    }

    #[test]
    fn why_tasks_of_a_cgroup_wait() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let v2 = CgroupPlace::at(&Layout::V2 { mount: dir.path().to_owned() }, "/");
        assert_eq!(v2.stalls(), CgroupStalls::default(), "a cgroup that is gone");
        put("memory.stat", "anon 1\nworkingset_refault_anon 2\nworkingset_refault_file 3\n");
        assert_eq!(v2.stalls().refaulted_pages, 5, "one that vanishes while it is read has no other values");
        put("memory.events", "low 0\nhigh 7\nmax 8\noom 0\n");
        put("memory.events.local", "max 1\n");
        put("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=44\n");
        put("cpu.stat", "usage_usec 1\nthrottled_usec 9\n");
        let stalls = v2.stalls();
        assert_eq!((stalls.high_hits, stalls.max_hits, stalls.own_max_hits), (7, 8, 1));
        assert_eq!((stalls.memory.map(|memory| memory.some.total), stalls.throttled.as_micros()), (Some(44), 9));
        for container in ["a", "b"] {
            fs::create_dir(dir.path().join(container)).unwrap();
            put(&format!("{container}/cpu.stat"), "throttled_usec 8\n");
        }
        assert_eq!(v2.throttled().as_micros(), 16, "quotas of containers count for themselves");

        let controllers = ["cpu", "memory"].map(|name| (name.to_owned(), dir.path().to_owned())).into();
        let v1 = CgroupPlace::at(&Layout::V1 { controllers, unified: None }, "/");
        put("memory.stat", "workingset_refault_file 1\ntotal_workingset_refault_file 6\n");
        put("memory.failcnt", "4\n");
        put("cpu.stat", "nr_throttled 1\nthrottled_time 9000\n");
        let stalls = v1.stalls();
        assert_eq!((stalls.refaulted_pages, stalls.max_hits, stalls.throttled.as_micros()), (6, 4, 9));
        assert_eq!((stalls.memory, stalls.high_hits), (None, 0));
    }
}
