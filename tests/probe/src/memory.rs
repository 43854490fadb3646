//! Running out of memory.

use nix::unistd::ForkResult;
use nix::unistd::fork;

use crate::process;

/// Touches the memory and holds it; in a child that the parent outlives if asked.
pub fn exhaust(megabytes: usize, child: bool) -> Result<u8, String> {
    if !child {
        return hold(megabytes);
    }
    // SAFETY: the process has one thread, so the child may go on with ordinary code.
    match unsafe { fork() }.map_err(|errno| format!("cannot fork: {errno}"))? {
        ForkResult::Parent { child } => {
            println!("child {child} touches {megabytes} MiB");
            process::live(None)?;
            Ok(0)
        }
        ForkResult::Child => hold(megabytes),
    }
}

fn hold(megabytes: usize) -> Result<u8, String> {
    let mut memory: Vec<u8> = Vec::new();
    memory.try_reserve_exact(megabytes << 20).map_err(|error| format!("cannot reserve {megabytes} MiB: {error}"))?;
    // Not zero, which the allocator could hand out without touching a page.
    memory.resize(megabytes << 20, 1);
    std::hint::black_box(&memory);
    println!("{megabytes} MiB touched, still alive");
    process::live(None)?;
    Ok(0)
}
