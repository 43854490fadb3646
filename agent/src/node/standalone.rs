//! A node without a cluster: it has addresses, and a range for its pods.

use std::sync::Arc;

use tokio::sync::watch;

use super::addresses;
use super::addresses::AddressUpdate;
use super::config::NodeConfig;
use super::host::Host;
use crate::status::NodeAddresses;

/// Hands the configured `podCIDR` to the runtime, and publishes the node's addresses, once.
pub async fn standalone(config: Arc<NodeConfig>, host: impl Host, addresses: watch::Sender<NodeAddresses>) {
    match addresses::addresses(&config.addresses, &host.network().await, &[]) {
        Ok(AddressUpdate::Replace(list)) => {
            addresses.send_replace(NodeAddresses { ips: addresses::host_ips(&list) });
        }
        Ok(AddressUpdate::Keep) => {}
        Err(error) => tracing::warn!(node = config.name, %error, "this node does not know its addresses"),
    }
    if config.pod_cidr.is_empty() {
        return;
    }
    if let Err(error) = host.set_pod_cidr(&config.pod_cidr).await {
        tracing::warn!(cidr = config.pod_cidr, error, "the runtime does not take the addresses of pods");
    }
}
