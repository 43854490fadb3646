//! Reading files whose length is not trusted.

use std::fs;
use std::io;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::PollFd;
use nix::poll::PollFlags;
use nix::poll::PollTimeout;
use nix::poll::poll;

/// How long the writers of a pipe are waited for.
const PIPE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a regular file of at most `limit` bytes. Nothing else is opened: see [`open_regular`].
///
/// # Errors
/// The file cannot be read, or is no regular one; [`io::ErrorKind::FileTooLarge`] if it is longer.
pub fn read_bounded(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    read_opened(&open_regular(path)?, limit)
}

/// As [`read_bounded`], of a file that an operator names: it may also be a pipe, such as `<(...)` of a shell, which is read
/// until all its writers have closed it. Blocks for at most 10 s longer than with a regular file.
///
/// # Errors
/// As [`read_bounded`]; [`io::ErrorKind::TimedOut`] if a writer does not close the pipe in time, or there is none.
pub fn read_named(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    let named = open_named(path)?;
    if named.metadata()?.file_type().is_fifo() {
        return read_pipe(reopen(&named)?, limit, PIPE_TIMEOUT);
    }
    read_opened(&reopen_regular(named.into())?, limit)
}

/// Reads an opened file of at most `limit` bytes.
///
/// # Errors
/// The file cannot be read; [`io::ErrorKind::FileTooLarge`] if it is longer.
pub fn read_opened(file: &fs::File, limit: usize) -> io::Result<Vec<u8>> {
    if file.metadata()?.len() > limit as u64 {
        return Err(too_long(limit));
    }
    // It may have become longer, and some files of the kernel have no length.
    let content = read_at_most(file, limit.saturating_add(1))?;
    if content.len() > limit { Err(too_long(limit)) } else { Ok(content) }
}

fn too_long(limit: usize) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {limit} bytes"))
}

/// Reads a pipe that was opened with `O_NONBLOCK`: a read would report the end where no writer has opened it yet, and
/// `poll` does not.
fn read_pipe(mut pipe: fs::File, limit: usize, timeout: Duration) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + timeout;
    let (mut content, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], left) {
            Ok(0) => {
                let problem = format!("no writer has opened and closed the pipe within {timeout:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
            }
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        match pipe.read(&mut piece) {
            Ok(0) => return Ok(content),
            Ok(length) => content.extend_from_slice(&piece[..length]),
            // Another process has read it.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        if content.len() > limit {
            return Err(too_long(limit));
        }
    }
}

/// Opens a file for reading in whose place a container may have put anything. Links are followed; a file that is not a
/// regular one is not opened at all: a pipe would be waited for, and some devices act as soon as they are opened.
///
/// # Errors
/// The file cannot be opened, or is no regular one.
pub fn open_regular(path: &Path) -> io::Result<fs::File> {
    reopen_regular(open_named(path)?.into())
}

/// Opens a file without access to its content (`O_PATH`).
fn open_named(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)
}

/// [`open_regular`] for a file that a descriptor names (`O_PATH`).
///
/// # Errors
/// As [`open_regular`].
pub fn reopen_regular(named: OwnedFd) -> io::Result<fs::File> {
    let named = fs::File::from(named);
    if !named.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    reopen(&named)
}

/// Opens what a descriptor names (`O_PATH`) for reading.
fn reopen(named: &fs::File) -> io::Result<fs::File> {
    // Not waited for either: a lease that another process holds on the file.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    fs::OpenOptions::new().read(true).custom_flags(flags).open(format!("/proc/self/fd/{}", named.as_raw_fd()))
}

/// True if `path` is a regular file, no link, with exactly this content. Reads at most one byte more than expected.
pub fn holds_exactly(path: &Path, content: &[u8]) -> bool {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let Ok(file) = fs::OpenOptions::new().read(true).custom_flags(flags).open(path) else { return false };
    let same_length = |found: fs::Metadata| found.is_file() && found.len() == content.len() as u64;
    file.metadata().is_ok_and(same_length)
        && read_at_most(&file, content.len().saturating_add(1)).is_ok_and(|held| held == content)
}

fn read_at_most(file: &fs::File, bytes: usize) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.take(bytes as u64).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::thread;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, pipe, link) = (dir.path().join("file"), dir.path().join("pipe"), dir.path().join("link"));
        fs::write(&file, "text").expect("a file");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        std::os::unix::fs::symlink("file", &link).expect("a link");
        for path in [&file, &link] {
            let opened = open_regular(path).expect("a regular file");
            assert_eq!(read_opened(&opened, 4).expect("short enough"), b"text");
        }
        for path in [pipe.as_path(), dir.path(), Path::new("/dev/zero")] {
            let error = open_regular(path).expect_err("no regular file");
            assert_eq!(error.to_string(), "not a regular file", "{}", path.display());
        }
        for found in InPlace::ALL {
            let path = dir.path().join(format!("{found:?}"));
            found.put(&path).expect("made");
            let read = in_time(move || read_bounded(&path, 3)).expect("no other process is waited for");
            read.expect_err("nothing of it is used");
        }
        assert_eq!(open_regular(&dir.path().join("none")).expect_err("missing").kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_pipe_that_an_operator_names_is_read_until_its_writer_closes_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        // More than a pipe holds.
        let text = "x".repeat(200_000);
        for (limit, is_read) in [(text.len(), true), (text.len() - 1, false)] {
            let (of_writer, written, named) = (path.clone(), text.clone(), path.clone());
            // Fails if the reader closes the pipe early.
            let writer = thread::spawn(move || fs::write(of_writer, written).is_ok());
            let read = in_time(move || read_named(&named, limit)).expect("it ends");
            let expected = if is_read { Ok(text.clone().into_bytes()) } else { Err(io::ErrorKind::FileTooLarge) };
            assert!(read.map_err(|error| error.kind()) == expected, "{limit}");
            writer.join().expect("no panic");
        }
    }

    #[test]
    fn a_pipe_of_a_shell_can_be_read() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        writer.write_all(b"text").expect("written");
        drop(writer);
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        assert_eq!(read_named(Path::new(&path), 4).expect("short enough"), b"text");
        assert_eq!(open_regular(Path::new(&path)).expect_err("no regular file").to_string(), "not a regular file");
    }

    #[test]
    fn writers_of_a_pipe_are_waited_for_in_vain_for_a_limited_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let open = || reopen(&open_named(&path).expect("named")).expect("opened");
        let read = |limit| read_pipe(open(), limit, Duration::from_millis(20)).expect_err("no end").kind();
        assert_eq!(read(9), io::ErrorKind::TimedOut, "no writer");
        // Opened for reading, too: else this would wait for a reader.
        let mut writer = fs::File::options().read(true).write(true).open(&path).expect("opened");
        writer.write_all(b"text").expect("written");
        assert_eq!(read(9), io::ErrorKind::TimedOut, "a writer that does not close it");
        writer.write_all(b"text").expect("written");
        assert_eq!(read(3), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn nothing_else_that_an_operator_names_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        for found in [InPlace::Garbage, InPlace::Huge, InPlace::Folder, InPlace::Loop] {
            let path = dir.path().join(format!("{found:?}"));
            found.put(&path).expect("made");
            read_named(&path, 3).expect_err("too long, or no file");
        }
        read_named(Path::new("/dev/zero"), 3).expect_err("a device");
    }
}
