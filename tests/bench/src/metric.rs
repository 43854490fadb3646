//! The metrics of the benchmarks: identifier, title and unit of each.

use serde::Serialize;

/// What a value measures. Its identifier in reports is its name in snake case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Start of the agent to its node being Ready in the API server.
    AgentStartToNodeReady,
    /// Start of the agent to the first successful response of its `/healthz`.
    AgentStartToHealthy,
    /// Start of the agent to the last static pod's process.
    AgentStartToAllRunning,
    /// First of many pods created to the last one Ready.
    CreateToAllReady,
    /// A pod deleted to its object gone.
    DeleteToGone,
    /// Exit of a process to its container being terminated in a watch.
    ExitToTerminated,
    /// Exit of a process to the start of the next one.
    ExitToRestarted,
    /// Exit of a process to its detection.
    ExitToNoticed,
    /// One-shot pods, each created when the one before has succeeded.
    OneShotChain,
    /// First process of a pod's init containers to its main one, one pod at a time.
    InitChain,
    /// The same, ten pods at a time.
    InitChainsAtOnce,
    /// A server's open port to its pod being Ready in a watch, probed every second.
    AnswerToReady,
    /// The same, probed every ten seconds.
    AnswerToReadySlowProbe,
    /// A failed liveness probe to the start of the next process.
    UnhealthyToRestarted,
    /// A Deployment with readiness probes created to all its pods available.
    ApplyToAvailable,
    /// A new template of it to all pods of that available and no other left.
    RollingUpdate,
    /// First process of a pod's five init containers to its main one.
    FiveInitChain,
    /// Creation of a pod with many volumes to its sandbox, less that of a pod without; of a bare client the requests for them.
    VolumeSetup,
    /// Request of another CPU limit to the limit in the container's cgroup; of a bare client the runtime call.
    ResizeToApplied,
    /// The same request to the limit in the status in a watch.
    ResizeToReported,
    /// Pods created at a fixed rate: exit of the process to `terminated` in a watch.
    ChurnExitToTerminated,
    /// The same: a pod created to its object gone.
    ChurnCreateToGone,
    /// The same: the object gone to its sandbox removed from the runtime; 0 if that was earlier.
    ChurnGoneToSandboxRemoved,
    /// The same: the object gone to its cgroup removed; 0 if that was earlier.
    ChurnGoneToCgroupRemoved,
    /// Pods at full density: first one created to the last one Ready.
    DensityCreateToAllReady,
    /// An OOM kill to its report by the agent.
    OomKillToReport,
    /// An OOM kill of a main process to its container being terminated in the agent's statuses.
    OomKillToStatus,
    /// OOM kills that were not reported with their process and limit, percent.
    OomWrongVerdicts,
    /// Containers whose termination has a wrong reason, percent.
    OomWrongReasons,
    /// An OOM kill of a main process to the agent's event on the pod in a watch.
    OomKillToEvent,
    /// The same to its container being terminated with the reason OOMKilled in a watch.
    OomKillToTerminated,
    /// Races of a growing pod in which it was evicted before the kernel killed, percent.
    RaceWon,
    /// How fast the pod really grew before, MiB per second.
    RaceGrowth,
    /// `memory.available` below the threshold to the final status of the evicted pod in a watch.
    RaceCrossingToEvicted,
    /// What woke the agent to its decision to evict, from its own histogram.
    RaceTriggerToDecision,
    /// The threshold of a pressure policy held to all tasks waiting for less than 5 % of a second; 30 s without a relief.
    ThrashHeldToRelieved,
    /// The threshold held to the final status of the evicted pod in a watch.
    ThrashHeldToEvicted,
    /// What woke the agent to its decision to evict, from its own histogram.
    ThrashTriggerToDecision,
    /// Stalls that did not end with the eviction of the thrashing pod and no other, percent.
    ThrashMissed,
    /// A request to a pod that does not thrash, before another one does.
    ThrashBystanderBefore,
    /// The same within 30 s after the threshold held.
    ThrashBystanderDuring,
    /// The same once the thrashing pod is gone.
    ThrashBystanderAfter,
    /// Processor seconds of the idle agent, per minute.
    IdleAgentCpu,
    /// Processor seconds of the runtime meanwhile, per minute.
    IdleRuntimeCpu,
    /// CRI calls meanwhile, per minute.
    IdleCriCalls,
    /// Requests to the API server meanwhile, per minute.
    IdleApiRequests,
    /// Anonymous resident memory of the idle agent, MiB.
    IdleRssAnon,
    /// Resident memory of the idle agent, MiB.
    IdleRss,
    /// Processor seconds of the agent with idle pods whose readiness is probed by TCP, per minute.
    TcpProbesAgentCpu,
    /// Its resident memory, MiB.
    TcpProbesRss,
    /// Processor seconds of the agent with idle pods whose readiness is probed by HTTP, per minute.
    HttpProbesAgentCpu,
    /// Its resident memory, MiB.
    HttpProbesRss,
    /// Processor seconds of `keblet observe` beside an idle agent, per minute.
    ObserveCpu,
    /// Its resident memory, MiB.
    ObserveRss,
    /// Processes outside of pods that exit beside an idle agent, per second.
    ExitFloodRate,
    /// CPU time of the agent for 10,000 of these exits.
    ExitFloodAgentCpu,
    /// CPU time of `keblet observe` for 10,000 of these exits.
    ExitFloodObserveCpu,
    /// CPU time of the agent for one scrape of `/metrics`.
    ScrapeMetrics,
    /// The same of `/metrics/cadvisor`.
    ScrapeCadvisor,
    /// The same of `/metrics/resource`.
    ScrapeResource,
    /// The same of `/stats/summary`.
    ScrapeSummary,
}

/// Unit of a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    Seconds,
    CpuSecondsPerMinute,
    PerMinute,
    PerSecond,
    Mebibytes,
    MebibytesPerSecond,
    Percent,
}

/// Number of pods of each kind of workload.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PodCounts {
    pub(crate) pods: u32,
    pub(crate) idle: u32,
}

impl Metric {
    /// All, in the order of the report.
    pub(crate) const ALL: [Self; 61] = [
        Self::AgentStartToNodeReady,
        Self::AgentStartToHealthy,
        Self::AgentStartToAllRunning,
        Self::CreateToAllReady,
        Self::DeleteToGone,
        Self::ExitToTerminated,
        Self::ExitToRestarted,
        Self::ExitToNoticed,
        Self::OneShotChain,
        Self::InitChain,
        Self::InitChainsAtOnce,
        Self::AnswerToReady,
        Self::AnswerToReadySlowProbe,
        Self::UnhealthyToRestarted,
        Self::ApplyToAvailable,
        Self::RollingUpdate,
        Self::FiveInitChain,
        Self::VolumeSetup,
        Self::ResizeToApplied,
        Self::ResizeToReported,
        Self::ChurnExitToTerminated,
        Self::ChurnCreateToGone,
        Self::ChurnGoneToSandboxRemoved,
        Self::ChurnGoneToCgroupRemoved,
        Self::DensityCreateToAllReady,
        Self::OomKillToReport,
        Self::OomKillToStatus,
        Self::OomWrongVerdicts,
        Self::OomWrongReasons,
        Self::OomKillToEvent,
        Self::OomKillToTerminated,
        Self::RaceWon,
        Self::RaceGrowth,
        Self::RaceCrossingToEvicted,
        Self::RaceTriggerToDecision,
        Self::ThrashHeldToRelieved,
        Self::ThrashHeldToEvicted,
        Self::ThrashTriggerToDecision,
        Self::ThrashMissed,
        Self::ThrashBystanderBefore,
        Self::ThrashBystanderDuring,
        Self::ThrashBystanderAfter,
        Self::IdleAgentCpu,
        Self::IdleRuntimeCpu,
        Self::IdleCriCalls,
        Self::IdleApiRequests,
        Self::IdleRssAnon,
        Self::IdleRss,
        Self::TcpProbesAgentCpu,
        Self::TcpProbesRss,
        Self::HttpProbesAgentCpu,
        Self::HttpProbesRss,
        Self::ObserveCpu,
        Self::ObserveRss,
        Self::ExitFloodRate,
        Self::ExitFloodAgentCpu,
        Self::ExitFloodObserveCpu,
        Self::ScrapeMetrics,
        Self::ScrapeCadvisor,
        Self::ScrapeResource,
        Self::ScrapeSummary,
    ];

    /// Heading of its table.
    pub(crate) fn title(self, counts: PodCounts) -> String {
        let PodCounts { pods, idle } = counts;
        match self {
            Self::AgentStartToNodeReady => "agent start to node Ready".to_owned(),
            Self::AgentStartToHealthy => "agent start to healthy".to_owned(),
            Self::AgentStartToAllRunning => format!("{pods} static pods, agent start to all running"),
            Self::CreateToAllReady => format!("{pods} pods, first one created to all Ready"),
            Self::DeleteToGone => format!("{pods} pods deleted at once, each deleted to object gone"),
            Self::ExitToTerminated => format!("{pods} pods, process exit to terminated in a watch"),
            Self::ExitToRestarted => format!("{pods} pods crash once, process exit to restarted process"),
            Self::ExitToNoticed => {
                "process exit to known exit (agents: to the PLEG event, from their own histogram)".to_owned()
            }
            Self::OneShotChain => "10 one-shot pods, one after the other".to_owned(),
            Self::InitChain => "4 instant init containers then main, one pod".to_owned(),
            Self::InitChainsAtOnce => "4 instant init containers then main, 10 pods at once".to_owned(),
            Self::AnswerToReady => format!("{pods} pods, open port to Ready in a watch, probed every second"),
            Self::AnswerToReadySlowProbe => format!("{pods} pods, open port to Ready in a watch, probed every 10 s"),
            Self::UnhealthyToRestarted => format!("{pods} pods fail once, failed liveness probe to restarted process"),
            Self::ApplyToAvailable => format!("Deployment of {pods} pods with readiness probes, created to available"),
            Self::RollingUpdate => format!("Deployment of {pods} pods with readiness probes, rolling update"),
            Self::FiveInitChain => "5 instant init containers then main, one pod".to_owned(),
            Self::VolumeSetup => {
                "set-up of 4 projected volumes and 3 secrets of a pod (bare client: requests only)".to_owned()
            }
            Self::ResizeToApplied => {
                "CPU resize, request to limit in the container's cgroup (bare client: runtime call)".to_owned()
            }
            Self::ResizeToReported => "CPU resize, request to limit in the status in a watch".to_owned(),
            Self::ChurnExitToTerminated => "churn, process exit to terminated in a watch".to_owned(),
            Self::ChurnCreateToGone => "churn, created to object gone".to_owned(),
            Self::ChurnGoneToSandboxRemoved => "churn, object gone to sandbox removed".to_owned(),
            Self::ChurnGoneToCgroupRemoved => "churn, object gone to pod cgroup removed".to_owned(),
            Self::DensityCreateToAllReady => format!("{idle} pods, first one created to all Ready"),
            Self::OomKillToReport => format!("{pods} OOM kills, kill to its report in the agent's log"),
            Self::OomKillToStatus => format!("{pods} OOM kills, kill of a main process to its terminated status"),
            Self::OomWrongVerdicts => format!("{pods} OOM kills without the right process and limit in the report"),
            Self::OomWrongReasons => format!("{pods} OOM kills, containers that terminated with a wrong reason"),
            Self::OomKillToEvent => format!("{pods} OOM kills, kill to the agent's event on the pod in a watch"),
            Self::OomKillToTerminated => format!("{pods} OOM kills, kill to terminated (OOMKilled) in a watch"),
            Self::RaceWon => format!("{pods} races, pod evicted before the kernel killed"),
            Self::RaceGrowth => format!("{pods} races, growth of the pod just above the threshold (median)"),
            Self::RaceCrossingToEvicted => {
                format!(
                    "{pods} races, memory.available below the threshold to the status of the evicted pod in a watch"
                )
            }
            Self::RaceTriggerToDecision => "races, trigger to decision (agents: from their own histogram)".to_owned(),
            Self::ThrashHeldToRelieved => {
                format!("{pods} stalls, 20 % of both windows held to less than 5 % of a second stalled (30 s: never)")
            }
            Self::ThrashHeldToEvicted => {
                format!("{pods} stalls, 20 % of both windows held to the status of the evicted pod in a watch")
            }
            Self::ThrashTriggerToDecision => {
                "stalls, trigger to decision (agents: from their own histogram)".to_owned()
            }
            Self::ThrashMissed => format!("{pods} stalls, not ended by evicting the thrashing pod and no other"),
            Self::ThrashBystanderBefore => format!("{pods} stalls, request to a bystander before"),
            Self::ThrashBystanderDuring => {
                format!("{pods} stalls, request to a bystander in the 30 s from the threshold on")
            }
            Self::ThrashBystanderAfter => format!("{pods} stalls, request to a bystander afterwards"),
            Self::IdleAgentCpu => format!("{idle} idle pods, CPU of the agent per minute"),
            Self::IdleRuntimeCpu => format!("{idle} idle pods, CPU of the runtime per minute"),
            Self::IdleCriCalls => format!("{idle} idle pods, CRI calls per minute"),
            Self::IdleApiRequests => format!("{idle} idle pods, requests to the API server per minute"),
            Self::IdleRssAnon => format!("{idle} idle pods, anonymous resident memory of the agent"),
            Self::IdleRss => format!("{idle} idle pods, resident memory of the agent"),
            Self::TcpProbesAgentCpu => {
                format!("{idle} idle pods with TCP readiness probes, CPU of the agent per minute")
            }
            Self::TcpProbesRss => format!("{idle} idle pods with TCP readiness probes, resident memory of the agent"),
            Self::HttpProbesAgentCpu => {
                format!("{idle} idle pods with HTTP readiness probes, CPU of the agent per minute")
            }
            Self::HttpProbesRss => format!("{idle} idle pods with HTTP readiness probes, resident memory of the agent"),
            Self::ObserveCpu => format!("{idle} idle pods, CPU of keblet observe per minute"),
            Self::ObserveRss => format!("{idle} idle pods, resident memory of keblet observe"),
            Self::ExitFloodRate => "flood of exiting processes, exits per second".to_owned(),
            Self::ExitFloodAgentCpu => "flood of exiting processes, CPU of the agent for 10,000 exits".to_owned(),
            Self::ExitFloodObserveCpu => {
                "flood of exiting processes, CPU of keblet observe for 10,000 exits".to_owned()
            }
            Self::ScrapeMetrics => format!("{idle} pods, CPU of the agent for one scrape of /metrics"),
            Self::ScrapeCadvisor => format!("{idle} pods, CPU of the agent for one scrape of /metrics/cadvisor"),
            Self::ScrapeResource => format!("{idle} pods, CPU of the agent for one scrape of /metrics/resource"),
            Self::ScrapeSummary => format!("{idle} pods, CPU of the agent for one /stats/summary"),
        }
    }

    /// The unit of its values.
    pub(crate) fn unit(self) -> Unit {
        match self {
            Self::IdleAgentCpu
            | Self::IdleRuntimeCpu
            | Self::TcpProbesAgentCpu
            | Self::HttpProbesAgentCpu
            | Self::ObserveCpu => Unit::CpuSecondsPerMinute,
            Self::IdleCriCalls | Self::IdleApiRequests => Unit::PerMinute,
            Self::ExitFloodRate => Unit::PerSecond,
            Self::IdleRssAnon | Self::IdleRss | Self::TcpProbesRss | Self::HttpProbesRss | Self::ObserveRss => {
                Unit::Mebibytes
            }
            Self::RaceGrowth => Unit::MebibytesPerSecond,
            Self::OomWrongVerdicts | Self::OomWrongReasons | Self::RaceWon | Self::ThrashMissed => Unit::Percent,
            _ => Unit::Seconds,
        }
    }

    /// One value per participant and run, so that there are no quantiles to show.
    pub(crate) fn is_single(self) -> bool {
        self.unit() != Unit::Seconds
    }

    /// Formats a value.
    pub(crate) fn show(self, value: f64) -> String {
        self.unit().show(value)
    }
}

impl Unit {
    /// Formats a value with its unit.
    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Self::CpuSecondsPerMinute => format!("{value:.2} s"),
            Self::PerMinute | Self::PerSecond => format!("{value:.0}"),
            Self::Percent => format!("{value:.2} %"),
            Self::Mebibytes => format!("{value:.1} MiB"),
            Self::MebibytesPerSecond => format!("{value:.0} MiB/s"),
            Self::Seconds if value.is_infinite() => "beyond".to_owned(),
            Self::Seconds if value.abs() < 1.0 => format!("{:.1} ms", value * 1e3),
            Self::Seconds => format!("{value:.2} s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_in_their_unit() {
        assert_eq!(Metric::ExitToRestarted.show(0.0654), "65.4 ms");
        assert_eq!(Metric::ExitToRestarted.show(1.234), "1.23 s");
        assert_eq!(Metric::ExitToNoticed.show(f64::INFINITY), "beyond");
        assert_eq!(Metric::IdleAgentCpu.show(0.05), "0.05 s");
        assert_eq!(Metric::IdleRss.show(19.96), "20.0 MiB");
        assert_eq!(Metric::ScrapeCadvisor.show(0.012_345), "12.3 ms");
    }

    #[test]
    fn identifiers_are_snake_case() {
        assert_eq!(serde_json::to_value(Metric::DeleteToGone).unwrap(), "delete_to_gone");
    }
}
