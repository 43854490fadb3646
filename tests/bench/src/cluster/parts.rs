//! The parts of the benchmark for agents; each creates its pods and removes them.

use std::time::Duration;

use super::Part;
use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::bench_node::names;
use super::churn;
use super::exit_flood;
use super::oom;
use super::probed;
use super::resize;
use super::rollout;
use super::volumes;
use crate::idle;
use crate::metric::Metric;
use crate::results::Results;
use crate::results::Series;
use crate::stamps;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload;

/// Pods of `chain`.
pub(super) const CHAIN_PODS: u32 = 10;
/// Init containers of `init-chain`.
pub(super) const INIT_CONTAINERS: u32 = 5;
/// Time for an agent to become idle after its pods run.
pub(super) const IDLE_SETTLE: Duration = Duration::from_secs(20);

/// Collects the values of one participant.
pub(super) struct Row<'a> {
    pub(super) results: &'a mut Results,
    pub(super) participant: &'a str,
}

impl Row<'_> {
    pub(super) fn add(&mut self, metric: Metric, values: Vec<f64>) {
        self.results.add(metric, self.participant, Series::Values(values));
    }
}

/// Measures the selected parts except density and idle.
///
/// # Errors
/// The agent exited, or pods do not reach a state in time.
pub(super) async fn measure(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let args = &context.args;
    row.add(Metric::AgentStartToNodeReady, vec![node.ready]);
    if args.includes(Part::Startup) || args.includes(Part::Delete) {
        startup_and_delete(context, node, prefix, row).await?;
    }
    if args.includes(Part::Exit) {
        exit(context, node, prefix, row).await?;
    }
    if args.includes(Part::Restart) {
        restart(context, node, prefix, row).await?;
    }
    if args.includes(Part::Chain) {
        chain(context, node, prefix, row).await?;
    }
    if args.includes(Part::InitChain) {
        init_chain(context, node, prefix, row).await?;
    }
    if args.includes(Part::Readiness) {
        probed::readiness(context, node, prefix, row).await?;
    }
    if args.includes(Part::Liveness) {
        probed::liveness(context, node, prefix, row).await?;
    }
    if args.includes(Part::Rollout) {
        rollout::measure(context, node, prefix, row).await?;
    }
    if args.includes(Part::Volumes) {
        volumes::measure(context, node, prefix, row).await?;
    }
    if args.includes(Part::Resize) {
        resize::measure(context, node, prefix, row).await?;
    }
    if args.includes(Part::Oom) {
        oom::measure(context, node, prefix, row).await?;
    }
    if args.includes(Part::ExitFlood) {
        exit_flood::measure(context, node, prefix, row).await?;
    }
    if args.includes(Part::Churn) {
        churn::measure(context, node, prefix, row).await?;
    }
    Ok(())
}

async fn startup_and_delete(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let pods = workload::running(context.args.pods, &format!("{prefix}-up"), &node.settings.stamps());
    let (begin, ready) = node.create(context, &pods, "Ready", |times| times.ready).await?;
    if context.args.includes(Part::Startup) {
        let last = ready.into_iter().max().unwrap_or(begin);
        row.add(Metric::CreateToAllReady, vec![seconds(begin, last)]);
    }
    let deleted = node.delete(context, &pods).await?;
    if context.args.includes(Part::Delete) {
        row.add(Metric::DeleteToGone, deleted);
    }
    Ok(())
}

/// Pods whose processes exit one after the other.
async fn exit(context: &Context, node: &mut BenchNode, prefix: &str, row: &mut Row<'_>) -> anyhow::Result<()> {
    let now = stamps::monotonic_now()?;
    let pods = workload::completing(context.args.pods, &format!("{prefix}-exit"), &node.settings.stamps(), now);
    let (_, terminated) = node.create(context, &pods, "terminated", |times| times.terminated).await?;
    let delays = pods.iter().zip(terminated).map(|(pod, seen)| Ok(seconds(stamps::exit_of(&pod.main)?, seen)));
    row.add(Metric::ExitToTerminated, delays.collect::<anyhow::Result<_>>()?);
    node.delete(context, &pods).await.map(drop)
}

/// Pods whose processes crash one after the other.
async fn restart(context: &Context, node: &mut BenchNode, prefix: &str, row: &mut Row<'_>) -> anyhow::Result<()> {
    let now = stamps::monotonic_now()?;
    let pods = workload::crashing(context.args.pods, &format!("{prefix}-crash"), &node.settings.stamps(), now);
    node.create(context, &pods, "Ready", |times| times.ready).await?;
    let limit = context.limit(pods.len());
    node.agent.while_running(stamps::wait_done(&pods, limit)).await?;
    row.add(Metric::ExitToRestarted, pods.iter().map(stamps::restart).collect::<anyhow::Result<_>>()?);
    node.delete(context, &pods).await.map(drop)
}

/// One-shot pods, each created as soon as the one before has succeeded.
async fn chain(context: &Context, node: &mut BenchNode, prefix: &str, row: &mut Row<'_>) -> anyhow::Result<()> {
    let pods = workload::one_shots(CHAIN_PODS, &format!("{prefix}-chain"), &node.settings.stamps());
    let begin = monotonic_now()?;
    for pod in &pods {
        node.create(context, std::slice::from_ref(pod), "Succeeded", |times| times.succeeded).await?;
    }
    row.add(Metric::OneShotChain, vec![seconds(begin, monotonic_now()?)]);
    node.delete(context, &pods).await.map(drop)
}

/// Pods with init containers, one after the other.
async fn init_chain(context: &Context, node: &mut BenchNode, prefix: &str, row: &mut Row<'_>) -> anyhow::Result<()> {
    let (count, name) = (workload::CHAIN_REPEATS, format!("{prefix}-init"));
    let pods = workload::init_chains(count, INIT_CONTAINERS, &name, &node.settings.stamps());
    for pod in &pods {
        node.create(context, std::slice::from_ref(pod), "Ready", |times| times.ready).await?;
    }
    let limit = context.limit(pods.len());
    node.agent.while_running(stamps::wait_done(&pods, limit)).await?;
    row.add(Metric::FiveInitChain, pods.iter().map(stamps::chain).collect::<anyhow::Result<_>>()?);
    node.delete(context, &pods).await.map(drop)
}

/// Creates many pods; returns their names. The caller stops watching them before [`watch_idle`].
///
/// # Errors
/// The agent exited, or a pod is not Ready in time.
pub(super) async fn density(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<Vec<String>> {
    let pods = workload::running(context.args.density_pods, &format!("{prefix}-many"), &node.settings.stamps());
    let (begin, ready) = node.create(context, &pods, "Ready", |times| times.ready).await?;
    if context.args.includes(Part::Density) {
        let last = ready.into_iter().max().unwrap_or(begin);
        row.add(Metric::DensityCreateToAllReady, vec![seconds(begin, last)]);
    }
    Ok(names(&pods))
}

/// Observes an agent with idle pods.
///
/// # Errors
/// The agent exited.
pub(super) async fn watch_idle(context: &Context, node: &BenchNode, row: &mut Row<'_>) -> anyhow::Result<()> {
    tokio::time::sleep(IDLE_SETTLE).await;
    let time = context.args.idle_time;
    idle::watch(row.results, row.participant, Some(&node.agent), context.runtime_pid, time).await
}
