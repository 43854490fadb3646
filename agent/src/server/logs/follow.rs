//! The body of an answer: a log, read no faster than the client takes it.
//!
//! There is no task and no queue per client. The server asks for the next piece when it has room for it, and only then
//! is the file read; a client that takes nothing costs an open file and what the server has buffered. Reading happens
//! on a few threads of its own: a disk that hangs stops the readers of logs, and nobody else.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use tokio::sync::Semaphore;

use super::super::containers::Containers;
use super::reader::ReadError;
use super::reader::Reader;
use super::reader::Step;
use super::watch::Following;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodUid;

/// Logs read in the same moment.
const PARALLEL_READS: usize = 4;
/// Time after which a follower looks without having been woken: containers end, and inotify may lose events.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Leave to read. Cheap to clone.
#[derive(Clone)]
pub(super) struct Reads(Arc<Semaphore>);

impl Default for Reads {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(PARALLEL_READS)))
    }
}

impl Reads {
    /// Runs `work`, which blocks, when it is its turn. `None` if the agent is going down.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let _permit = self.0.acquire().await.ok()?;
        tokio::task::spawn_blocking(work).await.ok()
    }
}

/// The container whose log is followed.
pub(super) struct Instance {
    pub(super) containers: Containers,
    pub(super) pod: PodUid,
    pub(super) id: ContainerId,
}

impl Instance {
    /// False once the runtime has said that the container is over; all it wrote is in the log then. A death that only
    /// the kernel has told is not enough: the runtime may still be writing.
    async fn may_write(&self) -> bool {
        if let Some(snapshot) = (self.containers.snapshot)(&self.pod) {
            let found = snapshot.by_id(&self.id);
            return found.is_some_and(|found| found.state == ContainerState::Running || found.proven.is_some());
        }
        // Not looked at since the agent started, or gone.
        match self.containers.runtime.container_status(self.id.as_str(), false).await {
            Ok(found) => found.status.state() == keblet_proto::cri::v1::ContainerState::ContainerRunning,
            Err(error) => error.is_unreachable(),
        }
    }
}

/// What becomes of a log after its end was reached.
pub(super) struct Follow {
    pub(super) changes: Following,
    pub(super) instance: Instance,
}

/// The log as a body. With `follow` it goes on until the container has ended and everything was read.
pub(super) fn body(reader: Reader, follow: Option<Follow>, reads: Reads) -> Body {
    let log = Log { reader: Some(reader), follow, reads, is_last_look: false };
    let pieces = stream::unfold(log, |mut log| async move {
        let piece = log.next().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(piece), log))
    });
    Body::from_stream(pieces)
}

struct Log {
    /// Absent when all is read.
    reader: Option<Reader>,
    follow: Option<Follow>,
    reads: Reads,
    /// The container has ended: what is there now is all there will be.
    is_last_look: bool,
}

impl Log {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(follow) = &mut self.follow {
                follow.changes.mark_seen();
            }
            let (out, at_end) = self.read().await?;
            if !out.is_empty() {
                return Some(out.into());
            }
            // Nothing comes after the last piece.
            self.reader.as_ref()?;
            if !at_end || self.is_last_look {
                continue;
            }
            if let Some(follow) = &mut self.follow {
                if follow.instance.may_write().await {
                    follow.changes.changed(LOOK_AGAIN).await;
                } else {
                    self.is_last_look = true;
                }
            }
        }
    }

    /// One step of reading, and whether the end was reached. `None` when there is no more.
    async fn read(&mut self) -> Option<(Vec<u8>, bool)> {
        let mut reader = self.reader.take()?;
        let may_wait = self.follow.is_some() && !self.is_last_look;
        let (reader, out, step) = self
            .reads
            .run(move || {
                let mut out = Vec::new();
                let step = step(&mut reader, may_wait, &mut out);
                (reader, out, step)
            })
            .await?;
        match step {
            Ok(Step::Done) => Some((out, true)),
            Ok(step) => {
                self.reader = Some(reader);
                Some((out, step == Step::End))
            }
            Err(error) => {
                // The status has been sent; the text is all that can be told.
                tracing::debug!(%error, "a container log cannot be read on");
                Some(([out, error.to_string().into_bytes()].concat(), true))
            }
        }
    }
}

fn step(reader: &mut Reader, may_wait: bool, out: &mut Vec<u8>) -> Result<Step, ReadError> {
    let step = reader.step(out)?;
    if step != Step::End {
        return Ok(step);
    }
    if may_wait {
        return Ok(if reader.follow_rotation(out)? { Step::More } else { Step::End });
    }
    reader.finish(out)?;
    Ok(Step::Done)
}
