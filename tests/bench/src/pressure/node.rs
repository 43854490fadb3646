//! A participant with cgroups of pods, and its static pods.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use keblet_proto::cri::v1 as cri;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::cgroups::Cgroup;
use crate::agent;
use crate::agent::Agent;
use crate::agent::Ports;
use crate::manifest::LABEL;
use crate::manifest::NAMESPACE;
use crate::participant::Participant;

const KEBLET_FLAGS: &str = "run --config={config} --root-dir={root} --cert-dir={root}/pki";
/// In emulation a pod takes seconds to start, and a batch of them several times that.
const START_LIMIT: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(50);
/// Where pods find the FIFOs of their commands.
const COMMANDS: &str = "/commands";

/// What a participant runs on.
#[derive(Debug)]
pub(crate) struct NodeRuntime<'a> {
    pub(crate) keblet: &'a Path,
    pub(crate) endpoint: &'a RuntimeEndpoint,
    pub(crate) runtime: &'a Runtime,
    pub(crate) image: &'a str,
    pub(crate) cgroup_root: &'a str,
}

/// A running participant.
#[derive(Debug)]
pub(crate) struct PressureNode {
    agent: Agent,
    runtime: Runtime,
    folder: PathBuf,
    image: String,
    kubepods: Cgroup,
}

/// A static pod with one container that executes commands.
#[derive(Clone, Debug)]
pub(crate) struct PodSpec {
    pub(crate) name: String,
    /// Memory limit of the container in bytes; without one the pod is BestEffort.
    pub(crate) memory: Option<u64>,
}

/// A pod whose container runs.
#[derive(Clone, Debug)]
pub(crate) struct RunningPod {
    /// PID of the main process.
    pub(crate) pid: u32,
    container: String,
    fifo: PathBuf,
    runtime: Runtime,
}

impl PressureNode {
    /// Starts a participant and waits until it is healthy. The folder must exist.
    ///
    /// # Errors
    /// It cannot be started, or does not get healthy.
    pub(crate) async fn start(
        participant: &Participant,
        node_runtime: &NodeRuntime<'_>,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let ports = Ports::free();
        let mut config = agent::kubelet_configuration(folder, node_runtime.endpoint, 200, &ports);
        config["cgroupsPerQOS"] = json!(true);
        config["cgroupRoot"] = json!(node_runtime.cgroup_root);
        // The log is read as JSON where it is.
        config["logging"] = json!({"format": "json", "verbosity": 2});
        let config = agent::write_configuration(participant, &config, folder)?;
        let placeholders = [
            ("{manifests}", agent::quoted(&folder.join("manifests"))),
            ("{root}", agent::quoted(&folder.join("root"))),
            ("{config}", agent::quoted(&config)),
        ];
        let command = agent::command(participant, node_runtime.keblet, KEBLET_FLAGS, &placeholders);
        let mut agent = Agent::launch(participant.name(), command, folder, &ports)?;
        agent.ready().await?;
        Ok(Self {
            agent,
            runtime: node_runtime.runtime.clone(),
            folder: folder.to_owned(),
            image: node_runtime.image.to_owned(),
            kubepods: Cgroup::new(&format!("{}/kubepods", node_runtime.cgroup_root.trim_end_matches('/'))),
        })
    }

    /// Its folder, with its log.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The agent.
    pub(crate) fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The cgroup of all pods.
    pub(crate) fn kubepods(&self) -> Cgroup {
        self.kubepods.clone()
    }

    /// Fails if the agent has exited.
    ///
    /// # Errors
    /// It has; the error has the end of its log.
    pub(crate) fn check_running(&mut self) -> anyhow::Result<()> {
        self.agent.check_running()
    }

    /// Stops the agent.
    ///
    /// # Errors
    /// It cannot be signalled.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.agent.stop().await
    }

    /// Writes the manifest of a pod.
    ///
    /// # Errors
    /// The manifest or the FIFO cannot be written.
    pub(crate) fn write(&self, pod: &PodSpec) -> anyhow::Result<()> {
        let fifo = self.fifo(&pod.name);
        mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).with_context(|| format!("cannot create {}", fifo.display()))?;
        let hidden = self.folder.join(format!("{}.json", pod.name));
        let text = self.manifest(pod).to_string();
        std::fs::write(&hidden, text).with_context(|| format!("cannot write {}", hidden.display()))?;
        let visible = self.visible(&pod.name);
        std::fs::rename(&hidden, &visible).with_context(|| format!("cannot write {}", visible.display()))
    }

    /// Removes the manifest of a pod.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn remove(&self, name: &str) -> anyhow::Result<()> {
        let path = self.visible(name);
        std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    /// Waits until the container of a pod runs.
    ///
    /// # Errors
    /// It does not in time, or the runtime fails.
    pub(crate) async fn until_running(&mut self, name: &str) -> anyhow::Result<RunningPod> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if let Some((container, pid)) = self.running(name).await? {
                return Ok(RunningPod { pid, container, fifo: self.fifo(name), runtime: self.runtime.clone() });
            }
            self.agent.check_running()?;
            if Instant::now() > deadline {
                bail!("pod {name} does not run after {}", humantime::format_duration(START_LIMIT));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until the sandboxes of all removed pods are stopped.
    ///
    /// # Errors
    /// They are not in time, or the runtime fails.
    pub(crate) async fn until_empty(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        let state = Some(cri::PodSandboxStateValue { state: cri::PodSandboxState::SandboxReady.into() });
        let label_selector = [(LABEL.0.to_owned(), LABEL.1.to_owned())].into();
        let filter = cri::PodSandboxFilter { state, label_selector, ..Default::default() };
        while !self.runtime.list_pod_sandboxes(filter.clone()).await?.is_empty() {
            self.agent.check_running()?;
            if Instant::now() > deadline {
                bail!("removed pods have sandboxes after {}", humantime::format_duration(START_LIMIT));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    async fn running(&self, name: &str) -> anyhow::Result<Option<(String, u32)>> {
        let state = Some(cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning.into() });
        let running = self.runtime.list_containers(cri::ContainerFilter { state, ..Default::default() }).await?;
        let prefix = format!("{name}-");
        let is_its = |container: &cri::Container| {
            container.labels.get("io.kubernetes.pod.name").is_some_and(|pod| pod.starts_with(&prefix))
        };
        let Some(container) = running.into_iter().find(is_its) else { return Ok(None) };
        let pid = self.runtime.container_status(&container.id, true).await?.pid();
        Ok(pid.map(|pid| (container.id, pid)))
    }

    fn manifest(&self, pod: &PodSpec) -> Value {
        let memory = pod.memory.map(|bytes| json!({ "limits": { "memory": bytes.to_string() } }));
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod.name, "namespace": NAMESPACE, "labels": {LABEL.0: LABEL.1}},
            "spec": {
                "hostNetwork": true,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "main",
                    "image": self.image,
                    "imagePullPolicy": "Never",
                    "command": ["/probe", "obey", "--commands", format!("{COMMANDS}/{}.fifo", pod.name)],
                    "resources": memory.unwrap_or_else(|| json!({})),
                    "volumeMounts": [{"name": "commands", "mountPath": COMMANDS}],
                }],
                "volumes": [{"name": "commands", "hostPath": {"path": self.commands(), "type": "Directory"}}],
            },
        })
    }

    fn visible(&self, name: &str) -> PathBuf {
        self.folder.join("manifests").join(format!("{name}.json"))
    }

    fn commands(&self) -> PathBuf {
        self.folder.join("stamps")
    }

    fn fifo(&self, name: &str) -> PathBuf {
        self.commands().join(format!("{name}.fifo"))
    }
}

impl RunningPod {
    /// Passes a command to the main process. Completes when the FIFO has it, also if the process has not opened it yet.
    ///
    /// # Errors
    /// The FIFO cannot be written.
    pub(crate) async fn command(&self, command: &str) -> anyhow::Result<()> {
        // For reading too: otherwise it would wait for the process.
        let fifo = tokio::fs::File::options().read(true).write(true).open(&self.fifo).await;
        let written = async { fifo?.write_all(format!("{command}\n").as_bytes()).await };
        written.await.with_context(|| format!("cannot write to {}", self.fifo.display()))
    }

    /// Runs a command in the container, in a task of its own: its result is the kernel's business.
    pub(crate) fn exec(&self, command: &[&str], limit: Duration) -> JoinHandle<()> {
        let command = command.iter().map(|&word| word.to_owned()).collect();
        let (runtime, container) = (self.runtime.clone(), self.container.clone());
        tokio::spawn(async move {
            // A killed process is an error of the call.
            let _ = runtime.exec_sync(&container, command, limit).await;
        })
    }
}
