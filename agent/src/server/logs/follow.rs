//! A log as a response body, read no faster than the client receives it.
//!
//! There is no task and no queue per client: the file is read when the server can send the next chunk, so a slow client
//! costs a few buffered chunks. Followers of one log share what one of them has read ([`super::shared`]). Concurrent
//! reads are bounded, separately for followers and other requests: a hanging disk blocks only readers of logs, and many
//! followers do not block other requests.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::Code;

use super::super::containers::Containers;
use super::chunks;
use super::reader::ReadError;
use super::reader::ReadOutcome;
use super::reader::Reader;
use super::successor::Lines;
use super::watch::Following;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodUid;

/// Concurrent reads, for followers and for other requests each.
const MAX_READS: usize = 4;
/// Period of reads without an inotify event: containers exit, and inotify may lose events.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Bounds concurrent reads. Cheap to clone.
#[derive(Clone)]
pub(super) struct Reads {
    once: Arc<Semaphore>,
    following: Arc<Semaphore>,
}

impl Default for Reads {
    fn default() -> Self {
        let some = || Arc::new(Semaphore::new(MAX_READS));
        Self { once: some(), following: some() }
    }
}

impl Reads {
    /// Runs blocking `work` when a permit is free. `None` if the agent is shutting down.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let permit = self.once.clone().acquire_owned().await.ok()?;
        keeping(permit, work).await
    }
}

/// Runs blocking `work`, which keeps the permit to its end: a read that hangs keeps its thread although its client has
/// disconnected.
async fn keeping<T: Send + 'static>(
    permit: OwnedSemaphorePermit,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let work = move || {
        let _permit = permit;
        work()
    };
    tokio::task::spawn_blocking(work).await.ok()
}

/// Longest wait for the runtime to write the last output of an exited process.
const LAST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);
/// Period of checks whether it has.
const SNAPSHOT_POLL: Duration = Duration::from_millis(10);

/// The container whose log is read.
pub(super) struct Instance {
    pub(super) containers: Containers,
    pub(super) pod: PodUid,
    pub(super) id: ContainerId,
}

impl Instance {
    /// False once the runtime has reported the exit of the container: its log is complete then. An exit that only the
    /// kernel has reported is not enough: the runtime may still be writing.
    async fn may_write(&self) -> bool {
        if let Some(snapshot) = self.containers.pods.snapshot(&self.pod) {
            let found = snapshot.by_id(&self.id);
            return found.is_some_and(|found| found.state == ContainerState::Running || found.proven.is_some());
        }
        // Not inspected since the agent started, or removed.
        match self.containers.runtime.container_status(self.id.as_str(), false).await {
            Ok(found) => found.status.state() == keblet_proto::cri::v1::ContainerState::ContainerRunning,
            // As upstream: its containers run on while the runtime is restarted.
            Err(error) => error.code() == Code::Unavailable,
        }
    }

    /// Waits while the exit of the container is known from the kernel alone, two seconds at most: its status may be
    /// published already, and clients expect a complete log then.
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

/// How a log is followed after its end was reached.
pub(super) struct Follow {
    pub(super) changes: Following,
    pub(super) instance: Instance,
}

/// The log as a body. With `follow` it ends when the container has exited and everything was read.
pub(super) fn body(reader: Reader, follow: Option<Follow>, reads: Reads) -> Body {
    let log = Log { reader: Some(reader), follow, reads, is_last_read: false, results_since: Instant::now() };
    chunks::body(stream::unfold(log, |mut log| async move { Some((log.next().await?, log)) }))
}

struct Log {
    /// `None` when everything was read.
    reader: Option<Reader>,
    follow: Option<Follow>,
    reads: Reads,
    /// The container has exited: no more output will be written.
    is_last_read: bool,
    /// Results of other followers from before this are ignored.
    results_since: Instant,
}

impl Log {
    async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let changes = self.follow.as_mut().and_then(|follow| follow.changes.mark_seen());
            let (mut bytes, at_end) = self.read(changes).await?;
            if !bytes.is_empty() {
                bytes.shrink_to_fit();
                return Some(bytes);
            }
            // Nothing follows the last chunk.
            self.reader.as_ref()?;
            if !at_end || self.is_last_read {
                continue;
            }
            if let Some(follow) = &mut self.follow {
                if !follow.instance.may_write().await {
                    self.is_last_read = true;
                } else if !follow.changes.changed(RECHECK_INTERVAL).await {
                    // No follower was woken: one of them reads, and the others use its result.
                    self.results_since = Instant::now() - RECHECK_INTERVAL / 2;
                }
            }
        }
    }

    /// One read, and whether the end was reached. `None` when everything was read.
    async fn read(&mut self, changes: Option<u64>) -> Option<(Vec<u8>, bool)> {
        let (mut reader, mut out) = (self.reader.take()?, Vec::new());
        let follows = self.follow.is_some() && !self.is_last_read;
        let step = if follows {
            match reader.read_shared(changes, self.results_since, &mut out).transpose() {
                Some(step) => step,
                None => {
                    let step;
                    (reader, out, step) = self.read_following(reader, changes).await?;
                    step
                }
            }
        } else {
            let last = if self.follow.is_some() { last_step_of_follower } else { last_step };
            let step;
            (reader, out, step) = self.reads.run(move || with(reader, last)).await?;
            step
        };
        match step {
            Ok(ReadOutcome::Done) => Some((out, true)),
            Ok(step) => {
                self.reader = Some(reader);
                Some((out, step == ReadOutcome::End))
            }
            Err(error) => {
                // The status was sent already, so the error becomes part of the body.
                tracing::debug!(%error, "cannot read a container log");
                Some(([out, error.to_string().into_bytes()].concat(), true))
            }
        }
    }

    /// One read of a follower, when a permit is free. Another follower may have read the same meanwhile.
    async fn read_following(&self, mut reader: Reader, changes: Option<u64>) -> Option<Stepped> {
        let permit = self.reads.following.clone().acquire_owned().await.ok()?;
        let mut out = Vec::new();
        if let Some(step) = reader.read_shared(changes, self.results_since, &mut out).transpose() {
            return Some((reader, out, step));
        }
        keeping(permit, move || with(reader, |reader, out| reader.step_for_all(changes, out))).await
    }
}

/// A reader after a read, with the bytes for the client.
type Stepped = (Reader, Vec<u8>, Result<ReadOutcome, ReadError>);

fn with(mut reader: Reader, step: impl FnOnce(&mut Reader, &mut Vec<u8>) -> Result<ReadOutcome, ReadError>) -> Stepped {
    let mut out = Vec::new();
    let step = step(&mut reader, &mut out);
    (reader, out, step)
}

/// One read without following: of the log alone.
fn last_step(reader: &mut Reader, out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
    let step = reader.step(out)?;
    if step != ReadOutcome::End {
        return Ok(step);
    }
    reader.flush_last_line(out)?;
    Ok(ReadOutcome::Done)
}

/// One read of a follower whose container has exited: it may have been rotated since the follower's last read.
fn last_step_of_follower(reader: &mut Reader, out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
    let step = reader.step(out)?;
    if step != ReadOutcome::End {
        return Ok(step);
    }
    if reader.continue_in_successor(Lines::Complete, out)? {
        return Ok(ReadOutcome::More);
    }
    reader.flush_last_line(out)?;
    Ok(ReadOutcome::Done)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use axum::body::Bytes;
    use http_body_util::BodyExt as _;
    use k8s_openapi::api::core::v1::PodStatus;
    use keblet_proto::cri::v1 as cri;
    use tokio::sync::oneshot;
    use tonic::Status;

    use super::super::filter::Filter;
    use super::super::filter::LineRules;
    use super::super::query::LogStreams;
    use super::super::shared::OpenLogs;
    use super::super::watch::FolderWatch;
    use super::*;
    use crate::model::Pod;
    use crate::model::PodSnapshot;
    use crate::model::testing;
    use crate::runtime::Runtime;
    use crate::runtime::RuntimeOptions;
    use crate::runtime::tests::server::Answer;
    use crate::runtime::tests::server::Socket;
    use crate::runtime::tests::server::say;
    use crate::runtime::tests::server::script;
    use crate::server::PodLookup;

    struct Pods(Option<PodSnapshot>);

    impl PodLookup for Pods {
        fn pod(&self, _: &str, _: &str) -> Option<Pod> {
            None
        }

        fn status(&self, _: &Pod) -> PodStatus {
            PodStatus::default()
        }

        fn snapshot(&self, _: &PodUid) -> Option<Arc<PodSnapshot>> {
            self.0.clone().map(Arc::new)
        }
    }

    /// Container `main-0`, on a runtime that is reached at `socket`.
    fn instance(snapshot: Option<PodSnapshot>, socket: Socket) -> Instance {
        let connect = move || socket.clone().connect();
        let runtime = Runtime::with_connector("unix:///run/test.sock", connect, RuntimeOptions::default());
        let containers = Containers { pods: Arc::new(Pods(snapshot)), runtime };
        Instance { containers, pod: "uid".into(), id: "main-0".into() }
    }

    fn answering(answer: fn() -> Answer) -> Socket {
        let socket = Socket::default();
        socket.serve(script(move |_, _| answer()));
        socket
    }

    fn in_state(state: cri::ContainerState) -> Answer {
        let metadata = Some(cri::ContainerMetadata::default());
        let status = cri::ContainerStatus { metadata, state: state as i32, ..Default::default() };
        say(&cri::ContainerStatusResponse { status: Some(status), ..Default::default() })
    }

    #[tokio::test]
    async fn a_container_may_write_until_the_last_inspection_shows_its_exit() {
        let running = || answering(|| in_state(cri::ContainerState::ContainerRunning));
        for (containers, expected) in [
            (vec![testing::running("main", 0)], true),
            (vec![testing::proven("main", 0, Some(0))], true),
            (vec![testing::exited("main", 0, 0)], false),
            (vec![testing::running("main", 1)], false),
            (vec![], false),
        ] {
            let instance = instance(Some(testing::snapshot(containers)), running());
            let snapshot = instance.containers.pods.snapshot(&instance.pod);
            assert_eq!(instance.may_write().await, expected, "{snapshot:?}");
        }
    }

    #[tokio::test]
    async fn of_a_pod_without_an_inspection_the_runtime_is_asked() {
        type Case = (&'static str, fn() -> Answer, bool);
        let cases: [Case; 4] = [
            ("running", || in_state(cri::ContainerState::ContainerRunning), true),
            ("exited", || in_state(cri::ContainerState::ContainerExited), false),
            ("removed", || Err(Status::not_found("no such container")), false),
            ("starting", || Err(Status::unavailable("server is not initialized yet")), true),
        ];
        for (name, answer, expected) in cases {
            assert_eq!(instance(None, answering(answer)).may_write().await, expected, "{name}");
        }
        assert!(instance(None, Socket::default()).may_write().await, "it cannot be reached");
    }

    /// The first bytes of a log.
    async fn first_bytes(reads: &Reads, follows: bool) -> Bytes {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, "2026-01-01T00:00:01Z stdout F one\n").unwrap();
        let stream = LogStreams::All;
        let rules = LineRules { since: i64::MIN, timestamps: false, limit: None, lines: None, stream };
        let reader = Reader::open(&OpenLogs::default(), &path, None, Filter::new(rules)).unwrap();
        let follow = follows.then(|| Follow {
            changes: FolderWatch::default().follow(dir.path()),
            instance: instance(None, Socket::default()),
        });
        let mut sent = body(reader, follow, reads.clone());
        let frame = tokio::time::timeout(Duration::from_secs(20), sent.frame()).await.expect("it is read");
        frame.unwrap().unwrap().into_data().unwrap()
    }

    #[tokio::test]
    async fn followers_and_other_requests_do_not_wait_for_each_other() {
        let (reads, all) = (Reads::default(), u32::try_from(MAX_READS).unwrap());
        let following = reads.following.clone().acquire_many_owned(all).await.unwrap();
        assert_eq!(first_bytes(&reads, false).await, "one\n");
        drop(following);
        let _once = reads.once.clone().acquire_many_owned(all).await.unwrap();
        assert_eq!(first_bytes(&reads, true).await, "one\n");
    }

    #[tokio::test]
    async fn a_read_that_hangs_keeps_its_permit_when_its_client_disconnects() {
        let (reads, (release, released)) = (Reads::default(), mpsc::channel::<()>());
        let (beginning, begun) = oneshot::channel();
        let hanging = reads.run(move || {
            beginning.send(()).unwrap();
            released.recv()
        });
        tokio::select! {
            _ = hanging => panic!("it hangs"),
            began = begun => began.unwrap(),
        }
        assert_eq!(reads.once.available_permits(), MAX_READS - 1);
        drop(release);
        let all = u32::try_from(MAX_READS).unwrap();
        let _all = reads.once.acquire_many(all).await.unwrap();
    }
}
