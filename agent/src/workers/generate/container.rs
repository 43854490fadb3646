//! CRI `ContainerConfig` of one container instance. Pure: host paths, image and addresses are arguments.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ContainerSpec;
use super::EnvObjects;
use super::GenerateError;
use super::NodeSettings;
use super::env;
use super::env::EnvContext;
use super::env::Environment;
use super::names;
use super::resources;
use super::security;
use super::user_namespace;
use crate::model::ContainerId;
use crate::model::container_hash;
use crate::model::one_per_family;

/// Smallest page size of any architecture, bytes.
const SMALLEST_PAGE: usize = 4096;

/// An image as the runtime resolved it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedImage {
    /// What to create containers from: the runtime's id or digest.
    pub image_ref: String,
    /// The user of the image's configuration.
    pub user: ImageUser,
}

/// The user in an image's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageUser {
    /// A number; images without a user run as 0.
    Id(i64),
    /// A name, known only inside the image.
    Name(String),
}

/// What one instance is created from besides the pod's spec and the node's settings.
#[derive(Clone, Debug)]
pub struct Instance<'a> {
    /// Its image.
    pub image: &'a ResolvedImage,
    /// restartCount, attempt, and number of its log file.
    pub restarts: u32,
    /// Its variables, from [`env::environment`].
    pub environment: &'a Environment,
    /// Its mounts, host paths resolved.
    pub mounts: Vec<cri::Mount>,
    /// Its devices, host paths resolved.
    pub devices: Vec<cri::Device>,
    /// The instance that an ephemeral container targets (`targetContainerName`).
    pub target: Option<&'a ContainerId>,
    /// The pod's user namespace.
    pub users: &'a cri::UserNamespace,
}

/// Generates the configuration of one instance.
///
/// # Errors
/// See [`security::container_security`] and [`resources::container_resources`].
pub fn container_config(
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    instance: Instance<'_>,
    settings: &NodeSettings,
) -> Result<cri::ContainerConfig, GenerateError> {
    let container = spec.container.as_ref();
    let stated_image = container.image.as_deref().unwrap_or_default();
    let hash = container_hash(&container.name, stated_image);
    let linux = cri::LinuxContainerConfig {
        resources: Some(resources::container_resources(pod, container, &settings.resources)?),
        security_context: Some(security::container_security(
            pod,
            spec,
            &instance.image.user,
            instance.target,
            instance.users,
            &settings.security,
        )?),
    };
    let environment = instance.environment;
    let envs = environment.iter().map(|(key, value)| cri::KeyValue { key: key.clone(), value: value.clone().into() });
    Ok(cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt: instance.restarts }),
        image: Some(cri::ImageSpec {
            image: instance.image.image_ref.clone(),
            user_specified_image: stated_image.to_owned(),
            ..Default::default()
        }),
        command: env::expand_words(container.command.as_ref(), environment)?,
        args: env::expand_words(container.args.as_ref(), environment)?,
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: envs.collect(),
        mounts: user_namespace::map_mounts(instance.mounts, instance.users),
        devices: instance.devices,
        labels: names::container_labels(pod, &container.name),
        annotations: names::container_annotations(pod, container, hash, instance.restarts),
        log_path: names::log_path(&container.name, instance.restarts),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        linux: Some(linux),
        stop_signal: stop_signal(container, settings).into(),
        ..Default::default()
    })
}

/// `lifecycle.stopSignal`, by the names of the API. The image's signal is used without one, with one that is not known,
/// and while the feature gate is off.
fn stop_signal(container: &Container, settings: &NodeSettings) -> cri::Signal {
    let stated = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.stop_signal.as_deref());
    let name = stated.unwrap_or_default().replace('+', "PLUS").replace('-', "MINUS");
    cri::Signal::from_str_name(&name).filter(|_| settings.stop_signals).unwrap_or(cri::Signal::RuntimeDefault)
}

/// The variables of a container. `pod_ips`: as the runtime reports them; under host network the node's are the pod's own.
///
/// # Errors
/// See [`env::environment`].
pub fn environment(
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    pod_ips: &[String],
    objects: &EnvObjects,
    settings: &NodeSettings,
) -> Result<Environment, GenerateError> {
    let node_ips = settings.dns.node_ips.now();
    // As the pod's status shows them.
    let shown = one_per_family(pod_ips, settings.dns.node_ips.prefers_v6());
    let pod_ips = if crate::model::spec::host_network(pod) { &node_ips } else { &shown };
    let context = EnvContext {
        pod_ips,
        node_ips: &node_ips,
        allocatable: &settings.resources.allocatable,
        max_string: 32 * settings.resources.page_size.max(SMALLEST_PAGE),
        objects,
    };
    env::environment(pod, &spec.container, context)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::workers::generate::DnsSettings;

    #[test]
    fn fields_of_the_pod_are_values_of_variables() {
        let value = |host_network: bool, node_ips: &[&str], path: &str| {
            let field = json!({"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}});
            let spec = json!({"enableServiceLinks": true, "nodeName": "node1", "serviceAccountName": "builder",
                "hostNetwork": host_network, "containers": [{"name": "c", "env": [field]}]});
            let metadata = json!({"name": "web", "namespace": "ns", "uid": "u"});
            let pod: Pod = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod");
            let node_ips: Vec<String> = node_ips.iter().map(|ip| (*ip).to_owned()).collect();
            let dns = DnsSettings { node_ips: node_ips.into(), ..DnsSettings::default() };
            let settings = NodeSettings { dns, ..NodeSettings::default() };
            let of_pod = ["10.0.0.5", "fd00::5"].map(str::to_owned);
            let spec = ContainerSpec::named(&pod, "c").expect("the container");
            let made = environment(&pod, &spec, &of_pod, &EnvObjects::default(), &settings);
            made.map(|all| String::from_utf8_lossy(&all["X"]).into_owned()).map_err(|error| error.to_string())
        };
        let node = ["192.0.2.7", "2001:db8::7"];
        for (host_network, path, expected) in [
            (false, "metadata.name", "web"),
            (false, "metadata.namespace", "ns"),
            (false, "spec.nodeName", "node1"),
            (false, "spec.serviceAccountName", "builder"),
            (false, "status.hostIP", "192.0.2.7"),
            (false, "status.hostIPs", "192.0.2.7,2001:db8::7"),
            (false, "status.podIPs", "10.0.0.5,fd00::5"),
            (true, "status.podIP", "192.0.2.7"),
            (true, "status.podIPs", "192.0.2.7,2001:db8::7"),
        ] {
            assert_eq!(value(host_network, &node, path).as_deref(), Ok(expected), "{host_network} {path}");
        }
        let unknown = "the address of the node is not known, cannot resolve status.hostIP".to_owned();
        assert_eq!(value(false, &[], "status.hostIP"), Err(unknown.clone()), "it will be known later");
        assert_eq!(value(false, &[], "status.hostIPs"), Err(unknown));
    }

    #[test]
    fn stop_signals_by_name() {
        let table = [
            (true, json!("SIGTERM"), cri::Signal::Sigterm),
            (true, json!("SIGRTMIN+3"), cri::Signal::Sigrtminplus3),
            (true, json!("SIGRTMAX-14"), cri::Signal::Sigrtmaxminus14),
            (true, json!("SIGRTMAX"), cri::Signal::Sigrtmax),
            (true, json!("15"), cri::Signal::RuntimeDefault),
            (true, json!(null), cri::Signal::RuntimeDefault),
            (false, json!("SIGTERM"), cri::Signal::RuntimeDefault),
        ];
        for (stop_signals, name, expected) in table {
            let settings = NodeSettings { stop_signals, ..NodeSettings::default() };
            let container = json!({"name": "c", "lifecycle": {"stopSignal": name}});
            let container = serde_json::from_value(container).expect("a container");
            assert_eq!(stop_signal(&container, &settings), expected, "{name} {stop_signals}");
        }
    }
}
