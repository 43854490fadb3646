//! A node without an API server: addresses, and `podCIDR`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::addresses;
use super::addresses::AddressUpdate;
use super::call::LONGEST_PAUSE;
use super::config::NodeConfig;
use super::host::Host;
use crate::model::Backoff;
use crate::status::NodeAddresses;

/// Pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Sets the configured `podCIDR` in the runtime and publishes the node's addresses. Each is tried until it succeeds: runtime
/// and network may be up later than the agent.
pub async fn standalone(config: Arc<NodeConfig>, host: impl Host, addresses: watch::Sender<NodeAddresses>) {
    tokio::join!(publish_addresses(&config, &host, &addresses), set_pod_cidr(&config, &host));
}

async fn publish_addresses(config: &NodeConfig, host: &impl Host, addresses: &watch::Sender<NodeAddresses>) {
    let (mut backoff, mut logged) = (Backoff::new(FIRST_PAUSE, LONGEST_PAUSE), None);
    loop {
        match addresses::addresses(&config.addresses, &host.network().await, &[]) {
            Ok(AddressUpdate::Replace(list)) => {
                let prefers_v6 = config.addresses.prefers_v6();
                addresses.send_replace(NodeAddresses { ips: addresses::host_ips(&list), prefers_v6 });
                return;
            }
            Ok(AddressUpdate::Keep) => return,
            Err(error) => {
                if logged.as_ref() != Some(&error) {
                    tracing::warn!(node = config.name, %error, "cannot determine the addresses of this node; trying again");
                }
                logged = Some(error);
            }
        }
        tokio::time::sleep(backoff.failed(0.0)).await;
    }
}

async fn set_pod_cidr(config: &NodeConfig, host: &impl Host) {
    if config.pod_cidr.is_empty() {
        return;
    }
    let (mut backoff, mut logged) = (Backoff::new(FIRST_PAUSE, LONGEST_PAUSE), String::new());
    while let Err(error) = host.set_pod_cidr(&config.pod_cidr).await {
        if error != logged {
            tracing::warn!(cidr = config.pod_cidr, error, "cannot set the pod CIDR of the runtime; trying again");
            logged = error;
        }
        tokio::time::sleep(backoff.failed(0.0)).await;
    }
}
