//! Runs programs, which end with this process. A failure is reported with the end of the program's output.

use std::path::Path;
use std::process::Command;
use std::process::ExitStatus;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use crate::interrupt;
use crate::interrupt::Group;

const TAIL: usize = 25;

/// Runs a program; its output is shown only if it fails.
///
/// # Errors
/// The program cannot be started or fails.
pub(crate) fn quiet(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// As [`quiet`], and runs the program once more if it fails: Go ends a build at the first connection that a server drops. What
/// was fetched and built before is used again.
///
/// # Errors
/// The program cannot be started or fails twice.
pub(crate) fn quiet_twice(command: &mut Command) -> Result<()> {
    twice(command, interrupt::is_ending)
}

/// A program that Ctrl-C ended is not repeated.
fn twice(command: &mut Command, is_ending: impl Fn() -> bool) -> Result<()> {
    quiet(command).or_else(|error| if is_ending() { Err(error) } else { quiet(command) })
}

/// Git in a repository, which may belong to another user, as in a container or for root: Git refuses it otherwise.
pub(crate) fn git(repository: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.args(["-c", "safe.directory=*"]).args(arguments).current_dir(repository);
    command
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_once_is_repeated_once() {
        let folder = tempfile::tempdir().unwrap();
        let script = "echo x >> runs; test $(wc -l < runs) -ge $1";
        let run = |needed: &str, is_ending: bool| {
            let _ = std::fs::remove_file(folder.path().join("runs"));
            let mut command = Command::new("sh");
            command.args(["-c", script, "sh", needed]).current_dir(folder.path());
            twice(&mut command, || is_ending)
        };
        run("1", false).unwrap();
        run("2", false).unwrap();
        run("3", false).unwrap_err();
        run("2", true).unwrap_err();
    }

    #[test]
    fn a_repository_of_another_user_is_read() {
        let folder = tempfile::tempdir().unwrap();
        output(&mut git(folder.path(), &["init", "--quiet"])).unwrap();
        let mut list = git(folder.path(), &["ls-files"]);
        // Git's own tests make it so.
        output(list.env("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")).unwrap();
    }
}
