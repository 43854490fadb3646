//! One containerd: start, restart, clean-up.

use std::ffi::OsStr;
use std::fs;
use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Cache;
use keblet_peers::PAUSE_IMAGE;
use keblet_peers::PROBE_IMAGE;
use keblet_peers::PodView;
use keblet_peers::Ready;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::process::Command;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::timeout;

use crate::config;
use crate::config::Driver;
use crate::config::Layout;
use crate::cri::Cri;
use crate::host_resources::HostResources;
use crate::leftovers;
use crate::network;
use crate::processes::Process;
use crate::shared::SharedFolders;

const START_DEADLINE: Duration = Duration::from_secs(30);
const STOP_DEADLINE: Duration = Duration::from_secs(10);
const REMOVE_DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
const LOG_TAIL: usize = 15;

/// A containerd with its resources.
pub(crate) struct Runtime {
    cache: Cache,
    layout: Layout,
    containerd: Option<Child>,
    shared: Option<SharedFolders>,
    /// Registered processes, which would restart what is being removed.
    users: Vec<Process>,
}

impl Runtime {
    /// A runtime that is not started; only its folder exists.
    pub(crate) fn new(cache: Cache, layout: Layout) -> Self {
        Self { cache, layout, containerd: None, shared: None, users: Vec::new() }
    }

    /// Creates network, cgroups and configuration, starts containerd and imports the test images.
    ///
    /// # Errors
    /// A resource cannot be created, or containerd does not get ready.
    pub(crate) async fn start_new(&mut self) -> Result<Ready> {
        self.cache.check()?;
        // First, as it fails at once without root, which the removal of leftovers needs too.
        self.shared = Some(SharedFolders::enter()?);
        leftovers::remove(&self.cache).await;
        write(&self.layout.config(), &config::containerd(&self.layout, &self.cache))?;
        write(&self.layout.cni_list(), &config::cni(&self.layout))?;
        if self.layout.driver == Driver::ReportedSystemd {
            write_executable(&self.layout.runc_wrapper(), &config::cgroupfs_runc(&self.layout, &self.cache))?;
        }
        HostResources::of(&self.layout).create_cgroups()?;
        network::create(&self.layout, &self.cache).await?;
        let ready = self.start().await?;
        self.import_test_images().await?;
        Ok(ready)
    }

    /// Starts containerd and waits until it is ready.
    ///
    /// # Errors
    /// containerd runs already, or does not get ready.
    pub(crate) async fn start(&mut self) -> Result<Ready> {
        if self.containerd.is_some() {
            bail!("containerd is already running");
        }
        let log = File::options()
            .append(true)
            .create(true)
            .open(self.layout.log())
            .with_context(|| format!("cannot open {}", self.layout.log().display()))?;
        let program = self.cache.containerd_bin().join("containerd");
        let containerd = self
            .command("containerd")
            .arg("--config")
            .arg(self.layout.config())
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("cannot share the log")?)
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pid = containerd.id().context("containerd exited at once")?;
        self.containerd = Some(containerd);
        self.wait_until_ready().await?;
        Ok(Ready {
            dir: self.layout.dir.clone(),
            socket: self.layout.socket(),
            pid: i32::try_from(pid).context("the process id is out of range")?,
            cgroup_root: self.layout.cgroup_root.clone(),
            bridge: self.layout.bridge.clone(),
            pod_subnet: self.layout.subnet(),
        })
    }

    /// Kills containerd with SIGKILL.
    ///
    /// # Errors
    /// containerd does not run.
    pub(crate) async fn kill(&mut self) -> Result<()> {
        let mut containerd = self.containerd.take().context("containerd is not running")?;
        containerd.kill().await.context("cannot kill containerd")
    }

    /// All pods, as the runtime reports them.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub(crate) async fn pods(&self) -> Result<Vec<PodView>> {
        Cri::connect(&self.layout.socket()).await?.pods().await
    }

    /// Registers a process that is killed before the clean-up, unless it has exited.
    pub(crate) fn adopt(&mut self, pid: i32) {
        self.users.extend(Process::find(pid));
    }

    /// Removes all resources and returns those that remain.
    pub(crate) async fn clean_up(&mut self) -> Vec<String> {
        for user in self.users.drain(..) {
            user.kill().await;
        }
        let mut failures = self.remove_pods().await;
        self.stop().await;
        let resources = HostResources::of(&self.layout);
        failures.extend(resources.remove().await);
        if let Err(error) = network::remove(&self.layout, &self.cache).await {
            failures.push(format!("{error:#}"));
        }
        if let Some(shared) = self.shared.take() {
            failures.extend(shared.leave());
        }
        // A failed call matters only if a resource remains, which is checked below.
        let mut remaining = resources.remaining();
        if network::exists(&self.layout) {
            remaining.push(format!("network interface {}", self.layout.bridge));
        }
        if !remaining.is_empty() {
            remaining.extend(failures);
        }
        remaining
    }

    /// Removes pods through CRI while containerd runs or can be restarted.
    async fn remove_pods(&mut self) -> Vec<String> {
        if self.shared.is_none() {
            return Vec::new();
        }
        let alive = match self.containerd.as_mut().map(Child::try_wait) {
            Some(Ok(None)) => true,
            Some(_) | None => {
                self.containerd = None;
                false
            }
        };
        if !alive && let Err(error) = self.start().await {
            return vec![format!("{error:#}")];
        }
        let removal = async {
            match Cri::connect(&self.layout.socket()).await {
                Ok(mut cri) => cri.remove_all().await,
                Err(error) => vec![format!("{error:#}")],
            }
        };
        timeout(REMOVE_DEADLINE, removal).await.unwrap_or_else(|_| vec!["removing the pods took too long".to_owned()])
    }

    async fn stop(&mut self) {
        let Some(mut containerd) = self.containerd.take() else { return };
        if let Some(pid) = containerd.id().and_then(|pid| i32::try_from(pid).ok()) {
            // It is a child process that was not reaped yet, so its PID cannot have been reused.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        if timeout(STOP_DEADLINE, containerd.wait()).await.is_err() {
            let _ = containerd.kill().await;
        }
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            let attempt = async { Cri::connect(&self.layout.socket()).await?.ready().await };
            let error = match attempt.await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if let Some(containerd) = &mut self.containerd
                && let Some(status) = containerd.try_wait().context("cannot wait for containerd")?
            {
                bail!("containerd exited with {status}; end of its log:\n{}", self.log_tail());
            }
            if Instant::now() > deadline {
                return Err(error.context(format!("containerd is not ready; end of its log:\n{}", self.log_tail())));
            }
            sleep(POLL).await;
        }
    }

    async fn import_test_images(&self) -> Result<()> {
        let images = self.cache.images();
        self.import(&images).await?;
        let names = Cri::connect(&self.layout.socket()).await?.images().await?;
        let is_missing = |image: &&str| !names.iter().any(|name| name == image);
        match [PAUSE_IMAGE, PROBE_IMAGE, BUSYBOX_IMAGE].into_iter().find(is_missing) {
            Some(image) => bail!("{image} is not in {}", images.display()),
            None => Ok(()),
        }
    }

    /// Imports the images of an archive, and waits until the CRI plugin has them, which learns of new images from events.
    ///
    /// # Errors
    /// The archive cannot be imported, or the CRI plugin does not list an image in time.
    pub(crate) async fn import(&self, archive: &Path) -> Result<()> {
        let shown = archive.display();
        self.ctr(&[OsStr::new("import"), archive.as_os_str()])
            .await
            .with_context(|| format!("cannot import {shown}"))?;
        let stored = self.ctr(&[OsStr::new("list"), OsStr::new("--quiet")]).await.context("cannot list the images")?;
        // The plugin adds names of its own, which have a digest.
        let stored: Vec<&str> = stored.lines().filter(|name| !name.contains("sha256:")).collect();
        let mut cri = Cri::connect(&self.layout.socket()).await?;
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            let names = cri.images().await?;
            match stored.iter().find(|image| !names.iter().any(|name| name == *image)) {
                None => return Ok(()),
                Some(image) if Instant::now() > deadline => bail!("the CRI plugin has no {image} of {shown}"),
                Some(_) => sleep(POLL).await,
            }
        }
    }

    /// Runs a subcommand of `ctr images`, and returns its output.
    async fn ctr(&self, arguments: &[&OsStr]) -> Result<String> {
        let mut command = self.command("ctr");
        command.arg("--address").arg(self.layout.socket()).args(["--namespace", "k8s.io", "images"]).args(arguments);
        let output = command.output().await.context("cannot run ctr")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A program of the cache with the path and libraries of the cache.
    fn command(&self, program: &str) -> Command {
        let bin = self.cache.containerd_bin();
        let mut path = bin.clone().into_os_string();
        if let Some(inherited) = std::env::var_os("PATH") {
            path.push(":");
            path.push(inherited);
        }
        let mut command = Command::new(bin.join(program));
        command.env("PATH", path).env("LD_LIBRARY_PATH", self.cache.libraries()).env_remove("NOTIFY_SOCKET");
        command
    }

    fn log_tail(&self) -> String {
        let log = fs::read(self.layout.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n")
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn write_executable(path: &Path, text: &str) -> Result<()> {
    write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}
