//! Runs the real kubectl; every wait has a deadline.

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

/// Deadline of a response before the input is sent again.
const RESEND_AFTER: Duration = Duration::from_secs(5);

/// kubectl as administrator in one namespace.
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    home: PathBuf,
    namespace: String,
    environment: Vec<(&'static str, &'static str)>,
}

/// Output of a finished kubectl.
#[derive(Debug)]
pub struct Output {
    /// Its exit code; -1 if a signal killed it.
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

    /// The same without WebSockets: streams use SPDY, as in older versions.
    pub fn without_websockets(mut self) -> Self {
        let gates = ["KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "KUBECTL_PORT_FORWARD_WEBSOCKETS"];
        self.environment.extend(gates.map(|gate| (gate, "false")));
        self
    }

    /// Runs kubectl and returns its output, whatever the exit code.
    ///
    /// # Errors
    /// kubectl cannot be run or does not exit in time.
    pub async fn run(&self, arguments: &[&str]) -> Result<Output> {
        self.run_with(arguments, "").await
    }

    /// [`Self::run`] with this text on standard input.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_with(&self, arguments: &[&str], input: &str) -> Result<Output> {
        let line = arguments.join(" ");
        let mut command = Command::new(&self.program);
        command.arg("--namespace").arg(&self.namespace).args(arguments);
        let mut child = self.spawn(&mut command)?;
        let mut stdin = child.stdin.take().context("kubectl has no standard input")?;
        // kubectl may write output before it has read all input, and exit without reading it.
        let input = async move { stdin.write_all(input.as_bytes()).await };
        let talk = async { tokio::join!(input, child.wait_with_output()).1.context("cannot wait for kubectl") };
        let output = timeout(TIMEOUT, talk).await.with_context(|| format!("`kubectl {line}` does not exit"))??;
        Ok(Output {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs kubectl and returns its standard output.
    ///
    /// # Errors
    /// kubectl fails, or as [`Self::run`].
    pub async fn ok(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments).await?;
        if output.code != 0 {
            bail!("`kubectl {}` exited with {}: {}{}", arguments.join(" "), output.code, output.out, output.err);
        }
        Ok(output.out)
    }

    /// Starts kubectl in the background.
    ///
    /// # Errors
    /// kubectl cannot be started.
    pub fn start(&self, arguments: &[&str]) -> Result<Session> {
        let mut command = Command::new(&self.program);
        command.arg("--namespace").arg(&self.namespace).args(arguments);
        Session::of(self.spawn(&mut command)?, format!("kubectl {}", arguments.join(" ")))
    }

    /// Starts kubectl on a terminal of its own, as `-t` requires. The arguments must not need quoting.
    ///
    /// # Errors
    /// kubectl cannot be started.
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

/// A running kubectl; killed when dropped.
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

    /// Writes to its standard input.
    ///
    /// # Errors
    /// The input is closed.
    pub async fn send(&mut self, text: &str) -> Result<()> {
        let input = self.input.as_mut().context("its input is closed")?;
        input.write_all(text.as_bytes()).await.with_context(|| format!("`{}` does not read its input", self.line))?;
        input.flush().await.with_context(|| format!("`{}` does not read its input", self.line))
    }

    /// Suspends the process, so that it neither reads nor writes.
    ///
    /// # Errors
    /// It has exited.
    pub fn suspend(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Resumes the process.
    ///
    /// # Errors
    /// It has exited.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.process.id().with_context(|| format!("`{}` has exited", self.line))?;
        kill(Pid::from_raw(i32::try_from(pid)?), signal).with_context(|| format!("cannot signal `{}`", self.line))
    }

    /// Closes its standard input.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Waits until its output, on standard output or error, contains the text; returns all output so far.
    ///
    /// # Errors
    /// The text was not written in time, or kubectl exited before.
    pub async fn until_output(&mut self, text: &str) -> Result<String> {
        let result = timeout(TIMEOUT, self.output.wait_for(|output| output.contains(text))).await;
        let result = result.map(|result| result.map(|output| output.clone()));
        match result {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(_)) => {
                bail!(
                    "`{}` exited without writing {text:?}; the end of its output: {}",
                    self.line,
                    self.end_of_output()
                )
            }
            Err(_) => bail!("`{}` did not write {text:?}; the end of its output: {}", self.line, self.end_of_output()),
        }
    }

    /// Writes input repeatedly until the output contains `answer`. A runtime may read input before it forwards output,
    /// so the first output of a process after attaching can be lost.
    ///
    /// # Errors
    /// As [`Self::until_output`].
    pub async fn send_until_output(&mut self, question: &str, answer: &str) -> Result<String> {
        let began = Instant::now();
        loop {
            self.send(question).await?;
            match timeout(RESEND_AFTER, self.until_output(answer)).await {
                Ok(output) => return output,
                Err(_) if began.elapsed() < TIMEOUT => {}
                Err(_) => {
                    bail!("`{}` did not write {answer:?}; the end of its output: {}", self.line, self.end_of_output())
                }
            }
        }
    }

    /// All output so far.
    pub fn output_so_far(&self) -> String {
        self.output.borrow().clone()
    }

    /// The last 2 KB of the output, for messages.
    fn end_of_output(&self) -> String {
        let output = self.output.borrow();
        let start = output.floor_char_boundary(output.len().saturating_sub(2_000));
        output[start..].to_owned()
    }

    /// Waits until kubectl has exited by itself, and returns its exit code and output. While it writes, it is waited for: the
    /// time that much output takes depends on what else runs.
    ///
    /// # Errors
    /// It neither exits nor writes in time.
    pub async fn ended(mut self) -> Result<(i32, String)> {
        self.input = None;
        let status = loop {
            let written = self.output.borrow().len();
            match timeout(TIMEOUT, self.process.wait()).await {
                Ok(status) => break status,
                Err(_) if self.output.borrow().len() > written => {}
                Err(_) => bail!("`{}` does not exit; the end of its output: {}", self.line, self.end_of_output()),
            }
        };
        let status = status.context("cannot wait for kubectl")?;
        for reader in self.readers.drain(..) {
            timeout(TIMEOUT, reader).await.context("its output is not closed")?.context("reading it panicked")?;
        }
        Ok((status.code().unwrap_or(-1), self.output.borrow().clone()))
    }
}

async fn collect(mut from: impl tokio::io::AsyncRead + Unpin, into: watch::Sender<String>) {
    let mut buffer = [0; 4096];
    while let Ok(length) = from.read(&mut buffer).await
        && length > 0
    {
        into.send_modify(|output| output.push_str(&String::from_utf8_lossy(&buffer[..length])));
    }
}
