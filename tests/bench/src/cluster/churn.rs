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

/// How long sandboxes and cgroups may outlive the last pod: kubelets collect dead sandboxes once a minute.
const REMAINS_LIMIT: Duration = Duration::from_secs(90);

/// What became of one pod; nanoseconds of CLOCK_MONOTONIC.
struct Life {
    index: usize,
    uid: String,
    created: u64,
    terminated: u64,
    gone: u64,
}

/// Measures churn.
///
/// # Errors
/// The agent ended, or a pod, its sandbox or its cgroup is not gone in time.
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
    let lives = create_all(&context.client, observed, objects, interval(context.args.churn_rate), limit);
    let lives = node.agent.while_alive(lives).await?;

    let exits = lives.iter().map(|life| Ok(seconds(stamps::exit_of(&pods[life.index].main)?, life.terminated)));
    row.add(Metric::ChurnExitToTerminated, exits.collect::<anyhow::Result<_>>()?);
    row.add(Metric::ChurnCreateToGone, lives.iter().map(|life| seconds(life.created, life.gone)).collect());

    let uids: Vec<_> = lives.iter().map(|life| life.uid.clone()).collect();
    let removed = node.agent.while_alive(async { Ok(remains.until_removed(&uids, REMAINS_LIMIT).await) }).await?;
    let after = |at: u64, life: &Life| seconds(life.gone, at.max(life.gone));
    let sandboxes = lives.iter().filter_map(|life| Some(after(removed.sandbox(&life.uid)?, life)));
    row.add(Metric::ChurnGoneToSandboxRemoved, sandboxes.collect());
    if context.args.cgroup_root.is_some() {
        let cgroups = lives.iter().filter_map(|life| Some(after(removed.cgroup(&life.uid)?, life)));
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
) -> anyhow::Result<Vec<Life>> {
    let mut ticks = tokio::time::interval(interval);
    let mut running = JoinSet::new();
    for (index, object) in objects.into_iter().enumerate() {
        ticks.tick().await;
        running.spawn(live(client.clone(), observed.clone(), index, object, limit));
    }
    let mut lives = Vec::new();
    while let Some(done) = running.join_next().await {
        lives.push(done.context("the task of a pod ended early")??);
    }
    Ok(lives)
}

/// Creates a pod, deletes it once it has succeeded, and waits until it is gone.
async fn live(
    client: ClusterClient,
    observed: ObservedPods,
    index: usize,
    object: Pod,
    limit: Duration,
) -> anyhow::Result<Life> {
    let name = [object.metadata.name.clone().unwrap_or_default()];
    let created = monotonic_now()?;
    client.create(std::slice::from_ref(&object)).await?;
    observed.wait(&name, "Succeeded", |times| times.succeeded, limit).await?;
    client.delete(&name).await?;
    observed.wait(&name, "gone", |times| times.gone, limit).await?;
    let times = observed.of(&name[0]);
    let known = || format!("the watch of pod {} is incomplete", name[0]);
    Ok(Life {
        index,
        uid: times.uid.with_context(known)?,
        created,
        terminated: times.terminated.with_context(known)?,
        gone: times.gone.with_context(known)?,
    })
}
