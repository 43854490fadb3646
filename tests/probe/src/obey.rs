//! Executes commands that come one by one, so that a benchmark decides when a process runs out of memory.

use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::path::Path;

use nix::sys::wait::waitpid;
use nix::unistd::ForkResult;
use nix::unistd::fork;

use crate::memory;

/// One line of the FIFO.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Command {
    Main(usize),
    Child(usize),
    Exit(u8),
}

/// Executes the commands until one ends the process.
///
/// # Errors
/// The FIFO cannot be opened, or a line is no command.
pub(crate) fn execute(commands: &Path) -> Result<u8, String> {
    // For writing too: otherwise it would end with the first writer.
    let fifo = File::options().read(true).write(true).open(commands);
    let fifo = fifo.map_err(|error| format!("cannot open {}: {error}", commands.display()))?;
    for line in BufReader::new(fifo).lines() {
        let line = line.map_err(|error| format!("cannot read {}: {error}", commands.display()))?;
        match parse(&line).ok_or_else(|| format!("{line:?} is no command"))? {
            Command::Main(megabytes) => return memory::hold(megabytes),
            Command::Child(megabytes) => in_child(megabytes)?,
            Command::Exit(code) => return Ok(code),
        }
    }
    Err(format!("{} ended", commands.display()))
}

fn in_child(megabytes: usize) -> Result<(), String> {
    // SAFETY: the process has one thread, so the child may execute ordinary code.
    match unsafe { fork() }.map_err(|errno| format!("cannot fork: {errno}"))? {
        ForkResult::Parent { child } => {
            let end = waitpid(child, None).map_err(|errno| format!("cannot wait for {child}: {errno}"))?;
            println!("{end:?}");
            Ok(())
        }
        ForkResult::Child => {
            let code = memory::hold(megabytes)?;
            std::process::exit(code.into());
        }
    }
}

fn parse(line: &str) -> Option<Command> {
    let (name, value) = line.split_once(' ')?;
    match name {
        "main" => Some(Command::Main(value.parse().ok()?)),
        "child" => Some(Command::Child(value.parse().ok()?)),
        "exit" => Some(Command::Exit(value.parse().ok()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_parse() {
        assert_eq!(parse("main 64"), Some(Command::Main(64)));
        assert_eq!(parse("child 8"), Some(Command::Child(8)));
        assert_eq!(parse("exit 3"), Some(Command::Exit(3)));
        for wrong in ["", "main", "main x", "exit 256", "grow 1"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
