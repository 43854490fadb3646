//! The CRI calls for starting and cleaning up.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use futures_util::StreamExt as _;
use futures_util::stream;
use keblet_peers::ContainerView;
use keblet_peers::PodView;
use keblet_proto::cri::v1::ContainerFilter;
use keblet_proto::cri::v1::ContainerState;
use keblet_proto::cri::v1::ContainerStatusRequest;
use keblet_proto::cri::v1::ContainerStatusResponse;
use keblet_proto::cri::v1::ListContainersRequest;
use keblet_proto::cri::v1::ListImagesRequest;
use keblet_proto::cri::v1::ListPodSandboxRequest;
use keblet_proto::cri::v1::PodSandboxState;
use keblet_proto::cri::v1::PodSandboxStatusRequest;
use keblet_proto::cri::v1::RemoveContainerRequest;
use keblet_proto::cri::v1::RemovePodSandboxRequest;
use keblet_proto::cri::v1::StatusRequest;
use keblet_proto::cri::v1::StopPodSandboxRequest;
use keblet_proto::cri::v1::image_service_client::ImageServiceClient;
use keblet_proto::cri::v1::runtime_service_client::RuntimeServiceClient;
use tonic::Code;
use tonic::transport::Channel;
use tonic::transport::Endpoint;

const DEADLINE: Duration = Duration::from_secs(30);
/// Removing pods is mostly waiting, but each removal executes the OCI runtime and CNI plugins.
const REMOVALS_AT_ONCE: usize = 8;

/// A connection to the private runtime.
#[derive(Clone)]
pub(crate) struct Cri {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
}

impl Cri {
    /// Connects to the socket.
    ///
    /// # Errors
    /// The runtime does not accept the connection.
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let address = format!("unix:{}", socket.display());
        let channel = Endpoint::from_shared(address)
            .with_context(|| format!("{} is not an address", socket.display()))?
            .timeout(DEADLINE)
            .connect()
            .await
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        Ok(Self { runtime: RuntimeServiceClient::new(channel.clone()), images: ImageServiceClient::new(channel) })
    }

    /// Checks that runtime and network are ready.
    ///
    /// # Errors
    /// One is not ready; the error has the runtime's message.
    pub(crate) async fn ready(&mut self) -> Result<()> {
        let status = self.runtime.status(StatusRequest::default()).await.context("cannot get the status")?;
        let conditions = status.into_inner().status.map(|status| status.conditions).unwrap_or_default();
        match conditions.iter().find(|condition| !condition.status) {
            Some(missing) => anyhow::bail!("{}: {} {}", missing.r#type, missing.reason, missing.message),
            None => Ok(()),
        }
    }

    /// The names of all images.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub(crate) async fn images(&mut self) -> Result<Vec<String>> {
        let images = self.images.list_images(ListImagesRequest::default()).await.context("cannot list images")?;
        Ok(images.into_inner().images.into_iter().flat_map(|image| image.repo_tags).collect())
    }

    /// All pods with their containers.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub(crate) async fn pods(&mut self) -> Result<Vec<PodView>> {
        let sandboxes =
            self.runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await.context("cannot list pods")?;
        let mut pods = Vec::new();
        for sandbox in sandboxes.into_inner().items {
            let metadata = sandbox.metadata.clone().unwrap_or_default();
            let containers = self.containers(&sandbox.id).await?;
            let request = PodSandboxStatusRequest { pod_sandbox_id: sandbox.id.clone(), ..Default::default() };
            let status = match self.runtime.pod_sandbox_status(request).await {
                Ok(status) => status.into_inner().status,
                // It was removed meanwhile.
                Err(status) if status.code() == Code::NotFound => continue,
                Err(status) => {
                    return Err(status).with_context(|| format!("cannot get the status of pod {}", sandbox.id));
                }
            };
            pods.push(PodView {
                namespace: metadata.namespace,
                name: metadata.name,
                attempt: metadata.attempt,
                ready: sandbox.state() == PodSandboxState::SandboxReady,
                ip: status.and_then(|status| status.network).map(|network| network.ip).unwrap_or_default(),
                id: sandbox.id,
                containers,
            });
        }
        Ok(pods)
    }

    async fn containers(&mut self, pod: &str) -> Result<Vec<ContainerView>> {
        let filter = ContainerFilter { pod_sandbox_id: pod.to_owned(), ..Default::default() };
        let request = ListContainersRequest { filter: Some(filter) };
        let listed = self.runtime.list_containers(request).await.context("cannot list containers")?;
        let mut views = Vec::new();
        for container in listed.into_inner().containers {
            let request = ContainerStatusRequest { container_id: container.id.clone(), verbose: true };
            match self.runtime.container_status(request).await {
                Ok(status) => views.extend(view(status.into_inner())),
                // It was removed meanwhile.
                Err(status) if status.code() == Code::NotFound => {}
                Err(status) => {
                    return Err(status).with_context(|| format!("cannot get the status of container {}", container.id));
                }
            }
        }
        views.sort_by(|left, right| (&left.name, left.attempt).cmp(&(&right.name, right.attempt)));
        Ok(views)
    }

    /// Removes every pod and container. Continues after failures and returns them.
    pub(crate) async fn remove_all(&mut self) -> Vec<String> {
        let mut failures = Vec::new();
        match self.runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await {
            Ok(pods) => {
                let removals = pods.into_inner().items.into_iter().map(|pod| self.clone().remove_pod(pod.id));
                failures.extend(
                    stream::iter(removals)
                        .buffer_unordered(REMOVALS_AT_ONCE)
                        .filter_map(async |r| r.err())
                        .map(|e| format!("{e:#}"))
                        .collect::<Vec<_>>()
                        .await,
                );
            }
            Err(status) => failures.push(format!("cannot list pods: {}", status.message())),
        }
        match self.runtime.list_containers(ListContainersRequest::default()).await {
            Ok(containers) => {
                for container in containers.into_inner().containers {
                    let id = container.id;
                    if let Err(status) =
                        self.runtime.remove_container(RemoveContainerRequest { container_id: id.clone() }).await
                    {
                        failures.push(format!("cannot remove container {id}: {}", status.message()));
                    }
                }
            }
            Err(status) => failures.push(format!("cannot list containers: {}", status.message())),
        }
        failures
    }

    async fn remove_pod(mut self, id: String) -> Result<()> {
        self.runtime
            .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() })
            .await
            .with_context(|| format!("cannot stop pod {id}"))?;
        self.runtime
            .remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.clone() })
            .await
            .with_context(|| format!("cannot remove pod {id}"))?;
        Ok(())
    }
}

fn view(response: ContainerStatusResponse) -> Option<ContainerView> {
    let status = response.status?;
    let state = match status.state() {
        ContainerState::ContainerCreated => "created",
        ContainerState::ContainerRunning => "running",
        ContainerState::ContainerExited => "exited",
        ContainerState::ContainerUnknown => "unknown",
    };
    let info: Option<serde_json::Value> = response.info.get("info").and_then(|info| serde_json::from_str(info).ok());
    let pid = info.and_then(|info| info["pid"].as_i64()).and_then(|pid| i32::try_from(pid).ok());
    let metadata = status.metadata.unwrap_or_default();
    Some(ContainerView {
        id: status.id,
        name: metadata.name,
        attempt: metadata.attempt,
        state: state.to_owned(),
        exit_code: status.exit_code,
        reason: status.reason,
        pid: pid.filter(|pid| *pid > 0),
        started_at: status.started_at,
        finished_at: status.finished_at,
    })
}
