//! A fake runtime: answers the calls of a plan, records every call, fails where a test says so.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use keblet_proto::cri::v1 as cri;
use prost::Message;
use tokio::time::Instant;
use tonic::Status;

use crate::runtime::Runtime;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Answer;
use crate::runtime::tests::server::Script;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;

/// Objects of the runtime and the calls it received.
#[derive(Default)]
pub(super) struct State {
    /// Every call as `Method what`.
    pub(super) calls: Vec<String>,
    /// Images by name.
    pub(super) images: BTreeMap<String, cri::Image>,
    /// Images that can be pulled.
    pub(super) registry: BTreeMap<String, cri::Image>,
    /// How long the pull of an image takes, by name.
    pub(super) pulls: HashMap<String, Duration>,
    /// Errors of the next calls, by method, one per call.
    pub(super) failures: HashMap<&'static str, Vec<Status>>,
    /// How long a container takes to stop, by id.
    pub(super) stops: HashMap<String, Duration>,
    /// What containers were created with.
    pub(super) created: Vec<cri::ContainerConfig>,
    /// A file that CreateContainer reads, and what it had each time.
    pub(super) file: Option<PathBuf>,
    pub(super) file_contents: Vec<String>,
    /// Handlers that sandboxes were to run with.
    pub(super) handlers: Vec<String>,
    /// What sandboxes were made from.
    pub(super) sandboxes: Vec<cri::PodSandboxConfig>,
    /// For the lists.
    pub(super) listed: Vec<cri::Container>,
    pub(super) listed_sandboxes: Vec<cri::PodSandbox>,
    /// For ContainerStatus, by id.
    pub(super) log_paths: BTreeMap<String, String>,
    /// Containers that have exited, by id.
    pub(super) exited: BTreeSet<String>,
    /// Commands that ExecSync runs, by their first word: how long one takes, and its exit code. Others take no time and
    /// succeed. One fails when its container is stopped.
    pub(super) commands: HashMap<String, (Duration, i32)>,
    /// Containers that were stopped, by id.
    pub(super) stopped: BTreeSet<String>,
}

/// The runtime's side, shared with the test.
#[derive(Clone, Default)]
pub(super) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("unpoisoned")
    }

    /// Calls since the last time they were taken.
    pub(super) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.state().calls)
    }

    /// The next call of this method fails.
    pub(super) fn fail(&self, method: &'static str, status: Status) {
        self.state().failures.entry(method).or_default().push(status);
    }

    /// A client of this runtime.
    pub(super) fn client(&self) -> Runtime {
        let socket = Socket::default();
        let fake = self.clone();
        let script: Script = Arc::new(move |method, message| {
            let fake = fake.clone();
            let method = method.to_owned();
            async move { fake.answer(&method, message).await }.boxed()
        });
        socket.serve(script);
        Runtime::with_connector("unix:///run/fake.sock", move || socket.clone().connect(), RuntimeOptions::default())
    }

    async fn answer(&self, method: &str, message: Bytes) -> Answer {
        let failure = self.state().failures.get_mut(method).filter(|left| !left.is_empty()).map(|left| left.remove(0));
        let usual = self.usual(method, message).await;
        failure.map_or(usual, Err)
    }

    fn note(&self, call: String) {
        self.state().calls.push(call);
    }

    async fn usual(&self, method: &str, message: Bytes) -> Answer {
        match method {
            "RunPodSandbox" => {
                let request: cri::RunPodSandboxRequest = read(message);
                let config = request.config.expect("a configuration");
                self.state().handlers.push(request.runtime_handler);
                self.note(format!("{method} {}", config.metadata.as_ref().expect("metadata").attempt));
                self.state().sandboxes.push(config);
                say(&cri::RunPodSandboxResponse { pod_sandbox_id: "sandbox-new".into() })
            }
            "PodSandboxStatus" => self.sandbox_status(method, message),
            "CreateContainer" => {
                let config = read::<cri::CreateContainerRequest>(message).config.expect("a configuration");
                let metadata = config.metadata.clone().expect("metadata");
                self.note(format!("{method} {}/{}", metadata.name, metadata.attempt));
                let mut state = self.state();
                let content = state.file.as_ref().map(|file| std::fs::read_to_string(file).expect("a file"));
                state.file_contents.extend(content);
                state.created.push(config);
                say(&cri::CreateContainerResponse { container_id: format!("{}-{}", metadata.name, metadata.attempt) })
            }
            "StartContainer" => {
                self.note(format!("{method} {}", read::<cri::StartContainerRequest>(message).container_id));
                say(&cri::StartContainerResponse {})
            }
            "StopContainer" => {
                let request: cri::StopContainerRequest = read(message);
                self.note(format!("{method} {} {}", request.container_id, request.timeout));
                let takes = self.state().stops.get(&request.container_id).copied().unwrap_or_default();
                tokio::time::sleep(takes).await;
                self.state().stopped.insert(request.container_id);
                say(&cri::StopContainerResponse {})
            }
            "RemoveContainer" => {
                self.note(format!("{method} {}", read::<cri::RemoveContainerRequest>(message).container_id));
                say(&cri::RemoveContainerResponse {})
            }
            "StopPodSandbox" => {
                self.note(format!("{method} {}", read::<cri::StopPodSandboxRequest>(message).pod_sandbox_id));
                say(&cri::StopPodSandboxResponse {})
            }
            "RemovePodSandbox" => {
                self.note(format!("{method} {}", read::<cri::RemovePodSandboxRequest>(message).pod_sandbox_id));
                say(&cri::RemovePodSandboxResponse {})
            }
            "ExecSync" => self.exec(read(message)).await,
            "ImageStatus" => self.image_status(&read(message)),
            "PullImage" => self.pull(read(message)).await,
            "ListContainers" => say(&cri::ListContainersResponse { containers: self.state().listed.clone() }),
            "ListPodSandbox" => say(&cri::ListPodSandboxResponse { items: self.state().listed_sandboxes.clone() }),
            "ContainerStatus" => self.container_status(message),
            method => panic!("unexpected {method}"),
        }
    }

    fn sandbox_status(&self, method: &str, message: Bytes) -> Answer {
        let id = read::<cri::PodSandboxStatusRequest>(message).pod_sandbox_id;
        self.note(format!("{method} {id}"));
        say(&cri::PodSandboxStatusResponse {
            status: Some(cri::PodSandboxStatus {
                id,
                metadata: Some(cri::PodSandboxMetadata::default()),
                network: Some(cri::PodSandboxNetworkStatus { ip: "10.0.0.9".into(), additional_ips: Vec::new() }),
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    fn image_status(&self, request: &cri::ImageStatusRequest) -> Answer {
        let name = &request.image.as_ref().expect("an image").image;
        self.note(format!("ImageStatus {name}"));
        let image = self.state().images.get(name).cloned();
        say(&cri::ImageStatusResponse { image, info: BTreeMap::new() })
    }

    async fn pull(&self, request: cri::PullImageRequest) -> Answer {
        let name = request.image.expect("an image").image;
        let user = request.auth.map(|auth| format!(" as {}", auth.username)).unwrap_or_default();
        self.note(format!("PullImage {name}{user}"));
        let takes = self.state().pulls.get(&name).copied();
        if let Some(takes) = takes {
            tokio::time::sleep(takes).await;
        }
        let mut state = self.state();
        let Some(image) = state.registry.get(&name).cloned() else {
            return Err(Status::unknown(format!("{name}: not in the registry")));
        };
        let image_ref = image.id.clone();
        state.images.insert(name, image);
        say(&cri::PullImageResponse { image_ref })
    }

    async fn exec(&self, request: cri::ExecSyncRequest) -> Answer {
        self.note(format!("ExecSync {} {}", request.container_id, request.cmd.join(" ")));
        let (takes, exit_code) = self.state().commands.get(&request.cmd[0]).copied().unwrap_or_default();
        let ends = Instant::now() + takes;
        while Instant::now() < ends {
            if self.state().stopped.contains(&request.container_id) {
                return Err(Status::unknown("the container has exited"));
            }
            tokio::time::sleep(Duration::from_millis(100).min(ends - Instant::now())).await;
        }
        say(&cri::ExecSyncResponse { stdout: "out".into(), stderr: "err".into(), exit_code })
    }

    fn container_status(&self, message: Bytes) -> Answer {
        let id = read::<cri::ContainerStatusRequest>(message).container_id;
        let state = match self.state().exited.contains(&id) {
            true => cri::ContainerState::ContainerExited,
            false => cri::ContainerState::ContainerRunning,
        };
        let Some(log_path) = self.state().log_paths.get(&id).cloned() else {
            return Err(Status::not_found(id));
        };
        say(&cri::ContainerStatusResponse {
            status: Some(cri::ContainerStatus {
                id,
                metadata: Some(cri::ContainerMetadata::default()),
                log_path,
                state: state.into(),
                ..Default::default()
            }),
            info: BTreeMap::new(),
        })
    }
}

fn read<M: Message + Default>(message: Bytes) -> M {
    M::decode(message).expect("a message")
}
