//! The gRPC RuntimeService: maps requests to methods and object names for the engine.

use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1;
use tokio_stream::Iter;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;
use tonic::Response;
use tonic::Status;

use super::engine::Engine;
use super::method::Method;
use super::sandboxes::sandbox_name;

/// The label by which clients select a pod's objects.
const POD_UID: &str = "io.kubernetes.pod.uid";

/// Server side of `runtime.v1.RuntimeService`.
pub(super) struct RuntimeApi(pub(super) Arc<Engine>);

/// A finite stream of list pages, one object each.
type Pages<T> = Iter<std::vec::IntoIter<Result<T, Status>>>;
type Answer<T> = Result<Response<T>, Status>;

impl RuntimeApi {
    fn engine(&self) -> Arc<Engine> {
        Arc::clone(&self.0)
    }

    /// The reserved name of a container, or the id if it does not exist.
    fn container(&self, id: &str) -> String {
        self.0.state().store.containers.get(id).map_or(id, |container| &container.name).to_owned()
    }

    /// The reserved name of a sandbox, or the id if it does not exist.
    fn sandbox(&self, id: &str) -> String {
        self.0.state().store.sandboxes.get(id).map_or(id, |sandbox| &sandbox.name).to_owned()
    }

    /// The name that a new container in that sandbox would reserve.
    fn future_container(&self, request: &v1::CreateContainerRequest) -> String {
        let metadata = request.config.as_ref().and_then(|config| config.metadata.clone()).unwrap_or_default();
        let sandbox = self.sandbox(&request.pod_sandbox_id);
        format!("{}_{sandbox} attempt {}", metadata.name, metadata.attempt)
    }
}

impl Engine {
    /// Fails if the simulated runtime has no streaming lists.
    pub(super) fn streaming_lists(&self) -> Result<(), Status> {
        match self.options.features.streaming_lists {
            true => Ok(()),
            false => Err(Status::unimplemented("unknown method for a streaming list")),
        }
    }
}

fn pages<T, P>(items: Vec<T>, page: impl Fn(Vec<T>) -> P) -> Pages<P> {
    tokio_stream::iter(items.into_iter().map(|item| Ok(page(vec![item]))).collect::<Vec<_>>())
}

fn pod_uid(selector: Option<&std::collections::BTreeMap<String, String>>) -> String {
    selector.and_then(|labels| labels.get(POD_UID)).cloned().unwrap_or_default()
}

fn refused<T>(reason: &str) -> Result<T, Status> {
    Err(Status::unimplemented(reason))
}

#[tonic::async_trait]
impl v1::runtime_service_server::RuntimeService for RuntimeApi {
    async fn version(&self, _request: Request<v1::VersionRequest>) -> Answer<v1::VersionResponse> {
        let engine = self.engine();
        self.0.call(Method::Version, String::new(), async move { Ok(engine.version()) }).await
    }

    async fn status(&self, _request: Request<v1::StatusRequest>) -> Answer<v1::StatusResponse> {
        let engine = self.engine();
        self.0.call(Method::Status, String::new(), async move { Ok(engine.runtime_status()) }).await
    }

    async fn runtime_config(&self, _request: Request<v1::RuntimeConfigRequest>) -> Answer<v1::RuntimeConfigResponse> {
        let engine = self.engine();
        self.0.call(Method::RuntimeConfig, String::new(), async move { engine.runtime_config() }).await
    }

    async fn update_runtime_config(
        &self,
        _request: Request<v1::UpdateRuntimeConfigRequest>,
    ) -> Answer<v1::UpdateRuntimeConfigResponse> {
        self.0.call(Method::UpdateRuntimeConfig, String::new(), async { Ok(v1::UpdateRuntimeConfigResponse {}) }).await
    }

    async fn run_pod_sandbox(&self, request: Request<v1::RunPodSandboxRequest>) -> Answer<v1::RunPodSandboxResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = request.config.as_ref().and_then(sandbox_name).unwrap_or_default();
        self.0
            .call(Method::RunPodSandbox, object, async move {
                Ok(v1::RunPodSandboxResponse { pod_sandbox_id: engine.run_sandbox(request).await? })
            })
            .await
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<v1::StopPodSandboxRequest>,
    ) -> Answer<v1::StopPodSandboxResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.sandbox(&request.pod_sandbox_id);
        self.0
            .call(Method::StopPodSandbox, object, async move {
                engine.stop_sandbox(request.pod_sandbox_id).await?;
                Ok(v1::StopPodSandboxResponse {})
            })
            .await
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<v1::RemovePodSandboxRequest>,
    ) -> Answer<v1::RemovePodSandboxResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.sandbox(&request.pod_sandbox_id);
        self.0
            .call(Method::RemovePodSandbox, object, async move {
                engine.remove_sandbox(request.pod_sandbox_id).await?;
                Ok(v1::RemovePodSandboxResponse {})
            })
            .await
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<v1::PodSandboxStatusRequest>,
    ) -> Answer<v1::PodSandboxStatusResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.sandbox(&request.pod_sandbox_id);
        self.0.call(Method::PodSandboxStatus, object, async move { engine.sandbox_status(request).await }).await
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<v1::ListPodSandboxRequest>,
    ) -> Answer<v1::ListPodSandboxResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = pod_uid(request.filter.as_ref().map(|filter| &filter.label_selector));
        self.0
            .call(Method::ListPodSandbox, object, async move {
                Ok(v1::ListPodSandboxResponse { items: engine.list_sandboxes(request.filter).await? })
            })
            .await
    }

    type StreamPodSandboxesStream = Pages<v1::StreamPodSandboxesResponse>;

    async fn stream_pod_sandboxes(
        &self,
        request: Request<v1::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = pod_uid(request.filter.as_ref().map(|filter| &filter.label_selector));
        self.0
            .call(Method::StreamPodSandboxes, object, async move {
                engine.streaming_lists()?;
                let items = engine.list_sandboxes(request.filter).await?;
                Ok(pages(items, |pod_sandboxes| v1::StreamPodSandboxesResponse { pod_sandboxes }))
            })
            .await
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<v1::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<v1::UpdatePodSandboxResourcesResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.sandbox(&request.pod_sandbox_id);
        self.0
            .call(Method::UpdatePodSandboxResources, object, async move {
                engine.update_sandbox_resources(request).await?;
                Ok(v1::UpdatePodSandboxResourcesResponse {})
            })
            .await
    }

    async fn create_container(
        &self,
        request: Request<v1::CreateContainerRequest>,
    ) -> Answer<v1::CreateContainerResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.future_container(&request);
        self.0
            .call(Method::CreateContainer, object, async move {
                Ok(v1::CreateContainerResponse { container_id: engine.create_container(request).await? })
            })
            .await
    }

    async fn start_container(&self, request: Request<v1::StartContainerRequest>) -> Answer<v1::StartContainerResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0
            .call(Method::StartContainer, object, async move {
                engine.start_container(request.container_id).await?;
                Ok(v1::StartContainerResponse {})
            })
            .await
    }

    async fn stop_container(&self, request: Request<v1::StopContainerRequest>) -> Answer<v1::StopContainerResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0
            .call(Method::StopContainer, object, async move {
                let grace = Duration::from_secs(u64::try_from(request.timeout).unwrap_or(0));
                engine.stop_container(request.container_id, grace).await?;
                Ok(v1::StopContainerResponse {})
            })
            .await
    }

    async fn remove_container(
        &self,
        request: Request<v1::RemoveContainerRequest>,
    ) -> Answer<v1::RemoveContainerResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0
            .call(Method::RemoveContainer, object, async move {
                engine.remove_container(request.container_id).await?;
                Ok(v1::RemoveContainerResponse {})
            })
            .await
    }

    async fn container_status(
        &self,
        request: Request<v1::ContainerStatusRequest>,
    ) -> Answer<v1::ContainerStatusResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0.call(Method::ContainerStatus, object, async move { engine.container_status(request).await }).await
    }

    async fn list_containers(&self, request: Request<v1::ListContainersRequest>) -> Answer<v1::ListContainersResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = pod_uid(request.filter.as_ref().map(|filter| &filter.label_selector));
        self.0
            .call(Method::ListContainers, object, async move {
                Ok(v1::ListContainersResponse { containers: engine.list_containers(request.filter).await? })
            })
            .await
    }

    type StreamContainersStream = Pages<v1::StreamContainersResponse>;

    async fn stream_containers(
        &self,
        request: Request<v1::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = pod_uid(request.filter.as_ref().map(|filter| &filter.label_selector));
        self.0
            .call(Method::StreamContainers, object, async move {
                engine.streaming_lists()?;
                let items = engine.list_containers(request.filter).await?;
                Ok(pages(items, |containers| v1::StreamContainersResponse { containers }))
            })
            .await
    }

    async fn update_container_resources(
        &self,
        request: Request<v1::UpdateContainerResourcesRequest>,
    ) -> Answer<v1::UpdateContainerResourcesResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0
            .call(Method::UpdateContainerResources, object, async move {
                engine.update_resources(request).await?;
                Ok(v1::UpdateContainerResourcesResponse {})
            })
            .await
    }

    async fn reopen_container_log(
        &self,
        request: Request<v1::ReopenContainerLogRequest>,
    ) -> Answer<v1::ReopenContainerLogResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0
            .call(Method::ReopenContainerLog, object, async move {
                engine.reopen_log(request.container_id).await?;
                Ok(v1::ReopenContainerLogResponse {})
            })
            .await
    }

    async fn exec_sync(&self, request: Request<v1::ExecSyncRequest>) -> Answer<v1::ExecSyncResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0.call(Method::ExecSync, object, async move { engine.exec_sync(request).await }).await
    }

    async fn exec(&self, request: Request<v1::ExecRequest>) -> Answer<v1::ExecResponse> {
        let request = request.into_inner();
        self.0
            .call(Method::Exec, self.container(&request.container_id), async {
                refused("the simulated runtime has no streaming server")
            })
            .await
    }

    async fn attach(&self, request: Request<v1::AttachRequest>) -> Answer<v1::AttachResponse> {
        let request = request.into_inner();
        self.0
            .call(Method::Attach, self.container(&request.container_id), async {
                refused("the simulated runtime has no streaming server")
            })
            .await
    }

    async fn port_forward(&self, request: Request<v1::PortForwardRequest>) -> Answer<v1::PortForwardResponse> {
        let request = request.into_inner();
        self.0
            .call(Method::PortForward, self.sandbox(&request.pod_sandbox_id), async {
                refused("the simulated runtime has no streaming server")
            })
            .await
    }

    async fn checkpoint_container(
        &self,
        request: Request<v1::CheckpointContainerRequest>,
    ) -> Answer<v1::CheckpointContainerResponse> {
        let request = request.into_inner();
        self.0
            .call(Method::CheckpointContainer, self.container(&request.container_id), async {
                refused("the simulated runtime cannot checkpoint")
            })
            .await
    }

    async fn container_stats(&self, request: Request<v1::ContainerStatsRequest>) -> Answer<v1::ContainerStatsResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.container(&request.container_id);
        self.0
            .call(Method::ContainerStats, object, async move {
                Ok(v1::ContainerStatsResponse { stats: Some(engine.container_stats(&request.container_id)?) })
            })
            .await
    }

    async fn list_container_stats(
        &self,
        request: Request<v1::ListContainerStatsRequest>,
    ) -> Answer<v1::ListContainerStatsResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = String::new();
        self.0
            .call(Method::ListContainerStats, object, async move {
                Ok(v1::ListContainerStatsResponse { stats: engine.list_container_stats(request.filter) })
            })
            .await
    }

    type StreamContainerStatsStream = Pages<v1::StreamContainerStatsResponse>;

    async fn stream_container_stats(
        &self,
        request: Request<v1::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = String::new();
        self.0
            .call(Method::StreamContainerStats, object, async move {
                engine.streaming_lists()?;
                let items = engine.list_container_stats(request.filter);
                Ok(pages(items, |container_stats| v1::StreamContainerStatsResponse { container_stats }))
            })
            .await
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<v1::PodSandboxStatsRequest>,
    ) -> Answer<v1::PodSandboxStatsResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = self.sandbox(&request.pod_sandbox_id);
        self.0
            .call(Method::PodSandboxStats, object, async move {
                Ok(v1::PodSandboxStatsResponse { stats: Some(engine.sandbox_stats(&request.pod_sandbox_id)?) })
            })
            .await
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<v1::ListPodSandboxStatsRequest>,
    ) -> Answer<v1::ListPodSandboxStatsResponse> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = String::new();
        self.0
            .call(Method::ListPodSandboxStats, object, async move {
                Ok(v1::ListPodSandboxStatsResponse { stats: engine.list_sandbox_stats(request.filter) })
            })
            .await
    }

    type StreamPodSandboxStatsStream = Pages<v1::StreamPodSandboxStatsResponse>;

    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<v1::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        let (engine, request) = (self.engine(), request.into_inner());
        let object = String::new();
        self.0
            .call(Method::StreamPodSandboxStats, object, async move {
                engine.streaming_lists()?;
                let items = engine.list_sandbox_stats(request.filter);
                Ok(pages(items, |pod_sandbox_stats| v1::StreamPodSandboxStatsResponse { pod_sandbox_stats }))
            })
            .await
    }

    type GetContainerEventsStream = ReceiverStream<Result<v1::ContainerEventResponse, Status>>;

    async fn get_container_events(
        &self,
        _request: Request<v1::GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        let engine = self.engine();
        let work = async move { engine.events.read(engine.lifetime()) };
        self.0.call(Method::GetContainerEvents, String::new(), work).await
    }

    async fn list_metric_descriptors(
        &self,
        _request: Request<v1::ListMetricDescriptorsRequest>,
    ) -> Answer<v1::ListMetricDescriptorsResponse> {
        let work = async { Ok(v1::ListMetricDescriptorsResponse::default()) };
        self.0.call(Method::ListMetricDescriptors, String::new(), work).await
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _request: Request<v1::ListPodSandboxMetricsRequest>,
    ) -> Answer<v1::ListPodSandboxMetricsResponse> {
        let work = async { Ok(v1::ListPodSandboxMetricsResponse::default()) };
        self.0.call(Method::ListPodSandboxMetrics, String::new(), work).await
    }

    type StreamPodSandboxMetricsStream = Pages<v1::StreamPodSandboxMetricsResponse>;

    async fn stream_pod_sandbox_metrics(
        &self,
        _request: Request<v1::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        let engine = self.engine();
        let work = async move {
            engine.streaming_lists()?;
            Ok(pages(Vec::new(), |metrics| v1::StreamPodSandboxMetricsResponse { pod_sandbox_metrics: metrics }))
        };
        self.0.call(Method::StreamPodSandboxMetrics, String::new(), work).await
    }
}
