//! Mount points inside a volume: a container that mounts another volume below this one needs a directory there, and this
//! one is read-only for it.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::VolumeMount;

use super::payload::Payload;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;

/// Longest path in bytes (`PATH_MAX`).
const MAX_PATH: usize = 4096;

/// Where the containers of a pod mount one volume inside another.
#[derive(Debug, Default)]
pub(in crate::volumes) struct NestedMounts {
    /// For each container and path the paths right below it at which the container mounts something.
    below: Vec<HashMap<PathBuf, Vec<PathBuf>>>,
    /// For each volume the containers that mount it, and where, if they mount something below.
    mounted: HashMap<String, Vec<(usize, PathBuf)>>,
}

impl NestedMounts {
    /// Those of containers with these mounts.
    pub(in crate::volumes) fn of<'a>(containers: impl Iterator<Item = &'a [VolumeMount]>) -> Self {
        let mut all = Self::default();
        for (container, mounts) in containers.enumerate() {
            let found: Vec<_> = mounts.iter().filter_map(|mount| Some((&mount.name, cleaned(mount)?))).collect();
            let below = right_below(&found.iter().map(|(_, path)| path.as_path()).collect());
            for (name, path) in found {
                if below.contains_key(&path) {
                    all.mounted.entry(name.clone()).or_default().push((container, path));
                }
            }
            all.below.push(below);
        }
        all
    }

    /// Paths below `volume`, relative to it, at which some container mounts another volume. Of paths within each other only
    /// the outermost.
    pub(super) fn of_volume(&self, volume: &str) -> Vec<String> {
        let mounted = self.mounted.get(volume).into_iter().flatten();
        let below = mounted.filter_map(|(container, path)| self.below.get(*container)?.get(path));
        let found: BTreeSet<&Path> = below.flatten().map(PathBuf::as_path).collect();
        let mut outermost: Vec<&Path> = Vec::new();
        // All that is below a path comes right after it.
        for path in found {
            if outermost.last().is_none_or(|last| !path.starts_with(last)) {
                outermost.push(path);
            }
        }
        outermost.into_iter().filter_map(Path::to_str).map(str::to_owned).collect()
    }
}

/// For each path those below it, relative to it; of paths within each other only the outermost.
fn right_below(paths: &BTreeSet<&Path>) -> HashMap<PathBuf, Vec<PathBuf>> {
    let mut found: HashMap<PathBuf, Vec<PathBuf>> = HashMap::new();
    // The paths above the current one, from the outermost on: all that is below a path comes right after it.
    let mut above: Vec<&Path> = Vec::new();
    for &path in paths {
        while above.last().is_some_and(|last| !path.starts_with(last)) {
            above.pop();
        }
        if let Some(&last) = above.last()
            && let Ok(relative) = path.strip_prefix(last)
        {
            found.entry(last.to_owned()).or_default().push(relative.to_owned());
        }
        above.push(path);
    }
    found
}

/// The mount path relative to `/`, cleaned: `..` removes the part before it, if there is one. `None` if the path is too long
/// for a mount.
fn cleaned(mount: &VolumeMount) -> Option<PathBuf> {
    if mount.mount_path.len() > MAX_PATH {
        return None;
    }
    let mut path = PathBuf::new();
    for part in Path::new(&mount.mount_path).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::ParentDir => {
                path.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Some(path)
}

/// Makes the directories, except where the volume has content of that name.
pub(super) fn make(dir: &Path, nested: &[String], payload: &Payload) -> Result<(), VolumeError> {
    let own = payload.top_names();
    for path in nested {
        let first = path.split('/').next().unwrap_or(path);
        if own.contains(first) || first.starts_with("..") {
            continue;
        }
        let target = dir.join(path);
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&target).on("create", &target)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(name: impl Into<String>, path: impl Into<String>) -> VolumeMount {
        VolumeMount { name: name.into(), mount_path: path.into(), ..VolumeMount::default() }
    }

    fn of(containers: &[Vec<VolumeMount>]) -> NestedMounts {
        NestedMounts::of(containers.iter().map(Vec::as_slice))
    }

    #[test]
    fn mount_paths_inside_a_volume() {
        for (mounts, expected) in [
            (vec![("v", "/a"), ("w", "/b")], vec![]),
            (vec![("v", "/a"), ("w", "/a/b")], vec!["b"]),
            (vec![("v", "/a/"), ("w", "a/b/c"), ("x", "/a/b/c/d"), ("y", "/a/z")], vec!["b/c", "z"]),
            (vec![("v", "/a"), ("w", "/ab")], vec![]),
            (vec![("v", "/a"), ("w", "/a/../b")], vec![]),
            (vec![("v", "/a"), ("w", "/a/x/../b")], vec!["b"]),
            (vec![("v", "foo/../../dir"), ("w", "/dir/sub")], vec!["sub"]),
            (vec![("v", "/a"), ("v", "/c"), ("w", "/c/d")], vec!["d"]),
            (vec![("v", "/a"), ("w", "/a-b"), ("x", "/a/c"), ("y", "/a.d/e")], vec!["c"]),
            (vec![("v", "/"), ("w", "/a"), ("x", "/a/b"), ("y", "/c/d")], vec!["a", "c/d"]),
            (vec![("v", "/a"), ("w", "/./a/"), ("x", "/a/b")], vec!["b"]),
        ] {
            let mounts: Vec<_> = mounts.iter().map(|&(name, path)| mount(name, path)).collect();
            assert_eq!(of(&[mounts]).of_volume("v"), expected);
        }
    }

    #[test]
    fn mounts_of_several_containers() {
        let one = vec![mount("v", "/a"), mount("w", "/a/b/c")];
        let two = vec![mount("v", "/x"), mount("w", "/x/b"), mount("w", "/x/d")];
        let other = vec![mount("w", "/a"), mount("x", "/a/e")];
        let nested = of(&[one, two, other]);
        assert_eq!(nested.of_volume("v"), ["b", "d"]);
        assert_eq!((nested.of_volume("w"), nested.of_volume("x")), (vec!["e".to_owned()], Vec::new()));
    }

    #[test]
    fn thousands_of_volumes_inside_each_other() {
        const COUNT: usize = 10_000;
        let pair = |number: usize| {
            let path = format!("/m/{number}");
            [mount("w", format!("{path}/in")), mount(format!("v{number}"), path)]
        };
        let mounts: Vec<_> = (0..COUNT).flat_map(pair).collect();
        let nested = of(&[mounts]);
        assert!((0..COUNT).all(|number| nested.of_volume(&format!("v{number}")) == ["in"]));
    }

    #[test]
    fn a_path_that_is_too_long_is_not_inspected() {
        let nested = of(&[vec![mount("v", "/m"), mount("w", format!("/m/{}", "b/".repeat(500_000)))]]);
        assert_eq!(nested.of_volume("v"), [""; 0]);
    }

    /// Looking for each of the folders above them would take a minute.
    #[test]
    fn thousands_of_long_paths_inside_a_volume() {
        let long = "b/".repeat(2_000);
        let mounts = (0..1_000).map(|number| mount("w", format!("/m/{long}{number}")));
        let began = std::time::Instant::now();
        let nested = of(&[std::iter::once(mount("v", "/m")).chain(mounts).collect()]);
        assert_eq!(nested.of_volume("v").len(), 1_000);
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }
}
