//! The order of a run: one participant after the other, each agent as a new node on a clean runtime.

use std::path::Path;

use anyhow::Context as _;
use tempfile::TempDir;

use super::ClusterArgs;
use super::Part;
use super::api::ClusterClient;
use super::bare_client;
use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::parts;
use super::parts::Row;
use super::probed::ProbedIdle;
use super::remains;
use crate::common;
use crate::common::Prerequisites;
use crate::folder;
use crate::manifest::PodSettings;
use crate::metric::PodCounts;
use crate::participant::Participant;
use crate::report::Environment;
use crate::report::Report;
use crate::report::Setup;
use crate::results::Results;
use crate::runtime_pods;

/// One session of the benchmark.
#[derive(Debug)]
pub(super) struct Session {
    context: Context,
    participants: Vec<Participant>,
    work: TempDir,
    results: Results,
    report: Report,
}

impl Session {
    /// Checks that all prerequisites are met, and removes what an earlier session left.
    ///
    /// # Errors
    /// A prerequisite is missing.
    pub(super) async fn prepare(args: ClusterArgs) -> anyhow::Result<Self> {
        keblet::apiserver::tls::install_crypto();
        let participants = Participant::of_cluster(&args)?;
        let Prerequisites { endpoint, runtime, environment, keblet } = args.common.prerequisites().await?;
        let work = tempfile::Builder::new().prefix("keblet-bench-").tempdir().context("cannot create a folder")?;
        let client = ClusterClient::connect(&args.kubeconfig, &args.node_name).await?;
        client.until_usable().await?;
        client.sweep().await?;
        runtime_pods::sweep(&runtime).await?;
        let runtime_pid = runtime_pods::runtime_pid(&endpoint)?;
        let report = Report::new(setup(&args, &participants, environment));
        let context = Context { args, keblet, endpoint, runtime, runtime_pid, client };
        Ok(Self { context, participants, work, results: Results::default(), report })
    }

    /// Measures everything. May be dropped at any point; [`Self::clean_up`] removes what exists then.
    ///
    /// # Errors
    /// Runtime or cluster cannot be cleaned, or a run's JSON cannot be written. Failures of participants are results.
    pub(super) async fn measure(&mut self) -> anyhow::Result<()> {
        for run in 0..self.context.args.common.runs {
            common::free_removed_cgroups(&self.context.keblet);
            let mut participants: Vec<_> = self.participants.clone().into_iter().enumerate().collect();
            // Rotated, so that no participant always runs first or last.
            participants.rotate_left(run as usize % self.participants.len().max(1));
            for (index, participant) in participants {
                if matches!(participant, Participant::Peer { .. }) && run >= self.context.args.peer_runs {
                    continue;
                }
                eprintln!("run {}/{}: {}", run + 1, self.context.args.common.runs, participant.name());
                self.measure_one(&participant, &format!("r{run}p{index}"), run).await?;
            }
            let results = std::mem::take(&mut self.results);
            self.report.add_run(results)?;
        }
        Ok(())
    }

    /// Removes pods, the node and files, each whether the others can be removed or not.
    ///
    /// # Errors
    /// Some cannot be removed.
    pub(super) async fn clean_up(&mut self) -> anyhow::Result<()> {
        let objects = self.context.client.sweep().await;
        let pods = runtime_pods::sweep(&self.context.runtime).await;
        // Also if a signal has ended API server and runtime: mounts would outlast this process.
        objects.and(pods).and(folder::remove(self.work.path()))
    }

    /// The finished runs.
    pub(super) fn into_report(self) -> Report {
        self.report
    }

    async fn measure_one(&mut self, participant: &Participant, prefix: &str, run: u32) -> anyhow::Result<()> {
        let args = &self.context.args;
        let idle = args.includes(Part::Idle) && run < args.common.idle_runs;
        let density = idle || args.includes(Part::Density);
        let parts = Part::ALL.into_iter().any(|part| args.includes(part) && !part.is_dense());
        if participant.is_bare_client() {
            self.in_folder(participant, prefix, async |context, settings, row| {
                bare_client::measure(context, &settings, prefix, idle, row).await
            })
            .await?;
            return Ok(());
        }
        if parts {
            self.in_folder(participant, prefix, async |context, settings, row| {
                let (observed, _watching) = context.client.watch();
                let mut node = BenchNode::start(context, participant, settings, observed).await?;
                parts::measure(context, &mut node, prefix, row).await?;
                node.agent.stop().await
            })
            .await?;
        }
        if density {
            let prefix = &format!("{prefix}d");
            self.in_folder(participant, prefix, async |context, settings, row| {
                let (observed, watching) = context.client.watch();
                let mut node = BenchNode::start(context, participant, settings, observed).await?;
                parts::density(context, &mut node, prefix, row).await?;
                // The observer's own watch must not use CPU meanwhile.
                drop(watching);
                if idle {
                    parts::watch_idle(context, &node, row).await?;
                }
                node.agent.stop().await
            })
            .await?;
        }
        if self.context.args.includes(Part::ProbedIdle) && run < self.context.args.common.idle_runs {
            for probed in ProbedIdle::ALL {
                let prefix = &format!("{prefix}{}", probed.name);
                self.in_folder(participant, prefix, async |context, settings, row| {
                    let (observed, watching) = context.client.watch();
                    let mut node = BenchNode::start(context, participant, settings, observed).await?;
                    probed.create(context, &mut node, prefix).await?;
                    // The observer's own watch must not use CPU meanwhile.
                    drop(watching);
                    probed.watch(context, &node, row).await?;
                    node.agent.stop().await
                })
                .await?;
            }
        }
        Ok(())
    }

    /// Measures in a new folder, and cleans cluster, runtime and folder afterwards.
    async fn in_folder(
        &mut self,
        participant: &Participant,
        prefix: &str,
        measure: impl AsyncFnOnce(&Context, PodSettings, &mut Row<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let folder = self.work.path().join(prefix);
        folder::create(&folder)?;
        let settings = settings(&self.context.args, &folder);
        let mut row = Row { results: &mut self.results, participant: participant.name() };
        let measured = measure(&self.context, settings, &mut row).await;
        if let Err(error) = measured {
            self.fail(participant, format!("{error:#}"));
        }
        self.context.client.sweep().await?;
        runtime_pods::sweep(&self.context.runtime).await?;
        if let Some(root) = &self.context.args.cgroup_root {
            remains::remove_cgroups(root);
        }
        if let Err(error) = folder::remove(&folder) {
            self.fail(participant, format!("{error:#}"));
        }
        Ok(())
    }

    fn fail(&mut self, participant: &Participant, what: String) {
        let failure = format!("{}: {what}", participant.name());
        eprintln!("  {failure}");
        self.results.failures.push(failure);
    }
}

fn settings(args: &ClusterArgs, folder: &Path) -> PodSettings {
    PodSettings {
        image: args.common.image.clone(),
        network: args.network(),
        folder: folder.to_owned(),
        token: true,
        cgroup_root: args.cgroup_root.clone(),
    }
}

fn setup(args: &ClusterArgs, participants: &[Participant], environment: Environment) -> Setup {
    let names = |selects: fn(&Participant) -> bool| {
        let selected = participants.iter().filter(|participant| selects(participant));
        selected.map(|participant| participant.name().to_owned()).collect()
    };
    Setup {
        benchmark: args.benchmark(),
        commit: args.common.commit.clone(),
        references: names(|participant| !matches!(participant, Participant::Keblet { .. })),
        participants: names(|_| true),
        counts: PodCounts { pods: args.pods, idle: args.density_pods },
        environment,
        output: args.common.output.clone(),
    }
}
