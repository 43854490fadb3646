//! Projects of a file system. ext4 and XFS keep a project id with every file and count what the files of each project take,
//! unlinked ones that are still open included. New files get the id of a directory that passes it on.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::statfs::EXT4_SUPER_MAGIC;
use nix::sys::statfs::XFS_SUPER_MAGIC;
use nix::sys::statfs::statfs;

/// The project of files that were given none.
const DEFAULT_PROJECT: u32 = 0;
/// `PRJQUOTA` of quotactl(2).
const OF_PROJECTS: libc::c_int = 2;
/// `FS_XFLAG_PROJINHERIT`: the directory passes its project on.
const PASSED_ON: u32 = 0x200;
/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR`.
const GET_ATTRIBUTES: libc::Ioctl = nix::request_code_read!(b'X', 31, size_of::<Attributes>());
const SET_ATTRIBUTES: libc::Ioctl = nix::request_code_write!(b'X', 32, size_of::<Attributes>());

/// Why a file system counts no projects.
#[derive(Debug, thiserror::Error)]
pub enum NoProjectQuotas {
    /// Only these are known to count deleted files and to keep the id from users.
    #[error("it is neither ext4 nor XFS")]
    FileSystem,
    /// Counting is not switched on.
    #[error("it is not mounted with prjquota, or ext4 was made without the features quota and project")]
    NotCounted,
    /// No quotas, or no `quotactl_fd(2)`.
    #[error("the kernel was built without quotas, or is older than 5.14")]
    Kernel,
    /// Reading what others use needs a capability.
    #[error("this process lacks CAP_SYS_ADMIN")]
    Denied,
    /// Anything else.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The project of a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Project {
    /// Its id.
    pub id: u32,
    /// New files and directories in it get the same.
    pub is_passed_on: bool,
}

/// What the files of a project take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProjectUsage {
    /// Bytes on disk, reserved ones included.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

/// Whether the file system of a directory counts projects. Reads only.
///
/// # Errors
/// It does not, and why.
pub fn check(directory: &Path) -> Result<(), NoProjectQuotas> {
    let kind = statfs(directory).map_err(io::Error::from)?.filesystem_type();
    if kind != EXT4_SUPER_MAGIC && kind != XFS_SUPER_MAGIC {
        return Err(NoProjectQuotas::FileSystem);
    }
    match usage(directory, DEFAULT_PROJECT) {
        Ok(_) => Ok(()),
        Err(error) => Err(match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ESRCH) => NoProjectQuotas::NotCounted,
            Some(Errno::ENOSYS) => NoProjectQuotas::Kernel,
            Some(Errno::EPERM) => NoProjectQuotas::Denied,
            _ => error.into(),
        }),
    }
}

/// The project of a directory.
///
/// # Errors
/// There is no such directory, or its file system has no projects.
pub fn project_of(directory: &Path) -> io::Result<Project> {
    let attributes = Attributes::of(&open(directory, 0)?)?;
    Ok(Project { id: attributes.project, is_passed_on: attributes.flags & PASSED_ON != 0 })
}

/// Moves a directory to a project, which it passes on to what is created in it from now on.
///
/// # Errors
/// There is no such directory, its file system has no projects, or the process may not do it.
pub fn assign(directory: &Path, id: u32) -> io::Result<()> {
    let opened = open(directory, 0)?;
    let mut attributes = Attributes::of(&opened)?;
    attributes.project = id;
    attributes.flags |= PASSED_ON;
    attributes.set(&opened)
}

/// What a project takes on the file system of this directory.
///
/// # Errors
/// There is no such directory, the file system does not count projects, or the process lacks `CAP_SYS_ADMIN`.
pub fn usage(on: &Path, id: u32) -> io::Result<ProjectUsage> {
    let file_system = open(on, libc::O_PATH)?;
    let command = libc::QCMD(libc::Q_GETQUOTA, OF_PROJECTS);
    let mut found = MaybeUninit::<libc::dqblk>::zeroed();
    // SAFETY: neither libc nor nix have this call for projects. The descriptor is open, and the kernel writes at most one
    // `dqblk`, which `found` has room for.
    let result =
        unsafe { libc::syscall(libc::SYS_quotactl_fd, file_system.as_raw_fd(), command, id, found.as_mut_ptr()) };
    if result != 0 {
        let error = io::Error::last_os_error();
        // XFS has no record of a project without files.
        let is_unused = error.raw_os_error() == Some(libc::ENOENT);
        return if is_unused { Ok(ProjectUsage::default()) } else { Err(error) };
    }
    // SAFETY: it consists of integers, which were zero before the kernel wrote them.
    let found = unsafe { found.assume_init() };
    Ok(ProjectUsage { bytes: found.dqb_curspace, inodes: found.dqb_curinodes })
}

/// No link is followed in the last place.
fn open(directory: &Path, flags: libc::c_int) -> io::Result<File> {
    File::options().read(true).custom_flags(flags | libc::O_DIRECTORY | libc::O_NOFOLLOW).open(directory)
}

/// The kernel's `struct fsxattr`, which libc does not have.
#[derive(Default)]
#[repr(C)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_on_write_extent_size: u32,
    padding: [u8; 8],
}

const _: () = assert!(size_of::<Attributes>() == 28);

impl Attributes {
    fn of(file: &File) -> io::Result<Self> {
        let mut attributes = Self::default();
        // SAFETY: the descriptor is open, and the kernel writes the structure whose size is in the request.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) };
        if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
    }

    fn set(&self, file: &File) -> io::Result<()> {
        // SAFETY: the descriptor is open, and the kernel reads the structure whose size is in the request.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), SET_ATTRIBUTES, &raw const *self) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_those_of_the_kernel() {
        assert_eq!((GET_ATTRIBUTES, SET_ATTRIBUTES), (0x801c_581f, 0x401c_5820));
    }

    /// Counting is tested in the virtual machine: `tests/tests/scenarios/project_quotas.rs`.
    #[test]
    fn file_systems_without_projects_are_recognised() {
        let proc = Path::new("/proc/self");
        assert!(matches!(check(proc), Err(NoProjectQuotas::FileSystem)));
        assert!(project_of(proc).is_err() && assign(proc, 7).is_err() && usage(proc, 7).is_err());
        let none = Path::new("/no/such/directory");
        assert!(matches!(check(none), Err(NoProjectQuotas::System(error)) if error.kind() == io::ErrorKind::NotFound));
    }

    #[test]
    fn links_and_files_are_no_directories() {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "x").expect("a file");
        std::os::unix::fs::symlink(dir.path(), &link).expect("a link");
        for path in [file, link] {
            let kind = |result: io::Result<ProjectUsage>| result.expect_err("no directory").kind();
            assert_eq!(kind(usage(&path, 0)), io::ErrorKind::NotADirectory, "{}", path.display());
            assert!(assign(&path, 7).is_err(), "{}", path.display());
        }
    }
}
