//! The order of things: every column in turn, each agent as a new node on a clean runtime.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use tempfile::TempDir;

use super::ClusterArgs;
use super::ClusterWorkload;
use super::agent;
use super::api::Observer;
use super::moments::Board;
use super::pods::Maker;
use crate::WorkloadKind;
use crate::agent::Agent;
use crate::common::Ground;
use crate::floor::Floor;
use crate::floor::Sense;
use crate::folder;
use crate::report::Environment;
use crate::report::Report;
use crate::results::Metric;
use crate::results::Results;
use crate::results::Series;
use crate::site;
use crate::stamps;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::usage;
use crate::workload;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;

/// Pods that end at once, one after the other.
const ONE_SHOTS: u32 = 10;
/// For an agent to come to rest before pods arrive.
const START_SETTLE: Duration = Duration::from_secs(2);
/// For an agent to come to rest after its pods are up.
const IDLE_SETTLE: Duration = Duration::from_secs(20);
/// For the last process to be ready for signals before it is told to end: until then SIGTERM means nothing to PID 1.
const UP_SETTLE: Duration = Duration::from_secs(2);
/// The grace period that pods have by default.
const GRACE: Duration = Duration::from_secs(30);
const NODE_LIMIT: Duration = Duration::from_secs(60);

/// Counts requests to the API server, under upstream's name.
const API_REQUESTS: &str = "rest_client_requests_total";

/// Who takes part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Column {
    /// A bare CRI client.
    Floor,
    /// keblet as it is.
    Keblet,
    /// Another agent: its name and command.
    Peer(String, String),
}

impl Column {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Floor => "runtime floor",
            Self::Keblet => "keblet",
            Self::Peer(name, _) => name,
        }
    }

    /// The columns that `args` asks for.
    fn chosen(args: &ClusterArgs) -> anyhow::Result<Vec<Self>> {
        let peers = args.peers.iter().map(|peer| Self::Peer(peer.name.clone(), peer.command.clone()));
        let all: Vec<_> = [Self::Floor, Self::Keblet].into_iter().chain(peers).collect();
        args.common.choose(all, Self::name)
    }
}

/// One run of the benchmark.
#[derive(Debug)]
pub(super) struct Session {
    args: ClusterArgs,
    columns: Vec<Column>,
    keblet: PathBuf,
    endpoint: RuntimeEndpoint,
    runtime: Runtime,
    observer: Observer,
    environment: Environment,
    work: TempDir,
    results: Results,
}

/// A running agent and what there is to know of its pods.
struct Node<'a> {
    column: &'a Column,
    agent: Agent,
    board: Board,
    prefix: String,
    stamps: PathBuf,
}

impl Session {
    /// Checks that everything needed is there, and removes what an earlier run may have left.
    pub(super) async fn prepare(args: ClusterArgs) -> anyhow::Result<Self> {
        keblet::apiserver::tls::install_crypto();
        let columns = Column::chosen(&args)?;
        let Ground { endpoint, runtime, environment, keblet } = args.common.ground().await?;
        let work = tempfile::Builder::new().prefix("keblet-bench-").tempdir().context("cannot create a folder")?;
        let observer = Observer::connect(&args.kubeconfig, &args.node_name).await?;
        observer.until_usable().await?;
        observer.sweep().await?;
        site::sweep(&runtime).await?;
        let results = Results::default();
        Ok(Self { args, columns, keblet, endpoint, runtime, observer, environment, work, results })
    }

    /// Measures everything. May be dropped at any point; `clean_up` removes what is there then.
    pub(super) async fn measure(&mut self) -> anyhow::Result<()> {
        for round in 0..self.args.rounds {
            let mut columns = self.columns.clone();
            // Nobody always has the warm or the tired machine.
            columns.rotate_left(round as usize % self.columns.len().max(1));
            for column in &columns {
                eprintln!("round {}/{}: {}", round + 1, self.args.rounds, column.name());
                let index = self.columns.iter().position(|c| c == column).unwrap_or_default();
                self.measure_one(column, &format!("b{round}{index}"), false).await?;
            }
        }
        if self.args.wants(ClusterWorkload::Idle) {
            for column in self.columns.clone().iter().filter(|column| **column != Column::Floor) {
                eprintln!("idle: {}", column.name());
                let index = self.columns.iter().position(|c| c == column).unwrap_or_default();
                self.measure_one(column, &format!("i{index}"), true).await?;
            }
        }
        Ok(())
    }

    /// Removes pods, the node and files.
    pub(super) async fn clean_up(&mut self) -> anyhow::Result<()> {
        self.observer.sweep().await?;
        site::sweep(&self.runtime).await?;
        folder::remove(self.work.path())
    }

    /// What was measured.
    pub(super) fn into_report(self) -> Report {
        let references = self.columns.iter().filter(|column| **column != Column::Keblet);
        Report {
            name: "cluster",
            references: references.map(|column| column.name().to_owned()).collect(),
            columns: self.columns.iter().map(|column| column.name().to_owned()).collect(),
            environment: self.environment,
            pods: self.args.pods,
            idle_pods: self.args.idle_pods,
            rounds: self.args.rounds,
            check: self.args.common.check,
            output: self.args.common.output,
            results: self.results,
        }
    }

    async fn measure_one(&mut self, column: &Column, prefix: &str, idle: bool) -> anyhow::Result<()> {
        let folder = self.work.path().join(prefix);
        folder::make(&folder)?;
        let measured = match (column, idle) {
            (Column::Floor, _) => self.measure_floor(prefix, &folder).await,
            (_, false) => self.measure_agent(column, prefix, &folder).await,
            (_, true) => self.measure_idle(column, prefix, &folder).await,
        };
        if let Err(error) = measured {
            self.fail(column, format!("{error:#}"));
        }
        self.observer.sweep().await?;
        site::sweep(&self.runtime).await?;
        if let Err(error) = folder::remove(&folder) {
            self.fail(column, format!("{error:#}"));
        }
        Ok(())
    }

    /// The burst's pods, straight from the runtime; then their end.
    async fn measure_floor(&mut self, prefix: &str, folder: &Path) -> anyhow::Result<()> {
        if !self.args.wants(ClusterWorkload::Burst) && !self.args.wants(ClusterWorkload::Delete) {
            return Ok(());
        }
        let batches = workload::batches(WorkloadKind::Start, self.args.pods, prefix, &folder.join("stamps"));
        let parallelism = self.args.pods as usize;
        let floor = Floor::new(self.runtime.clone(), Sense::Pidfd, &self.args.common.image, folder, parallelism);
        for batch in batches {
            let began = monotonic_now()?;
            let run = tokio::time::timeout(self.limit(self.args.pods), floor.run(&batch)).await;
            run.context("the floor did not finish in time")??;
            let took = seconds(began, monotonic_now()?);
            if self.args.wants(ClusterWorkload::Burst) {
                self.add(&Column::Floor, Metric::AllReady, vec![took]);
            }
            if self.args.wants(ClusterWorkload::Delete) {
                tokio::time::sleep(UP_SETTLE).await;
                let stopped = site::stop(&self.runtime, GRACE).await?;
                self.add(&Column::Floor, Metric::Gone, stopped);
            }
        }
        Ok(())
    }

    async fn measure_agent(&mut self, column: &Column, prefix: &str, folder: &Path) -> anyhow::Result<()> {
        let (board, _watching) = self.observer.watch();
        let mut node = self.start(column, prefix, folder, board).await?;
        let burst = self.args.wants(ClusterWorkload::Burst) || self.args.wants(ClusterWorkload::Delete);
        if burst {
            self.burst(&mut node).await?;
        }
        if self.args.wants(ClusterWorkload::Exit) {
            self.exits(&mut node).await?;
        }
        if self.args.wants(ClusterWorkload::OneShot) {
            self.one_shots(&mut node).await?;
        }
        node.agent.stop().await
    }

    /// Starts the agent and waits for its node.
    async fn start<'a>(
        &mut self,
        column: &'a Column,
        prefix: &str,
        folder: &Path,
        board: Board,
    ) -> anyhow::Result<Node<'a>> {
        let mut agent = agent::start(column, &self.keblet, &self.endpoint, folder, &self.args)?;
        let observer = self.observer.clone();
        let ready = agent.while_alive(async {
            let ready = tokio::time::timeout(NODE_LIMIT, observer.node_ready()).await;
            ready.with_context(|| format!("the node is not Ready after {}", humantime::format_duration(NODE_LIMIT)))?
        });
        let ready = ready.await?;
        self.add(column, Metric::NodeReady, vec![seconds(agent.begun(), ready)]);
        tokio::time::sleep(START_SETTLE).await;
        Ok(Node { column, agent, board, prefix: prefix.to_owned(), stamps: folder.join("stamps") })
    }

    /// Creates many pods at once, and deletes them at once.
    async fn burst(&mut self, node: &mut Node<'_>) -> anyhow::Result<()> {
        let names = names(&node.prefix, "burst", self.args.pods);
        let maker = self.maker(&node.stamps);
        let pods: Vec<_> = names.iter().map(|name| maker.lasting(name)).collect();
        let limit = self.limit(self.args.pods);
        let observer = self.observer.clone();
        let began = monotonic_now()?;
        let ready = node.agent.while_alive(async {
            observer.create(&pods).await?;
            node.board.wait(&names, "Ready", |m| m.ready, limit).await
        });
        let last = ready.await?.into_iter().max().unwrap_or(began);
        if self.args.wants(ClusterWorkload::Burst) {
            self.add(node.column, Metric::AllReady, vec![seconds(began, last)]);
        }
        let deleted = node.agent.while_alive(async {
            tokio::time::sleep(UP_SETTLE).await;
            let asked = observer.delete(&names).await?;
            let gone = node.board.wait(&names, "gone", |m| m.gone, limit).await?;
            Ok(asked.into_iter().zip(gone).map(|(asked, gone)| seconds(asked, gone)).collect())
        });
        let deleted = deleted.await?;
        if self.args.wants(ClusterWorkload::Delete) {
            self.add(node.column, Metric::Gone, deleted);
        }
        Ok(())
    }

    /// Pods whose processes end, one after the other.
    async fn exits(&mut self, node: &mut Node<'_>) -> anyhow::Result<()> {
        let count = self.args.pods;
        let names = names(&node.prefix, "exit", count);
        let maker = self.maker(&node.stamps);
        let pods: Vec<_> = (0..count).zip(&names).map(|(index, name)| maker.ending(name, index, count)).collect();
        let limit = self.limit(count) * 2;
        let observer = self.observer.clone();
        let terminated = node.agent.while_alive(async {
            observer.create(&pods).await?;
            node.board.wait(&names, "terminated", |m| m.terminated, limit).await
        });
        let terminated = terminated.await?;
        let mut delays = Vec::new();
        for (name, seen) in names.iter().zip(terminated) {
            delays.push(seconds(stamps::exit_in(&node.stamps.join(name))?, seen));
        }
        self.add(node.column, Metric::Terminated, delays);
        self.remove(node, &names).await
    }

    /// One pod after the other, each as soon as the last one has succeeded.
    async fn one_shots(&mut self, node: &mut Node<'_>) -> anyhow::Result<()> {
        let names = names(&node.prefix, "shot", ONE_SHOTS);
        let maker = self.maker(&node.stamps);
        let limit = self.limit(1);
        let observer = self.observer.clone();
        let began = monotonic_now()?;
        for name in &names {
            let pod = maker.one_shot(name);
            let one = std::slice::from_ref(name);
            let done = node.agent.while_alive(async {
                observer.create(std::slice::from_ref(&pod)).await?;
                node.board.wait(one, "succeeded", |m| m.succeeded, limit).await
            });
            done.await?;
        }
        self.add(node.column, Metric::OneShots, vec![seconds(began, monotonic_now()?)]);
        self.remove(node, &names).await
    }

    async fn remove(&self, node: &mut Node<'_>, names: &[String]) -> anyhow::Result<()> {
        self.observer.delete(names).await?;
        let limit = self.limit(self.args.pods);
        node.agent.while_alive(node.board.wait(names, "gone", |m| m.gone, limit)).await.map(drop)
    }

    /// Watches an agent with many quiet pods do nothing.
    async fn measure_idle(&mut self, column: &Column, prefix: &str, folder: &Path) -> anyhow::Result<()> {
        let (board, watching) = self.observer.watch();
        let mut node = self.start(column, prefix, folder, board).await?;
        let names = names(prefix, "idle", self.args.idle_pods);
        let maker = self.maker(&node.stamps);
        let pods: Vec<_> = names.iter().map(|name| maker.lasting(name)).collect();
        let (observer, limit) = (self.observer.clone(), self.limit(self.args.idle_pods));
        let up = node.agent.while_alive(async {
            observer.create(&pods).await?;
            node.board.wait(&names, "Ready", |m| m.ready, limit).await
        });
        up.await?;
        // The observer is to cost the machine nothing meanwhile.
        drop(watching);
        tokio::time::sleep(IDLE_SETTLE).await;
        let before = node.agent.exposition().await?.sum(API_REQUESTS);
        let cpu = usage::cpu_time(node.agent.pid())?;
        tokio::time::sleep(self.args.idle_time).await;
        let cpu = usage::cpu_time(node.agent.pid())?.saturating_sub(cpu);
        let after = node.agent.exposition().await?.sum(API_REQUESTS);

        let minutes = self.args.idle_time.as_secs_f64() / 60.0;
        self.add(column, Metric::IdleAgentCpu, vec![cpu.as_secs_f64() / minutes]);
        let memory = usage::resident(node.agent.pid())? as f64 / 1_048_576.0;
        self.add(column, Metric::IdleMemory, vec![memory]);
        if let (Some(before), Some(after)) = (before, after) {
            self.add(column, Metric::IdleRequests, vec![(after - before) / minutes]);
        }
        node.agent.stop().await
    }

    fn maker<'a>(&'a self, stamps: &'a Path) -> Maker<'a> {
        Maker { node: &self.args.node_name, image: &self.args.common.image, stamps }
    }

    /// How long the slowest agent may take for this many pods.
    fn limit(&self, pods: u32) -> Duration {
        Duration::from_secs(60) + Duration::from_millis(500) * pods
    }

    fn add(&mut self, column: &Column, metric: Metric, values: Vec<f64>) {
        self.results.add(metric, column.name(), Series::Values(values));
    }

    fn fail(&mut self, column: &Column, what: String) {
        let failure = format!("{}: {what}", column.name());
        eprintln!("  {failure}");
        self.results.failures.push(failure);
    }
}

fn names(prefix: &str, what: &str, count: u32) -> Vec<String> {
    (0..count).map(|index| format!("{what}-{prefix}-{index}")).collect()
}
