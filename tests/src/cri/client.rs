//! A plain CRI client for tests, without policy or deadlines.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use keblet_proto::cri::v1;
use keblet_proto::cri::v1::image_service_client::ImageServiceClient;
use keblet_proto::cri::v1::runtime_service_client::RuntimeServiceClient;
use tonic::Status;
use tonic::Streaming;
use tonic::transport::Channel;

/// A CRI client.
#[derive(Clone, Debug)]
pub struct Client {
    /// The RuntimeService.
    pub runtime: RuntimeServiceClient<Channel>,
    /// The ImageService.
    pub images: ImageServiceClient<Channel>,
    /// Labels of the sandboxes it ran, which their containers get too.
    labels: Arc<Mutex<HashMap<String, BTreeMap<String, String>>>>,
}

impl Client {
    /// A client on this channel.
    pub fn new(channel: Channel) -> Self {
        Self {
            runtime: RuntimeServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel),
            labels: Arc::default(),
        }
    }

    /// Runs a sandbox; returns its id.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn run_sandbox(&mut self, config: v1::PodSandboxConfig) -> Result<String, Status> {
        let labels = config.labels.clone();
        let request = v1::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        let id = self.runtime.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id;
        self.lock().insert(id.clone(), labels);
        Ok(id)
    }

    /// Creates a container with its pod's labels; returns its id.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn create(&mut self, sandbox_id: &str, mut config: v1::ContainerConfig) -> Result<String, Status> {
        config.labels.extend(self.lock().get(sandbox_id).cloned().unwrap_or_default());
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            config: Some(config),
            sandbox_config: None,
        };
        Ok(self.runtime.create_container(request).await?.into_inner().container_id)
    }

    /// Starts a container.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn start(&mut self, id: &str) -> Result<(), Status> {
        let request = v1::StartContainerRequest { container_id: id.to_owned() };
        self.runtime.start_container(request).await.map(drop)
    }

    /// Creates and starts a container; returns its id.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn launch(&mut self, sandbox_id: &str, config: v1::ContainerConfig) -> Result<String, Status> {
        let id = self.create(sandbox_id, config).await?;
        self.start(&id).await?;
        Ok(id)
    }

    /// Stops a container with a grace period in seconds.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn stop(&mut self, id: &str, timeout: i64) -> Result<(), Status> {
        let request = v1::StopContainerRequest { container_id: id.to_owned(), timeout };
        self.runtime.stop_container(request).await.map(drop)
    }

    /// Removes a container.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn remove(&mut self, id: &str) -> Result<(), Status> {
        let request = v1::RemoveContainerRequest { container_id: id.to_owned() };
        self.runtime.remove_container(request).await.map(drop)
    }

    /// Stops a sandbox.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn stop_sandbox(&mut self, id: &str) -> Result<(), Status> {
        let request = v1::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.runtime.stop_pod_sandbox(request).await.map(drop)
    }

    /// Removes a sandbox.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn remove_sandbox(&mut self, id: &str) -> Result<(), Status> {
        let request = v1::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.runtime.remove_pod_sandbox(request).await.map(drop)
    }

    /// A container's status and its verbose info.
    ///
    /// # Errors
    /// The runtime's error, or malformed verbose info.
    pub async fn status(&mut self, id: &str) -> Result<(v1::ContainerStatus, serde_json::Value), Status> {
        let request = v1::ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
        let response = self.runtime.container_status(request).await?.into_inner();
        let info = response.info.get("info").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        Ok((response.status.unwrap_or_default(), info))
    }

    /// All containers, or those that match a filter.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn list(&mut self, filter: Option<v1::ContainerFilter>) -> Result<Vec<v1::Container>, Status> {
        let request = v1::ListContainersRequest { filter };
        Ok(self.runtime.list_containers(request).await?.into_inner().containers)
    }

    /// The event stream.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn events(&mut self) -> Result<Streaming<v1::ContainerEventResponse>, Status> {
        Ok(self.runtime.get_container_events(v1::GetEventsRequest {}).await?.into_inner())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, BTreeMap<String, String>>> {
        self.labels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A sandbox' config: host network, the labels clients filter by.
pub fn sandbox(pod: &str, attempt: u32) -> v1::PodSandboxConfig {
    let uid = format!("{pod}-uid");
    let namespaces = v1::NamespaceOption {
        network: v1::NamespaceMode::Node.into(),
        pid: v1::NamespaceMode::Container.into(),
        ..Default::default()
    };
    let labels = [
        ("io.kubernetes.pod.name", pod),
        ("io.kubernetes.pod.namespace", "default"),
        ("io.kubernetes.pod.uid", uid.as_str()),
    ];
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: pod.to_owned(),
            namespace: "default".to_owned(),
            uid: uid.clone(),
            attempt,
        }),
        log_directory: format!("/var/log/pods/default_{pod}_{uid}"),
        labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        linux: Some(v1::LinuxPodSandboxConfig {
            cgroup_parent: format!("/kubepods/besteffort/pod{uid}"),
            security_context: Some(v1::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A container's config: image `busybox`, its own PID namespace, a simulated program as its command line.
pub fn container(name: &str, attempt: u32, program: &str) -> v1::ContainerConfig {
    let namespaces = v1::NamespaceOption { pid: v1::NamespaceMode::Container.into(), ..Default::default() };
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: name.to_owned(), attempt }),
        image: Some(v1::ImageSpec { image: "busybox".to_owned(), ..Default::default() }),
        command: program.split_whitespace().map(str::to_owned).collect(),
        labels: [("io.kubernetes.container.name".to_owned(), name.to_owned())].into(),
        log_path: format!("{name}/{attempt}.log"),
        linux: Some(v1::LinuxContainerConfig {
            security_context: Some(v1::LinuxContainerSecurityContext {
                namespace_options: Some(namespaces),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}
