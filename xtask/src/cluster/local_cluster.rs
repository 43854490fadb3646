//! The components of a cluster: started in order, stopped in reverse, with clean-up.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::anyhow;
use anyhow::bail;
use keblet_peers::Agent;
use keblet_peers::Cache;
use keblet_peers::ControlPlane;
use keblet_peers::ControlPlaneOptions;
use keblet_peers::Node;
use keblet_peers::NodeAccess;
use keblet_peers::Options;
use keblet_peers::Part;
use keblet_peers::PrivateContainerd;
use keblet_peers::log_tail;
use serde_json::json;

use super::NodeArguments;
use super::POLL;
use crate::interrupt::Interrupt;
use crate::peers;
use crate::progress::step;
use crate::run;
use crate::setup;

const END_TIMEOUT: Duration = Duration::from_secs(20);
const LOG_LINES: usize = 15;

/// Programs that a cluster needs.
pub(crate) struct Programs {
    cache: Cache,
    control_plane: PathBuf,
}

/// Fetches and builds missing programs.
///
/// # Errors
/// A program cannot be fetched or built.
pub(super) fn prepare(node: &NodeArguments) -> Result<Programs> {
    let cache = setup::prepare()?;
    let control_plane = peers::control_plane()?;
    run::build_cluster(!node.no_node && node.agent.is_none())?;
    Ok(Programs { cache, control_plane })
}

/// A running cluster. Its components are stopped in the order of the fields.
pub(crate) struct LocalCluster {
    agent: Option<Agent>,
    containerd: PrivateContainerd,
    plane: ControlPlane,
    access: NodeAccess,
    node: Node,
    /// Why the node is not Ready, if it is not.
    not_ready: Option<String>,
}

impl LocalCluster {
    /// Starts all components and waits until the node is Ready or the timeout has passed.
    ///
    /// # Errors
    /// A component does not start, or the agent exits.
    pub(crate) fn start(programs: &Programs, arguments: &NodeArguments, interrupt: &Interrupt) -> Result<Self> {
        let (plane, containerd) = step("starting a control plane and a containerd", || start_both(programs))?;
        let (mut plane, mut containerd) = (plane, containerd);
        // The node is named after the runtime's bridge, which shows which node uses which runtime.
        let name = containerd.ready().bridge.replace("keb-", "node-");
        let address = IpAddr::V4(containerd.ready().host_address()?);
        let access = plane.node(&name, address)?;
        let node = Node::create_in_cluster(containerd.ready(), &access, &json!({}))?;
        if arguments.metrics {
            step("starting metrics-server", || plane.start_part(Part::MetricsServer))?;
        }
        let agent = match arguments.no_node {
            true => None,
            false => Some(Agent::start(&mut command(arguments, &node, &access), &node, &mut containerd)?),
        };
        let mut cluster = Self { agent, containerd, plane, access, node, not_ready: None };
        if cluster.agent.is_some() {
            let timeout = arguments.timeout;
            cluster.not_ready = step("waiting for the node", || cluster.until_ready(timeout, interrupt))?;
        }
        Ok(cluster)
    }

    /// The container runtime, which kills adopted processes before its clean-up.
    pub(crate) fn containerd(&mut self) -> &mut PrivateContainerd {
        &mut self.containerd
    }

    /// Environment of commands that run in the cluster.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        let plane = self.plane.ready();
        let mut path = plane.programs.clone().into_os_string();
        if let Some(inherited) = std::env::var_os("PATH") {
            path.push(":");
            path.push(inherited);
        }
        let mut environment = vec![("PATH", path)];
        environment.extend(self.variables());
        environment
    }

    /// Arguments of `keblet bench cluster` for this cluster.
    pub(crate) fn benchmark_arguments(&self) -> Vec<OsString> {
        let mut words = Vec::new();
        for (flag, value) in [
            ("--kubeconfig", self.plane.ready().kubeconfig.clone().into()),
            ("--node-kubeconfig", self.access.client.kubeconfig.clone().into()),
            ("--node-name", OsString::from(&self.access.name)),
            ("--node-ip", self.access.address.to_string().into()),
            ("--runtime-endpoint", self.containerd.endpoint().into()),
            ("--cgroup-root", self.containerd.ready().cgroup_root.clone().into()),
        ] {
            words.extend([flag.into(), value]);
        }
        words
    }

    /// How to use the cluster, as shell commands and comments.
    pub(crate) fn report(&self) -> String {
        let mut text = String::new();
        let name = &self.access.name;
        let _ = match (&self.agent, &self.not_ready) {
            (None, _) => writeln!(text, "# No agent runs. Node {name} is prepared: keblet run $KEBLET_NODE_ARGUMENTS"),
            (Some(_), None) => writeln!(text, "# Node {name} is Ready."),
            (Some(_), Some(why)) => writeln!(text, "# NODE {name} IS NOT READY: {why}"),
        };
        let _ = writeln!(text, "# Logs: {} and {}/*.log", self.node.log.display(), self.plane.ready().dir.display());
        let _ = writeln!(text, "{}", add_to_path(&self.plane.ready().programs));
        for (variable, value) in self.variables() {
            let _ = writeln!(text, "export {variable}='{}'", value.display());
        }
        text
    }

    /// Checks that the agent runs.
    ///
    /// # Errors
    /// The agent has exited by itself; the error ends with its log.
    pub(crate) fn check_agent(&mut self) -> Result<()> {
        if let Some(agent) = &mut self.agent
            && let Some(status) = agent.ended()?
        {
            let words = log_tail(&self.node.log, LOG_LINES);
            self.agent = None;
            bail!("the agent exited with {status}; end of its log:\n{words}");
        }
        Ok(())
    }

    /// Stops all components and removes their files.
    ///
    /// # Errors
    /// A component does not stop, or something could not be removed.
    pub(crate) fn stop(self) -> Result<()> {
        step("removing the cluster", || {
            let agent = self.agent.map_or(Ok(()), |agent| agent.end(END_TIMEOUT).map(drop));
            let containerd = self.containerd.stop();
            let plane = self.plane.stop();
            agent.and(containerd).and(plane)
        })
    }

    fn variables(&self) -> Vec<(&'static str, OsString)> {
        let plane = self.plane.ready();
        let arguments = self.node.cluster_arguments(&self.access).join(" ".as_ref());
        let mut variables = vec![
            ("KUBECONFIG", plane.kubeconfig.clone().into()),
            ("KEBLET_KUBECTL", plane.kubectl().into()),
            ("KEBLET_CLUSTER_DIR", plane.dir.clone().into()),
            ("KEBLET_CLUSTER_CA", plane.ca.clone().into()),
            ("KEBLET_BOOTSTRAP_KUBECONFIG", plane.bootstrap_kubeconfig.clone().into()),
            ("KEBLET_NODE_NAME", self.access.name.clone().into()),
            ("KEBLET_NODE_IP", self.access.address.to_string().into()),
            ("KEBLET_NODE_KUBECONFIG", self.access.client.kubeconfig.clone().into()),
            ("KEBLET_NODE_CONFIG", self.node.config.clone().into()),
            ("KEBLET_NODE_ROOT", self.node.root.clone().into()),
            ("KEBLET_NODE_ARGUMENTS", arguments),
        ];
        variables.extend(run::environment(&self.containerd));
        variables
    }

    /// Waits for the node; returns the reason if it is not Ready in time.
    fn until_ready(&mut self, timeout: u64, interrupt: &Interrupt) -> Result<Option<String>> {
        let name = self.access.name.clone();
        for condition in ["create", "condition=Ready"] {
            let mut wait = Command::new(self.plane.ready().kubectl())
                .arg("wait")
                .arg(format!("--for={condition}"))
                .arg(format!("--timeout={timeout}s"))
                .arg(format!("node/{name}"))
                .env("KUBECONFIG", &self.plane.ready().kubeconfig)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .context("cannot run kubectl")?;
            let waited = loop {
                if let Some(status) = wait.try_wait().context("cannot wait for kubectl")? {
                    break Ok(status.success());
                }
                if let Err(ended) = self.check_agent() {
                    break Err(ended);
                }
                if interrupt.raised() {
                    break Err(anyhow!("interrupted"));
                }
                thread::sleep(POLL);
            };
            // kubectl has exited already, or its result is no longer needed.
            let _ = wait.kill();
            wait.wait().context("cannot wait for kubectl")?;
            if !waited? {
                let lack = if condition == "create" { "there is no such Node object" } else { "it is not Ready" };
                let log = self.node.log.display();
                return Ok(Some(format!("{lack} after {timeout} s; the agent's log is {log}")));
            }
        }
        Ok(None)
    }
}

/// The shell command by which kubectl is found. A folder of the path may have spaces in its name.
fn add_to_path(programs: &Path) -> String {
    format!("export PATH='{}':\"$PATH\"", programs.display())
}

/// Starts control plane and containerd concurrently.
fn start_both(programs: &Programs) -> Result<(ControlPlane, PrivateContainerd)> {
    let plane_options = ControlPlaneOptions {
        programs: Some(programs.control_plane.clone()),
        supervisor: Some(run::control_plane_supervisor()),
        ..ControlPlaneOptions::default()
    };
    let options = Options { supervisor: Some(run::supervisor()), ..Options::default() };
    thread::scope(|scope| {
        let containerd = scope.spawn(|| PrivateContainerd::start(&programs.cache, &options));
        let plane = ControlPlane::start(&plane_options);
        let containerd = containerd.join().map_err(|_| anyhow!("the thread that starts containerd panicked"))?;
        Ok((plane?, containerd?))
    })
}

fn command(arguments: &NodeArguments, node: &Node, access: &NodeAccess) -> Command {
    let mut command = match &arguments.agent {
        Some(agent) => Command::new(agent),
        None => {
            let mut command = Command::new(run::agent());
            command.arg("run");
            command
        }
    };
    command.args(node.cluster_arguments(access));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_with_spaces_are_added_to_the_path() {
        let script = format!("{}; printf %s \"$PATH\"", add_to_path(Path::new("/my code/.cache/peers")));
        let output = Command::new("/bin/sh").args(["-c", &script]).env("PATH", "/a b:/c").output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "/my code/.cache/peers:/a b:/c");
    }
}
