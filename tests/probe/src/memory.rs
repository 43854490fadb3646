//! Exhausts memory.

use std::time::Duration;
use std::time::Instant;

use nix::unistd::ForkResult;
use nix::unistd::fork;

use crate::arguments::Oom;
use crate::process;
use crate::stamp;

/// Interval at which memory is touched.
const STEP: Duration = Duration::from_millis(5);
/// Most memory of one step, in bytes.
const MAX_STEP: usize = 32 << 20;

/// Touches the memory when it is time, and keeps it; with `child` in a child process, whose end the parent reports.
///
/// # Errors
/// The stamp file cannot be written, the process cannot fork, or cannot reserve the memory.
pub(crate) fn exhaust(oom: &Oom) -> Result<u8, String> {
    stamp::write(&oom.stamp, "start")?;
    if let Some(at) = oom.at {
        let remaining = Duration::from_nanos(at.saturating_sub(stamp::now()?));
        if process::run_until_signal(Some(remaining))? {
            return Ok(0);
        }
    }
    let megabytes = oom.megabytes;
    if !oom.child {
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

/// Touches `first` MiB as fast as possible, then `speed` MiB more every second, in steps, until SIGTERM.
///
/// # Errors
/// The memory cannot be reserved, or signals cannot be read.
pub(crate) fn grow(speed: usize, first: usize) -> Result<u8, String> {
    let mut steps = vec![touch(first << 20)?];
    let start = Instant::now();
    let mut touched = 0;
    loop {
        let due = (start.elapsed().as_secs_f64() * (speed << 20) as f64) as usize;
        // If touching takes longer than planned, it goes on as fast as it can.
        let step = due.saturating_sub(touched).min(MAX_STEP);
        steps.push(touch(step)?);
        touched += step;
        if process::run_until_signal(Some(STEP))? {
            return Ok(0);
        }
    }
}

/// Touches the memory and keeps it until SIGTERM.
///
/// # Errors
/// The memory cannot be reserved.
pub(crate) fn hold(megabytes: usize) -> Result<u8, String> {
    let memory = touch(megabytes << 20)?;
    println!("{megabytes} MiB touched, still running");
    process::run_until_signal(None)?;
    drop(memory);
    Ok(0)
}

fn touch(bytes: usize) -> Result<Vec<u8>, String> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).map_err(|error| format!("cannot reserve {bytes} bytes: {error}"))?;
    // Not zero: the allocator can return zeroed pages without touching them.
    memory.resize(bytes, 1);
    std::hint::black_box(&memory);
    Ok(memory)
}
