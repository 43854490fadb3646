//! A node agent under measurement: a child process with its own folder, configuration and ports.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;
use serde_json::json;
use tokio::process::Child;
use tokio::process::Command;
use tokio::time::Instant;

use super::column::Column;
use super::exposition::Exposition;
use super::manifest;
use super::manifest::Ingredients;
use super::stamps::monotonic_now;
use super::stamps::seconds;
use super::workload::BenchPod;
use keblet::runtime::RuntimeEndpoint;

/// Fine enough for a target of 200 ms.
const READY_POLL: Duration = Duration::from_millis(2);
const READY_LIMIT: Duration = Duration::from_secs(60);
/// For an agent to end after SIGTERM.
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// A running agent. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Agent {
    child: Child,
    pid: u32,
    begun: u64,
    folder: PathBuf,
    healthz: String,
    metrics: String,
    http: reqwest::Client,
}

impl Agent {
    /// Starts the agent of `column` (`keblet` itself, or a peer's command) for up to `pods` pods.
    pub(super) fn start(
        column: &Column,
        keblet: &Path,
        endpoint: &RuntimeEndpoint,
        folder: &Path,
        pods: u32,
    ) -> anyhow::Result<Self> {
        let ports = Ports::free()?;
        let mut config = kubelet_configuration(folder, endpoint, pods, &ports);
        // Other agents would leave certificates on the node.
        config["enableServer"] = json!(!matches!(column, Column::Peer(..)));
        let mut text = config.to_string();
        if let Some(own) = keblet_configuration(column) {
            text = format!("{text}\n---\n{own}\n");
        }
        let config = folder.join("config.yaml");
        std::fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
        Self::launch(column.name(), command(column, keblet, folder, &config), folder, &ports)
    }

    /// Starts `command` as the agent that serves on `ports`; its output goes to a file in `folder`.
    pub(super) fn launch(name: &str, mut command: Command, folder: &Path, ports: &Ports) -> anyhow::Result<Self> {
        let log = folder.join("agent.log");
        let log = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0).kill_on_drop(true);
        let begun = monotonic_now()?;
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let pid = child.id().context("the agent ended before it began")?;
        let url = |port: u16, path: &str| format!("http://127.0.0.1:{port}/{path}");
        Ok(Self {
            child,
            pid,
            begun,
            folder: folder.to_owned(),
            healthz: url(ports.healthz, "healthz"),
            metrics: url(ports.read_only, "metrics"),
            http: reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build()?,
        })
    }

    /// When it was started, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// Its process id.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until it calls itself healthy; returns the seconds since its start.
    pub(super) async fn ready(&mut self) -> anyhow::Result<f64> {
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            let answer = self.http.get(&self.healthz).send().await;
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(seconds(self.begun, monotonic_now()?));
            }
            self.check_alive()?;
            if Instant::now() > deadline {
                bail!("not healthy after {}{}", humantime::format_duration(READY_LIMIT), self.last_words());
            }
            tokio::time::sleep(READY_POLL).await;
        }
    }

    /// Runs `work`, unless the agent ends before it is done.
    pub(super) async fn while_alive<T>(&mut self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let ended = tokio::select! {
            done = work => return done,
            ended = self.child.wait() => ended,
        };
        bail!("the agent ended: {}{}", ended.context("cannot wait for the agent")?, self.last_words())
    }

    /// What it says of itself.
    pub(super) async fn exposition(&self) -> anyhow::Result<Exposition> {
        let answer = self.http.get(&self.metrics).send().await.and_then(|answer| answer.error_for_status());
        let text = answer.with_context(|| format!("cannot read {}", self.metrics))?.text().await?;
        Ok(Exposition::parse(&text))
    }

    /// Ends it, by force if need be.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid).context("no such process id")?;
        if self.child.try_wait()?.is_none() {
            nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGTERM).context("cannot signal the agent")?;
        }
        if tokio::time::timeout(STOP_LIMIT, self.child.wait()).await.is_err() {
            self.child.kill().await.context("cannot kill the agent")?;
        }
        Ok(())
    }

    fn check_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("cannot wait for the agent")? {
            None => Ok(()),
            Some(status) => bail!("the agent ended: {status}{}", self.last_words()),
        }
    }

    /// The end of its log, for whoever must find out what went wrong.
    fn last_words(&self) -> String {
        let Ok(log) = std::fs::read(self.folder.join("agent.log")) else { return String::new() };
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().rev().take(8).collect();
        if lines.is_empty() {
            return ", without a word".to_owned();
        }
        lines.iter().rev().fold("; its last words:".to_owned(), |text, line| format!("{text}\n    {line}"))
    }
}

/// Puts a pod before the agents: complete at once, under its name.
pub(super) fn put(folder: &Path, pod: &BenchPod, image: &str) -> anyhow::Result<()> {
    let (stamps, logs) = (folder.join("stamps"), folder.join("logs"));
    let manifest = manifest::static_pod(pod, Ingredients { image, stamps: &stamps, logs: &logs });
    let hidden = folder.join(format!("{}.json", pod.name));
    let visible = folder.join("manifests").join(format!("{}.json", pod.name));
    std::fs::write(&hidden, manifest.to_string()).with_context(|| format!("cannot write {}", hidden.display()))?;
    std::fs::rename(&hidden, &visible).with_context(|| format!("cannot write {}", visible.display()))
}

fn command(column: &Column, keblet: &Path, folder: &Path, config: &Path) -> Command {
    let root = folder.join("root");
    match column {
        Column::Peer(_, template) => {
            let line = template
                .replace("{manifests}", &quoted(&folder.join("manifests")))
                .replace("{root}", &quoted(&root))
                .replace("{config}", &quoted(config));
            shell(&line)
        }
        _ => {
            let mut command = Command::new(keblet);
            command.arg("run").arg("--config").arg(config).arg("--root-dir").arg(&root);
            command.arg("--cert-dir").arg(root.join("pki"));
            command
        }
    }
}

/// A peer's command line. Not a child of the shell: signals and readings are meant for the agent itself.
pub(super) fn shell(line: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(format!("exec {line}"));
    command
}

/// For a shell.
pub(super) fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// The same for every agent: no cgroups of its own, so that the machine is left as it was, and nothing that acts on its
/// own while pods are measured.
pub(super) fn kubelet_configuration(folder: &Path, endpoint: &RuntimeEndpoint, pods: u32, ports: &Ports) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "staticPodPath": folder.join("manifests"),
        "containerRuntimeEndpoint": endpoint.to_string(),
        "failCgroupV1": false,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "address": "127.0.0.1",
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": ports.healthz,
        "readOnlyPort": ports.read_only,
        "port": ports.secure,
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "maxPods": pods.max(110) + 10,
        "podLogsDir": folder.join("logs"),
        "volumePluginDir": folder.join("root/volume-plugins"),
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "enableControllerAttachDetach": false,
        "localStorageCapacityIsolation": false,
        "evictionHard": {
            "memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
            "imagefs.available": "0%", "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
    })
}

/// How keblet is changed for a column; nothing for peers and for keblet as it is.
fn keblet_configuration(column: &Column) -> Option<Value> {
    let settings = match column {
        Column::NoKernel => json!({"sensors": {"bpf": false, "pidfd": false}}),
        Column::Relist => json!({
            "sensors": {"bpf": false, "pidfd": false, "runtimeEvents": false},
            "relist": {"fixedPeriod": "1s"},
        }),
        _ => return None,
    };
    let mut document = json!({"apiVersion": "keblet.dev/v1alpha1", "kind": "KebletConfiguration"});
    if let (Some(document), Value::Object(settings)) = (document.as_object_mut(), settings) {
        document.extend(settings);
    }
    Some(document)
}

/// Where an agent listens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    healthz: u16,
    read_only: u16,
    secure: u16,
}

impl Ports {
    /// Ports nobody listens on right now.
    pub(super) fn free() -> anyhow::Result<Self> {
        Ok(Self { healthz: free_port()?, read_only: free_port()?, secure: free_port()? })
    }
}

fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::super::folder;
    use super::*;

    fn line(column: &Column, folder: &str) -> Vec<String> {
        let folder = Path::new(folder);
        let command = command(column, Path::new("/bin/keblet"), folder, &folder.join("config.yaml"));
        let std = command.as_std();
        std::iter::once(std.get_program())
            .chain(std.get_args())
            .map(|part| part.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn command_lines() {
        assert_eq!(
            line(&Column::Evented, "/f"),
            ["/bin/keblet", "run", "--config", "/f/config.yaml", "--root-dir", "/f/root", "--cert-dir", "/f/root/pki"]
        );
        let peer = Column::Peer("go".to_owned(), "go --config {config} {manifests}:{root}".to_owned());
        assert_eq!(
            line(&peer, "/it's"),
            ["/bin/sh", "-c", r"exec go --config '/it'\''s/config.yaml' '/it'\''s/manifests':'/it'\''s/root'"]
        );
    }

    #[test]
    fn only_the_changed_columns_have_a_second_document() {
        assert_eq!(keblet_configuration(&Column::Evented), None);
        assert_eq!(keblet_configuration(&Column::Peer("go".to_owned(), String::new())), None);
        let relist = keblet_configuration(&Column::Relist).unwrap();
        assert_eq!(relist["kind"], "KebletConfiguration");
        assert_eq!(relist["relist"]["fixedPeriod"], "1s");
        assert_eq!(relist["sensors"]["runtimeEvents"], false);
    }

    #[tokio::test]
    async fn an_agent_that_ends_is_reported_with_its_last_words() {
        let folder = tempfile::tempdir().unwrap();
        folder::make(folder.path()).unwrap();
        let peer = Column::Peer("bad".to_owned(), "sh -c 'echo no such {config}; exit 3'".to_owned());
        let endpoint = "unix:///none".parse().unwrap();
        let mut agent = Agent::start(&peer, Path::new("/none"), &endpoint, folder.path(), 1).unwrap();
        let error = agent.ready().await.unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no such"), "{error}");
    }

    #[tokio::test]
    async fn a_stopped_agent_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        folder::make(folder.path()).unwrap();
        let peer = Column::Peer("sleepy".to_owned(), "sleep 1000 # {config}".to_owned());
        let agent =
            Agent::start(&peer, Path::new("/none"), &"unix:///none".parse().unwrap(), folder.path(), 1).unwrap();
        let pid = agent.pid();
        agent.stop().await.unwrap();
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
