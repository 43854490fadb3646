//! Calls on the runtime, its images and statistics.

use std::sync::Arc;

use keblet_proto::cri::v1;
use keblet_proto::cri::v1::ContainerState::ContainerRunning;
use tonic::Status;

use super::engine::Engine;
use super::engine::State;
use super::status;
use super::store::Container;
use super::store::Sandbox;

/// Reported usage of every simulated process: 1 % of a core and 4 MiB.
const CPU_SHARE: u64 = 100;
const MEMORY_BYTES: u64 = 4 << 20;

impl Engine {
    pub(super) fn version(&self) -> v1::VersionResponse {
        v1::VersionResponse {
            version: "0.1.0".to_owned(),
            runtime_name: "containerd".to_owned(),
            runtime_version: self.options.version.clone(),
            runtime_api_version: "v1".to_owned(),
        }
    }

    pub(super) fn runtime_status(&self) -> v1::StatusResponse {
        let user_namespaces = self.options.features.user_namespaces;
        let features = v1::RuntimeHandlerFeatures { user_namespaces, ..Default::default() };
        let handler = |name: &str| v1::RuntimeHandler { name: name.to_owned(), features: Some(features) };
        let named = self.options.handlers.iter().map(|name| handler(name));
        v1::StatusResponse {
            status: Some(v1::RuntimeStatus { conditions: self.state().conditions.clone() }),
            runtime_handlers: std::iter::once(handler("")).chain(named).collect(),
            ..Default::default()
        }
    }

    pub(super) fn runtime_config(&self) -> Result<v1::RuntimeConfigResponse, Status> {
        if !self.options.features.runtime_config {
            return Err(Status::unimplemented("unknown method RuntimeConfig"));
        }
        let driver = self.options.cgroup_driver.into();
        Ok(v1::RuntimeConfigResponse { linux: Some(v1::LinuxRuntimeConfiguration { cgroup_driver: driver }) })
    }

    pub(super) async fn image_status(self: Arc<Self>, image: Option<v1::ImageSpec>) -> v1::ImageStatusResponse {
        self.elapse(self.options.timings.status).await;
        let name = image.unwrap_or_default().image;
        v1::ImageStatusResponse { image: self.state().images.find(&name).cloned(), ..Default::default() }
    }

    pub(super) async fn pull_image(self: Arc<Self>, image: Option<v1::ImageSpec>) -> Result<String, Status> {
        self.elapse(self.options.timings.pull).await;
        self.state().images.pull(&image.unwrap_or_default().image)
    }

    pub(super) fn image_fs_info(&self) -> v1::ImageFsInfoResponse {
        let usage = v1::FilesystemUsage {
            timestamp: self.clock.now_ns(),
            fs_id: Some(v1::FilesystemIdentifier {
                mountpoint: "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs".to_owned(),
            }),
            used_bytes: Some(v1::UInt64Value { value: self.state().images.used_bytes() }),
            inodes_used: Some(v1::UInt64Value { value: 0 }),
        };
        v1::ImageFsInfoResponse { image_filesystems: vec![usage.clone()], container_filesystems: vec![usage] }
    }

    pub(super) fn container_stats(&self, id: &str) -> Result<v1::ContainerStats, Status> {
        Ok(container_stats(self.state().store.container(id)?, self.clock.now_ns()))
    }

    pub(super) fn list_container_stats(&self, filter: Option<v1::ContainerStatsFilter>) -> Vec<v1::ContainerStats> {
        let filter = filter.unwrap_or_default();
        let matches = |container: &&Container| {
            container.id.starts_with(&filter.id)
                && container.sandbox_id.starts_with(&filter.pod_sandbox_id)
                && status::selects(&filter.label_selector, &container.config.labels)
        };
        let now = self.clock.now_ns();
        self.state()
            .store
            .containers
            .values()
            .filter(matches)
            .map(|container| container_stats(container, now))
            .collect()
    }

    pub(super) fn sandbox_stats(&self, id: &str) -> Result<v1::PodSandboxStats, Status> {
        let state = self.state();
        Ok(sandbox_stats(&state, state.store.sandbox(id)?, self.clock.now_ns()))
    }

    pub(super) fn list_sandbox_stats(&self, filter: Option<v1::PodSandboxStatsFilter>) -> Vec<v1::PodSandboxStats> {
        let filter = filter.unwrap_or_default();
        let matches = |sandbox: &&Sandbox| {
            sandbox.id.starts_with(&filter.id) && status::selects(&filter.label_selector, &sandbox.config.labels)
        };
        let (state, now) = (self.state(), self.clock.now_ns());
        state.store.sandboxes.values().filter(matches).map(|sandbox| sandbox_stats(&state, sandbox, now)).collect()
    }
}

fn sandbox_stats(state: &State, sandbox: &Sandbox, now: i64) -> v1::PodSandboxStats {
    let containers: Vec<_> = state.store.containers_of(&sandbox.id);
    let containers = containers.iter().filter_map(|id| state.store.containers.get(id));
    let containers: Vec<_> = containers.map(|container| container_stats(container, now)).collect();
    let processes = u64::try_from(containers.len()).unwrap_or(u64::MAX) + u64::from(sandbox.ready);
    v1::PodSandboxStats {
        attributes: Some(v1::PodSandboxAttributes {
            id: sandbox.id.clone(),
            metadata: sandbox.config.metadata.clone(),
            labels: sandbox.config.labels.clone(),
            annotations: sandbox.config.annotations.clone(),
        }),
        linux: Some(v1::LinuxPodSandboxStats {
            process: Some(v1::ProcessUsage { timestamp: now, process_count: number(processes) }),
            containers,
            ..Default::default()
        }),
        windows: None,
    }
}

fn container_stats(container: &Container, now: i64) -> v1::ContainerStats {
    let running = container.status.state == ContainerRunning;
    let uptime = u64::try_from(now - container.status.started_at).unwrap_or(0);
    let (cpu, memory) = if running { (uptime / CPU_SHARE, MEMORY_BYTES) } else { (0, 0) };
    v1::ContainerStats {
        attributes: Some(v1::ContainerAttributes {
            id: container.id.clone(),
            metadata: container.config.metadata.clone(),
            labels: container.config.labels.clone(),
            annotations: container.config.annotations.clone(),
        }),
        cpu: Some(v1::CpuUsage { timestamp: now, usage_core_nano_seconds: number(cpu), ..Default::default() }),
        memory: Some(v1::MemoryUsage {
            timestamp: now,
            working_set_bytes: number(memory),
            usage_bytes: number(memory),
            rss_bytes: number(memory),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn number(value: u64) -> Option<v1::UInt64Value> {
    Some(v1::UInt64Value { value })
}
