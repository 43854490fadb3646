//! Parts with probes: servers that get ready, servers that fail, and servers that are only probed.

use std::time::Duration;

use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::bench_node::names;
use super::parts::IDLE_SETTLE;
use super::parts::Row;
use crate::idle;
use crate::metric::Metric;
use crate::stamps;
use crate::stamps::seconds;
use crate::workload;
use crate::workload::Check;

/// Pods are created one after the other, so that the reaction to each is measured and not the runtime's queue.
const BETWEEN_STARTS: Duration = Duration::from_millis(500);
/// Periods of readiness probes.
const PERIODS: [(u32, Metric); 2] = [(1, Metric::AnswerToReady), (10, Metric::AnswerToReadySlowProbe)];
/// Period of probes of idle pods.
const IDLE_PERIOD: u32 = 10;

/// An agent with idle pods that are probed.
pub(super) struct ProbedIdle {
    pub(super) name: &'static str,
    check: Check,
    cpu: Metric,
    rss: Metric,
}

impl ProbedIdle {
    pub(super) const ALL: [Self; 2] = [
        Self { name: "tcp", check: Check::Tcp, cpu: Metric::TcpProbesAgentCpu, rss: Metric::TcpProbesRss },
        Self { name: "http", check: Check::Http, cpu: Metric::HttpProbesAgentCpu, rss: Metric::HttpProbesRss },
    ];

    /// Creates the pods.
    ///
    /// # Errors
    /// The agent exited, or a pod is not Ready in time.
    pub(super) async fn create(&self, context: &Context, node: &mut BenchNode, prefix: &str) -> anyhow::Result<()> {
        let (count, stamps) = (context.args.density_pods, node.settings.stamps());
        let pods = workload::serving(count, &format!("{prefix}-probed"), &stamps, self.check, IDLE_PERIOD);
        node.create(context, &pods, "Ready", |times| times.ready).await.map(drop)
    }

    /// Observes the agent. The caller has stopped watching the pods.
    ///
    /// # Errors
    /// The agent exited.
    pub(super) async fn watch(&self, context: &Context, node: &BenchNode, row: &mut Row<'_>) -> anyhow::Result<()> {
        tokio::time::sleep(IDLE_SETTLE).await;
        let usage = idle::observe(Some(&node.agent), context.runtime_pid, context.args.idle_time).await?;
        row.add(self.cpu, usage.agent_cpu.into_iter().collect());
        row.add(self.rss, usage.rss.into_iter().collect());
        Ok(())
    }
}

/// Servers that answer as soon as they run, probed with each period.
///
/// # Errors
/// The agent exited, or a pod is not Ready in time.
pub(super) async fn readiness(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    for (period, metric) in PERIODS {
        let (count, stamps) = (context.args.pods, node.settings.stamps());
        let pods = workload::serving(count, &format!("{prefix}-ready{period}"), &stamps, Check::Http, period);
        let objects = pods.iter().map(|pod| node.object(pod)).collect::<anyhow::Result<Vec<_>>>()?;
        let limit = context.limit(pods.len()) + BETWEEN_STARTS * count;
        let observed = node.observed.clone();
        let ready = node.agent.while_running(async {
            let mut ticks = tokio::time::interval(BETWEEN_STARTS);
            for object in &objects {
                ticks.tick().await;
                context.client.create(std::slice::from_ref(object)).await?;
            }
            observed.wait(&names(&pods), "Ready", |times| times.ready, limit).await
        });
        let ready = ready.await?;
        let delays = pods.iter().zip(ready).map(|(pod, seen)| Ok(seconds(stamps::first_start(&pod.main)?, seen)));
        row.add(metric, delays.collect::<anyhow::Result<_>>()?);
        node.delete(context, &pods).await?;
    }
    Ok(())
}

/// Servers that fail one after the other.
///
/// # Errors
/// The agent exited, or a pod is not restarted in time.
pub(super) async fn liveness(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let now = stamps::monotonic_now()?;
    let pods = workload::failing(context.args.pods, &format!("{prefix}-fail"), &node.settings.stamps(), now);
    node.create(context, &pods, "Ready", |times| times.ready).await?;
    let limit = context.limit(pods.len());
    node.agent.while_running(stamps::wait_done(&pods, limit)).await?;
    row.add(Metric::UnhealthyToRestarted, pods.iter().map(stamps::restart).collect::<anyhow::Result<_>>()?);
    node.delete(context, &pods).await.map(drop)
}
