//! Memory files of cgroup v2.

use std::fmt;
use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::ensure;
use nix::sys::statfs::CGROUP2_SUPER_MAGIC;
use nix::sys::statfs::statfs;

const MOUNT: &str = "/sys/fs/cgroup";

/// Checks that the machine has cgroup v2 only.
///
/// # Errors
/// It has not.
pub(crate) fn check() -> anyhow::Result<()> {
    let kind = statfs(MOUNT).with_context(|| format!("cannot stat the file system of {MOUNT}"))?;
    ensure!(
        kind.filesystem_type() == CGROUP2_SUPER_MAGIC,
        "{MOUNT} is not cgroup v2; `cargo xtask bench pressure` runs this benchmark in a machine that has it"
    );
    Ok(())
}

/// A cgroup by its path from the root.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cgroup(String);

impl Cgroup {
    pub(crate) fn new(path: &str) -> Self {
        Self(path.trim_end_matches('/').to_owned())
    }

    /// The cgroup of a process.
    ///
    /// # Errors
    /// The process does not exist.
    pub(crate) fn of(pid: u32) -> anyhow::Result<Self> {
        let file = format!("/proc/{pid}/cgroup");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        path.map(Self::new).with_context(|| format!("{file} has no cgroup v2: {text}"))
    }

    /// The cgroup that contains it; the root's is itself.
    pub(crate) fn parent(&self) -> Self {
        Self(self.0.rsplit_once('/').map_or_else(String::new, |(parent, _)| parent.to_owned()))
    }

    /// Memory in use, in bytes.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn memory_current(&self) -> anyhow::Result<u64> {
        let text = self.read("memory.current")?;
        text.parse().with_context(|| format!("memory.current of {} is {text:?}", self.0))
    }

    /// A file's content.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read(&self, file: &str) -> anyhow::Result<String> {
        let path = self.file(file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(text.trim_end().to_owned())
    }

    /// Writes a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(&self, file: &str, value: &str) -> anyhow::Result<()> {
        let path = self.file(file);
        fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
    }

    fn file(&self, name: &str) -> PathBuf {
        Path::new(MOUNT).join(self.0.trim_start_matches('/')).join(name)
    }
}

/// A changed limit, which is restored when this is dropped.
#[derive(Debug)]
pub(crate) struct Limit {
    cgroup: Cgroup,
    before: String,
}

impl Limit {
    /// Permits a cgroup this much memory beyond what it uses now.
    ///
    /// # Errors
    /// `memory.max` cannot be read or written.
    pub(crate) fn beyond_usage(cgroup: Cgroup, bytes: u64) -> anyhow::Result<Self> {
        let before = cgroup.read("memory.max")?;
        cgroup.write("memory.max", &(cgroup.memory_current()? + bytes).to_string())?;
        Ok(Self { cgroup, before })
    }
}

/// The limit as it is now.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |file| self.cgroup.read(file).unwrap_or_else(|error| error.to_string());
        write!(f, "{} uses {} of {}", self.cgroup.0, value("memory.current"), value("memory.max"))
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        // The cgroup of a pod may be gone with its last process.
        let _ = self.cgroup.write("memory.max", &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_end_at_the_root() {
        let pod = Cgroup::new("/k/kubepods/besteffort/podx/");
        assert_eq!(pod.parent().parent(), Cgroup::new("/k/kubepods"));
        assert_eq!(Cgroup::new("/").parent(), Cgroup::new(""));
    }
}
