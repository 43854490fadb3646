//! CRI messages to the model's words. Pure.

use keblet_proto::cri::v1;

use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::SandboxId;
use crate::model::SandboxStatus;
use crate::model::TerminationFile;

pub(super) const LABEL_POD_UID: &str = "io.kubernetes.pod.uid";
pub(super) const LABEL_POD_NAME: &str = "io.kubernetes.pod.name";
pub(super) const LABEL_POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const HASH: &str = "io.kubernetes.container.hash";
const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
const TERMINATION_PATH: &str = "io.kubernetes.container.terminationMessagePath";
const TERMINATION_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";

/// CRI state number to the model's state.
pub(super) fn state(raw: i32) -> ContainerState {
    match v1::ContainerState::try_from(raw) {
        Ok(v1::ContainerState::ContainerCreated) => ContainerState::Created,
        Ok(v1::ContainerState::ContainerRunning) => ContainerState::Running,
        Ok(v1::ContainerState::ContainerExited) => ContainerState::Exited,
        Ok(v1::ContainerState::ContainerUnknown) | Err(_) => ContainerState::Unknown,
    }
}

/// One container status, with the init process where the runtime told.
pub(super) fn container(status: v1::ContainerStatus, pid: Option<u32>, sandbox_id: SandboxId) -> ContainerStatus {
    let state = state(status.state);
    let exited = state == ContainerState::Exited;
    let meta = status.metadata.unwrap_or_default();
    let annotations = &status.annotations;
    let termination_path = annotations.get(TERMINATION_PATH).cloned().unwrap_or_default();
    let host_path = status
        .mounts
        .iter()
        .find(|m| !termination_path.is_empty() && m.container_path == termination_path)
        .map(|m| m.host_path.clone());
    ContainerStatus {
        id: ContainerId::from(status.id),
        sandbox_id,
        name: meta.name,
        attempt: meta.attempt,
        state,
        created_at: status.created_at,
        started_at: status.started_at,
        finished_at: status.finished_at,
        exit_code: exited.then_some(status.exit_code),
        reason: status.reason,
        message: status.message,
        image: status.image.map(|i| i.image).unwrap_or_default(),
        image_ref: status.image_ref,
        hash: annotations.get(HASH).and_then(|h| u64::from_str_radix(h, 16).ok()).unwrap_or(0),
        restart_count: annotations.get(RESTART_COUNT).and_then(|n| n.parse().ok()).unwrap_or(0),
        log_path: status.log_path,
        termination: TerminationFile {
            container_path: termination_path,
            host_path,
            fallback_to_logs: annotations.get(TERMINATION_POLICY).is_some_and(|p| p == "FallbackToLogsOnError"),
        },
        pid,
        proven: None,
    }
}

/// One sandbox status.
pub(super) fn sandbox(status: v1::PodSandboxStatus) -> SandboxStatus {
    let namespaces = status.linux.and_then(|l| l.namespaces).and_then(|n| n.options).unwrap_or_default();
    let ips = status.network.map(|network| {
        let more = network.additional_ips.into_iter().map(|ip| ip.ip);
        std::iter::once(network.ip).chain(more).filter(|ip| !ip.is_empty()).collect()
    });
    SandboxStatus {
        id: SandboxId::from(status.id),
        attempt: status.metadata.map(|m| m.attempt).unwrap_or_default(),
        ready: status.state == v1::PodSandboxState::SandboxReady as i32,
        created_at: status.created_at,
        ips: ips.unwrap_or_default(),
        host_network: namespaces.network == v1::NamespaceMode::Node as i32,
        shares_pid_namespace: namespaces.pid != v1::NamespaceMode::Container as i32,
        runtime_handler: status.runtime_handler,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_the_agent_wrote_into_annotations() {
        let status = v1::ContainerStatus {
            id: "c1".into(),
            state: v1::ContainerState::ContainerExited as i32,
            exit_code: 3,
            annotations: [(HASH, "ff"), (RESTART_COUNT, "7"), (TERMINATION_PATH, "/dev/termination-log")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
            mounts: vec![v1::Mount {
                container_path: "/dev/termination-log".into(),
                host_path: "/pods/x".into(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let c = container(status, Some(42), SandboxId::from("s"));
        assert_eq!((c.hash, c.restart_count, c.exit_code, c.pid), (255, 7, Some(3), Some(42)));
        assert_eq!(c.termination.host_path.as_deref(), Some("/pods/x"));
    }

    #[test]
    fn garbage_in_annotations_and_info_counts_as_missing() {
        let status = v1::ContainerStatus {
            state: 99,
            annotations: [(HASH, "zz"), (RESTART_COUNT, "-1")].map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            ..Default::default()
        };
        let c = container(status, None, SandboxId::from("s"));
        assert_eq!((c.hash, c.restart_count, c.state), (0, 0, ContainerState::Unknown));
    }
}
