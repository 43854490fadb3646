//! The parts of the benchmark for the bare client: the time that the runtime alone takes for the same pods.

use std::time::Duration;

use anyhow::Context as _;
use tokio::task::JoinSet;

use super::Part;
use super::bench_node::Context;
use super::churn;
use super::parts::CHAIN_PODS;
use super::parts::IDLE_SETTLE;
use super::parts::INIT_CONTAINERS;
use super::parts::Row;
use super::resize;
use super::volumes;
use crate::bare_client::BareClient;
use crate::bare_client::ExitDetection;
use crate::bare_client::RunningPod;
use crate::idle;
use crate::manifest::PodSettings;
use crate::metric::Metric;
use crate::runtime_pods;
use crate::stamps;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload;
use crate::workload::BenchPod;

/// Time for the last process to set its signal handlers: until then, PID 1 ignores SIGTERM.
const UP_SETTLE: Duration = Duration::from_secs(2);

/// Measures the selected parts; `idle` says whether to observe the idle runtime.
///
/// # Errors
/// The runtime fails a call.
pub(super) async fn measure(
    context: &Context,
    settings: &PodSettings,
    prefix: &str,
    idle: bool,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let args = &context.args;
    let part = Parts { context, settings, prefix };
    if args.includes(Part::Startup) || args.includes(Part::Delete) {
        part.startup_and_delete(row).await?;
    }
    if args.includes(Part::Exit) {
        part.exit(row).await?;
    }
    if args.includes(Part::Restart) {
        part.restart(row).await?;
    }
    if args.includes(Part::Chain) {
        part.chain(row).await?;
    }
    if args.includes(Part::InitChain) {
        part.init_chain(row).await?;
    }
    if args.includes(Part::Liveness) {
        part.liveness(row).await?;
    }
    if args.includes(Part::Volumes) {
        volumes::request(context, prefix, row).await?;
    }
    if args.includes(Part::Resize) {
        part.resize(row).await?;
    }
    if args.includes(Part::Churn) {
        part.churn(row).await?;
    }
    if args.includes(Part::Density) || idle {
        part.density(idle, row).await?;
    }
    Ok(())
}

struct Parts<'a> {
    context: &'a Context,
    settings: &'a PodSettings,
    prefix: &'a str,
}

impl Parts<'_> {
    fn client(&self, parallelism: usize) -> BareClient {
        BareClient::new(self.context.runtime.clone(), ExitDetection::Pidfd, self.settings.clone(), parallelism)
    }

    fn name(&self, part: &str) -> String {
        format!("{}-{part}", self.prefix)
    }

    /// The best of several parallelisms, separately for each figure.
    async fn startup_and_delete(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let (mut starts, mut deletions) = (Vec::new(), Vec::new());
        for parallelism in parallelisms(self.context.args.pods) {
            let name = self.name(&format!("up{parallelism}"));
            let pods = workload::running(self.context.args.pods, &name, &self.settings.stamps());
            let (took, running) = self.start(&pods, parallelism).await?;
            eprintln!("  {parallelism} pods at a time: all {} run after {took:.2} s", pods.len());
            starts.push(took);
            tokio::time::sleep(UP_SETTLE).await;
            deletions.push(self.client(parallelism).stop(&running, parallelism).await?);
            runtime_pods::sweep(&self.context.runtime).await?;
        }
        if self.context.args.includes(Part::Startup) {
            row.add(Metric::CreateToAllReady, starts.into_iter().reduce(f64::min).into_iter().collect());
        }
        if self.context.args.includes(Part::Delete) {
            row.add(Metric::DeleteToGone, least_median(deletions));
        }
        Ok(())
    }

    /// Starts the pods; returns the seconds until all processes run.
    async fn start(&self, pods: &[BenchPod], parallelism: usize) -> anyhow::Result<(f64, Vec<RunningPod>)> {
        let client = self.client(parallelism);
        client.prepare(pods)?;
        let begin = monotonic_now()?;
        let started = tokio::time::timeout(self.context.limit(pods.len()), client.start(pods)).await;
        let running = started.context("the bare client did not start the pods in time")??;
        Ok((seconds(begin, monotonic_now()?), running))
    }

    /// Runs the pods to the end; returns when the exit of each was noticed.
    async fn run(&self, pods: &[BenchPod]) -> anyhow::Result<Vec<(BenchPod, u64)>> {
        let client = self.client(pods.len());
        client.prepare(pods)?;
        let run = tokio::time::timeout(self.context.limit(pods.len()), client.run(pods)).await;
        run.context("the bare client did not finish in time")?
    }

    async fn exit(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let now = monotonic_now()?;
        let pods = workload::completing(self.context.args.pods, &self.name("exit"), &self.settings.stamps(), now);
        let noticed = self.run(&pods).await?;
        let delays = noticed.iter().map(|(pod, at)| Ok(seconds(stamps::exit_of(&pod.main)?, *at)));
        row.add(Metric::ExitToTerminated, delays.collect::<anyhow::Result<_>>()?);
        runtime_pods::sweep(&self.context.runtime).await
    }

    async fn restart(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let now = monotonic_now()?;
        let pods = workload::crashing(self.context.args.pods, &self.name("crash"), &self.settings.stamps(), now);
        self.run(&pods).await?;
        stamps::wait_done(&pods, self.context.limit(pods.len())).await?;
        row.add(Metric::ExitToRestarted, pods.iter().map(stamps::restart).collect::<anyhow::Result<_>>()?);
        runtime_pods::sweep(&self.context.runtime).await
    }

    async fn chain(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let pods = workload::one_shots(CHAIN_PODS, &self.name("chain"), &self.settings.stamps());
        let client = self.client(1);
        client.prepare(&pods)?;
        let begin = monotonic_now()?;
        for pod in &pods {
            client.complete(pod).await.with_context(|| format!("pod {}", pod.name))?;
        }
        row.add(Metric::OneShotChain, vec![seconds(begin, monotonic_now()?)]);
        runtime_pods::sweep(&self.context.runtime).await
    }

    async fn init_chain(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let (count, name) = (workload::CHAIN_REPEATS, self.name("init"));
        let pods = workload::init_chains(count, INIT_CONTAINERS, &name, &self.settings.stamps());
        for pod in &pods {
            self.run(std::slice::from_ref(pod)).await?;
        }
        stamps::wait_done(&pods, self.context.limit(pods.len())).await?;
        row.add(Metric::FiveInitChain, pods.iter().map(stamps::chain).collect::<anyhow::Result<_>>()?);
        runtime_pods::sweep(&self.context.runtime).await
    }

    /// Containers that are stopped and started again, one after the other: from the decision to the next process.
    async fn liveness(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let now = monotonic_now()?;
        let pods = workload::failing(self.context.args.pods, &self.name("fail"), &self.settings.stamps(), now);
        let (_, running) = self.start(&pods, pods.len()).await?;
        tokio::time::sleep(UP_SETTLE).await;
        let client = self.client(1);
        let mut restarts = Vec::new();
        for (pod, running) in pods.iter().zip(&running) {
            let begin = client.restart(pod, running).await.with_context(|| format!("pod {}", pod.name))?;
            stamps::wait_done(std::slice::from_ref(pod), self.context.limit(1)).await?;
            restarts.push(seconds(begin, stamps::last_start(&pod.main)?));
        }
        row.add(Metric::UnhealthyToRestarted, restarts);
        runtime_pods::sweep(&self.context.runtime).await
    }

    async fn resize(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let pods = workload::running(1, &self.name("resize"), &self.settings.stamps());
        let (_, running) = self.start(&pods, 1).await?;
        for pod in &running {
            resize::call_runtime(self.context, pod.container(), row).await?;
        }
        runtime_pods::sweep(&self.context.runtime).await
    }

    async fn churn(&self, row: &mut Row<'_>) -> anyhow::Result<()> {
        let args = &self.context.args;
        let pods = workload::one_shots(args.churn_pods(), &self.name("churn"), &self.settings.stamps());
        let client = self.client(pods.len());
        client.prepare(&pods)?;
        let mut ticks = tokio::time::interval(churn::interval(args.churn_rate));
        let mut running = JoinSet::new();
        for pod in pods {
            ticks.tick().await;
            let client = client.clone();
            running.spawn(async move {
                client.complete_and_remove(&pod).await.with_context(|| format!("pod {}", pod.name))
            });
        }
        let mut pods = Vec::new();
        while let Some(done) = running.join_next().await {
            pods.push(done.context("the task of a pod was cancelled")??);
        }
        row.add(Metric::ChurnExitToTerminated, pods.iter().map(|pod| seconds(pod.exited, pod.noticed)).collect());
        row.add(Metric::ChurnCreateToGone, pods.iter().map(|pod| seconds(pod.created, pod.gone)).collect());
        let sandboxes = pods.iter().map(|pod| seconds(pod.gone, pod.sandbox_removed));
        row.add(Metric::ChurnGoneToSandboxRemoved, sandboxes.collect());
        Ok(())
    }

    async fn density(&self, idle: bool, row: &mut Row<'_>) -> anyhow::Result<()> {
        let args = &self.context.args;
        let mut starts = Vec::new();
        for parallelism in parallelisms(args.density_pods) {
            runtime_pods::sweep(&self.context.runtime).await?;
            let name = self.name(&format!("many{parallelism}"));
            let pods = workload::running(args.density_pods, &name, &self.settings.stamps());
            let (took, _) = self.start(&pods, parallelism).await?;
            eprintln!("  {parallelism} pods at a time: all {} run after {took:.2} s", pods.len());
            starts.push(took);
            if !args.includes(Part::Density) {
                break;
            }
        }
        if args.includes(Part::Density) {
            row.add(Metric::DensityCreateToAllReady, starts.into_iter().reduce(f64::min).into_iter().collect());
        }
        if idle {
            tokio::time::sleep(IDLE_SETTLE).await;
            idle::watch(row.results, row.participant, None, self.context.runtime_pid, args.idle_time).await?;
        }
        Ok(())
    }
}

/// Two, four and all pods at once.
fn parallelisms(pods: u32) -> Vec<usize> {
    let pods = pods as usize;
    let mut all = vec![2.min(pods), 4.min(pods), pods];
    all.dedup();
    all
}

/// The series with the least median.
fn least_median(series: Vec<Vec<f64>>) -> Vec<f64> {
    let median = |values: &[f64]| {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::INFINITY)
    };
    series.into_iter().min_by(|a, b| median(a).total_cmp(&median(b))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_parallelism_is_taken() {
        assert_eq!(parallelisms(30), [2, 4, 30]);
        assert_eq!(parallelisms(3), [2, 3]);
        assert_eq!(parallelisms(1), [1]);
        assert_eq!(least_median(vec![vec![3.0, 1.0, 9.0], vec![2.0, 2.0, 20.0]]), [2.0, 2.0, 20.0]);
        assert_eq!(least_median(Vec::new()), Vec::<f64>::new());
    }
}
