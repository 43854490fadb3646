//! Writes the limits of one cgroup through the controllers of `cgroups-rs`, and reads back the CPU weight.
//!
//! The crate writes cpu, cpuset, memory, pids and hugetlb limits of both versions. It has no `rsvd` limits of hugetlb: those are
//! written here. The conversion from shares to weight is the caller's, as the crate documents. Blocks for the time of a
//! few writes to files of the kernel.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use cgroups_rs::fs::MaxValue;
use cgroups_rs::fs::cpu::CpuController;
use cgroups_rs::fs::cpuset::CpuSetController;
use cgroups_rs::fs::error::Result as FsResult;
use cgroups_rs::fs::hugetlb::HugeTlbController;
use cgroups_rs::fs::memory::MemController;
use cgroups_rs::fs::memory::SetMemory;
use cgroups_rs::fs::pid::PidController;

use super::CgroupError;
use super::CgroupValues;
use super::Layout;
use super::arithmetic;
use super::error::OnPath as _;
use super::layout::below;

/// Writes `values` to the cgroup at `path`, all of them even if one fails. Values of zero leave the kernel's default.
///
/// # Errors
/// The first value that was not accepted.
pub(super) fn write(layout: &Layout, path: &str, values: &CgroupValues) -> Result<(), CgroupError> {
    let cgroup = Cgroup { layout, path };
    let results = [
        cgroup.cpu(values),
        cgroup.cpuset(values),
        cgroup.memory(values),
        cgroup.pids(values),
        cgroup.hugetlb(values),
        cgroup.protection(values),
    ];
    results.into_iter().collect()
}

/// `cpu.shares` (v1) or `cpu.weight` (v2) of the cgroup at `path`; `None` if it is not readable.
pub(super) fn cpu_weight(layout: &Layout, path: &str) -> Option<u64> {
    let cgroup = Cgroup { layout, path };
    CpuController::new(cgroup.folder("cpu")?, PathBuf::new(), layout.is_v2()).shares().ok()
}

/// CPU shares in the unit of `cpu.shares` (v1) or `cpu.weight` (v2).
pub(super) fn to_cpu_weight(layout: &Layout, shares: u64) -> u64 {
    if layout.is_v2() { arithmetic::weight(shares) } else { shares }
}

struct Cgroup<'a> {
    layout: &'a Layout,
    path: &'a str,
}

impl Cgroup<'_> {
    /// The cgroup's folder in the hierarchy of `controller`; `None` if the controller is not mounted or not enabled.
    fn folder(&self, controller: &str) -> Option<PathBuf> {
        let folder = below(self.layout.mount_of(controller)?, self.path);
        (!self.layout.is_v2() || has_controller(&folder, controller)).then_some(folder)
    }

    fn cpu(&self, values: &CgroupValues) -> Result<(), CgroupError> {
        let Some(folder) = self.folder("cpu") else { return Ok(()) };
        let is_v2 = self.layout.is_v2();
        let cpu = CpuController::new(folder.clone(), PathBuf::new(), is_v2);
        let shares = match values.cpu_shares {
            0 => Ok(()),
            shares => cpu.set_shares(to_cpu_weight(self.layout, shares)),
        };
        let quota = match values.cpu_max {
            None => Ok(()),
            Some((0, _)) if is_v2 => Ok(()),
            Some((0, period)) => cpu.set_cfs_period(period),
            Some((quota, period)) if is_v2 => cpu.set_cfs_quota_and_period(Some(quota), Some(period)),
            // The kernel refuses a quota that is too small for the period it has.
            Some((quota, period)) => cpu.set_cfs_period(period).and_then(|()| cpu.set_cfs_quota(quota)),
        };
        named(&folder, "cpu limits", shares.and(quota))
    }

    fn cpuset(&self, values: &CgroupValues) -> Result<(), CgroupError> {
        let (Some(cpus), Some(folder)) = (&values.cpus, self.folder("cpuset")) else { return Ok(()) };
        let cpuset = CpuSetController::new(folder.clone(), PathBuf::new(), self.layout.is_v2());
        named(&folder, "the CPUs", cpuset.set_cpus(cpus))
    }

    fn memory(&self, values: &CgroupValues) -> Result<(), CgroupError> {
        let Some(bytes) = values.memory_max.filter(|bytes| *bytes > 0) else { return Ok(()) };
        let Some(folder) = self.folder("memory") else { return Ok(()) };
        let memory = MemController::new(folder.clone(), PathBuf::new(), self.layout.is_v2());
        named(&folder, "the memory limit", memory.set_limit(i64::try_from(bytes).unwrap_or(i64::MAX)))
    }

    /// `memory.min`, `memory.low` and `memory.high`, which only v2 has; written last, as by the kubelet.
    fn protection(&self, values: &CgroupValues) -> Result<(), CgroupError> {
        let Some(folder) = self.folder("memory").filter(|_| self.layout.is_v2()) else { return Ok(()) };
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| MaxValue::Value(i64::try_from(bytes).unwrap_or(i64::MAX)));
        let wanted = SetMemory {
            min: bytes(values.memory_min),
            low: bytes(values.memory_low),
            high: bytes(values.memory_high),
            max: None,
        };
        let memory = MemController::new(folder.clone(), PathBuf::new(), true);
        named(&folder, "the memory protection", memory.set_mem(wanted))
    }

    fn pids(&self, values: &CgroupValues) -> Result<(), CgroupError> {
        let (Some(limit), Some(folder)) = (values.pids, self.folder("pids")) else { return Ok(()) };
        let limit = if limit < 0 { MaxValue::Max } else { MaxValue::Value(limit.max(1)) };
        named(
            &folder,
            "the pids limit",
            PidController::new(folder.clone(), PathBuf::new(), self.layout.is_v2()).set_pid_max(limit),
        )
    }

    fn hugetlb(&self, values: &CgroupValues) -> Result<(), CgroupError> {
        let Some(folder) = self.folder("hugetlb").filter(|_| !values.hugepages.is_empty()) else { return Ok(()) };
        let controller = HugeTlbController::new(folder.clone(), PathBuf::new(), self.layout.is_v2());
        let suffix = if self.layout.is_v2() { "max" } else { "limit_in_bytes" };
        let mut first = Ok(());
        for (size, bytes) in &values.hugepages {
            let size = arithmetic::page_size_name(*size);
            let limit = named(&folder, "the huge page limit", controller.set_limit_in_bytes(&size, *bytes));
            first = first.and(limit).and(reserved(&folder.join(format!("hugetlb.{size}.rsvd.{suffix}")), *bytes));
        }
        first
    }
}

/// Limits of reservations exist since Linux 5.7.
fn reserved(file: &Path, bytes: u64) -> Result<(), CgroupError> {
    if !file.exists() {
        return Ok(());
    }
    fs::write(file, bytes.to_string()).on("write", file)
}

pub(super) fn named(folder: &Path, what: &'static str, result: FsResult<()>) -> Result<(), CgroupError> {
    result.map_err(|source| CgroupError::Limit { what, cgroup: folder.to_owned(), source: Box::new(source) })
}

fn has_controller(folder: &Path, controller: &str) -> bool {
    let enabled = fs::read_to_string(folder.join("cgroup.controllers"));
    enabled.is_ok_and(|all| all.split_whitespace().any(|name| name == controller))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Writes to an empty cgroup of a made-up hierarchy; returns the files, sorted by name.
    fn written(is_v2: bool, values: &CgroupValues) -> Vec<String> {
        let dir = tempfile::tempdir().expect("a folder");
        let layout = if is_v2 {
            fs::write(dir.path().join("cgroup.controllers"), "cpu cpuset memory pids hugetlb\n").expect("a file");
            fs::write(dir.path().join("cpu.max"), "max 100000\n").expect("a file");
            Layout::V2 { mount: dir.path().to_owned() }
        } else {
            let mount = |name: &str| (name.to_owned(), dir.path().to_owned());
            Layout::V1 { controllers: ["cpu", "cpuset", "memory", "pids", "hugetlb"].map(mount).into(), unified: None }
        };
        for suffix in ["max", "limit_in_bytes"] {
            fs::write(dir.path().join(format!("hugetlb.2MB.rsvd.{suffix}")), "").expect("a file");
        }
        write(&layout, "/", values).expect("written");
        let text = |entry: fs::DirEntry| {
            let text = fs::read_to_string(entry.path()).expect("text");
            let name = entry.file_name().into_string().expect("a name");
            (!text.is_empty() && name != "cgroup.controllers").then(|| format!("{name}={}", text.trim()))
        };
        let entries = fs::read_dir(dir.path()).expect("a folder").map(|entry| entry.expect("an entry"));
        let mut found: Vec<String> = entries.filter_map(text).collect();
        found.sort();
        found
    }

    fn values() -> CgroupValues {
        CgroupValues {
            cpu_shares: 1024,
            cpu_max: Some((50_000, 100_000)),
            memory_max: Some(64 << 20),
            pids: Some(100),
            hugepages: BTreeMap::from([(2 << 20, 0)]),
            memory_min: Some(1 << 20),
            memory_low: Some(0),
            memory_high: Some(48 << 20),
            cpus: Some("0-1".to_owned()),
        }
    }

    #[test]
    fn files_of_cgroup_v2() {
        let expected = [
            "cpu.max=50000 100000",
            "cpu.weight=39",
            "cpuset.cpus=0-1",
            "hugetlb.2MB.max=0",
            "hugetlb.2MB.rsvd.max=0",
            "memory.high=50331648",
            "memory.low=0",
            "memory.max=67108864",
            "memory.min=1048576",
            "pids.max=100",
        ];
        assert_eq!(written(true, &values()), expected);
        let unlimited =
            CgroupValues { cpu_shares: 2, cpu_max: Some((-1, 100_000)), pids: Some(-1), ..CgroupValues::default() };
        assert_eq!(written(true, &unlimited), ["cpu.max=max 100000", "cpu.weight=1", "pids.max=max"]);
        let default = ["cpu.max=max 100000"];
        assert_eq!(written(true, &CgroupValues::default()), default, "nothing is written");
        assert_eq!(written(true, &CgroupValues { cpu_max: Some((0, 5000)), ..CgroupValues::default() }), default);
    }

    #[test]
    fn files_of_cgroup_v1() {
        let expected = [
            "cpu.cfs_period_us=100000",
            "cpu.cfs_quota_us=50000",
            "cpu.shares=1024",
            "cpuset.cpus=0-1",
            "hugetlb.2MB.limit_in_bytes=0",
            "hugetlb.2MB.rsvd.limit_in_bytes=0",
            "memory.limit_in_bytes=67108864",
            "pids.max=100",
        ];
        assert_eq!(written(false, &values()), expected);
        let unlimited = CgroupValues { cpu_max: Some((-1, 100_000)), pids: Some(0), ..CgroupValues::default() };
        let expected = ["cpu.cfs_period_us=100000", "cpu.cfs_quota_us=-1", "pids.max=1"];
        assert_eq!(written(false, &unlimited), expected);
        assert_eq!(written(false, &CgroupValues::default()), Vec::<String>::new());
    }

    #[test]
    fn a_refused_value_names_the_cgroup_and_does_not_stop_the_others() {
        let dir = tempfile::tempdir().expect("a folder");
        let controllers = [("cpu".to_owned(), dir.path().join("none")), ("pids".to_owned(), dir.path().to_owned())];
        let layout = Layout::V1 { controllers: controllers.into(), unified: None };
        let error = write(&layout, "/", &values()).expect_err("no such folder").to_string();
        assert!(error.starts_with("cannot write cpu limits of "), "{error}");
        assert_eq!(fs::read_to_string(dir.path().join("pids.max")).expect("written"), "100");
    }
}
