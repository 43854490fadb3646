//! Usage of file systems and folders.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::sys::statvfs::statvfs;

/// A file system, or a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Size in bytes.
    pub capacity: u64,
    /// Bytes available to unprivileged processes.
    pub available: u64,
    /// Bytes in use.
    pub used: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
    /// Inodes in use.
    pub inodes_used: u64,
}

impl DiskUsage {
    /// Of the file system that contains `path`.
    ///
    /// # Errors
    /// The path does not exist or its file system does not answer.
    pub fn of(path: &Path) -> io::Result<Self> {
        let stat = statvfs(path)?;
        let size = stat.fragment_size();
        let (blocks, free, inodes, inodes_free) = (stat.blocks(), stat.blocks_free(), stat.files(), stat.files_free());
        Ok(Self {
            capacity: blocks.saturating_mul(size),
            available: stat.blocks_available().saturating_mul(size),
            used: blocks.saturating_sub(free).saturating_mul(size),
            inodes,
            inodes_free,
            inodes_used: inodes.saturating_sub(inodes_free),
        })
    }
}

/// The size of a folder with its content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeUsage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
    /// Everything was counted.
    pub complete: bool,
}

/// Bytes on disk and inodes of a folder and its content on the same file system; symbolic links are not followed. What is
/// removed meanwhile is not counted. Blocks for as long as `go_on` returns true, which is asked once for each folder.
pub fn tree_usage_while(folder: &Path, mut go_on: impl FnMut() -> bool) -> TreeUsage {
    let Ok(top) = fs::symlink_metadata(folder) else { return TreeUsage { complete: true, ..TreeUsage::default() } };
    let mut usage = TreeUsage { bytes: top.blocks() * 512, inodes: 1, complete: true };
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        if !go_on() {
            usage.complete = false;
            break;
        }
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.dev() != top.dev() {
                continue;
            }
            usage.bytes += meta.blocks() * 512;
            usage.inodes += 1;
            if meta.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_file_system() {
        let usage = DiskUsage::of(Path::new("/")).unwrap();
        assert!(usage.capacity > 0 && usage.used <= usage.capacity && usage.available <= usage.capacity);
        assert!(DiskUsage::of(Path::new("/no/such/folder")).is_err());
    }

    #[test]
    fn a_tree() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("inner")).unwrap();
        let all = |folder: &Path| tree_usage_while(folder, || true);
        let before = all(dir.path()).bytes;
        fs::write(dir.path().join("inner/file"), vec![7; 100_000]).unwrap();
        let TreeUsage { bytes, inodes, .. } = all(dir.path());
        assert_eq!(inodes, 3);
        assert!(bytes - before >= 98_304, "{before} {bytes}");
        assert_eq!(all(&dir.path().join("none")).inodes, 0);
        let mut folders = 0;
        let part = tree_usage_while(dir.path(), || {
            folders += 1;
            folders < 2
        });
        assert!(!part.complete && part.inodes == 2, "the folder and the one in it: {part:?}");
    }
}
