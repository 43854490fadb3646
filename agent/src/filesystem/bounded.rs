//! Reading files whose length is not trusted.

use std::fs;
use std::io;
use std::io::Read as _;
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
