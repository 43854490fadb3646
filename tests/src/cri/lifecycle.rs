//! What truly happens to containers, and when the runtime notices.
//!
//! The order of a death: the process exits (kernel record), is gone a moment later, and only after the runtime's
//! own delay is the container buried: state Exited, then the STOPPED event. A burial belongs to one life of the
//! runtime; processes do not.

use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1::ContainerEventType::{ContainerStartedEvent, ContainerStoppedEvent};
use keblet_proto::cri::v1::ContainerState::{ContainerCreated, ContainerExited, ContainerRunning, ContainerUnknown};
use keblet_proto::cri::v1::NamespaceMode;
use tokio::time::Instant;

use super::engine::Engine;
use super::kernel::{ExitRecord, KernelFact, OomRecord};
use super::program::{Exit, OnTerm};
use super::store::{Belief, Process};

/// Exit code of a container whose end the runtime did not see.
const UNSEEN_EXIT_CODE: i32 = 255;
/// Exit code of a container that could not be started.
const START_ERROR_CODE: i32 = 128;

impl Engine {
    /// Brings a container's process to life. The error is its program's refusal to start.
    pub(super) fn begin(self: &Arc<Self>, id: &str) -> Result<(), String> {
        let ends = {
            let mut world = self.world();
            let Some(container) = world.store.containers.get_mut(id) else { return Ok(()) };
            if let Some(refusal) = container.program.start_error.clone() {
                return Err(refusal);
            }
            let pid = self.kernel.spawn(id, &container.cgroup);
            container.process = Some(Process { pid, dead: None });
            let ends = container.program.ends;
            world.ledger.record_started(id, pid);
            ends
        };
        if let Some((after, exit)) = ends {
            self.die_later(id, after, exit);
        }
        self.changed();
        Ok(())
    }

    /// The runtime notices that a container it started runs.
    pub(super) fn confirm_start(self: &Arc<Self>, id: &str) {
        let sandbox_id = {
            let mut world = self.world();
            let Some(container) = world.store.containers.get_mut(id) else { return };
            let Some(process) = &container.process else { return };
            container.starting = false;
            container.status.state = ContainerRunning;
            container.status.pid = process.pid;
            container.status.started_at = self.clock.now_ns();
            container.sandbox_id.clone()
        };
        self.emit(ContainerStartedEvent, id, &sandbox_id);
        self.bury_later(id);
        self.changed();
    }

    /// The runtime notes a failed start. It sends no event for it.
    pub(super) fn record_start_error(&self, id: &str, message: &str) {
        let mut world = self.world();
        if let Some(container) = world.store.containers.get_mut(id) {
            container.starting = false;
            container.status = Belief {
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

    /// A container's init process dies now. No effect unless it is alive.
    pub(super) fn die(self: &Arc<Self>, id: &str, exit: Exit) {
        let (pid, ns_init, children) = {
            let mut world = self.world();
            let Some(container) = world.store.containers.get_mut(id) else { return };
            let (ns_init, children) = (container.ns_init(), container.program.leaves_children);
            let Some(process) = container.process.as_mut().filter(|process| process.dead.is_none()) else { return };
            process.dead = Some((exit, self.clock.now_ns()));
            let pid = process.pid;
            world.ledger.record_exited(id, exit);
            (pid, ns_init, children)
        };
        let at = Instant::now();
        if exit == Exit::Oom {
            self.kernel.publish(KernelFact::Oom(OomRecord { pid, container_id: id.to_owned(), init: true, at }));
        }
        self.kernel.publish(KernelFact::Exit(ExitRecord { pid, container_id: id.to_owned(), exit, at, ns_init }));
        let (engine, id_gone) = (Arc::clone(self), id.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(engine.kernel.to_gone()).await;
            engine.kernel.gone(pid);
            if ns_init || !children {
                engine.world().ledger.record_gone(&id_gone);
            }
            engine.changed();
        });
        self.bury_later(id);
        self.changed();
    }

    /// A container's init process dies after a while, if it is the same life by then.
    pub(super) fn die_later(self: &Arc<Self>, id: &str, after: Duration, exit: Exit) {
        let (engine, id) = (Arc::clone(self), id.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            engine.die(&id, exit);
        });
    }

    /// The stop signal arrives.
    pub(super) fn terminate(self: &Arc<Self>, id: &str) {
        let reaction = self.world().store.containers.get(id).map(|container| container.program.on_term);
        if let Some(OnTerm::Ends(after, exit)) = reaction {
            self.die_later(id, after, exit);
        }
    }

    /// Schedules the burial of a dead container the runtime believes running.
    fn bury_later(self: &Arc<Self>, id: &str) {
        let delay = {
            let world = self.world();
            let Some(container) = world.store.containers.get(id) else { return };
            let Some((_, died)) = container.process.as_ref().and_then(|process| process.dead) else { return };
            let waited = u64::try_from(self.clock.now_ns() - died).unwrap_or(0);
            world.exit_report.saturating_sub(Duration::from_nanos(waited))
        };
        let (engine, id, delay) = (Arc::clone(self), id.to_owned(), self.vary(delay));
        self.in_background(async move {
            tokio::time::sleep(delay).await;
            if engine.bury(&id, None) {
                engine.announce_stop(&id);
            }
        });
    }

    /// The runtime records a container's end: as it was, or `unseen` for this reason. Says whether it was news.
    pub(super) fn bury(&self, id: &str, unseen: Option<&str>) -> bool {
        let mut world = self.world();
        let Some(container) = world.store.containers.get_mut(id) else { return false };
        let believed_alive = matches!(container.status.state, ContainerRunning | ContainerUnknown);
        let Some((exit, died)) = container.process.as_ref().and_then(|process| process.dead) else { return false };
        if container.starting || !believed_alive {
            return false;
        }
        let status = &mut container.status;
        (status.state, status.pid) = (ContainerExited, 0);
        match unseen {
            Some(reason) => {
                (status.exit_code, status.finished_at) = (UNSEEN_EXIT_CODE, self.clock.now_ns());
                reason.clone_into(&mut status.reason);
            }
            None => {
                (status.exit_code, status.finished_at) = (exit.code(), died);
                status.reason = if exit == Exit::Oom { "OOMKilled".to_owned() } else { String::new() };
            }
        }
        container.stopped.cancel();
        world.ledger.record_reported(id);
        world.ledger.record_gone(id);
        drop(world);
        self.changed();
        true
    }

    fn announce_stop(self: &Arc<Self>, id: &str) {
        let sandbox_id = self.world().store.containers.get(id).map(|container| container.sandbox_id.clone());
        if let Some(sandbox_id) = sandbox_id {
            self.emit(ContainerStoppedEvent, id, &sandbox_id);
        }
    }

    /// A sandbox' pause process dies now, and with it those who share its PID namespace; the runtime notices later.
    pub(super) fn kill_sandbox(self: &Arc<Self>, id: &str) {
        let pid = match self.world().store.sandboxes.get_mut(id) {
            Some(sandbox) => sandbox.pid.take(),
            None => None,
        };
        let Some(pid) = pid else { return };
        for container in self.sharing_pid_namespace(id) {
            self.die(&container, Exit::Signal(9));
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
        let delay = self.world().exit_report;
        let (engine, id, delay) = (Arc::clone(self), id.to_owned(), self.vary(delay));
        self.in_background(async move {
            tokio::time::sleep(delay).await;
            if engine.bury_sandbox(&id) {
                engine.emit(ContainerStoppedEvent, &id, &id);
            }
        });
        self.changed();
    }

    fn sharing_pid_namespace(&self, sandbox_id: &str) -> Vec<String> {
        let world = self.world();
        let shares = |id: &String| world.store.containers.get(id).is_some_and(|c| c.pid_mode == NamespaceMode::Pod);
        world.store.containers_of(sandbox_id).into_iter().filter(shares).collect()
    }

    /// The runtime records a sandbox' end. Says whether it was news.
    pub(super) fn bury_sandbox(&self, id: &str) -> bool {
        let mut world = self.world();
        let Some(sandbox) = world.store.sandboxes.get_mut(id) else { return false };
        if !sandbox.ready || sandbox.pid.is_some() {
            return false;
        }
        sandbox.ready = false;
        sandbox.stopped.cancel();
        drop(world);
        self.changed();
        true
    }

    /// What a new runtime process makes of what it finds: starts cut off midway, deaths it slept through. It sends
    /// no events for any of it. `unseen` deaths are those whose exit code is lost.
    pub(super) fn recover(self: &Arc<Self>, unseen: bool) {
        let (containers, sandboxes) = {
            let mut world = self.world();
            world.store.rebuild_names();
            for container in world.store.containers.values_mut() {
                (container.starting, container.removing) = (false, false);
                if container.status.state == ContainerCreated
                    && let Some(process) = &container.process
                {
                    container.status.state = ContainerRunning;
                    container.status.pid = process.pid;
                    container.status.started_at = self.clock.now_ns();
                }
            }
            let containers: Vec<String> = world.store.containers.keys().cloned().collect();
            let sandboxes: Vec<String> = world.store.sandboxes.keys().cloned().collect();
            (containers, sandboxes)
        };
        for id in containers {
            self.bury(&id, unseen.then_some("Unknown"));
        }
        for id in sandboxes {
            self.bury_sandbox(&id);
        }
    }
}
