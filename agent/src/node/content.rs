//! Desired Node: sets the fields that a kubelet owns on a copy of the present Node. Pure; other fields are kept.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::ContainerImage;
use k8s_openapi::api::core::v1::DaemonEndpoint;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::NodeDaemonEndpoints;
use k8s_openapi::api::core::v1::NodeFeatures;
use k8s_openapi::api::core::v1::NodeRuntimeHandler;
use k8s_openapi::api::core::v1::NodeRuntimeHandlerFeatures;
use k8s_openapi::api::core::v1::NodeStatus;
use k8s_openapi::api::core::v1::NodeSwapStatus;
use k8s_openapi::api::core::v1::NodeSystemInfo;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

use super::addresses;
use super::addresses::AddressError;
use super::addresses::AddressUpdate;
use super::addresses::Network;
use super::conditions;
use super::conditions::Readiness;
use super::config::NodeConfig;
use super::machine;
use super::machine::Machine;
use super::resources;
use super::runtime_view::RuntimeView;
use crate::model::Pressures;
use crate::model::fc;
use crate::model::iscsi;

/// Annotation with `--node-ip` for the cloud controller manager.
const PROVIDED_NODE_IP: &str = "alpha.kubernetes.io/provided-node-ip";

/// Inputs of the status.
pub(super) struct NodeInfo<'a> {
    pub(super) config: &'a NodeConfig,
    pub(super) machine: &'a Machine,
    pub(super) network: &'a Network,
    pub(super) runtime: &'a RuntimeView,
    /// `None` before the first list.
    pub(super) images: Option<&'a [ContainerImage]>,
    pub(super) pressures: Pressures,
    /// `None` until the volumes that another agent has left are known.
    pub(super) volumes_in_use: Option<&'a BTreeSet<String>>,
    pub(super) readiness: Readiness<'a>,
    pub(super) at: Instant,
    pub(super) now: &'a Time,
}

/// Updates `node`. Returns the errors of fields that were not set.
pub(super) fn apply(node: &mut Node, node_info: &NodeInfo<'_>) -> Vec<String> {
    let mut failed = Vec::new();
    failed.extend(set_addresses(node, node_info).err());
    let status = node.status.get_or_insert_default();
    resources::apply(node_info.machine, &node_info.config.resources, status);
    failed.extend(set_info(status, node_info).err());
    let kubelet_endpoint = Some(DaemonEndpoint { port: node_info.config.port });
    status.daemon_endpoints = Some(NodeDaemonEndpoints { kubelet_endpoint });
    if let Some(images) = node_info.images {
        status.images = Some(images.to_vec()).filter(|images| !images.is_empty());
    }
    set_offer(status, node_info.runtime);
    if let Some(in_use) = node_info.volumes_in_use {
        set_volumes_in_use(status, in_use);
    }
    conditions::set_pressures(status, node_info.pressures, node_info.now);
    conditions::set_ready(status, node_info.runtime, &node_info.readiness, node_info.at, node_info.now);
    if let Some(features) = &node_info.config.declared_features {
        status.declared_features = Some(features.clone()).filter(|features| !features.is_empty());
    }
    failed
}

fn set_addresses(node: &mut Node, node_info: &NodeInfo<'_>) -> Result<(), String> {
    let config = &node_info.config.addresses;
    let known = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let update = addresses::addresses(config, node_info.network, known);
    // The cloud controller manager takes the annotation for addresses of this node.
    if let Err(error @ (AddressError::First(_) | AddressError::Second(_))) = &update {
        return Err(error.to_string());
    }
    match config.provided_node_ip() {
        Some(ips) => {
            node.metadata.annotations.get_or_insert_default().insert(PROVIDED_NODE_IP.to_owned(), ips);
        }
        None => {
            node.metadata.annotations.as_mut().and_then(|annotations| annotations.remove(PROVIDED_NODE_IP));
        }
    }
    match update.map_err(|error| error.to_string())? {
        AddressUpdate::Keep => {}
        AddressUpdate::Replace(list) => node.status.get_or_insert_default().addresses = Some(list),
    }
    Ok(())
}

fn set_info(status: &mut NodeStatus, node_info: &NodeInfo<'_>) -> Result<(), String> {
    let machine = node_info.machine;
    let info = status.node_info.get_or_insert_default();
    if machine.sizes.is_some() {
        info.machine_id.clone_from(&machine.machine_id);
        info.system_uuid.clone_from(&machine.system_uuid);
        info.boot_id.clone_from(&machine.boot_id);
        info.swap = (machine.swap > 0).then_some(NodeSwapStatus { capacity: Some(machine.swap) });
    }
    "linux".clone_into(&mut info.operating_system);
    machine::architecture().clone_into(&mut info.architecture);
    if machine.kernel_version.is_empty() {
        return Err("error getting version info: the kernel's release cannot be read".to_owned());
    }
    set_versions(info, node_info);
    Ok(())
}

fn set_versions(info: &mut NodeSystemInfo, node_info: &NodeInfo<'_>) {
    info.kernel_version.clone_from(&node_info.machine.kernel_version);
    info.os_image.clone_from(&node_info.machine.os_image);
    info.kubelet_version.clone_from(&node_info.config.version);
    info.kube_proxy_version.clear();
    info.container_runtime_version = match node_info.runtime.offer() {
        Some(offer) if !offer.name.is_empty() => format!("{}://{}", offer.name, offer.version),
        _ => "://Unknown".to_owned(),
    };
}

/// Volumes that the control plane must not attach elsewhere. Those of plugins that this agent does not have stay: another
/// kubelet has left them mounted.
fn set_volumes_in_use(status: &mut NodeStatus, in_use: &BTreeSet<String>) {
    let is_of = |name: &str, plugin: &str| name.strip_prefix(plugin).is_some_and(|rest| rest.starts_with('/'));
    let is_own = |name: &String| [iscsi::PLUGIN, fc::PLUGIN].into_iter().any(|plugin| is_of(name, plugin));
    // Only names of FlexVolumes begin with that of a driver.
    let is_flex = |name: &String| !name.starts_with("kubernetes.io/");
    let others = status.volumes_in_use.take().into_iter().flatten().filter(|name| !is_own(name) && !is_flex(name));
    let all: BTreeSet<String> = others.chain(in_use.iter().cloned()).collect();
    status.volumes_in_use = Some(all.into_iter().collect()).filter(|all: &Vec<String>| !all.is_empty());
}

/// Runtime handlers and features, once the runtime has reported them.
fn set_offer(status: &mut NodeStatus, runtime: &RuntimeView) {
    let Some(offer) = runtime.offer() else { return };
    let handlers = offer.handlers.iter().map(|handler| NodeRuntimeHandler {
        name: Some(handler.name.clone()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(handler.recursive_read_only_mounts),
            user_namespaces: Some(handler.user_namespaces),
        }),
    });
    status.runtime_handlers = Some(handlers.collect::<Vec<_>>()).filter(|handlers| !handlers.is_empty());
    if let Some(policy) = offer.supplemental_groups_policy {
        status.features = Some(NodeFeatures { supplemental_groups_policy: Some(policy) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_in_use_are_those_of_this_agent_and_of_plugins_that_it_does_not_have() {
        let disk = |name: &str| format!("kubernetes.io/iscsi/{name}");
        let csi = "kubernetes.io/csi/d.example^h".to_owned();
        for (before, in_use, expected) in [
            (vec![], vec![], None),
            (vec![disk("a")], vec![], None),
            (vec!["kubernetes.io/fc/[a]:0".to_owned()], vec![], None),
            (vec!["example.com/driver/v".to_owned()], vec![], None),
            (vec![csi.clone(), disk("a")], vec![disk("b")], Some(vec![csi.clone(), disk("b")])),
            (vec![disk("a")], vec![disk("b"), disk("a")], Some(vec![disk("a"), disk("b")])),
        ] {
            let mut status = NodeStatus { volumes_in_use: Some(before), ..NodeStatus::default() };
            set_volumes_in_use(&mut status, &in_use.into_iter().collect());
            assert_eq!(status.volumes_in_use, expected);
        }
    }
}
