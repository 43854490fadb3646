//! Folders with fixed names, which all runtimes and agents of a host share. Removed with the last private runtime,
//! unless the system's runtime uses them.

use std::fs;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use nix::fcntl::Flock;
use nix::fcntl::FlockArg;

use crate::host_resources::hierarchies;

/// Where a node agent links container logs for log collectors.
pub(crate) const LOG_LINKS: &str = "/var/log/containers";

/// Folders whose names are fixed in containerd and its shim.
///
/// Each user holds a shared lock. The user that can upgrade it to an exclusive lock is the last one and removes the
/// folders if they are empty and no containerd of the system uses them.
pub(crate) struct SharedFolders {
    lock: Flock<File>,
}

impl SharedFolders {
    const SOCKETS: &str = "/run/containerd/s";
    const SYSTEM: &str = "/run/containerd/containerd.sock";
    const ALL: [&str; 4] = [Self::SOCKETS, "/run/containerd", "/var/lib/cni/results", "/var/lib/cni"];
    /// The cgroup of containers whose pods have no cgroup parent.
    const CGROUP: &str = "k8s.io";

    /// Creates the folders and locks them.
    ///
    /// # Errors
    /// A folder cannot be created or locked.
    pub(crate) fn enter() -> Result<Self> {
        let shared = Self::lock()?;
        // Marked unless it is the system's, so that the last private runtime knows whether to remove it.
        if fs::create_dir(LOG_LINKS).is_ok() {
            fs::write(Self::log_mark(), "").with_context(|| format!("cannot write in {LOG_LINKS}"))?;
        }
        Ok(shared)
    }

    fn log_mark() -> PathBuf {
        Path::new(LOG_LINKS).join(".private-containerd")
    }

    fn lock() -> Result<Self> {
        loop {
            fs::create_dir_all(Self::SOCKETS).with_context(|| format!("cannot create {}", Self::SOCKETS))?;
            let folder = File::open(Self::SOCKETS).with_context(|| format!("cannot open {}", Self::SOCKETS))?;
            let lock = Flock::lock(folder, FlockArg::LockShared)
                .map_err(|(_, errno)| errno)
                .with_context(|| format!("cannot lock {}", Self::SOCKETS))?;
            // The last user may have removed the folder between opening and locking it.
            let held = lock.metadata().context("cannot stat the locked folder")?.ino();
            if fs::metadata(Self::SOCKETS).is_ok_and(|now| now.ino() == held) {
                return Ok(Self { lock });
            }
        }
    }

    /// Removes the folders if no other user holds the lock; returns failures.
    pub(crate) fn leave(self) -> Vec<String> {
        if self.lock.relock(FlockArg::LockExclusiveNonblock).is_err() || Path::new(Self::SYSTEM).exists() {
            return Vec::new();
        }
        let only_the_mark = fs::read_dir(LOG_LINKS).is_ok_and(|entries| entries.count() == 1);
        let links = (only_the_mark && fs::remove_file(Self::log_mark()).is_ok()).then(|| PathBuf::from(LOG_LINKS));
        let cgroups = hierarchies().into_iter().map(|root| root.join(Self::CGROUP));
        let folders = Self::ALL.into_iter().map(PathBuf::from).chain(links);
        cgroups.chain(folders).filter_map(|path| remove_empty(&path).err()).collect()
    }
}

fn remove_empty(path: &Path) -> Result<(), String> {
    match fs::remove_dir(path) {
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty | ErrorKind::ResourceBusy => Ok(()),
            _ => Err(format!("cannot remove {}: {error}", path.display())),
        },
        Ok(()) => Ok(()),
    }
}
