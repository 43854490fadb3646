//! Which addresses the node gives itself. Pure: interfaces and the answers of DNS are arguments.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::NodeAddress;

/// What flags and names say.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AddressConfig {
    /// Name of the node, which is also its host name for others.
    pub node_name: String,
    /// `--node-ip`, as far as it can be read.
    pub node_ips: Vec<IpAddr>,
    /// `--cloud-provider=external`: others know the addresses better.
    pub external_cloud: bool,
}

/// What the network says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Network {
    /// Addresses of the interfaces.
    pub local: Vec<IpAddr>,
    /// What DNS has for the node's name; why it has nothing.
    pub resolved: Result<Vec<IpAddr>, String>,
    /// Addresses of the interfaces that default routes go through, best first.
    pub default_route: Vec<IpAddr>,
}

impl Default for Network {
    /// No interface, no route, no name.
    fn default() -> Self {
        Self { local: Vec::new(), resolved: Ok(Vec::new()), default_route: Vec::new() }
    }
}

/// No address can be given.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressError {
    /// The first `--node-ip` is not one of this node.
    #[error("failed to validate nodeIP: {0}")]
    First(#[source] Invalid),
    /// The second one is not.
    #[error("failed to validate secondaryNodeIP: {0}")]
    Second(#[source] Invalid),
    /// Nothing was configured, and nothing was found.
    #[error("can't get ip address of node {node}. error: {reason}")]
    NotFound {
        /// Name of the node.
        node: String,
        /// Why.
        reason: String,
    },
}

/// Why an address cannot be the node's.
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

/// What to do with the addresses of the Node.
#[derive(Clone, PartialEq, Debug)]
pub enum AddressUpdate {
    /// They are somebody else's.
    Keep,
    /// They are these.
    Replace(Vec<NodeAddress>),
}

impl AddressConfig {
    /// From `--node-ip`: entries that are no addresses are left out.
    pub fn parse_node_ips(flag: &str) -> Vec<IpAddr> {
        flag.split(',').filter_map(|entry| entry.trim().parse().ok()).collect()
    }

    /// The addresses the flag fixes: at most one of each family, none if it only chooses the family.
    fn specified(&self) -> Option<&[IpAddr]> {
        Some(self.node_ips.as_slice()).filter(|ips| ips.first().is_some_and(|ip| !ip.is_unspecified()))
    }

    fn prefers_v6(&self) -> bool {
        self.node_ips.first().is_some_and(IpAddr::is_ipv6)
    }

    /// Name lookup and routes are asked only if neither flag nor name says it all.
    pub fn needs_lookup(&self) -> bool {
        let own_name = self.node_name.parse::<IpAddr>().is_ok();
        self.specified().is_none() && !own_name && !(self.external_cloud && self.node_ips.is_empty())
    }

    /// Value of the annotation `alpha.kubernetes.io/provided-node-ip`; `None` where it must not be.
    pub fn provided_node_ip(&self) -> Option<String> {
        let ips = self.specified().filter(|_| self.external_cloud)?;
        Some(ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
    }
}

/// The node's addresses. `known` are those the Node has.
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

/// The name itself, if it is an address; what DNS has for it; where the default route leaves.
fn find(config: &AddressConfig, network: &Network) -> Result<IpAddr, AddressError> {
    if let Ok(ip) = config.node_name.parse() {
        return Ok(ip);
    }
    let preferred = |ip: &IpAddr| ip.is_ipv6() == config.prefers_v6();
    let resolved: Vec<IpAddr> = network.resolved.iter().flatten().copied().collect();
    let valid: Vec<IpAddr> = resolved.into_iter().filter(|ip| validate(ip, network).is_ok()).collect();
    let from_dns = valid.iter().find(|ip| preferred(ip)).or(valid.first());
    let routes = &network.default_route;
    let from_route = || match config.node_ips.first() {
        // An unspecified address asks for its family.
        Some(_) => routes.iter().find(|ip| preferred(ip)),
        None => routes.iter().find(|ip| preferred(ip)).or(routes.first()),
    };
    from_dns.or_else(from_route).copied().ok_or_else(|| AddressError::NotFound {
        node: config.node_name.clone(),
        reason: match &network.resolved {
            Err(error) => format!("{error}; no default routes found"),
            Ok(_) => "no default routes found".to_owned(),
        },
    })
}

/// May this be the address of the node?
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

/// The addresses others reach pods of the node's network by: at most one of each family, the primary one first.
pub fn host_ips(addresses: &[NodeAddress]) -> Vec<String> {
    let ips = |kind: &'static str| addresses.iter().filter(move |a| a.type_ == kind).map(|a| a.address.as_str());
    let mut chosen: Vec<IpAddr> = Vec::new();
    for ip in ips("InternalIP").chain(ips("ExternalIP")).filter_map(|ip| ip.parse::<IpAddr>().ok()) {
        if chosen.iter().all(|known| known.is_ipv6() != ip.is_ipv6()) {
            chosen.push(ip);
        }
    }
    chosen.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
#[path = "addresses_tests.rs"]
mod tests;
