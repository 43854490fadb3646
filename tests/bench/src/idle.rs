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

/// What an agent and the runtime have used; `None` for what was not observed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IdleUsage {
    /// Processor seconds of the agent, per minute.
    pub(crate) agent_cpu: Option<f64>,
    /// Processor seconds of the runtime, per minute.
    runtime_cpu: Option<f64>,
    /// CRI calls, per minute.
    cri_calls: Option<f64>,
    /// Requests to the API server, per minute.
    api_requests: Option<f64>,
    /// Resident memory of the agent, MiB.
    pub(crate) rss: Option<f64>,
    /// Its anonymous part, MiB.
    rss_anon: Option<f64>,
}

/// Observes an agent, or without one only the runtime, for `time`, and adds what they used.
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
    let usage = observe(agent, runtime_pid, time).await?;
    let figures = [
        (Metric::IdleAgentCpu, usage.agent_cpu),
        (Metric::IdleRuntimeCpu, usage.runtime_cpu),
        (Metric::IdleCriCalls, usage.cri_calls),
        (Metric::IdleApiRequests, usage.api_requests),
        (Metric::IdleRss, usage.rss),
        (Metric::IdleRssAnon, usage.rss_anon),
    ];
    for (metric, value) in figures {
        if let Some(value) = value {
            results.add(metric, participant, Series::Values(vec![value]));
        }
    }
    Ok(())
}

/// Observes an agent, or without one only the runtime, for `time`.
///
/// # Errors
/// A process exited.
pub(crate) async fn observe(
    agent: Option<&Agent>,
    runtime_pid: Option<u32>,
    time: Duration,
) -> anyhow::Result<IdleUsage> {
    // Metrics are read outside of the observed time, since that costs CPU time too.
    let counters_before = counters(agent).await;
    let (agent_cpu, runtime_cpu) = cpu(agent, runtime_pid)?;
    tokio::time::sleep(time).await;
    let (agent_cpu_after, runtime_cpu_after) = cpu(agent, runtime_pid)?;
    let counters_after = counters(agent).await;

    let minutes = time.as_secs_f64() / 60.0;
    let per_minute = |before: Option<f64>, after: Option<f64>| Some((after? - before?).max(0.0) / minutes);
    let resident = agent.map(|agent| usage::resident(agent.pid())).transpose()?;
    Ok(IdleUsage {
        agent_cpu: per_minute(agent_cpu, agent_cpu_after),
        runtime_cpu: per_minute(runtime_cpu, runtime_cpu_after),
        cri_calls: per_minute(counters_before.cri_calls, counters_after.cri_calls),
        api_requests: per_minute(counters_before.api_requests, counters_after.api_requests),
        rss: resident.map(|resident| resident.total),
        rss_anon: resident.map(|resident| resident.anonymous),
    })
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
