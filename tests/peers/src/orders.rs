//! The other end of the talk with a supervisor: its own side. What asks is in `supervisor.rs`.

use std::io::Write as _;

use anyhow::Context as _;
use anyhow::Result;
use serde::Serialize;
use tokio::sync::mpsc;

/// The lines of standard input, until it ends. Read by a thread of its own, which the end of the process may find waiting.
///
/// # Errors
/// There is no thread to be had.
pub fn orders() -> Result<mpsc::Receiver<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::Builder::new()
        .name("orders".to_owned())
        .spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                if sender.blocking_send(line).is_err() {
                    return;
                }
            }
        })
        .context("cannot start a thread for orders")?;
    Ok(receiver)
}

/// Answers with a line of JSON on standard output.
///
/// # Errors
/// Nobody reads it.
pub fn say(answer: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_string(answer).context("cannot encode the answer")?;
    line.push('\n');
    std::io::stdout().write_all(line.as_bytes()).context("cannot answer")
}
