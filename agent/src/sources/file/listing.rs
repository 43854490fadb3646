//! One scan of the folder (or file): stats all files, reads and decodes those that changed. Blocking; decides nothing.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::SystemTime;

use nix::errno::Errno;

use super::super::adoption::Adoptions;
use super::super::decode;
use super::super::decode::MAX_MANIFEST_BYTES;
use super::super::decode::Manifest;
use super::super::static_pod::Origin;
use crate::model::ConfigSource;

/// Identifies the version of a file that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(meta: &fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Nanoseconds since the Unix epoch. Includes renames: an older file may have replaced the one of which a pod was made.
    fn last_change(&self) -> i64 {
        let (seconds, nanos) = self.changed.max(self.modified);
        seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
    }

    /// File times advance in ticks of the kernel: a file changed this recently may change again without a trace.
    fn is_settled(&self, now: SystemTime) -> bool {
        const TICKS: Duration = Duration::from_millis(40);
        let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanos) = self.changed.max(self.modified);
        let stamp = Duration::new(u64::try_from(seconds).unwrap_or(0), u32::try_from(nanos).unwrap_or(0));
        since_epoch.checked_sub(stamp).is_some_and(|age| age > TICKS)
    }
}

/// Errors that a file may have whatever it holds.
const UNREAD: [Errno; 7] =
    [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::EIO, Errno::ESTALE, Errno::EACCES, Errno::EPERM];

/// What a scan found in one file.
#[derive(Debug)]
pub(super) enum Reading {
    /// The stamp is the one known.
    Unchanged,
    /// It is open for writing.
    Held,
    /// Pods. No stamp if the file is too fresh to be trusted not to change unnoticed.
    Good(Option<Stamp>, Manifest),
    /// Nothing usable, and why. No stamp if there is none, as above, or if the file could not be read: the next scan may
    /// succeed.
    Bad(Option<Stamp>, String),
    /// What it holds is not known, and why: the agent lacks something, or the disk fails.
    Unreadable(String),
}

/// What a scan found.
#[derive(Debug)]
pub(super) enum Listing {
    /// A folder with these files.
    Folder(BTreeMap<OsString, Reading>),
    /// The path is a single file.
    Single(Reading),
    /// There is nothing at the path.
    Missing,
    /// Something is there, but it cannot be used.
    Unusable(String),
}

/// What to scan, and how to decode it.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// Folder or file.
    pub path: PathBuf,
    /// This node's name.
    pub node_name: String,
    /// Feature gate PreventStaticPodAPIReferences.
    pub prevent_api_references: bool,
    /// Pods that run already.
    pub adoptions: Adoptions,
    /// No set of pods was delivered yet. What is read later has changed since the agent was started, whatever its times say:
    /// the clock may have been set back.
    pub is_first: bool,
}

impl View {
    /// Scans the path. Files whose stamp is in `known`, and regular files in `held`, are not read.
    pub(super) fn list(&self, known: &HashMap<OsString, Stamp>, held: &HashSet<OsString>) -> Listing {
        let meta = match fs::metadata(&self.path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Listing::Missing,
            Err(error) => return Listing::Unusable(format!("cannot stat: {error}")),
        };
        if meta.is_file() {
            let name = OsStr::new("");
            return match self.check_file(&self.path, known.get(name), held.contains(name)) {
                Some(reading) => Listing::Single(reading),
                None => Listing::Missing,
            };
        }
        if !meta.is_dir() {
            return Listing::Unusable("is neither a folder nor a regular file".to_owned());
        }
        match self.folder(known, held) {
            Ok(files) => Listing::Folder(files),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Listing::Missing,
            Err(error) => Listing::Unusable(format!("cannot read the folder: {error}")),
        }
    }

    fn folder(
        &self,
        known: &HashMap<OsString, Stamp>,
        held: &HashSet<OsString>,
    ) -> io::Result<BTreeMap<OsString, Reading>> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            if name.as_bytes().starts_with(b".") {
                continue;
            }
            if let Some(reading) = self.check_file(&self.path.join(&name), known.get(&name), held.contains(&name)) {
                files.insert(name, reading);
            }
        }
        Ok(files)
    }

    /// `None` for what is no manifest: folders, sockets, and files that went away meanwhile.
    fn check_file(&self, path: &Path, known: Option<&Stamp>, held: bool) -> Option<Reading> {
        let meta = match fs::metadata(path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let dangling = fs::symlink_metadata(path).is_ok();
                return dangling.then(|| Reading::Bad(None, "is a symbolic link to nothing".to_owned()));
            }
            Err(error) => return Some(unread("stat", &error)),
        };
        if !meta.is_file() {
            return None;
        }
        if known == Some(&Stamp::of(&meta)) {
            return Some(Reading::Unchanged);
        }
        // A link appears whole.
        let written_in_place = || fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.nlink() == 1);
        if held && written_in_place() {
            return Some(Reading::Held);
        }
        match self.read(path) {
            Ok(reading) => Some(reading),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(unread("read", &error)),
        }
    }

    fn read(&self, path: &Path) -> io::Result<Reading> {
        let now = SystemTime::now();
        // Not blocking: the file may have become a pipe since the stat.
        let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let before = file.metadata()?;
        if !before.is_file() {
            return Err(io::Error::other("is no regular file"));
        }
        let stamp = Stamp::of(&before);
        let kept = stamp.is_settled(now).then_some(stamp);
        if before.size() >= MAX_MANIFEST_BYTES {
            let message = format!("is too big: {} bytes, must be under {MAX_MANIFEST_BYTES}", before.size());
            return Ok(Reading::Bad(kept, message));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(before.size()).unwrap_or(0) + 1);
        (&file).take(MAX_MANIFEST_BYTES).read_to_end(&mut bytes)?;
        if Stamp::of(&file.metadata()?) != stamp {
            return Ok(Reading::Held);
        }
        let location = path.to_string_lossy();
        let origin = Origin {
            source: ConfigSource::File,
            location: &location,
            node_name: &self.node_name,
            prevent_api_references: self.prevent_api_references,
            adoptions: Some((&self.adoptions, self.is_first.then(|| stamp.last_change()))),
        };
        Ok(match decode::decode(&bytes, &origin) {
            Ok(manifest) => Reading::Good(kept, manifest),
            Err(error) => Reading::Bad(kept, error.to_string()),
        })
    }
}

/// A file with which `attempt` failed. A shortage, a disk that fails, and a server or a security module that refuses, say
/// nothing of what it defines.
fn unread(attempt: &str, error: &io::Error) -> Reading {
    let message = format!("cannot {attempt}: {error}");
    match error.raw_os_error().is_some_and(|code| UNREAD.contains(&Errno::from_raw(code))) {
        true => Reading::Unreadable(message),
        false => Reading::Bad(None, message),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Else the pods of a file that was read once while its disk or the machine had a problem would end, and stay away until
    /// the file is changed.
    #[test]
    fn a_file_that_could_not_be_read_is_read_by_the_next_scan() {
        let dir = tempfile::tempdir().expect("a folder");
        // No memory is mapped at its beginning: reading it is an I/O error.
        symlink("/proc/self/mem", dir.path().join("a.yaml")).expect("a link");
        let view = View {
            path: dir.path().to_owned(),
            node_name: "n".to_owned(),
            prevent_api_references: true,
            adoptions: Adoptions::default(),
            is_first: true,
        };
        let Listing::Folder(files) = view.list(&HashMap::new(), &HashSet::new()) else { panic!("no folder") };
        let Some(Reading::Unreadable(message)) = files.get(OsStr::new("a.yaml")) else { panic!("{files:?}") };
        assert!(message.starts_with("cannot read: "), "{message}");
    }

    #[test]
    fn a_shortage_says_nothing_of_a_file() {
        let of = |errno: Errno| unread("read", &io::Error::from(errno));
        for errno in UNREAD {
            assert!(matches!(of(errno), Reading::Unreadable(_)), "{errno}");
        }
        assert!(matches!(of(Errno::ELOOP), Reading::Bad(None, _)));
    }
}
