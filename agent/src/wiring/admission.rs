//! What the node offers to pods, for admission: fixed properties of host and configuration, and those of the runtime.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use futures_util::future::BoxFuture;
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
use crate::model::until;
use crate::node::Machine;
use crate::node::NodeConfig;
use crate::node::RootFs;
use crate::node::initial_node;
use crate::node::resources::allocatable;
use crate::runtime::RuntimeState;
use crate::sync::ReadNode;

/// Properties of the node that depend on host and configuration only.
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

/// The own Node, as it was last.
pub(super) struct OwnNode {
    object: watch::Receiver<Option<Arc<Node>>>,
    synced: watch::Receiver<bool>,
    /// Kept when it is deleted: what the node offers does not change with that.
    last: Option<Arc<Node>>,
    /// The API server was queried for it: as long as there is no `last` one, it does not exist.
    is_known: bool,
}

impl OwnNode {
    /// `synced` becomes true after `object` holds what the API server has.
    pub(super) fn new(object: watch::Receiver<Option<Arc<Node>>>, synced: watch::Receiver<bool>) -> Self {
        Self { object, synced, last: None, is_known: false }
    }

    /// Waits for a change; false if there will be none.
    async fn changed(&mut self) -> bool {
        tokio::select! {
            Ok(()) = self.object.changed() => true,
            Ok(()) = self.synced.changed() => true,
            else => false,
        }
    }

    /// Takes over what has changed.
    fn read(&mut self) {
        // First: the object is then not older than what made it true.
        self.is_known = *self.synced.borrow_and_update();
        if let Some(object) = &*self.object.borrow_and_update() {
            self.last = Some(object.clone());
        }
    }
}

/// Inputs of admission.
pub(super) struct Offered {
    /// What the node offers.
    pub offer: watch::Receiver<NodeOffer>,
    /// True once that is by the Node as the API server has it, or as it will be registered if there is none.
    pub node_known: watch::Receiver<bool>,
}

/// Waits until the runtime is ready, so that no pod is rejected for a feature the runtime has not reported yet. `None` if
/// `shutdown` comes first. The future follows the runtime's features and the Node object until `shutdown`, and is to be run
/// in a task.
///
/// # Errors
/// `allowedUnsafeSysctls` names sysctls that are not namespaced.
pub(super) async fn follow(
    settings: &Settings,
    config: Arc<NodeConfig>,
    root_fs: RootFs,
    mut runtime: watch::Receiver<RuntimeState>,
    mut node: OwnNode,
    shutdown: CancellationToken,
) -> anyhow::Result<Option<(Offered, BoxFuture<'static, ()>)>> {
    let host = Host { config, root_dir: settings.flags.root_dir.clone(), root_fs };
    let offer = host_offer(settings, &host)?;
    let ready = runtime.wait_for(RuntimeState::is_ready);
    if !matches!(shutdown.run_until_cancelled(ready).await, Some(Ok(_))) {
        return Ok(None);
    }
    let state = runtime.borrow_and_update().clone();
    node.read();
    let offer = with_node(with_runtime(offer, &state), &host, node.last.clone()).await?;
    let ((sender, offer), (known_sender, node_known)) = (watch::channel(offer), watch::channel(node.is_known));
    let following = async move {
        loop {
            let known = sender.borrow().clone();
            let offer = tokio::select! {
                Ok(()) = runtime.changed() => {
                    let state = runtime.borrow_and_update().clone();
                    Ok(with_runtime(known, &state))
                }
                true = node.changed() => {
                    node.read();
                    with_node(known, &host, node.last.clone()).await
                }
                else => return,
            };
            match offer {
                Ok(offer) => _ = sender.send_replace(offer),
                Err(error) => tracing::warn!(%error, "admission continues with the previous state of the node"),
            }
            // After the offer: pods that have waited for it are decided by it.
            known_sender.send_replace(node.is_known);
        }
    };
    let following: BoxFuture<'static, ()> = Box::pin(until(shutdown, following));
    Ok(Some((Offered { offer, node_known }, following)))
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
    use k8s_openapi::api::core::v1::Taint;

    use super::*;
    use crate::cli::version::KUBERNETES;
    use crate::runtime::RuntimeOffer;

    fn defaults() -> Settings {
        crate::config::load(&std::iter::empty::<(&str, &str)>().collect()).expect("defaults")
    }

    fn ready(policy: Option<bool>) -> RuntimeState {
        let offer = RuntimeOffer { supplemental_groups_policy: policy, ..RuntimeOffer::default() };
        RuntimeState::Ready { network_error: None, offer: Arc::new(offer) }
    }

    #[tokio::test]
    async fn the_node_is_known_with_the_offer_that_follows_from_it_and_stays_known() {
        let settings = defaults();
        let registered = NodeConfig::new(&settings, "n", KUBERNETES);
        let startup = Taint { key: "startup".to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
        let config = Arc::new(NodeConfig { taints: vec![startup], ..registered.clone() });
        let (_runtime, state) = watch::channel(ready(None));
        let ((nodes, object), (lists, synced)) = (watch::channel(None), watch::channel(false));
        let (node, shutdown) = (OwnNode::new(object, synced), CancellationToken::new());
        let offered = follow(&settings, config, RootFs::default(), state, node, shutdown).await.expect("an offer");
        let (Offered { mut offer, mut node_known }, following) = offered.expect("no shutdown");
        tokio::spawn(following);
        let taints = |offer: &NodeOffer| offer.node.as_ref().expect("a node").taints.len();
        assert_eq!((*node_known.borrow(), taints(&offer.borrow())), (false, 1), "as it will be registered");
        nodes.send_replace(Some(Arc::new(initial_node(&registered))));
        lists.send_replace(true);
        node_known.wait_for(|known| *known).await.expect("it is followed");
        assert_eq!(taints(&offer.borrow_and_update()), 0, "the taint was removed");
        nodes.send_replace(None);
        offer.changed().await.expect("an update");
        assert_eq!((*node_known.borrow(), taints(&offer.borrow())), (true, 0), "as it was before its deletion");
    }

    #[tokio::test]
    async fn features_of_the_runtime_are_awaited_and_followed() {
        let settings = defaults();
        let shutdown = CancellationToken::new();
        let (sender, state) = watch::channel(RuntimeState::Unknown);
        let ((nodes, object), (lists, synced)) = (watch::channel(None), watch::channel(true));
        let node = OwnNode::new(object, synced);
        let follower = tokio::spawn({
            let (settings, shutdown) = (settings.clone(), shutdown.clone());
            let mut config = NodeConfig::new(&settings, "n", KUBERNETES);
            config.resources.devices = ["example.com/gpu".to_owned()].into();
            async move { follow(&settings, Arc::new(config), RootFs::default(), state, node, shutdown).await }
        });
        tokio::task::yield_now().await;
        assert!(!follower.is_finished(), "the runtime is not ready");
        sender.send_replace(ready(Some(true)));
        let (offered, following) = follower.await.expect("no panic").expect("an offer").expect("no shutdown");
        tokio::spawn(following);
        assert!(*offered.node_known.borrow(), "there is none");
        let mut offer = offered.offer;
        assert!(offer.borrow().supplemental_groups_policy && offer.borrow().pod_level_resources);
        sender.send_replace(RuntimeState::NotReady { error: "restarting".to_owned(), network_error: None });
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
        drop((nodes, lists));
        sender.send_replace(ready(Some(true)));
        offer.changed().await.expect("an update without an API server");
        assert!(offer.borrow().supplemental_groups_policy);
    }
}
