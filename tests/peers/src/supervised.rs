//! The supervisor's side of the protocol that `supervisor.rs` describes.

use std::io::Write as _;

use anyhow::Context as _;
use anyhow::Result;
use serde::Serialize;
use tokio::sync::mpsc;

/// The lines of standard input until its end, read by a thread of its own, which does not keep the process from
/// exiting.
///
/// # Errors
/// The thread cannot be started.
pub fn commands() -> Result<mpsc::Receiver<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::Builder::new()
        .name("commands".to_owned())
        .spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                if sender.blocking_send(line).is_err() {
                    return;
                }
            }
        })
        .context("cannot start a thread for commands")?;
    Ok(receiver)
}

/// Writes a response as a line of JSON to standard output.
///
/// # Errors
/// It cannot be written.
pub fn respond(response: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_string(response).context("cannot encode the response")?;
    line.push('\n');
    std::io::stdout().write_all(line.as_bytes()).context("cannot write the response")
}
