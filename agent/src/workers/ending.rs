//! The end of a pod: its processes, then what it holds, then its API object; its remains last.
//!
//! The API object of a pod waits until no process of it runs and its volumes are released. If the pod has a network of
//! its own, it waits for the end of the sandbox too: until then its address is taken and its host ports lead to it. A
//! pod on the host's network holds neither, so its object need not wait for the runtime to bury the dead.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
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
                self.context.statuses.end(pod, &ending, self.context.clock.wall());
            }
        }
        self.context.pleg.acting(&self.uid).await;
        let killed = match &pod {
            Some(pod) => self.stop(pod, &view, grace).await,
            None => act::kill_orphan(&self.context.act, &view).await.map(|()| None),
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
        let (context, pod, view) = (self.context.clone(), pod.clone(), view.clone());
        let stop = async move {
            match leaves_early(&pod) {
                true => act::stop_containers(&context.act, &pod, &view, grace).await,
                false => act::terminate_pod(&context.act, &pod, &view, grace).await,
            }
        };
        AbortOnDropHandle::new(tokio::spawn(stop.in_current_span()))
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
        let told = Arc::new(pleg::with_messages(gone).await);
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
        match last {
            Ok(last) => self.publish_status(&pod, &last, true),
            Err(error) => return self.failed_sync(&pod, &error),
        };
        let released = match self.gone {
            // Its sandbox is still in the cgroup, which goes with the remains.
            Some(_) => act::release_volumes(&self.context.act, &pod).await,
            None => act::cleanup_pod(&self.context.act, &pod).await,
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
        }
        self.mailbox.state().terminated_done();
        Next::Phase
    }

    /// Lets pods that are still ending go first: nobody waits for the remains of this one, unless it is to start anew.
    async fn out_of_the_way(&self) {
        let late = Instant::now() + REMAINS_DELAY;
        while !self.mailbox.state().restart_requested() {
            tokio::select! {
                () = self.mailbox.woken() => {}
                () = self.context.ending.cancelled() => return,
                () = tokio::time::sleep_until(late) => return,
            }
        }
    }

    /// Dead containers, sandboxes, logs and directories of a pod that nobody desires. What fails is found again by
    /// housekeeping.
    async fn remove_content(&mut self) {
        if let Some(stopping) = self.stopping.take() {
            // All are dead: how the call ended changes nothing, but one thing is done after the other.
            let _ = stopping.await;
            self.acted();
        }
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

/// May the API object go before the pod's sandbox? Only where nothing that others could miss hangs on the sandbox.
fn leaves_early(pod: &Pod) -> bool {
    spec::deletion_requested(pod) && spec::host_network(pod)
}

/// Every container has ended, and how is known.
fn all_ended(view: &PodSnapshot) -> bool {
    view.containers.iter().all(|c| c.state == ContainerState::Exited && c.exit_code.is_some())
}
