//! A node of the cluster: a private containerd and the agent on it. Owns their start and end.

use std::net::IpAddr;
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
use crate::standalone::program;

const LOG_LINES: usize = 40;
/// Nothing announces what the agent writes into its log.
const POLL: Duration = Duration::from_millis(50);

/// A private runtime and an agent that joined the cluster with it. The runtime's supervisor ends it when this process
/// ends.
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
    /// A new node, ready for pods. `changes` replaces single fields of the agent's configuration.
    pub async fn start(cluster: &Cluster, changes: Value) -> Result<Self> {
        let node = Self::prepare(cluster, changes).await?;
        node.start_agent().await?;
        node.until_ready(cluster).await?;
        Ok(node)
    }

    /// A runtime and a node's files; the agent is yet to be started.
    pub async fn prepare(cluster: &Cluster, changes: Value) -> Result<Self> {
        let containerd = spawn_blocking(|| PrivateContainerd::start(&Cache::locate(), &Options::default()))
            .await
            .context("starting containerd panicked")??;
        let name = containerd.ready().bridge.replace("kb-", "node-");
        let address = IpAddr::V4(containerd.ready().host_address()?);
        let access = cluster.order(move |plane| plane.node(&name, address)).await?;
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

    /// Starts the agent, also again.
    pub async fn start_agent(&self) -> Result<()> {
        self.start_agent_with(self.node.cluster_arguments(&self.access).into_iter().collect()).await
    }

    /// Starts the agent with flags of the test's own choice.
    pub async fn start_agent_with(&self, arguments: Vec<std::ffi::OsString>) -> Result<()> {
        let mut parts = self.parts();
        let mut command = agent()?;
        command.args(arguments);
        let containerd = parts.containerd.as_mut().context("the runtime has ended")?;
        let agent = Agent::start(&mut command, &self.node, containerd)?;
        parts.agent = Some(agent);
        Ok(())
    }

    /// The running agent's process; an agent that has ended by itself is an error.
    pub fn agent_pid(&self) -> Result<u32> {
        let mut parts = self.parts();
        let agent = parts.agent.as_mut().context("no agent is running")?;
        match agent.ended()? {
            None => Ok(agent.pid()),
            Some(status) => bail!("the agent ended with {status}; {}", self.log_excerpt()),
        }
    }

    /// All that its agents have said.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.node.log).unwrap_or_default()).into_owned()
    }

    /// Waits until the agent has said this so many times, and returns all it said.
    pub async fn until_logged(&self, text: &str, times: usize) -> Result<String> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let log = self.log();
            if log.matches(text).count() >= times {
                return Ok(log);
            }
            if Instant::now() > deadline {
                bail!("never said {times} times: {text}; {}", self.log_excerpt());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Kills the agent with SIGKILL.
    pub fn kill_agent(&self) -> Result<()> {
        self.parts().agent.take().context("no agent is running")?.kill()
    }

    /// Ends the agent with SIGTERM, which it has to follow.
    pub fn end_agent(&self) -> Result<()> {
        let agent = self.parts().agent.take().context("no agent is running")?;
        let status = agent.end(TIMEOUT)?;
        if !status.success() {
            bail!("the agent ended with {status}");
        }
        Ok(())
    }

    /// Waits until the API server shows the node as Ready.
    pub async fn until_ready(&self, cluster: &Cluster) -> Result<()> {
        let api: Api<NodeObject> = Api::all(cluster.client());
        let ready = |node: Option<&NodeObject>| {
            let conditions = node?.status.as_ref()?.conditions.as_ref()?;
            conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True").then_some(())
        };
        until(&api, self.name(), "Ready", ready).await.with_context(|| self.log_excerpt())
    }

    /// What the runtime knows of its pods.
    pub fn pods(&self) -> Result<Vec<PodView>> {
        self.parts().containerd.as_mut().context("the runtime has ended")?.pods()
    }

    /// Kills the container runtime with SIGKILL; containers live on.
    pub fn kill_runtime(&self) -> Result<()> {
        self.parts().containerd.as_mut().context("the runtime has ended")?.kill()
    }

    /// Starts the killed runtime again.
    pub fn start_runtime(&self) -> Result<()> {
        self.parts().containerd.as_mut().context("the runtime has ended")?.restart()
    }

    /// A folder on the node that goes when it goes.
    pub fn folder(&self) -> Result<PathBuf> {
        Ok(self.parts().containerd.as_ref().context("the runtime has ended")?.ready().dir.clone())
    }

    /// What the agent said last.
    pub fn log_excerpt(&self) -> String {
        format!("the agent's last words:\n{}", log_tail(&self.node.log, LOG_LINES))
    }

    /// Ends agent and runtime the gentle way and takes the node out of the cluster.
    pub async fn stop_and_delete(self, cluster: &Cluster) -> Result<()> {
        let api: Api<NodeObject> = Api::all(cluster.client());
        if self.parts().agent.is_some() {
            self.end_agent()?;
        }
        api.delete(self.name(), &DeleteParams::default()).await.context("cannot delete the Node")?;
        let containerd = self.parts().containerd.take().context("the runtime has ended")?;
        spawn_blocking(move || containerd.stop()).await.context("stopping containerd panicked")?
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        // A test that failed while it held them broke nothing that the next use does not report.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// keblet, or the agent that `KEBLET_TEST_AGENT` names: the tests hold for any kubelet.
fn agent() -> Result<Command> {
    if let Some(other) = std::env::var_os("KEBLET_TEST_AGENT") {
        return Ok(Command::new(other));
    }
    let mut command = Command::new(program()?);
    command.arg("run");
    Ok(command)
}
