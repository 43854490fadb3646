//! The real kubectl as a process. Owns its start, its words and its end; every wait has a deadline.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::ControlPlaneReady;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Child;
use tokio::process::ChildStdin;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio::time::timeout;

use super::TIMEOUT;

/// How long an answer may take before the question counts as lost.
const RESEND_AFTER: Duration = Duration::from_secs(5);

/// kubectl as administrator in one namespace.
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    home: PathBuf,
    namespace: String,
    environment: Vec<(&'static str, &'static str)>,
}

/// What a finished kubectl said.
#[derive(Debug)]
pub struct Output {
    /// Its exit code; -1 if a signal ended it.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Kubectl {
    pub(super) fn new(plane: &ControlPlaneReady, namespace: &str) -> Self {
        Self {
            program: plane.kubectl(),
            kubeconfig: plane.kubeconfig.clone(),
            home: plane.dir.join("home"),
            namespace: namespace.to_owned(),
            environment: Vec::new(),
        }
    }

    /// The same as an older one, which streams over SPDY all the way.
    pub fn without_websockets(mut self) -> Self {
        let gates = ["KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "KUBECTL_PORT_FORWARD_WEBSOCKETS"];
        self.environment.extend(gates.map(|gate| (gate, "false")));
        self
    }

    /// Runs it and returns what it said; for failures that are to be looked at.
    pub async fn run(&self, arguments: &[&str]) -> Result<Output> {
        self.run_with(arguments, "").await
    }

    /// The same with something on its standard input.
    pub async fn run_with(&self, arguments: &[&str], input: &str) -> Result<Output> {
        let line = arguments.join(" ");
        let mut command = Command::new(&self.program);
        command.arg("--namespace").arg(&self.namespace).args(arguments);
        let mut child = self.spawn(&mut command)?;
        let mut stdin = child.stdin.take().context("kubectl has no standard input")?;
        // It may answer before it has read all, and end without having done so.
        let input = async move { stdin.write_all(input.as_bytes()).await };
        let talk = async { tokio::join!(input, child.wait_with_output()).1.context("cannot wait for kubectl") };
        let output = timeout(TIMEOUT, talk).await.with_context(|| format!("`kubectl {line}` does not end"))??;
        Ok(Output {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs it, insists on its success and returns its standard output.
    pub async fn ok(&self, arguments: &[&str]) -> Result<String> {
        let said = self.run(arguments).await?;
        if said.code != 0 {
            bail!("`kubectl {}` ended with {}: {}{}", arguments.join(" "), said.code, said.out, said.err);
        }
        Ok(said.out)
    }

    /// Starts it and leaves it running.
    pub fn start(&self, arguments: &[&str]) -> Result<Session> {
        let mut command = Command::new(&self.program);
        command.arg("--namespace").arg(&self.namespace).args(arguments);
        Session::of(self.spawn(&mut command)?, format!("kubectl {}", arguments.join(" ")))
    }

    /// Starts it on a terminal of its own, as `-t` wants it. The arguments must not need quoting.
    pub fn start_on_terminal(&self, arguments: &[&str]) -> Result<Session> {
        let line = format!("{} --namespace {} {}", self.program.display(), self.namespace, arguments.join(" "));
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--flush", "--command", &line, "/dev/null"]);
        Session::of(self.spawn(&mut command).context("`script` gives kubectl a terminal")?, line)
    }

    fn spawn(&self, command: &mut Command) -> Result<Child> {
        command
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", &self.home)
            .envs(self.environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command.spawn().with_context(|| format!("cannot run {}", self.program.display()))
    }
}

/// A kubectl that runs; killed when dropped.
pub struct Session {
    line: String,
    process: Child,
    input: Option<ChildStdin>,
    output: watch::Receiver<String>,
    readers: Vec<JoinHandle<()>>,
}

impl Session {
    fn of(mut process: Child, line: String) -> Result<Self> {
        let input = process.stdin.take();
        let (sender, output) = watch::channel(String::new());
        let out = process.stdout.take().context("kubectl has no standard output")?;
        let err = process.stderr.take().context("kubectl has no standard error")?;
        let readers = vec![tokio::spawn(collect(out, sender.clone())), tokio::spawn(collect(err, sender))];
        Ok(Self { line, process, input, output, readers })
    }

    /// Types something.
    pub async fn send(&mut self, text: &str) -> Result<()> {
        let input = self.input.as_mut().context("its input is closed")?;
        input.write_all(text.as_bytes()).await.with_context(|| format!("`{}` does not listen", self.line))?;
        input.flush().await.with_context(|| format!("`{}` does not listen", self.line))
    }

    /// Keeps it from running, so that it neither reads nor answers.
    pub fn suspend(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets it run again.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.process.id().with_context(|| format!("`{}` has ended", self.line))?;
        kill(Pid::from_raw(i32::try_from(pid)?), signal).with_context(|| format!("cannot signal `{}`", self.line))
    }

    /// Closes its standard input.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Waits until it has said this, on standard output or error, and returns all it said so far.
    pub async fn until_output(&mut self, text: &str) -> Result<String> {
        let heard = timeout(TIMEOUT, self.output.wait_for(|said| said.contains(text))).await;
        let heard = heard.map(|heard| heard.map(|said| said.clone()));
        match heard {
            Ok(Ok(said)) => Ok(said),
            Ok(Err(_)) => bail!("`{}` ended and never said {text:?}, but: {}", self.line, self.said()),
            Err(_) => bail!("`{}` never said {text:?}, but: {}", self.line, self.said()),
        }
    }

    /// Types something until it is answered. A runtime may take what is typed before it passes on what is said, so what
    /// a process answers to the very first words of somebody who attaches to it can be lost.
    pub async fn send_until_output(&mut self, question: &str, answer: &str) -> Result<String> {
        let began = Instant::now();
        loop {
            self.send(question).await?;
            match timeout(RESEND_AFTER, self.until_output(answer)).await {
                Ok(said) => return said,
                Err(_) if began.elapsed() < TIMEOUT => {}
                Err(_) => bail!("`{}` never said {answer:?}, but: {}", self.line, self.said()),
            }
        }
    }

    /// All it said so far.
    pub fn said(&self) -> String {
        self.output.borrow().clone()
    }

    /// Waits until it has ended by itself, and returns its exit code and all it said.
    pub async fn ended(mut self) -> Result<(i32, String)> {
        self.input = None;
        let Ok(status) = timeout(TIMEOUT, self.process.wait()).await else {
            bail!("`{}` does not end; it said: {}", self.line, self.said());
        };
        let status = status.context("cannot wait for kubectl")?;
        for reader in self.readers.drain(..) {
            timeout(TIMEOUT, reader).await.context("its output does not end")?.context("reading it panicked")?;
        }
        Ok((status.code().unwrap_or(-1), self.output.borrow().clone()))
    }
}

async fn collect(mut from: impl tokio::io::AsyncRead + Unpin, into: watch::Sender<String>) {
    let mut buffer = [0; 4096];
    while let Ok(length) = from.read(&mut buffer).await
        && length > 0
    {
        into.send_modify(|said| said.push_str(&String::from_utf8_lossy(&buffer[..length])));
    }
}
