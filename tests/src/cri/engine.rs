//! The heart of the simulation: its shared state and the carrying out of calls and events.
//!
//! One lock guards what the runtime knows and the ground truth; it is never held across an await. What happens to
//! containers is in `lifecycle`, what calls do in `sandboxes`, `containers` and `inspection`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keblet_proto::cri::v1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Response, Status};

use super::clock::SimClock;
use super::events::EventQueue;
use super::faults::{EventFate, Faults, Trouble};
use super::images::Images;
use super::kernel::Kernel;
use super::ledger::Ledger;
use super::method::Method;
use super::options::Options;
use super::program::Scripts;
use super::status;
use super::store::Store;

/// How long a swapped event waits for a successor to fall behind.
const SWAP_PATIENCE: Duration = Duration::from_secs(1);

/// What an ExecSync of a container answers.
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
pub(super) struct World {
    pub(super) store: Store,
    pub(super) images: Images,
    pub(super) ledger: Ledger,
    pub(super) faults: Faults,
    pub(super) scripts: Scripts,
    pub(super) execs: HashMap<(String, String), ExecResult>,
    pub(super) rng: fastrand::Rng,
    pub(super) conditions: Vec<v1::RuntimeCondition>,
    pub(super) exit_report: Duration,
    pub(super) addresses: u32,
    held: Option<v1::ContainerEventResponse>,
}

impl World {
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
    world: Mutex<World>,
    life: Mutex<CancellationToken>,
    changes: watch::Sender<u64>,
}

impl Engine {
    pub(super) fn new(options: Options) -> Arc<Self> {
        let world = World {
            store: Store::default(),
            images: Images::default(),
            ledger: Ledger::default(),
            faults: Faults::default(),
            scripts: Scripts::default(),
            execs: HashMap::new(),
            rng: fastrand::Rng::with_seed(options.seed),
            conditions: status::healthy(),
            exit_report: options.timings.exit_report,
            addresses: 0,
            held: None,
        };
        Arc::new(Self {
            clock: SimClock::starting_at(options.epoch),
            kernel: Kernel::new(options.timings.to_gone),
            events: EventQueue::new(options.features.events),
            world: Mutex::new(world),
            life: Mutex::new(CancellationToken::new()),
            changes: watch::Sender::new(0),
            options,
        })
    }

    /// The state; callers hold it briefly and never across an await.
    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends when the runtime process does.
    pub(super) fn life(&self) -> CancellationToken {
        self.life.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the runtime process: calls, timers and streams of the old life stop where they are.
    pub(super) fn end_life(&self) {
        self.life().cancel();
    }

    /// A new runtime process.
    pub(super) fn new_life(&self) {
        *self.life.lock().unwrap_or_else(PoisonError::into_inner) = CancellationToken::new();
    }

    /// Tells those who wait for a condition that something changed.
    pub(super) fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Counts changes.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// `base` with this simulation's jitter.
    pub(super) fn vary(&self, base: Duration) -> Duration {
        match self.options.jitter {
            0.0 => base,
            jitter => base.mul_f64((1.0 + jitter * (2.0 * self.world().rng.f64() - 1.0)).max(0.0)),
        }
    }

    /// Takes (about) as long as `base`.
    pub(super) async fn take(&self, base: Duration) {
        tokio::time::sleep(self.vary(base)).await;
    }

    /// Runs `work` in this runtime life, independent of the client that asked for it.
    pub(super) fn in_background(&self, work: impl Future<Output = ()> + Send + 'static) {
        let life = self.life();
        tokio::spawn(async move { life.run_until_cancelled_owned(work).await });
    }

    /// Carries out one call: counts it, lets faults have their way, and does `work` even if the client gives up
    /// waiting, as a real runtime does. Only the end of the runtime's life interrupts it.
    pub(super) async fn call<T, F>(&self, method: Method, object: String, work: F) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let trouble = {
            let mut world = self.world();
            world.ledger.record_call(method, &object);
            let World { faults, rng, .. } = &mut *world;
            faults.draw_call(method, &object, rng)
        };
        let life = self.life();
        let work = tokio::spawn(async move { life.run_until_cancelled_owned(troubled(trouble, work)).await });
        match work.await {
            Ok(Some(answer)) => answer.map(Response::new),
            Ok(None) => Err(Status::unavailable("the runtime was stopped")),
            Err(panic) => Err(Status::internal(format!("simulated runtime: {panic}"))),
        }
    }

    /// Sends a container event about `container_id` in `sandbox_id`, with the snapshot of this very moment.
    pub(super) fn emit(self: &Arc<Self>, kind: v1::ContainerEventType, container_id: &str, sandbox_id: &str) {
        let (mut event, fate) = {
            let mut world = self.world();
            let World { faults, rng, .. } = &mut *world;
            let fate = faults.draw_event(rng);
            (status::event(&world.store, kind, container_id, sandbox_id), fate)
        };
        if fate.bare {
            event.containers_statuses.clear();
        }
        if fate.anonymous {
            event.pod_sandbox_status = None;
        }
        if fate.lost {
            return;
        }
        if fate.stale.is_zero() && fate.late.is_zero() {
            event.created_at = fate.stamp(self.clock.now_ns());
            return self.dispatch(event, fate);
        }
        let engine = Arc::clone(self);
        self.in_background(async move {
            tokio::time::sleep(fate.stale).await;
            event.created_at = fate.stamp(engine.clock.now_ns());
            tokio::time::sleep(fate.late).await;
            engine.dispatch(event, fate);
        });
    }

    fn dispatch(self: &Arc<Self>, event: v1::ContainerEventResponse, fate: EventFate) {
        if fate.swapped {
            let overtaken = self.world().held.replace(event);
            overtaken.into_iter().for_each(|event| self.events.push(event));
            let engine = Arc::clone(self);
            return self.in_background(async move {
                tokio::time::sleep(SWAP_PATIENCE).await;
                engine.release_held();
            });
        }
        if fate.doubled {
            self.events.push(event.clone());
        }
        self.events.push(event);
        self.release_held();
    }

    fn release_held(&self) {
        let held = self.world().held.take();
        held.into_iter().for_each(|event| self.events.push(event));
    }
}

async fn troubled<T>(trouble: Option<Trouble>, work: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let failed = |code: Code, text: String| Err(Status::new(code, text));
    match trouble {
        None => work.await,
        Some(Trouble::Slow(by)) => {
            tokio::time::sleep(by).await;
            work.await
        }
        Some(Trouble::LateAnswer(by)) => {
            let answer = work.await;
            tokio::time::sleep(by).await;
            answer
        }
        Some(Trouble::Hang) => std::future::pending().await,
        Some(Trouble::HangAfter) => {
            // Whatever came of it, nobody learns it from this call.
            let _ = work.await;
            std::future::pending().await
        }
        Some(Trouble::Fail(code, text)) => failed(code, text),
        Some(Trouble::FailAfter(code, text)) => {
            let _ = work.await;
            failed(code, text)
        }
    }
}
