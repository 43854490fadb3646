//! The order of things: every workload in every column, the columns taking turns, on a runtime that is clean each time.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tempfile::TempDir;
use tokio_util::task::AbortOnDropHandle;

use super::PlegArgs;
use super::WorkloadKind;
use super::agent;
use super::agent::Agent;
use super::column::Column;
use super::common::Ground;
use super::floor::Floor;
use super::floor::Sense;
use super::floor::Stopped;
use super::folder;
use super::report::Environment;
use super::report::Report;
use super::results::Metric;
use super::results::Results;
use super::results::Series;
use super::site;
use super::stamps;
use super::stamps::monotonic_now;
use super::usage;
use super::workload;
use super::workload::BenchPod;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;

/// An agent that runs a container once too often does so within this time.
const SURPLUS_WATCH: Duration = Duration::from_secs(1);
/// For an agent to come to rest after its pods are up.
const IDLE_SETTLE: Duration = Duration::from_secs(10);
/// For an agent to come to rest after its start, before pods arrive.
const START_SETTLE: Duration = Duration::from_millis(500);

/// What goes wrong with one pod mostly goes wrong with all.
const FAILURES_SHOWN: usize = 5;

/// keblet's histogram of the time from the kernel's moment to the PLEG event.
const EVENT_LATENCY: &str = "keblet_event_latency_seconds";
/// Counts CRI calls, under upstream's name.
const CRI_CALLS: &str = "kubelet_runtime_operations_total";

/// One run of the benchmark.
#[derive(Debug)]
pub(super) struct Session {
    args: PlegArgs,
    columns: Vec<Column>,
    keblet: PathBuf,
    endpoint: RuntimeEndpoint,
    runtime: Runtime,
    runtime_pid: Option<u32>,
    environment: Environment,
    work: TempDir,
    results: Results,
}

/// One workload in one column.
struct Turn<'a> {
    column: &'a Column,
    kind: WorkloadKind,
    folder: PathBuf,
    batches: Vec<Vec<BenchPod>>,
    limit: Duration,
}

impl Session {
    /// Checks that everything needed is there, and removes what an earlier run may have left.
    pub(super) async fn prepare(args: PlegArgs) -> anyhow::Result<Self> {
        let columns = Column::chosen(&args)?;
        let Ground { endpoint, runtime, environment, keblet } = args.common.ground().await?;
        let work = tempfile::Builder::new().prefix("keblet-bench-").tempdir().context("cannot create a folder")?;
        site::sweep(&runtime).await?;
        let runtime_pid = site::runtime_pid(&endpoint)?;
        Ok(Self {
            args,
            columns,
            keblet,
            endpoint,
            runtime,
            runtime_pid,
            environment,
            work,
            results: Results::default(),
        })
    }

    /// Measures everything. May be dropped at any point; `clean_up` removes what is there then.
    pub(super) async fn measure(&mut self) -> anyhow::Result<()> {
        let wanted = |kind: &WorkloadKind| self.args.workloads.is_empty() || self.args.workloads.contains(kind);
        let kinds: Vec<_> = WorkloadKind::ALL.into_iter().filter(wanted).collect();
        for round in 0..self.args.rounds {
            for kind in kinds.iter().filter(|kind| **kind != WorkloadKind::Idle) {
                self.measure_in_turn(*kind, round).await?;
            }
        }
        if kinds.contains(&WorkloadKind::Idle) {
            self.measure_in_turn(WorkloadKind::Idle, 0).await?;
        }
        Ok(())
    }

    /// Removes pods and files.
    pub(super) async fn clean_up(&mut self) -> anyhow::Result<()> {
        site::sweep(&self.runtime).await?;
        folder::remove(self.work.path())
    }

    /// What was measured.
    pub(super) fn into_report(self) -> Report {
        Report {
            name: "pleg",
            references: [Column::KernelFloor, Column::EventFloor].map(|column| column.name().to_owned()).to_vec(),
            columns: self.columns.iter().map(|column| column.name().to_owned()).collect(),
            environment: self.environment,
            pods: self.args.pods,
            idle_pods: self.args.pods,
            rounds: self.args.rounds,
            check: self.args.common.check,
            output: self.args.common.output,
            results: self.results,
        }
    }

    async fn measure_in_turn(&mut self, kind: WorkloadKind, round: u32) -> anyhow::Result<()> {
        let mut columns = self.columns.clone();
        // Nobody always has the warm or the tired machine.
        columns.rotate_left(round as usize % self.columns.len().max(1));
        for column in columns {
            // An idle pidfd costs nothing beyond what the idle event floor shows.
            if kind == WorkloadKind::Idle && column == Column::KernelFloor {
                continue;
            }
            self.measure_one(&column, kind, round).await?;
        }
        Ok(())
    }

    async fn measure_one(&mut self, column: &Column, kind: WorkloadKind, round: u32) -> anyhow::Result<()> {
        let what = format!("{kind:?}").to_lowercase();
        eprintln!("round {}/{}: {what}: {}", round + 1, self.args.rounds, column.name());
        let index = self.columns.iter().position(|c| c == column).unwrap_or_default();
        let prefix = format!("{what}-{round}-{index}");
        let folder = self.work.path().join(&prefix);
        folder::make(&folder)?;
        let batches = workload::batches(kind, self.args.pods, &prefix, &folder.join("stamps"));
        let limit = workload::time_limit(kind, self.args.pods);
        let turn = Turn { column, kind, folder, batches, limit };

        let measured = match column {
            Column::EventFloor | Column::KernelFloor => self.measure_floor(&turn).await,
            _ => self.measure_agent(&turn).await,
        };
        if let Err(error) = measured {
            self.fail(&turn, format!("{error:#}"));
        }
        site::sweep(&self.runtime).await?;
        if let Err(error) = folder::remove(&turn.folder) {
            self.fail(&turn, format!("{error:#}"));
        }
        Ok(())
    }

    async fn measure_floor(&mut self, turn: &Turn<'_>) -> anyhow::Result<()> {
        let (sense, _reading) = self.sense(turn.column).await?;
        let parallelism = self.args.floor_parallelism.unwrap_or(self.args.pods.max(1)) as usize;
        let floor = Floor::new(self.runtime.clone(), sense, &self.args.common.image, &turn.folder, parallelism);
        let mut begins = Vec::new();
        for batch in &turn.batches {
            begins.push(monotonic_now()?);
            let run = tokio::time::timeout(turn.limit, floor.run(batch)).await;
            let noticed = run.context("the floor did not finish in time")??;
            stamps::wait_done(batch, turn.limit).await?;
            let delays = noticed.iter().map(|(pod, at)| Ok(stamps::seconds(stamps::crash(pod)?.0, *at)));
            let delays = delays.collect::<anyhow::Result<Vec<_>>>()?;
            if !delays.is_empty() {
                self.results.add(Metric::Notice, turn.column.name(), Series::Values(delays));
            }
        }
        if turn.kind == WorkloadKind::Idle {
            self.watch_idle(turn, std::process::id(), None).await?;
        }
        self.collect(turn, &begins).await
    }

    /// How a floor learns of ends; the task is to be kept while it shall.
    async fn sense(&self, column: &Column) -> anyhow::Result<(Sense, Option<AbortOnDropHandle<()>>)> {
        if *column == Column::KernelFloor {
            return Ok((Sense::Pidfd, None));
        }
        let events = self.runtime.container_events().await?;
        let stopped = Arc::new(Stopped::default());
        let reader = stopped.clone();
        let reading = tokio::spawn(async move { reader.read(events).await });
        Ok((Sense::Events(stopped), Some(AbortOnDropHandle::new(reading))))
    }

    async fn measure_agent(&mut self, turn: &Turn<'_>) -> anyhow::Result<()> {
        let put = |pod| agent::put(&turn.folder, pod, &self.args.common.image);
        let before = turn.kind == WorkloadKind::Start;
        if before {
            turn.batches.iter().flatten().try_for_each(put)?;
        }
        let mut agent = Agent::start(turn.column, &self.keblet, &self.endpoint, &turn.folder, self.args.pods)?;
        let mut begins = vec![agent.begun()];
        if !before {
            let ready = agent.ready().await?;
            tokio::time::sleep(START_SETTLE).await;
            self.results.add(Metric::Ready, turn.column.name(), Series::Values(vec![ready]));
            begins.clear();
        }
        for batch in &turn.batches {
            if !before {
                begins.push(monotonic_now()?);
                batch.iter().try_for_each(|pod| agent::put(&turn.folder, pod, &self.args.common.image))?;
            }
            agent.while_alive(stamps::wait_done(batch, turn.limit)).await?;
        }
        if turn.kind == WorkloadKind::Idle {
            self.watch_idle(turn, agent.pid(), Some(&agent)).await?;
        }
        self.collect(turn, &begins).await?;
        if turn.kind == WorkloadKind::Crash {
            self.read_event_latency(turn, &agent).await?;
        }
        agent.stop().await
    }

    /// Watches a process, and the runtime beside it, do nothing.
    async fn watch_idle(&mut self, turn: &Turn<'_>, pid: u32, agent: Option<&Agent>) -> anyhow::Result<()> {
        tokio::time::sleep(IDLE_SETTLE).await;
        // The agent's own metrics are read outside the watched time, for that costs something too.
        let calls_before = calls(agent).await;
        let (cpu, runtime_cpu) = (usage::cpu_time(pid)?, self.runtime_pid.map(usage::cpu_time).transpose()?);
        tokio::time::sleep(self.args.idle_time).await;
        let cpu = usage::cpu_time(pid)?.saturating_sub(cpu);
        let runtime_cpu_after = self.runtime_pid.map(usage::cpu_time).transpose()?;
        let calls_after = calls(agent).await;

        let minutes = self.args.idle_time.as_secs_f64() / 60.0;
        let mut add = |metric, value| self.results.add(metric, turn.column.name(), Series::Values(vec![value]));
        add(Metric::IdleAgentCpu, cpu.as_secs_f64() / minutes);
        if let (Some(before), Some(after)) = (runtime_cpu, runtime_cpu_after) {
            add(Metric::IdleRuntimeCpu, after.saturating_sub(before).as_secs_f64() / minutes);
        }
        if let (Some(before), Some(after)) = (calls_before, calls_after) {
            add(Metric::IdleCalls, (after - before) / minutes);
        }
        if agent.is_some() {
            add(Metric::IdleMemory, usage::resident(pid)? as f64 / 1048576.0);
        }
        Ok(())
    }

    /// Agents other than keblet do not have this histogram.
    async fn read_event_latency(&mut self, turn: &Turn<'_>, agent: &Agent) -> anyhow::Result<()> {
        if matches!(turn.column, Column::Peer(..)) {
            return Ok(());
        }
        let buckets = agent.exposition().await?.histogram(EVENT_LATENCY, &[("type", "ContainerDied")]);
        if !buckets.is_empty() {
            self.results.add(Metric::Notice, turn.column.name(), Series::Buckets(buckets));
        }
        Ok(())
    }

    /// Takes the stamps, and looks whether every container ran as often as it should.
    async fn collect(&mut self, turn: &Turn<'_>, begins: &[u64]) -> anyhow::Result<()> {
        tokio::time::sleep(SURPLUS_WATCH).await;
        let pods = turn.batches.concat();
        let mut wrong = site::inspect(&self.runtime, &pods).await?;
        for pod in &pods {
            wrong.extend(stamps::surplus_starts(pod)?.map(|surplus| format!("pod {}: {surplus}", pod.name)));
        }
        let more = wrong.len().saturating_sub(FAILURES_SHOWN);
        wrong.truncate(FAILURES_SHOWN);
        wrong.extend((more > 0).then(|| format!("and {more} more of the kind")));
        wrong.into_iter().for_each(|wrong| self.fail(turn, wrong));

        for (batch, begin) in turn.batches.iter().zip(begins) {
            let metric = match turn.kind {
                WorkloadKind::Crash => Metric::Restart,
                WorkloadKind::Chain => Metric::Chain,
                WorkloadKind::Chains => Metric::Chains,
                WorkloadKind::Start => Metric::StartAll,
                WorkloadKind::Idle => continue,
            };
            let values = stamps::durations(turn.kind, batch, *begin)?;
            self.results.add(metric, turn.column.name(), Series::Values(values));
        }
        Ok(())
    }

    fn fail(&mut self, turn: &Turn<'_>, what: String) {
        let kind = format!("{:?}", turn.kind).to_lowercase();
        let failure = format!("{}: {kind}: {what}", turn.column.name());
        eprintln!("  {failure}");
        self.results.failures.push(failure);
    }
}

/// CRI calls so far, if the agent counts them.
async fn calls(agent: Option<&Agent>) -> Option<f64> {
    let exposition = agent?.exposition().await.inspect_err(|error| tracing::debug!(%error, "no metrics")).ok()?;
    exposition.sum(CRI_CALLS)
}
