//! Standalone node for tests: the agent as a process on a private containerd, with static pods.
//!
//! Tests observe the node from outside of the agent: the runtime, timestamp files written by the containers, `/proc`.
//! Every wait is on a condition with a deadline; a failed wait includes the end of the agent's log.

use std::fs;
use std::io::Read as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::TcpStream;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use keblet_peers::AGENT_IMAGE;
use keblet_peers::AGENT_IMAGE_VARIABLE;
use keblet_peers::Agent;
use keblet_peers::Cache;
use keblet_peers::ContainerView;
use keblet_peers::Node;
use keblet_peers::Options;
use keblet_peers::PROBE_IMAGE;
use keblet_peers::PodView;
use keblet_peers::PrivateContainerd;
use keblet_peers::log_tail;
use serde_json::Value;
use serde_json::json;

use crate::cgroups;

/// Set by `cargo xtask vm test`: the machine is emulated, and the start of an agent alone takes a minute on a busy host.
const EMULATED_VARIABLE: &str = "KEBLET_TEST_EMULATED";
/// The node's name, a suffix of the names of static pods.
pub const NODE: &str = "node";
/// Each poll requests the status of every container, which costs the runtime more than the agent does.
const POLL: Duration = Duration::from_millis(50);
const LOG_LINES: usize = 30;

/// Deadline of every wait; generous, for a busy machine.
pub fn timeout() -> Duration {
    Duration::from_secs(if is_emulated() { 360 } else { 90 })
}

/// True in the machine of `cargo xtask vm test`.
pub fn is_emulated() -> bool {
    std::env::var_os(EMULATED_VARIABLE).is_some()
}

/// A private runtime, a node's folders and the agent on it. Dropping it kills the agent and then removes everything.
pub struct StandaloneNode {
    agent: Option<Agent>,
    /// The runtime, which also reports its pods.
    pub containerd: PrivateContainerd,
    /// The node's folders and ports.
    pub layout: Node,
    /// Folder of stamp files, mounted under the same path in containers.
    pub stamps: PathBuf,
    /// Further flags of the agent.
    pub flags: Vec<String>,
}

impl StandaloneNode {
    /// Starts a runtime and prepares a node without starting the agent.
    ///
    /// # Errors
    /// The runtime does not start or the node's folders cannot be created.
    pub fn new() -> Result<Self> {
        Self::with(json!({}))
    }

    /// Same as [`Self::new`] with fields of the agent's configuration replaced. The runtime reports the configured
    /// cgroup driver, since containerd 2 overrides the agent's.
    ///
    /// # Errors
    /// Same as [`Self::new`].
    pub fn with(changes: Value) -> Result<Self> {
        Self::on(Options::default(), changes)
    }

    /// Same as [`Self::with`] on a runtime with these options; those of the cgroup driver follow from the configuration.
    ///
    /// # Errors
    /// Same as [`Self::new`].
    pub fn on(options: Options, changes: Value) -> Result<Self> {
        let options = Options {
            systemd_cgroup_driver: changes["cgroupDriver"] == "systemd",
            systemd_scopes: changes["cgroupDriver"] == "systemd"
                && cgroups::Driver::of_test() == cgroups::Driver::Systemd,
            ..options
        };
        let containerd = PrivateContainerd::start(&Cache::locate(), &options)?;
        let mut all = json!({ "logging": { "format": "json", "verbosity": 2 } });
        if let (Some(all), Some(changes)) = (all.as_object_mut(), changes.as_object()) {
            all.extend(changes.clone());
        }
        let layout = Node::create(containerd.ready(), &all)?;
        let stamps = containerd.ready().dir.join("stamps");
        fs::create_dir(&stamps).with_context(|| format!("cannot create {}", stamps.display()))?;
        Ok(Self { agent: None, containerd, layout, stamps, flags: Vec::new() })
    }

    /// Starts the agent, for the first time or again.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(&mut self) -> Result<()> {
        self.start_under(&[])
    }

    /// Starts the agent by a program that executes it, such as `setpriv` with its options.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_under(&mut self, wrapper: &[&str]) -> Result<()> {
        let keblet = program()?;
        let mut command = match wrapper.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(&keblet);
                command
            }
            None => Command::new(&keblet),
        };
        command.args(["run", "--hostname-override", NODE]);
        command.arg("--config").arg(&self.layout.config).arg("--root-dir").arg(&self.layout.root);
        command.arg("--cert-dir").arg(self.layout.root.join("pki")).args(&self.flags);
        self.agent = Some(Agent::start(&mut command, &self.layout, &mut self.containerd)?);
        Ok(())
    }

    /// PID of the started process.
    ///
    /// # Errors
    /// No agent was started.
    pub fn agent_pid(&self) -> Result<u32> {
        Ok(self.agent.as_ref().context("no agent is running")?.pid())
    }

    /// Waits until the agent has exited successfully by itself.
    ///
    /// # Errors
    /// It does not exit in time or exits with an error.
    pub fn until_ended(&mut self) -> Result<()> {
        let mut agent = self.agent.take().context("no agent is running")?;
        let status = self.until("the exit of the agent", |_| agent.ended())?;
        ensure!(status.success(), "the agent exited with {status}");
        Ok(())
    }

    /// Kills the agent with SIGKILL.
    ///
    /// # Errors
    /// No agent was started.
    pub fn kill_agent(&mut self) -> Result<()> {
        self.agent.take().context("no agent is running")?.kill()
    }

    /// Stops agent and runtime.
    ///
    /// # Errors
    /// The agent exits with an error or a resource remains on the host.
    pub fn stop(mut self) -> Result<()> {
        let status = self.agent.take().context("no agent is running")?.end(timeout())?;
        ensure!(status.success(), "the agent exited with {status}\n{}", self.log_excerpt());
        let Self { containerd, agent: _, layout: _, stamps: _, flags: _ } = self;
        containerd.stop()
    }

    /// Writes the manifest of a pod with one container `main` that runs `/probe` with these arguments.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_pod(&self, name: &str, arguments: &[&str]) -> Result<()> {
        self.layout.write_manifest(name, &self.pod(name, arguments))
    }

    /// The manifest that [`Self::write_pod`] writes.
    pub fn pod(&self, name: &str, arguments: &[&str]) -> Value {
        let command: Vec<&str> = std::iter::once("/probe").chain(arguments.iter().copied()).collect();
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "restartPolicy": "Always",
                "terminationGracePeriodSeconds": 10,
                "hostNetwork": true,
                "dnsPolicy": "Default",
                "containers": [{
                    "name": "main",
                    "image": PROBE_IMAGE,
                    "imagePullPolicy": "Never",
                    "command": command,
                    "volumeMounts": [{ "name": "stamps", "mountPath": self.stamps }],
                }],
                "volumes": [{ "name": "stamps", "hostPath": { "path": self.stamps, "type": "Directory" } }],
            },
        })
    }

    /// Writes the manifest of a pod that runs until SIGTERM and writes its timestamps under its name.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_running_pod(&self, name: &str) -> Result<()> {
        self.write_pod(name, &["run", "--stamp", &self.stamp(name)])
    }

    /// The stamp file of a pod.
    pub fn stamp(&self, name: &str) -> String {
        self.stamps.join(name).display().to_string()
    }

    /// Timestamps written by a pod's containers, in order: a word and nanoseconds since the Unix epoch.
    pub fn stamps_of(&self, name: &str) -> Vec<(String, u64)> {
        let text = fs::read_to_string(self.stamps.join(name)).unwrap_or_default();
        let line = |line: &str| line.split_once(' ').and_then(|(word, at)| Some((word.to_owned(), at.parse().ok()?)));
        text.lines().filter_map(line).collect()
    }

    /// How often a pod's container started, by its timestamps.
    pub fn starts(&self, name: &str) -> usize {
        self.stamps_of(name).iter().filter(|(word, _)| word == "start").count()
    }

    /// Whether the program of the pod has written its first timestamp, if its manifest asks for one. The runtime
    /// reports a container as running before its program executes.
    pub fn has_started(&self, name: &str) -> bool {
        let manifest = fs::read_to_string(self.layout.manifests.join(format!("{name}.json"))).unwrap_or_default();
        !manifest.contains(&self.stamp(name)) || self.starts(name) > 0
    }

    /// All sandboxes of a pod, oldest first, as the runtime reports them.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub fn sandboxes(&mut self, name: &str) -> Result<Vec<PodView>> {
        let full = format!("{name}-{NODE}");
        let mut pods: Vec<_> = self.containerd.pods()?.into_iter().filter(|pod| pod.name == full).collect();
        pods.sort_by_key(|pod| pod.attempt);
        Ok(pods)
    }

    /// The running container of a pod with one container; `None` while there is none.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub fn running(&mut self, name: &str) -> Result<Option<ContainerView>> {
        Ok(running(&self.sandboxes(name)?).into_iter().next())
    }

    /// Waits until `condition` returns a value.
    ///
    /// # Errors
    /// It returns none in time, fails, or the agent exits; the error has the end of the agent's log.
    pub fn until<T>(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + timeout();
        loop {
            if let Some(found) = condition(self).with_context(|| format!("waiting for: {what}"))? {
                return Ok(found);
            }
            if let Some(agent) = &mut self.agent
                && let Some(status) = agent.ended()?
            {
                bail!("the agent exited with {status} while waiting for: {what}\n{}", self.log_excerpt());
            }
            if Instant::now() > deadline {
                bail!("timed out waiting for: {what}\n{}", self.log_excerpt());
            }
            std::thread::sleep(POLL);
        }
    }

    /// [`Self::until`] for a condition without a value.
    ///
    /// # Errors
    /// As [`Self::until`].
    pub fn until_true(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        self.until(what, |node| Ok(condition(node)?.then_some(())))
    }

    /// Waits until the pod's program has written its first timestamp, and returns the running container.
    ///
    /// # Errors
    /// As [`Self::until`].
    pub fn until_running(&mut self, name: &str) -> Result<ContainerView> {
        self.until(&format!("{name} running"), |node| Ok(node.running(name)?.filter(|_| node.has_started(name))))
    }

    /// The JSON lines of the agent's log, over all its runs.
    pub fn log(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.layout.log).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Whether a line of the log contains all these texts.
    pub fn log_contains(&self, words: &[&str]) -> bool {
        let text = fs::read_to_string(&self.layout.log).unwrap_or_default();
        text.lines().any(|line| words.iter().all(|word| line.contains(word)))
    }

    /// The logged lifecycle events of a kind (`ContainerDied`, …) of a pod's container `main`.
    pub fn events(&self, name: &str, kind: &str) -> Vec<Value> {
        let pod = format!("default/{name}-{NODE}");
        let matches = |line: &Value| {
            line["target"] == "keblet::events"
                && line["event"] == kind
                && line["pod"] == pod.as_str()
                && line["container"] == "main"
        };
        self.log().into_iter().filter(matches).collect()
    }

    /// The logged events of a pod's container `main`, of type Normal or Warning: `N Pulling: Pulling image "…"`.
    pub fn recorded(&self, name: &str) -> Vec<String> {
        let pod = format!("default/{name}-{NODE}");
        let matches = |line: &Value| {
            line["target"] == "keblet::recorder"
                && line["pod"] == pod.as_str()
                && line["field_path"] == "spec.containers{main}"
        };
        let shown = |line: Value| {
            let kind = if line["level"] == "WARN" { "W" } else { "N" };
            let text = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
            format!("{kind} {}: {}", text("reason"), text("msg"))
        };
        self.log().into_iter().filter(matches).map(shown).collect()
    }

    /// The response of the health server.
    pub fn health(&self, path: &str) -> Option<(u16, String)> {
        get(self.layout.healthz_port, path)
    }

    /// The agent's metrics; `None` if they cannot be read.
    pub fn metrics(&self) -> Option<String> {
        get(self.layout.read_only_port, "/metrics").filter(|(code, _)| *code == 200).map(|(_, body)| body)
    }

    /// The response of `/stats/summary`; null if it cannot be read.
    pub fn summary(&self) -> Value {
        let body = get(self.layout.read_only_port, "/stats/summary").map(|(_, body)| body).unwrap_or_default();
        serde_json::from_str(&body).unwrap_or_default()
    }

    /// The lines of `/metrics/cadvisor` that begin with this; none if it cannot be read.
    pub fn cadvisor(&self, family: &str) -> Vec<String> {
        let body = get(self.layout.read_only_port, "/metrics/cadvisor").map(|(_, body)| body).unwrap_or_default();
        body.lines().filter(|line| line.starts_with(family)).map(str::to_owned).collect()
    }

    /// The lines of `/metrics/probes` that begin with this; none if it cannot be read.
    pub fn probe_metrics(&self, family: &str) -> Vec<String> {
        let body = get(self.layout.read_only_port, "/metrics/probes").map(|(_, body)| body).unwrap_or_default();
        body.lines().filter(|line| line.starts_with(family)).map(str::to_owned).collect()
    }

    /// The status of a pod in `/pods`; null if there is none.
    pub fn status(&self, name: &str) -> Value {
        self.served(name)["status"].clone()
    }

    /// The UID of a pod in `/pods`.
    pub fn uid(&self, name: &str) -> Option<String> {
        self.served(name)["metadata"]["uid"].as_str().map(str::to_owned)
    }

    fn served(&self, name: &str) -> Value {
        let body = get(self.layout.read_only_port, "/pods").map(|(_, body)| body).unwrap_or_default();
        let list: Value = serde_json::from_str(&body).unwrap_or_default();
        let full = format!("{name}-{NODE}");
        let pods = list["items"].as_array().cloned().unwrap_or_default();
        pods.into_iter().find(|pod| pod["metadata"]["name"] == full).unwrap_or_default()
    }

    fn log_excerpt(&self) -> String {
        format!("end of the agent's log:\n{}", log_tail(&self.layout.log, LOG_LINES))
    }
}

/// All running containers of some sandboxes.
pub fn running(sandboxes: &[PodView]) -> Vec<ContainerView> {
    let containers = sandboxes.iter().flat_map(|pod| &pod.containers);
    containers.filter(|container| container.state == "running").cloned().collect()
}

/// The processes with this argument.
pub fn processes_with(word: &str) -> Vec<i32> {
    processes(|folder| {
        fs::read(folder.join("cmdline"))
            .is_ok_and(|line| line.split(|byte| *byte == 0).any(|part| part == word.as_bytes()))
    })
}

/// The processes in a cgroup whose name contains the container's id.
pub fn processes_of(container: &str) -> Vec<i32> {
    processes(|folder| fs::read_to_string(folder.join("cgroup")).is_ok_and(|text| text.contains(container)))
}

fn processes(matches: impl Fn(&Path) -> bool) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let number = |entry: &fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let alive = entries.flatten().filter(|entry| number(entry).is_some() && matches(&entry.path()));
    alive.filter_map(|entry| number(&entry)).collect()
}

/// Kills a container's init process, as a crash would.
///
/// # Errors
/// The container does not run.
pub fn kill(container: &ContainerView) -> Result<()> {
    let pid = container.pid.context("the container is not running")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
        .with_context(|| format!("cannot kill process {pid} of container {}", container.name))
}

/// The agent's binary: `KEBLET_BIN`, or the one beside the test.
///
/// # Errors
/// There is none.
pub fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("KEBLET_BIN") {
        return Ok(PathBuf::from(path));
    }
    let test = std::env::current_exe().context("cannot determine the path of this program")?;
    let found = test.ancestors().skip(1).take(2).map(|folder| folder.join("keblet")).find(|path| path.is_file());
    found.with_context(|| format!("no keblet beside {}: run `cargo build -p keblet`", test.display()))
}

/// The archive with the agent's image: `KEBLET_IMAGE`, or the one beside the agent.
///
/// # Errors
/// There is none.
pub fn image() -> Result<PathBuf> {
    let path = match std::env::var_os(AGENT_IMAGE_VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => program()?.with_file_name(AGENT_IMAGE),
    };
    ensure!(path.is_file(), "{} is missing: `cargo xtask test --tier cluster` packs it", path.display());
    Ok(path)
}

/// One HTTP request; `None` if the connection fails.
fn get(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    // HTTP/1.0: the response is not chunked and ends with the connection.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    let (head, body) = response.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}
