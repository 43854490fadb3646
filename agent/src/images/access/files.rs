//! The files of intents and records, one for each key, replaced atomically. Blocks.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;
use sha2::Digest as _;

use super::record::Intent;
use super::record::PulledRecord;
use crate::filesystem;

const PREFIX: &str = "sha256-";
const PARTIAL: &str = ".tmp";
/// Longest file that is read, bytes; upstream's records have at most 100 secrets for each name.
const MAX_FILE: usize = 4 << 20;

/// Both folders, and how many files each has: to list them for their number takes long if there are thousands.
#[derive(Clone, Debug)]
pub(super) struct Files {
    intents: PathBuf,
    records: PathBuf,
    intent_count: Arc<AtomicUsize>,
    record_count: Arc<AtomicUsize>,
}

/// What a file holds, and how its key is called there.
pub(super) trait Stored: Serialize + Sized {
    /// # Errors
    /// What is wrong with the content.
    fn read(content: &[u8]) -> Result<(Self, bool), String>;
    fn key(&self) -> &str;
    fn folder(files: &Files) -> &Path;
    fn count(files: &Files) -> &AtomicUsize;
}

impl Stored for Intent {
    fn read(content: &[u8]) -> Result<(Self, bool), String> {
        Self::read(content)
    }

    fn key(&self) -> &str {
        &self.image
    }

    fn folder(files: &Files) -> &Path {
        &files.intents
    }

    fn count(files: &Files) -> &AtomicUsize {
        &files.intent_count
    }
}

impl Stored for PulledRecord {
    fn read(content: &[u8]) -> Result<(Self, bool), String> {
        Self::read(content)
    }

    fn key(&self) -> &str {
        &self.image_ref
    }

    fn folder(files: &Files) -> &Path {
        &files.records
    }

    fn count(files: &Files) -> &AtomicUsize {
        &files.record_count
    }
}

impl Files {
    /// Makes the folders below the agent's root directory, and rewrites files of an older version.
    ///
    /// # Errors
    /// They cannot be made, or listed.
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let folder = root.join("image_manager");
        let (intents, records) = (folder.join("pulling"), folder.join("pulled"));
        let files = Self { intents, records, intent_count: Arc::default(), record_count: Arc::default() };
        for folder in [&files.intents, &files.records] {
            make(folder)?;
        }
        files.rewrite_old::<Intent>()?;
        files.rewrite_old::<PulledRecord>()?;
        Ok(files)
    }

    fn rewrite_old<T: Stored>(&self) -> io::Result<()> {
        let paths = paths(T::folder(self))?;
        T::count(self).store(paths.len(), Relaxed);
        for path in paths {
            let file = path.display();
            match read::<T>(&path) {
                Ok((stored, true)) => {
                    // The old version is read as well.
                    if let Err(error) = self.write(&stored) {
                        tracing::warn!(%file, %error, "cannot rewrite a record of image pulls of an older version");
                    }
                }
                Ok((_, false)) => {}
                Err(error) => tracing::warn!(%file, %error, "cannot read a record of image pulls"),
            }
        }
        Ok(())
    }

    /// What is stored for a key; `None` if nothing is, or another key in a file of this name.
    ///
    /// # Errors
    /// The file cannot be read, or has unknown content.
    pub(super) fn get<T: Stored>(&self, key: &str) -> io::Result<Option<T>> {
        match read::<T>(&T::folder(self).join(name(key))) {
            Ok((stored, _)) => Ok(Some(stored).filter(|stored| stored.key() == key)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Everything that can be read.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub(super) fn all<T: Stored>(&self) -> io::Result<Vec<T>> {
        let readable = |path: PathBuf| read::<T>(&path).ok().map(|(stored, _)| stored);
        Ok(paths(T::folder(self))?.into_iter().filter_map(readable).collect())
    }

    /// Number of files.
    pub(super) fn count<T: Stored>(&self) -> usize {
        T::count(self).load(Relaxed)
    }

    /// # Errors
    /// As [`filesystem::replace`]; the folder is gone and cannot be made.
    pub(super) fn write<T: Stored>(&self, stored: &T) -> io::Result<()> {
        let folder = T::folder(self);
        if !folder.is_dir() {
            // Removed with all that is recorded: without it no image could be pulled.
            make(folder)?;
            T::count(self).store(0, Relaxed);
        }
        let path = folder.join(name(stored.key()));
        let partial = name(stored.key()) + PARTIAL;
        let mut line = serde_json::to_vec(stored)?;
        line.push(b'\n');
        let is_new = !path.exists();
        filesystem::replace(&path, &partial, &line, 0o600)?;
        if is_new {
            T::count(self).fetch_add(1, Relaxed);
        }
        Ok(())
    }

    /// # Errors
    /// The file is there and cannot be removed.
    pub(super) fn remove<T: Stored>(&self, key: &str) -> io::Result<()> {
        match fs::remove_file(T::folder(self).join(name(key))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => {
                // It is 0 if the file was not written by this agent.
                let _ = T::count(self).fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
                Ok(())
            }
        }
    }
}

fn make(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

fn name(key: &str) -> String {
    format!("{PREFIX}{}", super::lower_hex(&sha2::Sha256::digest(key)))
}

fn read<T: Stored>(path: &Path) -> io::Result<(T, bool)> {
    let content = filesystem::read_bounded(path, MAX_FILE)?;
    T::read(&content).map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem))
}

/// Files with a name of ours.
fn paths(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let is_ours = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with(PREFIX) && !name.ends_with(PARTIAL) && entry.file_type().is_ok_and(|kind| kind.is_file())
    };
    Ok(fs::read_dir(folder)?.flatten().filter(is_ours).map(|entry| entry.path()).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    #[test]
    fn files_are_private_and_named_after_their_key() {
        let dir = tempfile::tempdir().expect("a folder");
        let files = Files::open(dir.path()).expect("opened");
        files.write(&Intent::new("busybox")).expect("written");
        let folder = dir.path().join("image_manager/pulling");
        let found = paths(&folder).expect("listed");
        let name = found[0].file_name().expect("a name").to_string_lossy().into_owned();
        assert!(name.starts_with("sha256-9d75f0d7") && name.ends_with("ae91"), "{name}");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&found[0])), (0o700, 0o600));
        assert!(fs::read_to_string(&found[0]).expect("read").ends_with("\"image\":\"busybox\"}\n"));
        assert_eq!(files.get::<Intent>("busybox").expect("read"), Some(Intent::new("busybox")));
        fs::rename(&found[0], folder.join(super::name("other"))).expect("renamed");
        assert_eq!(files.get::<Intent>("other").expect("read"), None, "the content names another key");
        files.remove::<Intent>("other").expect("removed");
        files.remove::<Intent>("other").expect("nothing to remove");
        assert_eq!(files.count::<Intent>(), 0);
    }

    #[test]
    fn files_are_counted_without_listing_them() {
        let dir = tempfile::tempdir().expect("a folder");
        let files = Files::open(dir.path()).expect("opened");
        for image in ["a", "b", "a"] {
            files.write(&Intent::new(image)).expect("written");
        }
        files.write(&PulledRecord::new("id")).expect("written");
        assert_eq!((files.count::<Intent>(), files.count::<PulledRecord>()), (2, 1));
        for image in ["a", "a", "c"] {
            files.remove::<Intent>(image).expect("removed");
        }
        assert_eq!((files.count::<Intent>(), files.count::<PulledRecord>()), (1, 1));
        let again = Files::open(dir.path()).expect("opened again");
        assert_eq!((again.count::<Intent>(), again.count::<PulledRecord>()), (1, 1));
        fs::remove_dir_all(&files.records).expect("removed");
        fs::write(&files.records, "").expect("written");
        files.write(&PulledRecord::new("other")).expect_err("no folder");
        assert_eq!(files.count::<PulledRecord>(), 1, "as many as were written");
    }

    #[test]
    fn folders_that_were_removed_are_made_again() {
        let dir = tempfile::tempdir().expect("a folder");
        let files = Files::open(dir.path()).expect("opened");
        files.write(&Intent::new("a")).expect("written");
        fs::remove_dir_all(dir.path().join("image_manager")).expect("removed");
        files.write(&Intent::new("b")).expect("written");
        assert_eq!(fs::metadata(&files.intents).expect("there").permissions().mode() & 0o777, 0o700);
        assert_eq!(files.all::<Intent>().expect("listed"), [Intent::new("b")]);
        assert_eq!(files.count::<Intent>(), 1);
    }

    #[test]
    fn old_versions_are_rewritten_and_unreadable_files_stay() {
        let dir = tempfile::tempdir().expect("a folder");
        let files = Files::open(dir.path()).expect("opened");
        files.write(&Intent::new("a")).expect("written");
        let path = files.intents.join(name("a"));
        let old = fs::read_to_string(&path).expect("read").replace("v1beta1", "v1alpha1");
        fs::write(&path, &old).expect("written");
        let broken = files.records.join(name("id"));
        fs::write(&broken, "{").expect("written");
        fs::write(files.intents.join("other"), "{").expect("written");
        fs::write(files.intents.join(name("b") + PARTIAL), "{").expect("written");
        fs::create_dir(files.intents.join(name("c"))).expect("made");
        let files = Files::open(dir.path()).expect("opened again");
        assert!(fs::read_to_string(&path).expect("read").contains("v1beta1"));
        assert_eq!(files.all::<Intent>().expect("listed"), [Intent::new("a")]);
        assert!(broken.exists());
        let error = files.get::<PulledRecord>("id").expect_err("broken");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_lies_in_place_of_a_file_is_an_error_and_stays() {
        for found in InPlace::ALL {
            let dir = tempfile::tempdir().expect("a folder");
            let folder = dir.path().join("image_manager/pulled");
            make(&folder).expect("made");
            let path = folder.join(name("id"));
            found.put(&path).expect("made");
            let root = dir.path().to_owned();
            let read = in_time(move || Files::open(&root).map(|files| files.get::<PulledRecord>("id")));
            read.expect("no other process is waited for").expect("opened").expect_err("no record");
            assert!(found.is_at(&path), "{found:?}");
        }
    }

    #[test]
    fn an_old_version_that_cannot_be_rewritten_is_used_as_it_is() {
        let dir = tempfile::tempdir().expect("a folder");
        let files = Files::open(dir.path()).expect("opened");
        for image in ["a", "b"] {
            files.write(&Intent::new(image)).expect("written");
            let path = files.intents.join(name(image));
            let old = fs::read_to_string(&path).expect("read").replace("v1beta1", "v1alpha1");
            fs::write(&path, &old).expect("written");
        }
        fs::create_dir(files.intents.join(name("a") + PARTIAL)).expect("made");
        let files = Files::open(dir.path()).expect("opened again");
        let text = |image: &str| fs::read_to_string(files.intents.join(name(image))).expect("read");
        assert!(text("a").contains("v1alpha1") && text("b").contains("v1beta1"));
        assert_eq!(files.get::<Intent>("a").expect("read"), Some(Intent::new("a")));
    }
}
