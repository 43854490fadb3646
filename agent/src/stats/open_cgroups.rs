//! The cgroups of pods and containers whose folders stay open from one sample to the next: looking a cgroup up and opening its
//! folders takes half as long as reading all of its files. Container ids and pod UIDs are in the names of their cgroups and
//! are never used again, so an open folder that still has files is theirs. The last sample keeps its folders until the next
//! one; a folder that is open does not keep the kernel from removing the cgroup.

use std::collections::HashMap;
use std::sync::Arc;

use super::sample::Measured;
use super::sample::Sample;
use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::OpenCgroup;
use crate::kernel::open_files;

/// Of the agent's open files, at most one in as many is such a folder.
const SHARE: usize = 4;

/// The cgroups that the last sample has found, and how many may stay open after this one.
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
        let known = self.known.get(key)?;
        let (open, path) = (known.open.clone()?, known.path.clone());
        let usage = open.read();
        usage.is_there().then(|| Measured { open: self.keep(open), ..Measured::new(key, usage).at(path) })
    }

    /// Finds and measures the cgroup of this container id or pod UID, from the text of `/proc/<pid>/cgroup` of a process in it.
    pub(super) fn find(&mut self, layout: &Layout, memberships: &str, key: &str) -> Option<Measured> {
        let place = CgroupPlace::named(layout, memberships, key)?;
        let open = Arc::new(place.open());
        let measured = Measured::new(key, open.read()).at(place.path(layout));
        Some(Measured { open: self.keep(open), ..measured })
    }

    fn keep(&mut self, open: Arc<OpenCgroup>) -> Option<Arc<OpenCgroup>> {
        self.left = self.left.checked_sub(1)?;
        Some(open)
    }
}

#[cfg(test)]
mod tests {
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
        assert!(OpenCgroups::of(None).left > 0 && OpenCgroups::of(None).measure("a").is_none());
    }
}
