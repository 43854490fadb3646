//! Reading files whose length is not trusted.

use std::fs;
use std::io;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Reads a file of at most `limit` bytes.
///
/// # Errors
/// The file cannot be read; [`io::ErrorKind::FileTooLarge`] if it is longer.
pub fn read_bounded(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    read_opened(&fs::File::open(path)?, limit)
}

/// Reads an opened file of at most `limit` bytes.
///
/// # Errors
/// As [`read_bounded`].
pub fn read_opened(file: &fs::File, limit: usize) -> io::Result<Vec<u8>> {
    let content = read_at_most(file, limit.saturating_add(1))?;
    match content.len() <= limit {
        true => Ok(content),
        false => Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {limit} bytes"))),
    }
}

/// Opens a file for reading in whose place a container may have put anything. Links are followed; a file that is not a
/// regular one is not opened at all: a pipe would be waited for, and some devices act as soon as they are opened.
///
/// # Errors
/// The file cannot be opened, or is no regular one.
pub fn open_regular(path: &Path) -> io::Result<fs::File> {
    reopen_regular(fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?.into())
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
    use super::*;

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
        assert_eq!(open_regular(&dir.path().join("none")).expect_err("missing").kind(), io::ErrorKind::NotFound);
    }
}
