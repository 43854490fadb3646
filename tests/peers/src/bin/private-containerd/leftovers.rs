//! Removes the resources of runtimes whose supervisor was killed.
//!
//! Such a runtime is found by its bridge. A supervisor reserves the bridge's network, and the kernel releases the
//! reservation when the process ends: a runtime whose network cannot be reserved has a supervisor, and is left as it is.

use std::fs;
use std::net::Ipv4Addr;

use keblet_peers::Cache;

use crate::config::BRIDGE_PREFIX;
use crate::config::Layout;
use crate::host_resources::HostResources;
use crate::network;

/// Removes the resources of runtimes in the temporary folder without a supervisor. What cannot be removed is reported, and
/// keeps no other runtime from starting.
pub(crate) async fn remove(cache: &Cache) {
    let routes = fs::read_to_string("/proc/net/route").unwrap_or_default();
    for (id, network) in bridges(&routes) {
        let Some(layout) = Layout::without_supervisor(&id, network) else { continue };
        let mut failures = HostResources::of(&layout).remove().await;
        // Last: the other resources are found by the bridge.
        failures.extend(network::remove(&layout, cache).await.err().map(|error| format!("{error:#}")));
        for failure in failures {
            eprintln!("private-containerd: left behind by a runtime that was killed: {failure}");
        }
    }
}

/// Ids and networks of the runtimes that have a bridge, by `/proc/net/route`.
fn bridges(routes: &str) -> Vec<(String, (u8, u8))> {
    let bridge = |line: &str| {
        let mut words = line.split_whitespace();
        let id = words.next()?.strip_prefix(BRIDGE_PREFIX)?;
        // In the order of bytes in memory.
        let destination = Ipv4Addr::from(u32::from_str_radix(words.next()?, 16).ok()?.to_ne_bytes());
        // Another program's bridge may have such a name.
        let is_id = id.len() == 6 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        match destination.octets() {
            [10, a @ 64..128, b, 0] if is_id => Some((id.to_owned(), (a, b))),
            _ => None,
        }
    };
    routes.lines().filter_map(bridge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bridges_are_those_of_private_runtimes() {
        let routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
                      eth0\t0007400A\t0100A8C0\t0003\t0\t0\t0\t00FFFFFF\n\
                      keb-0000ab\t0008400A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n\
                      keb-0000cd\t00000000\t0108400A\t0003\t0\t0\t0\t00000000\n\
                      keb-0000ef\t0008010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n\
                      keb-office\t0009400A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n";
        assert_eq!(bridges(routes), [("0000ab".to_owned(), (64, 8))]);
    }
}
