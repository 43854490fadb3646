//! Runs programs, which end with this process. A failure is reported with the end of the program's output.

use std::process::Command;
use std::process::ExitStatus;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use crate::interrupt::Group;

const TAIL: usize = 25;

/// Runs a program; its output is shown only if it fails.
///
/// # Errors
/// The program cannot be started or fails.
pub(crate) fn quiet(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a program and returns its standard output.
///
/// # Errors
/// The program cannot be started or fails; the error has the end of its output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = describe(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (child, _group) = Group::spawn(command).with_context(|| format!("cannot run `{line}`"))?;
    let output = child.wait_with_output().with_context(|| format!("cannot wait for `{line}`"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let written = format!("{text}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = written.lines().collect();
    let tail = lines[lines.len().saturating_sub(TAIL)..].join("\n  ");
    bail!("`{line}` exited with {}:\n  {tail}", output.status)
}

/// Runs a program that prints to this process's output.
///
/// # Errors
/// The program cannot be started.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    let line = describe(command);
    command.stdin(Stdio::null());
    let (mut child, _group) = Group::spawn(command).with_context(|| format!("cannot run `{line}`"))?;
    child.wait().with_context(|| format!("cannot wait for `{line}`"))
}

/// The command line, for messages.
pub(crate) fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
