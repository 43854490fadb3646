//! The same pod as a manifest for agents, and as the CRI messages that an agent would send for it.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use keblet::workers::generate::security::MASKED_PATHS;
use keblet::workers::generate::security::READONLY_PATHS;
use keblet_proto::cri::v1 as cri;
use keblet_proto::cri::v1::security_profile::ProfileType;
use serde_json::Value;
use serde_json::json;

use super::workload::BenchContainer;
use super::workload::BenchPod;
use super::workload::STAMPS_IN_CONTAINER;

/// Label of every pod of the benchmark; agents copy a pod's labels to its sandbox.
pub(crate) const LABEL: (&str, &str) = ("keblet.dev/bench", "pod");
/// The namespace of the benchmark's pods.
pub(crate) const NAMESPACE: &str = "default";

const PROGRAM: &str = "/probe";
const VOLUME: &str = "stamps";
const TOKEN_IN_CONTAINER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The network of the benchmark's pods.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PodNetwork {
    /// A network namespace for each pod, set up through CNI.
    Own,
    /// `hostNetwork: true`
    Host,
}

/// What all pods of a measurement have in common.
#[derive(Clone, Debug)]
pub(crate) struct PodSettings {
    /// Image with the test program.
    pub(crate) image: String,
    pub(crate) network: PodNetwork,
    /// Folder of the measurement.
    pub(crate) folder: PathBuf,
    /// Pods mount a service account token, as pods of a cluster do.
    pub(crate) token: bool,
    /// The cgroup that contains `kubepods`, if pods have cgroups of their own.
    pub(crate) cgroup_root: Option<String>,
}

impl PodSettings {
    /// Host folder of the stamps.
    pub(crate) fn stamps(&self) -> PathBuf {
        self.folder.join("stamps")
    }

    /// Host folder of the files that a bare client mounts into a pod.
    fn pod_folder(&self, pod: &BenchPod) -> PathBuf {
        self.folder.join("pods").join(&pod.name)
    }

    /// Creates the files that a bare client mounts into a pod.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(crate) fn prepare(&self, pod: &BenchPod) -> anyhow::Result<()> {
        let folder = self.pod_folder(pod);
        let token = folder.join("token");
        let create =
            |path: &Path| std::fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()));
        create(&token)?;
        create(&self.folder.join("logs").join(&pod.name))?;
        let files = [("etc-hosts", "127.0.0.1\tlocalhost\n"), ("termination-log", ""), ("token/token", "a token")];
        for (name, text) in files {
            let path = folder.join(name);
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// The pod's cgroup relative to the hierarchy's root; empty if pods have none.
    fn cgroup(&self, pod: &BenchPod) -> String {
        self.cgroup_root.as_ref().map_or_else(String::new, |root| {
            format!("{}/kubepods/besteffort/pod{}", root.trim_end_matches('/'), uid(pod))
        })
    }
}

/// The UID that a bare client assigns to a pod.
pub(crate) fn uid(pod: &BenchPod) -> String {
    format!("bench-{}", pod.name)
}

/// A static pod. Its name is unique in the run, and so is its UID.
pub(crate) fn static_pod(pod: &BenchPod, settings: &PodSettings) -> Value {
    let mut manifest = manifest(pod, settings);
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(1);
    manifest
}

/// A pod bound to a node of a cluster.
pub(crate) fn bound_pod(pod: &BenchPod, settings: &PodSettings, node: &str) -> Value {
    let mut manifest = manifest(pod, settings);
    manifest["spec"]["nodeName"] = json!(node);
    manifest
}

/// A pod that belongs to no node yet.
pub(crate) fn manifest(pod: &BenchPod, settings: &PodSettings) -> Value {
    let container = |container: &BenchContainer| {
        json!({
            "name": container.name,
            "image": settings.image,
            "imagePullPolicy": "Never",
            "command": [PROGRAM],
            "args": container.args,
            "volumeMounts": [{"name": VOLUME, "mountPath": STAMPS_IN_CONTAINER}],
        })
    };
    let mut main = container(&pod.main);
    for (field, value) in &pod.extras.main {
        main[field] = value.clone();
    }
    let mut volumes = vec![json!({"name": VOLUME, "hostPath": {"path": settings.stamps(), "type": "Directory"}})];
    for (volume, path) in &pod.extras.volumes {
        if let Some(mounts) = main["volumeMounts"].as_array_mut() {
            mounts.push(json!({"name": volume["name"], "mountPath": path, "readOnly": true}));
        }
        volumes.push(volume.clone());
    }
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": NAMESPACE, "labels": {LABEL.0: LABEL.1}},
        "spec": {
            "hostNetwork": settings.network == PodNetwork::Host,
            "restartPolicy": pod.behaviour.restart_policy(),
            "initContainers": pod.init.iter().map(container).collect::<Vec<_>>(),
            "containers": [main],
            "volumes": volumes,
        },
    })
}

/// The sandbox of the same pod.
pub(crate) fn sandbox(pod: &BenchPod, settings: &PodSettings) -> cri::PodSandboxConfig {
    let uid = uid(pod);
    let labels = [
        LABEL,
        ("io.kubernetes.pod.name", pod.name.as_str()),
        ("io.kubernetes.pod.namespace", NAMESPACE),
        ("io.kubernetes.pod.uid", uid.as_str()),
    ];
    let hostname = match settings.network {
        PodNetwork::Own => pod.name.clone(),
        PodNetwork::Host => String::new(),
    };
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: pod.name.clone(),
            uid: uid.clone(),
            namespace: NAMESPACE.to_owned(),
            attempt: 0,
        }),
        hostname,
        log_directory: settings.folder.join("logs").join(&pod.name).to_string_lossy().into_owned(),
        dns_config: Some(cri::DnsConfig { servers: vec!["127.0.0.1".to_owned()], ..Default::default() }),
        labels: owned(labels),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: settings.cgroup(pod),
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(settings.network)),
                seccomp: Some(seccomp(ProfileType::RuntimeDefault)),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// One of its containers, with this attempt number.
pub(crate) fn container(
    pod: &BenchPod,
    container: &BenchContainer,
    attempt: u32,
    settings: &PodSettings,
) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt }),
        image: Some(cri::ImageSpec { image: settings.image.clone(), ..Default::default() }),
        command: vec![PROGRAM.to_owned()],
        args: container.args.clone(),
        mounts: mounts(pod, settings),
        labels: owned([
            ("io.kubernetes.container.name", container.name.as_str()),
            ("io.kubernetes.pod.name", pod.name.as_str()),
            ("io.kubernetes.pod.namespace", NAMESPACE),
            ("io.kubernetes.pod.uid", &uid(pod)),
        ]),
        log_path: format!("{}.{attempt}.log", container.name),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources { cpu_shares: 2, oom_score_adj: 1000, ..Default::default() }),
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(namespaces(settings.network)),
                seccomp: Some(seccomp(ProfileType::Unconfined)),
                masked_paths: MASKED_PATHS.map(str::to_owned).to_vec(),
                readonly_paths: READONLY_PATHS.map(str::to_owned).to_vec(),
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}

/// The mounts of the manifest, and those that an agent adds.
fn mounts(pod: &BenchPod, settings: &PodSettings) -> Vec<cri::Mount> {
    let folder = settings.pod_folder(pod);
    let mount = |container_path: &str, host_path: PathBuf, readonly| cri::Mount {
        container_path: container_path.to_owned(),
        host_path: host_path.to_string_lossy().into_owned(),
        readonly,
        ..Default::default()
    };
    let mut mounts = vec![
        mount(STAMPS_IN_CONTAINER, settings.stamps(), false),
        mount("/etc/hosts", folder.join("etc-hosts"), false),
        mount("/dev/termination-log", folder.join("termination-log"), false),
    ];
    if settings.token {
        mounts.push(mount(TOKEN_IN_CONTAINER, folder.join("token"), true));
    }
    mounts
}

fn namespaces(network: PodNetwork) -> cri::NamespaceOption {
    let network = match network {
        PodNetwork::Own => cri::NamespaceMode::Pod,
        PodNetwork::Host => cri::NamespaceMode::Node,
    };
    cri::NamespaceOption {
        network: network as i32,
        pid: cri::NamespaceMode::Container as i32,
        ipc: cri::NamespaceMode::Pod as i32,
        ..Default::default()
    }
}

fn seccomp(profile: ProfileType) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: profile as i32, ..Default::default() }
}

fn owned<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;

    use super::super::WorkloadKind;
    use super::super::workload;
    use super::*;

    fn settings(network: PodNetwork) -> PodSettings {
        let cgroup_root = Some("/bench".to_owned());
        PodSettings { image: "probe:1".to_owned(), network, folder: "/host".into(), token: true, cgroup_root }
    }

    #[test]
    fn manifest_and_messages_describe_the_same_pod() {
        let pods = workload::batches(WorkloadKind::Chain, 1, "p", Path::new("/host/stamps"), 0).remove(0);
        let settings = settings(PodNetwork::Host);
        let manifest: Pod = serde_json::from_value(static_pod(&pods[0], &settings)).unwrap();
        let spec = manifest.spec.unwrap();
        let declared = spec.init_containers.unwrap().into_iter().chain(spec.containers);
        for (declared, ours) in declared.zip(pods[0].init.iter().chain([&pods[0].main])) {
            let message = container(&pods[0], ours, 0, &settings);
            assert_eq!(message.metadata.unwrap().name, declared.name);
            assert_eq!((Some(message.command), Some(message.args)), (declared.command, declared.args));
            assert_eq!(Some(message.image.unwrap().image), declared.image);
            assert_eq!(message.mounts[0].container_path, declared.volume_mounts.unwrap()[0].mount_path);
        }
        let volumes = spec.volumes.unwrap();
        assert_eq!(volumes[0].host_path.as_ref().unwrap().path, "/host/stamps");
        assert_eq!(spec.host_network, Some(true));
        assert_eq!(manifest.metadata.labels.unwrap()[LABEL.0], LABEL.1);
        assert_eq!(sandbox(&pods[0], &settings).labels[LABEL.0], LABEL.1);
    }

    #[test]
    fn extras_are_in_the_manifest() {
        let mut pod = workload::serving(1, "p", Path::new("/host/stamps"), workload::Check::Tcp, 7).remove(0);
        pod.extras.volumes = vec![(json!({"name": "v", "secret": {"secretName": "s"}}), "/v".to_owned())];
        let manifest: Pod = serde_json::from_value(manifest(&pod, &settings(PodNetwork::Own))).unwrap();
        let spec = manifest.spec.unwrap();
        let main = &spec.containers[0];
        assert_eq!(main.readiness_probe.as_ref().unwrap().period_seconds, Some(7));
        let mounts: Vec<_> = main.volume_mounts.iter().flatten().map(|mount| mount.mount_path.as_str()).collect();
        assert_eq!(mounts, [STAMPS_IN_CONTAINER, "/v"]);
        assert_eq!(spec.volumes.unwrap()[1].secret.as_ref().unwrap().secret_name.as_deref(), Some("s"));
    }

    #[test]
    fn a_pod_of_a_cluster_has_network_token_hosts_file_and_cgroup_of_its_own() {
        let pod = &workload::one_shots(1, "p", Path::new("/host/stamps"))[0];
        let settings = settings(PodNetwork::Own);
        let bound: Pod = serde_json::from_value(bound_pod(pod, &settings, "n")).unwrap();
        let spec = bound.spec.unwrap();
        assert_eq!((spec.node_name.as_deref(), spec.host_network), (Some("n"), Some(false)));
        assert_eq!(spec.restart_policy.as_deref(), Some("Never"));

        let sandbox = sandbox(pod, &settings);
        let linux = sandbox.linux.unwrap();
        assert_eq!(linux.cgroup_parent, "/bench/kubepods/besteffort/podbench-p-0");
        let network = linux.security_context.unwrap().namespace_options.unwrap().network;
        assert_eq!(network, cri::NamespaceMode::Pod as i32);
        let mounts = container(pod, &pod.main, 0, &settings).mounts;
        let mounts: Vec<_> = mounts.iter().map(|mount| mount.container_path.as_str()).collect();
        assert_eq!(mounts, [STAMPS_IN_CONTAINER, "/etc/hosts", "/dev/termination-log", TOKEN_IN_CONTAINER]);
    }
}
