//! Main processes that exceed the memory limit of their container, one after the other: from the kernel's kill to what
//! the API server shows of it.

use std::time::Duration;

use anyhow::ensure;

use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::bench_node::names;
use super::parts::Row;
use crate::metric::Metric;
use crate::pressure::KernelLog;
use crate::runtime_pods;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload;

/// How long an event may take.
const EVENT_LIMIT: Duration = Duration::from_secs(30);

/// Measures the kills.
///
/// # Errors
/// The agent exited, the kernel does not kill, or pods do not reach a state in time.
pub(super) async fn measure(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let _watching = context.client.watch_oom_events(&node.observed);
    let now = monotonic_now()?;
    let pods = workload::hungry(context.args.pods, &format!("{prefix}-oom"), &node.settings.stamps(), now);
    let mut kernel = KernelLog::open()?;
    let (_, ready) = node.create(context, &pods, "Ready", |times| times.ready).await?;
    let names = names(&pods);
    let pids = runtime_pods::main_pids(&context.runtime, &names).await?;
    let (limit, observed, reports) = (context.limit(pods.len()), node.observed.clone(), node.is_keblet);
    let observing = node.agent.while_running(async {
        let terminated = observed.wait(&names, "terminated", |times| times.terminated, limit);
        let (kills, _) = tokio::try_join!(kernel.kills_of(&pids, limit), terminated)?;
        let events = match reports {
            true => observed.wait(&names, "reported as killed", |times| times.oom_event, EVENT_LIMIT).await?,
            false => Vec::new(),
        };
        Ok((kills, events))
    });
    let (kills, events) = observing.await?;
    ensure!(kills.iter().min() > ready.iter().max(), "a process was killed before all pods were Ready");

    if reports {
        row.add(Metric::OomKillToEvent, delays(&kills, &events));
    }
    let shown = names.iter().map(|name| node.observed.of(name).oom_killed);
    let shown: Vec<(u64, u64)> = kills.into_iter().zip(shown).filter_map(|(kill, seen)| Some((kill, seen?))).collect();
    if !shown.is_empty() {
        row.add(Metric::OomKillToTerminated, shown.iter().map(|(kill, seen)| seconds(*kill, *seen)).collect());
    }
    let wrong = pods.len() - shown.len();
    row.add(Metric::OomWrongReasons, vec![100.0 * wrong as f64 / pods.len() as f64]);
    node.delete(context, &pods).await.map(drop)
}

fn delays(kills: &[u64], seen: &[u64]) -> Vec<f64> {
    kills.iter().zip(seen).map(|(kill, seen)| seconds(*kill, *seen)).collect()
}
