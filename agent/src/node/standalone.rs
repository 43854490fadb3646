//! A node without an API server: addresses, and `podCIDR`.

use std::sync::Arc;

use tokio::sync::watch;

use super::addresses;
use super::addresses::AddressUpdate;
use super::config::NodeConfig;
use super::host::Host;
use crate::status::NodeAddresses;

/// Sets the configured `podCIDR` in the runtime and publishes the node's addresses, once.
pub async fn standalone(config: Arc<NodeConfig>, host: impl Host, addresses: watch::Sender<NodeAddresses>) {
    match addresses::addresses(&config.addresses, &host.network().await, &[]) {
        Ok(AddressUpdate::Replace(list)) => {
            addresses.send_replace(NodeAddresses { ips: addresses::host_ips(&list) });
        }
        Ok(AddressUpdate::Keep) => {}
        Err(error) => tracing::warn!(node = config.name, %error, "cannot determine the addresses of this node"),
    }
    if config.pod_cidr.is_empty() {
        return;
    }
    if let Err(error) = host.set_pod_cidr(&config.pod_cidr).await {
        tracing::warn!(cidr = config.pod_cidr, error, "cannot set the pod CIDR of the runtime");
    }
}
