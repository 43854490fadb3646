//! The handle of a private container runtime. Owns the talk with `private-containerd`; refuses to clean up by itself,
//! which that process does better, also when this one is killed.

use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Child;
use std::process::ChildStdin;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use serde::Deserialize;
use serde::Serialize;

use crate::Cache;
use crate::PodView;

const PROGRAM: &str = "private-containerd";

/// What a private runtime is started with.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where its files go; a new folder below the temporary folder if not given. Removed at the end.
    pub dir: Option<PathBuf>,
    /// The supervisor, if it does not lie beside the running program.
    pub supervisor: Option<PathBuf>,
}

/// What a running private runtime offers.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Ready {
    /// The folder of all its files. Put the agent's root folder here too, and its mounts are cleaned up as well.
    pub dir: PathBuf,
    /// The CRI socket.
    pub socket: PathBuf,
    /// The process id of containerd.
    pub pid: i32,
    /// A cgroup, named from the root of every hierarchy, that is removed at the end with all below it.
    pub cgroup_root: String,
    /// The bridge that pods are attached to.
    pub bridge: String,
    /// The pods' network. The host's address on it is the first one.
    pub pod_subnet: String,
}

/// The answer to an order.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer<T> {
    /// What was asked for.
    Ok(T),
    /// Why it could not be done.
    Error(String),
}

/// What could not be cleaned up; empty if all is well.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Remains {
    /// One sentence for each thing that is still there.
    pub left: Vec<String>,
}

/// A container runtime with its own root, state, socket, network and cgroup.
///
/// Dropping it stops the runtime and removes all that it brought forth, which takes as long as it takes. The agent
/// that used it must be gone before, or it starts again what is being removed; see [`Self::adopt`].
#[derive(Debug)]
pub struct PrivateContainerd {
    supervisor: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    ready: Ready,
}

impl PrivateContainerd {
    /// Starts a runtime and waits until it answers and has its images.
    pub fn start(cache: &Cache, options: &Options) -> Result<Self> {
        cache.check()?;
        let program = match &options.supervisor {
            Some(program) => program.clone(),
            None => find_supervisor()?,
        };
        let mut command = Command::new(&program);
        command.arg("--cache").arg(cache.root());
        if let Some(dir) = &options.dir {
            command.arg("--dir").arg(dir);
        }
        // Its own process group: a Ctrl-C in the terminal is for us, and the runtime must live to be cleaned up.
        let mut supervisor = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let orders = supervisor.stdin.take();
        let answers = supervisor.stdout.take().context("the supervisor has no standard output")?;
        let mut answers = BufReader::new(answers);
        let ready = match answer(&mut answers) {
            Ok(ready) => ready,
            Err(error) => {
                drop(orders);
                let status = supervisor.wait().context("cannot wait for the supervisor")?;
                return Err(error.context(format!("no private container runtime: {PROGRAM} ended with {status}")));
            }
        };
        Ok(Self { supervisor, orders, answers, ready })
    }

    /// What the runtime offers.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// The CRI endpoint as the agent wants it.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.ready.socket.display())
    }

    /// Kills containerd with SIGKILL. Containers live on.
    pub fn kill(&mut self) -> Result<()> {
        self.order("kill").context("cannot kill containerd")
    }

    /// Starts containerd again after [`Self::kill`] and waits until it answers.
    pub fn restart(&mut self) -> Result<()> {
        self.ready = self.order("start").context("cannot start containerd again")?;
        Ok(())
    }

    /// What the runtime says of all its pods.
    pub fn pods(&mut self) -> Result<Vec<PodView>> {
        self.order("list").context("cannot list the runtime's pods")
    }

    /// Names a process that uses the runtime: should we be killed, it is killed too, before the clean-up.
    pub fn adopt(&mut self, pid: u32) -> Result<()> {
        self.order(&format!("adopt {pid}")).with_context(|| format!("cannot adopt process {pid}"))
    }

    /// Stops the runtime, removes all that it brought forth, and says what could not be removed.
    pub fn stop(mut self) -> Result<()> {
        self.orders = None;
        let remains: Remains = answer(&mut self.answers).context("the clean-up did not end well")?;
        if !remains.left.is_empty() {
            bail!("left behind by the private container runtime:\n  {}", remains.left.join("\n  "));
        }
        Ok(())
    }

    fn order<T: for<'de> Deserialize<'de>>(&mut self, order: &str) -> Result<T> {
        let orders = self.orders.as_mut().context("the runtime is being stopped")?;
        writeln!(orders, "{order}").context("the supervisor is gone")?;
        match answer(&mut self.answers)? {
            Answer::Ok(answer) => Ok(answer),
            Answer::Error(error) => bail!(error),
        }
    }
}

impl Drop for PrivateContainerd {
    fn drop(&mut self) {
        // The end of its input is the supervisor's order to clean up; it says itself what went wrong.
        self.orders = None;
        if let Err(error) = self.supervisor.wait() {
            eprintln!("cannot wait for {PROGRAM}: {error}");
        }
    }
}

fn answer<T: for<'de> Deserialize<'de>>(answers: &mut BufReader<ChildStdout>) -> Result<T> {
    let mut line = String::new();
    if answers.read_line(&mut line).context("cannot read the supervisor's answer")? == 0 {
        bail!("the supervisor ended without an answer");
    }
    serde_json::from_str(&line).with_context(|| format!("the supervisor answered {:?}", line.trim_end()))
}

/// The supervisor is named by `KEBLET_PRIVATE_CONTAINERD` or lies beside the running program.
fn find_supervisor() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("KEBLET_PRIVATE_CONTAINERD") {
        return Ok(PathBuf::from(path));
    }
    let program = std::env::current_exe().context("cannot tell which program is running")?;
    program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(PROGRAM))
        .find(|path| path.is_file())
        .with_context(|| format!("no {PROGRAM} beside {}: run `cargo build -p keblet-peers`", program.display()))
}
