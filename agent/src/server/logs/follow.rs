//! The body of an answer: a log, read no faster than the client takes it.
//!
//! There is no task and no queue per client. The server asks for the next piece when it has room for it, and only then
//! is the file read; a client that takes nothing costs the few pieces that wait for it. Those who follow take what one
//! of them has read ([`super::shared`]). Reading happens on a few threads of its own, apart for those who follow and
//! those who do not: a disk that hangs stops the readers of logs, and a thousand followers nobody else.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::super::containers::Containers;
use super::reader::ReadError;
use super::reader::ReadOutcome;
use super::reader::Reader;
use super::watch::Following;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodUid;

/// Logs read in the same moment, for those who follow and for those who do not.
const PARALLEL_READS: usize = 4;
/// Pieces of a log that wait for their client to take them.
const PIECES: usize = 2;
/// Time after which a follower looks without having been woken: containers end, and inotify may lose events.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Leave to read, in turn. Cheap to clone.
#[derive(Clone)]
pub(super) struct Reads {
    once: Arc<Semaphore>,
    following: Arc<Semaphore>,
}

impl Default for Reads {
    fn default() -> Self {
        let some = || Arc::new(Semaphore::new(PARALLEL_READS));
        Self { once: some(), following: some() }
    }
}

impl Reads {
    /// Runs `work`, which blocks, when it is its turn. `None` if the agent is going down.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let _permit = self.once.acquire().await.ok()?;
        tokio::task::spawn_blocking(work).await.ok()
    }
}

/// Longest wait for a runtime that has yet to write what a dead process said last.
const LAST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);
/// Nothing announces that it has.
const SNAPSHOT_POLL: Duration = Duration::from_millis(10);

/// The container whose log is read.
pub(super) struct Instance {
    pub(super) containers: Containers,
    pub(super) pod: PodUid,
    pub(super) id: ContainerId,
}

impl Instance {
    /// False once the runtime has said that the container is over; all it wrote is in the log then. A death that only
    /// the kernel has told is not enough: the runtime may still be writing.
    async fn may_write(&self) -> bool {
        if let Some(snapshot) = self.containers.pods.snapshot(&self.pod) {
            let found = snapshot.by_id(&self.id);
            return found.is_some_and(|found| found.state == ContainerState::Running || found.proven.is_some());
        }
        // Not looked at since the agent started, or gone.
        match self.containers.runtime.container_status(self.id.as_str(), false).await {
            Ok(found) => found.status.state() == keblet_proto::cri::v1::ContainerState::ContainerRunning,
            Err(error) => error.is_unreachable(),
        }
    }

    /// Waits while the death of the container is known from the kernel alone: its end may have been told already, and
    /// who then asks for the log wants all of it. Gives up after two seconds.
    pub(super) async fn until_written(&self) {
        let is_proven = || {
            let snapshot = self.containers.pods.snapshot(&self.pod);
            snapshot.is_some_and(|snapshot| snapshot.by_id(&self.id).is_some_and(|found| found.proven.is_some()))
        };
        let deadline = Instant::now() + LAST_OUTPUT_TIMEOUT;
        while is_proven() && Instant::now() < deadline {
            tokio::time::sleep(SNAPSHOT_POLL).await;
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
    let room = Arc::new(Semaphore::new(PIECES));
    let log = Log { reader: Some(reader), follow, reads, room, is_last_look: false, look_after: Instant::now() };
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
    /// For pieces the client has not taken.
    room: Arc<Semaphore>,
    /// The container has ended: what is there now is all there will be.
    is_last_look: bool,
    /// What others have found before this counts for nothing.
    look_after: Instant,
}

/// A piece for the client. Until it is sent, it takes its room.
struct Piece {
    bytes: Vec<u8>,
    _room: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Log {
    async fn next(&mut self) -> Option<Bytes> {
        let room = self.room.clone().acquire_owned().await.ok()?;
        loop {
            let changes = self.follow.as_mut().and_then(|follow| follow.changes.mark_seen());
            let (mut bytes, at_end) = self.read(changes).await?;
            if !bytes.is_empty() {
                bytes.shrink_to_fit();
                return Some(Bytes::from_owner(Piece { bytes, _room: room }));
            }
            // Nothing comes after the last piece.
            self.reader.as_ref()?;
            if !at_end || self.is_last_look {
                continue;
            }
            if let Some(follow) = &mut self.follow {
                if !follow.instance.may_write().await {
                    self.is_last_look = true;
                } else if !follow.changes.changed(RECHECK_INTERVAL).await {
                    // Nobody was woken: it is for one to look, and for all to believe it.
                    self.look_after = Instant::now() - RECHECK_INTERVAL / 2;
                }
            }
        }
    }

    /// One step of reading, and whether the end was reached. `None` when there is no more.
    async fn read(&mut self, changes: Option<u64>) -> Option<(Vec<u8>, bool)> {
        let (mut reader, mut out) = (self.reader.take()?, Vec::new());
        let follows = self.follow.is_some() && !self.is_last_look;
        let step = if follows {
            match reader.read_shared(changes, self.look_after, &mut out).transpose() {
                Some(step) => step,
                None => {
                    let step;
                    (reader, out, step) = self.read_following(reader, changes).await?;
                    step
                }
            }
        } else {
            let step;
            (reader, out, step) = self.reads.run(move || with(reader, last_step)).await?;
            step
        };
        match step {
            Ok(ReadOutcome::Done) => Some((out, true)),
            Ok(step) => {
                self.reader = Some(reader);
                Some((out, step == ReadOutcome::End))
            }
            Err(error) => {
                // The status has been sent; the text is all that can be told.
                tracing::debug!(%error, "a container log cannot be read on");
                Some(([out, error.to_string().into_bytes()].concat(), true))
            }
        }
    }

    /// A step of one who follows, in turn. Whoever was before may have found what this one wants.
    async fn read_following(&self, mut reader: Reader, changes: Option<u64>) -> Option<Stepped> {
        let _permit = self.reads.following.acquire().await.ok()?;
        let mut out = Vec::new();
        if let Some(step) = reader.read_shared(changes, self.look_after, &mut out).transpose() {
            return Some((reader, out, step));
        }
        let work = move || with(reader, |reader, out| reader.step_for_all(changes, out));
        tokio::task::spawn_blocking(work).await.ok()
    }
}

/// A reader after a step, with what the client gets of it.
type Stepped = (Reader, Vec<u8>, Result<ReadOutcome, ReadError>);

fn with(mut reader: Reader, step: impl FnOnce(&mut Reader, &mut Vec<u8>) -> Result<ReadOutcome, ReadError>) -> Stepped {
    let mut out = Vec::new();
    let step = step(&mut reader, &mut out);
    (reader, out, step)
}

/// A step of one who does not wait for more.
fn last_step(reader: &mut Reader, out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
    let step = reader.step(out)?;
    if step != ReadOutcome::End {
        return Ok(step);
    }
    reader.flush_last_line(out)?;
    Ok(ReadOutcome::Done)
}
