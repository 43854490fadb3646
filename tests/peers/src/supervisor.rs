//! The client of a supervisor: a process that owns other processes, takes commands on its standard input and responses
//! each with a line of JSON. The protocol's other side is in `supervised.rs`.
//!
//! A supervisor cleans up when its standard input is closed, so nothing stays behind however its user exits, even by
//! SIGKILL.

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

/// The response to a command.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Response<T> {
    /// The result.
    Ok(T),
    /// Why the command failed.
    Error(String),
}

/// Resources that could not be removed; empty if the clean-up succeeded.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct CleanupReport {
    /// One sentence for each resource.
    pub remaining: Vec<String>,
}

/// A running supervisor. Dropping it waits until the supervisor has cleaned up.
#[derive(Debug)]
pub(crate) struct Supervisor {
    name: &'static str,
    process: Child,
    commands: Option<ChildStdin>,
    responses: BufReader<ChildStdout>,
}

impl Supervisor {
    /// Starts a supervisor and waits for its first response, which says that its resources are ready.
    pub(crate) fn start<T: for<'de> Deserialize<'de>>(name: &'static str, command: &mut Command) -> Result<(Self, T)> {
        // In a process group of its own: a Ctrl-C in the terminal must not interrupt its clean-up.
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let commands = process.stdin.take();
        let responses = process.stdout.take().context("the supervisor has no standard output")?;
        let mut responses = BufReader::new(responses);
        match read_response(&mut responses) {
            Ok(ready) => Ok((Self { name, process, commands, responses }, ready)),
            Err(error) => {
                drop(commands);
                let status = process.wait().context("cannot wait for the supervisor")?;
                Err(error.context(format!("{name} exited with {status}")))
            }
        }
    }

    /// Sends a command and waits for the response.
    pub(crate) fn call<T: for<'de> Deserialize<'de>>(&mut self, line: &str) -> Result<T> {
        let commands = self.commands.as_mut().with_context(|| format!("{} is being stopped", self.name))?;
        writeln!(commands, "{line}").with_context(|| format!("{} has exited", self.name))?;
        match read_response(&mut self.responses)? {
            Response::Ok(result) => Ok(result),
            Response::Error(error) => bail!(error),
        }
    }

    /// Closes the supervisor's input and waits for its clean-up; fails with what could not be removed.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.commands = None;
        let report: CleanupReport =
            read_response(&mut self.responses).with_context(|| format!("the clean-up of {} failed", self.name))?;
        if !report.remaining.is_empty() {
            bail!("left behind by {}:\n  {}", self.name, report.remaining.join("\n  "));
        }
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Closing the input starts the clean-up, whose failures the supervisor prints itself.
        self.commands = None;
        if let Err(error) = self.process.wait() {
            eprintln!("cannot wait for {}: {error}", self.name);
        }
    }
}

fn read_response<T: for<'de> Deserialize<'de>>(responses: &mut BufReader<ChildStdout>) -> Result<T> {
    let mut line = String::new();
    if responses.read_line(&mut line).context("cannot read the supervisor's response")? == 0 {
        bail!("the supervisor exited without a response");
    }
    serde_json::from_str(&line).with_context(|| format!("the supervisor answered {:?}", line.trim_end()))
}

/// Path of the supervisor's program: from the environment variable, or beside the running program.
pub(crate) fn find(name: &str, variable: &str) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Ok(PathBuf::from(path));
    }
    let program = std::env::current_exe().context("cannot determine the path of this program")?;
    program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("no {name} beside {}: run `cargo build -p keblet-peers`", program.display()))
}
