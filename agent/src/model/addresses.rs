//! Which addresses of a pod are shown. Pure.

use std::net::IpAddr;

/// The first address of the primary family (that of `node`, else IPv4), then the first of the other, in canonical text. A
/// runtime may report any number of them, in any order.
pub fn one_per_family(ips: &[String], node: Option<&str>) -> Vec<String> {
    let parse = |ip: &str| ip.parse::<IpAddr>().ok();
    let primary_is_v6 = node.and_then(parse).is_some_and(|ip| ip.is_ipv6());
    let parsed: Vec<IpAddr> = ips.iter().filter_map(|ip| parse(ip)).collect();
    let first = |v6: bool| parsed.iter().find(|ip| ip.is_ipv6() == v6).map(ToString::to_string);
    [first(primary_is_v6), first(!primary_is_v6)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_family_of_the_node_comes_first() {
        let reported = ["10.0.0.5", "none", "10.0.0.6", "FD00::0:5"].map(str::to_owned);
        for (node, expected) in [
            (None, ["10.0.0.5", "fd00::5"]),
            (Some("192.0.2.7"), ["10.0.0.5", "fd00::5"]),
            (Some("2001:db8::7"), ["fd00::5", "10.0.0.5"]),
        ] {
            assert_eq!(one_per_family(&reported, node), expected, "{node:?}");
        }
        assert_eq!(one_per_family(&reported[..1], Some("2001:db8::7")), ["10.0.0.5"]);
    }
}
