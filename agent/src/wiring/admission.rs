//! What the node offers to pods, for admission: fixed properties of host and configuration, and those of the runtime.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::admission::NodeInfo;
use crate::admission::NodeOffer;
use crate::admission::SysctlAllowlist;
use crate::apiserver::ApiServer;
use crate::config::Feature;
use crate::config::Settings;
use crate::kernel::facts;
use crate::kernel::sysctl::app_armor_enabled;
use crate::model::qos::Amounts;
use crate::node::Machine;
use crate::node::NodeConfig;
use crate::node::RootFs;
use crate::node::initial_node;
use crate::node::resources::allocatable;
use crate::runtime::RuntimeState;
use crate::sync::ReadNode;

/// What the node is and has, by itself.
#[derive(Clone)]
struct Host {
    config: Arc<NodeConfig>,
    root_dir: PathBuf,
    root_fs: RootFs,
}

impl Host {
    /// Reads the size of the machine. Blocks.
    fn machine(&self) -> Amounts {
        let machine = Machine::read(Path::new("/"), &self.root_dir, &self.root_fs);
        allocatable(&machine.sizes.unwrap_or_default(), &self.config.resources)
    }

    /// The node by its object; without one as it will be registered. Blocks.
    fn info(&self, object: Option<Arc<Node>>) -> NodeInfo {
        let object = object.unwrap_or_else(|| Arc::new(initial_node(&self.config)));
        NodeInfo::new(&object, &self.machine())
    }
}

/// Waits until the runtime is ready, so that no pod is rejected for a feature the runtime has not reported yet, and follows
/// its features and the Node object until `shutdown`. `None` if `shutdown` comes first.
///
/// # Errors
/// `allowedUnsafeSysctls` names sysctls that are not namespaced.
pub(super) async fn follow(
    settings: &Settings,
    config: Arc<NodeConfig>,
    root_fs: RootFs,
    mut runtime: watch::Receiver<RuntimeState>,
    mut node: watch::Receiver<Option<Arc<Node>>>,
    shutdown: CancellationToken,
) -> anyhow::Result<Option<watch::Receiver<NodeOffer>>> {
    let host = Host { config, root_dir: settings.flags.root_dir.clone(), root_fs };
    let offer = host_offer(settings, &host)?;
    let ready = runtime.wait_for(RuntimeState::is_ready);
    if !matches!(shutdown.run_until_cancelled(ready).await, Some(Ok(_))) {
        return Ok(None);
    }
    let (object, state) = (node.borrow_and_update().clone(), runtime.borrow_and_update().clone());
    let offer = with_node(with_runtime(offer, &state), &host, object).await?;
    let (sender, offer) = watch::channel(offer);
    tokio::spawn(shutdown.run_until_cancelled_owned(async move {
        loop {
            let known = sender.borrow().clone();
            let offer = tokio::select! {
                Ok(()) = runtime.changed() => {
                    let state = runtime.borrow_and_update().clone();
                    Ok(with_runtime(known, &state))
                }
                Ok(()) = node.changed() => {
                    let object = node.borrow_and_update().clone();
                    with_node(known, &host, object).await
                }
                else => return,
            };
            match offer {
                Ok(offer) => _ = sender.send_replace(offer),
                Err(error) => tracing::warn!(%error, "admission goes on with what it knows of the node"),
            }
        }
    }));
    Ok(Some(offer))
}

fn host_offer(settings: &Settings, host: &Host) -> anyhow::Result<NodeOffer> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let sysctls = SysctlAllowlist::new(facts::version(&release), &settings.kubelet.allowed_unsafe_sysctls)
        .context("allowedUnsafeSysctls")?;
    let declared = host.config.declared_features.as_ref();
    Ok(NodeOffer {
        declared_features: declared.map(|features| Arc::new(features.iter().cloned().collect())),
        sysctls: Arc::new(sysctls),
        app_armor: app_armor_enabled(Path::new("/")),
        pod_level_resources: settings.gates.enabled(Feature::PodLevelResources),
        device_resources: Arc::new(host.config.resources.devices.clone()),
        ..NodeOffer::default()
    })
}

/// Reads the machine too: processors and memory can be added while it runs.
async fn with_node(offer: NodeOffer, host: &Host, object: Option<Arc<Node>>) -> anyhow::Result<NodeOffer> {
    let host = host.clone();
    let info = tokio::task::spawn_blocking(move || host.info(object)).await.context("reading the machine")?;
    Ok(NodeOffer { node: Some(Arc::new(info)), ..offer })
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

/// Reads the own Node for pods that its known labels reject.
pub(super) fn read_node(api: &ApiServer, name: &str) -> ReadNode {
    let (nodes, name): (Api<Node>, _) = (Api::all(api.main.clone()), name.to_owned());
    Arc::new(move || {
        let (nodes, name) = (nodes.clone(), name.clone());
        Box::pin(async move {
            let read = nodes.get(&name).await;
            read.inspect_err(|error| tracing::warn!(node = name, %error, "cannot read the Node")).ok().map(Arc::new)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::version::KUBERNETES;
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
        let (nodes, node) = watch::channel(None);
        let follower = tokio::spawn({
            let (settings, shutdown) = (settings.clone(), shutdown.clone());
            let mut config = NodeConfig::new(&settings, "n", KUBERNETES);
            config.resources.devices = ["example.com/gpu".to_owned()].into();
            async move { follow(&settings, Arc::new(config), RootFs::default(), state, node, shutdown).await }
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
        assert!(!offer.borrow_and_update().supplemental_groups_policy);

        let info = offer.borrow().node.clone().expect("a node");
        assert_eq!((info.name.as_str(), info.labels["kubernetes.io/hostname"].as_str()), ("n", "n"), "as registered");
        assert!(info.allocatable.pods == 110 && info.allocatable.milli_cpu >= 1000, "{info:?}");
        assert_eq!(info.allocatable.scalar.get("example.com/gpu"), Some(&0));
        assert!(offer.borrow().device_resources.contains("example.com/gpu"));
        let mut object = initial_node(&NodeConfig::new(&settings, "n", KUBERNETES));
        object.metadata.labels.get_or_insert_default().insert("zone".to_owned(), "a".to_owned());
        nodes.send_replace(Some(Arc::new(object)));
        offer.changed().await.expect("an update");
        assert_eq!(offer.borrow_and_update().node.as_ref().expect("a node").labels["zone"], "a");
        drop(nodes);
        sender.send_replace(ready(Some(true)));
        offer.changed().await.expect("an update without an API server");
        assert!(offer.borrow().supplemental_groups_policy);
    }
}
