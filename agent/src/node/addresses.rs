//! Addresses of the Node. Pure: interfaces and results of DNS are arguments.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::NodeAddress;

use crate::model::parse_reported_ip;

/// Configured addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AddressConfig {
    /// Name of the node, which is also its `Hostname` address.
    pub node_name: String,
    /// Valid entries of `--node-ip`.
    pub node_ips: Vec<IpAddr>,
    /// `--cloud-provider=external`: the cloud controller manager sets the addresses.
    pub external_cloud: bool,
}

/// Addresses of the network.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Network {
    /// Addresses of the interfaces.
    pub local: Vec<IpAddr>,
    /// Result of the DNS lookup of the node's name.
    pub resolved: Result<Vec<IpAddr>, String>,
    /// Addresses of the interfaces of default routes, best first.
    pub default_route: Vec<IpAddr>,
}

impl Default for Network {
    /// No interface, route or name.
    fn default() -> Self {
        Self { local: Vec::new(), resolved: Ok(Vec::new()), default_route: Vec::new() }
    }
}

/// The node has no valid address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressError {
    /// The first `--node-ip` is not an address of this node.
    #[error("failed to validate nodeIP: {0}")]
    First(#[source] Invalid),
    /// The second `--node-ip` is not an address of this node.
    #[error("failed to validate secondaryNodeIP: {0}")]
    Second(#[source] Invalid),
    /// No address is configured or found.
    #[error("can't get ip address of node {node}. error: {reason}")]
    NotFound {
        /// Name of the node.
        node: String,
        /// The cause.
        reason: String,
    },
}

/// Why an address is not valid for the node.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    /// `127.0.0.1` and the like.
    #[error("nodeIP can't be loopback address")]
    Loopback,
    /// A multicast address.
    #[error("nodeIP can't be a multicast address")]
    Multicast,
    /// Valid on one link only.
    #[error("nodeIP can't be a link-local unicast address")]
    LinkLocal,
    /// `0.0.0.0` or `::`.
    #[error("nodeIP can't be an all zeros address")]
    Unspecified,
    /// No interface has it.
    #[error("node IP: {0:?} not found in the host's network interfaces")]
    NotHere(String),
}

/// Update of the addresses of the Node.
#[derive(Clone, PartialEq, Debug)]
pub enum AddressUpdate {
    /// Leave the addresses, which the cloud controller manager set.
    Keep,
    /// Set these addresses.
    Replace(Vec<NodeAddress>),
}

impl AddressConfig {
    /// Parses `--node-ip`; invalid entries are omitted.
    pub fn parse_node_ips(flag: &str) -> Vec<IpAddr> {
        flag.split(',').filter_map(|entry| parse_reported_ip(entry.trim())).collect()
    }

    /// The addresses of the flag: at most one of each family, none if it only states which family is preferred.
    fn specified(&self) -> Option<&[IpAddr]> {
        Some(self.node_ips.as_slice()).filter(|ips| ips.first().is_some_and(|ip| !ip.is_unspecified()))
    }

    /// The flag begins with an IPv6 address, which may be the unspecified one.
    pub fn prefers_v6(&self) -> bool {
        self.node_ips.first().is_some_and(IpAddr::is_ipv6)
    }

    /// DNS and routes are needed: neither flag nor name determine the address.
    pub fn needs_lookup(&self) -> bool {
        let own_name = self.node_name.parse::<IpAddr>().is_ok();
        self.specified().is_none() && !own_name && !(self.external_cloud && self.node_ips.is_empty())
    }

    /// Value of the annotation `alpha.kubernetes.io/provided-node-ip`; `None` if it must be absent.
    pub fn provided_node_ip(&self) -> Option<String> {
        let ips = self.specified().filter(|_| self.external_cloud)?;
        Some(ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
    }
}

/// The node's addresses. `known` are those of the Node object.
///
/// # Errors
/// If the configured addresses are not this node's, or none was found.
pub fn addresses(
    config: &AddressConfig,
    network: &Network,
    known: &[NodeAddress],
) -> Result<AddressUpdate, AddressError> {
    let fixed = config.specified().unwrap_or_default();
    if let Some(first) = fixed.first() {
        validate(first, network).map_err(AddressError::First)?;
    }
    if let Some(second) = fixed.get(1) {
        validate(second, network).map_err(AddressError::Second)?;
    }
    if config.external_cloud {
        if !known.is_empty() {
            return Ok(AddressUpdate::Keep);
        }
        if config.node_ips.is_empty() {
            return Ok(AddressUpdate::Replace(listed(&[], &config.node_name)));
        }
    }
    if !fixed.is_empty() {
        return Ok(AddressUpdate::Replace(listed(fixed, &config.node_name)));
    }
    let found = find(config, network)?;
    Ok(AddressUpdate::Replace(listed(&[found], &config.node_name)))
}

fn listed(ips: &[IpAddr], hostname: &str) -> Vec<NodeAddress> {
    let address = |type_: &str, address: String| NodeAddress { type_: type_.to_owned(), address };
    let internal = ips.iter().map(|ip| address("InternalIP", ip.to_string()));
    internal.chain([address("Hostname", hostname.to_owned())]).collect()
}

/// The name itself, if it is an address; else the result of DNS; else the address of the default route.
fn find(config: &AddressConfig, network: &Network) -> Result<IpAddr, AddressError> {
    if let Ok(ip) = config.node_name.parse() {
        return Ok(ip);
    }
    let preferred = |ip: &IpAddr| ip.is_ipv6() == config.prefers_v6();
    let resolved: Vec<IpAddr> = network.resolved.iter().flatten().copied().collect();
    let valid: Vec<IpAddr> = resolved.into_iter().filter(|ip| validate(ip, network).is_ok()).collect();
    let from_dns = valid.iter().find(|ip| preferred(ip)).or(valid.first());
    let routes = &network.default_route;
    let from_route = || routes.iter().find(|ip| preferred(ip)).or(routes.first());
    from_dns.or_else(from_route).copied().ok_or_else(|| AddressError::NotFound {
        node: config.node_name.clone(),
        reason: match &network.resolved {
            Err(error) => format!("{error}; no default routes found"),
            Ok(_) => "no default routes found".to_owned(),
        },
    })
}

/// Checks that an address is valid for the node.
fn validate(ip: &IpAddr, network: &Network) -> Result<(), Invalid> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    match ip {
        ip if ip.is_loopback() => Err(Invalid::Loopback),
        ip if ip.is_multicast() => Err(Invalid::Multicast),
        _ if link_local => Err(Invalid::LinkLocal),
        ip if ip.is_unspecified() => Err(Invalid::Unspecified),
        ip if !network.local.contains(ip) => Err(Invalid::NotHere(ip.to_string())),
        _ => Ok(()),
    }
}

/// `hostIPs` of pods: at most one address of each family, the primary one first.
pub fn host_ips(addresses: &[NodeAddress]) -> Vec<String> {
    let ips = |kind: &'static str| addresses.iter().filter(move |a| a.type_ == kind).map(|a| a.address.as_str());
    let mut chosen: Vec<IpAddr> = Vec::new();
    for ip in ips("InternalIP").chain(ips("ExternalIP")).filter_map(parse_reported_ip) {
        if chosen.iter().all(|known| known.is_ipv6() != ip.is_ipv6()) {
            chosen.push(ip);
        }
    }
    chosen.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
#[path = "addresses_tests.rs"]
mod tests;
