//! Processes outside of all pods that exit at a high rate: what the probes of an idle agent cost it.
//!
//! The time that the kernel spends in probes of the exiting processes is theirs, and is not counted.

use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::ensure;
use tokio::process::Command;

use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::parts::IDLE_SETTLE;
use super::parts::Row;
use crate::flood::Flood;
use crate::metric::Metric;
use crate::observer::Observer;
use crate::usage;
use crate::workload;

/// Pods of the idle agent.
const PODS: u32 = 5;
/// Exits per second, if the machine is fast enough.
const RATE: u32 = 10_000;
/// Exits that a figure is for.
const EXITS: f64 = 10_000.0;
/// Time for work that goes on after the last exit.
const SETTLE: Duration = Duration::from_secs(1);

/// Measures the agent, and `keblet observe` beside it, for the same time without and with exits.
///
/// # Errors
/// The agent or `keblet observe` exited, or the processes cannot be started.
pub(super) async fn measure(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let pods = workload::running(PODS, &format!("{prefix}-flood"), &node.settings.stamps());
    node.create(context, &pods, "Ready", |times| times.ready).await?;
    let observer = match node.is_keblet {
        true => Some(Observer::start(&context.keblet, &context.endpoint, &node.settings.folder)?),
        false => None,
    };
    let mut measured = vec![(node.agent.pid(), Metric::ExitFloodAgentCpu)];
    measured.extend(observer.as_ref().map(|observer| (observer.pid(), Metric::ExitFloodObserveCpu)));
    let pids: Vec<u32> = measured.iter().map(|(pid, _)| *pid).collect();
    let time = context.args.flood_time;
    let figures = node.agent.while_running(async {
        tokio::time::sleep(IDLE_SETTLE).await;
        let ((), idle) = spent(&pids, idle(time)).await?;
        let (flood, flooded) = spent(&pids, flood(time)).await?;
        Ok((flood, idle, flooded))
    });
    let (flood, idle, flooded) = figures.await?;
    if let Some(mut observer) = observer {
        observer.check_running()?;
        observer.stop().await?;
    }
    row.add(Metric::ExitFloodRate, vec![flood.exits as f64 / flood.seconds]);
    for ((_, metric), (idle, flooded)) in measured.into_iter().zip(idle.into_iter().zip(flooded)) {
        row.add(metric, vec![per_exits(idle, flooded, flood.exits)]);
    }
    node.delete(context, &pods).await.map(drop)
}

/// Runs `work`, and returns what each process has used until all that follows from it is done.
async fn spent<T>(pids: &[u32], work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<(T, Vec<Duration>)> {
    let times = || pids.iter().map(|pid| usage::cpu_time(*pid)).collect::<anyhow::Result<Vec<_>>>();
    let before = times()?;
    let done = work.await?;
    tokio::time::sleep(SETTLE).await;
    let used = times()?.into_iter().zip(before).map(|(after, before)| after.saturating_sub(before));
    Ok((done, used.collect()))
}

/// Lets nothing happen for `time`.
async fn idle(time: Duration) -> anyhow::Result<()> {
    tokio::time::sleep(time).await;
    Ok(())
}

/// Lets processes exit for `time`; another process starts them, so that this one is not slowed down.
async fn flood(time: Duration) -> anyhow::Result<Flood> {
    let program = std::env::current_exe().context("cannot determine the path of this program")?;
    let mut command = Command::new(&program);
    command.args(["flood", "--rate", &RATE.to_string(), "--time", &format!("{}ms", time.as_millis())]);
    command.stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    let output = command.output().await.with_context(|| format!("cannot run {} flood", program.display()))?;
    ensure!(output.status.success(), "{} flood failed: {}", program.display(), output.status);
    let flood = Flood::parse(&String::from_utf8_lossy(&output.stdout))?;
    ensure!(flood.exits > 0, "no process exited");
    Ok(flood)
}

/// What a process has used because of so many exits, in seconds for [`EXITS`] of them.
fn per_exits(idle: Duration, flooded: Duration, exits: u64) -> f64 {
    flooded.saturating_sub(idle).as_secs_f64() / (exits as f64 / EXITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_exits_add_is_counted() {
        let (idle, flooded) = (Duration::from_millis(100), Duration::from_millis(350));
        assert_eq!(per_exits(idle, flooded, 50_000), 0.05);
        assert_eq!(per_exits(flooded, idle, 50_000), 0.0);
    }
}
