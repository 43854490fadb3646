//! Stopping containers and whole pods.

use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::Cause;
use super::PodError;
use super::grace;
use super::hooks::Hook;
use super::termination_order::TerminationOrder;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::KillReason;
use crate::model::PodSnapshot;
use crate::recorder::EventType;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::ContainerSpecs;
use crate::workers::generate::names;

/// How long a runtime takes to report the exit of a container that made its call fail.
const EXIT_REPORT_DELAY: Duration = Duration::from_millis(100);

/// One container to stop.
#[derive(Clone, Copy)]
pub(super) struct Kill<'a> {
    pub(super) id: &'a ContainerId,
    pub(super) name: &'a str,
    pub(super) reason: KillReason,
    /// Text of the Killing event; empty for the usual one.
    pub(super) message: &'a str,
    pub(super) grace_override: Option<i64>,
    /// Addresses of the pod, for hooks.
    pub(super) ips: &'a [String],
    pub(super) until: Until,
}

/// What ends the wait for a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// The runtime's answer.
    Stopped,
    /// The exit of the container, which the kernel may prove earlier.
    Exited,
}

/// Runs the preStop hook of one container and stops it, both within its grace period; [`Kill::until`] says when it
/// returns. A container that no longer exists is no error. One that the spec does not name is not stopped, since its grace
/// period is unknown; it is stopped with its sandbox.
///
/// # Errors
/// The runtime did not stop it, or the spec does not name it.
pub(super) async fn kill_container(ctx: &ActContext, pod: &Pod, kill: Kill<'_>) -> Result<(), PodError> {
    kill_in_order(ctx, pod, ContainerSpec::named(pod, kill.name), kill, &TerminationOrder::default()).await
}

/// [`kill_container`] without the event that it is stopped, for a container whose pod is not known: `pod` is made from the
/// container's annotations.
///
/// # Errors
/// The runtime did not stop it.
pub(super) async fn stop_silently(ctx: &ActContext, pod: &Pod, kill: Kill<'_>) -> Result<(), Cause> {
    let spec = known(ContainerSpec::named(pod, kill.name), kill)?;
    stop_in_order(ctx, pod, &spec, kill, &TerminationOrder::default()).await
}

async fn kill_in_order(
    ctx: &ActContext,
    pod: &Pod,
    spec: Option<ContainerSpec<'_>>,
    kill: Kill<'_>,
    order: &TerminationOrder<'_>,
) -> Result<(), PodError> {
    let failed = |source| PodError::KillContainer { container: kill.name.to_owned(), source };
    let spec = known(spec, kill).map_err(failed)?;
    let usual = format!("Stopping container {}", kill.name);
    let message = if kill.message.is_empty() { &usual } else { kill.message };
    ctx.container_event(pod, &spec, EventType::Normal, "Killing", message);
    stop_in_order(ctx, pod, &spec, kill, order).await.map_err(failed)
}

/// The definition that was looked up for a container to stop.
///
/// # Errors
/// The spec does not name it.
fn known<'a>(spec: Option<ContainerSpec<'a>>, kill: Kill<'_>) -> Result<ContainerSpec<'a>, Cause> {
    spec.ok_or_else(|| Cause::NoContainerSpec(kill.name.to_owned()))
}

/// preStop hook, then the containers that end first, then the container itself, each within what is left of the grace
/// period.
async fn stop_in_order(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    kill: Kill<'_>,
    order: &TerminationOrder<'_>,
) -> Result<(), Cause> {
    let grace = grace::grace_period(pod, &spec.container, kill.reason, kill.grace_override);
    let left = run_pre_stop(ctx, pod, spec, kill, grace).await;
    // Only sidecars wait.
    let left = match spec.class {
        ContainerClass::Sidecar => wait_for_turn(ctx, kill.name, order, left).await,
        _ => left,
    };
    let stopped = stop(ctx, pod, kill, grace::stop_timeout(left)).await;
    ctx.pre_stops.release(kill.id);
    stopped
}

/// Stops the container. [`Until::Exited`]: once its exit is known, the runtime only removes what is left of it, and the next
/// instance can be created meanwhile. The call is not cancelled then, since the runtime might abandon its work.
async fn stop(ctx: &ActContext, pod: &Pod, kill: Kill<'_>, timeout: Duration) -> Result<(), Cause> {
    let mut call = Box::pin(stop_call(ctx.runtime.clone(), kill.id.clone(), timeout));
    let exited = async {
        match &ctx.exits {
            Some(pleg) if kill.until == Until::Exited => pleg.exit_of(&names::pod_uid(pod).into(), kill.id).await,
            _ => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        stopped = &mut call => stopped,
        () = exited => {
            let id = kill.id.clone();
            tokio::spawn(async move {
                if let Err(error) = call.await {
                    tracing::debug!(%id, %error, "the runtime failed to stop a container that had exited");
                }
            });
            Ok(())
        }
    }
}

async fn stop_call(runtime: Runtime, id: ContainerId, timeout: Duration) -> Result<(), Cause> {
    match runtime.stop_container(id.as_str(), timeout).await {
        Err(error) if !error.is_not_found() && !exited_meanwhile(&runtime, &id, &error).await => Err(error.into()),
        _ => Ok(()),
    }
}

/// Runs the preStop hook, if there is one, and waits for it no longer than the grace period. Without one it is not run.
/// Returns what is left of the period. A failure has an event, and the stop continues.
async fn run_pre_stop(ctx: &ActContext, pod: &Pod, spec: &ContainerSpec<'_>, kill: Kill<'_>, grace: i64) -> i64 {
    let hook = Hook::pre_stop(ctx, pod, spec, kill.id, kill.ips).filter(|_| grace > 0);
    let Some(hook) = hook else { return grace };
    let (recorder, of_pod, field_path) = (ctx.recorder.clone(), pod.clone(), spec.field_path());
    let reported = || async move {
        if let Err(error) = hook.run().await {
            tracing::warn!(pod = names::describe(&of_pod), container = field_path, %error, "preStop hook failed");
            recorder.pod_event(&of_pod, &field_path, EventType::Warning, "FailedPreStopHook", "PreStopHook failed");
        }
    };
    let since = ctx.clock.now();
    if !ctx.pre_stops.run(names::pod_uid(pod), kill.id, grace::limit(grace), reported).await {
        let pod = names::describe(pod);
        tracing::warn!(pod, container = kill.name, grace, "preStop hook not completed in the grace period");
    }
    grace::remaining(grace, ctx.clock.now().saturating_duration_since(since))
}

/// A container that exits on its own while it is being stopped can make the runtime's call fail (containerd: "ttrpc:
/// closed", since its shim has exited). Nothing is left to stop then, and no event is recorded.
async fn exited_meanwhile(runtime: &Runtime, id: &ContainerId, error: &RuntimeError) -> bool {
    if !may_be_caused_by_exit(error) {
        return false;
    }
    tokio::time::sleep(EXIT_REPORT_DELAY).await;
    let inspected = runtime.container_status(id.as_str(), false).await;
    inspected.is_ok_and(|found| found.status.state == cri::ContainerState::ContainerExited as i32)
}

/// True if the runtime returned an error that a concurrent exit can cause.
fn may_be_caused_by_exit(error: &RuntimeError) -> bool {
    !error.is_not_found() && !error.is_unreachable() && !error.is_deadline()
}

/// Stops a sandbox with the containers that run in it. Retries once if a concurrent exit may have made the call fail.
async fn stop_sandbox(ctx: &ActContext, id: &str) -> Result<(), RuntimeError> {
    match ctx.runtime.stop_pod_sandbox(id).await {
        Err(error) if may_be_caused_by_exit(&error) => {
            tracing::debug!(sandbox = id, %error, "retrying to stop the sandbox");
            tokio::time::sleep(EXIT_REPORT_DELAY).await;
            ctx.runtime.stop_pod_sandbox(id).await
        }
        stopped => stopped,
    }
}

/// Waits for the containers that precede this sidecar in the termination order, no longer than the grace period. Returns what
/// is left of it.
async fn wait_for_turn(ctx: &ActContext, sidecar: &str, order: &TerminationOrder<'_>, grace: i64) -> i64 {
    let since = ctx.clock.now();
    let _ = tokio::time::timeout(grace::limit(grace), order.turn_of(sidecar)).await;
    grace::remaining(grace, ctx.clock.now().saturating_duration_since(since))
}

/// Stops every running container of the pod with its own grace period, all at once but for sidecars, then every sandbox.
/// Returns what failed.
pub(super) async fn kill_pod(ctx: &ActContext, pod: &Pod, snapshot: &PodSnapshot) -> Vec<PodError> {
    let mut failed = kill_containers(ctx, pod, snapshot, None).await;
    failed.extend(stop_sandboxes(ctx, pod, snapshot).await);
    failed
}

/// Stops every running container of the pod, all at once but for sidecars. Returns what failed.
pub(super) async fn kill_containers(
    ctx: &ActContext,
    pod: &Pod,
    snapshot: &PodSnapshot,
    grace_override: Option<i64>,
) -> Vec<PodError> {
    let specs = ContainerSpecs::of(pod);
    let order = TerminationOrder::new(pod, snapshot.running().map(|container| container.name.as_str()));
    let kills = snapshot.running().map(|container| async {
        let reason = KillReason::PodKilled;
        let (id, name, ips) = (&container.id, &container.name, &snapshot.ips);
        let kill = Kill { id, name, reason, message: "", grace_override, ips, until: Until::Stopped };
        let spec = specs.named(name);
        let class = spec.as_ref().map(|spec| spec.class);
        let result = kill_in_order(ctx, pod, spec, kill, &order).await;
        if let Some(class) = class.filter(|_| result.is_ok()) {
            order.stopped(class, name);
        }
        result
    });
    join_all(kills).await.into_iter().filter_map(Result::err).collect()
}

/// Stops every sandbox of the pod, ready or not. One that does not exist is no error.
pub(super) async fn stop_sandboxes(ctx: &ActContext, pod: &Pod, snapshot: &PodSnapshot) -> Vec<PodError> {
    let mut failed = Vec::new();
    for sandbox in &snapshot.sandboxes {
        match stop_sandbox(ctx, sandbox.id.as_str()).await {
            Err(error) if !error.is_not_found() => {
                failed.push(PodError::KillSandbox { uid: names::pod_uid(pod).to_owned(), source: error });
            }
            _ => {}
        }
    }
    failed
}
