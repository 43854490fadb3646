//! The values that a cgroup has, and which wanted ones differ from them: only those are written, so a restart of the agent,
//! or taking a node over from another kubelet, changes nothing that is right already.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::CgroupValues;
use super::Layout;
use super::arithmetic;
use super::layout::below;
use super::limits;
use super::values::UNLIMITED;

/// Values of a cgroup as the kernel reports them. Values without a file are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Current {
    /// In the unit of the file: shares (v1) or weight (v2).
    pub cpu_weight: Option<u64>,
    /// Quota (-1 for none) and period.
    pub cpu_max: Option<(i64, u64)>,
    /// Bytes; [`UNLIMITED`] for none.
    pub memory_max: Option<u64>,
    pub memory_min: Option<u64>,
    pub memory_low: Option<u64>,
    pub memory_high: Option<u64>,
    /// -1 for none.
    pub pids: Option<i64>,
    /// Limits of pages in use, by page size.
    pub hugepages: BTreeMap<u64, u64>,
    /// Limits of reserved pages, by page size.
    pub reserved_hugepages: BTreeMap<u64, u64>,
    pub cpus: Option<String>,
}

impl Current {
    /// Reads what `wanted` names. Blocks for a few files of the kernel.
    pub(super) fn read(layout: &Layout, path: &str, wanted: &CgroupValues) -> Self {
        let files = Files { layout, path };
        let memory = |wanted: Option<u64>, v1: &str, v2: &str| wanted.and_then(|_| files.bytes("memory", v1, v2));
        let sizes = wanted.hugepages.keys();
        let pages = |infix: &str| {
            let limit = |size: &u64| {
                let name = format!("hugetlb.{}.{infix}", arithmetic::page_size_name(*size));
                Some((*size, files.bytes("hugetlb", &format!("{name}limit_in_bytes"), &format!("{name}max"))?))
            };
            sizes.clone().filter_map(limit).collect()
        };
        Self {
            cpu_weight: (wanted.cpu_shares > 0).then(|| limits::cpu_weight(layout, path)).flatten(),
            cpu_max: wanted.cpu_max.and_then(|_| files.cpu_max()),
            memory_max: memory(wanted.memory_max, "memory.limit_in_bytes", "memory.max"),
            memory_min: memory(wanted.memory_min, "", "memory.min"),
            memory_low: memory(wanted.memory_low, "", "memory.low"),
            memory_high: memory(wanted.memory_high, "", "memory.high"),
            pids: wanted.pids.and_then(|_| files.text("pids", "pids.max", "pids.max")).and_then(|text| match &*text {
                "max" => Some(-1),
                number => number.parse().ok(),
            }),
            hugepages: pages(""),
            reserved_hugepages: pages("rsvd."),
            cpus: wanted.cpus.as_ref().and_then(|_| files.text("cpuset", "cpuset.cpus", "cpuset.cpus")),
        }
    }

    /// The wanted values that the cgroup can have and has not. `page` is the size of a page: the kernel rounds limits down
    /// to it. Pure.
    pub(super) fn differing(&self, wanted: &CgroupValues, is_v2: bool, page: u64) -> CgroupValues {
        let weight = if is_v2 { arithmetic::weight(wanted.cpu_shares) } else { wanted.cpu_shares };
        let memory = |current: Option<u64>, wanted: Option<u64>| {
            wanted.filter(|wanted| current.is_some_and(|current| !same_bytes(current, *wanted, page)))
        };
        let has_other_cpu_max = |(quota, period): &(i64, u64)| match self.cpu_max {
            // Of no quota only the period is written, and that on v1 only.
            Some((_, current_period)) if *quota == 0 => !is_v2 && current_period != *period,
            Some(current) => current != (*quota, *period),
            None => false,
        };
        let has_other_pages = |size: &u64, bytes: &u64| {
            let differs = |current: &BTreeMap<u64, u64>| {
                current.get(size).is_some_and(|current| !same_bytes(*current, *bytes, *size))
            };
            differs(&self.hugepages) || differs(&self.reserved_hugepages)
        };
        let mut hugepages = wanted.hugepages.clone();
        hugepages.retain(|size, bytes| has_other_pages(size, bytes));
        CgroupValues {
            cpu_shares: if self.cpu_weight.is_some_and(|current| current != weight) { wanted.cpu_shares } else { 0 },
            cpu_max: wanted.cpu_max.filter(has_other_cpu_max),
            memory_max: memory(self.memory_max, wanted.memory_max.filter(|bytes| *bytes > 0)),
            memory_min: memory(self.memory_min, wanted.memory_min),
            memory_low: memory(self.memory_low, wanted.memory_low),
            memory_high: memory(self.memory_high, wanted.memory_high),
            pids: wanted.pids.filter(|wanted| self.pids.is_some_and(|current| current != normal_pids(*wanted))),
            hugepages,
            cpus: wanted.cpus.clone().filter(|wanted| self.cpus.as_ref().is_some_and(|current| current != wanted)),
        }
    }

    /// Of differing values those that give the cgroup more than it has: its weight and its protected memory. Pure.
    pub(super) fn raising(&self, differing: &CgroupValues, is_v2: bool) -> CgroupValues {
        let weight = if is_v2 { arithmetic::weight(differing.cpu_shares) } else { differing.cpu_shares };
        let more = |current: Option<u64>, wanted: Option<u64>| wanted.filter(|wanted| Some(*wanted) > current);
        CgroupValues {
            cpu_shares: if Some(weight) > self.cpu_weight { differing.cpu_shares } else { 0 },
            memory_min: more(self.memory_min, differing.memory_min),
            memory_low: more(self.memory_low, differing.memory_low),
            hugepages: differing.hugepages.clone(),
            ..CgroupValues::default()
        }
    }
}

/// As `limits` writes it.
fn normal_pids(limit: i64) -> i64 {
    if limit < 0 { -1 } else { limit.max(1) }
}

fn same_bytes(current: u64, wanted: u64, page: u64) -> bool {
    let pages = |bytes: u64| bytes / page.max(1);
    (current >= UNLIMITED && wanted >= UNLIMITED) || pages(current) == pages(wanted)
}

/// Files of one cgroup.
struct Files<'a> {
    layout: &'a Layout,
    path: &'a str,
}

impl Files<'_> {
    /// The text of a controller's file; an empty name stands for a file that the version has not.
    fn text(&self, controller: &str, v1: &str, v2: &str) -> Option<String> {
        let name = if self.layout.is_v2() { v2 } else { v1 };
        let folder: PathBuf = below(self.layout.mount_of(controller)?, self.path);
        let text = (!name.is_empty()).then(|| fs::read_to_string(folder.join(name)).ok()).flatten()?;
        Some(text.trim().to_owned())
    }

    fn bytes(&self, controller: &str, v1: &str, v2: &str) -> Option<u64> {
        match &*self.text(controller, v1, v2)? {
            "max" => Some(UNLIMITED),
            number => number.parse().ok(),
        }
    }

    fn cpu_max(&self) -> Option<(i64, u64)> {
        if !self.layout.is_v2() {
            let number = |name: &str| self.text("cpu", name, "");
            return Some((number("cpu.cfs_quota_us")?.parse().ok()?, number("cpu.cfs_period_us")?.parse().ok()?));
        }
        let text = self.text("cpu", "", "cpu.max")?;
        let (quota, period) = text.split_once(' ')?;
        let quota = if quota == "max" { -1 } else { quota.parse().ok()? };
        Some((quota, period.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn wanted() -> CgroupValues {
        CgroupValues {
            cpu_shares: 1024,
            cpu_max: Some((50_000, 100_000)),
            memory_max: Some((64 << 20) + 1),
            memory_min: Some(1 << 20),
            memory_low: Some(2 << 20),
            memory_high: Some(48 << 20),
            pids: Some(100),
            hugepages: [(2 << 20, UNLIMITED)].into(),
            cpus: Some("0-1".to_owned()),
        }
    }

    /// A cgroup of v2 or v1 in a folder, with these files.
    fn read(is_v2: bool, files: &[(&str, &str)]) -> Current {
        let dir = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            fs::write(dir.path().join(name), format!("{text}\n")).expect("a file");
        }
        let mount = dir.path().to_owned();
        let controllers = ["cpu", "cpuset", "memory", "pids", "hugetlb"].map(|name| (name.to_owned(), mount.clone()));
        let v1 = Layout::V1 { controllers: controllers.into(), unified: None };
        fs::write(dir.path().join("cgroup.controllers"), "cpu cpuset memory pids hugetlb\n").expect("a file");
        Current::read(&if is_v2 { Layout::V2 { mount } } else { v1 }, "/", &wanted())
    }

    const V2: [(&str, &str); 10] = [
        ("cpu.weight", "39"),
        ("cpu.max", "50000 100000"),
        ("memory.max", "67108864"),
        ("memory.min", "1048576"),
        ("memory.low", "2097152"),
        ("memory.high", "50331648"),
        ("pids.max", "100"),
        ("hugetlb.2MB.max", "max"),
        ("hugetlb.2MB.rsvd.max", "max"),
        ("cpuset.cpus", "0-1"),
    ];

    #[test]
    fn equal_values_do_not_differ() {
        let current = read(true, &V2);
        assert!(current.differing(&wanted(), true, PAGE).is_empty(), "{current:?}");
        let v1 = read(
            false,
            &[
                ("cpu.shares", "1024"),
                ("cpu.cfs_quota_us", "50000"),
                ("cpu.cfs_period_us", "100000"),
                ("memory.limit_in_bytes", "67108864"),
                ("pids.max", "100"),
                ("hugetlb.2MB.limit_in_bytes", "9223372036852678656"),
                ("cpuset.cpus", "0-1"),
            ],
        );
        assert!(v1.differing(&wanted(), false, PAGE).is_empty(), "{v1:?}");
        let none = CgroupValues { cpu_max: Some((-1, 100_000)), pids: Some(-1), ..CgroupValues::default() };
        let current = Current { cpu_max: Some((-1, 100_000)), pids: Some(-1), ..Current::default() };
        assert!(current.differing(&none, true, PAGE).is_empty());
    }

    #[test]
    fn each_value_differs_for_itself() {
        let others = ["40", "max 100000", "max", "0", "0", "max", "max", "0", "max", ""];
        for (index, ((file, _), other)) in V2.into_iter().zip(others).enumerate() {
            let mut files = V2;
            files[index].1 = other;
            let differing = read(true, &files).differing(&wanted(), true, PAGE);
            let of = |with: fn(&mut CgroupValues, CgroupValues)| {
                let mut only = CgroupValues::default();
                with(&mut only, wanted());
                only
            };
            let expected = match file {
                "cpu.weight" => of(|only, wanted| only.cpu_shares = wanted.cpu_shares),
                "cpu.max" => of(|only, wanted| only.cpu_max = wanted.cpu_max),
                "memory.max" => of(|only, wanted| only.memory_max = wanted.memory_max),
                "memory.min" => of(|only, wanted| only.memory_min = wanted.memory_min),
                "memory.low" => of(|only, wanted| only.memory_low = wanted.memory_low),
                "memory.high" => of(|only, wanted| only.memory_high = wanted.memory_high),
                "pids.max" => of(|only, wanted| only.pids = wanted.pids),
                "hugetlb.2MB.max" => of(|only, wanted| only.hugepages = wanted.hugepages),
                "cpuset.cpus" => of(|only, wanted| only.cpus = wanted.cpus),
                _ => CgroupValues::default(),
            };
            assert_eq!(differing, expected, "{file}");
        }
    }

    #[test]
    fn a_value_without_a_file_is_not_wanted() {
        assert!(read(true, &[]).differing(&wanted(), true, PAGE).is_empty());
        assert!(read(false, &[]).differing(&wanted(), false, PAGE).is_empty());
    }

    #[test]
    fn only_more_weight_and_protection_is_raising() {
        let current = Current {
            cpu_weight: Some(100),
            memory_min: Some(4096),
            memory_low: Some(4096),
            memory_max: Some(4096),
            ..Current::default()
        };
        let more = CgroupValues {
            cpu_shares: 8192,
            memory_min: Some(8192),
            memory_low: Some(0),
            memory_max: Some(8192),
            ..CgroupValues::default()
        };
        let expected = CgroupValues { cpu_shares: 8192, memory_min: Some(8192), ..CgroupValues::default() };
        assert_eq!(current.raising(&more, true), expected);
        assert!(current.raising(&CgroupValues { cpu_shares: 2, ..CgroupValues::default() }, true).is_empty());
    }
}
