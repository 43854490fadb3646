//! A node agent under measurement: a child process with its own folder, configuration and ports.

use std::fs::File;
use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use keblet::runtime::RuntimeEndpoint;
use keblet_skip::ports;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;
use serde_json::json;
use tokio::process::Child;
use tokio::process::Command;
use tokio::time::Instant;

use super::exposition::Exposition;
use super::participant::Participant;
use super::stamps::monotonic_now;
use super::stamps::seconds;

/// Poll interval; short compared to the 200 ms that an agent takes to become healthy.
const READY_POLL: Duration = Duration::from_millis(2);
const READY_LIMIT: Duration = Duration::from_secs(60);
/// How long an agent may take to exit after SIGTERM.
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// A running agent. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Agent {
    child: Child,
    pid: u32,
    begun: u64,
    folder: PathBuf,
    healthz: String,
    metrics: String,
    pods: String,
    http: reqwest::Client,
}

impl Agent {
    /// Starts `command` as the agent that serves on `ports`; its output goes to a file in `folder`.
    ///
    /// # Errors
    /// The log cannot be created, or the command cannot be executed.
    pub(crate) fn launch(name: &str, mut command: Command, folder: &Path, ports: &Ports) -> anyhow::Result<Self> {
        let log = folder.join("agent.log");
        let log = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0).kill_on_drop(true);
        let begun = monotonic_now()?;
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let pid = child.id().context("the agent has no process id")?;
        let url = |port: u16, path: &str| format!("http://127.0.0.1:{port}/{path}");
        Ok(Self {
            child,
            pid,
            begun,
            folder: folder.to_owned(),
            healthz: url(ports.healthz, "healthz"),
            metrics: url(ports.read_only, "metrics"),
            pods: url(ports.read_only, "pods"),
            // Plain HTTP only: a machine without authorities is enough.
            http: reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).tls_certs_only([]).build()?,
        })
    }

    /// When it was started, in nanoseconds of CLOCK_MONOTONIC.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until `/healthz` succeeds; returns the seconds since its start.
    ///
    /// # Errors
    /// The agent exited, or is not healthy after [`READY_LIMIT`].
    pub(crate) async fn ready(&mut self) -> anyhow::Result<f64> {
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            let response = self.http.get(&self.healthz).send().await;
            if response.is_ok_and(|response| response.status().is_success()) {
                return Ok(seconds(self.begun, monotonic_now()?));
            }
            self.check_running()?;
            if Instant::now() > deadline {
                bail!("not healthy after {}{}", humantime::format_duration(READY_LIMIT), self.log_tail());
            }
            tokio::time::sleep(READY_POLL).await;
        }
    }

    /// Runs `work`, and fails if the agent exits before it is done.
    ///
    /// # Errors
    /// Those of `work`; the agent exited.
    pub(crate) async fn while_running<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let ended = tokio::select! {
            done = work => return done,
            ended = self.child.wait() => ended,
        };
        bail!("the agent exited: {}{}", ended.context("cannot wait for the agent")?, self.log_tail())
    }

    /// Its metrics.
    ///
    /// # Errors
    /// `/metrics` of the read-only port does not respond.
    pub(crate) async fn exposition(&self) -> anyhow::Result<Exposition> {
        let response = self.http.get(&self.metrics).send().await.and_then(|response| response.error_for_status());
        let text = response.with_context(|| format!("cannot read {}", self.metrics))?.text().await?;
        Ok(Exposition::parse(&text))
    }

    /// Reads a page of the read-only port, compressed as monitoring systems read it. Returns its length.
    ///
    /// # Errors
    /// It does not respond, or with an error.
    pub(crate) async fn scrape(&self, path: &str) -> anyhow::Result<usize> {
        let url = self.metrics.replace("/metrics", &format!("/{path}"));
        let request = self.http.get(&url).header("accept-encoding", "gzip");
        let response = request.send().await.and_then(|response| response.error_for_status());
        Ok(response.with_context(|| format!("cannot read {url}"))?.bytes().await?.len())
    }

    /// Its pods with their statuses.
    ///
    /// # Errors
    /// `/pods` of the read-only port does not respond.
    pub(crate) async fn pods(&self) -> anyhow::Result<Value> {
        let response = self.http.get(&self.pods).send().await.and_then(|response| response.error_for_status());
        let text = response.with_context(|| format!("cannot read {}", self.pods))?.text().await?;
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", self.pods))
    }

    /// Stops it with SIGTERM, after [`STOP_LIMIT`] with SIGKILL.
    ///
    /// # Errors
    /// It cannot be signalled.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid).context("the process id is out of range")?;
        if self.child.try_wait()?.is_none() {
            nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGTERM).context("cannot signal the agent")?;
        }
        if tokio::time::timeout(STOP_LIMIT, self.child.wait()).await.is_err() {
            self.child.kill().await.context("cannot kill the agent")?;
        }
        Ok(())
    }

    /// Fails if it has exited.
    ///
    /// # Errors
    /// It has; the error has the end of its log.
    pub(crate) fn check_running(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("cannot wait for the agent")? {
            None => Ok(()),
            Some(status) => bail!("the agent exited: {status}{}", self.log_tail()),
        }
    }

    /// The end of its log, for an error message.
    fn log_tail(&self) -> String {
        let Ok(log) = std::fs::read(self.folder.join("agent.log")) else { return String::new() };
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().rev().take(8).collect();
        if lines.is_empty() {
            return "; it logged nothing".to_owned();
        }
        lines.iter().rev().fold("; end of its log:".to_owned(), |text, line| format!("{text}\n    {line}"))
    }
}

/// The command line of a participant: keblet with `flags`, or a peer's own, with each placeholder replaced.
pub(crate) fn command(
    participant: &Participant,
    keblet: &Path,
    flags: &str,
    placeholders: &[(&str, String)],
) -> Command {
    let template = match participant {
        Participant::Peer { command, .. } => command.clone(),
        _ => format!("{} {flags}", quoted(keblet)),
    };
    let line = placeholders.iter().fold(template, |line, (name, value)| line.replace(name, value));
    let mut command = Command::new("/bin/sh");
    // `exec`, so that signals and readings of /proc apply to the agent and not to the shell. The agent ends with the
    // benchmark, also if that is killed.
    command.arg("-c").arg(format!("exec setpriv --pdeathsig TERM {line}"));
    command
}

/// A path quoted as one word of a shell.
pub(crate) fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// Writes the configuration file of a participant: `kubelet`, and the second document of a variant.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_configuration(
    participant: &Participant,
    kubelet: &Value,
    folder: &Path,
) -> anyhow::Result<PathBuf> {
    let mut text = kubelet.to_string();
    if let Participant::Keblet { configuration: Some(document), .. } = participant {
        text = format!("{text}\n---\n{document}\n");
    }
    let path = folder.join("config.yaml");
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Common settings of all agents: without QoS cgroups unless a caller adds them, and without garbage collection and
/// eviction while pods are measured.
pub(crate) fn kubelet_configuration(folder: &Path, endpoint: &RuntimeEndpoint, pods: u32, ports: &Ports) -> Value {
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
        // The tables of this machine must not be changed.
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

/// Ports of an agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    healthz: u16,
    read_only: u16,
    secure: u16,
}

impl Ports {
    /// Ports that are unused now.
    pub(crate) fn free() -> Self {
        Self { healthz: ports::free(), read_only: ports::free(), secure: ports::free() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::folder;
    use super::*;

    fn peer(command: &str) -> Participant {
        Participant::Peer { name: "peer".to_owned(), command: command.to_owned() }
    }

    fn launch(line: &str, folder: &Path) -> Agent {
        folder::create(folder).unwrap();
        let command = command(&peer(line), Path::new("/none"), "", &[]);
        Agent::launch("peer", command, folder, &Ports::free()).unwrap()
    }

    #[test]
    fn placeholders_are_replaced_in_flags_and_commands() {
        let line = |participant: &Participant| {
            let placeholders = [("{config}", quoted(Path::new("/it's/config.yaml"))), ("{node}", "n".to_owned())];
            let command = command(participant, Path::new("/bin/keblet"), "run --config={config}", &placeholders);
            command.as_std().get_args().nth(1).unwrap().to_string_lossy().into_owned()
        };
        let begin = "exec setpriv --pdeathsig TERM";
        let keblet = format!(r"{begin} '/bin/keblet' run --config='/it'\''s/config.yaml'");
        assert_eq!(line(&Participant::keblet()), keblet);
        assert_eq!(line(&peer("go {node} {config}")), format!(r"{begin} go n '/it'\''s/config.yaml'"));
    }

    #[test]
    fn only_variants_have_a_second_document() {
        let folder = tempfile::tempdir().unwrap();
        let written = |participant: &Participant| {
            let path = write_configuration(participant, &json!({"kind": "KubeletConfiguration"}), folder.path());
            std::fs::read_to_string(path.unwrap()).unwrap()
        };
        assert!(!written(&Participant::keblet()).contains("---"));
        let variant = Participant::Keblet {
            name: "keblet x".to_owned(),
            configuration: Some("kind: KebletConfiguration".into()),
        };
        assert!(written(&variant).ends_with("\n---\nkind: KebletConfiguration\n"));
    }

    #[tokio::test]
    async fn an_agent_that_exits_is_reported_with_the_end_of_its_log() {
        let folder = tempfile::tempdir().unwrap();
        let mut agent = launch("sh -c 'echo no such thing; exit 3'", folder.path());
        let error = agent.ready().await.unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no such thing"), "{error}");
    }

    #[tokio::test]
    async fn a_stopped_agent_has_exited() {
        let folder = tempfile::tempdir().unwrap();
        let agent = launch("sleep 1000", folder.path());
        let pid = agent.pid();
        agent.stop().await.unwrap();
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
