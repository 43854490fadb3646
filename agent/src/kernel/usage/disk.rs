//! Usage of file systems.

use std::io;
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
    /// Usage of the file system that contains `path`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_file_system() {
        let usage = DiskUsage::of(Path::new("/")).unwrap();
        assert!(usage.capacity > 0 && usage.used <= usage.capacity && usage.available <= usage.capacity);
        assert!(DiskUsage::of(Path::new("/no/such/folder")).is_err());
    }
}
