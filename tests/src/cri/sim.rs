//! The test's hand on the simulated runtime: scripts, faults, deaths, restarts, and waiting for the truth.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1;
use tokio::time::Instant;

use super::clock::SimClock;
use super::engine::{Engine, ExecResult};
use super::faults::Faults;
use super::images::Images;
use super::kernel::{Kernel, KernelFact, OomRecord};
use super::ledger::{Instance, Ledger};
use super::options::Options;
use super::program::{Exit, Program};
use super::transport::{MemoryEndpoint, SocketEndpoint};

/// How a restarted runtime finds itself again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Exit codes of containers that died meanwhile are lost: 255, reason `Unknown`.
    pub lose_exit_codes: bool,
    /// So many of the last events are delivered once more.
    pub replay_events: usize,
}

/// A condition that was not met in time, with what happened instead.
#[derive(Debug, thiserror::Error)]
#[error("not met within {waited:?}: {what}\n{history}")]
pub struct Unmet {
    /// The condition in words.
    pub what: String,
    /// How long was waited.
    pub waited: Duration,
    /// The ledger at that moment.
    pub history: String,
}

/// A handle on one simulated runtime. Clones share it.
#[derive(Clone, Debug)]
pub struct SimRuntime {
    engine: Arc<Engine>,
}

impl SimRuntime {
    /// A runtime that is up, with nothing in it.
    pub fn new(options: Options) -> Self {
        Self { engine: Engine::new(options) }
    }

    /// Serves in memory. One server per call; all reach the same runtime.
    pub fn memory(&self) -> MemoryEndpoint {
        MemoryEndpoint::serve(Arc::clone(&self.engine))
    }

    /// Serves on a unix socket until the endpoint is dropped.
    pub fn socket(&self, path: &Path) -> io::Result<SocketEndpoint> {
        SocketEndpoint::serve(Arc::clone(&self.engine), path)
    }

    /// The node's clock.
    pub fn clock(&self) -> SimClock {
        self.engine.clock
    }

    /// The node's kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.engine.kernel
    }

    /// Reads the ground truth. Do not block inside.
    pub fn ledger<T>(&self, read: impl FnOnce(&Ledger) -> T) -> T {
        read(&self.engine.world().ledger)
    }

    /// Changes the faults in force.
    pub fn faults<T>(&self, change: impl FnOnce(&mut Faults) -> T) -> T {
        change(&mut self.engine.world().faults)
    }

    /// Changes what images there are.
    pub fn images<T>(&self, change: impl FnOnce(&mut Images) -> T) -> T {
        change(&mut self.engine.world().images)
    }

    /// From now on this container runs that program: in one attempt, or in all.
    pub fn script(&self, pod: &str, container: &str, attempt: Option<u32>, program: Program) {
        self.engine.world().scripts.set(pod, container, attempt, program);
    }

    /// What ExecSync of this container answers from now on.
    pub fn script_exec(&self, pod: &str, container: &str, result: ExecResult) {
        self.engine.world().execs.insert((pod.to_owned(), container.to_owned()), result);
    }

    /// How long the runtime takes from now on to report a death.
    pub fn set_exit_report(&self, delay: Duration) {
        self.engine.world().exit_report = delay;
    }

    /// How long the runtime takes to report a death.
    pub fn exit_report(&self) -> Duration {
        self.engine.world().exit_report
    }

    /// Sets a condition of Status, such as `RuntimeReady` or `NetworkReady`.
    pub fn set_condition(&self, kind: &str, status: bool, reason: &str, message: &str) {
        let mut world = self.engine.world();
        world.conditions.retain(|condition| condition.r#type != kind);
        world.conditions.push(v1::RuntimeCondition {
            r#type: kind.to_owned(),
            status,
            reason: reason.to_owned(),
            message: message.to_owned(),
        });
    }

    /// Lets the live instance of a container die. Says which, if there is one.
    pub fn kill(&self, pod: &str, container: &str, exit: Exit) -> Option<Instance> {
        let victim = self.ledger(|ledger| ledger.live(pod, container).cloned())?;
        self.engine.die(&victim.id, exit);
        Some(victim)
    }

    /// The OOM killer takes a child of a container's init; the container lives on.
    pub fn oom_child(&self, pod: &str, container: &str) -> Option<Instance> {
        let parent = self.ledger(|ledger| ledger.live(pod, container).cloned())?;
        let pid = self.engine.kernel.spawn(&parent.id, "");
        let record = OomRecord { pid, container_id: parent.id.clone(), init: false, at: Instant::now() };
        self.engine.kernel.publish(KernelFact::Oom(record));
        self.engine.kernel.gone(pid);
        Some(parent)
    }

    /// Lets the pause process of a pod's sandboxes die. Says how many died.
    pub fn kill_sandboxes(&self, pod: &str) -> usize {
        let of_pod: Vec<String> = {
            let world = self.engine.world();
            let alive = world.store.sandboxes.values().filter(|s| s.pid.is_some() && s.metadata().name == pod);
            alive.map(|sandbox| sandbox.id.clone()).collect()
        };
        of_pod.iter().for_each(|id| self.engine.kill_sandbox(id));
        of_pod.len()
    }

    /// Whether a container's init leads a PID namespace of its own.
    pub fn leads_pid_namespace(&self, container_id: &str) -> bool {
        self.engine.world().store.containers.get(container_id).is_some_and(super::store::Container::ns_init)
    }

    /// Statuses of a pod's containers as the runtime would tell them now, oldest first; costs no call.
    pub fn statuses(&self, pod: &str) -> Vec<v1::ContainerStatus> {
        let world = self.engine.world();
        let of_pod = world.store.sandboxes.values().filter(|sandbox| sandbox.metadata().name == pod);
        let mut statuses: Vec<_> =
            of_pod.flat_map(|sandbox| super::status::containers_of(&world.store, &sandbox.id)).collect();
        statuses.sort_by_key(|status| status.created_at);
        statuses
    }

    /// Statuses of a pod's sandboxes, oldest first; costs no call.
    pub fn sandboxes(&self, pod: &str) -> Vec<v1::PodSandboxStatus> {
        let world = self.engine.world();
        let of_pod = world.store.sandboxes.values().filter(|sandbox| sandbox.metadata().name == pod);
        let mut statuses: Vec<_> = of_pod.map(super::status::sandbox).collect();
        statuses.sort_by_key(|status| status.created_at);
        statuses
    }

    /// Events lost to a full queue, and events handed to readers.
    pub fn events(&self) -> (u64, u64) {
        (self.engine.events.dropped(), self.engine.events.delivered())
    }

    /// The runtime process is killed: connections break, calls under way are lost, containers live on.
    pub fn go_down(&self) {
        self.engine.end_life();
        self.engine.changed();
    }

    /// The runtime process starts again and takes stock.
    pub fn come_up(&self, recovery: Recovery) {
        self.engine.events.reset(recovery.replay_events);
        self.engine.new_life();
        self.engine.recover(recovery.lose_exit_codes);
        self.engine.changed();
    }

    /// Down, and up again after `downtime`.
    pub async fn restart(&self, downtime: Duration, recovery: Recovery) {
        self.go_down();
        tokio::time::sleep(downtime).await;
        self.come_up(recovery);
    }

    /// Waits until the ground truth meets a condition, woken by every change.
    pub async fn until(&self, what: &str, limit: Duration, met: impl Fn(&Ledger) -> bool) -> Result<(), Unmet> {
        let mut changes = self.engine.changes();
        let wait = async {
            while !self.ledger(&met) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(limit, wait).await.map_err(|_| Unmet {
            what: what.to_owned(),
            waited: limit,
            history: self.ledger(Ledger::to_string),
        })
    }
}
