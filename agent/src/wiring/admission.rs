//! What the node offers to pods, for admission: fixed properties of host and configuration, and those of the runtime.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::admission::NodeOffer;
use crate::admission::SysctlAllowlist;
use crate::config::Feature;
use crate::config::Settings;
use crate::kernel::facts;
use crate::kernel::sysctl::app_armor_enabled;
use crate::runtime::RuntimeState;

/// Waits until the runtime is ready, so that no pod is rejected for a feature the runtime has not reported yet, and follows
/// its features until `shutdown`. `None` if `shutdown` comes first.
///
/// # Errors
/// `allowedUnsafeSysctls` names sysctls that are not namespaced.
pub(super) async fn follow(
    settings: &Settings,
    mut runtime: watch::Receiver<RuntimeState>,
    shutdown: CancellationToken,
) -> anyhow::Result<Option<watch::Receiver<NodeOffer>>> {
    let host = host_offer(settings)?;
    let ready = runtime.wait_for(RuntimeState::is_ready);
    if !matches!(shutdown.run_until_cancelled(ready).await, Some(Ok(_))) {
        return Ok(None);
    }
    let (sender, offer) = watch::channel(with_runtime(host, &runtime.borrow()));
    tokio::spawn(shutdown.run_until_cancelled_owned(async move {
        while runtime.changed().await.is_ok() {
            let state = runtime.borrow_and_update().clone();
            sender.send_modify(|offer| *offer = with_runtime(offer.clone(), &state));
        }
    }));
    Ok(Some(offer))
}

fn host_offer(settings: &Settings) -> anyhow::Result<NodeOffer> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let sysctls = SysctlAllowlist::new(facts::version(&release), &settings.kubelet.allowed_unsafe_sysctls)
        .context("allowedUnsafeSysctls")?;
    Ok(NodeOffer {
        sysctls: Arc::new(sysctls),
        app_armor: app_armor_enabled(Path::new("/")),
        pod_level_resources: settings.gates.enabled(Feature::PodLevelResources),
        ..NodeOffer::default()
    })
}

/// A runtime that is not ready keeps the features it had.
fn with_runtime(offer: NodeOffer, state: &RuntimeState) -> NodeOffer {
    match state {
        RuntimeState::Ready { offer: runtime, .. } => {
            NodeOffer { supplemental_groups_policy: runtime.supplemental_groups_policy == Some(true), ..offer }
        }
        _ => offer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::RuntimeOffer;

    #[tokio::test]
    async fn features_of_the_runtime_are_awaited_and_followed() {
        let settings = crate::config::load(&std::iter::empty::<(&str, &str)>().collect()).expect("defaults");
        let ready = |policy| RuntimeState::Ready {
            network_error: None,
            offer: Arc::new(RuntimeOffer { supplemental_groups_policy: policy, ..RuntimeOffer::default() }),
        };
        let shutdown = CancellationToken::new();
        let (sender, state) = watch::channel(RuntimeState::Unknown);
        let follower = tokio::spawn({
            let (settings, shutdown) = (settings.clone(), shutdown.clone());
            async move { follow(&settings, state, shutdown).await }
        });
        tokio::task::yield_now().await;
        assert!(!follower.is_finished(), "the runtime is not ready");
        sender.send_replace(ready(Some(true)));
        let mut offer = follower.await.expect("no panic").expect("an offer").expect("no shutdown");
        assert!(offer.borrow().supplemental_groups_policy && offer.borrow().pod_level_resources);
        sender.send_replace(RuntimeState::NotReady("restarting".to_owned()));
        offer.changed().await.expect("an update");
        assert!(offer.borrow_and_update().supplemental_groups_policy, "as it was");
        sender.send_replace(ready(None));
        offer.changed().await.expect("an update");
        assert!(!offer.borrow().supplemental_groups_policy);
    }
}
