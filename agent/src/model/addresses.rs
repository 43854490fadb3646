//! Addresses that a runtime or a cloud provider reports, and which of them are in the status of a pod. Pure.

use std::net::IpAddr;

/// The address that `text` has, as upstream parses `--node-ip` and what runtimes and cloud providers report: numbers with
/// leading zeros are decimal, and an IPv4 address that is mapped to IPv6 is one of IPv4.
pub fn parse_reported_ip(text: &str) -> Option<IpAddr> {
    let parsed = text.parse::<IpAddr>().or_else(|_| without_leading_zeros(text).parse());
    parsed.ok().map(|ip| ip.to_canonical())
}

fn without_leading_zeros(text: &str) -> String {
    let significant = |part: &str| match part.trim_start_matches('0') {
        "" if !part.is_empty() => "0".to_owned(),
        digits => digits.to_owned(),
    };
    text.split('.').map(significant).collect::<Vec<_>>().join(".")
}

/// The first address of the primary family (IPv6 if that is preferred, else IPv4), then the first of the other, in canonical
/// text. A runtime may report any number of them, in any order.
pub fn one_per_family(ips: &[String], prefers_v6: bool) -> Vec<String> {
    let parsed: Vec<IpAddr> = ips.iter().filter_map(|ip| parse_reported_ip(ip)).collect();
    let first = |v6: bool| parsed.iter().find(|ip| ip.is_ipv6() == v6).map(ToString::to_string);
    [first(prefers_v6), first(!prefers_v6)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preferred_family_comes_first() {
        let reported = ["10.0.0.5", "none", "10.0.0.6", "FD00::0:5"].map(str::to_owned);
        for (prefers_v6, expected) in [(false, ["10.0.0.5", "fd00::5"]), (true, ["fd00::5", "10.0.0.5"])] {
            assert_eq!(one_per_family(&reported, prefers_v6), expected, "{prefers_v6}");
        }
        assert_eq!(one_per_family(&reported[..1], true), ["10.0.0.5"]);
    }

    #[test]
    fn irregular_texts_are_addresses_too() {
        let reported = ["010.000.000.001", "fd01:0:0:0:0:0:0:1234"].map(str::to_owned);
        assert_eq!(one_per_family(&reported, false), ["10.0.0.1", "fd01::1234"]);
        for (text, expected) in [
            ("192.168.001.010", Some("192.168.1.10")),
            ("::ffff:10.0.0.5", Some("10.0.0.5")),
            ("010.000.000", None),
            ("010..000.001", None),
            ("0x10.0.0.1", None),
            ("", None),
        ] {
            assert_eq!(parse_reported_ip(text).map(|ip| ip.to_string()).as_deref(), expected, "{text:?}");
        }
    }
}
