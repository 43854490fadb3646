//! emptyDir volumes whose files the file system counts, as the kubelet's package `fsquota` does: each has a project of its own,
//! without any limit, for as long as its directory is there.
//!
//! ```text
//!  set-up:   free id ─▶ /etc/projects, /etc/projid ─▶ the empty directory
//!  teardown:                       the directory is gone ─▶ both files
//!  start:    files and directories ─▶ known ids; entries without a directory are removed
//! ```
//! Only volumes of pods with a user namespace have one: any other user can change the project of files that he owns. A volume
//! without a project is counted by walking it.

mod entries;
mod error;
mod files;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use self::entries::Entries;
use self::error::ProjectQuotaError;
use self::files::Change;
use self::files::OnPath as _;
use self::files::ProjectFiles;
use super::PodDirs;
use super::layout;
use crate::kernel::project_quota;
use crate::kernel::project_quota::Project;
use crate::kernel::project_quota::ProjectUsage;

/// Projects of volumes. Clones share them.
#[derive(Clone, Debug)]
pub struct ProjectQuotas(Arc<Registry>);

#[derive(Debug)]
struct Registry {
    files: ProjectFiles,
    /// By the volume's directory.
    known: Mutex<HashMap<PathBuf, Entry>>,
}

/// What the files say of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    id: u32,
    /// The directory has this id, so that the project's files are those of the volume.
    is_counted: bool,
}

impl ProjectQuotas {
    /// With the files `projects` and `projid` in this directory: `/etc`, except in tests. Nothing is read yet.
    pub fn new(directory: &Path) -> Self {
        Self(Arc::new(Registry { files: ProjectFiles::new(directory), known: Mutex::default() }))
    }

    /// The project that has the files of a volume and no others.
    pub(super) fn id_of(&self, directory: &Path) -> Option<u32> {
        self.0.known().get(directory).filter(|entry| entry.is_counted).map(|entry| entry.id)
    }

    /// Gives the empty directory of a volume a project. Without one it is walked, so a failure is only logged. Blocking.
    pub(super) fn assign(&self, directory: &Path) {
        match self.0.assign(directory) {
            Ok(project) => tracing::debug!(directory = %directory.display(), project, "a volume has a project"),
            Err(error) => tracing::warn!(%error, "a volume has no project: its files are counted by walking it"),
        }
    }

    /// Gives back the project of a volume whose directory is gone; a failure is logged, and corrected at the next start.
    /// Blocking.
    pub(super) fn release(&self, directory: &Path) {
        if let Err(error) = self.0.release(directory) {
            tracing::warn!(%error, "the project of a volume that is gone stays until the agent is started again");
        }
    }

    /// Reads which volumes have a project, and gives back those of volumes that are gone. To be called before any volume is
    /// set up. Blocking.
    pub(super) fn reconstruct(&self, dirs: &PodDirs) {
        if let Err(error) = self.0.reconstruct(dirs) {
            tracing::warn!(%error, "the projects of volumes are not known: their files are counted by walking them");
        }
    }
}

impl Registry {
    fn known(&self) -> MutexGuard<'_, HashMap<PathBuf, Entry>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn assign(&self, directory: &Path) -> Result<u32, ProjectQuotaError> {
        entries::check(directory)?;
        let unsupported = |source| ProjectQuotaError::FileSystem { directory: directory.to_owned(), source };
        project_quota::check(directory).map_err(unsupported)?;
        let now = project_quota::project_of(directory).on("read the project of", directory)?.id;
        let id = self.files.edit(Change::Add, |entries| {
            let recorded = entries.id_of(directory)?;
            // One that it was created with, from a directory above, whose administrator counts it there.
            if now != 0 && recorded != Some(now) {
                return Err(ProjectQuotaError::Foreign { id: now, directory: directory.to_owned() });
            }
            let id = recorded.map_or_else(|| entries.free_id(|id| is_in_use(directory, id)), Ok)?;
            Ok((entries.with(id, directory), id))
        })?;
        self.known().insert(directory.to_owned(), Entry { id, is_counted: false });
        if let Err(error) = project_quota::assign(directory, id) {
            self.release(directory)?;
            return Err(error).on("assign a project to", directory);
        }
        self.known().insert(directory.to_owned(), Entry { id, is_counted: true });
        Ok(id)
    }

    fn release(&self, directory: &Path) -> Result<(), ProjectQuotaError> {
        let Some(Entry { id, .. }) = self.known().remove(directory) else { return Ok(()) };
        self.files.edit(Change::Remove, |entries| Ok((entries.without(id, directory), ())))
    }

    fn reconstruct(&self, dirs: &PodDirs) -> Result<(), ProjectQuotaError> {
        let entries = self.files.read()?;
        let mut gone = Vec::new();
        for (id, directory) in of_volumes(&entries, dirs) {
            match project_quota::project_of(directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => gone.push((id, directory)),
                found => {
                    let is_counted = found.is_ok_and(|found| found == Project { id, is_passed_on: true });
                    self.known().insert(directory.to_owned(), Entry { id, is_counted });
                }
            }
        }
        if gone.is_empty() {
            return Ok(());
        }
        self.files.edit(Change::Remove, |entries| {
            let left = gone.iter().fold(entries.clone(), |left, (id, directory)| left.without(*id, directory));
            Ok((left, ()))
        })
    }
}

/// Ids and directories of emptyDir volumes below this root that a kubelet has recorded.
fn of_volumes<'a>(entries: &'a Entries, dirs: &PodDirs) -> impl Iterator<Item = (u32, &'a Path)> {
    entries.directories().filter(|(id, directory)| is_of_volume(dirs, directory) && entries.is_own(*id))
}

fn is_of_volume(dirs: &PodDirs, directory: &Path) -> bool {
    let Ok(below) = directory.strip_prefix(dirs.pods()) else { return false };
    let parts: Vec<_> = below.iter().filter_map(|part| part.to_str()).collect();
    let [uid, _, _, volume] = parts[..] else { return false };
    // To the byte, as it will be removed from the file.
    let path = dirs.volume(uid, &layout::escaped(layout::EMPTY_DIR), volume);
    path.is_ok_and(|path| path.as_os_str() == directory.as_os_str())
}

/// Whether the file system counts any file with this id, such as an open one of a volume that is gone.
fn is_in_use(directory: &Path, id: u32) -> Result<bool, ProjectQuotaError> {
    let usage = project_quota::usage(directory, id).on("read the use of projects on the file system of", directory)?;
    Ok(usage != ProjectUsage::default())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const HAND: &str = "# by hand\n1048590:/srv\n";

    struct Node {
        dir: tempfile::TempDir,
        dirs: PodDirs,
    }

    impl Node {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let dirs = PodDirs::new(dir.path());
            Self { dir, dirs }
        }

        fn volume(&self, name: &str) -> PathBuf {
            self.dirs.volume("u", "kubernetes.io~empty-dir", name).expect("a path")
        }

        fn write(&self, projects: &str, names: &str) {
            fs::write(self.dir.path().join("projects"), projects).expect("a file");
            fs::write(self.dir.path().join("projid"), names).expect("a file");
        }

        fn read(&self) -> (String, String) {
            let read = |name: &str| fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
            (read("projects"), read("projid"))
        }

        fn quotas(&self) -> ProjectQuotas {
            let quotas = ProjectQuotas::new(self.dir.path());
            quotas.reconstruct(&self.dirs);
            quotas
        }
    }

    #[test]
    fn entries_of_volumes_that_are_gone_are_removed_at_the_start() {
        let node = Node::new();
        let (gone, other) = (node.volume("gone"), node.dir.path().join("pods/u/volumes/kubernetes.io~empty-dir/a/b"));
        let (gone, other) = (gone.display(), other.display());
        let (foreign, doubled) = (node.volume("foreign"), node.volume("doubled"));
        let (foreign, doubled) = (foreign.display(), doubled.display());
        let slashes = gone.to_string().replace("/pods/", "//pods/");
        let kept =
            format!("{HAND}1048578:{other}\n1048579:{foreign}\n1048580:{doubled}\n1048580:/srv\n1048581:{slashes}\n");
        node.write(
            &format!("{kept}1048577:{gone}\n"),
            "volume1048577:1048577\nby-hand:1048579\nvolume1048580:1048580\nvolume1048583:1048583\n",
        );
        node.quotas();
        let names = "by-hand:1048579\nvolume1048580:1048580\nvolume1048583:1048583\n";
        assert_eq!(node.read(), (kept, names.to_owned()));
    }

    #[test]
    fn a_directory_without_the_recorded_project_is_not_counted_by_it_and_released_with_the_volume() {
        let node = Node::new();
        let volume = node.volume("v");
        fs::create_dir_all(&volume).expect("a directory");
        node.write(&format!("{HAND}1048577:{}\n", volume.display()), "volume1048577:1048577\n");
        let before = node.read();
        let quotas = node.quotas();
        assert_eq!(quotas.id_of(&volume), None);
        assert_eq!(node.read(), before);
        fs::remove_dir(&volume).expect("removed");
        quotas.release(&volume);
        assert_eq!(node.read(), (HAND.to_owned(), String::new()));
        quotas.release(&volume);
    }

    #[test]
    fn a_node_without_projects_needs_no_files() {
        let node = Node::new();
        let quotas = node.quotas();
        let volume = node.volume("v");
        quotas.release(&volume);
        assert_eq!(quotas.id_of(&volume), None);
        assert!(!node.dir.path().join("projects").exists());
    }

    #[test]
    fn a_file_system_without_projects_leaves_no_entry() {
        let node = Node::new();
        let quotas = node.quotas();
        let proc = Path::new("/proc/self");
        let error = quotas.0.assign(proc).expect_err("procfs").to_string();
        assert_eq!(error, "the file system of /proc/self does not count projects: it is neither ext4 nor XFS");
        quotas.assign(proc);
        assert_eq!((quotas.id_of(proc), node.read()), (None, (String::new(), String::new())));
    }
}
