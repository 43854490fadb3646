//! Identity and size of the machine, read for every status.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;

use nix::sys::statvfs::statvfs;
use nix::unistd::SysconfVar;
use nix::unistd::sysconf;

/// Identity and size of the machine. Unreadable texts are empty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Machine {
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// The firmware's UUID, else the machine id.
    pub system_uuid: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// As `uname -r` prints it.
    pub kernel_version: String,
    /// `PRETTY_NAME` of os-release; `Unknown` without that file.
    pub os_image: String,
    /// Bytes of swap.
    pub swap: i64,
    /// Processors, memory and disk; `None` if they are not readable.
    pub sizes: Option<Sizes>,
}

/// Resources of the machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    /// Logical processors that are online.
    pub cpus: i64,
    /// Bytes of memory.
    pub memory: i64,
    /// Huge pages: bytes in all, by page size in bytes.
    pub hugepages: BTreeMap<u64, i64>,
    /// Bytes of the file system of the agent's root directory; `None` if it is not readable.
    pub root_fs: Option<i64>,
    /// The limit of processes.
    pub pids: i64,
}

/// The size of the file system of the agent's root directory as it was first read: on ZFS it changes with every write. As
/// with a kubelet, another size counts from the next start on. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct RootFs(Arc<OnceLock<i64>>);

impl RootFs {
    /// Bytes; `None` if it was never readable.
    fn size(&self, directory: &Path) -> Option<i64> {
        match self.0.get() {
            Some(size) => Some(*size),
            None => file_system_size(directory).map(|size| *self.0.get_or_init(|| size)),
        }
    }
}

impl Machine {
    /// Reads the files below `root` (`/`, except in tests). `root_dir` is the agent's own directory. What is read more than
    /// once is to be read with one `root_fs`.
    pub fn read(root: &Path, root_dir: &Path, root_fs: &RootFs) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default().trim().to_owned();
        let first = |paths: &[&str]| paths.iter().map(|path| text(path)).find(|found| !found.is_empty());
        let meminfo = text("proc/meminfo");
        let machine_id = first(&["etc/machine-id", "var/lib/dbus/machine-id"]).unwrap_or_default();
        let firmware = ["sys/class/dmi/id/product_uuid", "proc/device-tree/system-id", "proc/device-tree/vm,uuid"];
        Self {
            system_uuid: first(&firmware).unwrap_or_else(|| machine_id.clone()).trim_matches('\0').to_owned(),
            machine_id,
            boot_id: text("proc/sys/kernel/random/boot_id"),
            kernel_version: text("proc/sys/kernel/osrelease"),
            os_image: first(&["etc/os-release", "usr/lib/os-release"])
                .as_deref()
                .map_or_else(|| "Unknown".to_owned(), os_image),
            swap: kibibytes(&meminfo, "SwapTotal:").unwrap_or(0),
            sizes: sizes(root, root_fs.size(root_dir), &meminfo),
        }
    }
}

fn sizes(root: &Path, root_fs: Option<i64>, meminfo: &str) -> Option<Sizes> {
    let number = |path: &str| fs::read_to_string(root.join(path)).ok()?.trim().parse::<i64>().ok();
    let limits = [number("proc/sys/kernel/pid_max"), number("proc/sys/kernel/threads-max")];
    Some(Sizes {
        cpus: sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten()?,
        memory: kibibytes(meminfo, "MemTotal:")?,
        hugepages: hugepages(&root.join("sys/kernel/mm/hugepages")),
        root_fs,
        pids: limits.into_iter().flatten().min().unwrap_or(i64::MAX),
    })
}

/// A line of `/proc/meminfo`, in bytes.
fn kibibytes(meminfo: &str, name: &str) -> Option<i64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<i64>().ok()?.checked_mul(1024)
}

/// Page sizes are folders like `hugepages-2048kB`.
fn hugepages(folder: &Path) -> BTreeMap<u64, i64> {
    let pages = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let count: i64 = fs::read_to_string(entry.path().join("nr_hugepages")).ok()?.trim().parse().ok()?;
        let size = kib.checked_mul(1024)?;
        Some((size, i64::try_from(size).ok()?.checked_mul(count)?))
    };
    fs::read_dir(folder).into_iter().flatten().flatten().filter_map(pages).collect()
}

fn file_system_size(path: &Path) -> Option<i64> {
    let stat = statvfs(path).ok()?;
    let blocks: u64 = stat.blocks();
    i64::try_from(blocks.checked_mul(stat.fragment_size())?).ok()
}

/// `PRETTY_NAME` of os-release, without its quotes; `Linux` if there is none.
fn os_image(os_release: &str) -> String {
    let value = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    value.map_or("Linux", |value| value.trim().trim_matches(['"', '\''])).to_owned()
}

/// The processor architecture as Go names it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> Machine {
        let folder = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, text).expect("a file");
        }
        Machine::read(folder.path(), folder.path(), &RootFs::default())
    }

    #[test]
    fn reads_identity_and_sizes() {
        let machine = machine(&[
            ("etc/machine-id", "0123\n"),
            ("sys/class/dmi/id/product_uuid", "ab-cd\n"),
            ("proc/sys/kernel/random/boot_id", "b00t\n"),
            ("proc/sys/kernel/osrelease", "6.12.1\n"),
            ("etc/os-release", "NAME=\"Debian\"\nPRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\n"),
            ("proc/meminfo", "MemTotal:        2048 kB\nMemFree: 1 kB\nSwapTotal:  8 kB\n"),
            ("proc/sys/kernel/pid_max", "4194304\n"),
            ("proc/sys/kernel/threads-max", "1000\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
        ]);
        assert_eq!((machine.machine_id.as_str(), machine.system_uuid.as_str()), ("0123", "ab-cd"));
        assert_eq!((machine.boot_id.as_str(), machine.kernel_version.as_str()), ("b00t", "6.12.1"));
        assert_eq!((machine.os_image.as_str(), machine.swap), ("Debian GNU/Linux 13 (trixie)", 8192));
        let sizes = machine.sizes.expect("sizes");
        assert_eq!((sizes.memory, sizes.pids), (2 << 20, 1000));
        assert!(sizes.cpus > 0 && sizes.root_fs.is_some_and(|bytes| bytes > 0));
        assert_eq!(sizes.hugepages, BTreeMap::from([(2 << 20, 6 << 20), (1 << 30, 0)]));
    }

    #[test]
    fn the_size_of_the_root_directory_stays_as_it_was_first_read() {
        let root_fs = RootFs::default();
        let size = |directory: &str| Machine::read("/".as_ref(), directory.as_ref(), &root_fs).sizes?.root_fs;
        assert_eq!(size("/no/such/folder"), None, "read again");
        let first = size("/");
        assert!(first.is_some_and(|bytes| bytes > 0));
        // A file system of another size.
        assert_eq!(size("/proc"), first);
        assert_eq!(file_system_size(Path::new("/proc")), Some(0));
    }

    #[test]
    fn unreadable_values_are_empty() {
        let machine = machine(&[("etc/machine-id", "0123")]);
        assert_eq!(machine.sizes, None);
        assert_eq!(machine.system_uuid, "0123");
        assert_eq!(machine.os_image, "Unknown", "as with a kubelet");
        assert_eq!(os_image("NAME=x\n"), "Linux");
    }
}
