//! The temporary folder of a machine: its sockets, logs and disk.

use std::fs;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use tempfile::TempDir;

const PREFIX: &str = "keblet-machine-";
/// A folder that is younger may not be locked yet by the command that made it.
const LOCKED_AFTER: Duration = Duration::from_secs(60);

/// A folder that is removed when this is dropped, or by the next command if this one is killed.
pub(super) struct Folder {
    // Removed before the lock is released.
    folder: TempDir,
    _lock: File,
}

impl Folder {
    /// Makes a folder, and removes those of commands that were killed.
    ///
    /// # Errors
    /// It cannot be made or locked.
    pub(super) fn create(parent: &Path) -> Result<Self> {
        remove_leftovers(parent, LOCKED_AFTER);
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent).context("cannot create a folder")?;
        let path = folder.path();
        let lock = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        lock.try_lock().with_context(|| format!("cannot lock {}", path.display()))?;
        Ok(Self { folder, _lock: lock })
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes folders of at least this age that no process has locked: the kernel releases the lock of a killed command.
fn remove_leftovers(parent: &Path, age: Duration) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let elapsed = entry.metadata().ok().and_then(|data| data.modified().ok()?.elapsed().ok());
        let is_old = elapsed.is_some_and(|elapsed| elapsed >= age);
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if !is_old || !is_folder || !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let Ok(folder) = File::open(entry.path()) else { continue };
        if folder.try_lock().is_ok() {
            // What a command of root left, another user cannot remove, and does not need to.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_killed_commands_are_removed_and_those_of_others_kept() {
        let parent = tempfile::tempdir().unwrap();
        let parent = parent.path();
        let [killed, other] = ["keblet-machine-killed", "other"].map(|name| parent.join(name));
        for folder in [&killed, &other] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("qemu.log"), "").unwrap();
        }
        let running = Folder::create(parent).unwrap();
        assert!(killed.exists(), "it may belong to a command that has just made it");
        remove_leftovers(parent, Duration::ZERO);
        assert!(!killed.exists());
        assert!(running.path().exists() && other.join("qemu.log").exists());
        let path = running.path().to_owned();
        drop(running);
        assert!(!path.exists());
    }
}
