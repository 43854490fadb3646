//! The kernel namespaces of sysctls, for the configuration and for admission. Pure.

use std::fmt;

/// Those of the IPC namespace, and two prefixes of them. Others that begin like these are refused by the runtime when a pod
/// starts.
const IPC: [&str; 10] = [
    "kernel.sem",
    "kernel.shm",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
    "kernel.shm_rmid_forced",
    "kernel.msg",
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
];

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
        match name {
            "kernel.domainname" => Some(Self::Uts),
            _ if IPC.contains(&name) || name.starts_with("fs.mqueue.") => Some(Self::Ipc),
            _ if name.starts_with("net.") => Some(Self::Net),
            _ if name.starts_with("user.") => Some(Self::User),
            _ => None,
        }
    }
}
