//! Traffic of network interfaces.

use std::io;
use std::path::Path;

use crate::kernel::read;

/// Interfaces whose traffic is counted at the other end.
const LEFT_OUT: [&str; 4] = ["lo", "veth", "docker", "nerdctl"];

/// Counters of one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceUsage {
    /// Such as `eth0`.
    pub name: String,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Packets received.
    pub rx_packets: u64,
    /// Failed receptions.
    pub rx_errors: u64,
    /// Received packets that were dropped.
    pub rx_dropped: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Failed transmissions.
    pub tx_errors: u64,
    /// Sent packets that were dropped.
    pub tx_dropped: u64,
}

/// The interfaces in the network namespace of a process (its folder in `/proc`), without loopback and the node's ends of
/// pods' interfaces.
///
/// # Errors
/// The process does not exist, or has more interfaces than fit in [`read::PROC_FILE_LIMIT`].
pub fn interfaces_of(process: &Path) -> io::Result<Vec<InterfaceUsage>> {
    Ok(parse(&read::text(&process.join("net/dev"), read::PROC_FILE_LIMIT)?))
}

fn parse(table: &str) -> Vec<InterfaceUsage> {
    let interface = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let numbers: Vec<u64> = rest.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect();
        let at = |index: usize| numbers.get(index).copied();
        Some(InterfaceUsage {
            name: name.trim().to_owned(),
            rx_bytes: at(0)?,
            rx_packets: at(1)?,
            rx_errors: at(2)?,
            rx_dropped: at(3)?,
            tx_bytes: at(8)?,
            tx_packets: at(9)?,
            tx_errors: at(10)?,
            tx_dropped: at(11)?,
        })
    };
    let is_left_out = |usage: &InterfaceUsage| LEFT_OUT.iter().any(|prefix| usage.name.starts_with(prefix));
    table.lines().skip(2).filter_map(interface).filter(|usage| !is_left_out(usage)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_table_of_the_kernel() {
        let table = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n \
            lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n  eth0: 100 2 3 6 0 0 0 0 200 4 5 7 0 0 0 0\n\
            veth1: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n";
        let eth0 = InterfaceUsage {
            name: "eth0".to_owned(),
            rx_bytes: 100,
            rx_packets: 2,
            rx_errors: 3,
            rx_dropped: 6,
            tx_bytes: 200,
            tx_packets: 4,
            tx_errors: 5,
            tx_dropped: 7,
        };
        assert_eq!(parse(table), [eth0]);
        assert!(interfaces_of(Path::new("/proc/self")).is_ok());
    }
}
