//! Reads default routes and the node's name in DNS.

use std::fs;
use std::net::IpAddr;
use std::time::Duration;

use nix::net::if_::InterfaceFlags;

use super::addresses::AddressConfig;
use super::addresses::Network;
use super::interfaces::Interface;

/// Deadline of the DNS lookup, so that it does not delay heartbeats.
const LOOKUP_LIMIT: Duration = Duration::from_secs(5);

/// The network with these interfaces. DNS is used only if needed. Cancel-safe.
pub(super) async fn read(config: &AddressConfig, interfaces: &[Interface]) -> Network {
    let local = interfaces.iter().map(|interface| interface.ip).collect();
    if !config.needs_lookup() {
        return Network { local, resolved: Ok(Vec::new()), default_route: Vec::new() };
    }
    let name = &config.node_name;
    let resolved = match tokio::time::timeout(LOOKUP_LIMIT, tokio::net::lookup_host((name.as_str(), 0))).await {
        Ok(Ok(found)) => Ok(found.map(|socket| socket.ip()).collect()),
        Ok(Err(error)) => Err(format!("lookup {name}: {error}")),
        Err(_) => Err(format!("lookup {name}: no answer within {LOOKUP_LIMIT:?}")),
    };
    Network { local, resolved, default_route: default_route(interfaces) }
}

/// The files are made by the kernel: reading them waits for no disk.
fn default_route(interfaces: &[Interface]) -> Vec<IpAddr> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (v4, v6) = (read("/proc/net/route"), read("/proc/net/ipv6_route"));
    let v4 = default_devices_v4(&v4).into_iter().filter_map(|device| address_of(interfaces, device, false));
    let v6 = default_devices_v6(&v6).into_iter().filter_map(|device| address_of(interfaces, device, true));
    v4.chain(v6).collect()
}

/// The address of the interface of a default route. Where the network has only link-local addresses (RFC 5549), that of the
/// node is on the loopback interface.
fn address_of(interfaces: &[Interface], device: &str, v6: bool) -> Option<IpAddr> {
    let global = || interfaces.iter().filter(move |interface| interface.is_global(v6));
    let own = global().find(|interface| interface.name == device);
    let loopback = || global().find(|interface| interface.flags.contains(InterfaceFlags::IFF_LOOPBACK));
    own.or_else(loopback).map(|interface| interface.ip)
}

/// Devices of IPv4 routes to everywhere that are up: `Iface Destination Gateway Flags … Mask`, all in hex. A route that
/// rejects packets has the device `*`.
fn default_devices_v4(table: &str) -> Vec<&str> {
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let up = u32::from_str_radix(fields.get(3)?, 16).ok()? & 1 != 0;
            let everywhere = fields.get(1) == Some(&"00000000") && fields.get(7) == Some(&"00000000");
            (everywhere && up && fields[0] != "*").then(|| fields[0])
        })
        .collect()
}

/// The same for IPv6: destination and prefix length first, flags and device last.
fn default_devices_v6(table: &str) -> Vec<&str> {
    let everywhere = "0".repeat(32);
    table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let flags = u32::from_str_radix(fields.get(8)?, 16).ok()?;
            let up = flags & 1 != 0 && flags & 0x200 == 0;
            let device = *fields.get(9)?;
            (fields[0] == everywhere && fields[1] == "00" && up && device != "lo").then_some(device)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::interfaces::Interfaces;
    use super::*;

    #[test]
    fn default_routes_are_found() {
        let v4 = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                  eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                  eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
                  eth1\t00000000\t0100000B\t0002\t0\t0\t0\t00000000\t0\t0\t0\n\
                  *\t00000000\t00000000\t0201\t0\t0\t0\t00000000\t0\t0\t0\n";
        assert_eq!(default_devices_v4(v4), ["eth0"]);
        let zero = "0".repeat(32);
        let v6 = format!(
            "{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n\
             fe80000000000000000000000000000 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001 eth0\n\
             {zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo\n"
        );
        assert_eq!(default_devices_v6(&v6), ["eth0"]);
        assert!(default_devices_v4("").is_empty());
    }

    #[test]
    fn a_route_over_link_local_addresses_leads_to_the_address_of_the_loopback_interface() {
        let interface = |name: &str, ip: &str, flags: InterfaceFlags| Interface {
            name: name.to_owned(),
            ip: ip.parse().expect("an address"),
            flags,
        };
        let (up, lo) = (InterfaceFlags::IFF_UP, InterfaceFlags::IFF_UP | InterfaceFlags::IFF_LOOPBACK);
        let mut all = vec![
            interface("lo", "127.0.0.1", lo),
            interface("lo", "10.1.1.1", lo),
            interface("lo", "2001:db8::1", lo),
            interface("eth0", "fe80::1", up),
            interface("eth1", "192.0.2.9", InterfaceFlags::empty()),
        ];
        let found = |all: &[Interface], device: &str, v6: bool| address_of(all, device, v6).map(|ip| ip.to_string());
        assert_eq!(found(&all, "eth0", false).as_deref(), Some("10.1.1.1"));
        assert_eq!(found(&all, "eth0", true).as_deref(), Some("2001:db8::1"));
        assert_eq!(found(&all, "eth1", false).as_deref(), Some("10.1.1.1"), "it is down");
        all.push(interface("eth0", "192.0.2.1", up));
        assert_eq!(found(&all, "eth0", false).as_deref(), Some("192.0.2.1"));
    }

    #[tokio::test]
    async fn reads_the_loopback_interface() {
        let config = AddressConfig { node_name: "localhost".to_owned(), ..AddressConfig::default() };
        let interfaces = Interfaces::new().read();
        let network = read(&config, &interfaces).await;
        assert!(network.local.iter().any(IpAddr::is_loopback));
        assert!(network.resolved.is_ok_and(|ips| ips.iter().all(IpAddr::is_loopback)));
        let fixed = AddressConfig { node_ips: vec!["192.0.2.1".parse().expect("an address")], ..config };
        assert_eq!(read(&fixed, &interfaces).await.resolved, Ok(Vec::new()), "no lookup");
    }
}
