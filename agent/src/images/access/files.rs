//! The files of intents and records, one for each key, replaced atomically. Blocks.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::path::PathBuf;

use serde::Serialize;
use sha2::Digest as _;

use super::record::Intent;
use super::record::PulledRecord;
use crate::filesystem;

const PREFIX: &str = "sha256-";
const PARTIAL: &str = ".tmp";
/// Longest file that is read, bytes; upstream's records have at most 100 secrets for each name.
const MAX_FILE: usize = 4 << 20;

/// Both folders.
#[derive(Clone, Debug)]
pub(super) struct Files {
    intents: PathBuf,
    records: PathBuf,
}

/// What a file holds, and how its key is called there.
pub(super) trait Stored: Serialize + Sized {
    /// # Errors
    /// What is wrong with the content.
    fn read(content: &[u8]) -> Result<(Self, bool), String>;
    fn key(&self) -> &str;
    fn folder(files: &Files) -> &Path;
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
}

impl Files {
    /// Makes the folders below the agent's root directory, and rewrites files of an older version.
    ///
    /// # Errors
    /// They cannot be made, or listed.
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let folder = root.join("image_manager");
        let files = Self { intents: folder.join("pulling"), records: folder.join("pulled") };
        for folder in [&files.intents, &files.records] {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        files.rewrite_old::<Intent>()?;
        files.rewrite_old::<PulledRecord>()?;
        Ok(files)
    }

    fn rewrite_old<T: Stored>(&self) -> io::Result<()> {
        for path in paths(T::folder(self))? {
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
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub(super) fn count<T: Stored>(&self) -> io::Result<usize> {
        Ok(paths(T::folder(self))?.len())
    }

    /// # Errors
    /// As [`filesystem::replace`].
    pub(super) fn write<T: Stored>(&self, stored: &T) -> io::Result<()> {
        let path = T::folder(self).join(name(stored.key()));
        let partial = name(stored.key()) + PARTIAL;
        let mut line = serde_json::to_vec(stored)?;
        line.push(b'\n');
        filesystem::replace(&path, &partial, &line, 0o600)
    }

    /// # Errors
    /// The file is there and cannot be removed.
    pub(super) fn remove<T: Stored>(&self, key: &str) -> io::Result<()> {
        match fs::remove_file(T::folder(self).join(name(key))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
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
        assert_eq!(files.count::<Intent>().expect("counted"), 0);
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
