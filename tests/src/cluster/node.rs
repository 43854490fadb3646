//! A node of the cluster: a private containerd and the agent on it.

use std::net::IpAddr;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use k8s_openapi::api::core::v1::Node as NodeObject;
use keblet_peers::Agent;
use keblet_peers::Cache;
use keblet_peers::Node;
use keblet_peers::NodeAccess;
use keblet_peers::Options;
use keblet_peers::PodView;
use keblet_peers::PrivateContainerd;
use keblet_peers::log_tail;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::Value;
use serde_json::json;
use tokio::task::spawn_blocking;

use super::Cluster;
use super::TIMEOUT;
use super::until;
use crate::registry::Registry;
use crate::standalone::program;

const LOG_LINES: usize = 40;
/// Poll interval for the agent's log, whose changes are not announced.
pub(super) const POLL: Duration = Duration::from_millis(50);

/// A private runtime and an agent that joined the cluster. The runtime's supervisor stops both when this process exits.
pub struct ClusterNode {
    /// The node's name, address and certificates.
    pub access: NodeAccess,
    /// The node's folders and configuration.
    pub node: Node,
    parts: Mutex<Parts>,
}

struct Parts {
    agent: Option<Agent>,
    containerd: Option<PrivateContainerd>,
}

impl ClusterNode {
    /// A new Ready node. `changes` replaces fields of the agent's configuration.
    ///
    /// # Errors
    /// Runtime or agent do not start, or the node does not become Ready.
    pub async fn start(cluster: &Cluster, changes: Value) -> Result<Self> {
        let node = Self::prepare(cluster, changes).await?;
        node.start_agent().await?;
        node.until_ready(cluster).await?;
        Ok(node)
    }

    /// As [`Self::start`], with another agent, which is called with a kubelet's flags.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_other(cluster: &Cluster, agent: &Path, changes: Value) -> Result<Self> {
        let node = Self::prepare(cluster, changes).await?;
        node.start_other_agent(agent)?;
        node.until_ready(cluster).await?;
        Ok(node)
    }

    /// Starts another agent on this node, which is called with a kubelet's flags.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_other_agent(&self, agent: &Path) -> Result<()> {
        let arguments = self.node.cluster_arguments(&self.access);
        self.start_program(Command::new(agent), arguments.into_iter().collect())
    }

    /// The runtime's socket.
    ///
    /// # Errors
    /// The runtime is stopped.
    pub fn socket(&self) -> Result<PathBuf> {
        Ok(self.parts().containerd.as_ref().context("the runtime is stopped")?.ready().socket.clone())
    }

    /// A runtime and a node's files; the agent is not started.
    ///
    /// # Errors
    /// The runtime does not start, or a certificate or file cannot be written.
    pub async fn prepare(cluster: &Cluster, changes: Value) -> Result<Self> {
        let containerd = spawn_blocking(|| PrivateContainerd::start(&Cache::locate(), &Options::default()))
            .await
            .context("starting containerd panicked")??;
        let name = containerd.ready().bridge.replace("keb-", "node-");
        let address = IpAddr::V4(containerd.ready().host_address()?);
        let access = cluster.on_control_plane(move |plane| plane.node(&name, address)).await?;
        let mut all = json!({ "logging": { "verbosity": 2 } });
        if let (Some(all), Some(changes)) = (all.as_object_mut(), changes.as_object()) {
            all.extend(changes.clone());
        }
        let node = Node::create_in_cluster(containerd.ready(), &access, &all)?;
        Ok(Self { access, node, parts: Mutex::new(Parts { agent: None, containerd: Some(containerd) }) })
    }

    /// The node's name.
    pub fn name(&self) -> &str {
        &self.access.name
    }

    /// Starts the agent, for the first time or again.
    ///
    /// # Errors
    /// The program cannot be started.
    pub async fn start_agent(&self) -> Result<()> {
        self.start_agent_with(self.node.cluster_arguments(&self.access).into_iter().collect()).await
    }

    /// Starts the agent with these flags.
    ///
    /// # Errors
    /// The program cannot be started.
    pub async fn start_agent_with(&self, arguments: Vec<std::ffi::OsString>) -> Result<()> {
        self.start_program(agent()?, arguments)
    }

    fn start_program(&self, mut command: Command, arguments: Vec<std::ffi::OsString>) -> Result<()> {
        let mut parts = self.parts();
        command.args(arguments);
        let containerd = parts.containerd.as_mut().context("the runtime is stopped")?;
        let agent = Agent::start(&mut command, &self.node, containerd)?;
        parts.agent = Some(agent);
        Ok(())
    }

    /// PID of the running agent.
    ///
    /// # Errors
    /// The agent does not run or has exited by itself.
    pub fn agent_pid(&self) -> Result<u32> {
        let mut parts = self.parts();
        let agent = parts.agent.as_mut().context("no agent is running")?;
        match agent.ended()? {
            None => Ok(agent.pid()),
            Some(status) => bail!("the agent exited with {status}; {}", self.log_excerpt()),
        }
    }

    /// The log of all agents on this node.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.node.log).unwrap_or_default()).into_owned()
    }

    /// Waits until the log contains the text so many times, and returns the log.
    ///
    /// # Errors
    /// It does not in time.
    pub async fn until_logged(&self, text: &str, times: usize) -> Result<String> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let log = self.log();
            if log.matches(text).count() >= times {
                return Ok(log);
            }
            if Instant::now() > deadline {
                bail!("not {times} times in the log: {text}; {}", self.log_excerpt());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Kills the agent with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_agent(&self) -> Result<()> {
        self.parts().agent.take().context("no agent is running")?.kill()
    }

    /// Stops the agent with SIGTERM.
    ///
    /// # Errors
    /// It does not exit in time or exits with an error.
    pub fn end_agent(&self) -> Result<()> {
        let agent = self.parts().agent.take().context("no agent is running")?;
        let status = agent.end(TIMEOUT)?;
        if !status.success() {
            bail!("the agent exited with {status}; {}", self.log_excerpt());
        }
        Ok(())
    }

    /// Waits until the Node object is Ready.
    ///
    /// # Errors
    /// It is not in time.
    pub async fn until_ready(&self, cluster: &Cluster) -> Result<()> {
        let api: Api<NodeObject> = Api::all(cluster.client());
        let ready = |node: Option<&NodeObject>| {
            let conditions = node?.status.as_ref()?.conditions.as_ref()?;
            conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True").then_some(())
        };
        until(&api, self.name(), "Ready", ready).await.with_context(|| self.log_excerpt())
    }

    /// All pods, as the runtime reports them.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub fn pods(&self) -> Result<Vec<PodView>> {
        self.parts().containerd.as_mut().context("the runtime is stopped")?.pods()
    }

    /// Imports the images of an archive.
    ///
    /// # Errors
    /// The archive cannot be imported.
    pub fn import(&self, archive: &Path) -> Result<()> {
        self.parts().containerd.as_mut().context("the runtime is stopped")?.import(archive)
    }

    /// Kills the container runtime with SIGKILL; containers keep running.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_runtime(&self) -> Result<()> {
        self.parts().containerd.as_mut().context("the runtime is stopped")?.kill()
    }

    /// Starts the killed runtime again.
    ///
    /// # Errors
    /// It does not get ready.
    pub fn start_runtime(&self) -> Result<()> {
        self.parts().containerd.as_mut().context("the runtime is stopped")?.restart()
    }

    /// Starts an image registry whose files are removed with the node; see [`Registry::start`].
    ///
    /// # Errors
    /// The runtime is stopped, or the registry does not start.
    pub fn start_registry(&self, users: &[(&str, &str)]) -> Result<Option<Registry>> {
        Registry::start(self.parts().containerd.as_mut().context("the runtime is stopped")?, users)
    }

    /// A folder that is removed with the node.
    ///
    /// # Errors
    /// The runtime is stopped.
    pub fn folder(&self) -> Result<PathBuf> {
        Ok(self.parts().containerd.as_ref().context("the runtime is stopped")?.ready().dir.clone())
    }

    /// The cgroup that contains those of all pods.
    ///
    /// # Errors
    /// The runtime is stopped.
    pub fn cgroup_root(&self) -> Result<String> {
        Ok(self.parts().containerd.as_ref().context("the runtime is stopped")?.ready().cgroup_root.clone())
    }

    /// The end of the agent's log, for messages.
    pub fn log_excerpt(&self) -> String {
        format!("end of the agent's log:\n{}", log_tail(&self.node.log, LOG_LINES))
    }

    /// Stops agent and runtime and deletes the Node object.
    ///
    /// # Errors
    /// A process does not stop, a resource remains, or the object cannot be deleted.
    pub async fn stop_and_delete(self, cluster: &Cluster) -> Result<()> {
        let api: Api<NodeObject> = Api::all(cluster.client());
        if self.parts().agent.is_some() {
            self.end_agent()?;
        }
        api.delete(self.name(), &DeleteParams::default()).await.context("cannot delete the Node")?;
        let containerd = self.parts().containerd.take().context("the runtime is stopped")?;
        spawn_blocking(move || containerd.stop()).await.context("stopping containerd panicked")?
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        // A test that panicked with the lock held leaves no state that later uses do not report.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// keblet, or the agent of `KEBLET_TEST_AGENT`: the tests hold for any kubelet.
fn agent() -> Result<Command> {
    if let Some(other) = std::env::var_os("KEBLET_TEST_AGENT") {
        return Ok(Command::new(other));
    }
    let mut command = Command::new(program()?);
    command.arg("run");
    Ok(command)
}
