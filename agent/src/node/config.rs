//! Settings of the Node object.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Taint;

use super::addresses::AddressConfig;
use super::resources::ResourceConfig;
use crate::config::Feature;
use crate::config::Settings;

/// Settings; they do not change while the agent runs.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Name of the Node.
    pub name: String,
    /// `registerNode`: whether the agent creates the Node.
    pub register: bool,
    /// `--node-labels`.
    pub labels: BTreeMap<String, String>,
    /// `registerWithTaints`, and the external cloud provider's.
    pub taints: Vec<Taint>,
    /// `providerID`.
    pub provider_id: Option<String>,
    /// `enableControllerAttachDetach`.
    pub controller_attach_detach: bool,
    /// Addresses.
    pub addresses: AddressConfig,
    /// Capacity and allocatable.
    pub resources: ResourceConfig,
    /// No kubelet has run with this root directory before: a Node that exists is that of a machine that was set up anew. Not
    /// part of the configuration.
    pub has_new_root: bool,
    /// Port of the HTTPS server.
    pub port: i32,
    /// `nodeStatusMaxImages`.
    pub max_images: i32,
    /// The version this agent reports, such as `v1.36.3`.
    pub version: String,
    /// Features this agent declares (KEP-5328), sorted.
    pub declared_features: Option<Vec<String>>,
    /// `podCIDR`, for a node without an API server.
    pub pod_cidr: String,
    /// `nodeStatusUpdateFrequency`.
    pub update_period: Duration,
    /// `nodeStatusReportFrequency`.
    pub report_period: Duration,
    /// `nodeLeaseDurationSeconds`.
    pub lease_seconds: i32,
    /// What the machine lacks: ends the message of condition Ready.
    pub warning: Option<&'static str>,
}

impl NodeConfig {
    /// From the settings.
    pub fn new(settings: &Settings, name: &str, version: &str) -> Self {
        let (kubelet, flags) = (&settings.kubelet, &settings.flags);
        let external_cloud = flags.cloud_provider == "external";
        let set = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let node_ips = AddressConfig::parse_node_ips(&flags.node_ip);
        if node_ips.len() < flags.node_ip.split(',').filter(|entry| !entry.trim().is_empty()).count() {
            tracing::warn!(flag = "--node-ip", value = flags.node_ip, "invalid addresses are ignored");
        }
        Self {
            name: name.to_owned(),
            register: kubelet.register_node,
            labels: flags.node_labels.clone(),
            taints: taints(settings, external_cloud),
            provider_id: set(&kubelet.provider_id),
            controller_attach_detach: kubelet.enable_controller_attach_detach,
            addresses: AddressConfig { node_name: name.to_owned(), node_ips, external_cloud },
            resources: ResourceConfig::new(kubelet, flags.experimental_allocatable_ignore_eviction),
            has_new_root: false,
            port: kubelet.port,
            max_images: kubelet.node_status_max_images,
            version: version.to_owned(),
            declared_features: settings.gates.enabled(Feature::NodeDeclaredFeatures).then(|| declared(settings)),
            pod_cidr: kubelet.pod_cidr.clone(),
            update_period: kubelet.node_status_update_frequency.std(),
            report_period: kubelet.node_status_report_frequency.std(),
            lease_seconds: kubelet.node_lease_duration_seconds,
            warning: None,
        }
    }
}

fn taints(settings: &Settings, external_cloud: bool) -> Vec<Taint> {
    let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    let configured = settings.kubelet.register_with_taints.iter().map(|taint| Taint {
        key: taint.key.clone(),
        value: text(&taint.value),
        effect: taint.effect.clone(),
        time_added: None,
    });
    let uninitialized = external_cloud.then(|| Taint {
        key: "node.cloudprovider.kubernetes.io/uninitialized".to_owned(),
        value: Some("true".to_owned()),
        effect: "NoSchedule".to_owned(),
        time_added: None,
    });
    configured.chain(uninitialized).collect()
}

/// Enabled features that this agent implements.
fn declared(settings: &Settings) -> Vec<String> {
    let implemented = [
        ("ExtendWebSocketsToKubelet", Feature::ExtendWebSocketsToKubelet),
        ("InPlacePodLevelResourcesVerticalScaling", Feature::InPlacePodLevelResourcesVerticalScaling),
        ("InPlacePodVerticalScalingInitContainers", Feature::InPlacePodVerticalScalingInitContainers),
        ("RestartAllContainersOnContainerExits", Feature::RestartAllContainersOnContainerExits),
    ];
    implemented.into_iter().filter(|(_, gate)| settings.gates.enabled(*gate)).map(|(name, _)| name.to_owned()).collect()
}
