//! `memory.high` of a pod's cgroups: a soft limit (cgroup v2, feature `MemoryQoS`) above which the kernel throttles tasks
//! until they have reclaimed memory. Finds where it is set, and raises it to given values. Blocks for the time of a few
//! files of the kernel.

use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;

use cgroups_rs::fs::MaxValue;
use cgroups_rs::fs::memory::MemController;
use cgroups_rs::fs::memory::SetMemory;

use super::Cgroups;
use super::LimitWrites;

/// Cgroups of a pod that are looked at, at most: a container may create many below its own.
const MAX_CGROUPS: usize = 64;

/// A `memory.high` that is set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct High {
    /// The folder of the cgroup.
    pub cgroup: PathBuf,
    /// The value in bytes.
    pub bytes: u64,
    /// `memory.max` of the same cgroup, if it has one.
    pub max: Option<u64>,
}

/// A `memory.high` that is to be raised.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Raise {
    /// The folder of the cgroup.
    pub cgroup: PathBuf,
    /// The present value in bytes.
    pub from: u64,
    /// The new one; `None` for no limit.
    pub to: Option<u64>,
}

/// What became of values that were to be raised. One that is not the expected one any more counts as neither.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Raised {
    /// Values that were written.
    pub written: usize,
    /// Why the kernel has refused others: the first of them.
    pub refusal: Option<String>,
}

/// Where `memory.high` is set: in the cgroup of a pod, whose folder is `pod`, and those of its containers. Blocks.
pub fn set_in(pod: &Path) -> Vec<High> {
    let containers = fs::read_dir(pod).into_iter().flatten().flatten();
    let containers = containers.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let all = std::iter::once(pod.to_owned()).chain(containers.take(MAX_CGROUPS).map(|entry| entry.path()));
    all.filter_map(|cgroup| {
        let number = |file: &str| fs::read_to_string(cgroup.join(file)).ok()?.trim().parse::<u64>().ok();
        Some(High { bytes: number("memory.high")?, max: number("memory.max"), cgroup })
    })
    .collect()
}

impl Cgroups {
    /// Writes new values of `memory.high`, on a thread that may block: the kernel may be busy for a while with reclaim of a
    /// cgroup that is still above its value. If the caller is cancelled, the values are written nevertheless.
    pub async fn raise_memory_high(&self, raises: &[Raise]) -> Raised {
        let (raises, limit_writes) = (raises.to_vec(), self.limit_writes.clone());
        let raising = tokio::task::spawn_blocking(move || raise_all(&raises, &limit_writes)).await;
        raising.unwrap_or_else(|error| Raised { written: 0, refusal: Some(error.to_string()) })
    }
}

/// Writes the new values, all of them even if one is refused.
fn raise_all(raises: &[Raise], limit_writes: &LimitWrites) -> Raised {
    let mut raised = Raised::default();
    for wanted in raises {
        match raise(wanted, limit_writes) {
            Ok(written) => raised.written += usize::from(written),
            Err(error) if raised.refusal.is_none() => {
                raised.refusal = Some(format!("cannot raise memory.high of {}: {error}", wanted.cgroup.display()));
            }
            Err(_) => {}
        }
    }
    raised
}

/// Writes the new value. Returns false if the present one is not the expected one: another program has changed it, or the
/// container has ended.
///
/// # Errors
/// The value cannot be read, or the kernel refuses the new one.
fn raise(raise: &Raise, limit_writes: &LimitWrites) -> io::Result<bool> {
    let present = match fs::read_to_string(raise.cgroup.join("memory.high")) {
        Ok(present) => present,
        Err(error) if is_gone(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    if present.trim().parse() != Ok(raise.from) {
        return Ok(false);
    }
    let value = match raise.to.and_then(|bytes| i64::try_from(bytes).ok()) {
        Some(bytes) => MaxValue::Value(bytes),
        None => MaxValue::Max,
    };
    let memory = MemController::new(raise.cgroup.clone(), PathBuf::new(), true);
    let written = memory.set_mem(SetMemory { low: None, high: Some(value), min: None, max: None });
    limit_writes.add();
    written.map(|()| true).map_err(io::Error::other)
}

/// A cgroup that was removed has no files; one that is removed between opening and reading has no device.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

#[cfg(test)]
mod tests {
    use super::super::CgroupName;
    use super::super::Driver;
    use super::super::Layout;
    use super::*;

    fn cgroup(folder: &Path, high: &str, max: &str) -> PathBuf {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("memory.high"), high).unwrap();
        fs::write(folder.join("memory.max"), max).unwrap();
        folder.to_owned()
    }

    #[tokio::test]
    async fn values_that_are_set_are_found_and_raised_and_each_write_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let pod = cgroup(&dir.path().join("pod"), "max\n", "max\n");
        let main = cgroup(&pod.join("main"), "1000\n", "2000\n");
        cgroup(&pod.join("other"), "max\n", "2000\n");
        let found = set_in(&pod);
        assert_eq!(found, [High { cgroup: main.clone(), bytes: 1000, max: Some(2000) }]);
        let read = || fs::read_to_string(main.join("memory.high")).unwrap().trim().to_owned();
        let writes = LimitWrites::default();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).unwrap();
        let cgroups = cgroups.with_limit_writes(writes.clone());
        let wanted = |from: u64, to: Option<u64>| [Raise { cgroup: main.clone(), from, to }];
        let raised = Raised { written: 1, refusal: None };
        assert_eq!(cgroups.raise_memory_high(&wanted(1000, Some(1500))).await, raised);
        assert_eq!((read().as_str(), writes.count()), ("1500", 1));
        let unexpected = cgroups.raise_memory_high(&wanted(1000, None)).await;
        assert_eq!((unexpected, writes.count()), (Raised::default(), 1), "another program has changed it");
        assert_eq!(cgroups.raise_memory_high(&wanted(1500, None)).await, raised);
        assert_eq!((read().as_str(), writes.count()), ("max", 2));
    }

    #[test]
    fn a_cgroup_that_is_gone_refuses_nothing() {
        assert_eq!(set_in(Path::new("/no/such/cgroup")), []);
        let (gone, writes) = (Raise { cgroup: "/no/such/cgroup".into(), from: 1, to: None }, LimitWrites::default());
        assert_eq!(raise_all(&[gone], &writes), Raised::default());
        assert_eq!(writes.count(), 0);
    }

    #[test]
    fn a_refusal_names_the_cgroup_and_the_others_are_raised() {
        let dir = tempfile::tempdir().unwrap();
        let main = cgroup(&dir.path().join("main"), "1000\n", "2000\n");
        // A folder in place of the file can neither be read nor written, by root either.
        let broken = dir.path().join("broken");
        fs::create_dir_all(broken.join("memory.high")).unwrap();
        let raise = |cgroup: &Path| Raise { cgroup: cgroup.to_owned(), from: 1000, to: Some(1500) };
        let raised = raise_all(&[raise(&broken), raise(&main)], &LimitWrites::default());
        let begins = format!("cannot raise memory.high of {}: ", broken.display());
        assert_eq!(raised.written, 1);
        assert!(raised.refusal.as_deref().is_some_and(|refusal| refusal.starts_with(&begins)), "{raised:?}");
    }
}
