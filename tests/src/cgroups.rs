//! The cgroup files of a node as the kernel shows them, independently of the agent: where a pod's cgroup is with either
//! driver, and its values in the terms of cgroup v1 or v2.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use nix::sys::statfs::CGROUP2_SUPER_MAGIC;
use nix::sys::statfs::statfs;

const MOUNT: &str = "/sys/fs/cgroup";
/// Selects the driver of tests that run with either.
const DRIVER_VARIABLE: &str = "KEBLET_TEST_CGROUP_DRIVER";
/// Files that the agent writes in the cgroups of pods and classes.
const V2: [&str; 8] =
    ["cpu.weight", "cpu.max", "memory.max", "memory.min", "memory.low", "memory.high", "pids.max", "memory.oom.group"];
const V1: [(&str, &str); 5] = [
    ("cpu", "cpu.shares"),
    ("cpu", "cpu.cfs_quota_us"),
    ("cpu", "cpu.cfs_period_us"),
    ("memory", "memory.limit_in_bytes"),
    ("pids", "pids.max"),
];

/// The version of the node's hierarchy; a hybrid one counts as v1, as for a kubelet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Version {
    /// One hierarchy per controller.
    V1,
    /// One hierarchy.
    V2,
}

impl Version {
    /// The version of this machine.
    ///
    /// # Errors
    /// Nothing is mounted at `/sys/fs/cgroup`.
    pub fn of_machine() -> Result<Self> {
        let root = statfs(MOUNT).with_context(|| format!("cannot stat the file system of {MOUNT}"))?;
        Ok(if root.filesystem_type() == CGROUP2_SUPER_MAGIC { Self::V2 } else { Self::V1 })
    }
}

/// The cgroup driver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Driver {
    /// The agent creates directories.
    Cgroupfs,
    /// The agent creates slices of systemd.
    Systemd,
}

impl Driver {
    /// The driver of tests that run with either; systemd is selected where it is the first process.
    pub fn of_test() -> Self {
        let selected = std::env::var(DRIVER_VARIABLE).is_ok_and(|driver| driver == "systemd");
        if selected { Self::Systemd } else { Self::Cgroupfs }
    }

    /// Its name in a KubeletConfiguration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
        }
    }

    /// The path of a cgroup below `cgroupRoot`, given by its components, such as `kubepods`, `burstable`, `podUID`.
    pub fn path(self, root: &str, components: &[&str]) -> String {
        match self {
            Self::Cgroupfs => format!("{}/{}", root.trim_end_matches('/'), components.join("/")),
            Self::Systemd => {
                let words: Vec<String> = components.iter().map(|component| component.replace('-', "_")).collect();
                let slices = (1..=words.len()).map(|end| format!("/{}.slice", words[..end].join("-")));
                slices.collect()
            }
        }
    }
}

/// Reads the cgroup files of a machine.
#[derive(Clone, Copy, Debug)]
pub struct CgroupFiles {
    /// The version of the hierarchy.
    pub version: Version,
}

impl CgroupFiles {
    /// The files of this machine.
    ///
    /// # Errors
    /// As [`Version::of_machine`].
    pub fn of_machine() -> Result<Self> {
        Ok(Self { version: Version::of_machine()? })
    }

    /// Directory of a cgroup in the hierarchy of a controller.
    pub fn directory(&self, controller: &str, path: &str) -> PathBuf {
        let mount = match self.version {
            Version::V1 => Path::new(MOUNT).join(controller),
            Version::V2 => PathBuf::from(MOUNT),
        };
        mount.join(path.trim_start_matches('/'))
    }

    /// The content of the file that exists in this version: `v1` in the hierarchy of `controller`, or `v2`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, path: &str, controller: &str, v1: &str, v2: &str) -> Result<String> {
        let name = if self.version == Version::V1 { v1 } else { v2 };
        let file = self.directory(controller, path).join(name);
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(text.trim_end().to_owned())
    }

    /// CPU shares, or the weight that corresponds to them.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn shares(&self, path: &str) -> Result<u64> {
        let text = self.read(path, "cpu", "cpu.shares", "cpu.weight")?;
        text.parse().with_context(|| format!("{path}: {text:?} is not a weight"))
    }

    /// The value that [`Self::shares`] has for these shares (KEP-2254).
    pub fn expected_shares(&self, shares: u64) -> u64 {
        if self.version == Version::V1 { shares } else { 1 + ((shares - 2) * 9999) / 262_142 }
    }

    /// CPU quota in microseconds of a period of 100 ms; `None` without a limit.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn quota(&self, path: &str) -> Result<Option<u64>> {
        let text = self.read(path, "cpu", "cpu.cfs_quota_us", "cpu.max")?;
        Ok(text.split(' ').next().and_then(|quota| quota.parse().ok()))
    }

    /// Memory limit in bytes; `None` without a limit.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn memory(&self, path: &str) -> Result<Option<u64>> {
        let text = self.read(path, "memory", "memory.limit_in_bytes", "memory.max")?;
        // v1 shows the largest multiple of a page.
        Ok(text.parse().ok().filter(|limit| *limit < 1 << 62))
    }

    /// Limit of processes; `None` without a limit.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn pids(&self, path: &str) -> Result<Option<u64>> {
        Ok(self.read(path, "pids", "pids.max", "pids.max")?.parse().ok())
    }

    /// The cgroup of a process that limits its memory.
    ///
    /// # Errors
    /// The process does not exist.
    pub fn of_process(&self, pid: i32) -> Result<String> {
        let file = format!("/proc/{pid}/cgroup");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        let fits = |controllers: &str| match self.version {
            Version::V1 => controllers.split(',').any(|name| name == "memory"),
            Version::V2 => controllers.is_empty(),
        };
        let line = text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            fits(controllers).then(|| path.to_owned())
        });
        line.with_context(|| format!("{file} has no cgroup with a memory controller: {text}"))
    }

    /// The values of a cgroup and of all below it, by file, with the inode of each directory: equal if nothing was
    /// written or created anew in between.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn values_below(&self, path: &str) -> Result<BTreeMap<PathBuf, String>> {
        let mut values = BTreeMap::new();
        match self.version {
            Version::V1 => {
                for (controller, file) in V1 {
                    collect(&self.directory(controller, path), &[file], &mut values)?;
                }
            }
            Version::V2 => collect(&self.directory("", path), &V2, &mut values)?,
        }
        Ok(values)
    }
}

fn collect(directory: &Path, files: &[&str], values: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    let metadata = fs::metadata(directory).with_context(|| format!("cannot stat {}", directory.display()))?;
    values.insert(directory.to_owned(), metadata.ino().to_string());
    for file in files {
        let path = directory.join(file);
        if let Ok(text) = fs::read_to_string(&path) {
            values.insert(path, text.trim_end().to_owned());
        }
    }
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        collect(&entry.path(), files, values)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_named_as_the_driver_names_them() {
        let pod = ["kubepods", "burstable", "pod12-ab"];
        assert_eq!(Driver::Cgroupfs.path("/x", &pod), "/x/kubepods/burstable/pod12-ab");
        assert_eq!(
            Driver::Systemd.path("/", &pod),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_ab.slice"
        );
    }

    #[test]
    fn weights_follow_shares() {
        let files = CgroupFiles { version: Version::V2 };
        assert_eq!([2, 256, 262_144].map(|shares| files.expected_shares(shares)), [1, 10, 10_000]);
    }
}
