//! The order of a run: every workload of every participant, in rotating order, on a clean runtime each time.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use serde_json::json;
use tempfile::TempDir;
use tokio_util::task::AbortOnDropHandle;

use super::PlegArgs;
use super::WorkloadKind;
use crate::agent;
use crate::agent::Agent;
use crate::agent::Ports;
use crate::bare_client::BareClient;
use crate::bare_client::ExitDetection;
use crate::bare_client::StopEvents;
use crate::common;
use crate::common::Prerequisites;
use crate::folder;
use crate::idle;
use crate::manifest;
use crate::manifest::PodNetwork;
use crate::manifest::PodSettings;
use crate::metric::Metric;
use crate::metric::PodCounts;
use crate::observer;
use crate::participant::Participant;
use crate::report::Environment;
use crate::report::Report;
use crate::report::Setup;
use crate::results::Results;
use crate::results::Series;
use crate::runtime_pods;
use crate::scrape;
use crate::stamps;
use crate::stamps::monotonic_now;
use crate::workload;
use crate::workload::BenchPod;

/// Within this time an agent would start a surplus container.
const SURPLUS_WATCH: Duration = Duration::from_secs(1);
/// Time for an agent to become idle after its pods run.
const IDLE_SETTLE: Duration = Duration::from_secs(10);
/// Time for an agent to become idle after its start, before pods are written.
const START_SETTLE: Duration = Duration::from_millis(500);

/// Number of listed failures per measurement; further ones are only counted.
const FAILURES_SHOWN: usize = 5;

/// keblet's histogram of the time from the kernel's timestamp to the PLEG event.
const EVENT_LATENCY: &str = "keblet_event_latency_seconds";

const KEBLET_FLAGS: &str = "run --config={config} --root-dir={root} --cert-dir={root}/pki";

/// One session of the benchmark.
#[derive(Debug)]
pub(super) struct Session {
    args: PlegArgs,
    participants: Vec<Participant>,
    keblet: PathBuf,
    endpoint: RuntimeEndpoint,
    runtime: Runtime,
    runtime_pid: Option<u32>,
    work: TempDir,
    results: Results,
    report: Report,
}

/// One workload of one participant.
struct Measurement<'a> {
    participant: &'a Participant,
    kind: WorkloadKind,
    settings: PodSettings,
    batches: Vec<Vec<BenchPod>>,
    limit: Duration,
}

impl Measurement<'_> {
    fn folder(&self) -> &Path {
        &self.settings.folder
    }

    /// Writes a static pod's manifest atomically.
    fn write_manifest(&self, pod: &BenchPod) -> anyhow::Result<()> {
        let manifest = manifest::static_pod(pod, &self.settings);
        let hidden = self.folder().join(format!("{}.json", pod.name));
        let visible = self.folder().join("manifests").join(format!("{}.json", pod.name));
        std::fs::write(&hidden, manifest.to_string()).with_context(|| format!("cannot write {}", hidden.display()))?;
        std::fs::rename(&hidden, &visible).with_context(|| format!("cannot write {}", visible.display()))
    }
}

impl Session {
    /// Checks that all prerequisites are met, and removes what an earlier session left.
    ///
    /// # Errors
    /// A prerequisite is missing.
    pub(super) async fn prepare(args: PlegArgs) -> anyhow::Result<Self> {
        let participants = Participant::of_pleg(&args)?;
        let Prerequisites { endpoint, runtime, environment, keblet } = args.common.prerequisites().await?;
        let work = tempfile::Builder::new().prefix("keblet-bench-").tempdir().context("cannot create a folder")?;
        runtime_pods::sweep(&runtime).await?;
        let runtime_pid = runtime_pods::runtime_pid(&endpoint)?;
        let report = Report::new(setup(&args, &participants, environment));
        let results = Results::default();
        Ok(Self { args, participants, keblet, endpoint, runtime, runtime_pid, work, results, report })
    }

    /// Measures everything. May be dropped at any point; [`Self::clean_up`] removes what exists then.
    ///
    /// # Errors
    /// The runtime cannot be cleaned, or a run's JSON cannot be written. Failures of participants are results.
    pub(super) async fn measure(&mut self) -> anyhow::Result<()> {
        let selected = |kind: &WorkloadKind| self.args.workloads.is_empty() || self.args.workloads.contains(kind);
        let kinds: Vec<_> = WorkloadKind::ALL.into_iter().filter(selected).collect();
        for run in 0..self.args.common.runs {
            common::free_removed_cgroups(&self.keblet);
            for kind in &kinds {
                if *kind != WorkloadKind::Idle || run < self.args.common.idle_runs {
                    self.measure_all(*kind, run).await?;
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

    async fn measure_all(&mut self, kind: WorkloadKind, run: u32) -> anyhow::Result<()> {
        let mut participants: Vec<_> = self.participants.clone().into_iter().enumerate().collect();
        // Rotated, so that no participant always runs first or last.
        participants.rotate_left(run as usize % self.participants.len().max(1));
        for (index, participant) in &participants {
            // An idle pidfd costs nothing; the client with the event stream shows the cost of the stream.
            if kind == WorkloadKind::Idle && *participant == Participant::BareClient {
                continue;
            }
            self.measure_one(participant, *index, kind, run).await?;
        }
        Ok(())
    }

    async fn measure_one(
        &mut self,
        participant: &Participant,
        index: usize,
        kind: WorkloadKind,
        run: u32,
    ) -> anyhow::Result<()> {
        let what = format!("{kind:?}").to_lowercase();
        eprintln!("run {}/{}: {what}: {}", run + 1, self.args.common.runs, participant.name());
        let prefix = format!("{what}-{run}-{index}");
        let folder = self.work.path().join(&prefix);
        folder::create(&folder)?;
        let settings = PodSettings {
            image: self.args.common.image.clone(),
            network: PodNetwork::Host,
            folder,
            token: false,
            cgroup_root: None,
        };
        let batches = workload::batches(kind, self.args.pods, &prefix, &settings.stamps(), stamps::monotonic_now()?);
        let limit = workload::time_limit(self.args.pods);
        let measurement = Measurement { participant, kind, settings, batches, limit };

        let measured = match participant.is_bare_client() {
            true => self.measure_bare_client(&measurement).await,
            false => self.measure_agent(&measurement).await,
        };
        if let Err(error) = measured {
            self.fail(&measurement, format!("{error:#}"));
        }
        runtime_pods::sweep(&self.runtime).await?;
        if let Err(error) = folder::remove(measurement.folder()) {
            self.fail(&measurement, format!("{error:#}"));
        }
        Ok(())
    }

    async fn measure_bare_client(&mut self, measurement: &Measurement<'_>) -> anyhow::Result<()> {
        let (detection, _reading) = self.exit_detection(measurement.participant).await?;
        let parallelism = self.args.bare_client_parallelism.unwrap_or(self.args.pods.max(1)) as usize;
        let client = BareClient::new(self.runtime.clone(), detection, measurement.settings.clone(), parallelism);
        let mut begins = Vec::new();
        for batch in &measurement.batches {
            client.prepare(batch)?;
            begins.push(monotonic_now()?);
            let run = tokio::time::timeout(measurement.limit, client.run(batch)).await;
            let noticed = run.context("the bare client did not finish in time")??;
            stamps::wait_done(batch, measurement.limit).await?;
            let delays = noticed.iter().map(|(pod, at)| Ok(stamps::seconds(stamps::crash(pod)?.0, *at)));
            let delays = delays.collect::<anyhow::Result<Vec<_>>>()?;
            if !delays.is_empty() {
                self.add(measurement, Metric::ExitToNoticed, Series::Values(delays));
            }
        }
        if measurement.kind == WorkloadKind::Idle {
            self.watch_idle(measurement, None).await?;
        }
        self.collect(measurement, &begins).await
    }

    /// The exit detection of a bare client; the task reads events until the handle is dropped.
    async fn exit_detection(
        &self,
        participant: &Participant,
    ) -> anyhow::Result<(ExitDetection, Option<AbortOnDropHandle<()>>)> {
        if *participant == Participant::BareClient {
            return Ok((ExitDetection::Pidfd, None));
        }
        let events = self.runtime.container_events().await?;
        let stopped = Arc::new(StopEvents::default());
        let reader = stopped.clone();
        let reading = tokio::spawn(async move { reader.read(events).await });
        Ok((ExitDetection::Events(stopped), Some(AbortOnDropHandle::new(reading))))
    }

    async fn measure_agent(&mut self, measurement: &Measurement<'_>) -> anyhow::Result<()> {
        let before = measurement.kind == WorkloadKind::Start;
        if before {
            measurement.batches.iter().flatten().try_for_each(|pod| measurement.write_manifest(pod))?;
        }
        let mut agent = self.start(measurement)?;
        let mut begins = vec![agent.begun()];
        if !before {
            let ready = agent.ready().await?;
            tokio::time::sleep(START_SETTLE).await;
            self.add(measurement, Metric::AgentStartToHealthy, Series::Values(vec![ready]));
            begins.clear();
        }
        for batch in &measurement.batches {
            if !before {
                begins.push(monotonic_now()?);
                batch.iter().try_for_each(|pod| measurement.write_manifest(pod))?;
            }
            agent.while_running(stamps::wait_done(batch, measurement.limit)).await?;
        }
        if measurement.kind == WorkloadKind::Idle {
            self.watch_idle(measurement, Some(&agent)).await?;
            scrape::measure(&mut self.results, measurement.participant.name(), &agent).await?;
            self.measure_observer(measurement).await?;
        }
        self.collect(measurement, &begins).await?;
        if measurement.kind == WorkloadKind::Crash {
            self.read_event_latency(measurement, &agent).await?;
        }
        agent.stop().await
    }

    fn start(&self, measurement: &Measurement<'_>) -> anyhow::Result<Agent> {
        let Measurement { participant, .. } = measurement;
        let folder = measurement.folder();
        let ports = Ports::free();
        let mut config = agent::kubelet_configuration(folder, &self.endpoint, self.args.pods, &ports);
        // Without this, other agents would store certificates on the node.
        config["enableServer"] = json!(matches!(participant, Participant::Keblet { .. }));
        let config = agent::write_configuration(participant, &config, folder)?;
        let placeholders = [
            ("{manifests}", agent::quoted(&folder.join("manifests"))),
            ("{root}", agent::quoted(&folder.join("root"))),
            ("{config}", agent::quoted(&config)),
        ];
        let command = agent::command(participant, &self.keblet, KEBLET_FLAGS, &placeholders);
        Agent::launch(participant.name(), command, folder, &ports)
    }

    async fn watch_idle(&mut self, measurement: &Measurement<'_>, agent: Option<&Agent>) -> anyhow::Result<()> {
        tokio::time::sleep(IDLE_SETTLE).await;
        let (name, time) = (measurement.participant.name(), self.args.idle_time);
        idle::watch(&mut self.results, name, agent, self.runtime_pid, time).await
    }

    /// The observer costs the same beside any agent, so that it is measured once.
    async fn measure_observer(&mut self, measurement: &Measurement<'_>) -> anyhow::Result<()> {
        if *measurement.participant != Participant::keblet() {
            return Ok(());
        }
        let (name, time) = (measurement.participant.name(), self.args.idle_time);
        observer::measure(&mut self.results, name, &self.keblet, &self.endpoint, measurement.folder(), time).await
    }

    /// Only keblet has this histogram.
    async fn read_event_latency(&mut self, measurement: &Measurement<'_>, agent: &Agent) -> anyhow::Result<()> {
        if matches!(measurement.participant, Participant::Peer { .. }) {
            return Ok(());
        }
        let buckets = agent.exposition().await?.histogram(EVENT_LATENCY, &[("type", "ContainerDied")]);
        if !buckets.is_empty() {
            self.add(measurement, Metric::ExitToNoticed, Series::Buckets(buckets));
        }
        Ok(())
    }

    /// Reads the stamps, and checks the number of starts of every container.
    async fn collect(&mut self, measurement: &Measurement<'_>, begins: &[u64]) -> anyhow::Result<()> {
        tokio::time::sleep(SURPLUS_WATCH).await;
        let pods = measurement.batches.concat();
        let mut wrong = runtime_pods::inspect(&self.runtime, &pods).await?;
        for pod in &pods {
            wrong.extend(stamps::unexpected_starts(pod)?.map(|surplus| format!("pod {}: {surplus}", pod.name)));
        }
        let more = wrong.len().saturating_sub(FAILURES_SHOWN);
        wrong.truncate(FAILURES_SHOWN);
        wrong.extend((more > 0).then(|| format!("and {more} more of this kind")));
        wrong.into_iter().for_each(|wrong| self.fail(measurement, wrong));

        for (batch, begin) in measurement.batches.iter().zip(begins) {
            let metric = match measurement.kind {
                WorkloadKind::Crash => Metric::ExitToRestarted,
                WorkloadKind::Chain => Metric::InitChain,
                WorkloadKind::Chains => Metric::InitChainsAtOnce,
                WorkloadKind::Start => Metric::AgentStartToAllRunning,
                WorkloadKind::Idle => continue,
            };
            let values = stamps::durations(measurement.kind, batch, *begin)?;
            self.add(measurement, metric, Series::Values(values));
        }
        Ok(())
    }

    fn add(&mut self, measurement: &Measurement<'_>, metric: Metric, series: Series) {
        self.results.add(metric, measurement.participant.name(), series);
    }

    fn fail(&mut self, measurement: &Measurement<'_>, what: String) {
        let kind = format!("{:?}", measurement.kind).to_lowercase();
        let failure = format!("{}: {kind}: {what}", measurement.participant.name());
        eprintln!("  {failure}");
        self.results.failures.push(failure);
    }
}

fn setup(args: &PlegArgs, participants: &[Participant], environment: Environment) -> Setup {
    let names = |selects: fn(&Participant) -> bool| {
        let selected = participants.iter().filter(|participant| selects(participant));
        selected.map(|participant| participant.name().to_owned()).collect()
    };
    Setup {
        benchmark: "pleg",
        commit: args.common.commit.clone(),
        references: names(Participant::is_bare_client),
        participants: names(|_| true),
        counts: PodCounts { pods: args.pods, idle: args.pods },
        environment,
        output: args.common.output.clone(),
    }
}
