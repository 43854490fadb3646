//! The process of the registry: its configuration, start and end.

use std::fs;
use std::fs::File;
use std::net::Ipv4Addr;
use std::net::SocketAddr;
use std::net::TcpStream;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::PrivateContainerd;
use keblet_peers::log_tail;
use keblet_skip::ports;
use serde_json::Value;
use serde_json::json;

const START_TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
const LOG_LINES: usize = 20;
/// The lowest cost that the registry accepts: it verifies the password of each request.
const BCRYPT_COST: u32 = 4;

/// A registry, killed when dropped.
pub(super) struct Process {
    program: PathBuf,
    config: PathBuf,
    log: PathBuf,
    address: SocketAddr,
    child: Option<Child>,
}

impl Process {
    /// Writes the configuration of a registry that keeps all its files in `folder`.
    pub(super) fn new(program: PathBuf, folder: &Path, users: &[(&str, &str)]) -> Result<Self> {
        fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
        let mut settings = settings(address, &folder.join("storage"));
        if !users.is_empty() {
            let path = folder.join("htpasswd");
            fs::write(&path, htpasswd(users)?).with_context(|| format!("cannot write {}", path.display()))?;
            settings["auth"] = json!({ "htpasswd": { "realm": "tests", "path": path } });
        }
        let (config, log) = (folder.join("config.json"), folder.join("log"));
        // JSON is YAML, which the registry reads.
        fs::write(&config, settings.to_string()).with_context(|| format!("cannot write {}", config.display()))?;
        Ok(Self { program, config, log, address, child: None })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts the registry and waits until it accepts connections. The runtime's supervisor kills it before the clean-up if
    /// this process is killed.
    pub(super) fn start(&mut self, containerd: &mut PrivateContainerd) -> Result<()> {
        let log = File::options().append(true).create(true).open(&self.log);
        let log = log.with_context(|| format!("cannot open {}", self.log.display()))?;
        let mut command = Command::new(&self.program);
        command.arg("serve").arg(&self.config).stdin(Stdio::null());
        // Traces would be sent to a collector that is not there.
        command.env("OTEL_TRACES_EXPORTER", "none");
        command.stdout(log.try_clone().context("cannot share the log of the registry")?).stderr(log);
        let child = command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        let pid = child.id();
        self.child = Some(child);
        containerd.adopt(pid)?;
        self.until_ready()
    }

    fn until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(self.address).is_err() {
            let child = self.child.as_mut().context("the registry was not started")?;
            if let Some(status) = child.try_wait().context("cannot wait for the registry")? {
                bail!("the registry exited with {status}:\n{}", log_tail(&self.log, LOG_LINES));
            }
            if Instant::now() > deadline {
                bail!("the registry does not listen on {}:\n{}", self.address, log_tail(&self.log, LOG_LINES));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Kills it with SIGKILL.
    pub(super) fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the registry does not run")?;
        child.kill().context("cannot kill the registry")?;
        child.wait().context("cannot wait for the registry")?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if it was killed already.
        drop(self.kill());
    }
}

fn settings(address: SocketAddr, storage: &Path) -> Value {
    json!({
        "version": "0.1",
        "log": { "level": "info" },
        "storage": {
            "filesystem": { "rootdirectory": storage },
            "maintenance": { "uploadpurging": { "enabled": false } },
        },
        "http": { "addr": address.to_string(), "secret": "of tests" },
    })
}

/// The users in the format of Apache's htpasswd, with bcrypt, the only hash that the registry supports.
fn htpasswd(users: &[(&str, &str)]) -> Result<String> {
    let line = |(user, password): &(&str, &str)| {
        let hash =
            bcrypt::hash(password, BCRYPT_COST).with_context(|| format!("cannot hash the password of {user}"))?;
        Ok(format!("{user}:{hash}\n"))
    };
    users.iter().map(line).collect()
}
