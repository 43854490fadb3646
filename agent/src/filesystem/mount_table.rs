//! The table of mounts (proc_pid_mountinfo(5)).

use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::path::PathBuf;

use nix::fcntl::OFlag;
use nix::fcntl::open;
use nix::sys::stat::Mode;
use nix::sys::stat::makedev;

/// Of the thread: one of a test may have mounts of its own.
pub(super) const THREAD_MOUNTS: &str = "/proc/thread-self/mountinfo";

/// The mounts of this process.
#[derive(Clone, Debug, Default)]
pub struct MountTable(Vec<Entry>);

#[derive(Clone, Debug)]
struct Entry {
    /// Device number of the file system, `major:minor`.
    number: String,
    /// The directory of the file system that is mounted; escaped.
    root: String,
    /// The mount point, escaped as in the table.
    point: String,
    /// The device's file, or what else the file system is made from; escaped.
    source: String,
}

impl MountTable {
    /// Reads it.
    ///
    /// # Errors
    /// The kernel does not show it.
    pub fn read() -> io::Result<Self> {
        Ok(Self::parse(&read_mounts(Path::new(THREAD_MOUNTS))?))
    }

    fn parse(text: &str) -> Self {
        let entry = |line: &str| {
            let (left, right) = line.split_once(" - ")?;
            let mut left = left.split(' ');
            let (number, root, point) = (left.nth(2)?, left.next()?, left.next()?);
            let source = right.split(' ').nth(1)?;
            let [number, root, point, source] = [number, root, point, source].map(str::to_owned);
            Some(Entry { number, root, point, source })
        };
        Self(text.lines().filter_map(entry).collect())
    }

    /// True if the file system that is mounted on `point`, a path without links, is also mounted somewhere below `dir`.
    pub fn is_mounted_below(&self, point: &Path, dir: &Path) -> bool {
        let (point, dir) = (escaped(&point.to_string_lossy()), escaped(&dir.to_string_lossy()));
        self.same_as(&point).any(|entry| entry.point != point && Path::new(&entry.point).starts_with(&dir))
    }

    /// True if the directory `path`, itself without links, is mounted somewhere below `dir`.
    pub fn is_bound_below(&self, path: &Path, dir: &Path) -> bool {
        let (path, dir) = (escaped(&path.to_string_lossy()), escaped(&dir.to_string_lossy()));
        // The last mount of the nearest point hides the ones before.
        let depth = |entry: &&Entry| Path::new(&entry.point).components().count();
        let holding = self.0.iter().filter(|entry| Path::new(&path).starts_with(&entry.point)).max_by_key(depth);
        let Some(holding) = holding else { return false };
        let Ok(below) = Path::new(&path).strip_prefix(&holding.point) else { return false };
        let root = Path::new(&holding.root).join(below);
        let is_same = |entry: &&Entry| entry.number == holding.number && Path::new(&entry.root) == root;
        self.0.iter().filter(is_same).any(|entry| entry.point != path && Path::new(&entry.point).starts_with(&dir))
    }

    /// True if the file system that is mounted on `point`, a path without links, is also mounted at a point
    /// that is not in `known`.
    pub fn is_mounted_elsewhere(&self, point: &Path, known: &[PathBuf]) -> bool {
        let point = escaped(&point.to_string_lossy());
        let known: Vec<String> = known.iter().map(|known| escaped(&known.to_string_lossy())).collect();
        self.same_as(&point).any(|entry| entry.point != point && !known.contains(&entry.point))
    }

    /// The mounts of the file system that is mounted on this point.
    fn same_as(&self, point: &str) -> impl Iterator<Item = &Entry> {
        let of_point = self.0.iter().rev().find(|entry| entry.point == point).map(|entry| entry.number.as_str());
        self.0.iter().filter(move |entry| Some(entry.number.as_str()) == of_point)
    }

    /// True if the block device of this number (`major:minor`) and file is mounted. The file systems of some are known by
    /// the file only.
    pub fn has_device(&self, number: &str, file: &Path) -> bool {
        let file = escaped(&file.to_string_lossy());
        self.0.iter().any(|entry| entry.number == number || entry.source == file)
    }
}

/// Device number of the file system that `path` lies on, as the table has it. `stat(2)` has another one for each subvolume
/// of btrfs, also where a subvolume is no mount of its own.
///
/// # Errors
/// There is no such file, or the kernel does not show its mount.
pub fn file_system_number(path: &Path) -> io::Result<u64> {
    let opened = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let (id, table) = (mount_id(&opened)?, read_mounts(Path::new(THREAD_MOUNTS))?);
    number_of(&table, &id).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "its mount is not in the table"))
}

/// Id of the mount that an opened file lies on.
///
/// # Errors
/// The kernel does not report it.
pub(super) fn mount_id(opened: &OwnedFd) -> io::Result<String> {
    let facts = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", opened.as_raw_fd()))?;
    let id = facts.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let id = id.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the kernel reports no mount of the file"))?;
    Ok(id.trim().to_owned())
}

/// Device number in the line of the mount with this id.
fn number_of(table: &str, id: &str) -> Option<u64> {
    let mut lines = table.lines().map(|line| line.split(' '));
    let number = lines.find_map(|mut fields| (fields.next() == Some(id)).then(|| fields.nth(1)))??;
    let (major, minor) = number.split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Reads a `mountinfo` file and replaces bytes that are not UTF-8: a privileged container can mount at a path that is not
/// UTF-8, which must not make the other mounts unreadable.
///
/// # Errors
/// The file cannot be read.
pub fn read_mounts(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// A path as the table has it.
pub(super) fn escaped(path: &str) -> String {
    path.replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011").replace('\n', "\\012")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use keblet_skip::mounts::bind;
    use keblet_skip::mounts::in_private_mounts;
    use keblet_skip::mounts::tmpfs;

    use super::*;

    const TABLE: &str = "\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 8:0 / /srv/a\\040b/plugins/x rw shared:4 - ext4 /dev/sda rw
41 22 8:0 / /srv/a\\040b/pods/u/volumes/x ro shared:5 - ext4 /dev/sda rw
42 22 8:16 / /srv/a\\040b/plugins/y rw - ext4 /dev/sdb rw
43 22 8:16 / /mnt rw - ext4 /dev/sdb rw
44 22 0:40 / /data rw - btrfs /dev/sdc rw
broken
";

    #[test]
    fn mounts_of_the_same_file_system() {
        let table = MountTable::parse(TABLE);
        let root = Path::new("/srv/a b");
        let below = |point: &str, dir: &str| table.is_mounted_below(&root.join(point), &root.join(dir));
        assert!(below("plugins/x", "pods"));
        assert!(!below("plugins/x", "pod") && !below("plugins/x", "plugins"), "neither a part of a name nor itself");
        assert!(!below("plugins/y", "pods") && !below("plugins/z", "pods"));
        let elsewhere = |point: &str, known: &[&str]| {
            let known: Vec<PathBuf> = known.iter().map(|known| root.join(known)).collect();
            table.is_mounted_elsewhere(&root.join(point), &known)
        };
        assert!(elsewhere("plugins/x", &[]) && elsewhere("plugins/x", &["plugins/x", "pods/u"]));
        assert!(!elsewhere("plugins/x", &["pods/u/volumes/x"]) && !elsewhere("plugins/z", &[]));
    }

    #[test]
    fn mounts_of_a_directory() {
        let table = "\
22 1 254:0 /@ / rw - btrfs /dev/vda rw
23 22 254:0 /@/srv/disk/a\\040b /pods/u-1/x rw - btrfs /dev/vda rw
24 22 8:0 / /mnt rw - ext4 /dev/sda rw
25 22 8:16 / /mnt rw - ext4 /dev/sdb rw
26 22 8:16 / /pods/u-2/x ro - ext4 /dev/sdb rw
27 22 8:0 /d /pods/u-3/x ro - ext4 /dev/sda rw
28 22 254:0 /@/srv/other /other rw - btrfs /dev/vda rw
";
        let table = MountTable::parse(table);
        let bound = |path: &str| table.is_bound_below(Path::new(path), Path::new("/pods"));
        assert!(bound("/srv/disk/a b") && bound("/mnt"));
        assert!(!bound("/srv/disk") && !bound("/srv/disk/a b/c"), "neither above nor below");
        assert!(!bound("/mnt/d"), "its disk is hidden by another one");
        assert!(!bound("/srv/other"), "not for a pod");
        assert!(!bound("/pods/u-1/x"), "a mount is not its own");
    }

    #[test]
    fn devices_by_number_or_file() {
        let table = MountTable::parse(TABLE);
        assert!(table.has_device("8:0", Path::new("/dev/other")));
        assert!(table.has_device("8:32", Path::new("/dev/sdc")), "the number is the file system's");
        assert!(!table.has_device("8:48", Path::new("/dev/sdd")));
    }

    #[test]
    fn subvolumes_of_btrfs_are_one_file_system() {
        let table = "\
30 1 0:31 /@ / rw shared:1 - btrfs /dev/vda3 rw,subvol=/@
48 30 0:31 /@/var /var rw shared:9 - btrfs /dev/vda3 rw,subvol=/@/var
49 30 8:16 / /data rw - ext4 /dev/sdb rw
";
        let number = |id: &str| number_of(table, id);
        assert_eq!((number("30"), number("48")), (Some(makedev(0, 31)), Some(makedev(0, 31))));
        assert_eq!((number("49"), number("4")), (Some(makedev(8, 16)), None));
        // Elsewhere it is what `stat` has.
        let proc = fs::metadata("/proc/self").expect("a folder");
        let found = file_system_number(Path::new("/proc/self")).expect("a number");
        assert_eq!(found, std::os::unix::fs::MetadataExt::dev(&proc));
    }

    #[test]
    fn a_mount_point_whose_name_is_no_text_hides_no_mount() {
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a folder");
            let dir = root.path().canonicalize().expect("it exists");
            let (place, other) = (dir.join("place"), dir.join(OsStr::from_bytes(b"pods/\xff")));
            tmpfs(&place);
            bind(&place, &other);
            let table = MountTable::read().expect("a table");
            assert!(table.is_mounted_below(&place, &dir.join("pods")));
            assert!(!table.is_mounted_elsewhere(&place, &[other]));
        });
    }

    #[test]
    fn the_mounts_of_this_process() {
        let table = MountTable::read().expect("a table");
        assert!(table.0.iter().any(|entry| entry.point == "/proc"), "{table:?}");
    }
}
