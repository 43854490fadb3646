//! The table of address rules.

use proptest::prelude::*;

use super::*;

const LOCAL: [&str; 5] = ["127.0.0.1", "10.0.0.5", "192.0.2.1", "fe80::1", "2001:db8::5"];

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().expect("an address")).collect()
}

fn network(resolved: &[&str], route: &[&str]) -> Network {
    Network { local: ips(&LOCAL), resolved: Ok(ips(resolved)), default_route: ips(route) }
}

fn config(name: &str, node_ip: &str, external: bool) -> AddressConfig {
    AddressConfig {
        node_name: name.to_owned(),
        node_ips: AddressConfig::parse_node_ips(node_ip),
        external_cloud: external,
    }
}

/// `kind address` of each, or `keep`, or the error.
fn outcome(config: &AddressConfig, network: &Network, known: &[NodeAddress]) -> Vec<String> {
    match addresses(config, network, known) {
        Ok(AddressUpdate::Keep) => vec!["keep".to_owned()],
        Ok(AddressUpdate::Replace(list)) => list.into_iter().map(|a| format!("{} {}", a.type_, a.address)).collect(),
        Err(error) => vec![error.to_string()],
    }
}

#[test]
fn rules_in_order() {
    let plain = network(&["10.0.0.5"], &["192.0.2.1"]);
    let nothing = Network { local: ips(&LOCAL), resolved: Err("no such host".to_owned()), ..Network::default() };
    let both = network(&["2001:db8::5", "10.0.0.5"], &["192.0.2.1", "2001:db8::5"]);
    let unreachable = network(&["127.0.0.1", "198.51.100.9"], &["192.0.2.1", "2001:db8::5"]);
    let one_family = network(&[], &["192.0.2.1"]);
    let table: [(&str, &str, bool, &Network, &[&str]); 22] = [
        ("n", "192.0.2.1", false, &plain, &["InternalIP 192.0.2.1", "Hostname n"]),
        ("n", "192.000.002.001", false, &plain, &["InternalIP 192.0.2.1", "Hostname n"]),
        ("n", "::ffff:192.0.2.1", false, &plain, &["InternalIP 192.0.2.1", "Hostname n"]),
        ("n", "10.0.0.5, 2001:db8::5", false, &plain, &["InternalIP 10.0.0.5", "InternalIP 2001:db8::5", "Hostname n"]),
        ("n", "2001:db8::5,10.0.0.5", false, &plain, &["InternalIP 2001:db8::5", "InternalIP 10.0.0.5", "Hostname n"]),
        ("n", "", false, &plain, &["InternalIP 10.0.0.5", "Hostname n"]),
        ("n", "0.0.0.0", false, &both, &["InternalIP 10.0.0.5", "Hostname n"]),
        ("n", "", false, &both, &["InternalIP 10.0.0.5", "Hostname n"]),
        ("n", "::", false, &both, &["InternalIP 2001:db8::5", "Hostname n"]),
        ("n", "::", false, &plain, &["InternalIP 10.0.0.5", "Hostname n"]),
        ("n", "", false, &unreachable, &["InternalIP 192.0.2.1", "Hostname n"]),
        ("n", "::", false, &unreachable, &["InternalIP 2001:db8::5", "Hostname n"]),
        ("n", "::", false, &one_family, &["InternalIP 192.0.2.1", "Hostname n"]),
        ("203.0.113.7", "", false, &nothing, &["InternalIP 203.0.113.7", "Hostname 203.0.113.7"]),
        ("n", "", false, &nothing, &["can't get ip address of node n. error: no such host; no default routes found"]),
        ("n", "127.0.0.1", false, &plain, &["failed to validate nodeIP: nodeIP can't be loopback address"]),
        (
            "n",
            "198.51.100.9",
            false,
            &plain,
            &["failed to validate nodeIP: node IP: \"198.51.100.9\" not found in the host's network interfaces"],
        ),
        (
            "n",
            "10.0.0.5,fe80::1",
            false,
            &plain,
            &["failed to validate secondaryNodeIP: nodeIP can't be a link-local unicast address"],
        ),
        ("n", "nonsense", false, &plain, &["InternalIP 10.0.0.5", "Hostname n"]),
        ("n", "", true, &plain, &["Hostname n"]),
        ("n", "192.0.2.1", true, &plain, &["InternalIP 192.0.2.1", "Hostname n"]),
        ("n", "0.0.0.0", true, &plain, &["InternalIP 10.0.0.5", "Hostname n"]),
    ];
    for (name, node_ip, external, network, expected) in table {
        assert_eq!(outcome(&config(name, node_ip, external), network, &[]), expected, "--node-ip={node_ip} {external}");
    }
}

#[test]
fn addresses_of_an_external_cloud_are_kept() {
    let known = [NodeAddress { type_: "ExternalIP".to_owned(), address: "203.0.113.7".to_owned() }];
    for node_ip in ["", "192.0.2.1", "0.0.0.0"] {
        assert_eq!(outcome(&config("n", node_ip, true), &network(&[], &[]), &known), ["keep"]);
        assert_ne!(outcome(&config("n", node_ip, false), &network(&["10.0.0.5"], &[]), &known), ["keep"]);
    }
    let wrong = outcome(&config("n", "127.0.0.1", true), &network(&[], &[]), &known);
    assert!(wrong[0].starts_with("failed to validate nodeIP"), "checked even then: {wrong:?}");
}

#[test]
fn the_annotation_is_set_with_external_clouds_only() {
    let table = [
        ("192.0.2.1", true, Some("192.0.2.1")),
        ("10.0.0.5,2001:db8::5", true, Some("10.0.0.5,2001:db8::5")),
        ("0.0.0.0", true, None),
        ("", true, None),
        ("192.0.2.1", false, None),
    ];
    for (node_ip, external, expected) in table {
        assert_eq!(config("n", node_ip, external).provided_node_ip().as_deref(), expected, "{node_ip} {external}");
    }
}

#[test]
fn names_are_resolved_only_if_needed() {
    let table = [
        ("n", "", false, true),
        ("n", "0.0.0.0", true, true),
        ("n", "", true, false),
        ("n", "192.0.2.1", false, false),
        ("192.0.2.1", "", false, false),
    ];
    for (name, node_ip, external, expected) in table {
        assert_eq!(config(name, node_ip, external).needs_lookup(), expected, "{name} {node_ip} {external}");
    }
}

#[test]
fn host_ips_are_one_per_family() {
    let address = |type_: &str, address: &str| NodeAddress { type_: type_.to_owned(), address: address.to_owned() };
    let all = [
        address("Hostname", "n"),
        address("ExternalIP", "203.0.113.7"),
        address("InternalIP", "2001:db8::5"),
        address("InternalIP", "2001:db8::6"),
    ];
    assert_eq!(host_ips(&all), ["2001:db8::5", "203.0.113.7"]);
    assert!(host_ips(&all[..1]).is_empty());
    assert_eq!(host_ips(&[address("InternalIP", "010.000.000.001")]), ["10.0.0.1"], "as the pods' addresses are read");
}

proptest! {
    /// The name comes last, and every address is valid.
    #[test]
    fn addresses_are_valid(flag in prop::sample::subsequence(LOCAL.to_vec(), 0..=2), resolved in prop::sample::subsequence(LOCAL.to_vec(), 0..=5)) {
        let network = network(&resolved, &["10.0.0.5"]);
        let config = config("n", &flag.join(","), false);
        if let Ok(AddressUpdate::Replace(list)) = addresses(&config, &network, &[]) {
            prop_assert_eq!(list.last().map(|a| a.type_.as_str()), Some("Hostname"));
            for address in &list[..list.len() - 1] {
                let ip: IpAddr = address.address.parse().expect("an address");
                prop_assert_eq!(validate(&ip, &network), Ok(()));
            }
        }
    }
}
