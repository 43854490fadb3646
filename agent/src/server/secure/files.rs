//! Notices when files change, also when they are links that are turned to other files.
//!
//! Watches the folders a path leads through, because certificates are replaced by renaming. While that is not possible,
//! says "look" every minute instead.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use inotify::{EventStream, Inotify, WatchMask};

/// How often to look while nothing tells.
const BLIND: Duration = Duration::from_secs(60);
/// Changes come in bursts; one look after this long does for all of them.
const QUIET: Duration = Duration::from_millis(50);

/// Some files that are looked after.
pub(super) struct FileWatch {
    paths: Vec<PathBuf>,
    events: Option<EventStream<Vec<u8>>>,
}

impl FileWatch {
    /// Watches from now on.
    pub(super) fn new(paths: Vec<PathBuf>) -> Self {
        let mut watch = Self { paths, events: None };
        watch.arm();
        watch
    }

    /// Something may have changed since the last call; look now.
    pub(super) async fn changed(&mut self) {
        let heard = match &mut self.events {
            Some(events) => tokio::select! {
                event = events.next() => event.is_some_and(|event| event.is_ok()),
            },
            None => {
                tokio::time::sleep(BLIND).await;
                false
            }
        };
        if heard {
            tokio::time::sleep(QUIET).await;
        }
        // Links may lead elsewhere now, and folders be others. Whoever looks does so after this.
        self.arm();
    }

    fn arm(&mut self) {
        let folders: BTreeSet<PathBuf> = self.paths.iter().flat_map(|path| folders(path)).collect();
        let was_blind = self.events.is_none();
        self.events = match watch(&folders) {
            Ok(events) if !folders.is_empty() => Some(events),
            Ok(_) => None,
            Err(error) => {
                tracing::debug!(%error, "inotify");
                None
            }
        };
        if self.events.is_none() && !was_blind {
            tracing::warn!(paths = ?self.paths, "cannot watch for changes, looking every minute");
        }
    }
}

fn watch(folders: &BTreeSet<PathBuf>) -> io::Result<EventStream<Vec<u8>>> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::CLOSE_WRITE
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF;
    for folder in folders {
        inotify.watches().add(folder, mask)?;
    }
    inotify.into_event_stream(vec![0; 4096])
}

/// The folders in which something happens when the path comes to mean another file: the one the file is in, and that of
/// each link on the way to it.
fn folders(path: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut done = PathBuf::from(".");
    let mut ahead: Vec<OsString> = steps(path);
    let mut links = 0;
    while let Some(step) = ahead.pop() {
        let next = done.join(&step);
        // As many as the kernel follows.
        match std::fs::read_link(&next) {
            Ok(target) if links < 40 => {
                links += 1;
                folders.push(done.clone());
                ahead.extend(steps(&target));
            }
            _ if ahead.is_empty() => folders.push(done.clone()),
            _ => done = next,
        }
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// The steps of a path, the last one first. A root on the way starts anew, as joining paths does.
fn steps(path: &Path) -> Vec<OsString> {
    path.components().rev().map(|component| component.as_os_str().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    async fn notices(watch: &mut FileWatch, what: &str) {
        tokio::time::timeout(Duration::from_secs(10), watch.changed()).await.unwrap_or_else(|_| panic!("{what}"));
    }

    #[tokio::test]
    async fn writes_renames_and_removals() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ca.crt");
        fs::write(&path, "one").expect("written");
        let mut watch = FileWatch::new(vec![path.clone()]);
        fs::write(&path, "two").expect("written");
        notices(&mut watch, "a write").await;
        let other = folder.path().join("new");
        fs::write(&other, "three").expect("written");
        notices(&mut watch, "a file beside it").await;
        fs::rename(&other, &path).expect("renamed");
        notices(&mut watch, "a rename").await;
        fs::remove_file(&path).expect("removed");
        notices(&mut watch, "a removal").await;
        fs::write(&path, "four").expect("written");
        notices(&mut watch, "a new file").await;
    }

    #[tokio::test]
    async fn links_that_are_turned() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        for version in ["v1", "v2"] {
            fs::create_dir(at(version)).expect("made");
            fs::write(at(version).join("tls.crt"), version).expect("written");
        }
        symlink("v1", at("..data")).expect("linked");
        fs::create_dir(at("pki")).expect("made");
        symlink("../..data/tls.crt", at("pki").join("tls.crt")).expect("linked");
        let mut watch = FileWatch::new(vec![at("pki").join("tls.crt")]);
        symlink("v2", at("..new")).expect("linked");
        fs::rename(at("..new"), at("..data")).expect("turned");
        notices(&mut watch, "the folder was turned").await;
        assert_eq!(fs::read_to_string(at("pki").join("tls.crt")).expect("readable"), "v2");
        fs::write(at("v2").join("tls.crt"), "v3").expect("written");
        notices(&mut watch, "the new target changes").await;
    }
}
