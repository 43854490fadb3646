//! Rotations while a runtime writes, on paused time: every line stays, in order, whatever fails in between.

use std::fs;
use std::fs::File;
use std::io::Read as _;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::MutexGuard;

use flate2::read::GzDecoder;
use futures_util::FutureExt as _;
use keblet_proto::cri::v1 as cri;
use prost::Message as _;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tracing::Level;

use super::*;
use crate::model::testing;
use crate::model::testing::LogCount;
use crate::recorder::Recorder;
use crate::recorder::testing::listening;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Script;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;

const INTERVAL: Duration = Duration::from_secs(10);

const POLICY: Policy = Policy { max_size: 64 * 1024, max_files: 100, workers: 1, interval: INTERVAL };

/// A runtime that writes numbered lines to the log of a container.
#[derive(Clone)]
struct Writing(Arc<Mutex<Writer>>);

struct Writer {
    path: PathBuf,
    file: File,
    next: u64,
    /// How many calls to reopen the log fail.
    failures: usize,
    /// How long a call takes.
    takes: Duration,
    calls: usize,
    /// Calls at the same time, and the most of them so far.
    concurrent: [usize; 2],
}

impl Writing {
    fn to(path: PathBuf) -> Self {
        let file = File::options().create(true).append(true).open(&path).expect("a log");
        let (next, failures, takes, calls) = (0, 0, Duration::ZERO, 0);
        Self(Arc::new(Mutex::new(Writer { path, file, next, failures, takes, calls, concurrent: [0, 0] })))
    }

    fn state(&self) -> MutexGuard<'_, Writer> {
        self.0.lock().expect("not poisoned")
    }

    /// 10,000 lines a second.
    async fn write(self) {
        loop {
            {
                let mut state = self.state();
                let first = state.next;
                let lines: String = (first..first + 1000).map(|n| format!("{n:08}\n")).collect();
                state.file.write_all(lines.as_bytes()).expect("written");
                state.next += 1000;
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    async fn reopen(self) -> Result<(), Status> {
        let takes = {
            let mut state = self.state();
            state.calls += 1;
            state.concurrent[0] += 1;
            state.concurrent[1] = state.concurrent[1].max(state.concurrent[0]);
            state.takes
        };
        sleep(takes).await;
        let mut state = self.state();
        state.concurrent[0] -= 1;
        if state.failures > 0 {
            state.failures -= 1;
            return Err(Status::unknown("no space left on device"));
        }
        state.file = File::options().create(true).append(true).open(&state.path).expect("a log");
        Ok(())
    }

    fn runtime(&self) -> Runtime {
        let (socket, writing) = (Socket::default(), self.clone());
        let script: Script = Arc::new(move |method, message| {
            assert_eq!(method, "ReopenContainerLog");
            cri::ReopenContainerLogRequest::decode(message).expect("a request");
            let writing = writing.clone();
            async move { writing.reopen().await.and_then(|()| say(&cri::ReopenContainerLogResponse {})) }.boxed()
        });
        socket.serve(script);
        Runtime::with_connector("unix:///run/fake.sock", move || socket.clone().connect(), RuntimeOptions::default())
    }
}

struct Node {
    dir: tempfile::TempDir,
    writing: Writing,
    containers: Arc<Mutex<Vec<crate::model::ContainerStatus>>>,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let writing = Writing::to(dir.path().join("0.log"));
        let node = Self { dir, writing, containers: Arc::default() };
        node.add("c", "0.log");
        node
    }

    fn add(&self, name: &str, log: &str) {
        let log_path = self.dir.path().join(log).to_string_lossy().into_owned();
        let status =
            crate::model::ContainerStatus { state: ContainerState::Running, log_path, ..testing::exited(name, 0, 0) };
        self.containers.lock().expect("not poisoned").push(status);
    }

    /// An agent. Dropping it simulates a kill.
    fn agent(&self, policy: Policy) -> AbortOnDropHandle<()> {
        self.agent_reporting_to(Recorder::default(), policy)
    }

    /// The same, with events sent to `recorder`.
    fn agent_reporting_to(&self, recorder: Recorder, policy: Policy) -> AbortOnDropHandle<()> {
        let containers = self.containers.clone();
        let pods = move || vec![Arc::new(testing::snapshot(containers.lock().expect("not poisoned").clone()))];
        let parts = Parts {
            policy,
            pods: Arc::new(pods),
            runtime: self.writing.runtime(),
            clock: Clock::System,
            local_time: || DateTime::constant(2026, 1, 1, 0, 0, 0, 0),
            retries: RetryTracker::new(recorder, None),
        };
        AbortOnDropHandle::new(tokio::spawn(run(parts, CancellationToken::new())))
    }

    /// Names of the log's files, oldest first.
    fn files(&self) -> Vec<String> {
        let all = fs::read_dir(self.dir.path()).expect("a folder").flatten();
        let mut names: Vec<_> = all.map(|entry| entry.file_name().into_string().expect("a name")).collect();
        // The log itself sorts first, but is the newest.
        names.sort_by_key(|name| (name == "0.log", name.clone()));
        names
    }

    /// Checks that all lines are there, in order, from this one on.
    fn holds_all_lines(&self, from: u64) {
        let mut text = String::new();
        for name in self.files() {
            let mut file = File::open(self.dir.path().join(&name)).expect("readable");
            let read = match name.ends_with(".gz") {
                true => GzDecoder::new(file).read_to_string(&mut text),
                false => file.read_to_string(&mut text),
            };
            read.expect("complete");
        }
        let lines: Vec<u64> = text.lines().map(|line| line.parse().expect("a number")).collect();
        let expected: Vec<u64> = (from..self.writing.state().next).collect();
        assert!(lines == expected, "{} lines instead of {} in {:?}", lines.len(), expected.len(), self.files());
    }
}

#[tokio::test(start_paused = true)]
async fn no_line_is_lost_or_doubled() {
    let node = Node::new();
    let _agent = node.agent(POLICY);
    let writing = AbortOnDropHandle::new(tokio::spawn(node.writing.clone().write()));
    sleep(INTERVAL * 6).await;
    drop(writing);
    sleep(INTERVAL * 2).await;
    assert!(node.writing.state().calls >= 6, "{:?}", node.files());
    let plain = node.files().iter().filter(|name| !name.ends_with(".gz")).count();
    assert_eq!(plain, 2, "the newest rotated file is not compressed: {:?}", node.files());
    node.holds_all_lines(0);
}

#[tokio::test(start_paused = true)]
async fn no_more_files_are_kept_than_configured() {
    let node = Node::new();
    let _agent = node.agent(Policy { max_files: 3, ..POLICY });
    let writing = AbortOnDropHandle::new(tokio::spawn(node.writing.clone().write()));
    sleep(INTERVAL * 6).await;
    drop(writing);
    sleep(INTERVAL * 2).await;
    assert_eq!(node.files().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_does_not_open_a_new_log_costs_no_line() {
    let node = Node::new();
    node.writing.state().failures = 2;
    let _agent = node.agent(POLICY);
    let writing = AbortOnDropHandle::new(tokio::spawn(node.writing.clone().write()));
    sleep(INTERVAL + INTERVAL / 2).await;
    assert_eq!((node.files(), node.writing.state().calls), (vec!["0.log".to_owned()], 1), "the log has its name back");
    sleep(INTERVAL * 3).await;
    drop(writing);
    sleep(INTERVAL).await;
    assert!(node.files().len() > 2, "{:?}", node.files());
    node.holds_all_lines(0);
}

/// The log grows until the disk is full, which has to be reported before.
#[tokio::test(start_paused = true)]
async fn a_rotation_that_is_always_refused_is_retried_with_growing_pauses_and_reported() {
    let (node, (recorder, mut events)) = (Node::new(), listening());
    node.writing.state().failures = usize::MAX;
    fs::write(node.dir.path().join("0.log"), vec![b'x'; 70_000]).expect("a log");
    let _agent = node.agent_reporting_to(recorder, POLICY);
    sleep(INTERVAL * 60).await;
    let first = node.writing.state().calls;
    sleep(INTERVAL * 60).await;
    let calls = [first, node.writing.state().calls - first];
    assert!((9..=14).contains(&calls[0]) && (5..=11).contains(&calls[1]), "{calls:?} in ten minutes each");
    let sent = events.take();
    assert_eq!(sent.len(), 1, "{sent:?}");
    let is_stuck = sent[0].starts_with("node W OperationStuck: rotate_log of /");
    assert!(is_stuck && sent[0].contains("no space left on device"), "{sent:?}");
}

/// Containers write on meanwhile.
#[tokio::test(start_paused = true)]
async fn a_log_is_rotated_soon_after_a_long_outage_of_the_runtime() {
    let node = Node::new();
    node.writing.state().failures = usize::MAX;
    fs::write(node.dir.path().join("0.log"), vec![b'x'; 70_000]).expect("a log");
    let _agent = node.agent(POLICY);
    // Between two checks.
    sleep(INTERVAL * 180 + INTERVAL / 2).await;
    assert_eq!(node.files(), ["0.log"]);
    node.writing.state().failures = 0;
    // The longest pause is a minute and a half; a check follows it.
    sleep(INTERVAL * 11).await;
    assert_eq!(node.files().len(), 2, "{:?}", node.files());
}

#[tokio::test(start_paused = true)]
async fn an_agent_killed_during_a_rotation_costs_no_line() {
    let node = Node::new();
    node.writing.state().takes = Duration::from_secs(3600);
    let agent = node.agent(POLICY);
    let writing = AbortOnDropHandle::new(tokio::spawn(node.writing.clone().write()));
    while node.writing.state().calls == 0 {
        sleep(Duration::from_millis(100)).await;
    }
    drop(agent);
    sleep(INTERVAL).await;
    assert!(!node.files().contains(&"0.log".to_owned()), "{:?}", node.files());
    node.writing.state().takes = Duration::ZERO;
    let _agent = node.agent(POLICY);
    sleep(INTERVAL * 3).await;
    drop(writing);
    sleep(INTERVAL * 2).await;
    assert!(node.files().len() >= 3, "{:?}", node.files());
    node.holds_all_lines(0);
}

#[tokio::test(start_paused = true)]
async fn logs_that_do_not_grow_cost_no_call() {
    let node = Node::new();
    node.writing.state().file.write_all(b"short\n").expect("written");
    let _agent = node.agent(POLICY);
    sleep(INTERVAL * 100).await;
    assert_eq!((node.writing.state().calls, node.files()), (0, vec!["0.log".to_owned()]));
    fs::remove_file(node.dir.path().join("0.log")).expect("removed");
    sleep(INTERVAL * 2).await;
    assert_eq!((node.writing.state().calls, node.files()), (1, vec!["0.log".to_owned()]), "a lost log is opened again");
}

/// The runtime would make an empty file, which readers would take for the log of the container.
#[tokio::test(start_paused = true)]
async fn logs_of_containers_that_have_exited_are_left_alone() {
    let node = Node::new();
    fs::write(node.dir.path().join("large.log"), vec![b'x'; 70_000]).expect("a log");
    node.add("large", "large.log");
    node.add("lost", "lost.log");
    for status in node.containers.lock().expect("not poisoned").iter_mut().filter(|status| status.name != "c") {
        status.state = ContainerState::Exited;
    }
    let _agent = node.agent(POLICY);
    sleep(INTERVAL * 3).await;
    assert_eq!(node.files(), ["large.log", "0.log"]);
    assert_eq!(node.writing.state().calls, 0);
}

/// An agent was killed between the two steps of a rotation, and the container has ended before the next one was started: the
/// runtime opens no new file for it.
#[tokio::test(start_paused = true)]
async fn an_interrupted_rotation_hides_no_log_of_a_container_that_has_exited() {
    let node = Node::new();
    fs::write(node.dir.path().join("ended.log.20251231-000000"), "last words").expect("a log");
    node.add("ended", "ended.log");
    node.containers.lock().expect("not poisoned")[1].state = ContainerState::Exited;
    let _agent = node.agent(POLICY);
    sleep(INTERVAL).await;
    assert_eq!(node.files(), ["ended.log", "0.log"]);
    assert_eq!(fs::read_to_string(node.dir.path().join("ended.log")).expect("text"), "last words");
    assert_eq!(node.writing.state().calls, 0, "the runtime is asked for nothing");
}

/// Until it succeeds, the log of the container is hidden.
#[tokio::test(start_paused = true)]
async fn a_recovery_that_fails_is_tried_again_with_growing_pauses_and_reported() {
    let logged = LogCount::start("keblet::retry", Level::DEBUG);
    let (node, (recorder, mut events)) = (Node::new(), listening());
    let folder = node.dir.path().join("pod");
    fs::write(&folder, "").expect("a file where a folder should be");
    node.add("ended", "pod/0.log");
    node.containers.lock().expect("not poisoned")[1].state = ContainerState::Exited;
    let _agent = node.agent_reporting_to(recorder, POLICY);
    sleep(INTERVAL * 60).await;
    let attempts = logged.lines();
    assert!((5..=9).contains(&attempts), "{attempts} attempts in ten minutes");
    let sent = events.take();
    assert_eq!(sent.len(), 1, "{sent:?}");
    assert!(sent[0].starts_with("node W OperationStuck: recover_log of /"), "{sent:?}");

    fs::remove_file(&folder).and_then(|()| fs::create_dir(&folder)).expect("a folder");
    fs::write(folder.join("0.log.20251231-000000"), "last words").expect("a log");
    // The longest pause is seven and a half minutes.
    sleep(INTERVAL * 50).await;
    assert_eq!(fs::read_to_string(folder.join("0.log")).expect("text"), "last words");
    let settled = logged.lines();
    sleep(INTERVAL * 50).await;
    assert_eq!((logged.lines(), node.writing.state().calls), (settled, 0), "it is recovered once");
}

#[test]
fn a_log_is_rotated_from_its_limit_on() {
    let found = [Found::File(99), Found::File(100), Found::File(101), Found::Missing, Found::Other];
    assert_eq!(found.map(|found| is_too_large(found, 100)), [false, true, true, false, false]);
}

/// Its size was read while another rotation of it was in progress.
#[tokio::test(start_paused = true)]
async fn a_log_that_was_rotated_meanwhile_is_not_rotated_again() {
    let node = Node::new();
    node.writing.state().file.write_all(b"\n").expect("written");
    let rotated = ["0.log.20251231-000000.gz", "0.log.20251231-000100"];
    rotated.iter().for_each(|name| fs::write(node.dir.path().join(name), name).expect("a file"));
    let log = Log::at(&node.dir.path().join("0.log").to_string_lossy()).expect("a log");
    let container = Container { id: ContainerId::from("c"), log, is_running: true, to_recover: false };
    let policy = Policy { max_files: 3, ..POLICY };
    let (runtime, now) = (node.writing.runtime(), DateTime::constant(2026, 1, 1, 0, 0, 0, 0));
    rotate(&runtime, &container, policy, now, CancellationToken::new()).await.expect("nothing to do");
    assert_eq!(node.files(), [rotated[0], rotated[1], "0.log"]);
    assert_eq!(node.writing.state().calls, 0, "the runtime keeps its file");
    fs::write(node.dir.path().join("0.log"), vec![b'x'; 70_000]).expect("a log");
    rotate(&runtime, &container, policy, now, CancellationToken::new()).await.expect("rotated");
    assert_eq!((node.files().len(), node.writing.state().calls), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn rotations_at_the_same_time_are_bounded() {
    for workers in [1, 3] {
        let node = Node::new();
        node.writing.state().takes = Duration::from_secs(1);
        for n in 1..=5 {
            let log = format!("other-{n}.log");
            fs::write(node.dir.path().join(&log), vec![b'x'; 70_000]).expect("a log");
            node.add(&format!("c{n}"), &log);
        }
        let _agent = node.agent(Policy { workers, ..POLICY });
        sleep(Duration::from_secs(9)).await;
        let state = node.writing.state();
        assert_eq!((state.calls, state.concurrent[1]), (5, workers));
    }
}

#[tokio::test(start_paused = true)]
async fn a_hanging_rotation_delays_no_other() {
    let node = Node::new();
    fs::write(node.dir.path().join("0.log"), vec![b'x'; 70_000]).expect("a log");
    node.writing.state().takes = Duration::from_secs(100);
    let _agent = node.agent(Policy { workers: 2, ..POLICY });
    sleep(INTERVAL * 2).await;
    assert_eq!(node.writing.state().calls, 1, "one rotation of a log at a time");
    fs::write(node.dir.path().join("other.log"), vec![b'x'; 70_000]).expect("a log");
    node.add("other", "other.log");
    sleep(INTERVAL * 2).await;
    assert_eq!(node.writing.state().calls, 2);
}
