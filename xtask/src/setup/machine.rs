//! The parts of the virtual machine from Debian's archive, unpacked into the cache.
//!
//! ```text
//! machine/qemu    qemu and virtiofsd, run on this system with their own libraries
//!        /kernel  a kernel with cgroup v2 only, and its modules
//!        /root    root file system of the machine: systemd, bus, shell tools, storage on the network, and the files of
//!                 `vm/guest`
//! ```

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

use super::apt::Apt;
use super::sources;
use crate::progress::step;
use crate::system;
use crate::vm::guest;

/// Raised when the layout changes but the packages do not.
const RECIPE: &str = "1";
/// The suite of qemu and of the kernel. qemu 7.2 of the suite before emulates `cmpxchg16b` wrongly, which this kernel
/// executes for every allocation. The kernel has no v1 memory controller; PSI is enabled.
const SUITE: &str = "trixie";
/// With the libraries of their own suite, so that they run on any system.
const QEMU: [&str; 2] = ["qemu-system-x86", "virtiofsd"];
const KERNEL: &str = "linux-image-cloud-amd64";
/// Of the suite of this system, so that programs built here run there. The last six are for disks and exports that pods
/// mount, for file systems that count projects, and for AppArmor profiles.
const ROOT: [&str; 14] = [
    "systemd",
    "dbus",
    "util-linux",
    "coreutils",
    "dash",
    "kmod",
    "busybox-static",
    "libgcc-s1",
    "e2fsprogs",
    "xfsprogs",
    "open-iscsi",
    "udev",
    "nfs-kernel-server",
    "apparmor",
];
/// Mount points and folders of the root file system that no package has.
const FOLDERS: [&str; 8] = ["proc", "sys", "dev", "run", "tmp", "mnt", "root", "share"];

/// Unpacks the packages unless they are unpacked already, and writes the machine's own files.
///
/// # Errors
/// A package cannot be downloaded or unpacked, or a file cannot be written.
pub(super) fn unpack(cache: &Cache) -> Result<()> {
    let folder = cache.machine();
    let mirror = sources::mirror()?;
    let stamp = folder.join(".packages");
    let recipe = format!("{RECIPE} {} {SUITE} {KERNEL} {} {}\n", mirror.suite, QEMU.join(" "), ROOT.join(" "));
    if !fs::read_to_string(&stamp).is_ok_and(|there| there == recipe) {
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let newer = Apt::update(&mirror, &[SUITE], cache.root())?;
        newer.unpack_with_dependencies(&QEMU, &folder.join("qemu"))?;
        kernel(&newer, &folder.join("kernel"))?;
        let root = folder.join("root");
        let own = Apt::update(&mirror, &[&mirror.suite], cache.root())?;
        own.unpack_with_dependencies(&ROOT, &root)?;
        step("building the machine's root file system", || assemble(&root, &folder.join("kernel")))?;
        // Last, so that an interrupted run is repeated.
        fs::write(&stamp, recipe).with_context(|| format!("cannot write {}", stamp.display()))?;
    }
    guest::FILES.iter().try_for_each(|file| write(&folder.join("root"), file))
}

/// The package without a version in its name depends on the current one.
fn kernel(apt: &Apt, into: &Path) -> Result<()> {
    let needs = apt.dependencies(KERNEL)?;
    let image = needs.iter().find(|name| name.starts_with("linux-image-"));
    let image = image.with_context(|| format!("{KERNEL} of {SUITE} depends on no kernel"))?;
    apt.unpack(std::slice::from_ref(image), into)
}

/// Completes the unpacked packages to a root file system, as their installation would.
fn assemble(root: &Path, kernel: &Path) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        let (own, merged) = (root.join(name), root.join("usr").join(name));
        if own.is_dir() {
            let from = own.join(".");
            fs::create_dir_all(&merged).with_context(|| format!("cannot create {}", merged.display()))?;
            system::quiet(Command::new("cp").args(["--archive", "--force"]).args([&from, &merged]))?;
            fs::remove_dir_all(&own).with_context(|| format!("cannot remove {}", own.display()))?;
        }
        symlink(Path::new("usr").join(name), &own).with_context(|| format!("cannot link {}", own.display()))?;
    }
    for name in FOLDERS {
        let path = root.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    applets(root)?;
    let modules = first_in(&modules(kernel))?;
    let into = root.join("usr/lib/modules");
    fs::create_dir_all(&into).with_context(|| format!("cannot create {}", into.display()))?;
    system::quiet(Command::new("cp").arg("--archive").args([&modules, &into]))?;
    let release = modules.file_name().context("the kernel has no modules")?;
    system::quiet(Command::new("chroot").arg(root).arg("/sbin/depmod").arg(release))
}

/// Links busybox's applets for programs that no package has.
fn applets(root: &Path) -> Result<()> {
    let list = system::output(Command::new(root.join("usr/bin/busybox")).arg("--list"))?;
    let exists = |name: &str| {
        // Not followed: links of the root file system may be absolute.
        ["bin", "sbin"].iter().any(|folder| root.join("usr").join(folder).join(name).symlink_metadata().is_ok())
    };
    for applet in list.lines().filter(|applet| !exists(applet)) {
        let link = root.join("usr/bin").join(applet);
        symlink("busybox", &link).with_context(|| format!("cannot link {}", link.display()))?;
    }
    Ok(())
}

fn modules(kernel: &Path) -> PathBuf {
    let merged = kernel.join("usr/lib/modules");
    if merged.is_dir() { merged } else { kernel.join("lib/modules") }
}

fn first_in(folder: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let entry = entries.next().with_context(|| format!("{} is empty", folder.display()))?;
    Ok(entry.with_context(|| format!("cannot read {}", folder.display()))?.path())
}

/// Writes a file of the machine unless it is the same: running machines share it.
fn write(root: &Path, file: &guest::GuestFile) -> Result<()> {
    let path = root.join(file.path);
    if fs::read_to_string(&path).is_ok_and(|there| there == file.content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    fs::write(&path, file.content).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(file.mode))
        .with_context(|| format!("cannot set the mode of {}", path.display()))
}
