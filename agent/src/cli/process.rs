//! The process itself: its threads, and the signals that end it.

use std::io;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::runtime::Runtime;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;
use tokio_util::sync::CancellationToken;

/// Worker threads; the agent waits far more than it computes.
const WORKERS: usize = 2;
/// Most threads for calls that block, such as file access; tokio's default. They are started when none is idle, and those
/// that are idle end soon. The work needs a few, but a call on a file system whose server does not answer keeps its thread
/// for ever, also after its caller has timed out, and pods choose the server: they must not run out of threads for all,
/// nor for the unmount that ends such calls.
const BLOCKING: usize = 512;
/// The same for commands that only read. Termination messages (`pleg`) on volumes that do not answer may keep sixty-four.
const LIGHT_BLOCKING: usize = 66;
const BLOCKING_KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Address space per thread, of which only what is touched costs memory.
const STACK: usize = 4 << 20;

/// The async runtime, at most two workers wide.
///
/// # Errors
/// The threads cannot be started.
pub fn runtime() -> io::Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Builder::new_multi_thread()
        .worker_threads(cores.min(WORKERS))
        .max_blocking_threads(BLOCKING)
        .thread_keep_alive(BLOCKING_KEEP_ALIVE)
        .thread_stack_size(STACK)
        .thread_name("keblet")
        .enable_all()
        .build()
}

/// An async runtime on the calling thread alone, for commands that only read: less memory and less switching.
///
/// # Errors
/// It cannot be set up.
pub fn light_runtime() -> io::Result<Runtime> {
    Builder::new_current_thread()
        .max_blocking_threads(LIGHT_BLOCKING)
        .thread_keep_alive(BLOCKING_KEEP_ALIVE)
        .thread_stack_size(STACK)
        .enable_all()
        .build()
}

/// A token that is cancelled by the first SIGTERM or SIGINT; the second ends the process at once. Must be called inside
/// the async runtime.
///
/// # Errors
/// The signal handlers cannot be installed.
pub fn shutdown() -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if cancelled.is_cancelled() {
                tracing::warn!(signal = name, "second signal, exiting at once");
                std::process::exit(128 + if name == "SIGTERM" { libc::SIGTERM } else { libc::SIGINT });
            }
            tracing::info!(signal = name, "shutting down; containers keep running");
            cancelled.cancel();
        }
    });
    Ok(token)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::Barrier;

    use super::*;

    /// More than the volumes of a few pods, on file systems whose servers do not answer.
    const STUCK: usize = 200;

    #[test]
    fn calls_that_do_not_return_leave_threads_for_others() {
        let runtime = runtime().expect("a runtime");
        let never = Arc::new(Barrier::new(STUCK + 1));
        for _ in 0..STUCK {
            let never = never.clone();
            runtime.spawn_blocking(move || never.wait().is_leader());
        }
        let other = runtime.spawn_blocking(|| ());
        let done = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), other).await });
        // Does not wait for the threads.
        runtime.shutdown_background();
        assert!(done.is_ok(), "no thread was left");
    }
}
