//! What may lie in place of a file of the agent, for tests of the code that reads it.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

/// No text in any encoding that the agent writes, and no JSON or PEM.
const GARBAGE: &[u8] = b"{\"\xff\0";
/// Sparse: it takes no room, and cannot be read to its end in memory.
const LENGTH: u64 = 1 << 40;
/// Far longer than a file is read.
const DEADLINE: Duration = Duration::from_secs(30);

/// Something else than what the agent has written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InPlace {
    /// A file with other content.
    Garbage,
    /// A file that is too long.
    Huge,
    /// A directory.
    Folder,
    /// A pipe that no process writes.
    Pipe,
    /// A link to itself.
    Loop,
}

impl InPlace {
    /// One of each kind.
    pub(crate) const ALL: [Self; 5] = [Self::Garbage, Self::Huge, Self::Folder, Self::Pipe, Self::Loop];

    /// Makes it at a path where nothing is.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn put(self, path: &Path) -> io::Result<()> {
        match self {
            Self::Garbage => fs::write(path, GARBAGE),
            Self::Huge => fs::File::create_new(path)?.set_len(LENGTH),
            Self::Folder => fs::create_dir(path),
            Self::Pipe => Ok(mkfifo(path, Mode::S_IRWXU)?),
            Self::Loop => symlink(path, path),
        }
    }

    /// True if it is still there as it was made.
    pub(crate) fn is_at(self, path: &Path) -> bool {
        let Ok(found) = fs::symlink_metadata(path) else { return false };
        match self {
            Self::Garbage => found.is_file() && fs::read(path).is_ok_and(|held| held == GARBAGE),
            Self::Huge => found.is_file() && found.len() == LENGTH,
            Self::Folder => found.is_dir(),
            Self::Pipe => found.file_type().is_fifo(),
            Self::Loop => found.is_symlink(),
        }
    }
}

/// What `work` returns, on a thread of its own; `None` if it has not ended within 30 s, since it waits for another process.
pub(crate) fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, done) = mpsc::channel();
    thread::spawn(move || sender.send(work()));
    done.recv_timeout(DEADLINE).ok()
}
