//! Free TCP ports for servers that a test starts later.

use std::fs;
use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::process;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;

/// Ports below it often belong to services of the machine.
const FIRST: u32 = 12_000;
/// Start of Linux's default range of ephemeral ports.
const DEFAULT_EPHEMERAL: u32 = 32_768;
/// Ports that a process tries before those of the next process begin.
const PER_PROCESS: u32 = 64;

/// A TCP port of 127.0.0.1 that is unused now, below the kernel's range of ephemeral ports. Each call of a process
/// returns another port.
///
/// A port of the ephemeral range can be taken by any outgoing connection until the server binds it. A client that waits
/// for the server on loopback can even connect to itself: the kernel chooses the port as the source of the connection,
/// which then holds it.
///
/// # Panics
/// No port is free.
pub fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let range = FIRST..first_ephemeral();
    let count = range.end - range.start;
    let first = process::id().wrapping_mul(PER_PROCESS) % count;
    let candidates = (0..count).map(|_| range.start + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % count);
    let mut ports = candidates.filter_map(|port| u16::try_from(port).ok());
    let free = ports.find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.unwrap_or_else(|| panic!("no port of 127.0.0.1 in {range:?} is free"))
}

/// Lowest ephemeral port; the default if the range starts too low to leave ports for servers.
fn first_ephemeral() -> u32 {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first = range.split_whitespace().next().and_then(|first| first.parse().ok());
    first.filter(|first| (FIRST + 1000..=65_535).contains(first)).unwrap_or(DEFAULT_EPHEMERAL)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ports_are_distinct_and_below_the_ephemeral_range() {
        let ports: Vec<u16> = (0..100).map(|_| free()).collect();
        assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), ports.len());
        assert!(ports.iter().all(|port| (FIRST..first_ephemeral()).contains(&u32::from(*port))), "{ports:?}");
    }

    #[test]
    fn a_port_in_use_is_not_returned() {
        let held: Vec<TcpListener> =
            (0..20).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, free())).expect("a free port")).collect();
        let used: Vec<u16> = held.iter().map(|listener| listener.local_addr().expect("an address").port()).collect();
        assert!((0..20).all(|_| !used.contains(&free())));
    }
}
