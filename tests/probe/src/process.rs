//! Signals, exits, and reaping of children as PID 1.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use nix::poll::PollFd;
use nix::poll::PollFlags;
use nix::poll::PollTimeout;
use nix::poll::poll;
use nix::sys::signal::SigSet;
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;
use nix::sys::wait::WaitPidFlag;
use nix::sys::wait::WaitStatus;
use nix::sys::wait::waitpid;
use nix::unistd::ForkResult;
use nix::unistd::fork;

use crate::arguments::Exit;
use crate::stamp;

/// Blocks SIGTERM, SIGINT and SIGCHLD until they are read; to be called before any thread or child exists.
///
/// The kernel discards signals to PID 1 without a handler, but not blocked ones that are waited for.
///
/// # Errors
/// The signals cannot be blocked.
pub(crate) fn block_signals() -> Result<(), String> {
    awaited().thread_block().map_err(|errno| format!("cannot block signals: {errno}"))
}

/// Runs until SIGTERM or SIGINT, and reaps every child.
///
/// # Errors
/// As [`run_until_signal`].
pub(crate) fn run(stamp: &Option<PathBuf>) -> Result<u8, String> {
    stamp::write(stamp, "start")?;
    run_until_signal(None)?;
    stamp::write(stamp, "exit")?;
    Ok(0)
}

/// Exits as requested, or keeps running if an earlier process has exited already.
///
/// # Errors
/// The marker file cannot be created; otherwise as [`run_until_signal`].
pub(crate) fn exit(exit: &Exit) -> Result<u8, String> {
    stamp::write(&exit.stamp, "start")?;
    let again = match &exit.once_file {
        Some(path) => !create(path)?,
        None => false,
    };
    let after = match exit.at {
        Some(at) => Duration::from_nanos(at.saturating_sub(stamp::now()?)),
        None => exit.after,
    };
    let signalled = run_until_signal((!again).then_some(after))?;
    stamp::write(&exit.stamp, "exit")?;
    Ok(if signalled { 0 } else { exit.code })
}

/// Exits and leaves a child that keeps running in the same PID namespace.
///
/// # Errors
/// The process cannot fork.
pub(crate) fn fork_and_exit() -> Result<u8, String> {
    // SAFETY: the process has one thread, so the child may execute ordinary code.
    match unsafe { fork() }.map_err(|errno| format!("cannot fork: {errno}"))? {
        ForkResult::Parent { child } => {
            println!("child {child} keeps running");
            Ok(0)
        }
        ForkResult::Child => run(&None),
    }
}

/// Reaps children until SIGTERM or SIGINT arrives (true) or the time has passed (false).
///
/// # Errors
/// Signals cannot be read.
pub(crate) fn run_until_signal(time: Option<Duration>) -> Result<bool, String> {
    let deadline = time.map(|time| Instant::now() + time);
    let signals = SignalFd::new(&awaited()).map_err(|errno| format!("cannot wait for signals: {errno}"))?;
    loop {
        let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // Rounded up, so that the loop does not spin during the last millisecond.
        let timeout = remaining.map_or(PollTimeout::NONE, |remaining| {
            PollTimeout::try_from(remaining + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX)
        });
        let mut ready = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        let count = poll(&mut ready, timeout).map_err(|errno| format!("cannot wait for signals: {errno}"))?;
        if count == 0 {
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(false);
            }
            continue;
        }
        match signals.read_signal().map_err(|errno| format!("cannot read a signal: {errno}"))? {
            Some(info) if info.ssi_signo == Signal::SIGCHLD as u32 => reap(),
            Some(_) => return Ok(true),
            None => {}
        }
    }
}

fn awaited() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD].into_iter().collect()
}

/// Reaps all children that have exited, and prints how.
fn reap() {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) => println!("child {pid} exited with code {code}"),
            Ok(WaitStatus::Signaled(pid, signal, _)) => println!("child {pid} was killed by {signal}"),
            Ok(WaitStatus::StillAlive) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

/// Creates the file; false if it exists.
///
/// # Errors
/// It cannot be created.
pub(crate) fn create(path: &Path) -> Result<bool, String> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(format!("cannot create {}: {error}", path.display())),
    }
}
