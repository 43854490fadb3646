//! File systems of the machine that are on a block device, and the traffic with their devices, from two tables of the kernel.
//! Their sizes are measured elsewhere: a device may not answer, as that of a volume whose server is gone.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::fs;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::path::PathBuf;

use nix::poll::PollFd;
use nix::poll::PollFlags;
use nix::poll::PollTimeout;
use nix::poll::poll;

use super::disks::Usages;
use crate::filesystem::read_mounts;
use crate::kernel::usage::DiskUsage;

/// File systems that are reported at most.
const MOST: usize = 64;

/// A mounted block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    /// Such as `/dev/sda1`.
    device: String,
    /// Where it is mounted.
    pub(super) point: PathBuf,
    traffic: Option<Traffic>,
}

/// A mounted block device whose size is known.
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
    pub(super) reads: u64,
    pub(super) reads_merged: u64,
    pub(super) sectors_read: u64,
    pub(super) read_time: u64,
    pub(super) writes: u64,
    pub(super) writes_merged: u64,
    pub(super) sectors_written: u64,
    pub(super) write_time: u64,
    pub(super) in_progress: u64,
    pub(super) io_time: u64,
    pub(super) weighted_time: u64,
}

/// The machine's mount table. It has several lines for each pod and is read again only after a change.
#[derive(Debug, Default)]
pub(super) struct MountTable {
    /// Opened before the table was read: the kernel marks it when the table changes.
    file: Option<File>,
    /// Number, file and mount point of each block device.
    devices: Vec<(String, String, String)>,
}

impl MountTable {
    /// Each device once, by the mount with the shortest path. Blocks for the time of two files of the kernel.
    pub(super) fn mounted(&mut self, proc: &Path) -> Vec<Mounted> {
        if self.file.as_ref().is_none_or(has_changed) {
            let path = proc.join("self/mountinfo");
            let file = File::open(&path);
            let table = read_mounts(&path);
            // A table that was not read is read the next time, changed or not.
            self.file = file.ok().filter(|_| table.is_ok());
            self.devices = devices(&table.unwrap_or_default());
            self.devices.truncate(MOST);
        }
        let traffic = traffic(&fs::read_to_string(proc.join("diskstats")).unwrap_or_default());
        let one = |(number, device, point): &(String, String, String)| Mounted {
            device: device.clone(),
            point: point.into(),
            traffic: traffic.get(number).or_else(|| traffic.get(device)).copied(),
        };
        self.devices.iter().map(one).collect()
    }
}

/// Whether mounts were added or removed since the table was opened (proc(5), `/proc/pid/mounts`).
fn has_changed(table: &File) -> bool {
    let mut polled = [PollFd::new(table.as_fd(), PollFlags::POLLPRI)];
    let is_marked = |polled: &PollFd<'_>| polled.any().unwrap_or(true);
    poll(&mut polled, PollTimeout::ZERO).is_err() || polled.iter().any(is_marked)
}

/// Those whose size is known.
pub(super) fn file_systems(mounted: Vec<Mounted>, sizes: &Usages) -> Vec<FileSystem> {
    let one = |Mounted { device, point, traffic }: Mounted| {
        let usage = sizes.get(&point).copied().filter(|usage| usage.capacity > 0)?;
        Some(FileSystem { device, usage, traffic })
    };
    mounted.into_iter().filter_map(one).collect()
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

/// The table `diskstats` by `major:minor` and by file (<https://docs.kernel.org/admin-guide/iostats.html>). The table of
/// mounts has another number than that of the device for btrfs.
fn traffic(table: &str) -> BTreeMap<String, Traffic> {
    let disk = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let number = format!("{}:{}", words.next()?, words.next()?);
        let device = format!("/dev/{}", words.next()?);
        let values: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
        let at = |index: usize| values.get(index).copied();
        let traffic = Traffic {
            reads: at(0)?,
            reads_merged: at(1)?,
            sectors_read: at(2)?,
            read_time: at(3)?,
            writes: at(4)?,
            writes_merged: at(5)?,
            sectors_written: at(6)?,
            write_time: at(7)?,
            in_progress: at(8)?,
            io_time: at(9)?,
            weighted_time: at(10)?,
        };
        Some([(number, traffic), (device, traffic)])
    };
    table.lines().filter_map(disk).flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use keblet_skip::mounts::in_private_mounts;
    use keblet_skip::mounts::tmpfs;

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
        let table = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 8:1 /x /pods/\xff rw - ext4 /dev/sda1 rw\n\
                      24 22 8:16 / /silent rw - xfs /dev/sdb rw\n";
        fs::write(dir.path().join("self/mountinfo"), table).unwrap();
        fs::write(dir.path().join("diskstats"), "   8       1 sda1 1 2 3 4 5 6 7 8 9 10 11 0 0 0 0\n").unwrap();
        let mounted_devices = MountTable::default().mounted(dir.path());
        assert_eq!(mounted_devices.len(), 2, "{mounted_devices:?}");
        let size = DiskUsage { capacity: 9, ..DiskUsage::default() };
        let found = file_systems(mounted_devices, &[("/".into(), size)].into());
        let [disk] = &found[..] else { panic!("one does not answer: {found:?}") };
        assert_eq!((disk.device.as_str(), disk.usage), ("/dev/sda1", size));
        let traffic = disk.traffic.expect("it is counted");
        assert_eq!((traffic.reads_merged, traffic.sectors_read, traffic.read_time), (2, 3, 4));
        assert_eq!((traffic.writes_merged, traffic.sectors_written, traffic.write_time), (6, 7, 8));
        assert_eq!((traffic.reads, traffic.writes), (1, 5));
        assert_eq!((traffic.in_progress, traffic.io_time, traffic.weighted_time), (9, 10, 11));
        assert!(MountTable::default().mounted(&dir.path().join("none")).is_empty());
        let table = "22 1 0:31 /@ / rw - btrfs /dev/sda1 rw\n23 22 0:40 / /data rw - btrfs /dev/sdb rw\n";
        fs::write(dir.path().join("self/mountinfo"), table).unwrap();
        let counted = MountTable::default().mounted(dir.path()).into_iter().map(|disk| disk.traffic);
        assert_eq!(counted.collect::<Vec<_>>(), [Some(traffic), None], "btrfs, by the device's file");
    }

    #[test]
    fn the_mount_table_is_read_again_after_a_change() {
        in_private_mounts(|| {
            let dir = tempfile::tempdir().unwrap();
            symlink("/proc/thread-self", dir.path().join("self")).unwrap();
            let mut table = MountTable::default();
            let read_again = |table: &mut MountTable| {
                let is_due = table.file.as_ref().is_none_or(has_changed);
                table.mounted(dir.path());
                is_due
            };
            assert!(read_again(&mut table) && !read_again(&mut table));
            tmpfs(&dir.path().join("new"));
            assert!(read_again(&mut table) && !read_again(&mut table));
        });
    }
}
