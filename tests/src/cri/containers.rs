//! Calls on containers, with containerd's order of steps and error texts.

use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1;
use keblet_proto::cri::v1::ContainerEventType::ContainerCreatedEvent;
use keblet_proto::cri::v1::ContainerEventType::ContainerDeletedEvent;
use keblet_proto::cri::v1::ContainerState::ContainerCreated;
use keblet_proto::cri::v1::ContainerState::ContainerRunning;
use keblet_proto::cri::v1::ContainerState::ContainerUnknown;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::engine::Engine;
use super::engine::State;
use super::program::Exit;
use super::program::Program;
use super::status;
use super::store::Container;
use super::store::ReportedStatus;
use super::store::Sandbox;
use super::trace::Instance;

/// Period at which a command checks that its container still runs.
const EXEC_CHECK: Duration = Duration::from_millis(100);

impl Engine {
    pub(super) async fn create_container(
        self: Arc<Self>,
        request: v1::CreateContainerRequest,
    ) -> Result<String, Status> {
        let config = request.config.unwrap_or_default();
        let metadata =
            config.metadata.clone().ok_or_else(|| Status::unknown("container config must include metadata"))?;
        let (id, name) = {
            let mut state = self.state();
            let sandbox = state.store.sandbox(&request.pod_sandbox_id).map_err(|missing| {
                let text = format!("failed to find sandbox id {:?}: {}", request.pod_sandbox_id, missing.message());
                Status::new(missing.code(), text)
            })?;
            let name = container_name(&metadata, &sandbox.metadata());
            let id = state.new_id();
            state.store.reserve_container(&name, &id)?;
            (id, name)
        };
        self.elapse(self.options.timings.create).await;
        if let Err(refused) = self.add_container(&id, name, &request.pod_sandbox_id, config) {
            self.state().store.release(&id);
            return Err(refused);
        }
        self.emit(ContainerCreatedEvent, &id, &request.pod_sandbox_id);
        self.notify_changed();
        Ok(id)
    }

    fn add_container(
        &self,
        id: &str,
        name: String,
        sandbox_id: &str,
        config: v1::ContainerConfig,
    ) -> Result<(), Status> {
        let mut guard = self.state();
        let state = &mut *guard;
        let sandbox = state.store.sandbox(sandbox_id)?;
        let image_name = config.image.as_ref().map(|image| image.image.as_str()).unwrap_or_default();
        let image = state.images.resolve(image_name)?.clone();
        let linux = config.linux.clone().unwrap_or_default();
        let pid_mode =
            linux.security_context.and_then(|context| context.namespace_options).map(|options| options.pid());
        let container = Container {
            id: id.to_owned(),
            sandbox_id: sandbox_id.to_owned(),
            name,
            image,
            log_path: log_path(sandbox, &config),
            resources: linux.resources,
            cgroup: self.cgroup_path(sandbox, id),
            pid_mode: pid_mode.unwrap_or_default(),
            program: program(state, sandbox, &config),
            status: ReportedStatus {
                state: ContainerCreated,
                pid: 0,
                created_at: self.clock.now_ns(),
                started_at: 0,
                finished_at: 0,
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
            },
            process: None,
            oom_event: false,
            starting: false,
            removing: false,
            stopped: CancellationToken::new(),
            config,
        };
        state.trace.record_created(instance(&container, sandbox));
        state.store.insert_container(container);
        Ok(())
    }

    /// The cgroup of a container, in the format of the cgroup driver.
    fn cgroup_path(&self, sandbox: &Sandbox, id: &str) -> String {
        let parent = sandbox.config.linux.as_ref().map(|linux| linux.cgroup_parent.as_str()).unwrap_or_default();
        match self.options.cgroup_driver {
            v1::CgroupDriver::Systemd => format!("{}:cri-containerd:{id}", parent.rsplit('/').next().unwrap_or(parent)),
            v1::CgroupDriver::Cgroupfs => format!("{}/{id}", parent.trim_end_matches('/')),
        }
    }

    pub(super) async fn start_container(self: Arc<Self>, id: String) -> Result<(), Status> {
        let sandbox_ready = {
            let mut state = self.state();
            let container = state.store.container_mut(&id)?;
            set_starting(container)?;
            let sandbox_id = container.sandbox_id.clone();
            state.store.sandbox(&sandbox_id).map(|sandbox| sandbox.ready)
        };
        let started = match sandbox_ready {
            Ok(true) => self.start_process(&id).await,
            Ok(false) => Err("sandbox container is not running".to_owned()),
            Err(missing) => Err(missing.message().to_owned()),
        };
        if let Err(reason) = started {
            let text = format!("failed to start container {id:?}: {reason}");
            self.record_start_error(&id, &text);
            self.notify_changed();
            return Err(Status::unknown(text));
        }
        self.confirm_start(&id);
        Ok(())
    }

    async fn start_process(self: &Arc<Self>, id: &str) -> Result<(), String> {
        let timings = self.options.timings;
        self.elapse(timings.start_to_process).await;
        self.spawn_process(id)?;
        self.elapse(timings.start.saturating_sub(timings.start_to_process)).await;
        Ok(())
    }

    /// Stops a container: the stop signal, `grace`, SIGKILL; returns when the runtime has recorded the exit. A
    /// container that does not run or does not exist counts as stopped.
    pub(super) async fn stop_container(self: Arc<Self>, id: String, grace: Duration) -> Result<(), Status> {
        let (stopped, lost) = match self.state().store.containers.get(&id) {
            Some(container) if matches!(container.status.state, ContainerRunning | ContainerUnknown) => {
                let unknown = container.status.state == ContainerUnknown;
                (container.stopped.clone(), unknown && !container.is_alive())
            }
            _ => return Ok(()),
        };
        if lost {
            self.report_exit(&id, Some("Unknown"));
            return Ok(());
        }
        self.elapse(self.options.timings.kill).await;
        if !grace.is_zero() {
            self.deliver_stop_signal(&id);
            if tokio::time::timeout(grace, stopped.cancelled()).await.is_ok() {
                return Ok(());
            }
        }
        self.exit_process(&id, Exit::Signal(9));
        stopped.cancelled().await;
        Ok(())
    }

    pub(super) async fn remove_container(self: Arc<Self>, id: String) -> Result<(), Status> {
        if !self.state().store.containers.contains_key(&id) {
            return Ok(());
        }
        Arc::clone(&self).stop_container(id.clone(), Duration::ZERO).await?;
        match self.state().store.container_mut(&id) {
            Ok(container) => set_removing(container)?,
            Err(_) => return Ok(()),
        }
        self.elapse(self.options.timings.remove).await;
        let removed = {
            let mut state = self.state();
            state.trace.record_removed(&id);
            state.store.remove_container(&id)
        };
        if let Some(container) = removed {
            self.emit(ContainerDeletedEvent, &id, &container.sandbox_id);
        }
        self.notify_changed();
        Ok(())
    }

    pub(super) async fn container_status(
        self: Arc<Self>,
        request: v1::ContainerStatusRequest,
    ) -> Result<v1::ContainerStatusResponse, Status> {
        self.elapse(self.options.timings.status / 2).await;
        let response = {
            let state = self.state();
            let container = state.store.container(&request.container_id)?;
            v1::ContainerStatusResponse {
                status: Some(status::container(container)),
                info: if request.verbose { status::container_info(container) } else { Default::default() },
            }
        };
        self.elapse(self.options.timings.status / 2).await;
        Ok(response)
    }

    pub(super) async fn list_containers(
        self: Arc<Self>,
        filter: Option<v1::ContainerFilter>,
    ) -> Result<Vec<v1::Container>, Status> {
        let filter = filter.unwrap_or_default();
        let matches = |container: &&Container| {
            container.id.starts_with(&filter.id)
                && container.sandbox_id.starts_with(&filter.pod_sandbox_id)
                && filter.state.is_none_or(|only| only.state() == container.status.state)
                && status::selects(&filter.label_selector, &container.config.labels)
        };
        self.elapse(self.options.timings.list / 2).await;
        let items = self.state().store.containers.values().filter(matches).map(status::container_item).collect();
        self.elapse(self.options.timings.list / 2).await;
        Ok(items)
    }

    pub(super) async fn update_resources(
        self: Arc<Self>,
        request: v1::UpdateContainerResourcesRequest,
    ) -> Result<(), Status> {
        let mut state = self.state();
        let container = state.store.container_mut(&request.container_id)?;
        if let Some(linux) = request.linux {
            container.resources = Some(linux);
        }
        Ok(())
    }

    pub(super) async fn reopen_log(self: Arc<Self>, id: String) -> Result<(), Status> {
        let state = self.state();
        match state.store.container(&id)?.status.state {
            ContainerRunning => Ok(()),
            _ => Err(Status::unknown("container is not running")),
        }
    }

    pub(super) async fn exec_sync(
        self: Arc<Self>,
        request: v1::ExecSyncRequest,
    ) -> Result<v1::ExecSyncResponse, Status> {
        let result = {
            let state = self.state();
            let container = state.store.container(&request.container_id)?;
            if container.status.state != ContainerRunning || !container.is_alive() {
                let state = container.status.state.as_str_name();
                return Err(Status::unknown(format!("failed to exec in container: container is in {state} state")));
            }
            let pod = state.store.sandbox(&container.sandbox_id)?.metadata().name;
            state.execs.get(&(pod, container.metadata().name)).cloned().unwrap_or_default()
        };
        self.elapse(self.options.timings.exec).await;
        let limit = u64::try_from(request.timeout).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs);
        if let Some(limit) = limit.filter(|limit| result.takes > *limit) {
            tokio::time::sleep(limit).await;
            let text = format!("failed to exec in container: timeout {limit:?} exceeded: context deadline exceeded");
            return Err(Status::deadline_exceeded(text));
        }
        let ends = Instant::now() + result.takes;
        while Instant::now() < ends {
            // A command ends with its container.
            if !self.state().store.container(&request.container_id)?.is_alive() {
                return Err(Status::unknown("failed to exec in container: the container has exited"));
            }
            tokio::time::sleep(EXEC_CHECK.min(ends - Instant::now())).await;
        }
        Ok(v1::ExecSyncResponse { stdout: result.stdout.into(), exit_code: result.code, ..Default::default() })
    }
}

/// `NAME_POD_NAMESPACE_UID_ATTEMPT`: the name that a container reserves until it is removed.
fn container_name(container: &v1::ContainerMetadata, pod: &v1::PodSandboxMetadata) -> String {
    format!("{}_{}_{}_{}_{}", container.name, pod.name, pod.namespace, pod.uid, container.attempt)
}

fn log_path(sandbox: &Sandbox, config: &v1::ContainerConfig) -> String {
    if config.log_path.is_empty() || sandbox.config.log_directory.is_empty() {
        return String::new();
    }
    format!("{}/{}", sandbox.config.log_directory.trim_end_matches('/'), config.log_path)
}

fn program(state: &State, sandbox: &Sandbox, config: &v1::ContainerConfig) -> Program {
    let metadata = config.metadata.clone().unwrap_or_default();
    if let Some(scripted) = state.scripts.find(&sandbox.metadata().name, &metadata.name, metadata.attempt) {
        return scripted.clone();
    }
    let words: Vec<String> = config.command.iter().chain(&config.args).cloned().collect();
    Program::from_command(&words, metadata.attempt)
        .unwrap_or_else(|reason| Program::cannot_start(&format!("malformed simulated program: {reason}")))
}

fn instance(container: &Container, sandbox: &Sandbox) -> Instance {
    let (metadata, pod) = (container.metadata(), sandbox.metadata());
    Instance {
        id: container.id.clone(),
        pod_uid: pod.uid,
        pod: format!("{}/{}", pod.namespace, pod.name),
        container: metadata.name,
        attempt: metadata.attempt,
        created: Instant::now(),
        started: None,
        pid: None,
        exited: None,
        gone: None,
        reported: None,
        removed: None,
    }
}

fn set_starting(container: &mut Container) -> Result<(), Status> {
    let refused = |reason: &str| {
        Err(Status::unknown(format!("failed to set starting state for container {:?}: {reason}", container.id)))
    };
    if container.status.state != ContainerCreated {
        return refused(&format!("container is in {} state", container.status.state.as_str_name()));
    }
    if container.removing {
        return refused("container is in removing state, can't be started");
    }
    if container.starting {
        return refused("container is already in starting state");
    }
    container.starting = true;
    Ok(())
}

fn set_removing(container: &mut Container) -> Result<(), Status> {
    let refused = |reason: &str| {
        Err(Status::unknown(format!("failed to set removing state for container {:?}: {reason}", container.id)))
    };
    if container.starting {
        return refused("container is in starting state, can't be removed");
    }
    if container.removing {
        return refused("container is already in removing state");
    }
    container.removing = true;
    Ok(())
}
