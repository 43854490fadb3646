//! The checkpoint file of each pod. Blocking.

use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;

use super::Mapping;
use super::StartError;
use super::UserNamespaceError;
use crate::filesystem;
use crate::volumes::PodDirs;

/// Name of the file in a pod's directory.
const FILE: &str = "userns";
/// What is written before it is renamed. A kubelet that finds one ignores it.
const PARTIAL: &str = ".userns.tmp";
/// Longest file that is read, bytes; the agent writes some hundred.
const MAX_FILE: usize = 1 << 16;

/// UIDs of all pods that have a directory.
///
/// # Errors
/// The directory of all pods cannot be listed; a missing one has no pods.
pub(super) fn pods(dirs: &PodDirs) -> Result<Vec<String>, StartError> {
    let path = dirs.pods();
    let listed = || -> io::Result<Vec<String>> {
        let mut uids = Vec::new();
        for entry in fs::read_dir(&path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir()
                && let Ok(uid) = entry.file_name().into_string()
            {
                uids.push(uid);
            }
        }
        // Which of two pods with the same range is reported should not depend on the file system.
        uids.sort();
        Ok(uids)
    };
    match listed() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        result => result.map_err(|cause| StartError::List { path, cause }),
    }
}

/// The content of a pod's file; `None` if there is none, or an empty one.
///
/// # Errors
/// It cannot be read, or has other content.
pub(super) fn read(dirs: &PodDirs, uid: &str) -> Result<Option<Mapping>, UserNamespaceError> {
    let path = folder(dirs, uid)?.join(FILE);
    match filesystem::read_bounded(&path, MAX_FILE) {
        Ok(content) if content.is_empty() => Ok(None),
        Ok(content) => Mapping::from_checkpoint(&content).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(UserNamespaceError::File { verb: "read", path, source }),
    }
}

/// Writes a pod's file and waits until it is on the disk.
///
/// # Errors
/// It cannot be written; whether it is there then is not known.
pub(super) fn write(dirs: &PodDirs, uid: &str, mapping: Mapping) -> Result<(), UserNamespaceError> {
    let path = folder(dirs, uid)?.join(FILE);
    let written = filesystem::replace(&path, PARTIAL, &mapping.to_checkpoint(), 0o600);
    written.map_err(|source| UserNamespaceError::File { verb: "write", path, source })
}

/// Removes a pod's file and waits until that is on the disk. A missing file, or directory, is no error.
///
/// # Errors
/// It cannot be removed.
pub(super) fn remove(dirs: &PodDirs, uid: &str) -> Result<(), UserNamespaceError> {
    let folder = folder(dirs, uid)?;
    let path = folder.join(FILE);
    let removed = match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => sync(&folder),
    };
    removed.map_err(|source| UserNamespaceError::File { verb: "remove", path, source })
}

fn sync(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

fn folder(dirs: &PodDirs, uid: &str) -> Result<PathBuf, UserNamespaceError> {
    dirs.pod(uid).map_err(|_| UserNamespaceError::Uid { uid: uid.to_owned() })
}
