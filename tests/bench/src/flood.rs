//! `keblet-bench flood`: processes that exit at once, at a fixed rate. The part `exit-flood` runs it beside an agent.

use std::io::Write as _;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use nix::libc::SIGCHLD;
use nix::sched::CloneFlags;
use nix::sched::clone;
use nix::sys::signal::SigHandler;
use nix::sys::signal::Signal;
use nix::sys::signal::signal;

use super::common::duration;

/// The stack of a child, which calls nothing.
const STACK: usize = 64 << 10;
/// Pause when as many have exited as are due.
const PAUSE: Duration = Duration::from_millis(1);

/// What to flood a machine with.
#[derive(clap::Args, Clone, Debug)]
pub struct FloodArgs {
    /// How long
    #[arg(long, value_parser = duration)]
    pub time: Duration,
    /// Exits in a second
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: u32,
}

/// What a flood really was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Flood {
    pub(crate) exits: u64,
    pub(crate) seconds: f64,
}

impl Flood {
    /// Reads what [`run_flood`] prints.
    ///
    /// # Errors
    /// It is something else.
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        let parsed = || {
            let (exits, seconds) = text.trim_end().split_once(' ')?;
            Some(Self { exits: exits.parse().ok()?, seconds: seconds.parse().ok()? })
        };
        parsed().with_context(|| format!("a flood printed {text:?}"))
    }
}

/// Starts processes that exit at once, as many as are due and possible, and prints how many in how many seconds.
///
/// # Errors
/// A process cannot be started, or the result cannot be printed.
pub fn run_flood(args: &FloodArgs) -> anyhow::Result<()> {
    // SAFETY: no handler is installed; the kernel reaps the children.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) }.context("cannot ignore SIGCHLD")?;
    let mut stack = vec![0; STACK];
    let begin = Instant::now();
    let mut exits = 0;
    while begin.elapsed() < args.time {
        let due = (begin.elapsed().as_secs_f64() * f64::from(args.rate)) as u64;
        while exits < due && begin.elapsed() < args.time {
            start_and_exit(&mut stack)?;
            exits += 1;
        }
        std::thread::sleep(PAUSE);
    }
    let seconds = begin.elapsed().as_secs_f64();
    writeln!(std::io::stdout(), "{exits} {seconds}").context("cannot print the result")
}

/// A process that exits at once; returns when it has. It borrows this one's memory, since copying costs more than
/// everything else.
fn start_and_exit(stack: &mut [u8]) -> anyhow::Result<()> {
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    // SAFETY: the child has a stack of its own, calls nothing, and this thread, the only one, waits until it has exited.
    unsafe { clone(Box::new(|| 0), stack, flags, Some(SIGCHLD)) }.map(drop).context("cannot start a process")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_parsed() {
        assert_eq!(Flood::parse("100 2.5\n").unwrap(), Flood { exits: 100, seconds: 2.5 });
        for bad in ["", "100", "100 x", "a flood"] {
            assert!(Flood::parse(bad).is_err(), "{bad:?}");
        }
    }
}
