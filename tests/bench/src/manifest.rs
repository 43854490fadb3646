//! The same pod in two languages: as a manifest for agents, as CRI messages for floors.

use std::collections::BTreeMap;
use std::path::Path;

use keblet_proto::cri::v1 as cri;
use serde_json::Value;
use serde_json::json;

use super::workload::BenchContainer;
use super::workload::BenchPod;
use super::workload::STAMPS_IN_CONTAINER;

/// Marks every pod of the benchmark; agents copy a pod's labels to its sandbox.
pub(super) const LABEL: (&str, &str) = ("keblet.dev/bench", "pod");

const PROGRAM: &str = "/probe";
const VOLUME: &str = "stamps";

/// What pods are made of, whoever makes them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ingredients<'a> {
    /// Image with the test program.
    pub(super) image: &'a str,
    /// Host folder of the stamps.
    pub(super) stamps: &'a Path,
    /// Host folder of the floors' logs.
    pub(super) logs: &'a Path,
}

/// A static pod. Its name alone makes its UID another one than that of every other pod of the run.
pub(super) fn static_pod(pod: &BenchPod, with: Ingredients<'_>) -> Value {
    let container = |container: &BenchContainer| {
        json!({
            "name": container.name,
            "image": with.image,
            "imagePullPolicy": "Never",
            "command": [PROGRAM],
            "args": container.args,
            "volumeMounts": [{"name": VOLUME, "mountPath": STAMPS_IN_CONTAINER}],
        })
    };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": "default", "labels": {LABEL.0: LABEL.1}},
        "spec": {
            "hostNetwork": true,
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 1,
            "initContainers": pod.init.iter().map(container).collect::<Vec<_>>(),
            "containers": [container(&pod.main)],
            "volumes": [{"name": VOLUME, "hostPath": {"path": with.stamps, "type": "Directory"}}],
        },
    })
}

/// The sandbox of the same pod.
pub(super) fn sandbox(pod: &BenchPod, with: Ingredients<'_>) -> cri::PodSandboxConfig {
    let uid = format!("bench-{}", pod.name);
    let labels = [
        LABEL,
        ("io.kubernetes.pod.name", pod.name.as_str()),
        ("io.kubernetes.pod.namespace", "default"),
        ("io.kubernetes.pod.uid", uid.as_str()),
    ];
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: pod.name.clone(),
            uid: uid.clone(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        log_directory: with.logs.to_string_lossy().into_owned(),
        labels: owned(labels),
        linux: Some(cri::LinuxPodSandboxConfig {
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces()),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// One of its containers, the `attempt`th instance.
pub(super) fn container(
    pod: &BenchPod,
    container: &BenchContainer,
    attempt: u32,
    with: Ingredients<'_>,
) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt }),
        image: Some(cri::ImageSpec { image: with.image.to_owned(), ..Default::default() }),
        command: vec![PROGRAM.to_owned()],
        args: container.args.clone(),
        mounts: vec![cri::Mount {
            container_path: STAMPS_IN_CONTAINER.to_owned(),
            host_path: with.stamps.to_string_lossy().into_owned(),
            ..Default::default()
        }],
        labels: owned([
            ("io.kubernetes.container.name", container.name.as_str()),
            ("io.kubernetes.pod.name", pod.name.as_str()),
        ]),
        log_path: format!("{}.{}.{attempt}.log", pod.name, container.name),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources { cpu_shares: 2, oom_score_adj: 1000, ..Default::default() }),
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(namespaces()),
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}

/// Only the network is the host's.
fn namespaces() -> cri::NamespaceOption {
    cri::NamespaceOption {
        network: cri::NamespaceMode::Node as i32,
        pid: cri::NamespaceMode::Container as i32,
        ipc: cri::NamespaceMode::Pod as i32,
        ..Default::default()
    }
}

fn owned<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;

    use super::super::WorkloadKind;
    use super::super::workload::batches;
    use super::*;

    #[test]
    fn both_languages_say_the_same() {
        let pods = batches(WorkloadKind::Chain, 1, "p", Path::new("/host/stamps")).remove(0);
        let with = Ingredients { image: "probe:1", stamps: Path::new("/host/stamps"), logs: Path::new("/host/logs") };
        let manifest: Pod = serde_json::from_value(static_pod(&pods[0], with)).unwrap();
        let spec = manifest.spec.unwrap();
        let declared = spec.init_containers.unwrap().into_iter().chain(spec.containers);
        for (declared, ours) in declared.zip(pods[0].init.iter().chain([&pods[0].main])) {
            let message = container(&pods[0], ours, 0, with);
            assert_eq!(message.metadata.unwrap().name, declared.name);
            assert_eq!((Some(message.command), Some(message.args)), (declared.command, declared.args));
            assert_eq!(Some(message.image.unwrap().image), declared.image);
            assert_eq!(message.mounts[0].container_path, declared.volume_mounts.unwrap()[0].mount_path);
        }
        let volumes = spec.volumes.unwrap();
        assert_eq!(volumes[0].host_path.as_ref().unwrap().path, "/host/stamps");
        assert_eq!(spec.host_network, Some(true));
        assert_eq!(manifest.metadata.labels.unwrap()[LABEL.0], LABEL.1);
        assert_eq!(sandbox(&pods[0], with).labels[LABEL.0], LABEL.1);
    }
}
