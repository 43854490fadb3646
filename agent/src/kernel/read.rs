//! Bounded reads of files whose size a container controls.

use std::fs::File;
use std::io;
use std::io::Read as _;
use std::path::Path;

/// Limit for files of `/proc/<pid>`. `status` lists up to 65,536 supplementary groups (700 KiB), `net/dev` one line per
/// interface, of which a container with `CAP_NET_ADMIN` may create many.
pub const PROC_FILE_LIMIT: u64 = 1 << 20;
/// Most files fit: one call reads them. A buffer that is empty at first takes a call for each time that it grows.
const USUAL: usize = 4096;

/// The text of a file, bytes that are no UTF-8 replaced.
///
/// # Errors
/// The file is not readable, or larger than `limit` bytes.
pub fn text(path: &Path, limit: u64) -> io::Result<String> {
    let mut bytes = Vec::with_capacity(USUAL);
    File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {limit} bytes")));
    }
    // Some callers keep it.
    bytes.shrink_to_fit();
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_files_are_errors() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("file");
        std::fs::write(&file, "12345").expect("a file");
        assert_eq!(text(&file, 5).expect("fits"), "12345");
        assert_eq!(text(&file, 4).expect_err("too large").kind(), io::ErrorKind::FileTooLarge);
        let long = "x".repeat(3 * USUAL);
        std::fs::write(&file, &long).expect("a file");
        assert!(text(&file, PROC_FILE_LIMIT).expect("fits") == long, "more than is read at once");
        std::fs::write(&file, [b'a', 0xff]).expect("a file");
        assert_eq!(text(&file, 5).expect("fits"), "a\u{fffd}");
        // Never ends.
        assert_eq!(text(Path::new("/dev/zero"), 4096).expect_err("endless").kind(), io::ErrorKind::FileTooLarge);
    }
}
