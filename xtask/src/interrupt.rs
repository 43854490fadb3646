//! Handles Ctrl-C and SIGTERM: programs that were started end with this process, and commands can clean up before it
//! exits.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Child;
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::thread;

use anyhow::Context as _;
use anyhow::Result;
use nix::sys::signal::Signal;
use nix::sys::signal::killpg;
use nix::unistd::Pid;
use signal_hook::consts::SIGHUP;
use signal_hook::consts::SIGINT;
use signal_hook::consts::SIGTERM;
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Process groups of running programs.
static GROUPS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());
/// Whether the command handles the signals itself.
static HANDLED: AtomicBool = AtomicBool::new(false);
/// Whether a signal was received, by which running programs end.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Whether a signal has ended running programs, so that none is to be started any more.
pub(crate) fn is_ending() -> bool {
    ENDING.load(Ordering::SeqCst)
}

/// Ends running programs ([`Group`]) when this process receives SIGINT, SIGTERM or SIGHUP, which then ends it as well,
/// unless the command handles the signals ([`Interrupt`]).
///
/// # Errors
/// The signals cannot be handled.
pub(crate) fn end_programs() -> Result<()> {
    // `nohup` has SIGHUP ignored, a script SIGINT of what it runs in the background, and it stays so.
    let signals = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal));
    let mut signals = Signals::new(signals).context("cannot handle signals")?;
    let end = move || {
        for signal in signals.forever() {
            ENDING.store(true, Ordering::SeqCst);
            for group in GROUPS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                // Fails if it has just exited.
                let _ = killpg(*group, Signal::SIGTERM);
            }
            if !HANDLED.load(Ordering::SeqCst) {
                // Fails for unknown signals only.
                let _ = emulate_default_handler(signal);
            }
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(end).context("cannot start a thread for signals")?;
    Ok(())
}

fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    (mask >> (signal - 1)) & 1 == 1
}

/// The process group of a program and its children, such as the compilers of `go build`. Until this is dropped, signals
/// to this process end the group.
pub(crate) struct Group(Pid);

impl Group {
    /// Starts a program in a group of its own.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<(Child, Self)> {
        // Locked until the group is known: a signal ends it as well.
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.process_group(0).spawn()?;
        let group = Pid::from_raw(child.id().cast_signed());
        groups.push(group);
        Ok((child, Self(group)))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        GROUPS.lock().unwrap_or_else(PoisonError::into_inner).retain(|group| *group != self.0);
    }
}

/// Whether SIGINT or SIGTERM arrived.
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Handles SIGINT, SIGTERM and SIGHUP. Child processes do not inherit handlers, whereas they would inherit a mask
    /// of blocked signals.
    ///
    /// # Errors
    /// A handler cannot be installed.
    pub(crate) fn install() -> Result<Self> {
        HANDLED.store(true, Ordering::SeqCst);
        let raised = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register(signal, Arc::clone(&raised)).with_context(|| format!("cannot handle signal {signal}"))?;
        }
        Ok(Self(raised))
    }

    /// Whether one of the signals was received.
    pub(crate) fn raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
