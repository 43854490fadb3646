//! Shared state of the simulation, and execution of calls and events.
//!
//! One lock guards the runtime's state and the trace; it is never held across an await. The process lifecycle is in
//! `lifecycle`, the calls are in `sandboxes`, `containers` and `node`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use keblet_proto::cri::v1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::Response;
use tonic::Status;

use super::clock::SimClock;
use super::events::EventQueue;
use super::faults::EventOutcome;
use super::faults::FaultKind;
use super::faults::Faults;
use super::images::Images;
use super::kernel::Kernel;
use super::method::Method;
use super::options::Options;
use super::program::Scripts;
use super::status;
use super::store::Store;
use super::trace::Trace;

/// How long a swapped event is held for the event that overtakes it.
const SWAP_DELAY: Duration = Duration::from_secs(1);

/// Scripted result of ExecSync in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecResult {
    /// Exit code of the command.
    pub code: i32,
    /// Its output.
    pub stdout: Vec<u8>,
    /// How long it runs.
    pub takes: Duration,
}

/// State under the one lock.
#[derive(Debug)]
pub(super) struct State {
    pub(super) store: Store,
    pub(super) images: Images,
    pub(super) trace: Trace,
    pub(super) faults: Faults,
    pub(super) scripts: Scripts,
    pub(super) execs: HashMap<(String, String), ExecResult>,
    pub(super) rng: fastrand::Rng,
    pub(super) conditions: Vec<v1::RuntimeCondition>,
    pub(super) exit_report: Duration,
    /// The runtime misses OOM events.
    pub(super) misses_oom_events: bool,
    /// The runtime reports exits without their codes.
    pub(super) withholds_codes: bool,
    pub(super) addresses: u32,
    held: Option<v1::ContainerEventResponse>,
}

impl State {
    /// A new object's id, 64 hexadecimal digits.
    pub(super) fn new_id(&mut self) -> String {
        (0..4).map(|_| format!("{:016x}", self.rng.u64(..))).collect()
    }
}

/// The simulated runtime.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) options: Options,
    pub(super) clock: SimClock,
    pub(super) kernel: Kernel,
    pub(super) events: EventQueue,
    state: Mutex<State>,
    lifetime: Mutex<CancellationToken>,
    changes: watch::Sender<u64>,
}

impl Engine {
    pub(super) fn new(options: Options) -> Arc<Self> {
        let state = State {
            store: Store::default(),
            images: Images::default(),
            trace: Trace::default(),
            faults: Faults::default(),
            scripts: Scripts::default(),
            execs: HashMap::new(),
            rng: fastrand::Rng::with_seed(options.seed),
            conditions: status::healthy(),
            exit_report: options.timings.exit_report,
            misses_oom_events: false,
            withholds_codes: false,
            addresses: 0,
            held: None,
        };
        Arc::new(Self {
            clock: SimClock::starting_at(options.epoch),
            kernel: Kernel::new(options.timings.to_gone),
            events: EventQueue::new(options.features.events),
            state: Mutex::new(state),
            lifetime: Mutex::new(CancellationToken::new()),
            changes: watch::Sender::new(0),
            options,
        })
    }

    /// The state; callers hold it briefly and never across an await.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cancelled when the runtime process exits.
    pub(super) fn lifetime(&self) -> CancellationToken {
        self.lifetime.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the runtime process: its calls, timers and streams are cancelled.
    pub(super) fn end_lifetime(&self) {
        self.lifetime().cancel();
    }

    /// A new runtime process.
    pub(super) fn new_lifetime(&self) {
        *self.lifetime.lock().unwrap_or_else(PoisonError::into_inner) = CancellationToken::new();
    }

    /// Wakes the tasks that wait for a condition.
    pub(super) fn notify_changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Counts changes.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// `base` with this simulation's jitter.
    pub(super) fn jittered(&self, base: Duration) -> Duration {
        match self.options.jitter {
            0.0 => base,
            jitter => base.mul_f64((1.0 + jitter * (2.0 * self.state().rng.f64() - 1.0)).max(0.0)),
        }
    }

    /// Sleeps for about `base`.
    pub(super) async fn elapse(&self, base: Duration) {
        tokio::time::sleep(self.jittered(base)).await;
    }

    /// Runs `work` until it completes or the runtime process exits, independently of the client that requested it.
    pub(super) fn in_background(&self, work: impl Future<Output = ()> + Send + 'static) {
        let lifetime = self.lifetime();
        tokio::spawn(async move { lifetime.run_until_cancelled_owned(work).await });
    }

    /// Executes one call: counts it, applies faults, and completes `work` even if the client gives up waiting, as a
    /// real runtime does. Only the exit of the runtime process interrupts it.
    pub(super) async fn call<T, F>(&self, method: Method, object: String, work: F) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let kind = {
            let mut state = self.state();
            state.trace.record_call(method, &object);
            let State { faults, rng, .. } = &mut *state;
            faults.draw_call(method, &object, rng)
        };
        let lifetime = self.lifetime();
        let work = tokio::spawn(async move { lifetime.run_until_cancelled_owned(with_fault(kind, work)).await });
        match work.await {
            Ok(Some(answer)) => answer.map(Response::new),
            Ok(None) => Err(Status::unavailable("the runtime was stopped")),
            Err(panic) => Err(Status::internal(format!("simulated runtime: {panic}"))),
        }
    }

    /// Sends a container event with a snapshot of the current state.
    pub(super) fn emit(self: &Arc<Self>, kind: v1::ContainerEventType, container_id: &str, sandbox_id: &str) {
        let (mut event, outcome) = {
            let mut state = self.state();
            let State { faults, rng, .. } = &mut *state;
            let outcome = faults.draw_event(rng);
            (status::event(&state.store, kind, container_id, sandbox_id), outcome)
        };
        if outcome.bare {
            event.containers_statuses.clear();
        }
        if outcome.anonymous {
            event.pod_sandbox_status = None;
        }
        if outcome.lost {
            return;
        }
        if outcome.stale.is_zero() && outcome.late.is_zero() {
            event.created_at = outcome.stamp(self.clock.now_ns());
            return self.dispatch(event, outcome);
        }
        let engine = Arc::clone(self);
        self.in_background(async move {
            tokio::time::sleep(outcome.stale).await;
            event.created_at = outcome.stamp(engine.clock.now_ns());
            tokio::time::sleep(outcome.late).await;
            engine.dispatch(event, outcome);
        });
    }

    fn dispatch(self: &Arc<Self>, event: v1::ContainerEventResponse, outcome: EventOutcome) {
        if outcome.swapped {
            let overtaken = self.state().held.replace(event);
            overtaken.into_iter().for_each(|event| self.events.push(event));
            let engine = Arc::clone(self);
            return self.in_background(async move {
                tokio::time::sleep(SWAP_DELAY).await;
                engine.release_held();
            });
        }
        if outcome.doubled {
            self.events.push(event.clone());
        }
        self.events.push(event);
        self.release_held();
    }

    fn release_held(&self) {
        let held = self.state().held.take();
        held.into_iter().for_each(|event| self.events.push(event));
    }
}

async fn with_fault<T>(kind: Option<FaultKind>, work: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let failed = |code: Code, text: String| Err(Status::new(code, text));
    match kind {
        None => work.await,
        Some(FaultKind::Slow(by)) => {
            tokio::time::sleep(by).await;
            work.await
        }
        Some(FaultKind::LateAnswer(by)) => {
            let answer = work.await;
            tokio::time::sleep(by).await;
            answer
        }
        Some(FaultKind::Hang) => std::future::pending().await,
        Some(FaultKind::HangAfter) => {
            // The result is dropped: the call never responds.
            let _ = work.await;
            std::future::pending().await
        }
        Some(FaultKind::Fail(code, text)) => failed(code, text),
        Some(FaultKind::FailAfter(code, text)) => {
            let _ = work.await;
            failed(code, text)
        }
    }
}
