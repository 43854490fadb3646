//! A node agent on a private runtime: its folders, its configuration, its process. Owns how one is started and ended;
//! refuses to judge what it does. Works for any agent that reads a KubeletConfiguration.

use std::ffi::OsStr;
use std::ffi::OsString;
use std::fs;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::PipeReader;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::ExitStatus;
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use serde_json::Value;
use serde_json::json;

use crate::NodeAccess;
use crate::PrivateContainerd;
use crate::Ready;

const POLL: Duration = Duration::from_millis(10);
/// Each node has an address of its own, so that all can have the port that everybody expects.
const KUBELET_PORT: u16 = 10250;

/// The folders, ports and configuration file of a node, all inside the runtime's folder and removed with it.
#[derive(Clone, Debug)]
pub struct Node {
    /// The agent's `--root-dir`.
    pub root: PathBuf,
    /// The static pod folder.
    pub manifests: PathBuf,
    /// The pods' log folder.
    pub pod_logs: PathBuf,
    /// The KubeletConfiguration.
    pub config: PathBuf,
    /// What the agent prints.
    pub log: PathBuf,
    /// Where `/healthz` answers.
    pub healthz_port: u16,
    /// Where `/pods` and `/metrics` answer.
    pub read_only_port: u16,
}

impl Node {
    /// Makes the folders, finds free ports and writes the configuration. `changes` replaces single fields of it.
    pub fn create(ready: &Ready, changes: &Value) -> Result<Self> {
        let path = |name: &str| ready.dir.join(name);
        let node = Self {
            root: path("kubelet"),
            manifests: path("manifests"),
            pod_logs: path("pod-logs"),
            config: path("kubelet.json"),
            log: path("agent.log"),
            healthz_port: free_port()?,
            read_only_port: free_port()?,
        };
        for folder in [&node.root, &node.manifests, &node.pod_logs] {
            fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let mut config = node.default_config(ready)?;
        if let (Some(fields), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
            fields.extend(changes.clone());
        }
        let text = format!("{config:#}\n");
        fs::write(&node.config, text).with_context(|| format!("cannot write {}", node.config.display()))?;
        Ok(node)
    }

    /// The same for a node of a cluster: HTTPS on the node's address, open to whom the API server vouches for.
    pub fn create_in_cluster(ready: &Ready, access: &NodeAccess, changes: &Value) -> Result<Self> {
        let mut config = json!({
            "address": access.address,
            "port": KUBELET_PORT,
            "readOnlyPort": 0,
            "tlsCertFile": access.serving.certificate,
            "tlsPrivateKeyFile": access.serving.key,
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": true },
                "x509": { "clientCAFile": access.client_ca },
            },
            "authorization": { "mode": "Webhook" },
            // Nobody answers there; pods that need names use none but their own.
            "clusterDNS": ["10.43.0.10"],
            "clusterDomain": "cluster.local",
        });
        if let (Some(fields), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
            fields.extend(changes.clone());
        }
        Self::create(ready, &config)
    }

    /// The flags with which an agent joins the cluster as this node; any kubelet understands them.
    pub fn cluster_arguments(&self, access: &NodeAccess) -> Vec<OsString> {
        let flag = |name: &str, value: &dyn AsRef<OsStr>| {
            let mut flag = OsString::from(format!("--{name}="));
            flag.push(value.as_ref());
            flag
        };
        vec![
            flag("config", &self.config),
            flag("root-dir", &self.root),
            flag("kubeconfig", &access.client.kubeconfig),
            flag("node-ip", &access.address.to_string()),
            flag("hostname-override", &access.name),
        ]
    }

    /// Writes a static pod as the agent has to see it: all of it or nothing.
    pub fn write_manifest(&self, name: &str, pod: &Value) -> Result<()> {
        let path = self.manifest(name);
        let partial = self.manifests.join(format!(".{name}.partial"));
        let text = format!("{pod:#}\n");
        fs::write(&partial, text).with_context(|| format!("cannot write {}", partial.display()))?;
        fs::rename(&partial, &path)
            .with_context(|| format!("cannot rename {} to {}", partial.display(), path.display()))
    }

    /// Takes a static pod away.
    pub fn remove_manifest(&self, name: &str) -> Result<()> {
        let path = self.manifest(name);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.manifests.join(format!("{name}.json"))
    }

    fn default_config(&self, ready: &Ready) -> Result<Value> {
        Ok(json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": format!("unix://{}", ready.socket.display()),
            "staticPodPath": self.manifests,
            "podLogsDir": self.pod_logs,
            "cgroupRoot": ready.cgroup_root,
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": false,
            "enforceNodeAllocatable": [],
            // A test machine's full disk or swap is no business of the test.
            "evictionHard": {},
            "failSwapOn": false,
            "address": "127.0.0.1",
            "port": free_port()?,
            "readOnlyPort": self.read_only_port,
            "healthzPort": self.healthz_port,
            "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
            "authorization": { "mode": "AlwaysAllow" },
            "makeIPTablesUtilChains": false,
            "volumePluginDir": self.root.join("plugins"),
        }))
    }
}

/// A running agent. Killed when dropped; [`Agent::end`] is the gentle way.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    lines: mpsc::Receiver<String>,
    reader: Option<JoinHandle<()>>,
}

impl Agent {
    /// Starts an agent and gives it to the runtime's care, so that it dies before the clean-up if we are killed.
    pub fn start(command: &mut Command, node: &Node, containerd: &mut PrivateContainerd) -> Result<Self> {
        let (output, input) = std::io::pipe().context("cannot make a pipe")?;
        let program = command.get_program().to_string_lossy().into_owned();
        let log = File::options()
            .append(true)
            .create(true)
            .open(&node.log)
            .with_context(|| format!("cannot open {}", node.log.display()))?;
        // Its own process group: a Ctrl-C in the terminal is for us, who end it and then clean up.
        let process = command
            .stdin(Stdio::null())
            .stdout(input.try_clone().context("cannot share a pipe")?)
            .stderr(input)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        // The command keeps the writing ends, and with them open the output would never end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let (sender, lines) = mpsc::channel();
        let reader = thread::Builder::new()
            .name("agent-output".to_owned())
            .spawn(move || copy(output, log, &sender))
            .context("cannot start a thread for the agent's output")?;
        let agent = Self { process, lines, reader: Some(reader) };
        containerd.adopt(agent.process.id())?;
        Ok(agent)
    }

    /// The agent's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The lines it printed since the last call.
    pub fn lines(&self) -> impl Iterator<Item = String> + '_ {
        self.lines.try_iter()
    }

    /// Its exit status, if it has ended by itself.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.process.try_wait().context("cannot wait for the agent")
    }

    /// Kills it with SIGKILL.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill().context("cannot kill the agent")?;
        self.process.wait().context("cannot wait for the agent")?;
        Ok(())
    }

    /// Asks it to end with SIGTERM and waits; an agent that does not is killed, and that is an error.
    pub fn end(mut self, timeout: Duration) -> Result<ExitStatus> {
        terminate(self.process.id())?;
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("the agent did not end within {} s of SIGTERM", timeout.as_secs());
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The last lines of what an agent printed, for people.
pub fn log_tail(log: &Path, lines: usize) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn copy(output: PipeReader, mut log: File, lines: &mpsc::Sender<String>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        // The folder may be full or gone; the lines still reach who listens.
        let _ = writeln!(log, "{line}");
        // When nobody listens any more, reading on still keeps the agent from blocking on a full pipe.
        let _ = lines.send(line);
    }
}

fn terminate(pid: u32) -> Result<()> {
    let pid = i32::try_from(pid).context("a strange process id")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM)
        .context("cannot signal the agent")
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot find a free port")?;
    Ok(listener.local_addr().context("cannot find a free port")?.port())
}
