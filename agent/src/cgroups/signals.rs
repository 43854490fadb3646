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
    let status = std::fs::read(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| pending(&status) & !others() != 0)
}

/// Signals to the process as a whole, as a bit mask. Its name, which it chooses, need not be text.
fn pending(status: &[u8]) -> u64 {
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"ShdPnd:"));
    let mask = line.and_then(|mask| std::str::from_utf8(mask).ok());
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn others() -> u64 {
    OF_OTHERS.iter().fold(0, |mask, signal| mask | 1 << (*signal as i32 - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_signals_are_distinguished_from_those_of_timers_and_children() {
        let signals = |mask: u64| format!("SigPnd:\t0000000000004000\nShdPnd:\t{mask:016x}\nSigBlk:\t0\n");
        let status = |name: &[u8], mask: u64| [b"Name:\t".as_slice(), name, b"\n", signals(mask).as_bytes()].concat();
        let bit = |signal: Signal| 1u64 << (signal as i32 - 1);
        for (mask, may_stop) in [
            (0, false),
            (bit(Signal::SIGCHLD) | bit(Signal::SIGALRM), false),
            (bit(Signal::SIGTERM), true),
            (bit(Signal::SIGCHLD) | bit(Signal::SIGQUIT), true),
            (1 << 36, true),
        ] {
            for name in [b"sleep".as_slice(), b"\xff"] {
                assert_eq!(pending(&status(name, mask)) & !others() != 0, may_stop, "{mask:x}");
            }
        }
        assert!(!may_be_stopping(i32::MAX));
    }
}
