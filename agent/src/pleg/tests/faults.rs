//! Inspections that panic, rechecks at the wrong time, processes that cannot be watched, clocks that are set, and slow lists.

use std::sync::atomic::AtomicBool;

use tokio::time::timeout;

use super::*;
use crate::runtime::FinishedCall;
use crate::runtime::tests::server::Script;

/// Panics in the task of the call that ends next, once it is asked to.
#[derive(Default)]
struct PanicsOnce(AtomicBool);

impl CallObserver for PanicsOnce {
    fn finished(&self, _: FinishedCall) {
        assert!(!self.0.swap(false, Relaxed), "this test makes the call panic");
    }
}

#[tokio::test(start_paused = true)]
async fn callers_are_answered_although_their_inspection_panicked() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let calls = Arc::new(PanicsOnce::default());
    let pleg = Pleg::observed(&runtime, unwatched, calls.clone());
    pleg.inspect("a").await;
    // The first relist has ended by then.
    sleep(secs(1)).await;
    calls.0.store(true, Relaxed);
    let answer = timeout(secs(60), pleg.handle.inspect(&uid())).await.expect("an answer");
    let error = answer.expect_err("it panicked").to_string();
    assert_eq!(error, "inspecting pod p: the inspection panicked");
    runtime.set(exited("a", 3));
    assert_eq!(pleg.inspect("a").await.exit_code, Some(3), "the next one is as any");
}

/// A recheck that is due earlier than the worker may act does not answer the hints that came meanwhile.
#[tokio::test(start_paused = true)]
async fn hints_for_an_acting_worker_are_answered_after_a_recheck_that_came_too_early() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, unwatched);
    pleg.inspect("a").await;
    runtime.set(exited("a", -1));
    assert_eq!(pleg.inspect("a").await.exit_code, None, "there is a recheck for it in a second");
    sleep(Duration::from_millis(500)).await;
    pleg.handle.acting(&uid()).await;
    sleep(Duration::from_millis(1)).await;
    let b = ContainerId::from("b");
    runtime.set(running("b"));
    pleg.send(Hint::Runtime { uid: uid(), id: b.clone(), expect: Expect::Started, exited: None }).await;
    let is_known = || pleg.handle.cached(&uid()).is_some_and(|snapshot| snapshot.by_id(&b).is_some());
    assert!(!is_known(), "the worker's own inspection is waited for");
    sleep(secs(2)).await;
    assert!(is_known(), "it has taken more than a second");
}

/// The parts of a PLEG on the machine's own clock.
fn parts(pin: impl Fn(u32) -> Pinned + Send + Sync + 'static) -> PlegConfig {
    let sensor_states = SensorStates::default();
    sensor_states.set(Sensor::RuntimeEvents, SensorState::Up);
    PlegConfig {
        periods: RelistPeriods::default(),
        parallel_inspections: 4,
        inspection_timeout: secs(30),
        watch: Arc::new(Watch(pin)),
        observer: Arc::new(Inspections::default()),
        clock: Clock::System,
        sensor_states,
        ooms: OomReporter::default(),
    }
}

/// Starts a PLEG of these parts on a runtime that answers so.
fn started(answers: Script, config: PlegConfig) -> Pleg {
    let socket = Socket::default();
    socket.serve(answers);
    let connect = move || socket.clone().connect();
    let runtime = Runtime::with_connector("unix:///run/fake.sock", connect, RuntimeOptions::default());
    let (hints, hints_in) = mpsc::channel(16);
    let shutdown = CancellationToken::new();
    let (handle, _task) = start(runtime, hints_in, config, shutdown.clone());
    Pleg { handle, hints, inspections: Arc::default(), _running: shutdown.drop_guard() }
}

/// As without a free file descriptor.
#[tokio::test(start_paused = true)]
async fn a_process_that_could_not_be_watched_is_watched_from_the_next_relist_on() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let (can_watch, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(Notify::new()));
    let (can, watch) = (can_watch.clone(), ends_on(ended.clone(), 3));
    let pleg = Pleg::on(&runtime, move |pid| match can.load(Relaxed) {
        true => watch(pid),
        false => Pinned::Failed("too many open files".to_owned()),
    });
    pleg.inspect("a").await;
    // The first relist has ended by then.
    sleep(secs(1)).await;
    can_watch.store(true, Relaxed);
    sleep(secs(300)).await;
    ended.notify_one();
    sleep(Duration::from_millis(1)).await;
    let seen = pleg.cached("a");
    assert_eq!((seen.state, seen.exit_code), (ContainerState::Exited, Some(3)), "the runtime has not reported it");
    assert!(seen.proven.is_some());
}

/// The machine's clock does not move with the paused one: to it, each second of that is a second that it was set back.
#[tokio::test(start_paused = true)]
async fn the_time_of_a_proven_exit_stays_and_wakes_no_worker_until_the_runtime_reports_it() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let (node, ended) = (runtime.clone(), Arc::new(Notify::new()));
    let answers = script(move |method, message| node.answer(method, message));
    let pleg = started(answers, parts(ends_on(ended.clone(), 3)));
    pleg.inspect("a").await;
    sleep(secs(1)).await;
    ended.notify_one();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(pleg.handle.changed_pods().await, [uid()]);
    let first = pleg.cached("a");
    assert!(first.proven.is_some() && first.finished_at > 0, "{first:?}");
    timeout(secs(10), pleg.handle.changed_pods()).await.expect_err("nothing has changed");
    assert_eq!(pleg.cached("a"), first);
    runtime.set(exited("a", 3));
    assert_eq!(pleg.inspect("a").await.finished_at, 5, "the runtime's");
}

/// Duration and interval of each relist.
#[derive(Default)]
struct Relists(Mutex<Vec<(Duration, Option<Duration>)>>);

impl PlegObserver for Relists {
    fn event(&self, _event: &LifecycleEvent, _latency: Option<Duration>) {}
    fn relist(&self, _reason: RelistReason, took: Duration, interval: Option<Duration>, _ok: bool) {
        self.0.lock().unwrap().push((took, interval));
    }
    fn inspection(&self, _took: Duration, _ok: bool) {}
    fn contradiction(&self) {}
}

#[tokio::test(start_paused = true)]
async fn the_interval_of_relists_includes_the_time_that_a_list_takes() {
    let node = FakeRuntime::with(4711, "");
    let slow: Script = Arc::new(move |method, message| {
        let answer = node.answer(method, message);
        Box::pin(async move {
            sleep(secs(5)).await;
            answer
        })
    });
    let relists = Arc::new(Relists::default());
    let periods = RelistPeriods { fixed: Some(secs(10)), ..RelistPeriods::default() };
    let _pleg = started(slow, PlegConfig { periods, observer: relists.clone(), ..parts(unwatched) });
    sleep(secs(40)).await;
    let in_seconds =
        |(took, interval): &(Duration, Option<Duration>)| (took.as_secs(), interval.map(|it| it.as_secs()));
    let seconds: Vec<(u64, Option<u64>)> = relists.0.lock().unwrap().iter().map(in_seconds).collect();
    assert_eq!(seconds, [(5, None), (5, Some(15)), (5, Some(15))]);
}
