//! The PLEG on runtimes that report incomplete or wrong statuses: no exit code yet, no process on the node, a wrong one.

mod earlier_exits;
mod faults;
mod messages;

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::time::SystemTime;

use bytes::Bytes;
use keblet_proto::cri::v1;
use tokio::sync::Notify;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;

use super::PlegConfig;
use super::PlegHandle;
use super::PlegObserver;
use super::start;
use crate::events::ExitFacts;
use crate::events::Expect;
use crate::events::Hint;
use crate::events::RelistReason;
use crate::events::process::Gone;
use crate::events::process::Pinned;
use crate::events::process::ProcessWatch;
use crate::events::sensors::RelistPeriods;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::events::sensors::SensorStates;
use crate::model::Clock;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::KernelMoment;
use crate::model::LifecycleEvent;
use crate::model::PodUid;
use crate::model::runtime_keys;
use crate::oom::OomReporter;
use crate::runtime::CallObserver;
use crate::runtime::Runtime;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Answer;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

/// What CRI-O reports for a time that it does not know: the zero time of Go, which nanoseconds cannot express.
const NO_TIME: i64 = -6_795_364_578_871_345_152;

/// The wall clock when a test begins, since the Unix epoch.
const WALL: Duration = secs(1_000_000);

fn uid() -> PodUid {
    PodUid::from("p")
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A runtime with one pod in one sandbox. As CRI-O, it reports the runtime handler in lists only.
#[derive(Clone, Default)]
struct FakeRuntime(Arc<Mutex<Node>>);

#[derive(Default)]
struct Node {
    containers: BTreeMap<String, v1::ContainerStatus>,
    pid: u32,
    handler: String,
}

impl FakeRuntime {
    fn with(pid: u32, handler: &str) -> Self {
        Self(Arc::new(Mutex::new(Node { pid, handler: handler.to_owned(), ..Node::default() })))
    }

    fn set(&self, status: v1::ContainerStatus) {
        self.0.lock().unwrap().containers.insert(status.id.clone(), status);
    }

    fn set_pid(&self, pid: u32) {
        self.0.lock().unwrap().pid = pid;
    }

    fn answer(&self, method: &str, message: Bytes) -> Answer {
        let node = self.0.lock().unwrap();
        match method {
            "ListPodSandbox" => say(&v1::ListPodSandboxResponse { items: vec![node.sandbox()] }),
            "ListContainers" => say(&v1::ListContainersResponse { containers: node.list() }),
            "PodSandboxStatus" => {
                let status = Some(node.sandbox_status());
                say(&v1::PodSandboxStatusResponse { status, ..Default::default() })
            }
            "ContainerStatus" => {
                let request: v1::ContainerStatusRequest = prost::Message::decode(message).expect("a request");
                let status = node.containers.get(&request.container_id).cloned();
                let info = request.verbose.then(|| ("info".to_owned(), format!(r#"{{"pid": {}}}"#, node.pid)));
                say(&v1::ContainerStatusResponse { status, info: info.into_iter().collect() })
            }
            other => panic!("{other} is not expected"),
        }
    }
}

impl Node {
    fn metadata() -> Option<v1::PodSandboxMetadata> {
        Some(v1::PodSandboxMetadata { name: "p".into(), uid: "p".into(), namespace: "default".into(), attempt: 0 })
    }

    fn sandbox(&self) -> v1::PodSandbox {
        v1::PodSandbox {
            id: "s".into(),
            metadata: Self::metadata(),
            state: v1::PodSandboxState::SandboxReady.into(),
            labels: BTreeMap::from([(runtime_keys::POD_UID.to_owned(), "p".to_owned())]),
            runtime_handler: self.handler.clone(),
            ..Default::default()
        }
    }

    fn sandbox_status(&self) -> v1::PodSandboxStatus {
        let pid = v1::NamespaceMode::Container.into();
        let options = Some(v1::NamespaceOption { pid, ..Default::default() });
        v1::PodSandboxStatus {
            id: "s".into(),
            metadata: Self::metadata(),
            state: v1::PodSandboxState::SandboxReady.into(),
            network: Some(v1::PodSandboxNetworkStatus { ip: "10.0.0.1".into(), ..Default::default() }),
            linux: Some(v1::LinuxPodSandboxStatus { namespaces: Some(v1::Namespace { options }) }),
            ..Default::default()
        }
    }

    fn list(&self) -> Vec<v1::Container> {
        let listed = |status: &v1::ContainerStatus| v1::Container {
            id: status.id.clone(),
            pod_sandbox_id: "s".into(),
            metadata: status.metadata.clone(),
            state: status.state,
            labels: BTreeMap::from([(runtime_keys::POD_UID.to_owned(), "p".to_owned())]),
            ..Default::default()
        };
        self.containers.values().map(listed).collect()
    }
}

fn running(id: &str) -> v1::ContainerStatus {
    v1::ContainerStatus {
        id: id.to_owned(),
        metadata: Some(v1::ContainerMetadata { name: id.to_owned(), attempt: 0 }),
        state: v1::ContainerState::ContainerRunning.into(),
        ..Default::default()
    }
}

fn exited(id: &str, exit_code: i32) -> v1::ContainerStatus {
    v1::ContainerStatus {
        state: v1::ContainerState::ContainerExited.into(),
        exit_code,
        reason: if exit_code == 0 { "Completed" } else { "Error" }.to_owned(),
        finished_at: if exit_code < 0 { NO_TIME } else { 5 },
        ..running(id)
    }
}

/// The runtime's event of an exit.
fn stopped(status: v1::ContainerStatus) -> Hint {
    let id = ContainerId::from(status.id.as_str());
    Hint::Runtime { uid: uid(), id, expect: Expect::Stopped, exited: Some(Box::new(status)) }
}

/// The kernel's record of an exit.
fn recorded(id: &str, pid: u32, exit_code: i32) -> Hint {
    let (container, at) = (ContainerId::from(id), KernelMoment(Instant::now()));
    Hint::Exit(ExitFacts { container, pid, exit_code, signalled: false, oom_victim: false, at })
}

struct Watch<F>(F);

impl<F: Fn(u32) -> Pinned + Send + Sync + 'static> ProcessWatch for Watch<F> {
    fn pin(&self, pid: u32, _id: &ContainerId) -> Pinned {
        (self.0)(pid)
    }
}

fn unwatched(_pid: u32) -> Pinned {
    Pinned::Ineligible("no watch".to_owned())
}

/// A process whose end is noticed on `end`, with this code.
fn ends_on(end: Arc<Notify>, code: i32) -> impl Fn(u32) -> Pinned + Send + Sync + 'static {
    move |_pid| {
        let end = end.clone();
        Pinned::Watching(Box::pin(async move {
            end.notified().await;
            Gone { exit_code: Some(code) }
        }))
    }
}

#[derive(Default)]
struct Inspections(AtomicUsize);

impl PlegObserver for Inspections {
    fn event(&self, _event: &LifecycleEvent, _latency: Option<Duration>) {}
    fn relist(&self, _reason: RelistReason, _took: Duration, _interval: Option<Duration>, _ok: bool) {}
    fn inspection(&self, _took: Duration, _ok: bool) {
        self.0.fetch_add(1, Relaxed);
    }
    fn contradiction(&self) {}
}

struct Pleg {
    handle: PlegHandle,
    hints: mpsc::Sender<Hint>,
    inspections: Arc<Inspections>,
    _running: DropGuard,
}

impl Pleg {
    fn on(runtime: &FakeRuntime, pin: impl Fn(u32) -> Pinned + Send + Sync + 'static) -> Self {
        Self::observed(runtime, pin, Arc::new(()))
    }

    /// As [`Self::on`], with `calls` called for every call of the runtime.
    fn observed(
        runtime: &FakeRuntime,
        pin: impl Fn(u32) -> Pinned + Send + Sync + 'static,
        calls: Arc<dyn CallObserver>,
    ) -> Self {
        let (socket, runtime) = (Socket::default(), runtime.clone());
        socket.serve(script(move |method, message| runtime.answer(method, message)));
        let connect = move || socket.clone().connect();
        let options = RuntimeOptions { observer: calls, ..RuntimeOptions::default() };
        let runtime = Runtime::with_connector("unix:///run/fake.sock", connect, options);
        let (hints, hints_in) = mpsc::channel(16);
        let inspections = Arc::new(Inspections::default());
        let sensor_states = SensorStates::default();
        sensor_states.set(Sensor::RuntimeEvents, SensorState::Up);
        let config = PlegConfig {
            periods: RelistPeriods::default(),
            parallel_inspections: 4,
            inspection_timeout: secs(30),
            watch: Arc::new(Watch(pin)),
            observer: inspections.clone(),
            clock: Clock::derived(SystemTime::UNIX_EPOCH + WALL),
            sensor_states,
            ooms: OomReporter::default(),
        };
        let shutdown = CancellationToken::new();
        let (handle, _task) = start(runtime, hints_in, config, shutdown.clone());
        Self { handle, hints, inspections, _running: shutdown.drop_guard() }
    }

    async fn inspect(&self, id: &str) -> ContainerStatus {
        self.handle.inspect(&uid()).await.expect("an answer");
        self.cached(id)
    }

    fn cached(&self, id: &str) -> ContainerStatus {
        let snapshot = self.handle.cached(&uid()).expect("a snapshot");
        snapshot.by_id(&ContainerId::from(id)).expect("the container").clone()
    }

    /// Sends a hint and waits until it has had its effect.
    async fn send(&self, hint: Hint) {
        self.hints.send(hint).await.expect("the PLEG runs");
        sleep(Duration::from_millis(1)).await;
    }

    fn inspections(&self) -> usize {
        self.inspections.0.load(Relaxed)
    }
}

#[tokio::test(start_paused = true)]
async fn the_kernels_code_counts_where_the_runtime_has_none() {
    for code in [0, 3] {
        let runtime = FakeRuntime::with(4711, "");
        runtime.set(running("a"));
        let pleg = Pleg::on(&runtime, unwatched);
        assert_eq!(pleg.inspect("a").await.pid, Some(4711));
        pleg.send(recorded("a", 4711, code)).await;
        runtime.set(exited("a", -1));
        pleg.send(stopped(exited("a", -1))).await;
        let ended = pleg.cached("a");
        assert_eq!((ended.state, ended.exit_code, ended.proven), (ContainerState::Exited, Some(code), None));
        assert_eq!(ended.reason, if code == 0 { "Completed" } else { "Error" });
        assert!(ended.finished_at > 0, "{}", ended.finished_at);
        let inspections = pleg.inspections();
        sleep(secs(60)).await;
        assert_eq!(pleg.inspections(), inspections, "no inspection is pending");
    }
}

#[tokio::test(start_paused = true)]
async fn a_code_that_the_runtime_learns_later_is_waited_for() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, unwatched);
    pleg.inspect("a").await;
    runtime.set(exited("a", -1));
    let ended = pleg.inspect("a").await;
    assert_eq!((ended.state, ended.exit_code), (ContainerState::Exited, None));
    assert!(ended.finished_at > 0, "{}", ended.finished_at);
    assert_eq!(pleg.handle.changed_pods().await, [uid()]);
    runtime.set(exited("a", 0));
    let changed = tokio::time::timeout(secs(2), pleg.handle.changed_pods()).await;
    assert_eq!(changed.expect("a change without an event"), [uid()]);
    let ended = pleg.cached("a");
    assert_eq!((ended.exit_code, ended.reason.as_str(), ended.finished_at), (Some(0), "Completed", 5));
}

#[tokio::test(start_paused = true)]
async fn a_late_record_of_the_kernel_has_the_code_that_is_waited_for() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, unwatched);
    pleg.inspect("a").await;
    runtime.set(exited("a", -1));
    assert_eq!(pleg.inspect("a").await.exit_code, None);
    pleg.send(recorded("a", 4712, 1)).await;
    assert_eq!(pleg.cached("a").exit_code, None, "of another process");
    pleg.send(recorded("a", 4711, 7)).await;
    assert_eq!(pleg.cached("a").exit_code, Some(7));
}

/// The kernel has it when the container's monitor or shim has reaped the process: the runtime may have been asked before.
#[tokio::test(start_paused = true)]
async fn a_late_code_of_a_pidfd_is_the_one_that_is_waited_for() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let ended = Arc::new(Notify::new());
    let pleg = Pleg::on(&runtime, ends_on(ended.clone(), 0));
    pleg.inspect("a").await;
    runtime.set(exited("a", -1));
    assert_eq!(pleg.inspect("a").await.exit_code, None);
    ended.notify_one();
    sleep(Duration::from_millis(1)).await;
    let ended = pleg.cached("a");
    assert_eq!((ended.exit_code, ended.reason.as_str(), ended.proven), (Some(0), "Completed", None));
    sleep(secs(60)).await;
    assert_eq!(pleg.cached("a").exit_code, Some(0), "final");
}

/// As a kubelet reports it.
#[tokio::test(start_paused = true)]
async fn a_code_that_stays_unknown_is_reported_as_the_runtime_has_it() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, unwatched);
    pleg.inspect("a").await;
    runtime.set(exited("a", -1));
    pleg.inspect("a").await;
    sleep(secs(9)).await;
    assert_eq!(pleg.cached("a").exit_code, None);
    sleep(secs(2)).await;
    assert_eq!(pleg.cached("a").exit_code, Some(-1), "not later than that");
    let inspections = pleg.inspections();
    assert!((3..=8).contains(&inspections), "{inspections} inspections");
    sleep(secs(600)).await;
    assert_eq!(pleg.inspections(), inspections, "no inspection is pending");
    pleg.send(stopped(exited("a", 5))).await;
    assert_eq!(pleg.cached("a").exit_code, Some(5), "of a late event");
    sleep(secs(10)).await;
    assert_eq!(pleg.cached("a").exit_code, Some(5));
}

/// Kata Containers and gVisor: the pid is that of the sandbox.
#[tokio::test(start_paused = true)]
async fn processes_of_a_handler_without_any_are_searched_once() {
    let runtime = FakeRuntime::with(4711, "kata");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, |_| Pinned::NotFound("in the cgroup of the sandbox".to_owned()));
    pleg.inspect("a").await;
    sleep(secs(120)).await;
    let inspections = pleg.inspections();
    assert!((3..=8).contains(&inspections), "{inspections} inspections");
    runtime.set(running("b"));
    pleg.inspect("b").await;
    sleep(secs(120)).await;
    assert_eq!(pleg.inspections(), inspections + 1, "the one that was asked for");
    runtime.set(exited("b", 3));
    pleg.send(stopped(exited("b", 3))).await;
    assert_eq!((pleg.cached("b").state, pleg.cached("b").exit_code), (ContainerState::Exited, Some(3)));
    sleep(secs(2)).await;
    runtime.set(exited("a", 4));
    sleep(secs(300)).await;
    assert_eq!(pleg.cached("a").exit_code, Some(4), "found by the relist");
}

/// A process that is found shows that the handler has them.
#[tokio::test(start_paused = true)]
async fn processes_of_a_handler_are_searched_again_once_one_was_found() {
    let runtime = FakeRuntime::with(1, "runc");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, |pid| match pid {
        1 => Pinned::NotFound("gone".to_owned()),
        _ => Pinned::Watching(Box::pin(pending::<Gone>())),
    });
    pleg.inspect("a").await;
    sleep(secs(120)).await;
    runtime.set_pid(2);
    runtime.set(running("b"));
    pleg.inspect("b").await;
    runtime.set_pid(1);
    runtime.set(running("c"));
    pleg.inspect("c").await;
    let inspections = pleg.inspections();
    sleep(secs(10)).await;
    assert!(pleg.inspections() >= inspections + 2, "{} inspections", pleg.inspections() - inspections);
}

/// The pod is inspected for another exit when the process is not found.
#[tokio::test(start_paused = true)]
async fn inspections_for_another_exit_do_not_show_that_a_handler_has_no_processes() {
    let runtime = FakeRuntime::with(1, "runc");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, |pid| match pid {
        1 => unwatched(pid),
        _ => Pinned::NotFound("gone".to_owned()),
    });
    pleg.inspect("a").await;
    runtime.set(exited("a", -1));
    pleg.inspect("a").await;
    sleep(secs(8)).await;
    runtime.set_pid(2);
    runtime.set(running("b"));
    pleg.inspect("b").await;
    runtime.set(exited("b", 0));
    pleg.send(stopped(exited("b", 0))).await;
    sleep(secs(60)).await;
    runtime.set(running("c"));
    pleg.inspect("c").await;
    let inspections = pleg.inspections();
    sleep(secs(10)).await;
    assert!(pleg.inspections() >= inspections + 2, "{} inspections", pleg.inspections() - inspections);
}

/// CRI-O has the pid of its monitor for a container that was restored from a checkpoint.
#[tokio::test(start_paused = true)]
async fn the_monitor_of_a_container_is_not_its_process() {
    let (monitor, init) = (4711, 4712);
    let runtime = FakeRuntime::with(monitor, "");
    runtime.set(running("a"));
    let pinned = Arc::new(Mutex::new(Vec::new()));
    let seen = pinned.clone();
    let pleg = Pleg::on(&runtime, move |pid| {
        seen.lock().unwrap().push(pid);
        if pid == init {
            return Pinned::Watching(Box::pin(pending::<Gone>()));
        }
        Pinned::Monitor("of the container".to_owned())
    });
    assert_eq!(pleg.inspect("a").await.pid, None);
    sleep(secs(120)).await;
    assert_eq!(pleg.inspections(), 1, "that the process is not known is no reason to inspect");
    runtime.set_pid(init);
    pleg.handle.inspect_with(&uid(), vec![ContainerId::from("a")]).await.expect("an answer");
    assert_eq!((pleg.cached("a").pid, pinned.lock().unwrap().as_slice()), (Some(init), [monitor, init].as_slice()));
}
