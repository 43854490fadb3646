//! A worker's terminating and terminated phases: stops the pod's processes, releases volumes and cgroup, then removes
//! containers and sandboxes.
//!
//! The status says Succeeded or Failed only once no process of the pod runs, and the API object stays until the volumes are
//! released, too. For a pod with a network of its own both wait for the end of its sandbox, which has its address and host
//! ports. A pod on the host's network has neither, so its status and object do not wait for the runtime to tear down the
//! sandbox, unless that alone ends a container whose state is not known.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::act;
use super::act::PassContext;
use super::act::PodError;
use super::act::TerminationOptions;
use super::publish::Transition;
use super::worker::Next;
use super::worker::PhaseData;
use super::worker::Worker;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::spec;
use crate::pleg::InspectError;
use crate::pleg::MessageSource;
use crate::retry::Operation;

/// Time between two passes over a pod that has exited with codes that the runtime does not know yet. The PLEG wakes the worker
/// when one is known.
const CODE_PAUSE: Duration = Duration::from_secs(2);

/// A stop in progress. Dropping it abandons the stop.
type StopTask = AbortOnDropHandle<Result<(), PodError>>;

/// How a pod's stop ended.
enum Killed {
    /// The runtime has answered every call.
    Answered,
    /// All containers have exited; the stop is still in progress.
    Exited(Arc<PodSnapshot>, StopTask),
}

/// What the terminating phase leaves to the terminated one.
pub(super) enum Stopped {
    /// The pod was stopped with its sandboxes, or before this worker existed.
    WithSandboxes,
    /// The pod's object does not wait for its sandboxes.
    BeforeSandboxes {
        /// The last snapshot, in which all containers have exited.
        last: Arc<PodSnapshot>,
        /// The stop that is still in progress.
        stop: Option<StopTask>,
    },
}

impl Worker {
    /// Stops every container and sandbox of the pod (`SyncTerminatingPod`). Runs again on every request until nothing of
    /// it runs.
    pub(super) async fn terminate(&mut self) -> Next {
        self.show_exits_until_runtime_is_ready().await;
        let pod = self.pod();
        let view = match (self.view().await, &pod) {
            (Ok(view), _) => view,
            (Err(error), pod) => return self.inspection_failed(pod.as_ref(), &error),
        };
        self.phase = PhaseData::Terminating { is_inspected: true };
        let pass = pod.map(|pod| self.pass_context(pod, view.clone()));
        if let Some(pass) = &pass {
            self.publish(pass, Transition::Terminating);
        }
        if let Some(pass) = pass.as_ref().filter(|pass| finishes_before_sandbox(&pass.pod) && all_exited(&view)) {
            return self.processes_exited(pass, None).await;
        }
        let leaves_sandboxes = pass.as_ref().is_some_and(|pass| can_leave_sandboxes(&pass.pod, &view));
        self.context.pleg.acting(self.uid()).await;
        let killed = match &pass {
            Some(pass) => self.stop(pass, leaves_sandboxes).await,
            None => act::kill_orphan(&self.context.act, self.latest(&view)).await.map(|()| Killed::Answered),
        };
        self.acted();
        match (killed, &pass) {
            (Ok(Killed::Exited(last, stop)), Some(pass)) => {
                self.processes_exited(&pass.with_snapshot(last), Some(stop)).await
            }
            (Ok(_), pass) => self.verify_stopped(pass.as_ref(), leaves_sandboxes).await,
            (Err(error), pass) => {
                if let Some(pass) = pass {
                    self.context.act.report(&pass.pod, &error);
                }
                self.retry(Operation::KillPod, &error.to_string())
            }
        }
    }

    /// Waits until the runtime is ready, or the agent stops. Meanwhile the status shows the exits that the kernel proves.
    async fn show_exits_until_runtime_is_ready(&mut self) {
        while !self.context.runtime.borrow().is_ready() && !self.context.shutdown.is_cancelled() {
            self.publish_proven_exits().await;
            tokio::select! {
                () = self.runtime_ready() => {}
                // What woke it is still pending for the next pass.
                () = self.mailbox.woken() => {}
            }
        }
    }

    /// Publishes what is cached of the pod. It may be older than a stop that failed, which starts nothing.
    async fn publish_proven_exits(&mut self) {
        if !self.has_view() && !matches!(self.phase, PhaseData::Terminating { is_inspected: true }) {
            return;
        }
        // A first status needs to know what the runtime supports.
        let Some(pod) = self.pod().filter(|_| self.context.statuses.stored(self.uid()).is_some()) else { return };
        let Some(cached) = self.context.pleg.cached(self.uid()) else { return };
        let view = self.messages.complete(cached, MessageSource::FileOrLog).await;
        self.publish(&self.pass_context(pod, view), Transition::Terminating);
    }

    /// The runtime has answered every stop: inspects the pod again.
    async fn verify_stopped(&mut self, pass: Option<&PassContext>, leaves_sandboxes: bool) -> Next {
        let after = match self.view().await {
            Ok(after) => after,
            Err(error) => return self.inspection_failed(pass.map(|pass| &pass.pod), &error),
        };
        if after.running().next().is_some() {
            let running = after.running().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
            return self.retry(Operation::KillPod, &format!("containers run after the pod was killed: {running}"));
        }
        if leaves_sandboxes && !after.containers.iter().all(is_state_known) {
            return self.retry(Operation::KillPod, "containers of unknown state are stopped with their sandbox");
        }
        if pass.is_some() && after.containers.iter().any(lacks_code) {
            // The PLEG holds back a code for a limited time. The status of a terminated pod is final.
            return Next::Wait(Some(Instant::now() + CODE_PAUSE));
        }
        match pass.map(|pass| pass.with_snapshot(after)) {
            Some(pass) if leaves_sandboxes => self.processes_exited(&pass, None).await,
            Some(pass) => {
                self.publish(&pass, Transition::Stopped);
                self.stopped(Stopped::WithSandboxes)
            }
            None => {
                // It may have been a static pod whose worker panicked.
                self.context.static_pod_starts.release(&self.pod_ref.full_name(), self.uid());
                self.context.statuses.stopped(self.uid(), self.context.clock.wall());
                self.remove_content().await;
                self.stopped(Stopped::WithSandboxes)
            }
        }
    }

    fn inspection_failed(&mut self, pod: Option<&Pod>, error: &InspectError) -> Next {
        match pod {
            Some(pod) => self.failed_sync(pod, error),
            None if matches!(error, InspectError::Stopped) => Next::Wait(None),
            None => self.retry(Operation::KillPod, &error.to_string()),
        }
    }

    /// Stops the pod. Returns before the runtime has answered if all containers have exited and the pod's object does not
    /// wait for its sandboxes.
    async fn stop(&self, pass: &PassContext, leaves_sandboxes: bool) -> Result<Killed, PodError> {
        let mut options = pass.termination_options;
        loop {
            let mut stop = self.spawn_stop(pass, options, leaves_sandboxes);
            tokio::select! {
                stopped = &mut stop => {
                    return stopped.unwrap_or_else(|source| Err(PodError::StopTask { source })).map(|()| Killed::Answered);
                }
                exited = self.all_containers_exited(), if leaves_sandboxes => {
                    // It keeps its permit until the runtime has removed the tasks of exited containers.
                    return Ok(Killed::Exited(exited, stop));
                }
                // A shorter grace period does not wait for the longer one.
                changed = self.changed_options(options) => options = changed,
            }
        }
    }

    /// Executes a plan that stops containers. When the pod's termination is `requested` meanwhile, all containers are
    /// stopped with its grace period at the same time, since that of the plan may be longer. It may also be shorter (that of
    /// a probe), so the plan is not abandoned: the runtime ends a container with the first of its stops. When the plan is
    /// executed the terminating phase stops the other containers anew.
    pub(super) async fn with_termination<T>(
        &self,
        pass: &PassContext,
        execution: impl Future<Output = T>,
        requested: &CancellationToken,
    ) -> T {
        let mut execution = pin!(execution);
        tokio::select! {
            biased;
            executed = &mut execution => return executed,
            () = requested.cancelled() => {}
        }
        let stops = async {
            // A container that the plan has stopped by now is not to run its hook again.
            let _ = self.context.pleg.inspect(self.uid()).await;
            let pass = self.pass_context(pass.pod.clone(), pass.snapshot.clone());
            match self.stop(&pass, true).await {
                Ok(Killed::Exited(_, stop)) => _ = stop.await,
                Ok(Killed::Answered) => {}
                // The terminating phase tries again.
                Err(error) => tracing::debug!(pod = %self.pod_ref, %error, "cannot stop the pod beside its last sync"),
            }
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            biased;
            executed = execution => executed,
            never = stops => match never {},
        }
    }

    /// Stops the pod, or its containers alone if its sandboxes are left for later.
    fn spawn_stop(&self, pass: &PassContext, options: TerminationOptions, leaves_sandboxes: bool) -> StopTask {
        let (context, pod, latest) = (self.context.clone(), pass.pod.clone(), self.latest(&pass.snapshot));
        let stop = async move {
            match leaves_sandboxes {
                true => act::stop_containers(&context.act, &pod, latest, options).await,
                false => act::terminate_pod(&context.act, &pod, latest, options).await,
            }
        };
        AbortOnDropHandle::new(tokio::spawn(stop.in_current_span()))
    }

    /// The newest snapshot whenever it is called, at least `view`.
    fn latest(&self, view: &Arc<PodSnapshot>) -> impl Fn() -> Arc<PodSnapshot> + Send + use<> {
        let (pleg, uid, view) = (self.context.pleg.clone(), self.uid().clone(), view.clone());
        move || pleg.cached(&uid).unwrap_or_else(|| view.clone())
    }

    /// The options of the stop, as soon as they differ from these.
    async fn changed_options(&self, options: TerminationOptions) -> TerminationOptions {
        loop {
            self.mailbox.cancelled().await;
            let now = self.mailbox.state().termination_options();
            if now != options {
                return now;
            }
        }
    }

    /// Waits until the kernel or the runtime has reported the exit of every container.
    async fn all_containers_exited(&self) -> Arc<PodSnapshot> {
        loop {
            if let Some(view) = self.context.pleg.cached(self.uid()).filter(|view| all_exited(view)) {
                return view;
            }
            self.mailbox.woken().await;
        }
    }

    /// No process of the pod is left, and its API object does not wait for its sandboxes.
    async fn processes_exited(&mut self, pass: &PassContext, stop: Option<StopTask>) -> Next {
        let last = self.messages.complete(pass.snapshot.clone(), MessageSource::FileOrLog).await;
        self.publish(&pass.with_snapshot(last.clone()), Transition::Stopped);
        self.stopped(Stopped::BeforeSandboxes { last, stop })
    }

    fn stopped(&mut self, stopped: Stopped) -> Next {
        self.phase = PhaseData::Terminated(stopped);
        self.mailbox.state().terminating_done();
        Next::Phase
    }

    /// Releases volumes and cgroup, and removes the pod's containers if it is deleted or evicted (`SyncTerminatedPod`).
    pub(super) async fn clean_up(&mut self) -> Next {
        let Some(pod) = self.pod() else {
            self.mailbox.state().terminated_done();
            return Next::Phase;
        };
        let last = match &self.phase {
            PhaseData::Terminated(Stopped::BeforeSandboxes { last, .. }) => Ok(last.clone()),
            _ => self.view().await,
        };
        let pass = match last {
            Ok(last) => self.pass_context(pod, last),
            Err(error) => return self.failed_sync(&pod, &error),
        };
        self.publish(&pass, Transition::Stopped);
        let released = match has_ready_sandbox(&pass) {
            // The sandbox is still in the cgroup, which is removed with it.
            true => act::release_volumes(&self.context.act, pass.uid()).await,
            false => act::cleanup_pod(&self.context.act, &pass).await,
        };
        if let Err(error) = released {
            return self.retry(Operation::ReleasePod, &error.to_string());
        }
        self.publish(&pass, Transition::Released);
        if let Some(full_name) = self.static_full_name() {
            self.context.static_pod_starts.release(&full_name, self.uid());
        }
        if self.mailbox.state().content_may_be_removed() {
            self.remove_content().await;
        } else if let Some(next) = self.tear_down_sandbox(&pass).await {
            return next;
        }
        self.mailbox.state().terminated_done();
        Next::Phase
    }

    /// Stops the sandbox of a finished pod that is not deleted, and its cgroup. Returns what to do next if the pod is not
    /// finished with that.
    async fn tear_down_sandbox(&mut self, pass: &PassContext) -> Option<Next> {
        if has_ready_sandbox(pass) {
            self.join_stop().await;
            self.context.pleg.acting(self.uid()).await;
            let (options, latest) = (TerminationOptions::default(), self.latest(&pass.snapshot));
            let mut stopped = act::terminate_pod(&self.context.act, &pass.pod, latest, options).await;
            self.acted();
            if stopped.is_ok() {
                stopped = act::cleanup_pod(&self.context.act, pass).await;
            }
            if let Err(error) = stopped {
                return Some(self.retry(Operation::KillPod, &error.to_string()));
            }
        }
        if let Ok(view) = self.view().await {
            // By now the runtime may report more of the exited containers.
            self.publish(&pass.with_snapshot(view.clone()), Transition::Stopped);
            // What cannot be removed now is removed with the pod.
            self.collect_garbage(&view).await;
        }
        None
    }

    /// Waits for a stop in progress: its result changes nothing once every container has exited, but calls to the runtime
    /// for one pod are not to overlap.
    async fn join_stop(&mut self) {
        if let PhaseData::Terminated(Stopped::BeforeSandboxes { stop, .. }) = &mut self.phase
            && let Some(stop) = stop.take()
        {
            let _ = stop.await;
            self.acted();
        }
    }

    /// Removes exited containers, sandboxes, logs and directories of a deleted pod. Housekeeping finds what fails again.
    async fn remove_content(&mut self) {
        self.join_stop().await;
        let mut failed = match self.view().await {
            Ok(view) => {
                self.context.pleg.acting(self.uid()).await;
                act::joined(&act::remove_content(&self.context.act, &view).await)
            }
            Err(error) => error.to_string(),
        };
        self.acted();
        match self.context.pleg.inspect(self.uid()).await {
            // Without a failure the next worker would begin at once.
            Ok(left) if failed.is_empty() => failed = remains(&left),
            Ok(_) => {}
            Err(error) => tracing::debug!(pod = %self.pod_ref, %error, "cannot inspect the removed pod"),
        }
        let target = self.pod_ref.with_uid();
        if failed.is_empty() {
            self.context.retries.succeeded(Operation::RemovePod, &target);
            // What could not be collected is gone, too.
            self.context.retries.succeeded(Operation::CollectGarbage, &target);
        } else {
            // Housekeeping starts another worker for what is left, once the retry is due.
            self.context.retries.failed(Operation::RemovePod, &target, &failed);
        }
    }
}

/// What the runtime has left of a pod that it has removed, as the reason of a failure; empty if it has nothing.
fn remains(left: &PodSnapshot) -> String {
    let containers = left.containers.iter().map(|container| container.id.to_string());
    let all: Vec<String> = containers.chain(left.sandboxes.iter().map(|sandbox| sandbox.id.to_string())).collect();
    if all.is_empty() { String::new() } else { format!("the runtime still lists what was removed: {}", all.join(", ")) }
}

/// True if the pod's status and API object do not wait for its sandbox: it has no address or host port of its own, and no
/// process outlives the init process of its container.
fn finishes_before_sandbox(pod: &Pod) -> bool {
    spec::host_network(pod) && !spec::shares_pid_namespace(pod)
}

/// True if stopping the pod's containers one by one ends all its processes, so that its sandboxes can be stopped later. A
/// container that may run although the runtime does not say so ends with its sandbox alone.
fn can_leave_sandboxes(pod: &Pod, view: &PodSnapshot) -> bool {
    finishes_before_sandbox(pod) && view.containers.iter().all(is_state_known)
}

/// The runtime knows whether the container runs. One that is created may run: the result of its start may be lost.
fn is_state_known(container: &ContainerStatus) -> bool {
    matches!(container.state, ContainerState::Running | ContainerState::Exited)
}

/// The container has exited, and its exit code is not known yet.
fn lacks_code(container: &ContainerStatus) -> bool {
    container.state == ContainerState::Exited && container.exit_code.is_none()
}

fn has_ready_sandbox(pass: &PassContext) -> bool {
    pass.snapshot.sandboxes.iter().any(|sandbox| sandbox.ready)
}

/// True if every container has exited with a known exit code.
fn all_exited(view: &PodSnapshot) -> bool {
    view.containers.iter().all(|c| c.state == ContainerState::Exited && c.exit_code.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    #[test]
    fn sandboxes_are_left_for_later_if_the_state_of_every_container_is_known() {
        let rows = [
            (ContainerState::Running, true),
            (ContainerState::Exited, true),
            (ContainerState::Created, false),
            (ContainerState::Unknown, false),
        ];
        for (state, expected) in rows {
            let view = testing::snapshot(vec![testing::running("a", 0), testing::status("b", 0, state)]);
            let of = |host_network| {
                let mut pod = testing::pod("Always", &[], &["a", "b"]);
                pod.spec.as_mut().expect("a spec").host_network = Some(host_network);
                can_leave_sandboxes(&Arc::new(pod), &view)
            };
            assert_eq!((of(true), of(false)), (expected, false), "{state:?}");
        }
    }

    /// In a shared PID namespace processes outlive the init process of their container until the sandbox is stopped.
    #[test]
    fn sandboxes_of_pods_whose_processes_may_outlive_their_containers_are_stopped_first() {
        let view = testing::snapshot(vec![testing::running("a", 0)]);
        for (host_pid, is_shared, expected) in [(false, false, true), (true, false, false), (false, true, false)] {
            let mut pod = testing::pod("Always", &[], &["a"]);
            let spec = pod.spec.as_mut().expect("a spec");
            spec.host_network = Some(true);
            (spec.host_pid, spec.share_process_namespace) = (Some(host_pid), Some(is_shared));
            assert_eq!(can_leave_sandboxes(&Arc::new(pod), &view), expected, "{host_pid} {is_shared}");
        }
    }
}
