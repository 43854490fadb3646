//! CPU time, memory, calls and requests of an agent and the runtime while pods are idle.

use std::time::Duration;

use super::agent::Agent;
use super::metric::Metric;
use super::results::Results;
use super::results::Series;
use super::usage;

/// The metric that counts CRI calls, with upstream's name.
const CRI_CALLS: &str = "kubelet_runtime_operations_total";
/// The metric that counts requests to the API server, with upstream's name.
const API_REQUESTS: &str = "rest_client_requests_total";

/// Counters of an idle agent; `None` for those it does not have.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    cri_calls: Option<f64>,
    api_requests: Option<f64>,
}

/// Observes an agent, or without one only the runtime, for `time`.
///
/// # Errors
/// A process exited.
pub(crate) async fn watch(
    results: &mut Results,
    participant: &str,
    agent: Option<&Agent>,
    runtime_pid: Option<u32>,
    time: Duration,
) -> anyhow::Result<()> {
    // Metrics are read outside of the observed time, since that costs CPU time too.
    let counters_before = counters(agent).await;
    let (agent_cpu, runtime_cpu) = cpu(agent, runtime_pid)?;
    tokio::time::sleep(time).await;
    let (agent_cpu_after, runtime_cpu_after) = cpu(agent, runtime_pid)?;
    let counters_after = counters(agent).await;

    let minutes = time.as_secs_f64() / 60.0;
    let mut add = |metric, value: Option<f64>| {
        if let Some(value) = value {
            results.add(metric, participant, Series::Values(vec![value]));
        }
    };
    let per_minute = |before: Option<f64>, after: Option<f64>| Some((after? - before?).max(0.0) / minutes);
    add(Metric::IdleAgentCpu, per_minute(agent_cpu, agent_cpu_after));
    add(Metric::IdleRuntimeCpu, per_minute(runtime_cpu, runtime_cpu_after));
    add(Metric::IdleCriCalls, per_minute(counters_before.cri_calls, counters_after.cri_calls));
    add(Metric::IdleApiRequests, per_minute(counters_before.api_requests, counters_after.api_requests));
    if let Some(agent) = agent {
        let resident = usage::resident(agent.pid())?;
        add(Metric::IdleRss, Some(resident.total));
        add(Metric::IdleRssAnon, Some(resident.anonymous));
    }
    Ok(())
}

/// Processor seconds of the agent and of the runtime so far.
fn cpu(agent: Option<&Agent>, runtime_pid: Option<u32>) -> anyhow::Result<(Option<f64>, Option<f64>)> {
    let seconds = |pid: Option<u32>| -> anyhow::Result<Option<f64>> {
        Ok(pid.map(usage::cpu_time).transpose()?.map(|time| time.as_secs_f64()))
    };
    Ok((seconds(agent.map(Agent::pid))?, seconds(runtime_pid)?))
}

async fn counters(agent: Option<&Agent>) -> Counters {
    let Some(agent) = agent else { return Counters::default() };
    match agent.exposition().await {
        Ok(read) => Counters { cri_calls: read.sum(CRI_CALLS), api_requests: read.sum(API_REQUESTS) },
        Err(error) => {
            tracing::debug!(%error, "the agent has no metrics");
            Counters::default()
        }
    }
}
