//! Handle of the simulated runtime for tests: scripts, faults, exits, restarts, and waiting for conditions.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1;
use tokio::time::Instant;

use super::clock::SimClock;
use super::engine::Engine;
use super::engine::ExecResult;
use super::faults::Faults;
use super::images::Images;
use super::kernel::Kernel;
use super::kernel::KernelFact;
use super::kernel::OomRecord;
use super::options::Options;
use super::program::Exit;
use super::program::Program;
use super::trace::Instance;
use super::trace::Trace;
use super::transport::MemoryEndpoint;
use super::transport::SocketEndpoint;

/// State recovery of a restarted runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Exit codes of containers that exited meanwhile are lost: 255, reason `Unknown`.
    pub lose_exit_codes: bool,
    /// The last events are delivered once more: their number.
    pub replay_events: usize,
}

/// A condition that was not met in time, with the trace.
#[derive(Debug, thiserror::Error)]
#[error("not met within {waited:?}: {what}\n{history}")]
pub struct WaitTimeout {
    /// Description of the condition.
    pub what: String,
    /// Duration of the wait.
    pub waited: Duration,
    /// The trace at that moment.
    pub history: String,
}

/// A handle on one simulated runtime. Clones share it.
#[derive(Clone, Debug)]
pub struct SimRuntime {
    engine: Arc<Engine>,
}

impl SimRuntime {
    /// A running runtime without objects.
    pub fn new(options: Options) -> Self {
        Self { engine: Engine::new(options) }
    }

    /// Serves in memory. All servers share the runtime's state.
    pub fn memory(&self) -> MemoryEndpoint {
        MemoryEndpoint::serve(Arc::clone(&self.engine))
    }

    /// Serves on a unix socket until the endpoint is dropped.
    ///
    /// # Errors
    /// The socket cannot be bound.
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

    /// Reads the trace. Must not block.
    pub fn trace<T>(&self, read: impl FnOnce(&Trace) -> T) -> T {
        read(&self.engine.state().trace)
    }

    /// Changes the active faults.
    pub fn faults<T>(&self, change: impl FnOnce(&mut Faults) -> T) -> T {
        change(&mut self.engine.state().faults)
    }

    /// Changes the stored and published images.
    pub fn images<T>(&self, change: impl FnOnce(&mut Images) -> T) -> T {
        change(&mut self.engine.state().images)
    }

    /// From now on this container runs that program: in one attempt, or in all.
    pub fn script(&self, pod: &str, container: &str, attempt: Option<u32>, program: Program) {
        self.engine.state().scripts.set(pod, container, attempt, program);
    }

    /// Sets the result of ExecSync in this container.
    pub fn script_exec(&self, pod: &str, container: &str, result: ExecResult) {
        self.engine.state().execs.insert((pod.to_owned(), container.to_owned()), result);
    }

    /// Sets the delay between an exit and its report.
    pub fn set_exit_report(&self, delay: Duration) {
        self.engine.state().exit_report = delay;
    }

    /// Delay between an exit and its report.
    pub fn exit_report(&self) -> Duration {
        self.engine.state().exit_report
    }

    /// The runtime reports exits without their codes from now on, as CRI-O does at first.
    pub fn withhold_exit_codes(&self) {
        self.engine.state().withholds_codes = true;
    }

    /// From now on the runtime reports the codes of exits that it has withheld, and withholds no more.
    pub fn learn_exit_codes(&self) {
        self.engine.learn_exit_codes();
    }

    /// Sets a condition of Status, such as `RuntimeReady` or `NetworkReady`.
    pub fn set_condition(&self, kind: &str, status: bool, reason: &str, message: &str) {
        let mut state = self.engine.state();
        state.conditions.retain(|condition| condition.r#type != kind);
        state.conditions.push(v1::RuntimeCondition {
            r#type: kind.to_owned(),
            status,
            reason: reason.to_owned(),
            message: message.to_owned(),
        });
    }

    /// Exits the running instance of a container, and returns it if there is one.
    pub fn kill(&self, pod: &str, container: &str, exit: Exit) -> Option<Instance> {
        let victim = self.trace(|trace| trace.live(pod, container).cloned())?;
        self.engine.exit_process(&victim.id, exit);
        Some(victim)
    }

    /// The runtime does not know the state of a container's running instance any more, as after it could not load it. Returns
    /// the instance if there is one.
    pub fn lose_state(&self, pod: &str, container: &str) -> Option<Instance> {
        let running = self.trace(|trace| trace.live(pod, container).cloned())?;
        if let Some(container) = self.engine.state().store.containers.get_mut(&running.id) {
            container.status.state = v1::ContainerState::ContainerUnknown;
        }
        Some(running)
    }

    /// The OOM killer kills a child of a container's init process; the container keeps running.
    pub fn oom_child(&self, pod: &str, container: &str) -> Option<Instance> {
        let parent = self.trace(|trace| trace.live(pod, container).cloned())?;
        let main = parent.pid;
        self.oom_beside(&parent.id, |pid| main.unwrap_or(pid));
        Some(parent)
    }

    /// The OOM killer kills a process that an exec started in a container; the container keeps running.
    pub fn oom_exec(&self, pod: &str, container: &str) -> Option<Instance> {
        let beside = self.trace(|trace| trace.live(pod, container).cloned())?;
        self.oom_beside(&beside.id, |pid| pid);
        Some(beside)
    }

    fn oom_beside(&self, container_id: &str, root: impl FnOnce(u32) -> u32) {
        let kernel = &self.engine.kernel;
        let pid = kernel.spawn(container_id, "");
        let (container_id, at) = (container_id.to_owned(), Instant::now());
        if let Some(container) = self.engine.state().store.containers.get_mut(&container_id) {
            container.oom_event = true;
        }
        kernel.publish(KernelFact::Oom(OomRecord { pid, container_id, init: false, root: root(pid), at }));
        kernel.gone(pid);
    }

    /// The runtime misses OOM events from now on, and reports exits by SIGKILL with reason `Error`.
    pub fn miss_oom_events(&self) {
        self.engine.state().misses_oom_events = true;
    }

    /// Exits the pause processes of a pod's sandboxes, and returns their number.
    pub fn kill_sandboxes(&self, pod: &str) -> usize {
        let of_pod: Vec<String> = {
            let state = self.engine.state();
            let alive = state.store.sandboxes.values().filter(|s| s.pid.is_some() && s.metadata().name == pod);
            alive.map(|sandbox| sandbox.id.clone()).collect()
        };
        of_pod.iter().for_each(|id| self.engine.kill_sandbox(id));
        of_pod.len()
    }

    /// Whether a container's init process is the init of its own PID namespace.
    pub fn leads_pid_namespace(&self, container_id: &str) -> bool {
        self.engine.state().store.containers.get(container_id).is_some_and(super::store::Container::ns_init)
    }

    /// Statuses of a pod's containers as the runtime would report them now, oldest first; not counted as a call.
    pub fn statuses(&self, pod: &str) -> Vec<v1::ContainerStatus> {
        let state = self.engine.state();
        let of_pod = state.store.sandboxes.values().filter(|sandbox| sandbox.metadata().name == pod);
        let mut statuses: Vec<_> =
            of_pod.flat_map(|sandbox| super::status::containers_of(&state.store, &sandbox.id)).collect();
        statuses.sort_by_key(|status| status.created_at);
        statuses
    }

    /// Statuses of a pod's sandboxes, oldest first; not counted as a call.
    pub fn sandboxes(&self, pod: &str) -> Vec<v1::PodSandboxStatus> {
        let state = self.engine.state();
        let of_pod = state.store.sandboxes.values().filter(|sandbox| sandbox.metadata().name == pod);
        let mut statuses: Vec<_> = of_pod.map(super::status::sandbox).collect();
        statuses.sort_by_key(|status| status.created_at);
        statuses
    }

    /// Configurations that a pod's sandboxes were run with.
    pub fn sandbox_configs(&self, pod: &str) -> Vec<v1::PodSandboxConfig> {
        let state = self.engine.state();
        let of_pod = state.store.sandboxes.values().filter(|sandbox| sandbox.metadata().name == pod);
        of_pod.map(|sandbox| sandbox.config.clone()).collect()
    }

    /// Events lost to a full queue, and events sent to readers.
    pub fn events(&self) -> (u64, u64) {
        (self.engine.events.dropped(), self.engine.events.delivered())
    }

    /// The runtime process is killed: connections break, calls in progress are lost, containers keep running.
    pub fn go_down(&self) {
        self.engine.end_lifetime();
        self.engine.notify_changed();
    }

    /// The runtime process starts again and recovers its state.
    pub fn come_up(&self, recovery: Recovery) {
        self.engine.events.reset(recovery.replay_events);
        self.engine.new_lifetime();
        self.engine.recover(recovery.lose_exit_codes);
        self.engine.notify_changed();
    }

    /// Goes down, and comes up after `downtime`.
    pub async fn restart(&self, downtime: Duration, recovery: Recovery) {
        self.go_down();
        tokio::time::sleep(downtime).await;
        self.come_up(recovery);
    }

    /// Waits until the trace meets a condition. Checked on every change.
    ///
    /// # Errors
    /// The condition was not met within `limit`.
    pub async fn until(&self, what: &str, limit: Duration, met: impl Fn(&Trace) -> bool) -> Result<(), WaitTimeout> {
        let mut changes = self.engine.changes();
        let wait = async {
            while !self.trace(&met) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(limit, wait).await.map_err(|_| WaitTimeout {
            what: what.to_owned(),
            waited: limit,
            history: self.trace(Trace::to_string),
        })
    }
}
