//! The talk with a process that owns others for us: orders on its standard input, a line of JSON in answer to each.
//!
//! Such a process cleans up when its input ends, so nothing stays behind however its user ends. Refuses to clean up
//! itself, which that process does better, also when this one is killed.

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
pub struct CleanupReport {
    /// One sentence for each thing that is still there.
    pub remaining: Vec<String>,
}

/// A running supervisor. Dropping it ends what it owns, which takes as long as it takes.
#[derive(Debug)]
pub(crate) struct Supervisor {
    name: &'static str,
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Supervisor {
    /// Starts one and waits until what it owns is ready, which is its first answer.
    pub(crate) fn start<T: for<'de> Deserialize<'de>>(name: &'static str, command: &mut Command) -> Result<(Self, T)> {
        // Its own process group: a Ctrl-C in the terminal is for us, and it must live to clean up.
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let orders = process.stdin.take();
        let answers = process.stdout.take().context("the supervisor has no standard output")?;
        let mut answers = BufReader::new(answers);
        match answer(&mut answers) {
            Ok(ready) => Ok((Self { name, process, orders, answers }, ready)),
            Err(error) => {
                drop(orders);
                let status = process.wait().context("cannot wait for the supervisor")?;
                Err(error.context(format!("{name} ended with {status}")))
            }
        }
    }

    /// Gives an order and waits for its answer.
    pub(crate) fn order<T: for<'de> Deserialize<'de>>(&mut self, order: &str) -> Result<T> {
        let orders = self.orders.as_mut().with_context(|| format!("{} is being stopped", self.name))?;
        writeln!(orders, "{order}").with_context(|| format!("{} is gone", self.name))?;
        match answer(&mut self.answers)? {
            Answer::Ok(answer) => Ok(answer),
            Answer::Error(error) => bail!(error),
        }
    }

    /// Ends all that it owns and says what could not be removed.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.orders = None;
        let report: CleanupReport =
            answer(&mut self.answers).with_context(|| format!("the clean-up of {} did not end well", self.name))?;
        if !report.remaining.is_empty() {
            bail!("left behind by {}:\n  {}", self.name, report.remaining.join("\n  "));
        }
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The end of its input is the order to clean up; it says itself what went wrong.
        self.orders = None;
        if let Err(error) = self.process.wait() {
            eprintln!("cannot wait for {}: {error}", self.name);
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

/// The supervisor's program: named by the environment variable, or lying beside the running program.
pub(crate) fn find(name: &str, variable: &str) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Ok(PathBuf::from(path));
    }
    let program = std::env::current_exe().context("cannot tell which program is running")?;
    program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("no {name} beside {}: run `cargo build -p keblet-peers`", program.display()))
}
