//! Disks as the kernel and udev show them, however they are connected.
//!
//! ```text
//!  /sys/class/scsi_host/host<n>/scan
//!  /sys/block/<disk>/{dev,device/delete,holders/dm-<n>,<disk><partition>/dev}
//!  /sys/block/dm-<n>/{dm/uuid,slaves/<disk>}
//!  /dev/disk/{by-id,by-path}/...   made by udev
//! ```

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::path::PathBuf;

use nix::sys::stat::major;
use nix::sys::stat::minor;

use crate::filesystem::MountTable;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::layout;

/// What the names of multipath devices, and of other devices that are made from disks, begin with.
const MAPPED: &str = "dm-";
/// All channels, targets and units of a SCSI host.
const ALL_UNITS: &str = "- - -";

/// Where the kernel and udev show devices.
#[derive(Clone, Debug)]
pub(in crate::volumes) struct Host {
    pub(in crate::volumes) sys: PathBuf,
    pub(in crate::volumes) dev: PathBuf,
    /// Whether a path leads to a device; of tests, to any file.
    pub(in crate::volumes) is_device: fn(&Path) -> bool,
}

impl Host {
    /// This machine.
    pub(in crate::volumes) fn this() -> Self {
        let is_device = |path: &Path| fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
        Self { sys: "/sys".into(), dev: "/dev".into(), is_device }
    }

    /// Paths in a folder of `/dev/disk` that have such names and lead to devices, in the order of their names. Blocking.
    pub(in crate::volumes) fn named(&self, folder: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
        let dir = self.dev.join("disk").join(folder);
        let wanted = names(&dir).into_iter().filter(|name| is_wanted(name)).map(|name| dir.join(name));
        wanted.filter(|path| (self.is_device)(path)).collect()
    }

    /// Makes all SCSI hosts look for all of their units; those that cannot are left out. Blocking, for seconds where a host
    /// has a slow fabric.
    pub(in crate::volumes) fn scan_all(&self) {
        let hosts = self.sys.join("class/scsi_host");
        for name in names(&hosts) {
            let path = hosts.join(name).join("scan");
            if let Err(error) = fs::write(&path, ALL_UNITS) {
                tracing::debug!(path = %path.display(), %error, "a SCSI host is not scanned");
            }
        }
    }

    /// The multipath device that the disk of this device is a part of. Blocking.
    pub(in crate::volumes) fn multipath(&self, device: &Path) -> Option<PathBuf> {
        let disk = device.canonicalize().ok()?;
        Some(self.dev.join(self.multipath_of(disk.file_name()?.to_str()?)?))
    }

    /// The name of the multipath device that a disk is a part of, or is itself. Blocking.
    pub(in crate::volumes) fn multipath_of(&self, disk: &str) -> Option<String> {
        if self.is_multipath(disk) {
            return Some(disk.to_owned());
        }
        let holders = self.sys.join("block").join(disk).join("holders");
        names(&holders).into_iter().find(|name| self.is_multipath(name))
    }

    fn is_multipath(&self, name: &str) -> bool {
        let id = || text(&self.sys.join("block").join(name).join("dm/uuid"));
        name.starts_with(MAPPED) && id().is_none_or(|id| id.starts_with("mpath-"))
    }

    /// Names of the disks that a multipath device is made from. Blocking.
    pub(in crate::volumes) fn disks_of(&self, multipath: &str) -> Vec<String> {
        names(&self.sys.join("block").join(multipath).join("slaves"))
    }

    /// True if a disk, a partition of it, or a device made from it is mounted or is a part of another device. Blocking.
    pub(in crate::volumes) fn is_used(&self, disk: &str, table: &MountTable) -> bool {
        let dir = self.sys.join("block").join(disk);
        let parts = self.partitions(disk).into_iter().map(|name| dir.join(name));
        let is_used = |dir: PathBuf| !names(&dir.join("holders")).is_empty() || self.is_mounted(&dir, table);
        std::iter::once(dir.clone()).chain(parts).any(is_used)
    }

    /// As [`Self::is_used`], of a multipath device: its partitions are devices made from it, which multipath(8) removes
    /// with it. Blocking.
    pub(in crate::volumes) fn is_multipath_used(&self, name: &str, table: &MountTable) -> bool {
        let dir = self.sys.join("block").join(name);
        let is_partition = |holder: &str| {
            let id = text(&self.sys.join("block").join(holder).join("dm/uuid"));
            id.is_some_and(|id| id.starts_with("part") && id.contains("-mpath-"))
        };
        let is_used = |holder: &String| !is_partition(holder) || self.is_used(holder, table);
        self.is_mounted(&dir, table) || names(&dir.join("holders")).iter().any(is_used)
    }

    /// Whether the device of a directory of the kernel is mounted.
    fn is_mounted(&self, dir: &Path, table: &MountTable) -> bool {
        let number = text(&dir.join("dev")).unwrap_or_default();
        table.has_device(&number, &self.dev.join(dir.file_name().unwrap_or_default()))
    }

    /// Names of the partitions of a disk. Blocking.
    pub(in crate::volumes) fn partitions(&self, disk: &str) -> Vec<String> {
        let found = names(&self.sys.join("block").join(disk)).into_iter();
        found.filter(|name| name.starts_with(disk)).collect()
    }

    /// True if a pod has a disk as a raw device: a loop device is on its map, see `block`. Blocking.
    pub(in crate::volumes) fn is_mapped(&self, disk: &str) -> bool {
        let block = self.sys.join("block");
        let Some(number) = text(&block.join(disk).join("dev")) else { return false };
        let leads_to_it = |name: &String| {
            let file = text(&block.join(name).join("loop/backing_file")).map(PathBuf::from);
            // Other files may be on a server that does not answer.
            let map = file.filter(|file| file.components().any(|part| part.as_os_str() == layout::DEVICES));
            let found = map.and_then(|map| fs::metadata(map).ok());
            found.is_some_and(|found| {
                let own = format!("{}:{}", major(found.rdev()), minor(found.rdev()));
                found.file_type().is_block_device() && own == number
            })
        };
        names(&block).iter().any(leads_to_it)
    }

    /// True if the kernel has reserved a disk or a partition of it, as for swap or for a file system that is mounted, in
    /// any mount namespace. Blocking.
    pub(in crate::volumes) fn is_reserved(&self, disk: &str) -> bool {
        let mut options = fs::OpenOptions::new();
        // Without O_CREAT, O_EXCL fails for a block device that is reserved.
        options.read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK);
        let opened = options.open(self.dev.join(disk));
        opened.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
    }

    /// Removes a disk from the kernel. Blocking.
    ///
    /// # Errors
    /// It cannot be written to.
    pub(in crate::volumes) fn delete(&self, disk: &str) -> Result<(), VolumeError> {
        let path = self.sys.join("block").join(disk).join("device/delete");
        fs::write(&path, "1").on("write", &path)
    }
}

/// What is in a directory, in order; nothing if it cannot be read.
pub(in crate::volumes) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The line of a file of the kernel; `None` if it is empty or not there. It writes `(null)` for what is not known.
pub(in crate::volumes) fn text(path: &Path) -> Option<String> {
    let text: io::Result<String> = fs::read_to_string(path);
    let text = text.ok()?.trim().to_owned();
    (!text.is_empty() && text != "(null)").then_some(text)
}

#[cfg(test)]
pub(in crate::volumes) mod testing {
    //! A machine of files.

    use super::*;

    /// A machine below a directory.
    pub(in crate::volumes) struct TestHost {
        pub(in crate::volumes) root: tempfile::TempDir,
    }

    impl TestHost {
        pub(in crate::volumes) fn new() -> Self {
            Self { root: tempfile::tempdir().expect("a folder") }
        }

        pub(in crate::volumes) fn host(&self) -> Host {
            Host { sys: self.root.path().join("sys"), dev: self.root.path().join("dev"), is_device: Path::exists }
        }

        pub(in crate::volumes) fn write(&self, path: &str, text: &str) {
            let path = self.root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }

        pub(in crate::volumes) fn read(&self, path: &str) -> Option<String> {
            fs::read_to_string(self.root.path().join(path)).ok()
        }

        /// Makes a link, as udev does, in place of one that is there.
        pub(in crate::volumes) fn link(&self, path: &str, to: &str) {
            let path = self.root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            let _ = fs::remove_file(&path);
            std::os::unix::fs::symlink(to, path).expect("a link");
        }

        /// Adds a disk that can be removed.
        pub(in crate::volumes) fn disk(&self, name: &str, number: &str) {
            self.write(&format!("sys/block/{name}/dev"), &format!("{number}\n"));
            self.write(&format!("sys/block/{name}/device/delete"), "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::*;
    use super::*;

    #[test]
    fn disks_that_are_used() {
        let test = TestHost::new();
        for (name, number) in [("sda", "240:1"), ("sdb", "240:2"), ("sdc", "240:3")] {
            test.disk(name, number);
        }
        test.write("sys/block/sdb/holders/dm-0", "");
        test.write("sys/block/dm-0/dm/uuid", "mpath-360000\n");
        test.write("sys/block/sdc/sdc1/holders/dm-1", "");
        let (host, table) = (test.host(), MountTable::default());
        assert_eq!(["sda", "sdb", "sdc"].map(|disk| host.is_used(disk, &table)), [false, true, true]);
        test.write("dev/sdb", "");
        assert_eq!(host.multipath(&test.root.path().join("dev/sdb")), Some(test.root.path().join("dev/dm-0")));
        assert_eq!(host.multipath_of("dm-0").as_deref(), Some("dm-0"), "it is one");
        test.write("sys/block/dm-0/dm/uuid", "LVM-x\n");
        assert_eq!(host.multipath(&test.root.path().join("dev/sdb")), None, "made from it, but no multipath device");
        assert_eq!(host.multipath_of("dm-0"), None);

        host.delete("sda").expect("written");
        assert_eq!(test.read("sys/block/sda/device/delete").as_deref(), Some("1"));
        host.delete("sdz").expect_err("no such disk");
        assert!(!host.is_reserved("sdb") && !host.is_reserved("sdz"));
    }

    /// A pod with a raw device may have made partitions, which keep nothing in use.
    #[test]
    fn a_multipath_device_is_not_used_by_its_partitions_alone() {
        let test = TestHost::new();
        let (host, table) = (test.host(), MountTable::default());
        test.write("sys/block/dm-0/dm/uuid", "mpath-360000\n");
        assert!(!host.is_multipath_used("dm-0", &table));
        test.write("sys/block/dm-0/holders/dm-1", "");
        test.write("sys/block/dm-1/dm/uuid", "part1-mpath-360000\n");
        assert!(!host.is_multipath_used("dm-0", &table));
        test.write("sys/block/dm-1/holders/dm-2", "");
        assert!(host.is_multipath_used("dm-0", &table), "a device is made from the partition");
        fs::remove_file(test.root.path().join("sys/block/dm-1/holders/dm-2")).expect("removed");
        assert!(!host.is_multipath_used("dm-0", &table));
        test.write("sys/block/dm-1/dm/uuid", "LVM-x\n");
        assert!(host.is_multipath_used("dm-0", &table), "it is a part of another device");
    }

    #[test]
    fn paths_that_lead_to_devices() {
        let test = TestHost::new();
        assert!(test.host().named("by-id", |_| true).is_empty());
        test.write("dev/sdb", "");
        for name in ["scsi-b", "scsi-a"] {
            test.link(&format!("dev/disk/by-id/{name}"), "../../sdb");
        }
        test.link("dev/disk/by-id/scsi-gone", "../../sdz");
        test.link("dev/disk/by-id/ata-a", "../../sdb");
        let found = test.host().named("by-id", |name| name.starts_with("scsi-"));
        let dir = test.root.path().join("dev/disk/by-id");
        assert_eq!(found, [dir.join("scsi-a"), dir.join("scsi-b")]);
        let strict = Host { is_device: Host::this().is_device, ..test.host() };
        assert!(strict.named("by-id", |_| true).is_empty(), "files are no devices");
    }

    #[test]
    fn all_hosts_are_scanned_but_those_that_cannot_be() {
        let test = TestHost::new();
        test.host().scan_all();
        test.write("sys/class/scsi_host/host0/state", "");
        fs::create_dir_all(test.root.path().join("sys/class/scsi_host/host1/scan")).expect("a folder");
        test.write("sys/class/scsi_host/host2/scan", "");
        test.host().scan_all();
        assert_eq!(test.read("sys/class/scsi_host/host2/scan").as_deref(), Some("- - -"));
    }
}
