//! Whether an output is still read, known without writing to it.

use std::future::pending;
use std::os::fd::AsFd;
use std::thread;

use nix::errno::Errno;
use nix::poll::PollFd;
use nix::poll::PollFlags;
use nix::poll::PollTimeout;
use nix::poll::poll;
use tokio::sync::oneshot;

/// Resolves when what is written to `output` is read no more: the readers of a pipe, or the other end of a socket or
/// terminal, are gone. Never without an output or for a file. A thread of its own waits for that, and ends with the output
/// or the process.
pub(super) async fn closed(output: Option<impl AsFd + Send + 'static>) {
    let Some(output) = output else { return pending().await };
    let (sender, ended) = oneshot::channel();
    let wait = move || {
        if is_closed(&output, PollTimeout::NONE) == Ok(true) {
            // Fails if it is not waited for.
            let _ = sender.send(());
        }
    };
    let started = thread::Builder::new().name("output".to_owned()).spawn(wait);
    if started.is_err() || ended.await.is_err() {
        // The next write fails instead.
        pending().await
    }
}

/// Waits for so long until it is closed. Blocks.
fn is_closed(output: &impl AsFd, timeout: PollTimeout) -> nix::Result<bool> {
    // Errors and hang-ups are always waited for.
    let mut polled = [PollFd::new(output.as_fd(), PollFlags::empty())];
    loop {
        match poll(&mut polled, timeout) {
            Err(Errno::EINTR) => {}
            result => return result.map(|count| count > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::net::UnixStream;
    use std::pin::pin;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_pipe_or_socket_is_closed_without_its_other_end_and_a_file_is_not() {
        let closes = |output: &dyn AsFd, limit| is_closed(&output, PollTimeout::from(limit)).unwrap();
        let (reader, writer) = io::pipe().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!closes(&writer, 0) && !closes(&ours, 0) && !closes(&tempfile::tempfile().unwrap(), 0));
        drop((reader, theirs));
        // A process that another test starts at this moment has the other ends until it executes its program.
        assert!(closes(&writer, 10_000_u16) && closes(&ours, 10_000));
    }

    /// In real time: the kernel reports it.
    #[tokio::test]
    async fn the_end_of_the_readers_is_noticed_without_a_write() {
        let (reader, writer) = io::pipe().unwrap();
        let mut closed = pin!(closed(Some(writer)));
        assert!(futures_util::poll!(&mut closed).is_pending(), "it is read");
        drop(reader);
        tokio::time::timeout(Duration::from_secs(60), closed).await.expect("it is waited for");
    }
}
