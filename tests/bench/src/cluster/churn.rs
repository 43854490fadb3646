//! Churn: one-shot pods created at a fixed rate, each deleted once it has succeeded.

use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use k8s_openapi::api::core::v1::Pod;
use tokio::task::JoinSet;

use super::api::ClusterClient;
use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::observed::ObservedPods;
use super::parts::Row;
use super::remains::Remains;
use crate::metric::Metric;
use crate::stamps;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload;

/// How long sandboxes and cgroups may exist after the last pod: kubelets remove exited sandboxes once a minute.
const REMAINS_LIMIT: Duration = Duration::from_secs(90);

/// Times of one pod; nanoseconds of CLOCK_MONOTONIC.
struct PodLifecycle {
    index: usize,
    uid: String,
    created: u64,
    terminated: u64,
    gone: u64,
}

/// Measures churn.
///
/// # Errors
/// The agent exited, or a pod, its sandbox or its cgroup is not removed in time.
pub(super) async fn measure(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let count = context.args.churn_pods();
    let pods = workload::one_shots(count, &format!("{prefix}-churn"), &node.settings.stamps());
    let objects = pods.iter().map(|pod| node.object(pod)).collect::<anyhow::Result<Vec<_>>>()?;
    let remains = Remains::watch(context.runtime.clone(), context.args.cgroup_root.clone());
    let limit = context.limit(pods.len());
    let observed = node.observed.clone();
    let lifecycles = create_all(&context.client, observed, objects, interval(context.args.churn_rate), limit);
    let lifecycles = node.agent.while_running(lifecycles).await?;

    let exits = lifecycles.iter().map(|pod| Ok(seconds(stamps::exit_of(&pods[pod.index].main)?, pod.terminated)));
    row.add(Metric::ChurnExitToTerminated, exits.collect::<anyhow::Result<_>>()?);
    row.add(Metric::ChurnCreateToGone, lifecycles.iter().map(|pod| seconds(pod.created, pod.gone)).collect());

    let uids: Vec<_> = lifecycles.iter().map(|pod| pod.uid.clone()).collect();
    let removed = node.agent.while_running(async { Ok(remains.until_removed(&uids, REMAINS_LIMIT).await) }).await?;
    let after = |at: u64, pod: &PodLifecycle| seconds(pod.gone, at.max(pod.gone));
    let sandboxes = lifecycles.iter().filter_map(|pod| Some(after(removed.sandbox(&pod.uid)?, pod)));
    row.add(Metric::ChurnGoneToSandboxRemoved, sandboxes.collect());
    if context.args.cgroup_root.is_some() {
        let cgroups = lifecycles.iter().filter_map(|pod| Some(after(removed.cgroup(&pod.uid)?, pod)));
        row.add(Metric::ChurnGoneToCgroupRemoved, cgroups.collect());
    }
    match removed.remaining(&uids) {
        0 => Ok(()),
        left => bail!("sandboxes or cgroups of {left} pods remain {} s after the last pod", REMAINS_LIMIT.as_secs()),
    }
}

/// Time between two creations.
pub(super) fn interval(rate: u32) -> Duration {
    Duration::from_secs(1) / rate.max(1)
}

async fn create_all(
    client: &ClusterClient,
    observed: ObservedPods,
    objects: Vec<Pod>,
    interval: Duration,
    limit: Duration,
) -> anyhow::Result<Vec<PodLifecycle>> {
    let mut ticks = tokio::time::interval(interval);
    let mut running = JoinSet::new();
    for (index, object) in objects.into_iter().enumerate() {
        ticks.tick().await;
        running.spawn(run_one_shot(client.clone(), observed.clone(), index, object, limit));
    }
    let mut lifecycles = Vec::new();
    while let Some(done) = running.join_next().await {
        lifecycles.push(done.context("the task of a pod was cancelled")??);
    }
    Ok(lifecycles)
}

/// Creates a pod, deletes it once it has succeeded, and waits until it is gone.
async fn run_one_shot(
    client: ClusterClient,
    observed: ObservedPods,
    index: usize,
    object: Pod,
    limit: Duration,
) -> anyhow::Result<PodLifecycle> {
    let name = [object.metadata.name.clone().unwrap_or_default()];
    let created = monotonic_now()?;
    client.create(std::slice::from_ref(&object)).await?;
    observed.wait(&name, "Succeeded", |times| times.succeeded, limit).await?;
    client.delete(&name).await?;
    observed.wait(&name, "gone", |times| times.gone, limit).await?;
    let times = observed.of(&name[0]);
    let incomplete = || format!("the watch of pod {} is incomplete", name[0]);
    Ok(PodLifecycle {
        index,
        uid: times.uid.with_context(incomplete)?,
        created,
        terminated: times.terminated.with_context(incomplete)?,
        gone: times.gone.with_context(incomplete)?,
    })
}
