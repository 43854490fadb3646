//! A node agent on a private runtime: its folders, its configuration, its process. Works for any agent that reads a
//! KubeletConfiguration.

use std::ffi::OsStr;
use std::ffi::OsString;
use std::fs;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::PipeReader;
use std::io::Write as _;
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
use keblet_skip::ports;
use serde_json::Value;
use serde_json::json;

use crate::NodeAccess;
use crate::PrivateContainerd;
use crate::Ready;

const POLL: Duration = Duration::from_millis(10);
/// Each node has an address of its own, so that all can use the default port.
const KUBELET_PORT: u16 = 10250;

/// The folders, ports and configuration file of a node, all in the runtime's folder and removed with it.
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
    /// The agent's output.
    pub log: PathBuf,
    /// Address of `/healthz`.
    pub healthz_port: u16,
    /// Address of `/pods` and `/metrics`.
    pub read_only_port: u16,
}

impl Node {
    /// Creates the folders, finds free ports and writes the configuration. `changes` replaces fields of it.
    ///
    /// # Errors
    /// A folder or the configuration cannot be written.
    pub fn create(ready: &Ready, changes: &Value) -> Result<Self> {
        let path = |name: &str| ready.dir.join(name);
        let node = Self {
            root: path("kubelet"),
            manifests: path("manifests"),
            pod_logs: path("pod-logs"),
            config: path("kubelet.json"),
            log: path("agent.log"),
            healthz_port: ports::free(),
            read_only_port: ports::free(),
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

    /// The same for a node of a cluster: HTTPS on the node's address, with authentication and authorization by the API
    /// server.
    ///
    /// # Errors
    /// As [`Self::create`].
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
            // No DNS server is there; pods resolve only their own names.
            "clusterDNS": ["10.43.0.10"],
            "clusterDomain": "cluster.local",
        });
        if let (Some(fields), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
            fields.extend(changes.clone());
        }
        Self::create(ready, &config)
    }

    /// The flags with which any kubelet joins the cluster as this node.
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

    /// Writes the manifest of a static pod atomically.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub fn write_manifest(&self, name: &str, pod: &Value) -> Result<()> {
        let path = self.manifest(name);
        let partial = self.manifests.join(format!(".{name}.partial"));
        let text = format!("{pod:#}\n");
        fs::write(&partial, text).with_context(|| format!("cannot write {}", partial.display()))?;
        fs::rename(&partial, &path)
            .with_context(|| format!("cannot rename {} to {}", partial.display(), path.display()))
    }

    /// Removes the manifest of a static pod.
    ///
    /// # Errors
    /// The file cannot be removed.
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
            // Memory swap and full disks of the test machine must not affect tests.
            "evictionHard": {},
            "imageGCHighThresholdPercent": 100,
            "failSwapOn": false,
            "address": "127.0.0.1",
            "port": ports::free(),
            "readOnlyPort": self.read_only_port,
            "healthzPort": self.healthz_port,
            "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
            "authorization": { "mode": "AlwaysAllow" },
            // The tables of the test machine must not be changed. A test that wants the chains has tables of its own.
            "makeIPTablesUtilChains": false,
            "volumePluginDir": self.root.join("plugins"),
        }))
    }
}

/// A running agent. Killed when dropped; [`Agent::end`] stops it gracefully.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    lines: mpsc::Receiver<String>,
    reader: Option<JoinHandle<()>>,
}

impl Agent {
    /// Starts an agent and registers it with the runtime's supervisor, which kills it before the clean-up if this
    /// process is killed.
    ///
    /// # Errors
    /// The program or the thread that reads its output cannot be started.
    pub fn start(command: &mut Command, node: &Node, containerd: &mut PrivateContainerd) -> Result<Self> {
        let (output, input) = std::io::pipe().context("cannot create a pipe")?;
        let program = command.get_program().to_string_lossy().into_owned();
        let log = File::options()
            .append(true)
            .create(true)
            .open(&node.log)
            .with_context(|| format!("cannot open {}", node.log.display()))?;
        // In a process group of its own: after a Ctrl-C in the terminal this process stops it and then cleans up.
        let process = command
            .stdin(Stdio::null())
            .stdout(input.try_clone().context("cannot share a pipe")?)
            .stderr(input)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        // The command holds the write ends; they must be closed for the output to end.
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

    /// The agent's PID.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The lines it printed since the last call.
    pub fn lines(&self) -> impl Iterator<Item = String> + '_ {
        self.lines.try_iter()
    }

    /// Its exit status, if it has exited by itself.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.process.try_wait().context("cannot wait for the agent")
    }

    /// Kills it with SIGKILL.
    ///
    /// # Errors
    /// The process cannot be killed or waited for.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill().context("cannot kill the agent")?;
        self.process.wait().context("cannot wait for the agent")?;
        Ok(())
    }

    /// Stops it with SIGTERM and waits; kills it after the timeout.
    ///
    /// # Errors
    /// It did not exit in time.
    pub fn end(mut self, timeout: Duration) -> Result<ExitStatus> {
        terminate(self.process.id())?;
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("the agent did not exit within {} s of SIGTERM", timeout.as_secs());
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Both fail only if it has exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The last lines of an agent's output, for messages.
pub fn log_tail(log: &Path, lines: usize) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn copy(output: PipeReader, mut log: File, lines: &mpsc::Sender<String>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        // The folder may be full or removed; the reader still receives the lines.
        let _ = writeln!(log, "{line}");
        // Without a reader, the output is still consumed, so that the agent does not block on a full pipe.
        let _ = lines.send(line);
    }
}

fn terminate(pid: u32) -> Result<()> {
    let pid = i32::try_from(pid).context("the process id is out of range")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM)
        .context("cannot signal the agent")
}
