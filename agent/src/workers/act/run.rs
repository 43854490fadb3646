//! Executes one plan in the kubelet's order (`SyncPod`).

use std::convert::Infallible;

use tokio_util::sync::CancellationToken;

use super::ActContext;
use super::PassContext;
use super::PodError;
use super::SyncOutcome;
use super::image::ImageLookup;
use super::image_volumes;
use super::image_volumes::ImageVolumes;
use super::kill;
use super::kill::Kill;
use super::kill::Until;
use super::prefetch;
use super::prerequisites;
use super::pull_secrets;
use super::remove;
use super::resize;
use super::sandbox;
use super::sandbox::Sandbox;
use super::start::StartContext;
use super::start::crash_loop_back_off;
use crate::model::ContainerClass;
use crate::model::PodActions;
use crate::model::RemoveContainer;
use crate::model::SandboxPlan;
use crate::model::SandboxStatus;
use crate::model::StartFailure;
use crate::model::StartOutcome;
use crate::model::spec;
use crate::recorder::EventType;

/// Executes `actions`, which were planned for the pod and the snapshot of `pass`. Kills take up to their grace periods, pulls
/// as long as they take. Nothing is retried here. Not to be dropped halfway. For tests; workers call [`execute_observed`].
pub async fn execute(ctx: &ActContext, pass: &PassContext, actions: &PodActions) -> SyncOutcome {
    execute_observed(ctx, pass, actions, &|_| {}, std::future::pending()).await
}

/// [`execute`], with `before_pull` called before an image is pulled into a sandbox that the plan has created: pulls may take
/// minutes, and the pod's status shows the sandbox meanwhile (KEP-3085). When `terminated` is ready nothing waits for
/// volumes, objects, credentials, pulls and postStart hooks any longer, and a sandbox that cannot be created is no failure;
/// the pod is to be synced again. A start whose pull is given up fails, as a kubelet's does, and so does one whose
/// configuration is; the outcome has no other error then.
pub async fn execute_observed(
    ctx: &ActContext,
    pass: &PassContext,
    actions: &PodActions,
    before_pull: BeforePull<'_>,
    terminated: impl Future<Output = ()> + Send,
) -> SyncOutcome {
    let (mut outcome, is_terminated) = (SyncOutcome::default(), CancellationToken::new());
    let follow = async {
        terminated.await;
        is_terminated.cancel();
        std::future::pending::<Infallible>().await
    };
    let ended = tokio::select! {
        biased;
        never = follow => match never {},
        ended = steps(ctx, pass, actions, before_pull, &is_terminated, &mut outcome) => ended,
    };
    if let Err(Stop) = ended {
        tracing::debug!(pod = pass.describe(), errors = ?outcome.errors, "plan not executed completely");
    }
    // A user namespace that does not work often shows only when containers are created.
    if outcome.sandbox.is_some() && !outcome.is_ok() && spec::has_user_namespace(&pass.pod) {
        ctx.count(|metrics| metrics.pods.user_namespaced_failed());
    }
    outcome
}

/// Called with the new sandbox.
pub(super) type BeforePull<'a> = &'a (dyn Fn(&SandboxStatus) + Sync);

/// The rest of the plan is not executed; the outcome says why.
struct Stop;

async fn steps(
    ctx: &ActContext,
    pass: &PassContext,
    actions: &PodActions,
    before_pull: BeforePull<'_>,
    terminated: &CancellationToken,
    outcome: &mut SyncOutcome,
) -> Result<(), Stop> {
    let creates = matches!(actions.sandbox, SandboxPlan::Create { .. });
    let starts = actions.start.iter().any(|start| start.blocked.is_none());
    if creates || starts {
        prepare(ctx, pass, terminated.cancelled(), outcome).await?;
    }
    if let SandboxPlan::Create { replaces: Some(_), .. } = &actions.sandbox {
        let message = "Pod sandbox changed, it will be killed and re-created.";
        ctx.pod_event(&pass.pod, EventType::Normal, "SandboxChanged", message);
    }
    kills(ctx, pass, actions, terminated, outcome).await?;
    for remove in &actions.remove {
        stop_at(outcome, remove::remove_planned(ctx, &pass.snapshot, remove).await)?;
    }
    outcome.restart_all_done = !actions.remove.is_empty();
    resize_in_place(ctx, pass, actions, outcome).await;
    if creates {
        prune(ctx, pass, &actions.prune).await;
    }
    if let Some(sandbox) = in_sandbox(ctx, pass, actions, terminated, outcome).await? {
        let status = creates.then(|| sandbox.status(ctx, &pass.pod));
        let before_pull = || status.iter().for_each(before_pull);
        let images =
            ImageLookup { ctx, pod: &pass.pod, sandbox: &sandbox.config, before_pull: &before_pull, terminated };
        let image_volumes = if starts { image_volumes::ensure(images).await } else { ImageVolumes::default() };
        let context = StartContext {
            ctx,
            pass,
            sandbox: &sandbox,
            image_volumes: &image_volumes,
            before_pull: &before_pull,
            terminated,
        };
        start_all(context, actions, outcome).await;
    }
    if !creates {
        // Last: nothing waits for it, and the restart of an init container is not to wait for it.
        prune(ctx, pass, &actions.prune).await;
    }
    Ok(())
}

fn stop_at<T>(outcome: &mut SyncOutcome, result: Result<T, PodError>) -> Result<T, Stop> {
    result.map_err(|error| {
        outcome.errors.push(error);
        Stop
    })
}

/// A failure keeps nothing from being started: a container that was stopped for its resize would stay so.
async fn resize_in_place(ctx: &ActContext, pass: &PassContext, actions: &PodActions, outcome: &mut SyncOutcome) {
    let Some(planned) = &actions.resize else { return };
    // That of a pod that was killed is stopped.
    let sandbox = pass.snapshot.sandboxes.first().filter(|sandbox| sandbox.ready && !actions.kill_pod);
    let resized = resize::resize(ctx, pass, planned, sandbox).await;
    outcome.resized = Some(resized.is_ok());
    outcome.errors.extend(resized.err());
}

async fn prepare(
    ctx: &ActContext,
    pass: &PassContext,
    terminated: impl Future<Output = ()> + Send,
    outcome: &mut SyncOutcome,
) -> Result<(), Stop> {
    prerequisites::prepare(ctx, pass, terminated).await.map_err(|errors| {
        outcome.errors.extend(errors);
        Stop
    })
}

/// The whole pod at once, or single containers one after the other; the first failure ends the sync, and so does the
/// termination of the pod, which stops the others.
async fn kills(
    ctx: &ActContext,
    pass: &PassContext,
    actions: &PodActions,
    terminated: &CancellationToken,
    outcome: &mut SyncOutcome,
) -> Result<(), Stop> {
    if actions.kill_pod {
        outcome.errors.extend(kill::kill_pod(ctx, &pass.pod, &pass.snapshot).await);
        return if outcome.errors.is_empty() && !terminated.is_cancelled() { Ok(()) } else { Err(Stop) };
    }
    for planned in &actions.kill {
        // What is removed next must have been stopped: the runtime may still work on one that has only exited. So must all
        // before the pod is resized: the cgroup of a pod gets no smaller quota than one in it has, with cgroup v1.
        let is_removed = actions.remove.iter().any(|remove| remove.id == planned.id);
        let must_be_stopped = is_removed || actions.resize.is_some();
        let kill = Kill {
            id: &planned.id,
            name: &planned.name,
            reason: planned.reason,
            message: &planned.message,
            grace_override: planned.grace_override,
            ips: &pass.snapshot.ips,
            until: if must_be_stopped { Until::Stopped } else { Until::Exited },
        };
        stop_at(outcome, kill::kill_container(ctx, &pass.pod, kill).await)?;
        if terminated.is_cancelled() {
            return Err(Stop);
        }
    }
    Ok(())
}

async fn prune(ctx: &ActContext, pass: &PassContext, old: &[RemoveContainer]) {
    for remove in old {
        if let Err(error) = remove::remove_planned(ctx, &pass.snapshot, remove).await {
            tracing::warn!(
                pod = pass.describe(),
                container = remove.name,
                %error,
                "cannot remove an old container instance"
            );
        }
    }
}

/// The sandbox to start containers in, if any are to be started.
async fn in_sandbox(
    ctx: &ActContext,
    pass: &PassContext,
    actions: &PodActions,
    terminated: &CancellationToken,
    outcome: &mut SyncOutcome,
) -> Result<Option<Sandbox>, Stop> {
    let sandbox = match &actions.sandbox {
        SandboxPlan::None => return Ok(None),
        SandboxPlan::Keep(_) if actions.start.is_empty() => return Ok(None),
        SandboxPlan::Keep(id) => sandbox::keep(ctx, pass, id).await,
        SandboxPlan::Create { attempt, .. } => {
            let created = sandbox::create(ctx, pass, *attempt).await;
            // One whose status cannot be read is there.
            let has_failed = matches!(created, Err(PodError::CreateSandbox { .. }));
            // The network may already know that the pod is gone.
            let is_abandoned = has_failed && terminated.is_cancelled();
            outcome.sandbox = Some(!has_failed || is_abandoned);
            if spec::has_user_namespace(&pass.pod) {
                ctx.count(|metrics| metrics.pods.user_namespaced_started());
            }
            if is_abandoned {
                return Err(Stop);
            }
            if let Err(error) = &created {
                ctx.report(&pass.pod, error);
            }
            created
        }
    };
    stop_at(outcome, sandbox).map(Some)
}

/// Starts one after the other. A failed init container keeps the following ones from starting, and so does the termination of
/// the pod.
async fn start_all(context: StartContext<'_>, actions: &PodActions, outcome: &mut SyncOutcome) {
    for start in &actions.start {
        if context.terminated.is_cancelled() {
            break;
        }
        let result = match crash_loop_back_off(context.ctx, &context.pass.pod, start) {
            Some(error) => Err(error),
            None => context.start(start).await,
        };
        if result.is_ok() {
            prefetch::after(context, start).await;
        }
        let result = result.map_err(|error| StartFailure::from(&error));
        let ends = result.is_err() && start.class == ContainerClass::Init;
        outcome.starts.push(StartOutcome { name: start.name.clone(), class: start.class, result });
        if ends {
            break;
        }
    }
    let failed = |start: &StartOutcome| start.result.as_ref().is_err_and(|failure| failure.token == "ErrImagePull");
    if outcome.starts.iter().any(failed) {
        let report = pull_secrets::report_missing(context.ctx, &context.pass.pod);
        // The secrets of a terminated pod are not waited for.
        context.terminated.run_until_cancelled(report).await;
    }
}
