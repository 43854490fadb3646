//! A pod grows towards the threshold of `memory.available`: the agent evicts it, or the kernel kills it before.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::PressureArgs;
use super::cluster_node;
use super::kernel_log::KernelLog;
use super::node::NodeRuntime;
use crate::agent::Agent;
use crate::cluster::ClusterClient;
use crate::cluster::ObservedPods;
use crate::cluster::PodTimes;
use crate::exposition::Buckets;
use crate::manifest::LABEL;
use crate::manifest::NAMESPACE;
use crate::participant::Participant;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;

const NODE_LIMIT: Duration = Duration::from_secs(300);
/// Until the pod runs and has grown to the end of all memory, in emulation.
const RACE_LIMIT: Duration = Duration::from_secs(300);
const GONE_LIMIT: Duration = Duration::from_secs(120);
/// Poll interval of memory.available, which bounds the error of the time of the crossing.
const POLL: Duration = Duration::from_millis(5);
/// The growth of the pod is measured over so much memory above the threshold.
const APPROACH: u64 = 256 << 20;
/// The pod grows for so long before it reaches the threshold, as long as a kubelet's poll interval; what memory it would
/// need more time for, it takes at once.
const LEAD: Duration = Duration::from_secs(10);
/// The agent's own histogram; other agents have none.
const DECISIONS: &str = "keblet_eviction_decision_seconds";

/// Races at one speed.
#[derive(Debug, Default)]
pub(crate) struct Race {
    pub(crate) speed: u32,
    /// Races that were run.
    pub(crate) runs: u32,
    /// Races in which the pod was evicted and the kernel killed nothing.
    pub(crate) evicted_first: u32,
    /// How fast the pods really grew, in MiB per second.
    pub(crate) growth: Vec<f64>,
    /// memory.available below the threshold to the evicted pod's final status in a watch, in seconds.
    pub(crate) to_evicted: Vec<f64>,
    /// Races that could not be run.
    pub(crate) failures: Vec<String>,
}

impl Race {
    /// Share of races that the agent won, in percent.
    pub(crate) fn won_percent(&self) -> Option<f64> {
        (self.runs > 0).then(|| 100.0 * f64::from(self.evicted_first) / f64::from(self.runs))
    }
}

/// The races of one participant.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) races: Vec<Race>,
    /// What woke the agent to its decision to evict, by the agent's own histogram.
    pub(crate) to_decision: Buckets,
}

impl Outcome {
    /// Every race was run and won.
    fn is_clean(&self) -> bool {
        self.races.iter().all(|race| race.failures.is_empty() && race.evicted_first == race.runs)
    }
}

/// The moment at which memory.available fell below the threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Crossing {
    /// Nanoseconds of CLOCK_MONOTONIC.
    at: u64,
    /// Growth before, in MiB per second.
    growth: Option<f64>,
}

/// An agent as a node of the cluster.
struct RaceNode<'a> {
    agent: Agent,
    client: ClusterClient,
    observed: ObservedPods,
    _watching: AbortOnDropHandle<()>,
    args: &'a PressureArgs,
    node: &'a str,
}

/// Runs all races of one participant.
///
/// # Errors
/// The cluster cannot be reached, or the agent does not become a Ready node of it.
pub(crate) async fn measure(
    participant: &Participant,
    node_runtime: &NodeRuntime<'_>,
    args: &PressureArgs,
    folder: &Path,
    prefix: &str,
) -> anyhow::Result<Outcome> {
    let kubeconfig = args.cluster.kubeconfig.as_deref().context("no --kubeconfig")?;
    let node = args.cluster.node_name.as_deref().context("no --node-name")?;
    let client = ClusterClient::connect(kubeconfig, node).await?;
    client.until_usable().await?;
    client.sweep().await?;
    let available = format!("{}Mi", args.threshold);
    let agent = cluster_node::launch(participant, node_runtime, &args.cluster, &available, folder)?;
    let (observed, watching) = client.watch();
    let mut racing = RaceNode { agent, client, observed, _watching: watching, args, node };
    let measured = racing.all(node_runtime.image, prefix).await;
    racing.client.sweep().await?;
    racing.agent.stop().await?;
    if !measured.as_ref().is_ok_and(Outcome::is_clean) {
        cluster_node::keep_log(folder, &args.common.output, &format!("race-{prefix}"))?;
    }
    measured
}

impl RaceNode<'_> {
    async fn all(&mut self, image: &str, prefix: &str) -> anyhow::Result<Outcome> {
        let client = self.client.clone();
        let ready = self.agent.while_running(async {
            tokio::time::timeout(NODE_LIMIT, client.node_ready()).await.context("the node does not become Ready")?
        });
        ready.await?;
        let mut outcome = Outcome::default();
        for speed in &self.args.speeds {
            let mut race = Race { speed: *speed, ..Race::default() };
            for run in 0..self.args.races {
                let name = format!("{prefix}-{speed}-{run}");
                eprintln!("  race {name}");
                if let Err(error) = self.one(&mut race, &name, image).await {
                    self.agent.check_running()?;
                    eprintln!("  {error:#}");
                    race.failures.push(format!("race {name}: {error:#}"));
                }
            }
            outcome.races.push(race);
        }
        outcome.to_decision = self.agent.exposition().await?.histogram(DECISIONS, &[]);
        Ok(outcome)
    }

    async fn one(&self, race: &mut Race, name: &str, image: &str) -> anyhow::Result<()> {
        let free = tokio::time::timeout(GONE_LIMIT, self.client.without_memory_pressure()).await;
        free.context("the node still has memory pressure")??;
        let mut kernel = KernelLog::open()?;
        let first = first_mib(available()?, self.args.threshold, race.speed);
        self.client.create(&[pod(name, race.speed, first, image, self.node)?]).await?;
        let crossed = self.until_crossed(name).await?;
        let names = [name.to_owned()];
        let ended = self.observed.wait(&names, "ended", PodTimes::ended, RACE_LIMIT).await;
        // A kill is logged before anything that follows from it.
        let kills = kernel.kills(Duration::ZERO, Duration::ZERO, &CancellationToken::new()).await.unwrap_or_default();
        let times = self.observed.of(name);
        self.client.delete(&names).await?;
        self.observed.wait(&names, "gone", |times| times.gone, GONE_LIMIT).await?;
        ended?;
        if times.ready.is_none() {
            bail!("the pod ended before it was ready");
        }
        race.runs += 1;
        race.growth.extend(crossed.and_then(|crossed| crossed.growth));
        race.evicted_first += u32::from(times.disrupted.is_some() && kills.is_empty());
        if let (Some(_), Some(crossed), Some(ended)) = (times.disrupted, crossed, times.ended()) {
            race.to_evicted.push(seconds(crossed.at, ended));
        }
        let killed: Vec<&str> = kills.iter().map(|kill| kill.comm.as_str()).collect();
        let (evicted, took) = (times.disrupted.is_some(), race.to_evicted.last());
        eprintln!("    evicted: {evicted}, killed: {killed:?}, {crossed:?}, status after {took:?} s");
        Ok(())
    }

    /// Waits until memory.available is below the threshold; `None` if the pod ends before.
    async fn until_crossed(&self, name: &str) -> anyhow::Result<Option<Crossing>> {
        let threshold = u64::from(self.args.threshold) << 20;
        let deadline = Instant::now() + RACE_LIMIT;
        let mut approach = None;
        loop {
            let (available, at) = (available()?, monotonic_now()?);
            if available < threshold + APPROACH && approach.is_none() {
                approach = Some((available, at));
            }
            if available < threshold {
                let growth = approach.filter(|(_, begin)| *begin < at).map(|(before, begin)| {
                    before.saturating_sub(available) as f64 / f64::from(1 << 20) / seconds(begin, at)
                });
                return Ok(Some(Crossing { at, growth }));
            }
            let times = self.observed.of(name);
            if times.ended().or(times.terminated).is_some() {
                return Ok(None);
            }
            if Instant::now() > deadline {
                bail!("memory.available is not below the threshold after {}", humantime::format_duration(RACE_LIMIT));
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

/// How much memory the pod takes at once: all but what it grows by within [`LEAD`].
fn first_mib(available: u64, threshold: u32, speed: u32) -> u64 {
    (available >> 20).saturating_sub(u64::from(threshold) + u64::from(speed) * LEAD.as_secs())
}

/// A pod without requests that takes so much at once and then grows.
fn pod(name: &str, speed: u32, first: u64, image: &str, node: &str) -> anyhow::Result<Pod> {
    let pod = json!({
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {LABEL.0: LABEL.1}},
        "spec": {
            "nodeName": node,
            // The condition of the race before may just be ending.
            "tolerations": [{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"}],
            "hostNetwork": true,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": image,
                "imagePullPolicy": "Never",
                "command": ["/probe", "grow", "--mb-per-s", speed.to_string(), "--first-mb", first.to_string()],
            }],
        },
    });
    serde_json::from_value(pod).with_context(|| format!("the manifest of pod {name}"))
}

/// memory.available of the node in bytes, as kubelets count it: what is not in the working set of the root cgroup.
fn available() -> anyhow::Result<u64> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
    let (meminfo, stat) = (read("/proc/meminfo")?, read("/sys/fs/cgroup/memory.stat")?);
    parse_available(&meminfo, &stat).context("/proc/meminfo or memory.stat of the root cgroup is malformed")
}

fn parse_available(meminfo: &str, stat: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let total = total.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10;
    let of = |name: &str| {
        let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
        fields.find_map(|(key, value)| (key == name).then(|| value.parse::<u64>().ok())).flatten()
    };
    let working_set = (of("anon")? + of("file")?).saturating_sub(of("inactive_file")?);
    Some(total.saturating_sub(working_set))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_what_is_not_in_the_working_set() {
        let stat = "anon 100000\nfile 50000\nfile_mapped 7\ninactive_file 30000\n";
        assert_eq!(parse_available("MemFree: 5 kB\nMemTotal:       1000 kB\n", stat), Some((1000 << 10) - 120_000));
        assert_eq!(parse_available("MemTotal: 1000 kB\n", "anon 1\n"), None);
    }

    #[test]
    fn a_pod_grows_for_ten_seconds_before_it_reaches_the_threshold() {
        assert_eq!(first_mib(2500 << 20, 300, 50), 1700);
        assert_eq!(first_mib(2500 << 20, 300, 500), 0);
    }

    #[test]
    fn only_evictions_without_a_kill_are_won() {
        let race = Race { runs: 4, evicted_first: 3, ..Race::default() };
        assert_eq!(race.won_percent(), Some(75.0));
        assert_eq!(Race::default().won_percent(), None);
        assert!(!Outcome { races: vec![race], ..Outcome::default() }.is_clean());
    }
}
