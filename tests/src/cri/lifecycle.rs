//! Process lifecycle of containers, and when the runtime reports it.
//!
//! Order of an exit: the process exits (kernel record), its pidfd becomes readable, and after the runtime's own delay
//! the container state becomes Exited and the STOPPED event is sent. The delayed report is lost when the runtime
//! restarts; processes are not.

use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1::ContainerEventType::ContainerStartedEvent;
use keblet_proto::cri::v1::ContainerEventType::ContainerStoppedEvent;
use keblet_proto::cri::v1::ContainerState::ContainerCreated;
use keblet_proto::cri::v1::ContainerState::ContainerExited;
use keblet_proto::cri::v1::ContainerState::ContainerRunning;
use keblet_proto::cri::v1::ContainerState::ContainerUnknown;
use keblet_proto::cri::v1::NamespaceMode;
use tokio::time::Instant;

use super::engine::Engine;
use super::kernel::ExitRecord;
use super::kernel::KernelFact;
use super::kernel::OomRecord;
use super::program::Exit;
use super::program::OnTerm;
use super::store::Process;
use super::store::ReportedStatus;

/// Exit code of a container whose exit the runtime missed.
const UNKNOWN_EXIT_CODE: i32 = 255;
/// What CRI-O reports until it has read the code that its monitor of the container has written.
const WITHHELD_EXIT_CODE: i32 = -1;
/// Exit code of a container that could not be started.
const START_ERROR_CODE: i32 = 128;

impl Engine {
    /// Starts a container's process. The error is the program's scripted start error.
    pub(super) fn spawn_process(self: &Arc<Self>, id: &str) -> Result<(), String> {
        let ends = {
            let mut state = self.state();
            let Some(container) = state.store.containers.get_mut(id) else { return Ok(()) };
            if let Some(refusal) = container.program.start_error.clone() {
                return Err(refusal);
            }
            let pid = self.kernel.spawn(id, &container.cgroup);
            container.process = Some(Process { pid, exit: None });
            let ends = container.program.ends;
            state.trace.record_started(id, pid);
            ends
        };
        if let Some((after, exit)) = ends {
            self.schedule_exit(id, after, exit);
        }
        self.notify_changed();
        Ok(())
    }

    /// Reports a started container as running.
    pub(super) fn confirm_start(self: &Arc<Self>, id: &str) {
        let sandbox_id = {
            let mut state = self.state();
            let Some(container) = state.store.containers.get_mut(id) else { return };
            let Some(process) = &container.process else { return };
            container.starting = false;
            container.status.state = ContainerRunning;
            container.status.pid = process.pid;
            container.status.started_at = self.clock.now_ns();
            container.sandbox_id.clone()
        };
        self.emit(ContainerStartedEvent, id, &sandbox_id);
        self.schedule_exit_report(id);
        self.notify_changed();
    }

    /// Records a failed start, for which the runtime sends no event.
    pub(super) fn record_start_error(&self, id: &str, message: &str) {
        let mut state = self.state();
        if let Some(container) = state.store.containers.get_mut(id) {
            container.starting = false;
            container.status = ReportedStatus {
                state: ContainerExited,
                pid: 0,
                finished_at: self.clock.now_ns(),
                exit_code: START_ERROR_CODE,
                reason: "StartError".to_owned(),
                message: message.to_owned(),
                ..container.status.clone()
            };
            container.stopped.cancel();
        }
    }

    /// Exits a container's init process now. No effect unless it is running.
    pub(super) fn exit_process(self: &Arc<Self>, id: &str, exit: Exit) {
        let (pid, ns_init, children) = {
            let mut state = self.state();
            let Some(container) = state.store.containers.get_mut(id) else { return };
            let (ns_init, children) = (container.ns_init(), container.program.leaves_children);
            let Some(process) = container.process.as_mut().filter(|process| process.exit.is_none()) else { return };
            process.exit = Some((exit, self.clock.now_ns()));
            let pid = process.pid;
            state.trace.record_exited(id, exit);
            (pid, ns_init, children)
        };
        let at = Instant::now();
        if exit == Exit::Oom {
            let container_id = id.to_owned();
            self.kernel.publish(KernelFact::Oom(OomRecord { pid, container_id, init: true, root: pid, at }));
        }
        self.kernel.publish(KernelFact::Exit(ExitRecord { pid, container_id: id.to_owned(), exit, at, ns_init }));
        let (engine, id_gone) = (Arc::clone(self), id.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(engine.kernel.to_gone()).await;
            engine.kernel.gone(pid);
            if ns_init || !children {
                engine.state().trace.record_gone(&id_gone);
            }
            engine.notify_changed();
        });
        self.schedule_exit_report(id);
        self.notify_changed();
    }

    /// Exits a container's init process after a delay.
    pub(super) fn schedule_exit(self: &Arc<Self>, id: &str, after: Duration, exit: Exit) {
        let (engine, id) = (Arc::clone(self), id.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            engine.exit_process(&id, exit);
        });
    }

    /// Delivers the stop signal.
    pub(super) fn deliver_stop_signal(self: &Arc<Self>, id: &str) {
        let reaction = self.state().store.containers.get(id).map(|container| container.program.on_term);
        if let Some(OnTerm::Ends(after, exit)) = reaction {
            self.schedule_exit(id, after, exit);
        }
    }

    /// Schedules the report of an exited container that the runtime still reports as running.
    fn schedule_exit_report(self: &Arc<Self>, id: &str) {
        let delay = {
            let state = self.state();
            let Some(container) = state.store.containers.get(id) else { return };
            let Some((_, exited_at)) = container.process.as_ref().and_then(|process| process.exit) else { return };
            let waited = u64::try_from(self.clock.now_ns() - exited_at).unwrap_or(0);
            state.exit_report.saturating_sub(Duration::from_nanos(waited))
        };
        let (engine, id, delay) = (Arc::clone(self), id.to_owned(), self.jittered(delay));
        self.in_background(async move {
            tokio::time::sleep(delay).await;
            if engine.report_exit(&id, None) {
                engine.emit_stopped(&id);
            }
        });
    }

    /// Records a container's exit in the runtime: as it happened, or with an unknown exit code and this reason. Returns
    /// whether the state changed.
    pub(super) fn report_exit(&self, id: &str, exit_code_lost: Option<&str>) -> bool {
        let mut state = self.state();
        let (misses_oom_events, withholds_codes) = (state.misses_oom_events, state.withholds_codes);
        let Some(container) = state.store.containers.get_mut(id) else { return false };
        let reported_running = matches!(container.status.state, ContainerRunning | ContainerUnknown);
        let Some((exit, exited_at)) = container.process.as_ref().and_then(|process| process.exit) else { return false };
        if container.starting || !reported_running {
            return false;
        }
        let status = &mut container.status;
        (status.state, status.pid) = (ContainerExited, 0);
        match exit_code_lost {
            Some(reason) => {
                (status.exit_code, status.finished_at) = (UNKNOWN_EXIT_CODE, self.clock.now_ns());
                reason.clone_into(&mut status.reason);
            }
            None => {
                let code = if withholds_codes { WITHHELD_EXIT_CODE } else { exit.code() };
                (status.exit_code, status.finished_at) = (code, exited_at);
                let has_oom_event = (exit == Exit::Oom || container.oom_event) && !misses_oom_events;
                status.reason = match exit {
                    _ if has_oom_event => "OOMKilled".to_owned(),
                    Exit::Oom => "Error".to_owned(),
                    _ => String::new(),
                };
            }
        }
        container.stopped.cancel();
        state.trace.record_reported(id);
        state.trace.record_gone(id);
        drop(state);
        self.notify_changed();
        true
    }

    /// From now on the runtime reports the codes of exits that it has reported without.
    pub(super) fn learn_exit_codes(&self) {
        let mut state = self.state();
        state.withholds_codes = false;
        for container in state.store.containers.values_mut() {
            if container.status.exit_code == WITHHELD_EXIT_CODE
                && let Some((exit, _)) = container.process.as_ref().and_then(|process| process.exit)
            {
                container.status.exit_code = exit.code();
            }
        }
    }

    fn emit_stopped(self: &Arc<Self>, id: &str) {
        let sandbox_id = self.state().store.containers.get(id).map(|container| container.sandbox_id.clone());
        if let Some(sandbox_id) = sandbox_id {
            self.emit(ContainerStoppedEvent, id, &sandbox_id);
        }
    }

    /// Exits a sandbox's pause process now, and with it the containers that share its PID namespace; the runtime
    /// reports it later.
    pub(super) fn kill_sandbox(self: &Arc<Self>, id: &str) {
        let pid = match self.state().store.sandboxes.get_mut(id) {
            Some(sandbox) => sandbox.pid.take(),
            None => None,
        };
        let Some(pid) = pid else { return };
        for container in self.sharing_pid_namespace(id) {
            self.exit_process(&container, Exit::Signal(9));
        }
        let at = Instant::now();
        let exit = Exit::Signal(9);
        let record = ExitRecord { pid, container_id: id.to_owned(), exit, at, ns_init: true };
        self.kernel.publish(KernelFact::Exit(record));
        let engine = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(engine.kernel.to_gone()).await;
            engine.kernel.gone(pid);
        });
        let delay = self.state().exit_report;
        let (engine, id, delay) = (Arc::clone(self), id.to_owned(), self.jittered(delay));
        self.in_background(async move {
            tokio::time::sleep(delay).await;
            if engine.report_sandbox_exit(&id) {
                engine.emit(ContainerStoppedEvent, &id, &id);
            }
        });
        self.notify_changed();
    }

    fn sharing_pid_namespace(&self, sandbox_id: &str) -> Vec<String> {
        let state = self.state();
        let shares = |id: &String| state.store.containers.get(id).is_some_and(|c| c.pid_mode == NamespaceMode::Pod);
        state.store.containers_of(sandbox_id).into_iter().filter(shares).collect()
    }

    /// Records a sandbox's exit in the runtime. Returns whether the state changed.
    pub(super) fn report_sandbox_exit(&self, id: &str) -> bool {
        let mut state = self.state();
        let Some(sandbox) = state.store.sandboxes.get_mut(id) else { return false };
        if !sandbox.ready || sandbox.pid.is_some() {
            return false;
        }
        sandbox.ready = false;
        sandbox.stopped.cancel();
        drop(state);
        self.notify_changed();
        true
    }

    /// Recovers state when the runtime process starts: interrupted starts and missed exits. No events are sent for
    /// them. With `exit_code_lost` the exit codes of missed exits are unknown.
    pub(super) fn recover(self: &Arc<Self>, exit_code_lost: bool) {
        let (containers, sandboxes) = {
            let mut state = self.state();
            state.store.rebuild_names();
            for container in state.store.containers.values_mut() {
                (container.starting, container.removing) = (false, false);
                if container.status.state == ContainerCreated
                    && let Some(process) = &container.process
                {
                    container.status.state = ContainerRunning;
                    container.status.pid = process.pid;
                    container.status.started_at = self.clock.now_ns();
                }
            }
            let containers: Vec<String> = state.store.containers.keys().cloned().collect();
            let sandboxes: Vec<String> = state.store.sandboxes.keys().cloned().collect();
            (containers, sandboxes)
        };
        for id in containers {
            self.report_exit(&id, exit_code_lost.then_some("Unknown"));
        }
        for id in sandboxes {
            self.report_sandbox_exit(&id);
        }
    }
}
