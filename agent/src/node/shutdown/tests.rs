//! A shutdown from the signal to the release of the lock, on a private bus with a simulated logind.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::StreamExt as _;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use zbus::Connection;
use zbus::Fd;
use zbus::Guid;
use zbus::Message;
use zbus::MessageStream;
use zbus::Variant;

use super::*;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pod;
use crate::recorder::testing::RecordedEvents;
use crate::recorder::testing::listening;

/// Recorded calls, and the other end of the lock.
#[derive(Default)]
struct Recorded {
    calls: Vec<String>,
    lock: Option<UnixStream>,
    /// The property `PreparingForShutdown`.
    preparing: bool,
}

/// The other end of a private connection: responds like logind and systemd's manager.
struct Imitation {
    recorded: Arc<Mutex<Recorded>>,
    delay: Arc<Mutex<Duration>>,
    connection: Connection,
}

impl Imitation {
    /// `after_reload` is the maximum delay after a reload.
    async fn start(delay: Duration, after_reload: Duration) -> (Self, Connection) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let guid = Guid::generate();
        let server = zbus::connection::Builder::unix_stream(theirs).server(guid).p2p();
        let client = zbus::connection::Builder::unix_stream(ours).p2p();
        let (connection, client) = tokio::join!(server.build(), client.build());
        let (connection, client) = (connection.expect("a connection"), client.expect("a connection"));
        let (recorded, delay) = (Arc::<Mutex<Recorded>>::default(), Arc::new(Mutex::new(delay)));
        tokio::spawn(answer(connection.clone(), recorded.clone(), delay.clone(), after_reload));
        (Self { recorded, delay, connection }, client)
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.recorded.lock().expect("unpoisoned").calls)
    }

    /// The lock is held as long as the other end of it is open.
    fn holds_lock(&self) -> bool {
        use std::io::Read as _;
        let recorded = self.recorded.lock().expect("unpoisoned");
        let Some(mut lock) = recorded.lock.as_ref() else { return false };
        matches!(lock.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }

    async fn signal(&self, down: bool) {
        self.signal_from(LOGIND, down).await;
    }

    async fn signal_from(&self, sender: &str, down: bool) {
        let manager = "org.freedesktop.login1.Manager";
        let signal = Message::signal("/org/freedesktop/login1", manager, "PrepareForShutdown");
        let signal = signal.sender(sender).build(&down).expect("a signal");
        self.connection.send(&signal).await.expect("sent");
    }
}

async fn answer(
    connection: Connection,
    recorded: Arc<Mutex<Recorded>>,
    delay: Arc<Mutex<Duration>>,
    after_reload: Duration,
) {
    let mut messages = MessageStream::from(&connection);
    while let Some(Ok(message)) = messages.next().await {
        let header = message.header();
        let Some(method) = header.member().map(|member| member.to_string()) else { continue };
        let body = message.body();
        match method.as_str() {
            "Get" => {
                let (_, property): (String, String) = body.deserialize().expect("arguments");
                let micros = u64::try_from(delay.lock().expect("unpoisoned").as_micros()).expect("fits");
                let value = {
                    let mut recorded = recorded.lock().expect("unpoisoned");
                    recorded.calls.push(format!("get {property}"));
                    let is_down = property == "PreparingForShutdown";
                    if is_down { Variant::from(recorded.preparing) } else { Variant::from(micros) }
                };
                connection.reply(&header, &value).await.expect("an answer");
            }
            "GetNameOwner" => connection.reply(&header, &LOGIND).await.expect("an answer"),
            "KillUnit" => {
                let (unit, whom, signal): (String, String, i32) = body.deserialize().expect("arguments");
                recorded.lock().expect("unpoisoned").calls.push(format!("kill {unit} {whom} {signal}"));
                *delay.lock().expect("unpoisoned") = after_reload;
                connection.reply(&header, &()).await.expect("an answer");
            }
            "Inhibit" => {
                let (what, who, why, mode): (String, String, String, String) = body.deserialize().expect("arguments");
                let (near, far) = UnixStream::pair().expect("a pair");
                near.set_nonblocking(true).expect("a flag");
                {
                    let mut recorded = recorded.lock().expect("unpoisoned");
                    recorded.calls.push(format!("inhibit {what} {who} {mode}: {why}"));
                    recorded.lock = Some(near);
                }
                connection.reply(&header, &Fd::from(far.as_fd())).await.expect("an answer");
            }
            other => panic!("unexpected call {other}"),
        }
    }
}

/// The unique name of logind on the bus.
const LOGIND: &str = ":1.1";
const PREPARING: &str = "get PreparingForShutdown";
const INHIBIT: &str = "inhibit shutdown kubelet delay: Kubelet needs time to handle node shutdown";

/// Pods that terminate when the test decides.
struct Pods {
    all: Vec<Pod>,
    asked: mpsc::UnboundedSender<(String, i64)>,
    ended: CancellationToken,
}

impl PodTerminator for Pods {
    fn pods(&self) -> Vec<Pod> {
        self.all.clone()
    }

    async fn terminate(&self, pod: &Pod, grace: i64) -> CancellationToken {
        // As a full channel: the request waits for a moment.
        tokio::task::yield_now().await;
        let name = pod.metadata.name.clone().unwrap_or_default();
        self.asked.send((name, grace)).expect("the test listens");
        self.ended.clone()
    }
}

struct Bench {
    imitation: Imitation,
    asked: mpsc::UnboundedReceiver<(String, i64)>,
    ended: CancellationToken,
    down: watch::Receiver<bool>,
    events: Mutex<RecordedEvents>,
    metrics: Arc<Metrics>,
    root: tempfile::TempDir,
    ending: CancellationToken,
}

const ROOT_UNIX: u64 = 1_700_000_000;

impl Bench {
    async fn start(delay: u64, after_reload: u64, groups: Vec<Group>, pods: &[(&str, i32)]) -> Self {
        let secs = Duration::from_secs;
        let (imitation, client) = Imitation::start(secs(delay), secs(after_reload)).await;
        let (asked_sender, asked) = mpsc::unbounded_channel();
        let ended = CancellationToken::new();
        let (down_sender, down) = watch::channel(false);
        let pod = |(name, priority): &(&str, i32)| {
            let spec = json!({ "containers": [], "priority": priority, "terminationGracePeriodSeconds": 30 });
            Arc::new(serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec })).expect("a pod"))
        };
        let ((recorder, events), metrics) = (listening(), Metrics::new());
        let root = tempfile::tempdir().expect("a folder");
        let shutdown = Shutdown {
            groups,
            pods: Pods { all: pods.iter().map(pod).collect(), asked: asked_sender, ended: ended.clone() },
            down: down_sender,
            state_file: Some(StateFile::new(root.path())),
            recorder,
            metrics: metrics.clone(),
            clock: Clock::Derived { origin: SystemTime::UNIX_EPOCH + secs(ROOT_UNIX), start: Instant::now() },
        };
        let (ending, folder) = (CancellationToken::new(), root.path().to_owned());
        let connect = move || {
            let logind = Logind::over(client.clone(), folder.clone());
            async move { Ok(logind) }
        };
        tokio::spawn(shutdown.run(connect, ending.clone()));
        Self { imitation, asked, ended, down, events: Mutex::new(events), metrics, root, ending }
    }

    /// Waits until the lock is held and the signal is subscribed.
    async fn until_locked(&self) {
        self.until(|| self.imitation.holds_lock(), "the lock is held").await;
    }

    async fn until(&self, holds: impl Fn() -> bool, what: &str) {
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !holds() {
            assert!(std::time::Instant::now() < deadline, "never: {what}");
            tokio::task::yield_now().await;
        }
    }

    async fn next_asked(&mut self) -> (String, i64) {
        tokio::time::timeout(Duration::from_secs(10), self.asked.recv()).await.expect("in time").expect("an end")
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.ending.cancel();
    }
}

fn two_groups() -> Vec<Group> {
    groups(Duration::from_secs(30), Duration::from_secs(10), &[])
}

#[tokio::test]
async fn pods_are_terminated_before_the_lock_is_released() {
    let pods = [("critical", 2_000_000_000), ("first", 0), ("second", 5)];
    let mut bench = Bench::start(60, 60, two_groups(), &pods).await;
    bench.until_locked().await;
    assert_eq!(bench.imitation.calls(), ["get InhibitDelayMaxUSec", PREPARING, INHIBIT]);
    bench.imitation.signal(true).await;
    let mut normal = BTreeMap::new();
    normal.extend([bench.next_asked().await, bench.next_asked().await]);
    assert_eq!(normal, BTreeMap::from([("first".to_owned(), 20), ("second".to_owned(), 20)]));
    assert!(bench.asked.try_recv().is_err(), "critical pods wait for the others");
    assert!(*bench.down.borrow() && bench.imitation.holds_lock());
    bench.ended.cancel();
    assert_eq!(bench.next_asked().await, ("critical".to_owned(), 10));
    bench.until(|| !bench.imitation.holds_lock(), "the lock is given back").await;
    assert_eq!(
        bench.events.lock().expect("unpoisoned").take(),
        ["node N Shutdown: Shutdown manager detected shutdown event"]
    );
    let state = std::fs::read_to_string(bench.root.path().join("graceful_node_shutdown_state")).expect("a state file");
    assert!(
        state.contains("\"startTime\":\"2023-11-14T22:13:20Z\"") && state.contains("\"endTime\":\"2023"),
        "{state}"
    );
    let text = bench.metrics.render().expect("metrics");
    assert!(text.contains("kubelet_graceful_shutdown_start_time_seconds 1700000000"), "{text}");
}

#[test]
fn pods_are_terminated_while_the_disk_hangs() {
    // One thread for file calls, which is busy.
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.max_blocking_threads(1).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut bench = Bench::start(60, 60, two_groups(), &[("first", 0)]).await;
        bench.until_locked().await;
        let (release, released) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || released.recv());
        bench.imitation.signal(true).await;
        assert_eq!(bench.next_asked().await, ("first".to_owned(), 20));
        bench.ended.cancel();
        drop(release);
        busy.await.expect("ended").expect_err("nothing was sent");
        bench.until(|| !bench.imitation.holds_lock(), "the lock is given back").await;
        assert!(bench.root.path().join("graceful_node_shutdown_state").exists());
    });
}

#[test]
fn the_lock_is_taken_while_the_disk_hangs() {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.max_blocking_threads(1).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let bench = Bench::start(60, 60, two_groups(), &[]).await;
        // Before the first read, which begins when this test waits.
        let (release, released) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || released.recv());
        tokio::time::pause();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !bench.imitation.holds_lock() {
            assert!(std::time::Instant::now() < deadline, "never: the lock is held");
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        drop(release);
        busy.await.expect("ended").expect_err("nothing was sent");
    });
}

#[test]
fn the_lock_is_released_while_the_disk_hangs() {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.max_blocking_threads(1).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut bench = Bench::start(60, 60, two_groups(), &[("first", 0)]).await;
        bench.until_locked().await;
        let (release, released) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || released.recv());
        bench.imitation.signal(true).await;
        bench.next_asked().await;
        bench.ended.cancel();
        tokio::time::pause();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while bench.imitation.holds_lock() {
            assert!(std::time::Instant::now() < deadline, "never: the lock is given back");
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        drop(release);
        busy.await.expect("ended").expect_err("nothing was sent");
        let file = bench.root.path().join("graceful_node_shutdown_state");
        bench.until(|| file.exists(), "what was begun is written").await;
    });
}

#[tokio::test]
async fn a_group_is_limited_by_its_period() {
    let groups = groups(Duration::ZERO, Duration::ZERO, &[(0, 1), (10, 1)]);
    let mut bench = Bench::start(60, 60, groups, &[("stuck", 0), ("next", 10)]).await;
    bench.until_locked().await;
    bench.imitation.signal(true).await;
    assert_eq!(bench.next_asked().await, ("stuck".to_owned(), 1));
    assert_eq!(bench.next_asked().await, ("next".to_owned(), 1), "although nothing has ended");
    bench.until(|| !bench.imitation.holds_lock(), "the lock is given back").await;
}

#[tokio::test]
async fn every_pod_of_a_group_without_a_period_is_terminated() {
    let groups = groups(Duration::ZERO, Duration::ZERO, &[(0, 0), (10, 0)]);
    let mut bench = Bench::start(60, 60, groups, &[("first", 0), ("second", 5), ("next", 10)]).await;
    bench.until_locked().await;
    bench.imitation.signal(true).await;
    for name in ["first", "second", "next"] {
        assert_eq!(bench.next_asked().await, (name.to_owned(), 0));
    }
    bench.until(|| !bench.imitation.holds_lock(), "the lock is given back, although nothing has ended").await;
}

#[tokio::test]
async fn a_cancelled_shutdown_takes_the_lock_again() {
    let bench = Bench::start(60, 60, two_groups(), &[]).await;
    bench.until_locked().await;
    bench.imitation.signal(true).await;
    bench.until(|| *bench.down.borrow() && !bench.imitation.holds_lock(), "down at once: there are no pods").await;
    bench.imitation.signal(false).await;
    bench.until_locked().await;
    assert!(!*bench.down.borrow());
    let events = bench.events.lock().expect("unpoisoned").take();
    assert_eq!(events[1], "node N Shutdown: Shutdown manager detected shutdown cancellation");
    let text = bench.metrics.render().expect("metrics");
    assert!(text.contains("kubelet_graceful_shutdown_start_time_seconds 0"), "{text}");
}

#[tokio::test]
async fn a_shutdown_that_is_cancelled_without_a_connection_is_noticed() {
    let ((recorder, _events), (down, downs)) = (listening(), watch::channel(false));
    let (asked, _asked) = mpsc::unbounded_channel();
    let ended = CancellationToken::new();
    let shutdown = Shutdown {
        groups: two_groups(),
        pods: Pods { all: Vec::new(), asked, ended },
        down,
        state_file: None,
        recorder,
        metrics: Metrics::new(),
        clock: Clock::System,
    };
    let (folder, ending) = (tempfile::tempdir().expect("a folder"), CancellationToken::new());
    let (root, minute) = (folder.path().to_owned(), Duration::from_secs(60));
    let (connections, next) = mpsc::unbounded_channel::<Connection>();
    let next = Arc::new(tokio::sync::Mutex::new(next));
    let connect = move || {
        let (next, root) = (next.clone(), root.clone());
        async move { Ok(Logind::over(next.lock().await.recv().await.expect("a connection"), root)) }
    };
    tokio::spawn(shutdown.run(connect, ending.clone()));
    let until = async |preparing: bool, is_met: &dyn Fn(&Imitation) -> bool| {
        let (imitation, client) = Imitation::start(minute, minute).await;
        imitation.recorded.lock().expect("unpoisoned").preparing = preparing;
        connections.send(client).expect("the task lives");
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !is_met(&imitation) {
            assert!(std::time::Instant::now() < deadline, "never, with preparing = {preparing}");
            tokio::task::yield_now().await;
        }
        imitation.connection.close().await.expect("closed");
    };
    until(false, &|imitation| imitation.holds_lock() && !*downs.borrow()).await;
    until(true, &|_| *downs.borrow()).await;
    until(false, &|imitation| imitation.holds_lock() && !*downs.borrow()).await;
    ending.cancel();
}

/// Any user of the bus can send a signal of that name.
#[tokio::test]
async fn only_logind_announces_a_shutdown() {
    let minute = Duration::from_secs(60);
    let (imitation, client) = Imitation::start(minute, minute).await;
    let shutdowns = Logind::over(client, "/".into()).shutdowns().await.expect("signals");
    for (sender, down) in [(":1.66", true), (LOGIND, false), (":1.66", false), (LOGIND, true)] {
        imitation.signal_from(sender, down).await;
    }
    assert_eq!(shutdowns.take(2).collect::<Vec<_>>().await, [false, true]);
}

#[tokio::test]
async fn the_delay_of_logind_is_extended() {
    let bench = Bench::start(5, 30, two_groups(), &[]).await;
    bench.until_locked().await;
    let delay = "get InhibitDelayMaxUSec";
    assert_eq!(bench.imitation.calls(), [delay, "kill systemd-logind.service all 1", delay, PREPARING, INHIBIT]);
    let file = bench.root.path().join("etc/systemd/logind.conf.d/99-kubelet.conf");
    let text = std::fs::read_to_string(file).expect("a drop-in");
    assert!(text.ends_with("[Login]\nInhibitDelayMaxSec=30\n"), "{text}");
    assert_eq!(*bench.imitation.delay.lock().expect("unpoisoned"), Duration::from_secs(30));
}

#[tokio::test]
async fn a_logind_with_a_short_delay_is_not_used() {
    let bench = Bench::start(5, 5, two_groups(), &[]).await;
    let reads = || {
        bench.imitation.recorded.lock().expect("unpoisoned").calls.iter().filter(|call| call.starts_with("get")).count()
    };
    bench.until(|| reads() == 6, "five reads after the first").await;
    bench.until(|| bench.down.has_changed().is_err(), "it gives up").await;
    assert!(!bench.imitation.calls().contains(&INHIBIT.to_owned()));
}
