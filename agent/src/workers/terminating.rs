//! A worker's terminating and terminated phases: stops the pod's processes, releases volumes and cgroup, then removes
//! containers and sandboxes.
//!
//! The status says Succeeded or Failed only once no process of the pod runs, and the API object stays until the volumes are
//! released, too. For a pod with a network of its own both wait for the end of its sandbox, which has its address and host
//! ports. A pod on the host's network has neither, so its status and object do not wait for the runtime to tear down the
//! sandbox.

use std::sync::Arc;

use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::act;
use super::act::PodError;
use super::act::StopTerms;
use super::worker::Next;
use super::worker::Worker;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::spec;
use crate::pacing::TeardownPermit;
use crate::pleg;
use crate::pleg::InspectError;
use crate::retry::Operation;

/// A stop in progress. Dropping it abandons the stop.
pub(super) type Stopping = AbortOnDropHandle<Result<(), PodError>>;

impl Worker {
    /// Stops every container and sandbox of the pod (`SyncTerminatingPod`). Runs again on every request until nothing of
    /// it runs.
    pub(super) async fn terminate(&mut self) -> Next {
        self.runtime_ready().await;
        let terms = self.mailbox.state().begin_terminating();
        let pod = self.pod();
        let view = match self.view().await {
            Ok(view) => view,
            Err(error) => return self.inspection_failed(pod.as_ref(), &error),
        };
        if let Some(pod) = &pod {
            self.publish_status(pod, &view, false);
            let reason = self.mailbox.state().termination_reason();
            if let Some(reason) = reason {
                self.context.statuses.set_termination_reason(pod, &reason, self.context.clock.wall());
            }
        }
        if view.running().next().is_none() {
            self.context.act.pacing.teardown.pod_terminated();
        }
        if let Some(pod) = pod.as_ref().filter(|pod| finishes_before_sandbox(pod) && all_exited(&view)) {
            return self.processes_exited(pod, &view).await;
        }
        self.context.pleg.acting(&self.uid).await;
        let killed = match &pod {
            Some(pod) => self.stop(pod, &view, terms).await,
            None => act::kill_orphan(&self.context.act, self.latest(&view)).await.map(|()| None),
        };
        self.acted();
        match (killed, &pod) {
            (Ok(Some(exited)), Some(pod)) => self.processes_exited(pod, &exited).await,
            (Ok(_), pod) => self.verify_stopped(pod.as_ref()).await,
            (Err(error), pod) => {
                if let Some(pod) = pod {
                    self.context.act.report(pod, &error);
                }
                self.retry(Operation::KillPod, &error.to_string())
            }
        }
    }

    /// The runtime has answered every stop: inspects the pod again.
    async fn verify_stopped(&mut self, pod: Option<&Pod>) -> Next {
        match (self.view().await, pod) {
            (Ok(after), _) if after.running().next().is_some() => {
                let running = after.running().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
                self.retry(Operation::KillPod, &format!("containers run after the pod was killed: {running}"))
            }
            (Ok(after), Some(pod)) if finishes_before_sandbox(pod) => self.processes_exited(pod, &after).await,
            (Ok(after), pod) => self.sandbox_stopped(pod, &after).await,
            (Err(error), pod) => self.inspection_failed(pod, &error),
        }
    }

    fn inspection_failed(&mut self, pod: Option<&Pod>, error: &InspectError) -> Next {
        match pod {
            Some(pod) => self.failed_sync(pod, error),
            None => self.retry(Operation::KillPod, &error.to_string()),
        }
    }

    /// Stops the pod. Returns a snapshot before the runtime has answered if all containers have exited and the pod's
    /// object does not wait for its sandbox.
    async fn stop(
        &mut self,
        pod: &Pod,
        view: &Arc<PodSnapshot>,
        mut terms: StopTerms,
    ) -> Result<Option<Arc<PodSnapshot>>, PodError> {
        loop {
            let mut stopping = self.spawn_stop(pod, view, terms);
            tokio::select! {
                stopped = &mut stopping => {
                    return stopped.unwrap_or_else(|source| Err(PodError::StopTask { source })).map(|()| None);
                }
                exited = self.all_containers_exited(), if finishes_before_sandbox(pod) => {
                    // It keeps its permit until the runtime has removed the tasks of exited containers.
                    self.stopping = Some(stopping);
                    return Ok(Some(exited));
                }
                // A shorter grace period does not wait for the longer one.
                changed = self.changed_terms(terms) => terms = changed,
            }
        }
    }

    /// Stops the pod, or its containers alone if nothing waits for its sandbox.
    fn spawn_stop(&self, pod: &Pod, view: &Arc<PodSnapshot>, terms: StopTerms) -> Stopping {
        let (context, pod, latest) = (self.context.clone(), pod.clone(), self.latest(view));
        let awaited = spec::deletion_requested(&pod) || self.mailbox.state().is_awaited();
        let stop = async move {
            if finishes_before_sandbox(&pod) {
                return act::stop_containers(&context.act, &pod, latest, terms).await;
            }
            let permit = match awaited || terms.immediately || latest().running().next().is_some() {
                true => None,
                false => context.act.pacing.teardown.permit().await,
            };
            act::terminate_pod(&context.act, &pod, latest, terms, permit).await
        };
        AbortOnDropHandle::new(tokio::spawn(stop.in_current_span()))
    }

    /// The newest snapshot whenever it is called, at least `view`.
    fn latest(&self, view: &Arc<PodSnapshot>) -> impl Fn() -> Arc<PodSnapshot> + Send + use<> {
        let (pleg, uid, view) = (self.context.pleg.clone(), self.uid.clone(), view.clone());
        move || pleg.cached(&uid).unwrap_or_else(|| view.clone())
    }

    /// The terms of the stop, as soon as they differ from these.
    async fn changed_terms(&self, terms: StopTerms) -> StopTerms {
        loop {
            self.mailbox.cancelled().await;
            let now = self.mailbox.state().begin_terminating();
            if now != terms {
                return now;
            }
        }
    }

    /// Waits until the kernel or the runtime has reported the exit of every container.
    async fn all_containers_exited(&self) -> Arc<PodSnapshot> {
        loop {
            if let Some(view) = self.context.pleg.cached(&self.uid).filter(|view| all_exited(view)) {
                return view;
            }
            self.mailbox.woken().await;
        }
    }

    /// No process of the pod is left, and its API object does not wait for its sandbox.
    async fn processes_exited(&mut self, pod: &Pod, last: &PodSnapshot) -> Next {
        let last = Arc::new(pleg::with_termination_messages(last).await);
        self.publish_status(pod, &last, true);
        self.exited = Some(last);
        self.mailbox.state().terminating_done();
        Next::Phase
    }

    async fn sandbox_stopped(&mut self, pod: Option<&Pod>, after: &Arc<PodSnapshot>) -> Next {
        if let Some(pod) = pod {
            self.publish_status(pod, after, true);
        } else {
            self.context.statuses.stopped(&self.uid, self.context.clock.wall());
            self.remove_content().await;
        }
        self.mailbox.state().terminating_done();
        Next::Phase
    }

    /// Releases volumes and cgroup, and removes the pod's containers if it is deleted or evicted (`SyncTerminatedPod`).
    pub(super) async fn clean_up(&mut self) -> Next {
        let Some(pod) = self.pod() else {
            self.mailbox.state().terminated_done();
            return Next::Phase;
        };
        let last = match self.exited.clone() {
            Some(exited) => Ok(exited),
            None => self.view().await,
        };
        let last = match last {
            Ok(last) => last,
            Err(error) => return self.failed_sync(&pod, &error),
        };
        self.publish_status(&pod, &last, true);
        let released = match last.sandboxes.iter().any(|sandbox| sandbox.ready) {
            // The sandbox is still in the cgroup, which is removed with it.
            true => act::release_volumes(&self.context.act, &pod).await,
            false => act::cleanup_pod(&self.context.act, &pod).await,
        };
        if let Err(error) = released {
            return self.retry(Operation::ReleasePod, &error.to_string());
        }
        self.context.statuses.terminate(&pod, self.context.clock.wall());
        if let Some(full_name) = self.static_full_name() {
            self.context.static_pod_starts.release(&full_name, &self.uid);
        }
        if self.mailbox.state().content_may_be_removed() {
            self.delay_removal().await;
            self.remove_content().await;
        } else if let Some(next) = self.tear_down_sandbox(&pod, &last).await {
            return next;
        }
        self.mailbox.state().terminated_done();
        Next::Phase
    }

    /// Stops the sandbox of a finished pod that is not deleted, and its cgroup. Returns what to do next if the pod is not
    /// finished with that.
    async fn tear_down_sandbox(&mut self, pod: &Pod, last: &Arc<PodSnapshot>) -> Option<Next> {
        if last.sandboxes.iter().any(|sandbox| sandbox.ready) {
            let permit = self.teardown_permit().await;
            if self.context.shutdown.is_cancelled() {
                return Some(Next::Wait(None));
            }
            self.join_stop().await;
            self.context.pleg.acting(&self.uid).await;
            let terms = StopTerms::default();
            let mut stopped = act::terminate_pod(&self.context.act, pod, self.latest(last), terms, permit).await;
            self.acted();
            if stopped.is_ok() {
                stopped = act::cleanup_pod(&self.context.act, pod).await;
            }
            if let Err(error) = stopped {
                return Some(self.retry(Operation::KillPod, &error.to_string()));
            }
        }
        if let Ok(view) = self.view().await {
            // By now the runtime may report more of the exited containers.
            self.publish_status(pod, &view, true);
            // What cannot be removed now is removed with the pod.
            self.collect_garbage(&view).await;
        }
        None
    }

    /// Waits for an idle node, unless something waits for the pod to be finished.
    async fn teardown_permit(&self) -> Option<TeardownPermit> {
        let awaited = async {
            while !self.mailbox.state().is_awaited() {
                self.mailbox.woken().await;
            }
        };
        tokio::select! {
            biased;
            () = awaited => None,
            () = self.context.shutdown.cancelled() => None,
            permit = self.context.act.pacing.teardown.permit_when_idle() => permit,
        }
    }

    /// Lets pods that are still terminating go first, unless this pod is to be started again.
    async fn delay_removal(&self) {
        let restart_requested = async {
            while !self.mailbox.state().restart_requested() {
                self.mailbox.woken().await;
            }
        };
        tokio::select! {
            () = restart_requested => {}
            () = self.context.shutdown.cancelled() => {}
            () = self.context.act.pacing.teardown.idle_node() => {}
        }
    }

    /// Waits for a stop in progress: its result changes nothing once every container has exited, but calls to the runtime
    /// for one pod are not to overlap.
    async fn join_stop(&mut self) {
        if let Some(stopping) = self.stopping.take() {
            let _ = stopping.await;
            self.acted();
        }
    }

    /// Removes exited containers, sandboxes, logs and directories of a deleted pod. Housekeeping finds what fails again.
    async fn remove_content(&mut self) {
        self.join_stop().await;
        let failed = match self.view().await {
            Ok(view) => {
                self.context.pleg.acting(&self.uid).await;
                act::joined(&act::remove_content(&self.context.act, &view).await)
            }
            Err(error) => error.to_string(),
        };
        let target = self.pod_ref().with_uid();
        if failed.is_empty() {
            self.context.retries.succeeded(Operation::RemovePod, &target);
        } else {
            // Housekeeping starts another worker for what is left, once the retry is due.
            self.context.retries.failed(Operation::RemovePod, &target, &failed);
        }
        self.acted();
        if let Err(error) = self.context.pleg.inspect(&self.uid).await {
            tracing::debug!(pod = %self.pod_ref(), %error, "cannot inspect the removed pod");
        }
    }
}

/// True if the pod's status and API object do not wait for its sandbox: it has no address or host port of its own, and no
/// process outlives the init process of its container.
fn finishes_before_sandbox(pod: &Pod) -> bool {
    spec::host_network(pod) && !spec::shares_pid_namespace(pod)
}

/// True if every container has exited with a known exit code.
fn all_exited(view: &PodSnapshot) -> bool {
    view.containers.iter().all(|c| c.state == ContainerState::Exited && c.exit_code.is_some())
}
