//! The process itself: its threads, and the signals that end it.

use std::convert::Infallible;
use std::io;
use std::sync::mpsc;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::runtime::Runtime;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;
use tokio_util::sync::CancellationToken;

/// Worker threads; the agent waits far more than it computes.
const WORKERS: usize = 2;
/// Most threads for calls that block, such as file access; tokio's default. They are started when none is idle, and those
/// that are idle end soon. The work needs a few, but a call on a file system whose server does not answer keeps its thread,
/// also after its caller has timed out, and pods choose the server: threads must remain for other calls, and for the
/// unmount that ends such calls.
const BLOCKING: usize = 512;
/// The same for commands that only read. Termination messages (`pleg`) on volumes that do not answer may keep sixty-four.
const LIGHT_BLOCKING: usize = 67;
/// How long an idle one stays: those of a burst keep their memory for so long.
const BLOCKING_KEEP_ALIVE: Duration = Duration::from_secs(12);
/// Time between two calls that keep the last one of them, shorter than [`BLOCKING_KEEP_ALIVE`] by more than a call is late.
/// Not shorter than that, since each call wakes an idle node; not longer, since work that waits because no thread could be
/// started waits so long at most once one can be.
const BLOCKING_RENEWAL: Duration = Duration::from_secs(10);
/// Address space per thread, of which only what is touched costs memory.
const STACK: usize = 4 << 20;

/// The async runtime, at most two workers wide.
///
/// # Errors
/// The threads cannot be started.
pub fn runtime() -> io::Result<Runtime> {
    start(&mut builder(), BLOCKING_RENEWAL)
}

fn builder() -> Builder {
    let mut builder = Builder::new_multi_thread();
    builder
        .worker_threads(workers())
        .max_blocking_threads(BLOCKING)
        .thread_keep_alive(BLOCKING_KEEP_ALIVE)
        .thread_stack_size(STACK)
        .thread_name("keblet")
        .enable_all();
    builder
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(WORKERS)
}

/// Keeps two threads for blocking work besides. On a node without free process ids no thread can be started, and tokio then
/// panics in a caller that has such work, if it has no thread for it: the agent would end when only it can end pods. One is
/// never free, so that there always is one and the work waits; the other one does it.
fn start(builder: &mut Builder, renewal: Duration) -> io::Result<Runtime> {
    let runtime = builder.build()?;
    let (running, ended) = mpsc::channel::<Infallible>();
    // Until the task is dropped with the runtime.
    drop(runtime.spawn_blocking(move || ended.recv().is_err()));
    drop(runtime.spawn(keep_blocking_thread(running, renewal)));
    Ok(runtime)
}

/// Gives work to a thread that is free before it ends. If none is free, that starts one as soon as it is possible again.
async fn keep_blocking_thread(_running: mpsc::Sender<Infallible>, renewal: Duration) {
    loop {
        drop(tokio::task::spawn_blocking(|| ()));
        tokio::time::sleep(renewal).await;
    }
}

/// An async runtime on the calling thread alone, for commands that only read: less memory and less switching.
///
/// # Errors
/// It cannot be set up.
pub fn light_runtime() -> io::Result<Runtime> {
    start(&mut light_builder(), BLOCKING_RENEWAL)
}

fn light_builder() -> Builder {
    let mut builder = Builder::new_current_thread();
    builder
        .max_blocking_threads(LIGHT_BLOCKING)
        .thread_keep_alive(BLOCKING_KEEP_ALIVE)
        .thread_stack_size(STACK)
        .enable_all();
    builder
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
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering;

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

    /// Threads that are left of a burst of blocking calls when none has ended for long, and whether any has ended.
    fn left_of_burst(mut builder: Builder) -> (usize, bool) {
        const KEEP_ALIVE: Duration = Duration::from_millis(600);
        let (started, (stop, mut stops)) = (Arc::new(AtomicUsize::new(0)), tokio::sync::mpsc::unbounded_channel());
        let counted = started.clone();
        builder.thread_keep_alive(KEEP_ALIVE).on_thread_start(move || {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        builder.on_thread_stop(move || {
            // There is no receiver after the test.
            let _ = stop.send(());
        });
        let runtime = start(&mut builder, KEEP_ALIVE * 3 / 4).expect("a runtime");
        let at_once = Arc::new(Barrier::new(8));
        for _ in 0..8 {
            let at_once = at_once.clone();
            drop(runtime.spawn_blocking(move || at_once.wait().is_leader()));
        }
        let stopped = runtime.block_on(async {
            let mut stopped = 0_usize;
            while tokio::time::timeout(KEEP_ALIVE * 3 / 2, stops.recv()).await.is_ok() {
                stopped += 1;
            }
            stopped
        });
        let left = started.load(Ordering::SeqCst) - stopped;
        runtime.shutdown_background();
        (left, stopped > 0)
    }

    #[test]
    fn threads_for_blocking_calls_are_left_when_there_were_none_for_long() {
        assert!(BLOCKING_RENEWAL < BLOCKING_KEEP_ALIVE);
        assert_eq!(left_of_burst(builder()), (workers() + 2, true), "two beside the workers");
        assert_eq!(left_of_burst(light_builder()), (2, true), "of commands that only read too");
    }
}
