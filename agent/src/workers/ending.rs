//! The end of a pod: its processes, then what it holds, then its API object; its remains last.
//!
//! A pod is not told to have succeeded or failed while a process of it runs, and its API object waits until its volumes
//! are released, too. If the pod has a network of its own, both wait for the end of the sandbox: until then its address
//! is taken and its host ports lead to it. A pod on the host's network holds neither, so nobody need wait for the runtime
//! to bury its dead.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::sleep;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::act;
use super::worker::Next;
use super::worker::Worker;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::spec;
use crate::pleg;
use crate::pleg::InspectError;
use crate::recorder::EventType;

/// The remains of a pod that is over stay this long at least.
const REMAINS_DELAY: Duration = Duration::from_secs(1);

/// What is left of a pod that is over waits no longer than this for a quiet node.
const BURIAL_PATIENCE: Duration = Duration::from_secs(5);
/// A sandbox whose end is a condition for the pod's waits no longer than this for its turn.
const OTHERS_PATIENCE: Duration = Duration::from_secs(1);

/// A stop under way.
pub(super) type Stopping = AbortOnDropHandle<Result<(), String>>;

impl Worker {
    /// Stops every container and sandbox of the pod. Runs again on every request until nothing is left running.
    pub(super) async fn terminate(&mut self) -> Next {
        self.runtime_ready().await;
        let grace = self.mailbox.state().begin_terminating();
        let pod = self.pod();
        let view = match self.view().await {
            Ok(view) => view,
            Err(error) => return self.unseen(pod.as_ref(), &error),
        };
        if let Some(pod) = &pod {
            self.publish_status(pod, &view, false);
            let ending = self.mailbox.state().ending();
            if let Some(ending) = ending {
                self.context.statuses.set_termination_reason(pod, &ending, self.context.clock.wall());
            }
        }
        if view.running().next().is_none() {
            self.context.burials.ended();
        }
        if let Some(pod) = pod.as_ref().filter(|pod| leaves_early(pod) && all_ended(&view)) {
            return self.left(pod, &view).await;
        }
        self.context.pleg.acting(&self.uid).await;
        let killed = match &pod {
            Some(pod) => self.stop(pod, &view, grace).await,
            None => act::kill_orphan(&self.context.act, self.newest(&view)).await.map(|()| None),
        };
        self.acted();
        match (killed, &pod) {
            (Ok(Some(gone)), Some(pod)) => self.left(pod, &gone).await,
            (Ok(_), pod) => self.look_after_stop(pod.as_ref()).await,
            (Err(error), pod) => {
                if let Some(pod) = pod {
                    self.context.recorder.pod_event(pod, "", EventType::Warning, "FailedKillPod", &error);
                }
                tracing::warn!(pod = %self.pod_ref(), %error, "the pod is to be killed again");
                self.retry(false)
            }
        }
    }

    /// The runtime was asked to stop everything and says it has.
    async fn look_after_stop(&mut self, pod: Option<&Pod>) -> Next {
        match (self.view().await, pod) {
            (Ok(after), _) if after.running().next().is_some() => {
                let left = after.running().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
                tracing::warn!(pod = %self.pod_ref(), left, "containers still run after the pod was killed");
                self.retry(false)
            }
            (Ok(after), Some(pod)) if leaves_early(pod) => self.left(pod, &after).await,
            (Ok(after), pod) => self.stopped(pod, &after).await,
            (Err(error), pod) => self.unseen(pod, &error),
        }
    }

    fn unseen(&self, pod: Option<&Pod>, error: &InspectError) -> Next {
        match pod {
            Some(pod) => self.failed_sync(pod, error),
            None => self.retry(false),
        }
    }

    /// Stops the pod. Returns before the runtime has done so, with what was seen last, if nothing of the pod runs any more
    /// and its object need not wait for the rest.
    async fn stop(
        &mut self,
        pod: &Pod,
        view: &Arc<PodSnapshot>,
        mut grace: Option<i64>,
    ) -> Result<Option<Arc<PodSnapshot>>, String> {
        loop {
            let mut stopping = self.stopping(pod, view, grace);
            tokio::select! {
                stopped = &mut stopping => {
                    return stopped.unwrap_or_else(|error| Err(format!("stopping the pod: {error}"))).map(|()| None);
                }
                gone = self.all_gone(), if leaves_early(pod) => {
                    // It keeps its turn until the runtime has buried what is dead.
                    self.stopping = Some(stopping);
                    return Ok(Some(gone));
                }
                // Who is in more of a hurry meanwhile need not wait for the grace that was given first.
                shorter = self.shortened(grace) => grace = shorter,
            }
        }
    }

    /// Stops the pod, or its containers alone if the rest is not waited for. Given up when dropped.
    fn stopping(&self, pod: &Pod, view: &Arc<PodSnapshot>, grace: Option<i64>) -> Stopping {
        let (context, pod, newest) = (self.context.clone(), pod.clone(), self.newest(view));
        let awaited = spec::deletion_requested(&pod) || self.mailbox.state().is_awaited();
        let stop = async move {
            if leaves_early(&pod) {
                return act::stop_containers(&context.act, &pod, newest, grace).await;
            }
            let turn = match awaited || newest().running().next().is_some() {
                true => None,
                false => timeout(OTHERS_PATIENCE, context.burials.turn()).await.ok().flatten(),
            };
            act::terminate_pod(&context.act, &pod, newest, grace, turn).await
        };
        AbortOnDropHandle::new(tokio::spawn(stop.in_current_span()))
    }

    /// What is known of the pod when that is asked: at least `view`, and what has died since.
    fn newest(&self, view: &Arc<PodSnapshot>) -> impl Fn() -> Arc<PodSnapshot> + Send + use<> {
        let (pleg, uid, view) = (self.context.pleg.clone(), self.uid.clone(), view.clone());
        move || pleg.cached(&uid).unwrap_or_else(|| view.clone())
    }

    /// The grace period, as soon as it is another one than this.
    async fn shortened(&self, grace: Option<i64>) -> Option<i64> {
        loop {
            self.mailbox.cancelled().await;
            let now = self.mailbox.state().begin_terminating();
            if now != grace {
                return now;
            }
        }
    }

    /// Waits until the kernel or the runtime has told the end of every container.
    async fn all_gone(&self) -> Arc<PodSnapshot> {
        loop {
            if let Some(view) = self.context.pleg.cached(&self.uid).filter(|view| all_ended(view)) {
                return view;
            }
            self.mailbox.woken().await;
        }
    }

    /// No process of the pod is left, and its object need not wait for the rest.
    async fn left(&mut self, pod: &Pod, gone: &PodSnapshot) -> Next {
        let told = Arc::new(pleg::with_termination_messages(gone).await);
        self.publish_status(pod, &told, true);
        self.gone = Some(told);
        self.mailbox.state().terminating_done();
        Next::Phase
    }

    async fn stopped(&mut self, pod: Option<&Pod>, after: &Arc<PodSnapshot>) -> Next {
        if let Some(pod) = pod {
            self.publish_status(pod, after, true);
        } else {
            self.context.statuses.stopped(&self.uid, self.context.clock.wall());
            self.remove_content().await;
        }
        self.mailbox.state().terminating_done();
        Next::Phase
    }

    /// Releases volumes and cgroup, frees the name, and removes what is left if nobody wants to see it.
    pub(super) async fn clean_up(&mut self) -> Next {
        let Some(pod) = self.pod() else {
            self.mailbox.state().terminated_done();
            return Next::Phase;
        };
        let last = match self.gone.clone() {
            Some(gone) => Ok(gone),
            None => self.view().await,
        };
        let last = match last {
            Ok(last) => last,
            Err(error) => return self.failed_sync(&pod, &error),
        };
        self.publish_status(&pod, &last, true);
        let released = match last.sandboxes.iter().any(|sandbox| sandbox.ready) {
            // It is still in the cgroup, which goes with it.
            true => act::release_volumes(&self.context.act, &pod).await,
            false => act::cleanup_pod(&self.context.act, &pod).await,
        };
        if let Err(error) = released {
            tracing::warn!(pod = %self.pod_ref(), %error, "releasing the pod's volumes and cgroup failed");
            return self.retry(false);
        }
        self.context.statuses.terminate(&pod, self.context.clock.wall());
        if let Some(full_name) = self.static_full_name() {
            self.context.gate.leave(&full_name, &self.uid);
        }
        if self.mailbox.state().content_may_be_removed() {
            self.out_of_the_way().await;
            self.remove_content().await;
        } else if let Some(next) = self.bury(&pod, &last).await {
            return next;
        }
        self.mailbox.state().terminated_done();
        Next::Phase
    }

    /// Stops the sandbox of a pod that has left early and that nobody has deleted, when the node has time for it. Returns
    /// what to do next if the pod is not finished with that.
    async fn bury(&mut self, pod: &Pod, last: &Arc<PodSnapshot>) -> Option<Next> {
        if last.sandboxes.iter().any(|sandbox| sandbox.ready) {
            let turn = self.quiet_turn().await;
            if self.context.ending.is_cancelled() {
                return Some(Next::Wait(None));
            }
            self.join_stop().await;
            self.context.pleg.acting(&self.uid).await;
            let mut buried = act::terminate_pod(&self.context.act, pod, self.newest(last), None, turn).await;
            self.acted();
            if buried.is_ok() {
                buried = act::cleanup_pod(&self.context.act, pod).await;
            }
            if let Err(error) = buried {
                tracing::warn!(pod = %self.pod_ref(), %error, "stopping the sandbox of the pod failed");
                return Some(self.retry(false));
            }
        }
        if let Ok(view) = self.view().await {
            // The runtime may know more of the dead by now.
            self.publish_status(pod, &view, true);
            // What cannot be removed now goes with all else when the pod does.
            self.tidy(&view).await;
        }
        None
    }

    /// Waits until the node is quiet, as long as nobody waits until the pod is finished with. Without a turn it has waited
    /// long enough.
    async fn quiet_turn(&self) -> Option<OwnedSemaphorePermit> {
        let awaited = async {
            while !self.mailbox.state().is_awaited() {
                self.mailbox.woken().await;
            }
        };
        tokio::select! {
            biased;
            () = awaited => None,
            () = self.context.ending.cancelled() => None,
            turn = self.context.burials.quiet_turn() => turn,
            () = sleep(BURIAL_PATIENCE) => None,
        }
    }

    /// Lets pods that are still ending go first: nobody waits for the remains of this one, unless it is to start anew.
    async fn out_of_the_way(&self) {
        let anew = async {
            while !self.mailbox.state().restart_requested() {
                self.mailbox.woken().await;
            }
        };
        let quiet = async {
            sleep(REMAINS_DELAY).await;
            // Late enough.
            let _ = timeout(BURIAL_PATIENCE, self.context.burials.quiet()).await;
        };
        tokio::select! {
            () = anew => {}
            () = self.context.ending.cancelled() => {}
            () = quiet => {}
        }
    }

    /// All are dead: how the call that stopped them ends changes nothing, but one thing is done after the other.
    async fn join_stop(&mut self) {
        if let Some(stopping) = self.stopping.take() {
            let _ = stopping.await;
            self.acted();
        }
    }

    /// Dead containers, sandboxes, logs and directories of a pod that nobody desires. What fails is found again by
    /// housekeeping.
    async fn remove_content(&mut self) {
        self.join_stop().await;
        let failed = match self.view().await {
            Ok(view) => {
                self.context.pleg.acting(&self.uid).await;
                act::remove_content(&self.context.act, &view).await
            }
            Err(error) => vec![error.to_string()],
        };
        for error in failed {
            tracing::warn!(pod = %self.pod_ref(), error, "remains of the pod were not removed");
        }
        self.acted();
        if let Err(error) = self.context.pleg.inspect(&self.uid).await {
            tracing::debug!(pod = %self.pod_ref(), %error, "the removed pod could not be looked at");
        }
    }
}

/// May the pod be over before its sandbox is? Only where nothing that others could miss hangs on the sandbox, and no
/// process outlives the first one of its container.
fn leaves_early(pod: &Pod) -> bool {
    spec::host_network(pod) && !spec::shares_pid_namespace(pod)
}

/// Every container has ended, and how is known.
fn all_ended(view: &PodSnapshot) -> bool {
    view.containers.iter().all(|c| c.state == ContainerState::Exited && c.exit_code.is_some())
}
