//! The kernel namespaces of sysctls, for the configuration and for admission. Pure.

use std::fmt;

/// The kernel namespace a sysctl is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SysctlNamespace {
    /// Semaphores, shared memory, message queues.
    Ipc,
    /// The network.
    Net,
    /// Names of host and domain.
    Uts,
    /// Limits of a user namespace.
    User,
}

impl fmt::Display for SysctlNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipc => "IPC",
            Self::Net => "Net",
            Self::Uts => "UTS",
            Self::User => "User",
        })
    }
}

impl SysctlNamespace {
    /// The namespace of a sysctl by its dot-separated name, or of all sysctls with a prefix.
    pub fn of(name: &str) -> Option<Self> {
        let ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|prefix| name.starts_with(prefix));
        match name {
            "kernel.sem" => Some(Self::Ipc),
            "kernel.domainname" => Some(Self::Uts),
            _ if ipc => Some(Self::Ipc),
            _ if name.starts_with("net.") => Some(Self::Net),
            _ if name.starts_with("user.") => Some(Self::User),
            _ => None,
        }
    }
}
