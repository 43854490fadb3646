//! Watches files for changes, also where they are symbolic links that are replaced.
//!
//! Watches the directories that a path leads through, because certificates are replaced by renaming. While inotify is
//! not available, one of them is missing, or the files could not be used, reports a possible change every minute.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt as _;
use inotify::EventStream;
use inotify::Inotify;
use inotify::WatchMask;

/// Period while not everything is watched.
const POLL_PERIOD: Duration = Duration::from_secs(60);
/// Changes come in bursts: this is waited for more of them.
const SETTLE_TIME: Duration = Duration::from_millis(50);

/// A watch on some files.
pub(super) struct FileWatch {
    paths: Vec<PathBuf>,
    events: Option<EventStream<Vec<u8>>>,
    /// A change may come without an event: a directory is missing, or the files could not be read for lack of descriptors.
    is_partial: bool,
}

impl FileWatch {
    /// Watches from now on.
    pub(super) async fn new(paths: Vec<PathBuf>) -> Self {
        let mut watch = Self { paths, events: None, is_partial: true };
        watch.arm().await;
        watch
    }

    /// Waits for a possible change since the last call.
    pub(super) async fn changed(&mut self) {
        let (events, is_partial) = (&mut self.events, self.is_partial);
        let event = async {
            match events {
                Some(events) => events.next().await.is_some_and(|event| event.is_ok()),
                None => std::future::pending().await,
            }
        };
        let changed = tokio::select! {
            changed = event => changed,
            () = tokio::time::sleep(POLL_PERIOD), if is_partial => false,
        };
        if changed {
            tokio::time::sleep(SETTLE_TIME).await;
        }
        // Links may have other targets now. The caller reads the files after this, so no change is missed.
        self.arm().await;
    }

    /// The files could not be used. [`Self::changed`] reports a possible change within a minute.
    pub(super) fn not_used(&mut self) {
        self.is_partial = true;
    }

    async fn arm(&mut self) {
        let paths = self.paths.clone();
        let arm = move || {
            let (folders, missing): (BTreeSet<PathBuf>, BTreeSet<PathBuf>) =
                paths.iter().flat_map(|path| folders(path)).partition(|folder| folder.is_dir());
            let watched = (!folders.is_empty()).then(|| watch(&folders));
            (watched, !missing.is_empty())
        };
        let (watched, lacks_some) = tokio::task::spawn_blocking(arm).await.unwrap_or((None, true));
        let was_polling = self.events.is_none();
        self.events = match watched.transpose() {
            Ok(events) => events,
            Err(error) => {
                tracing::debug!(%error, "inotify");
                None
            }
        };
        self.is_partial = self.events.is_none() || lacks_some;
        if self.events.is_none() && !was_polling {
            tracing::warn!(paths = ?self.paths, "cannot watch the files, reading them every minute");
        }
    }
}

/// Blocks: the way to a folder is looked up.
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

/// The directories whose entries decide which file a path names: the one of the file, and that of each symbolic link on
/// the way to it. Some may be missing.
fn folders(path: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut done = PathBuf::from(".");
    let mut ahead: Vec<OsString> = steps(path);
    let mut links = 0;
    while let Some(step) = ahead.pop() {
        let next = done.join(&step);
        // The kernel follows 40 links, too (path_resolution(7)).
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
    folders
}

/// The components of a path, the last one first.
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
        let mut watch = FileWatch::new(vec![path.clone()]).await;
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
    async fn replaced_symbolic_links() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        for version in ["v1", "v2"] {
            fs::create_dir(at(version)).expect("made");
            fs::write(at(version).join("tls.crt"), version).expect("written");
        }
        symlink("v1", at("..data")).expect("linked");
        fs::create_dir(at("pki")).expect("made");
        symlink("../..data/tls.crt", at("pki").join("tls.crt")).expect("linked");
        let mut watch = FileWatch::new(vec![at("pki").join("tls.crt")]).await;
        symlink("v2", at("..new")).expect("linked");
        fs::rename(at("..new"), at("..data")).expect("replaced");
        notices(&mut watch, "the link was replaced").await;
        assert_eq!(fs::read_to_string(at("pki").join("tls.crt")).expect("readable"), "v2");
        fs::write(at("v2").join("tls.crt"), "v3").expect("written");
        notices(&mut watch, "the new target changes").await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_directory_is_polled_while_another_one_is_watched() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("certificates")).expect("made");
        let mut watch = FileWatch::new(vec![at("certificates/tls.crt"), at("keys/tls.key")]).await;
        let checked = tokio::time::timeout(2 * POLL_PERIOD, watch.changed()).await;
        checked.expect("the folder may be there now");
        fs::create_dir(at("keys")).expect("made");
        watch.changed().await;
        let nothing = tokio::time::timeout(10 * POLL_PERIOD, watch.changed()).await;
        assert!(nothing.is_err(), "both are watched");
        fs::write(at("keys/tls.key"), "one").expect("written");
        notices(&mut watch, "a write").await;
    }
}
