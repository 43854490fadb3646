//! Exhausts memory.

use nix::unistd::ForkResult;
use nix::unistd::fork;

use crate::process;

/// Touches the memory and keeps it; with `child` in a child process, whose end the parent reports.
///
/// # Errors
/// The process cannot fork, or cannot reserve the memory.
pub(crate) fn exhaust(megabytes: usize, child: bool) -> Result<u8, String> {
    if !child {
        return hold(megabytes);
    }
    // SAFETY: the process has one thread, so the child may execute ordinary code.
    match unsafe { fork() }.map_err(|errno| format!("cannot fork: {errno}"))? {
        ForkResult::Parent { child } => {
            println!("child {child} touches {megabytes} MiB");
            process::run_until_signal(None)?;
            Ok(0)
        }
        ForkResult::Child => hold(megabytes),
    }
}

fn hold(megabytes: usize) -> Result<u8, String> {
    let mut memory: Vec<u8> = Vec::new();
    memory.try_reserve_exact(megabytes << 20).map_err(|error| format!("cannot reserve {megabytes} MiB: {error}"))?;
    // Not zero: the allocator can return zeroed pages without touching them.
    memory.resize(megabytes << 20, 1);
    std::hint::black_box(&memory);
    println!("{megabytes} MiB touched, still running");
    process::run_until_signal(None)?;
    Ok(0)
}
