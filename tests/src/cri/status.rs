//! Converts the runtime's records to CRI messages: statuses, list items, events, verbose info.
//!
//! Pure: reads the store, changes nothing, reads no clock.

use std::collections::BTreeMap;

use keblet_proto::cri::v1;
use serde_json::json;

use super::store::Container;
use super::store::Sandbox;
use super::store::Store;

/// Conditions of a healthy runtime.
pub(super) fn healthy() -> Vec<v1::RuntimeCondition> {
    let condition = |kind: &str| v1::RuntimeCondition { r#type: kind.to_owned(), status: true, ..Default::default() };
    vec![condition("RuntimeReady"), condition("NetworkReady"), condition("ContainerdHasNoDeprecationWarnings")]
}

/// An event without timestamp.
pub(super) fn event(
    store: &Store,
    kind: v1::ContainerEventType,
    container_id: &str,
    sandbox_id: &str,
) -> v1::ContainerEventResponse {
    v1::ContainerEventResponse {
        container_id: container_id.to_owned(),
        container_event_type: kind.into(),
        created_at: 0,
        pod_sandbox_status: store.sandboxes.get(sandbox_id).map(sandbox),
        containers_statuses: containers_of(store, sandbox_id),
    }
}

/// Statuses of a sandbox' containers, in no particular order.
pub(super) fn containers_of(store: &Store, sandbox_id: &str) -> Vec<v1::ContainerStatus> {
    store.containers_of(sandbox_id).iter().filter_map(|id| store.containers.get(id)).map(container).collect()
}

/// A sandbox' status.
pub(super) fn sandbox(sandbox: &Sandbox) -> v1::PodSandboxStatus {
    v1::PodSandboxStatus {
        id: sandbox.id.clone(),
        metadata: sandbox.config.metadata.clone(),
        state: sandbox_state(sandbox).into(),
        created_at: sandbox.created_at,
        network: Some(v1::PodSandboxNetworkStatus { ip: sandbox.ip.clone(), additional_ips: Vec::new() }),
        linux: Some(v1::LinuxPodSandboxStatus {
            namespaces: Some(v1::Namespace { options: Some(sandbox.namespaces()) }),
        }),
        labels: sandbox.config.labels.clone(),
        annotations: sandbox.config.annotations.clone(),
        runtime_handler: sandbox.runtime_handler.clone(),
    }
}

/// A sandbox in a list.
pub(super) fn sandbox_item(sandbox: &Sandbox) -> v1::PodSandbox {
    v1::PodSandbox {
        id: sandbox.id.clone(),
        metadata: sandbox.config.metadata.clone(),
        state: sandbox_state(sandbox).into(),
        created_at: sandbox.created_at,
        labels: sandbox.config.labels.clone(),
        annotations: sandbox.config.annotations.clone(),
        runtime_handler: sandbox.runtime_handler.clone(),
    }
}

/// State of a sandbox.
pub(super) fn sandbox_state(sandbox: &Sandbox) -> v1::PodSandboxState {
    if sandbox.ready { v1::PodSandboxState::SandboxReady } else { v1::PodSandboxState::SandboxNotready }
}

/// A container's status.
pub(super) fn container(container: &Container) -> v1::ContainerStatus {
    let reported = &container.status;
    let exited = reported.state == v1::ContainerState::ContainerExited;
    let reason = match (exited, reported.reason.as_str(), reported.exit_code) {
        (true, "", 0) => "Completed",
        (true, "", _) => "Error",
        // As containerd, from the event on.
        (false, "", _) if container.oom_event => "OOMKilled",
        (_, reason, _) => reason,
    };
    v1::ContainerStatus {
        id: container.id.clone(),
        metadata: container.config.metadata.clone(),
        state: reported.state.into(),
        created_at: reported.created_at,
        started_at: reported.started_at,
        finished_at: reported.finished_at,
        exit_code: reported.exit_code,
        image: Some(shown_image(container)),
        image_ref: image_ref(container),
        reason: reason.to_owned(),
        message: reported.message.clone(),
        labels: container.config.labels.clone(),
        annotations: container.config.annotations.clone(),
        mounts: container.config.mounts.clone(),
        log_path: container.log_path.clone(),
        resources: container
            .resources
            .clone()
            .map(|linux| v1::ContainerResources { linux: Some(linux), ..Default::default() }),
        image_id: container.image.id.clone(),
        ..Default::default()
    }
}

/// A container in a list.
pub(super) fn container_item(container: &Container) -> v1::Container {
    v1::Container {
        id: container.id.clone(),
        pod_sandbox_id: container.sandbox_id.clone(),
        metadata: container.config.metadata.clone(),
        image: container.config.image.clone(),
        image_ref: container.image.id.clone(),
        state: container.status.state.into(),
        created_at: container.status.created_at,
        labels: container.config.labels.clone(),
        annotations: container.config.annotations.clone(),
        image_id: container.image.id.clone(),
    }
}

/// Verbose info of a container: one JSON document under `info`.
pub(super) fn container_info(container: &Container) -> BTreeMap<String, String> {
    let mut namespaces = vec![json!({"type": "ipc"}), json!({"type": "uts"}), json!({"type": "mount"})];
    if container.ns_init() {
        namespaces.push(json!({"type": "pid"}));
    }
    let metadata = container.metadata();
    info(json!({
        "sandboxID": container.sandbox_id,
        "pid": container.status.pid,
        "removing": container.removing,
        "snapshotKey": container.id,
        "snapshotter": "overlayfs",
        "runtimeType": "io.containerd.runc.v2",
        "config": {"metadata": {"name": metadata.name, "attempt": metadata.attempt}},
        "runtimeSpec": {"linux": {"cgroupsPath": container.cgroup, "namespaces": namespaces}},
    }))
}

/// Verbose info of a sandbox.
pub(super) fn sandbox_info(sandbox: &Sandbox) -> BTreeMap<String, String> {
    info(json!({
        "pid": sandbox.pid.unwrap_or(0),
        "processStatus": if sandbox.pid.is_some() { "running" } else { "deleted" },
        "netNamespaceClosed": sandbox.pid.is_none(),
        "runtimeHandler": sandbox.runtime_handler,
        "runtimeType": "io.containerd.runc.v2",
    }))
}

/// Whether all labels of a selector match.
pub(super) fn selects(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn info(document: serde_json::Value) -> BTreeMap<String, String> {
    BTreeMap::from([("info".to_owned(), document.to_string())])
}

/// The image as the runtime reports it: its first tag, else its first digest.
fn shown_image(container: &Container) -> v1::ImageSpec {
    let mut spec = container.config.image.clone().unwrap_or_default();
    if let Some(name) = container.image.repo_tags.first().or(container.image.repo_digests.first()) {
        spec.image.clone_from(name);
    }
    spec
}

fn image_ref(container: &Container) -> String {
    container.image.repo_digests.first().unwrap_or(&container.image.id).clone()
}
