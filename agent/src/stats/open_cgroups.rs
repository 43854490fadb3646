//! The cgroups of pods and containers whose folders stay open from one sample to the next: looking a cgroup up and opening
//! its folders takes half as long as reading all of its files. An open folder belongs to one cgroup: it has no files once
//! that was removed, also if one of the same name was created since, as for a static pod, whose UID is used again. The last
//! sample keeps its folders until the next one; a folder that is open does not keep the kernel from removing the cgroup.
//!
//! The limits of a cgroup, a quarter of its files, are read again when they may have changed: those of a container when the
//! runtime reports other resources, those of a pod when the agent has written limits of any cgroup; and after some minutes,
//! since they can be written past both.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

use super::sample::ContainerSample;
use super::sample::Measured;
use super::sample::Sample;
use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupDetail;
use crate::cgroups::usage::CgroupLimits;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::OpenCgroup;
use crate::kernel::open_files;
use crate::model::ContainerResources;

/// Of the agent's open files, at most one in as many is such a folder.
const SHARE: usize = 4;
/// How long limits are not read again although other programs, such as systemd or an operator, may have written them. Longer
/// than scrapes are apart, which is up to a minute: else each of them would read all limits.
const LIMITS_MAX_AGE: Duration = Duration::from_secs(300);

/// A cgroup that stays open, and the limits that it had.
#[derive(Debug)]
pub(super) struct KeptCgroup {
    cgroup: OpenCgroup,
    limits: Mutex<Option<KeptLimits>>,
}

/// Differs when the component that sets the limits of a cgroup has set others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitsVersion {
    /// Of a container: what the runtime reports.
    Reported(ContainerResources),
    /// Of a pod: how often the agent has written limits of cgroups.
    Written(u64),
}

#[derive(Clone, Copy, Debug)]
struct KeptLimits {
    read: Instant,
    version: LimitsVersion,
    limits: CgroupLimits,
}

impl KeptCgroup {
    fn new(cgroup: OpenCgroup) -> Self {
        Self { cgroup, limits: Mutex::default() }
    }

    /// Reads what the sample of this pod's cgroup does not contain. `limit_writes`: how often the agent has written limits.
    pub(super) fn pod_detail(&self, measured: &Measured, limit_writes: u64) -> CgroupDetail {
        let limits = self.limits(LimitsVersion::Written(limit_writes), Instant::now());
        self.cgroup.detail_with(&measured.usage, limits)
    }

    /// Reads what the sample of this container's cgroup does not contain.
    pub(super) fn container_detail(&self, container: &ContainerSample) -> CgroupDetail {
        let limits = self.limits(LimitsVersion::Reported(container.resources), Instant::now());
        self.cgroup.detail_with(&container.measured.usage, limits)
    }

    fn limits(&self, version: LimitsVersion, now: Instant) -> CgroupLimits {
        // Replaced as a whole: a panic elsewhere leaves it usable.
        let mut kept = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let is_valid =
            |kept: &KeptLimits| kept.version == version && now.saturating_duration_since(kept.read) < LIMITS_MAX_AGE;
        if let Some(kept) = kept.filter(is_valid) {
            return kept.limits;
        }
        let limits = self.cgroup.limits();
        // For lack of descriptors none can be read.
        let were_read = limits != CgroupLimits::default();
        *kept = were_read.then_some(KeptLimits { read: now, version, limits });
        limits
    }
}

/// The cgroups that the last sample has found, and how many may stay open after this one. The default is none of both.
#[derive(Default)]
pub(super) struct OpenCgroups<'a> {
    known: HashMap<&'a str, &'a Measured>,
    left: usize,
}

impl<'a> OpenCgroups<'a> {
    /// Those of the last sample.
    pub(super) fn of(before: Option<&'a Sample>) -> Self {
        let most = open_files::soft_limit() / SHARE / OpenCgroup::MOST_FOLDERS;
        let known = before.into_iter().flat_map(Sample::of_pods).map(|measured| (measured.key.as_str(), measured));
        Self { known: known.collect(), left: most }
    }

    /// Measures the cgroup of this container id or pod UID again; `None` if it is not known, or was removed.
    pub(super) fn measure(&mut self, key: &str) -> Option<Measured> {
        let known = self.known.get(key).copied()?;
        let open = known.open.clone()?;
        let usage = open.cgroup.read();
        // With v1 it may have been removed from one hierarchy, and created there again.
        let is_whole = usage.is_there() && usage.has_controllers_of(&known.usage);
        is_whole.then(|| Measured { open: self.keep(open), ..Measured::new(key, usage).at(known.path.clone()) })
    }

    /// Finds and measures the cgroup of this container id or pod UID, from the text of `/proc/<pid>/cgroup` of a process in it.
    pub(super) fn find(&mut self, layout: &Layout, memberships: &str, key: &str) -> Option<Measured> {
        let place = CgroupPlace::named(layout, memberships, key)?;
        let open = place.open();
        let measured = Measured::new(key, open.read()).at(place.path(layout));
        // A folder that is missing, as for lack of descriptors, is opened with the next sample.
        let open = if open.is_whole { self.keep(Arc::new(KeptCgroup::new(open))) } else { None };
        Some(Measured { open, ..measured })
    }

    fn keep(&mut self, open: Arc<KeptCgroup>) -> Option<Arc<KeptCgroup>> {
        self.left = self.left.checked_sub(1)?;
        Some(open)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn no_more_folders_stay_open_than_the_limit_permits() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        for name in ["a", "b"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(name).join("memory.current"), "7\n").unwrap();
        }
        let mut cgroups = OpenCgroups { left: 1, ..OpenCgroups::of(None) };
        let found = ["a", "b"].map(|name| cgroups.find(&layout, &format!("0::/{name}\n"), name).unwrap());
        assert!(found.iter().all(|measured| measured.usage.memory.is_some()), "both are measured");
        assert_eq!(found.map(|measured| measured.open.is_some()), [true, false]);
        let unkept = OpenCgroups::default().find(&layout, "0::/a\n", "a").unwrap();
        assert!(unkept.usage.memory.is_some() && unkept.open.is_none(), "by default none stays open");
        assert!(OpenCgroups::of(None).left > 0 && OpenCgroups::of(None).measure("a").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn limits_are_read_again_when_others_are_reported_or_written_or_they_are_old() {
        let dir = tempfile::tempdir().unwrap();
        let write = |most: u64| std::fs::write(dir.path().join("pids.max"), most.to_string()).unwrap();
        write(1);
        let place = CgroupPlace::at(&Layout::V2 { mount: dir.path().to_owned() }, "/");
        let kept = KeptCgroup::new(place.open());
        let most = |version| kept.limits(version, Instant::now()).tasks_max;
        let first = ContainerResources::default();
        let resized = ContainerResources { cpu_limit: Some(500), ..first };
        let of_container = (LimitsVersion::Reported(first), LimitsVersion::Reported(resized));
        let of_pod = (LimitsVersion::Written(7), LimitsVersion::Written(8));
        for (before, after) in [of_container, of_pod] {
            write(1);
            assert_eq!(most(before), Some(1));
            write(2);
            tokio::time::advance(LIMITS_MAX_AGE - Duration::from_secs(1)).await;
            assert_eq!(most(before), Some(1), "not read again: {before:?}");
            assert_eq!(most(after), Some(2), "{after:?}");
            write(3);
            tokio::time::advance(LIMITS_MAX_AGE).await;
            assert_eq!(most(after), Some(3), "{after:?}");
        }
    }

    #[test]
    fn a_cgroup_of_which_a_folder_is_missing_is_looked_up_again() {
        let dir = tempfile::tempdir().unwrap();
        let controllers = ["cpuacct", "memory"].map(|name| (name.to_owned(), dir.path().join(name)));
        let layout = Layout::V1 { controllers: controllers.into(), unified: None };
        let (cpu, memory) = (dir.path().join("cpuacct/a"), dir.path().join("memory/a"));
        let create = |folder: &Path, file: &str, number: &str| {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join(file), number).unwrap();
        };
        let find = || OpenCgroups::of(None).find(&layout, "2:cpuacct:/a\n1:memory:/a\n", "a").unwrap();
        let again = |known: &Measured| {
            let measured = OpenCgroups { known: HashMap::from([("a", known)]), left: 1 }.measure("a");
            measured.map(|measured| (measured.usage.cpu, measured.usage.memory.map(|memory| memory.usage)))
        };
        create(&cpu, "cpuacct.usage", "5\n");
        let without_memory = find();
        assert_eq!((without_memory.usage.cpu, again(&without_memory)), (Some(5), None));

        create(&memory, "memory.usage_in_bytes", "7\n");
        let whole = find();
        assert_eq!(again(&whole), Some((Some(5), Some(7))));
        std::fs::remove_dir_all(&memory).unwrap();
        create(&memory, "memory.usage_in_bytes", "8\n");
        assert_eq!(again(&whole), None, "removed from one hierarchy, and created again");
        assert_eq!(again(&find()), Some((Some(5), Some(8))));
    }
}
