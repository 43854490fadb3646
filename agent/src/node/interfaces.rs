//! The addresses of all interfaces, read again when the kernel has reported a change. A node has an interface for each pod,
//! so that reading them with each heartbeat would be much of what an idle agent does.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::AddressFamily;
use nix::sys::socket::MsgFlags;
use nix::sys::socket::NetlinkAddr;
use nix::sys::socket::SockFlag;
use nix::sys::socket::SockProtocol;
use nix::sys::socket::SockType;
use nix::sys::socket::bind;
use nix::sys::socket::recv;
use nix::sys::socket::setsockopt;
use nix::sys::socket::socket;
use nix::sys::socket::sockopt;
use tokio::time::Instant;

/// How long they are not read again without a reported change: the safety net.
const MAX_AGE: Duration = Duration::from_secs(300);
/// Room for messages, in bytes: the kernel raises it to its minimum. One message says as much as all that get lost.
const RECEIVE_BUFFER: usize = 1;

/// An address of an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) ip: IpAddr,
    pub(super) flags: InterfaceFlags,
}

impl Interface {
    /// An address of this family that other machines can reach.
    pub(super) fn is_global(&self, v6: bool) -> bool {
        let is_global = match self.ip {
            IpAddr::V4(ip) => !v6 && !ip.is_loopback() && !ip.is_link_local(),
            IpAddr::V6(ip) => v6 && !ip.is_loopback() && !ip.is_unicast_link_local(),
        };
        is_global && self.flags.contains(InterfaceFlags::IFF_UP)
    }
}

/// The interfaces of the network namespace in which this was made.
#[derive(Debug)]
pub(super) struct Interfaces {
    /// `None`: the kernel reports no changes to this process.
    changes: Option<Changes>,
    known: Option<(Instant, Arc<[Interface]>)>,
}

impl Interfaces {
    /// Reads nothing yet.
    pub(super) fn new() -> Self {
        let changes = Changes::subscribe().inspect_err(|error| {
            tracing::debug!(%error, "the kernel reports no changes of interfaces: they are read with each heartbeat");
        });
        Self { changes: changes.ok(), known: None }
    }

    /// All addresses of all interfaces, whether these are up or not. Does not block. What cannot be read is missing, and is
    /// tried again with the next call.
    pub(super) fn read(&mut self) -> Arc<[Interface]> {
        // Taken before reading, so that a change meanwhile is not missed.
        let changed = self.changes.as_ref().is_none_or(Changes::take);
        let now = Instant::now();
        let is_valid = |read: Instant| !changed && now.saturating_duration_since(read) < MAX_AGE;
        if let Some((_, known)) = self.known.as_ref().filter(|(read, _)| is_valid(*read)) {
            return known.clone();
        }
        let found = addresses().map(Arc::from);
        self.known = found.as_ref().ok().map(|found: &Arc<[Interface]>| (now, found.clone()));
        found.unwrap_or_else(|_| Arc::from([]))
    }
}

fn addresses() -> nix::Result<Vec<Interface>> {
    let address = |entry: nix::ifaddrs::InterfaceAddress| {
        let storage = entry.address?;
        let v4 = storage.as_sockaddr_in().map(|socket| IpAddr::V4(socket.ip()));
        let ip = v4.or_else(|| storage.as_sockaddr_in6().map(|socket| IpAddr::V6(socket.ip())))?;
        Some(Interface { name: entry.interface_name, ip, flags: entry.flags })
    };
    Ok(getifaddrs()?.filter_map(address).collect())
}

/// Messages of the kernel about interfaces and their addresses: rtnetlink(7).
#[derive(Debug)]
struct Changes(OwnedFd);

impl Changes {
    /// # Errors
    /// There is no such socket, as in a sandbox of system calls.
    fn subscribe() -> io::Result<Self> {
        const GROUPS: libc::c_int = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUPS.cast_unsigned()))?;
        Ok(Self(socket))
    }

    /// Whether there was one since the last call; true if that is not known.
    fn take(&self) -> bool {
        let mut message = [0; 4096];
        let mut changed = false;
        loop {
            match recv(self.0.as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT) {
                // Cut off where it does not fit: its content is not used.
                Ok(length) if length > 0 => changed = true,
                // Messages were lost.
                Err(Errno::ENOBUFS) => changed = true,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return changed,
                Ok(_) | Err(_) => return true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sched::CloneFlags;
    use nix::sched::unshare;

    use super::*;

    fn ip(arguments: &[&str]) {
        let status = Command::new("ip").args(arguments).status().expect("iproute2");
        assert!(status.success(), "ip {arguments:?}: {status}");
    }

    fn ips(interfaces: &[Interface]) -> Vec<String> {
        interfaces.iter().map(|interface| interface.ip.to_string()).filter(|ip| ip != "::1").collect()
    }

    /// In a network namespace of its own.
    #[test]
    fn interfaces_are_read_again_after_a_change_only() {
        if !keblet_skip::is_root("make a network namespace") {
            return;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
                let mut interfaces = Interfaces::new();
                assert_eq!(ips(&interfaces.read()), [""; 0]);
                ip(&["link", "set", "lo", "up"]);
                let first = interfaces.read();
                assert_eq!(ips(&first), ["127.0.0.1"]);
                assert!(Arc::ptr_eq(&interfaces.read(), &first), "nothing has changed");
                ip(&["address", "add", "192.0.2.1/32", "dev", "lo"]);
                assert_eq!(ips(&interfaces.read()), ["127.0.0.1", "192.0.2.1"]);
                // More messages than there is room for.
                for last in 2..40 {
                    ip(&["address", "add", &format!("192.0.2.{last}/32"), "dev", "lo"]);
                }
                assert_eq!(interfaces.read().iter().filter(|interface| interface.ip.is_ipv4()).count(), 40);
                ip(&["link", "set", "lo", "down"]);
                assert!(!interfaces.read().iter().any(|interface| interface.flags.contains(InterfaceFlags::IFF_UP)));
            });
        });
    }

    #[tokio::test(start_paused = true)]
    async fn interfaces_are_read_again_after_some_minutes() {
        let mut interfaces = Interfaces::new();
        let stale: Arc<[Interface]> = Arc::from([]);
        interfaces.changes.as_ref().expect("a socket").take();
        interfaces.known = Some((Instant::now(), stale.clone()));
        tokio::time::advance(MAX_AGE).await;
        let found = interfaces.read();
        assert!(!Arc::ptr_eq(&found, &stale) && found.iter().any(|interface| interface.ip.is_loopback()));
    }

    #[test]
    fn without_reports_they_are_read_each_time() {
        let mut interfaces = Interfaces { changes: None, known: None };
        let first = interfaces.read();
        assert!(!Arc::ptr_eq(&interfaces.read(), &first));
    }
}
