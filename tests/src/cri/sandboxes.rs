//! Calls on pod sandboxes, with containerd's order of steps and error texts.

use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1;
use keblet_proto::cri::v1::ContainerEventType::ContainerCreatedEvent;
use keblet_proto::cri::v1::ContainerEventType::ContainerDeletedEvent;
use keblet_proto::cri::v1::ContainerEventType::ContainerStartedEvent;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::engine::Engine;
use super::status;
use super::store::Sandbox;

impl Engine {
    pub(super) async fn run_sandbox(self: Arc<Self>, request: v1::RunPodSandboxRequest) -> Result<String, Status> {
        let config = request.config.unwrap_or_default();
        let name = sandbox_name(&config).ok_or_else(|| Status::unknown("sandbox config must include metadata"))?;
        let handler = request.runtime_handler;
        if !handler.is_empty() && !self.options.handlers.contains(&handler) {
            let text = format!("failed to get sandbox runtime: no runtime for {handler:?} is configured");
            return Err(Status::unknown(text));
        }
        let id = {
            let mut state = self.state();
            let id = state.new_id();
            state.store.reserve_sandbox(&name, &id)?;
            id
        };
        self.elapse(self.options.timings.run_sandbox).await;
        if let Err(refused) = self.add_sandbox(&id, name, config, handler) {
            self.state().store.release(&id);
            return Err(refused);
        }
        self.emit(ContainerCreatedEvent, &id, &id);
        self.emit(ContainerStartedEvent, &id, &id);
        self.notify_changed();
        Ok(id)
    }

    fn add_sandbox(&self, id: &str, name: String, config: v1::PodSandboxConfig, handler: String) -> Result<(), Status> {
        let mut state = self.state();
        let mut sandbox = Sandbox {
            id: id.to_owned(),
            name,
            config,
            runtime_handler: handler,
            created_at: self.clock.now_ns(),
            ready: true,
            ip: String::new(),
            pid: None,
            stopped: CancellationToken::new(),
        };
        if sandbox.namespaces().network() != v1::NamespaceMode::Node {
            let network = state.conditions.iter().find(|condition| condition.r#type == "NetworkReady");
            if network.is_some_and(|condition| !condition.status) {
                let text = format!("failed to setup network for sandbox {id:?}: cni plugin not initialized");
                return Err(Status::unknown(text));
            }
            state.addresses += 1;
            let [_, a, b, c] = state.addresses.to_be_bytes();
            sandbox.ip = format!("10.{a}.{b}.{c}");
        }
        let parent = sandbox.config.linux.as_ref().map(|linux| linux.cgroup_parent.as_str()).unwrap_or_default();
        sandbox.pid = Some(self.kernel.spawn(id, &format!("{parent}/{id}")));
        state.store.sandboxes.insert(id.to_owned(), sandbox);
        Ok(())
    }

    pub(super) async fn stop_sandbox(self: Arc<Self>, id: String) -> Result<(), Status> {
        let containers = self.state().store.containers_of(&id);
        for container in containers {
            Arc::clone(&self).stop_container(container, Duration::ZERO).await?;
        }
        let stopped = match self.state().store.sandboxes.get(&id) {
            Some(sandbox) if sandbox.ready => sandbox.stopped.clone(),
            _ => return Ok(()),
        };
        self.elapse(self.options.timings.stop_sandbox).await;
        self.kill_sandbox(&id);
        stopped.cancelled().await;
        Ok(())
    }

    pub(super) async fn remove_sandbox(self: Arc<Self>, id: String) -> Result<(), Status> {
        if !self.state().store.sandboxes.contains_key(&id) {
            return Ok(());
        }
        Arc::clone(&self).stop_sandbox(id.clone()).await?;
        let containers = self.state().store.containers_of(&id);
        for container in containers {
            Arc::clone(&self).remove_container(container).await?;
        }
        self.elapse(self.options.timings.remove_sandbox).await;
        self.emit(ContainerDeletedEvent, &id, &id);
        self.state().store.remove_sandbox(&id);
        self.notify_changed();
        Ok(())
    }

    pub(super) async fn sandbox_status(
        self: Arc<Self>,
        request: v1::PodSandboxStatusRequest,
    ) -> Result<v1::PodSandboxStatusResponse, Status> {
        self.elapse(self.options.timings.status / 2).await;
        let response = {
            let state = self.state();
            let sandbox = state.store.sandbox(&request.pod_sandbox_id)?;
            let features = &self.options.features;
            v1::PodSandboxStatusResponse {
                status: Some(status::sandbox(sandbox)),
                info: if request.verbose { status::sandbox_info(sandbox) } else { Default::default() },
                containers_statuses: if features.status_containers {
                    status::containers_of(&state.store, &sandbox.id)
                } else {
                    Vec::new()
                },
                timestamp: if features.status_timestamp { self.clock.now_ns() } else { 0 },
            }
        };
        self.elapse(self.options.timings.status / 2).await;
        Ok(response)
    }

    pub(super) async fn list_sandboxes(
        self: Arc<Self>,
        filter: Option<v1::PodSandboxFilter>,
    ) -> Result<Vec<v1::PodSandbox>, Status> {
        let filter = filter.unwrap_or_default();
        let matches = |sandbox: &&Sandbox| {
            sandbox.id.starts_with(&filter.id)
                && filter.state.is_none_or(|only| only.state() == status::sandbox_state(sandbox))
                && status::selects(&filter.label_selector, &sandbox.config.labels)
        };
        self.elapse(self.options.timings.list / 2).await;
        let items = self.state().store.sandboxes.values().filter(matches).map(status::sandbox_item).collect();
        self.elapse(self.options.timings.list / 2).await;
        Ok(items)
    }

    pub(super) async fn update_sandbox_resources(
        self: Arc<Self>,
        request: v1::UpdatePodSandboxResourcesRequest,
    ) -> Result<(), Status> {
        if !self.options.features.sandbox_resources {
            return Err(Status::unimplemented("unknown method UpdatePodSandboxResources"));
        }
        let mut state = self.state();
        state.store.sandbox(&request.pod_sandbox_id)?;
        if let Some(sandbox) = state.store.sandboxes.get_mut(&request.pod_sandbox_id) {
            let linux = sandbox.config.linux.get_or_insert_default();
            (linux.overhead, linux.resources) = (request.overhead, request.resources);
        }
        Ok(())
    }
}

/// `POD_NAMESPACE_UID_ATTEMPT`: the name that a sandbox reserves until it is removed.
pub(super) fn sandbox_name(config: &v1::PodSandboxConfig) -> Option<String> {
    let metadata = config.metadata.as_ref()?;
    Some(format!("{}_{}_{}_{}", metadata.name, metadata.namespace, metadata.uid, metadata.attempt))
}
