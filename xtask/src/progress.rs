//! Prints long steps: the name at once, the duration at the end.

use std::io::IsTerminal as _;
use std::io::Write as _;
use std::sync::mpsc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;

const TICK: Duration = Duration::from_secs(1);

/// Runs a step and prints its name on standard error, on a terminal also the elapsed seconds.
///
/// # Errors
/// The step failed.
pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let (stop, stopped) = mpsc::channel::<()>();
    let label = name.to_owned();
    let ticker = if std::io::stderr().is_terminal() {
        Some(thread::spawn(move || {
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                show(&format!("\r  {label} … {} s", start.elapsed().as_secs()));
            }
        }))
    } else {
        None
    };
    show(&format!("  {name} …"));
    let result = work();
    drop(stop);
    if let Some(ticker) = ticker {
        // The thread fails only if it cannot print.
        let _ = ticker.join();
        show("\r");
        show(&format!("  {name} …"));
    }
    let seconds = start.elapsed().as_secs_f32();
    let end = if result.is_ok() { "done" } else { "failed" };
    show(&format!(" {end} ({seconds:.1} s)\n"));
    result.with_context(|| format!("{name} failed"))
}

fn show(text: &str) {
    let mut error = std::io::stderr().lock();
    // Without standard error this cannot be reported.
    let _ = error.write_all(text.as_bytes()).and_then(|()| error.flush());
}
