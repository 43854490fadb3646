//! Which addresses of a pod are shown. Pure.

use std::net::IpAddr;

/// The first address of the primary family (IPv6 if that is preferred, else IPv4), then the first of the other, in canonical
/// text. A runtime may report any number of them, in any order.
pub fn one_per_family(ips: &[String], prefers_v6: bool) -> Vec<String> {
    let parsed: Vec<IpAddr> = ips.iter().filter_map(|ip| ip.parse().ok()).collect();
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
}
