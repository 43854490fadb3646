//! The agent as a service of a real systemd, with logind and bus (`private-systemd`). The processes are stopped with
//! the node.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;

use crate::standalone::StandaloneNode;

/// Namespaces of the machine.
const NAMESPACES: [&str; 5] = ["--pid", "--mount", "--uts", "--ipc", "--cgroup"];

/// A machine with the node's agent as a service.
pub struct Machine {
    /// PID of its init process.
    init: String,
    folder: PathBuf,
}

impl Machine {
    /// Starts systemd with `program` (`private-systemd`), and with it the agent; both are stopped with the node's
    /// agent.
    ///
    /// # Errors
    /// cgroup v2 is not mounted, or systemd does not start in time.
    pub fn start(node: &mut StandaloneNode, program: &str) -> Result<Self> {
        Self::start_through(node, program, &[])
    }

    /// As [`Machine::start`]; `wrapper` executes the agent, whose command line follows it.
    ///
    /// # Errors
    /// As [`Machine::start`].
    pub fn start_through(node: &mut StandaloneNode, program: &str, wrapper: &[&str]) -> Result<Self> {
        let ready = node.containerd.ready().clone();
        let folder = ready.dir.join("machine");
        // Below the runtime's cgroup, which is removed with it.
        let cgroup = unified()?.join(ready.cgroup_root.trim_start_matches('/')).join("machine");
        let shown = [&folder, &cgroup, &node.layout.log].map(|path| path.display().to_string());
        node.start_under(&[&[program, &shown[0], &shown[1], &shown[2]], wrapper].concat())?;
        let children = format!("/proc/{0}/task/{0}/children", node.agent_pid()?);
        let init = node.until("the machine's first process", |_| {
            let children = fs::read_to_string(&children).unwrap_or_default();
            Ok(children.split_whitespace().next().map(str::to_owned))
        })?;
        Ok(Self { init, folder })
    }

    /// Runs a program on the machine and returns its output.
    ///
    /// # Errors
    /// The program cannot be run or fails.
    pub fn run(&self, command: &[&str]) -> Result<String> {
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--target", &self.init]).args(NAMESPACES).arg("--").args(command);
        let output = nsenter.output().with_context(|| format!("cannot run {command:?} on the machine"))?;
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{command:?}: {} {stdout} {stderr}", output.status);
        Ok(stdout.into_owned())
    }

    /// When systemd began to power the machine off, in seconds of uptime, with a resolution of 10 ms.
    pub fn off_at(&self) -> Option<f64> {
        fs::read_to_string(self.folder.join("off")).ok()?.trim().parse().ok()
    }
}

/// Mount point of cgroup v2.
fn unified() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
    let mount = mounts.lines().map(|line| line.split(' ')).find_map(|mut fields| {
        let (path, kind) = (fields.nth(1)?, fields.next()?);
        (kind == "cgroup2").then(|| Path::new(path).to_owned())
    });
    mount.context("cgroup v2 is not mounted")
}
