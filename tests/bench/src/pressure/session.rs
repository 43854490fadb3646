//! The order of a run: every part of every participant, each with a new agent on a clean runtime.

use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::bail;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use tempfile::TempDir;

use super::PressureArgs;
use super::PressurePart;
use super::cgroups;
use super::node::NodeRuntime;
use super::node::PressureNode;
use super::oom;
use super::race;
use super::race::Race;
use super::thrash;
use crate::common::Prerequisites;
use crate::folder;
use crate::metric::Metric;
use crate::metric::PodCounts;
use crate::participant::Participant;
use crate::report::Environment;
use crate::report::Report;
use crate::report::Setup;
use crate::results::Results;
use crate::results::Series;
use crate::runtime_pods;

/// One session of the benchmark.
#[derive(Debug)]
pub(super) struct Session {
    args: PressureArgs,
    /// The parts, each with its participants.
    parts: Vec<(PressurePart, Vec<Participant>)>,
    keblet: PathBuf,
    endpoint: RuntimeEndpoint,
    runtime: Runtime,
    work: TempDir,
    results: Results,
    report: Report,
}

impl Session {
    /// Checks that all prerequisites are met, and removes what an earlier session left.
    ///
    /// # Errors
    /// A prerequisite is missing.
    pub(super) async fn prepare(args: PressureArgs) -> anyhow::Result<Self> {
        cgroups::check()?;
        keblet::apiserver::tls::install_crypto();
        let parts = parts(&args)?;
        if parts.iter().all(|(_, participants)| participants.is_empty()) {
            bail!("no participant is selected");
        }
        let Prerequisites { endpoint, runtime, environment, keblet } = args.common.prerequisites().await?;
        let work = tempfile::Builder::new().prefix("keblet-bench-").tempdir().context("cannot create a folder")?;
        runtime_pods::sweep(&runtime).await?;
        let report = Report::new(setup(&args, &parts, environment));
        Ok(Self { args, parts, keblet, endpoint, runtime, work, results: Results::default(), report })
    }

    /// Measures everything. May be dropped at any point; [`Self::clean_up`] removes what exists then.
    ///
    /// # Errors
    /// The runtime cannot be cleaned, or a run's JSON cannot be written. Failures of participants are results.
    pub(super) async fn measure(&mut self) -> anyhow::Result<()> {
        for run in 0..self.args.common.runs {
            for (part, participants) in &self.parts.clone() {
                for (index, participant) in participants.iter().enumerate() {
                    eprintln!("run {}/{}: {part:?}: {}", run + 1, self.args.common.runs, participant.name());
                    let prefix = format!("p{run}{index}");
                    if let Err(error) = self.one(*part, participant, &prefix).await {
                        self.fail(participant, format!("{error:#}"));
                    }
                    runtime_pods::sweep(&self.runtime).await?;
                    folder::remove(&self.work.path().join(&prefix))?;
                }
            }
            let results = std::mem::take(&mut self.results);
            self.report.add_run(results)?;
        }
        Ok(())
    }

    /// Removes pods and files, each whether the other can be removed or not.
    ///
    /// # Errors
    /// Some cannot be removed.
    pub(super) async fn clean_up(&mut self) -> anyhow::Result<()> {
        let swept = runtime_pods::sweep(&self.runtime).await;
        // Also if a signal has ended the runtime: mounts would outlast this process.
        swept.and(folder::remove(self.work.path()))
    }

    /// The finished runs.
    pub(super) fn into_report(self) -> Report {
        self.report
    }

    async fn one(&mut self, part: PressurePart, participant: &Participant, prefix: &str) -> anyhow::Result<()> {
        let folder = self.work.path().join(prefix);
        folder::create(&folder)?;
        let node_runtime = NodeRuntime {
            keblet: &self.keblet,
            endpoint: &self.endpoint,
            runtime: &self.runtime,
            image: &self.args.common.image,
            cgroup_root: &self.args.cgroup_root,
        };
        match part {
            PressurePart::Oom => {
                let mut node = PressureNode::start(participant, &node_runtime, &folder).await?;
                let outcome = oom::measure(&mut node, &self.args, prefix).await?;
                node.stop().await?;
                self.add_oom(participant, outcome)
            }
            PressurePart::Race => {
                let outcome = race::measure(participant, &node_runtime, &self.args, &folder, prefix).await?;
                outcome.races.into_iter().for_each(|race| self.add_race(participant, race));
                let decisions = Series::Buckets(outcome.to_decision);
                self.results.add(Metric::RaceTriggerToDecision, participant.name(), decisions);
                Ok(())
            }
            PressurePart::Thrash => {
                let outcome = thrash::measure(participant, &node_runtime, &self.args, &folder, prefix).await?;
                self.add_thrash(participant, outcome);
                Ok(())
            }
        }
    }

    fn add_race(&mut self, participant: &Participant, race: Race) {
        let name = row(participant, race.speed);
        println!(
            "{name}: the pod was evicted before the kernel killed in {} of {} races",
            race.evicted_first, race.runs
        );
        self.results.add(Metric::RaceWon, &name, Series::Values(race.won_percent().into_iter().collect()));
        self.results.add(Metric::RaceGrowth, &name, Series::Values(race.growth));
        self.results.add(Metric::RaceCrossingToEvicted, &name, Series::Values(race.to_evicted));
        race.failures.into_iter().for_each(|failure| self.fail(participant, failure));
    }

    fn add_thrash(&mut self, participant: &Participant, outcome: thrash::Outcome) {
        let name = participant.name();
        let thrash::Outcome { runs, evicted, wrong, .. } = outcome;
        println!("{name}: the pod that thrashed was evicted in {evicted} of {runs} stalls, another one in {wrong}");
        let missed = outcome.missed_percent();
        let series = [
            (Metric::ThrashHeldToRelieved, outcome.to_relief),
            (Metric::ThrashHeldToEvicted, outcome.to_evicted),
            (Metric::ThrashMissed, missed.into_iter().collect()),
            (Metric::ThrashBystanderBefore, outcome.before),
            (Metric::ThrashBystanderDuring, outcome.during),
            (Metric::ThrashBystanderAfter, outcome.after),
        ];
        for (metric, values) in series {
            self.results.add(metric, name, Series::Values(values));
        }
        self.results.add(Metric::ThrashTriggerToDecision, name, Series::Buckets(outcome.to_decision));
        outcome.failures.into_iter().for_each(|failure| self.fail(participant, failure));
    }

    fn add_oom(&mut self, participant: &Participant, outcome: oom::Outcome) -> anyhow::Result<()> {
        let name = participant.name();
        println!("\n{name}");
        println!("{}", outcome.verdicts.render("verdicts (victim / whose memory)"));
        println!("{}", outcome.reasons.render("reasons of terminated containers"));
        let path = self.args.common.output.join(format!("pressure-oom-{}.json", name.replace(' ', "-")));
        std::fs::create_dir_all(&self.args.common.output)
            .and_then(|()| std::fs::write(&path, format!("{:#}\n", serde_json::json!(outcome))))
            .with_context(|| format!("cannot write {}", path.display()))?;
        let percents = [
            (Metric::OomWrongVerdicts, outcome.verdicts.wrong_percent()),
            (Metric::OomWrongReasons, outcome.reasons.wrong_percent()),
        ];
        for (metric, percent) in percents {
            self.results.add(metric, name, Series::Values(percent.into_iter().collect()));
        }
        self.results.add(Metric::OomKillToReport, name, Series::Values(outcome.to_report));
        self.results.add(Metric::OomKillToStatus, name, Series::Values(outcome.to_status));
        outcome.failures.into_iter().for_each(|failure| self.fail(participant, failure));
        Ok(())
    }

    fn fail(&mut self, participant: &Participant, what: String) {
        let failure = format!("{}: {what}", participant.name());
        eprintln!("  {failure}");
        self.results.failures.push(failure);
    }
}

/// The row of the races at one speed.
fn row(participant: &Participant, speed: u32) -> String {
    format!("{}, {speed} MiB/s", participant.name())
}

/// The selected parts with their participants.
fn parts(args: &PressureArgs) -> anyhow::Result<Vec<(PressurePart, Vec<Participant>)>> {
    let has_cluster = args.cluster.kubeconfig.is_some();
    let is_selected = |part: &PressurePart| match args.parts.is_empty() {
        true => has_cluster || !part.needs_cluster(),
        false => args.parts.contains(part),
    };
    let with_participants = |part| {
        let participants = match part {
            PressurePart::Oom | PressurePart::Race => Participant::of_pressure(args)?,
            PressurePart::Thrash => Participant::of_thrash(args)?,
        };
        Ok((part, participants))
    };
    PressurePart::ALL.into_iter().filter(is_selected).map(with_participants).collect()
}

fn setup(args: &PressureArgs, parts: &[(PressurePart, Vec<Participant>)], environment: Environment) -> Setup {
    // The results of a part that is measured alone in a cluster are in files of their own.
    let (benchmark, pods) = match parts {
        [(PressurePart::Race, _)] => ("race", args.races),
        [(PressurePart::Thrash, _)] => ("thrash", args.stalls),
        _ => ("pressure", args.kills),
    };
    let of_speeds = |participant| args.speeds.iter().map(move |speed| row(participant, *speed));
    let names =
        parts.iter().flat_map(|(_, participants)| participants).map(|participant| participant.name().to_owned());
    let races = parts.iter().filter(|(part, _)| *part == PressurePart::Race).flat_map(|(_, participants)| participants);
    let mut rows: Vec<String> = Vec::new();
    for name in names.chain(races.flat_map(of_speeds)) {
        if !rows.contains(&name) {
            rows.push(name);
        }
    }
    Setup {
        benchmark,
        commit: args.common.commit.clone(),
        references: Vec::new(),
        participants: rows,
        counts: PodCounts { pods, idle: 0 },
        environment,
        output: args.common.output.clone(),
    }
}
