//! File systems of the machine that are on a block device, and the traffic with their devices. Reads two tables, and asks
//! each file system for its size; those of networks are left out, since they may not answer. Blocks.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

use crate::filesystem::read_mounts;
use crate::kernel::usage::DiskUsage;

/// File systems that are reported at most.
const MOST: usize = 64;

/// A mounted block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FileSystem {
    /// Such as `/dev/sda1`.
    pub(super) device: String,
    pub(super) usage: DiskUsage,
    /// Absent if the kernel does not count.
    pub(super) traffic: Option<Traffic>,
}

/// What a device did since the machine started. Times in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) reads_merged: u64,
    pub(super) sectors_read: u64,
    pub(super) read_time: u64,
    pub(super) writes_merged: u64,
    pub(super) sectors_written: u64,
    pub(super) write_time: u64,
    pub(super) in_progress: u64,
    pub(super) io_time: u64,
    pub(super) weighted_time: u64,
}

/// Each device once, by the mount with the shortest path.
pub(super) fn file_systems(proc: &Path) -> Vec<FileSystem> {
    let table = read_mounts(&proc.join("self/mountinfo")).unwrap_or_default();
    let traffic = traffic(&fs::read_to_string(proc.join("diskstats")).unwrap_or_default());
    let mut mounts = devices(&table);
    mounts.truncate(MOST);
    let one = |(number, device, point): (String, String, String)| {
        let usage = DiskUsage::of(Path::new(&point)).ok().filter(|usage| usage.capacity > 0)?;
        Some(FileSystem { device, usage, traffic: traffic.get(&number).copied() })
    };
    mounts.into_iter().filter_map(one).collect()
}

/// Number, file and mount point of each block device in a `mountinfo` table. Mounts of single files and of parts of a file
/// system, as containers have them, are on a device that is mounted as a whole elsewhere, or report the same size.
fn devices(table: &str) -> Vec<(String, String, String)> {
    let mount = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ');
        let (number, point) = (left.nth(2)?, left.nth(1)?);
        let source = right.split(' ').nth(1)?;
        // Octal escapes stand for blanks; such a mount point is left to another mount of the device.
        let is_device = source.starts_with("/dev/") && !point.contains('\\');
        is_device.then(|| (number.to_owned(), source.to_owned(), point.to_owned()))
    };
    let mut mounts: Vec<_> = table.lines().filter_map(mount).collect();
    mounts.sort_by_key(|(_, _, point)| point.len());
    let mut seen = HashSet::new();
    mounts.retain(|(number, _, _)| seen.insert(number.clone()));
    mounts
}

/// The table `diskstats` by `major:minor` (<https://docs.kernel.org/admin-guide/iostats.html>).
fn traffic(table: &str) -> BTreeMap<String, Traffic> {
    let disk = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let number = format!("{}:{}", words.next()?, words.next()?);
        let values: Vec<u64> = words.skip(1).filter_map(|word| word.parse().ok()).collect();
        let at = |index: usize| values.get(index).copied();
        let traffic = Traffic {
            reads_merged: at(1)?,
            sectors_read: at(2)?,
            read_time: at(3)?,
            writes_merged: at(5)?,
            sectors_written: at(6)?,
            write_time: at(7)?,
            in_progress: at(8)?,
            io_time: at(9)?,
            weighted_time: at(10)?,
        };
        Some((number, traffic))
    };
    table.lines().filter_map(disk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_device_once() {
        let table = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n\
                     23 22 0:21 / /proc rw - proc proc rw\n\
                     24 22 8:1 /var/lib/x /mnt rw - ext4 /dev/sda1 rw\n\
                     25 22 8:16 / /data\\040disk rw - xfs /dev/sdb rw\n\
                     26 22 8:16 / /var/lib/containerd rw - xfs /dev/sdb rw\n\
                     27 22 0:50 / /net rw - nfs4 server:/export rw\n\
                     broken\n";
        let found = devices(table);
        let found: Vec<_> = found.iter().map(|(n, d, p)| (n.as_str(), d.as_str(), p.as_str())).collect();
        assert_eq!(found, [("8:1", "/dev/sda1", "/"), ("8:16", "/dev/sdb", "/var/lib/containerd")]);
    }

    #[test]
    fn sizes_and_traffic() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("self")).unwrap();
        // A privileged container chose the name of the second mount point.
        let table = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 8:1 /x /pods/\xff rw - ext4 /dev/sda1 rw\n";
        fs::write(dir.path().join("self/mountinfo"), table).unwrap();
        fs::write(dir.path().join("diskstats"), "   8       1 sda1 1 2 3 4 5 6 7 8 9 10 11 0 0 0 0\n").unwrap();
        let found = file_systems(dir.path());
        let [disk] = &found[..] else { panic!("{found:?}") };
        assert_eq!((disk.device.as_str(), disk.usage.capacity > 0), ("/dev/sda1", true));
        let traffic = disk.traffic.expect("it is counted");
        assert_eq!((traffic.reads_merged, traffic.sectors_read, traffic.read_time), (2, 3, 4));
        assert_eq!((traffic.in_progress, traffic.io_time, traffic.weighted_time), (9, 10, 11));
        assert!(file_systems(&dir.path().join("none")).is_empty());
    }
}
