//! Runs programs. A failure is reported with the end of the program's output.

use std::process::Command;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

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
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{line}`"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let written = format!("{text}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = written.lines().collect();
    let tail = lines[lines.len().saturating_sub(TAIL)..].join("\n  ");
    bail!("`{line}` exited with {}:\n  {tail}", output.status)
}

/// The command line, for messages.
pub(crate) fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
