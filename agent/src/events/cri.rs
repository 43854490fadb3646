//! The runtime's event stream as hints.
//!
//! Subscribes, requests a relist, and forwards events. A stream that ends is always reopened, with capped delays; after one
//! that has ended soon, the next one counts as up when it has lasted. Of the statuses in events only exits are forwarded:
//! runtimes sample and stamp statuses in no reliable order, sometimes omit them, and include one sandbox only; but an exit is
//! final.
//!
//! A stream that stays open and silent, as through a proxy that drops events, is degraded once the start of a container has
//! caused no event: all pods are listed at the short period until one arrives, in this stream or, if it ends, in a later one.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use keblet_proto::cri::v1;
use keblet_proto::cri::v1::ContainerEventType;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Expect;
use super::Hint;
use super::RelistReason;
use super::sensors::Sensor;
use super::sensors::SensorState;
use super::sensors::SensorStates;
use super::silence::SILENCE;
use super::silence::Silence;
use crate::metrics::Metrics;
use crate::model::Backoff;
use crate::model::Clock;
use crate::model::ContainerId;
use crate::model::PodUid;
use crate::model::sleep_until;
use crate::runtime::ContainerEvents;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;

/// Period of retries with a runtime that lacks the call: it may have been upgraded.
const UNIMPLEMENTED_RETRY: Duration = Duration::from_secs(60);
/// A stream that ends sooner is a failure: each new one costs a relist.
const LASTING: Duration = crate::runtime::LAST_RETRY;

/// containerd keeps up to 1000 events without a subscriber and replays them to the next one. Those older than the
/// subscription by this much cause one relist instead of single inspections.
const STALE: Duration = Duration::from_secs(5);
/// For how long a subscription may begin with such events. Later ones have the time of a clock that was set back.
const BACKLOG: Duration = Duration::from_secs(30);

/// Follows the event stream until `shutdown`.
pub async fn follow(
    runtime: Runtime,
    hints: mpsc::Sender<Hint>,
    sensor_states: SensorStates,
    clock: Clock,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let mut backoff = Backoff::new(crate::runtime::FIRST_RETRY, crate::runtime::LAST_RETRY);
    let (mut ended_soon, mut silence) = (false, Silence::new(Instant::now()));
    let following = async {
        loop {
            let requested = Instant::now();
            let error = match runtime.container_events().await {
                Ok(events) => {
                    silence.reopened(requested);
                    metrics.pleg.stream(true);
                    let lasts = Instant::now() + LASTING;
                    let mut reader = Reader {
                        runtime: &runtime,
                        hints: &hints,
                        sensor_states: &sensor_states,
                        metrics: &metrics,
                        silence: &mut silence,
                        counts_from: ended_soon.then_some(lasts),
                    };
                    let error = reader.read(events, clock).await;
                    ended_soon = Instant::now() < lasts;
                    if !ended_soon {
                        backoff.succeeded();
                    }
                    error
                }
                Err(error) => {
                    metrics.pleg.stream(false);
                    ended_soon = false;
                    Some(error)
                }
            };
            let missing = error.as_ref().is_some_and(RuntimeError::is_unimplemented);
            let reason = error.map_or_else(|| "the runtime ended the stream".to_owned(), |e| e.to_string());
            sensor_states.set(Sensor::RuntimeEvents, SensorState::Down(reason));
            let delay = if missing { UNIMPLEMENTED_RETRY } else { backoff.failed(0.0) };
            tokio::time::sleep(delay).await;
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = following => {}
    }
}

async fn send(hints: &mpsc::Sender<Hint>, hint: Hint) {
    // Fails only after the PLEG has stopped; then the shutdown token ends this task.
    let _ = hints.send(hint).await;
}

/// Reads one stream.
struct Reader<'a> {
    runtime: &'a Runtime,
    hints: &'a mpsc::Sender<Hint>,
    sensor_states: &'a SensorStates,
    metrics: &'a Metrics,
    silence: &'a mut Silence,
    /// When the stream has lasted, if the sensor is down until then.
    counts_from: Option<Instant>,
}

impl Reader<'_> {
    /// Requests a relist, and forwards events until the stream ends; returns its last error.
    async fn read(&mut self, mut events: ContainerEvents, clock: Clock) -> Option<RuntimeError> {
        self.report();
        send(self.hints, Hint::Gap(RelistReason::Reconnect)).await;
        let mut backlog = Backlog::of_new_subscription(clock);
        let mut starts = self.runtime.starts();
        let sent = *starts.borrow_and_update();
        self.silence.started(sent, Instant::now());
        loop {
            tokio::select! {
                biased;
                event = events.next() => match event? {
                    Ok(event) => {
                        if self.silence.ends(Instant::now()) {
                            self.report();
                            send(self.hints, Hint::Gap(RelistReason::Reconnect)).await;
                        }
                        self.forward(event, &mut backlog, clock).await;
                    }
                    Err(error) => return Some(error),
                },
                Ok(()) = starts.changed() => {
                    let sent = *starts.borrow_and_update();
                    self.silence.started(sent, Instant::now());
                }
                () = sleep_until(self.counts_from) => {
                    self.counts_from = None;
                    self.report();
                }
                () = sleep_until(self.silence.due()) => {
                    self.silence.begins();
                    self.report();
                }
            }
        }
    }

    /// Reports the state of the sensor, if the stream counts.
    fn report(&self) {
        if self.counts_from.is_some() {
            return;
        }
        let state = match self.silence.is_silent() {
            true => SensorState::Degraded(format!("no event {SILENCE:?} after the start of a container")),
            false => SensorState::Up,
        };
        self.sensor_states.set(Sensor::RuntimeEvents, state);
    }

    async fn forward(&self, event: v1::ContainerEventResponse, backlog: &mut Backlog, clock: Clock) {
        if backlog.contains(event.created_at) {
            return send(self.hints, Hint::Gap(RelistReason::Backlog)).await;
        }
        if let Ok(nanos) = u64::try_from(clock.wall_nanos().saturating_sub(event.created_at)) {
            self.metrics.pleg.stream_event(Duration::from_nanos(nanos));
        }
        if let Some(hint) = hint(event) {
            send(self.hints, hint).await;
        }
    }
}

/// Events from before the subscription, which the runtime sends first.
struct Backlog {
    /// Nanoseconds since the Unix epoch.
    stale: i64,
    /// `None` once it was read.
    until: Option<Instant>,
}

impl Backlog {
    fn of_new_subscription(clock: Clock) -> Self {
        Self { stale: clock.wall_nanos_before(STALE), until: Some(Instant::now() + BACKLOG) }
    }

    /// The next event, created at this time, is part of it. A runtime without such times reports 0.
    fn contains(&mut self, created_at: i64) -> bool {
        let is_read = created_at >= self.stale || self.until.is_none_or(|until| Instant::now() >= until);
        if is_read && created_at != 0 {
            self.until = None;
        }
        !is_read && created_at != 0
    }
}

/// The hint of an event. Creations give none: the worker that creates a container inspects its pod itself. An event
/// without a pod requests a relist.
fn hint(event: v1::ContainerEventResponse) -> Option<Hint> {
    let expect = match ContainerEventType::try_from(event.container_event_type) {
        Ok(ContainerEventType::ContainerCreatedEvent) => return None,
        Ok(ContainerEventType::ContainerStartedEvent) => Expect::Started,
        Ok(ContainerEventType::ContainerStoppedEvent) => Expect::Stopped,
        Ok(ContainerEventType::ContainerDeletedEvent) => Expect::Deleted,
        Err(_) => return Some(Hint::Gap(RelistReason::Unattributed)),
    };
    let (id, statuses) = (event.container_id, event.containers_statuses);
    let uid = event.pod_sandbox_status.and_then(|s| s.metadata).map(|m| m.uid).filter(|uid| !uid.is_empty());
    let Some(uid) = uid else { return Some(Hint::Gap(RelistReason::Unattributed)) };
    let has_exited = |s: &v1::ContainerStatus| s.id == id && s.state() == v1::ContainerState::ContainerExited;
    let exited = statuses.into_iter().find(has_exited).filter(|_| expect == Expect::Stopped).map(Box::new);
    Some(Hint::Runtime { uid: PodUid::from(uid), id: ContainerId::from(id), expect, exited })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering;

    use futures_util::stream;
    use prost::Message as _;

    use super::*;
    use crate::runtime::RuntimeOptions;
    use crate::runtime::tests::server::Socket;
    use crate::runtime::tests::server::endless;
    use crate::runtime::tests::server::say;
    use crate::runtime::tests::server::script;

    fn event(kind: ContainerEventType, uid: &str) -> v1::ContainerEventResponse {
        let metadata = v1::PodSandboxMetadata { uid: uid.into(), ..Default::default() };
        v1::ContainerEventResponse {
            container_id: "c".into(),
            container_event_type: kind as i32,
            pod_sandbox_status: Some(v1::PodSandboxStatus { metadata: Some(metadata), ..Default::default() }),
            ..Default::default()
        }
    }

    /// As behind a proxy that ends its streams.
    #[tokio::test(start_paused = true)]
    async fn streams_that_end_soon_again_and_again_are_not_up() {
        let (socket, lasts) = (Socket::default(), Arc::new(AtomicBool::new(false)));
        let is_lasting = lasts.clone();
        socket.serve(script(move |method, _| match method {
            "GetContainerEvents" if is_lasting.load(Ordering::Relaxed) => endless(stream::empty()),
            "GetContainerEvents" => say(&event(ContainerEventType::ContainerStartedEvent, "u")),
            _ => say(&v1::VersionResponse::default()),
        }));
        let runtime = Runtime::with_connector("unix:///t", move || socket.clone().connect(), RuntimeOptions::default());
        let (hints, mut received) = mpsc::channel(1);
        tokio::spawn(async move { while received.recv().await.is_some() {} });
        let (states, shutdown) = (SensorStates::default(), CancellationToken::new());
        let mut changes = states.subscribe();
        tokio::spawn(follow(runtime, hints, states.clone(), Clock::System, Metrics::new(), shutdown));
        let state = || states.get(Sensor::RuntimeEvents);
        while !matches!(state(), Some(SensorState::Down(_))) {
            changes.changed().await.unwrap();
        }
        let changed = tokio::time::timeout(Duration::from_secs(600), changes.changed()).await;
        assert!(changed.is_err(), "{:?}", state());
        lasts.store(true, Ordering::Relaxed);
        let opened = Instant::now();
        tokio::time::timeout(Duration::from_secs(30), changes.changed()).await.unwrap().unwrap();
        assert_eq!(state(), Some(SensorState::Up));
        assert!(opened.elapsed() >= LASTING, "{:?}", opened.elapsed());
    }

    /// As through a proxy that drops events.
    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_silent_after_a_start_is_degraded_until_the_next_event() {
        let (socket, (sender, receiver)) = (Socket::default(), mpsc::unbounded_channel());
        let receiver = Arc::new(Mutex::new(Some(receiver)));
        socket.serve(script(move |method, _| match method {
            "GetContainerEvents" => {
                let receiver = receiver.lock().unwrap().take().expect("one stream");
                endless(tokio_stream::wrappers::UnboundedReceiverStream::new(receiver))
            }
            "StartContainer" => say(&v1::StartContainerResponse::default()),
            _ => say(&v1::VersionResponse::default()),
        }));
        let runtime = Runtime::with_connector("unix:///t", move || socket.clone().connect(), RuntimeOptions::default());
        let (hints, mut received) = mpsc::channel(64);
        let (states, shutdown) = (SensorStates::default(), CancellationToken::new());
        let mut changes = states.subscribe();
        tokio::spawn(follow(runtime.clone(), hints, states.clone(), Clock::System, Metrics::new(), shutdown));
        let state = || states.get(Sensor::RuntimeEvents);
        changes.changed().await.unwrap();
        assert_eq!(state(), Some(SensorState::Up));
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(state(), Some(SensorState::Up), "nothing was started");
        let started = Instant::now();
        runtime.start_container("c").await.unwrap();
        changes.changed().await.unwrap();
        assert!(matches!(state(), Some(SensorState::Degraded(_))), "{:?}", state());
        assert!(started.elapsed() <= SILENCE + Duration::from_millis(1), "{:?}", started.elapsed());
        while received.try_recv().is_ok() {}
        sender.send(Ok(event(ContainerEventType::ContainerStartedEvent, "u").encode_to_vec().into())).unwrap();
        changes.changed().await.unwrap();
        assert_eq!(state(), Some(SensorState::Up));
        assert!(matches!(received.recv().await, Some(Hint::Gap(RelistReason::Reconnect))), "events may have been lost");
        assert!(matches!(received.recv().await, Some(Hint::Runtime { .. })));
    }

    /// Opening a stream proves nothing of one that was silent, however often it ends.
    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_that_is_opened_again_is_degraded_until_its_first_event() {
        let (socket, streams) = (Socket::default(), Arc::new(Mutex::new(Vec::new())));
        let opened = streams.clone();
        socket.serve(script(move |method, _| match method {
            "GetContainerEvents" => {
                let (sender, receiver) = mpsc::unbounded_channel();
                opened.lock().unwrap().push(sender);
                Ok(tokio_stream::wrappers::UnboundedReceiverStream::new(receiver).boxed())
            }
            "StartContainer" => say(&v1::StartContainerResponse::default()),
            _ => say(&v1::VersionResponse::default()),
        }));
        let runtime = Runtime::with_connector("unix:///t", move || socket.clone().connect(), RuntimeOptions::default());
        let (hints, mut received) = mpsc::channel(1);
        tokio::spawn(async move { while received.recv().await.is_some() {} });
        let (states, shutdown) = (SensorStates::default(), CancellationToken::new());
        tokio::spawn(follow(runtime.clone(), hints, states.clone(), Clock::System, Metrics::new(), shutdown));
        let state_after = async |seconds| {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            states.get(Sensor::RuntimeEvents).map(|state| state.as_str())
        };
        assert_eq!(state_after(60).await, Some("up"));
        runtime.start_container("c").await.unwrap();
        assert_eq!(state_after(60).await, Some("degraded"));
        for lasts in [60, 2] {
            streams.lock().unwrap().clear();
            assert_eq!(state_after(lasts).await, Some("degraded"), "{lasts}");
        }
        streams.lock().unwrap().clear();
        assert_eq!(state_after(60).await, Some("degraded"), "after a stream that has ended soon");
        let event = event(ContainerEventType::ContainerStartedEvent, "u").encode_to_vec();
        streams.lock().unwrap().last().unwrap().send(Ok(event.into())).unwrap();
        assert_eq!(state_after(1).await, Some("up"));
        streams.lock().unwrap().clear();
        assert_eq!(state_after(60).await, Some("up"));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_first_events_of_a_subscription_can_be_from_before_it() {
        let clock = Clock::derived(std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000));
        let (old, now) = (clock.wall_nanos_before(Duration::from_secs(3600)), clock.wall_nanos());
        let mut backlog = Backlog::of_new_subscription(clock);
        for (created_at, is_part) in [(old, true), (0, false), (old, true), (now, false), (old, false)] {
            assert_eq!(backlog.contains(created_at), is_part, "the clock was set back after the first new event");
        }
        let mut backlog = Backlog::of_new_subscription(clock);
        assert!(backlog.contains(old));
        tokio::time::advance(BACKLOG).await;
        assert!(!backlog.contains(old), "the clock was set back before the first new event");
    }

    #[test]
    fn an_event_without_a_pod_requests_a_relist() {
        let mut nameless = event(ContainerEventType::ContainerDeletedEvent, "");
        assert!(matches!(hint(nameless.clone()), Some(Hint::Gap(RelistReason::Unattributed))));
        nameless.pod_sandbox_status = None;
        assert!(matches!(hint(nameless), Some(Hint::Gap(RelistReason::Unattributed))));
    }

    #[test]
    fn creations_give_no_hint_and_stops_do() {
        assert!(hint(event(ContainerEventType::ContainerCreatedEvent, "u")).is_none());
        let stopped = hint(event(ContainerEventType::ContainerStoppedEvent, "u"));
        assert!(matches!(stopped, Some(Hint::Runtime { expect: Expect::Stopped, exited: None, .. })));
    }

    #[test]
    fn only_the_exit_of_the_container_itself_is_forwarded() {
        let status = |id: &str, state: v1::ContainerState| v1::ContainerStatus {
            id: id.into(),
            state: state as i32,
            ..Default::default()
        };
        let mut stopped = event(ContainerEventType::ContainerStoppedEvent, "u");
        stopped.containers_statuses = vec![status("d", v1::ContainerState::ContainerExited)];
        stopped.containers_statuses.push(status("c", v1::ContainerState::ContainerRunning));
        assert!(matches!(hint(stopped.clone()), Some(Hint::Runtime { exited: None, .. })), "stamped too late");
        stopped.containers_statuses[1] = status("c", v1::ContainerState::ContainerExited);
        assert!(matches!(hint(stopped), Some(Hint::Runtime { exited: Some(_), .. })));
    }
}
