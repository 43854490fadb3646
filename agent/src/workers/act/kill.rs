//! Stopping containers and whole pods.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;
use tokio::sync::watch;

use super::ActContext;
use super::grace;
use super::report;
use crate::model::ContainerId;
use crate::model::KillReason;
use crate::model::PodSnapshot;
use crate::recorder::EventType;
use crate::runtime::RuntimeError;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::names;

/// What a runtime takes to know of an end that it has just stumbled over.
const AFTERMATH: Duration = Duration::from_millis(100);

/// One container to stop.
#[derive(Clone, Copy)]
pub(super) struct Kill<'a> {
    pub(super) id: &'a ContainerId,
    pub(super) name: &'a str,
    pub(super) reason: KillReason,
    /// Text of the Killing event; empty for the usual one.
    pub(super) message: &'a str,
    pub(super) grace_override: Option<i64>,
}

/// Termination order of a pod: for each running container, whether it has exited.
type Endings = HashMap<String, watch::Receiver<bool>>;

/// Stops one container with its grace period. A container that no longer exists is no error. One that the spec does not
/// name is not stopped, since its grace period is unknown; it is stopped with its sandbox.
pub(super) async fn kill_container(ctx: &ActContext, pod: &Pod, kill: Kill<'_>) -> Result<(), String> {
    kill_in_order(ctx, pod, kill, &Endings::new()).await
}

async fn kill_in_order(ctx: &ActContext, pod: &Pod, kill: Kill<'_>, endings: &Endings) -> Result<(), String> {
    let error = |message: &str| report::failed("KillContainer", kill.name, "KillContainerError", message);
    let Some(spec) = ContainerSpec::named(pod, kill.name) else {
        return Err(error(&format!("failed to get container spec of container {:?} of the pod", kill.name)));
    };
    let usual = format!("Stopping container {}", kill.name);
    let message = if kill.message.is_empty() { &usual } else { kill.message };
    ctx.container_event(pod, &spec, EventType::Normal, "Killing", message);
    let grace = grace::grace_period(pod, &spec.container, kill.reason, kill.grace_override);
    let since = ctx.clock.now();
    wait_for_others(pod, kill.name, endings, grace).await;
    let left = grace::remaining(grace, ctx.clock.now().saturating_duration_since(since));
    match ctx.runtime.stop_container(kill.id.as_str(), left).await {
        Err(failed) if !failed.is_not_found() && !ended_meanwhile(ctx, kill.id, &failed).await => {
            Err(error(&failed.rpc_text()))
        }
        _ => Ok(()),
    }
}

/// A container that exits on its own while it is being stopped can make the runtime's call fail (containerd: "ttrpc:
/// closed", since its shim has exited). Nothing is left to stop then, and no event is recorded.
async fn ended_meanwhile(ctx: &ActContext, id: &ContainerId, failed: &RuntimeError) -> bool {
    if !may_have_stumbled(failed) {
        return false;
    }
    tokio::time::sleep(AFTERMATH).await;
    let look = ctx.runtime.container_status(id.as_str(), false).await;
    look.is_ok_and(|found| found.status.state == cri::ContainerState::ContainerExited as i32)
}

fn may_have_stumbled(failed: &RuntimeError) -> bool {
    !failed.is_not_found() && !failed.is_unreachable() && !failed.is_deadline()
}

/// Stops a sandbox, with whatever the runtime still believes to run in it. That may have just died: then the runtime
/// stumbles as over a container.
async fn stop_sandbox(ctx: &ActContext, id: &str) -> Result<(), RuntimeError> {
    match ctx.runtime.stop_pod_sandbox(id).await {
        Err(failed) if may_have_stumbled(&failed) => {
            tracing::debug!(sandbox = id, error = %failed, "the sandbox is to be stopped again");
            tokio::time::sleep(AFTERMATH).await;
            ctx.runtime.stop_pod_sandbox(id).await
        }
        stopped => stopped,
    }
}

/// Waits as long as there is grace.
async fn wait_for_others(pod: &Pod, name: &str, endings: &Endings, grace: i64) {
    let others = grace::waits_for(pod, name).into_iter().filter_map(|other| endings.get(other).cloned());
    let waiting = others.map(|mut ended| async move {
        // The sender is dropped when the container's kill has ended.
        let _ = ended.wait_for(|ended| *ended).await;
    });
    let limit = Duration::from_secs(grace.max(0).unsigned_abs());
    let _ = tokio::time::timeout(limit, join_all(waiting)).await;
}

/// Stops every running container of the pod, all at once but for sidecars, then every sandbox. Returns what failed.
pub(super) async fn kill_pod(
    ctx: &ActContext,
    pod: &Pod,
    snapshot: &PodSnapshot,
    grace_override: Option<i64>,
) -> Vec<String> {
    let mut failed = kill_containers(ctx, pod, snapshot, grace_override).await;
    failed.extend(stop_sandboxes(ctx, pod, snapshot).await);
    failed
}

/// Stops every running container of the pod, all at once but for sidecars. Returns what failed.
pub(super) async fn kill_containers(
    ctx: &ActContext,
    pod: &Pod,
    snapshot: &PodSnapshot,
    grace_override: Option<i64>,
) -> Vec<String> {
    let running: Vec<_> = snapshot.running().collect();
    let (senders, endings): (Vec<_>, Endings) = running
        .iter()
        .map(|container| {
            let (sender, receiver) = watch::channel(false);
            (sender, (container.name.clone(), receiver))
        })
        .unzip();
    let kills = running.iter().zip(&senders).map(|(container, ended)| async {
        let reason = KillReason::PodKilled;
        let kill = Kill { id: &container.id, name: &container.name, reason, message: "", grace_override };
        let result = kill_in_order(ctx, pod, kill, &endings).await;
        if result.is_ok() {
            ended.send_replace(true);
        }
        result
    });
    join_all(kills).await.into_iter().filter_map(Result::err).collect()
}

/// Stops every sandbox of the pod, ready or not; one that is gone is fine.
pub(super) async fn stop_sandboxes(ctx: &ActContext, pod: &Pod, snapshot: &PodSnapshot) -> Vec<String> {
    let mut failed = Vec::new();
    for sandbox in &snapshot.sandboxes {
        match stop_sandbox(ctx, sandbox.id.as_str()).await {
            Err(error) if !error.is_not_found() => {
                let target = names::pod_uid(pod);
                failed.push(report::failed("KillPodSandbox", target, "KillPodSandboxError", &error.rpc_text()));
            }
            _ => {}
        }
    }
    failed
}
