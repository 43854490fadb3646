//! Pending signals of a process.

use nix::sys::signal::Signal;

/// Signals that the kernel, timers or child processes send, and that are never the stop signal.
const OF_OTHERS: [Signal; 7] = [
    Signal::SIGCHLD,
    Signal::SIGALRM,
    Signal::SIGVTALRM,
    Signal::SIGPROF,
    Signal::SIGIO,
    Signal::SIGURG,
    Signal::SIGCONT,
];

/// The process has a pending signal that may be its stop signal, which its image defines. False if there is no such
/// process.
pub(super) fn may_be_stopping(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| pending(&status) & !others() != 0)
}

/// Signals to the process as a whole, as a bit mask.
fn pending(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn others() -> u64 {
    OF_OTHERS.iter().fold(0, |mask, signal| mask | 1 << (*signal as i32 - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_signals_are_distinguished_from_those_of_timers_and_children() {
        let status = |mask: u64| format!("Name:\tsleep\nSigPnd:\t0000000000004000\nShdPnd:\t{mask:016x}\nSigBlk:\t0\n");
        let bit = |signal: Signal| 1u64 << (signal as i32 - 1);
        for (mask, may_stop) in [
            (0, false),
            (bit(Signal::SIGCHLD) | bit(Signal::SIGALRM), false),
            (bit(Signal::SIGTERM), true),
            (bit(Signal::SIGCHLD) | bit(Signal::SIGQUIT), true),
            (1 << 36, true),
        ] {
            assert_eq!(pending(&status(mask)) & !others() != 0, may_stop, "{mask:x}");
        }
        assert!(!may_be_stopping(i32::MAX));
    }
}
