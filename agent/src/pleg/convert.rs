//! Converts CRI messages to the model's types. Pure.

use keblet_proto::cri::v1;

use crate::model::ContainerId;
use crate::model::ContainerResources;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::ContainerUser;
use crate::model::SandboxId;
use crate::model::SandboxStatus;
use crate::model::TerminationFile;
use crate::model::runtime_keys;
use crate::model::spec;

/// CRI state number to the model's state.
pub(super) fn state(raw: i32) -> ContainerState {
    match v1::ContainerState::try_from(raw) {
        Ok(v1::ContainerState::ContainerCreated) => ContainerState::Created,
        Ok(v1::ContainerState::ContainerRunning) => ContainerState::Running,
        Ok(v1::ContainerState::ContainerExited) => ContainerState::Exited,
        Ok(v1::ContainerState::ContainerUnknown) | Err(_) => ContainerState::Unknown,
    }
}

/// One container status, with its init process where the runtime reported it.
pub(super) fn container(status: v1::ContainerStatus, pid: Option<u32>, sandbox_id: SandboxId) -> ContainerStatus {
    let state = state(status.state);
    let exited = state == ContainerState::Exited;
    let meta = status.metadata.unwrap_or_default();
    let annotations = &status.annotations;
    let termination_path = annotations.get(runtime_keys::TERMINATION_PATH).cloned().unwrap_or_default();
    let mounted_at = spec::absolute_path(&termination_path);
    let host_path = status
        .mounts
        .iter()
        .find(|m| !termination_path.is_empty() && spec::absolute_path(&m.container_path) == mounted_at)
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
        hash: annotations.get(runtime_keys::HASH).and_then(|h| u64::from_str_radix(h, 16).ok()).unwrap_or(0),
        restart_count: annotations.get(runtime_keys::RESTART_COUNT).and_then(|n| n.parse().ok()).unwrap_or(0),
        user: status.user.and_then(|user| user.linux).map(user),
        stop_signal: stop_signal(status.stop_signal),
        resources: status.resources.and_then(|resources| resources.linux).map(resources).unwrap_or_default(),
        log_path: status.log_path,
        termination: TerminationFile {
            container_path: termination_path,
            host_path,
            fallback_to_logs: annotations
                .get(runtime_keys::TERMINATION_POLICY)
                .is_some_and(|p| p == "FallbackToLogsOnError"),
            before_log: None,
        },
        pid,
        proven: None,
        exit_observed: false,
    }
}

fn user(user: v1::LinuxContainerUser) -> ContainerUser {
    ContainerUser { uid: user.uid, gid: user.gid, supplemental_groups: user.supplemental_groups }
}

/// `None`: the runtime does not know the field, or the signal is not known here.
fn stop_signal(raw: i32) -> Option<&'static str> {
    let signal = v1::Signal::try_from(raw).ok().filter(|signal| *signal != v1::Signal::RuntimeDefault);
    signal.map(|signal| signal.as_str_name())
}

/// Requests and limits from shares and quota, rounded as upstream does; a value of zero is not set.
fn resources(linux: v1::LinuxContainerResources) -> ContainerResources {
    const MIN_SHARES: i64 = 2;
    const SHARES_PER_CPU: i64 = 1024;
    let request = |shares: i64| shares.saturating_mul(1000).saturating_add(SHARES_PER_CPU - 1) / SHARES_PER_CPU;
    let limit = || linux.cpu_quota.saturating_mul(1000) / linux.cpu_period;
    ContainerResources {
        cpu_request: (linux.cpu_shares >= MIN_SHARES).then(|| request(linux.cpu_shares)),
        cpu_limit: (linux.cpu_period > 0 && linux.cpu_quota > 0).then(limit).filter(|limit| *limit > 0),
        memory_limit: Some(linux.memory_limit_in_bytes).filter(|bytes| *bytes > 0),
    }
}

/// One sandbox status. CRI-O has the runtime handler in lists only: that is `listed_handler`.
pub(super) fn sandbox(status: v1::PodSandboxStatus, listed_handler: &str) -> SandboxStatus {
    let namespaces = status.linux.and_then(|l| l.namespaces).and_then(|n| n.options).unwrap_or_default();
    let reports_network = status.network.is_some();
    let network = status.network.unwrap_or_default();
    let more = network.additional_ips.into_iter().map(|ip| ip.ip);
    let ips = std::iter::once(network.ip).chain(more).filter(|ip| !ip.is_empty()).collect();
    let handler = Some(status.runtime_handler).filter(|handler| !handler.is_empty());
    SandboxStatus {
        id: SandboxId::from(status.id),
        attempt: status.metadata.map(|m| m.attempt).unwrap_or_default(),
        ready: status.state == v1::PodSandboxState::SandboxReady as i32,
        created_at: status.created_at,
        ips,
        reports_network,
        host_network: namespaces.network == v1::NamespaceMode::Node as i32,
        shares_pid_namespace: namespaces.pid != v1::NamespaceMode::Container as i32,
        runtime_handler: handler.unwrap_or_else(|| listed_handler.to_owned()),
        is_static: spec::are_static(&status.annotations),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_annotations_written_by_the_agent() {
        let status = v1::ContainerStatus {
            id: "c1".into(),
            state: v1::ContainerState::ContainerExited as i32,
            exit_code: 3,
            annotations: [
                (runtime_keys::HASH, "ff"),
                (runtime_keys::RESTART_COUNT, "7"),
                (runtime_keys::TERMINATION_PATH, "/dev/termination-log"),
            ]
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

    /// The annotation has the path of the spec; the mount is absolute, also that of a container of a kubelet.
    #[test]
    fn the_termination_file_is_found_by_any_form_of_its_path() {
        let found = |stated: &str, mounted: &str| {
            let mount = |container_path: &str, host_path: &str| v1::Mount {
                container_path: container_path.into(),
                host_path: host_path.into(),
                ..Default::default()
            };
            let status = v1::ContainerStatus {
                annotations: [(runtime_keys::TERMINATION_PATH.to_owned(), stated.to_owned())].into(),
                mounts: vec![mount("/etc/hosts", "/pods/hosts"), mount(mounted, "/pods/x")],
                ..Default::default()
            };
            container(status, None, SandboxId::from("s")).termination.host_path
        };
        for (stated, mounted) in [("log", "/log"), ("/dev//log/", "/dev/log"), ("log", "log")] {
            assert_eq!(found(stated, mounted).as_deref(), Some("/pods/x"), "{stated} {mounted}");
        }
        assert_eq!(found("log", "/dev/log"), None);
        assert_eq!(found("", "/"), None, "no path, no file");
    }

    #[test]
    fn an_absent_network_is_distinguished_from_one_without_addresses() {
        let read = |network| {
            let found = sandbox(v1::PodSandboxStatus { network, ..Default::default() }, "");
            (found.reports_network, found.ips)
        };
        assert_eq!(read(None), (false, Vec::new()));
        assert_eq!(read(Some(v1::PodSandboxNetworkStatus::default())), (true, Vec::new()));
        let more = vec![v1::PodIp { ip: "fd00::1".into() }];
        let dual = v1::PodSandboxNetworkStatus { ip: "10.0.0.1".into(), additional_ips: more };
        assert_eq!(read(Some(dual)), (true, vec!["10.0.0.1".into(), "fd00::1".into()]));
    }

    #[test]
    fn user_and_resources_are_read() {
        let linux = |shares, quota, memory| v1::ContainerStatus {
            resources: Some(v1::ContainerResources {
                linux: Some(v1::LinuxContainerResources {
                    cpu_shares: shares,
                    cpu_period: 100_000,
                    cpu_quota: quota,
                    memory_limit_in_bytes: memory,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            user: Some(v1::ContainerUser {
                linux: Some(v1::LinuxContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] }),
            }),
            ..Default::default()
        };
        let read = |shares, quota, memory| container(linux(shares, quota, memory), None, SandboxId::from("s"));
        let user = ContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        assert_eq!(read(0, 0, 0).user, Some(user));
        for (shares, quota, memory, expected) in [
            (0, 0, 0, (None, None, None)),
            (2, -1, -1, (Some(2), None, None)),
            (102, 15_000, 1 << 20, (Some(100), Some(150), Some(1 << 20))),
            (1536, 1000, 0, (Some(1500), Some(10), None)),
        ] {
            let found = read(shares, quota, memory).resources;
            assert_eq!((found.cpu_request, found.cpu_limit, found.memory_limit), expected, "{shares} {quota} {memory}");
        }
        assert_eq!(container(v1::ContainerStatus::default(), None, SandboxId::from("s")).user, None);
    }

    #[test]
    fn stop_signals_are_read() {
        let read = |raw| {
            let status = v1::ContainerStatus { stop_signal: raw, ..Default::default() };
            container(status, None, SandboxId::from("s")).stop_signal
        };
        assert_eq!(read(v1::Signal::Sigusr1 as i32), Some("SIGUSR1"));
        assert_eq!(read(v1::Signal::Sigrtminplus3 as i32), Some("SIGRTMINPLUS3"));
        assert_eq!([read(v1::Signal::RuntimeDefault as i32), read(999)], [None; 2]);
    }

    #[test]
    fn invalid_annotations_count_as_missing() {
        let status = v1::ContainerStatus {
            state: 99,
            annotations: [(runtime_keys::HASH, "zz"), (runtime_keys::RESTART_COUNT, "-1")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
            ..Default::default()
        };
        let c = container(status, None, SandboxId::from("s"));
        assert_eq!((c.hash, c.restart_count, c.state), (0, 0, ContainerState::Unknown));
    }
}
