//! Metadata and spec of a new Node. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::NodeSpec;

use super::config::NodeConfig;
use super::machine;

pub(super) const ATTACH_DETACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
pub(super) const OS: [&str; 2] = ["kubernetes.io/os", "beta.kubernetes.io/os"];
pub(super) const ARCH: [&str; 2] = ["kubernetes.io/arch", "beta.kubernetes.io/arch"];
pub(super) const HOSTNAME: &str = "kubernetes.io/hostname";

/// Metadata and spec of a new Node.
pub fn node(config: &NodeConfig) -> Node {
    let mut labels = BTreeMap::from([(HOSTNAME.to_owned(), config.name.clone())]);
    labels.extend(os_labels());
    labels.extend(config.labels.clone());
    let annotations = config.controller_attach_detach.then(|| BTreeMap::from([(ATTACH_DETACH.into(), "true".into())]));
    let mut node = Node::default();
    node.metadata.name = Some(config.name.clone());
    node.metadata.labels = Some(labels);
    node.metadata.annotations = annotations;
    node.spec = Some(NodeSpec {
        provider_id: config.provider_id.clone(),
        taints: Some(config.taints.clone()).filter(|taints| !taints.is_empty()),
        ..NodeSpec::default()
    });
    node
}

/// OS and architecture labels, which every Node must have.
pub(super) fn os_labels() -> impl Iterator<Item = (String, String)> {
    let os = OS.map(|key| (key.to_owned(), "linux".to_owned()));
    os.into_iter().chain(ARCH.map(|key| (key.to_owned(), machine::architecture().to_owned())))
}
