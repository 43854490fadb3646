//! A pod grows towards the threshold of `memory.available`: the agent evicts it, or the kernel kills it before.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::PressureArgs;
use super::kernel_log::KernelLog;
use super::node::NodeRuntime;
use crate::agent;
use crate::agent::Agent;
use crate::agent::Ports;
use crate::cluster::ClusterClient;
use crate::cluster::ObservedPods;
use crate::manifest::LABEL;
use crate::manifest::NAMESPACE;
use crate::participant::Participant;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;

const KEBLET_FLAGS: &str = "run --config={config} --root-dir={root} --cert-dir={root}/pki --kubeconfig={kubeconfig} \
                            --hostname-override={node} --node-ip={ip}";
const NODE_LIMIT: Duration = Duration::from_secs(300);
/// Until the pod runs and has grown to the end of all memory, in emulation.
const RACE_LIMIT: Duration = Duration::from_secs(300);
const GONE_LIMIT: Duration = Duration::from_secs(120);
/// Poll interval of memory.available, which bounds the error of the time of the crossing.
const POLL: Duration = Duration::from_millis(2);

/// Races at one speed.
#[derive(Debug, Default)]
pub(crate) struct Race {
    pub(crate) speed: u32,
    /// Races that were run.
    pub(crate) runs: u32,
    /// Races in which the pod was evicted and the kernel killed nothing.
    pub(crate) evicted_first: u32,
    /// memory.available below the threshold to the Evicted status in a watch, in seconds.
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
) -> anyhow::Result<Vec<Race>> {
    let kubeconfig = args.cluster.kubeconfig.as_deref().context("no --kubeconfig")?;
    let node = args.cluster.node_name.as_deref().context("no --node-name")?;
    let client = ClusterClient::connect(kubeconfig, node).await?;
    client.until_usable().await?;
    client.sweep().await?;
    let agent = launch(participant, node_runtime, args, folder)?;
    let (observed, watching) = client.watch();
    let mut racing = RaceNode { agent, client, observed, _watching: watching, args, node };
    let measured = racing.all(node_runtime.image, prefix).await;
    racing.client.sweep().await?;
    racing.agent.stop().await?;
    measured
}

impl RaceNode<'_> {
    async fn all(&mut self, image: &str, prefix: &str) -> anyhow::Result<Vec<Race>> {
        let client = self.client.clone();
        let ready = self.agent.while_running(async {
            tokio::time::timeout(NODE_LIMIT, client.node_ready()).await.context("the node does not become Ready")?
        });
        ready.await?;
        let mut races = Vec::new();
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
            races.push(race);
        }
        Ok(races)
    }

    async fn one(&self, race: &mut Race, name: &str, image: &str) -> anyhow::Result<()> {
        let free = tokio::time::timeout(GONE_LIMIT, self.client.without_memory_pressure()).await;
        free.context("the node still has memory pressure")??;
        let mut kernel = KernelLog::open()?;
        self.client.create(&[pod(name, race.speed, image, self.node)?]).await?;
        let crossed = self.until_crossed(name).await?;
        let ended = self.until_ended(name).await;
        // A kill is logged before anything that follows from it.
        let kills = kernel.kills(Duration::ZERO, Duration::ZERO).await.unwrap_or_default();
        let times = self.observed.of(name);
        self.client.delete(&[name.to_owned()]).await?;
        self.observed.wait(&[name.to_owned()], "gone", |times| times.gone, GONE_LIMIT).await?;
        ended?;
        race.runs += 1;
        let evicted = times.reason.as_deref() == Some("Evicted");
        if evicted && kills.is_empty() {
            race.evicted_first += 1;
        }
        if let (true, Some(crossed), Some(failed)) = (evicted, crossed, times.failed) {
            race.to_evicted.push(seconds(crossed, failed));
        }
        Ok(())
    }

    /// When memory.available fell below the threshold; `None` if the pod ended before.
    async fn until_crossed(&self, name: &str) -> anyhow::Result<Option<u64>> {
        let threshold = u64::from(self.args.threshold) << 20;
        let deadline = Instant::now() + RACE_LIMIT;
        while available()? >= threshold {
            let times = self.observed.of(name);
            if times.failed.or(times.terminated).is_some() {
                return Ok(None);
            }
            if Instant::now() > deadline {
                bail!("memory.available is not below the threshold after {}", humantime::format_duration(RACE_LIMIT));
            }
            tokio::time::sleep(POLL).await;
        }
        monotonic_now().map(Some)
    }

    async fn until_ended(&self, name: &str) -> anyhow::Result<()> {
        let names = [name.to_owned()];
        // Its container is terminated before the pod has failed and has its reason.
        self.observed.wait(&names, "failed", |times| times.failed, RACE_LIMIT).await?;
        Ok(())
    }
}

fn launch(
    participant: &Participant,
    node_runtime: &NodeRuntime<'_>,
    args: &PressureArgs,
    folder: &Path,
) -> anyhow::Result<Agent> {
    let ports = Ports::free()?;
    let mut config = agent::kubelet_configuration(folder, node_runtime.endpoint, 100, &ports);
    config["staticPodPath"] = json!("");
    config["cgroupsPerQOS"] = json!(true);
    config["cgroupRoot"] = json!(node_runtime.cgroup_root);
    config["evictionHard"] = json!({"memory.available": format!("{}Mi", args.threshold)});
    // So that the next pod is admitted soon.
    config["evictionPressureTransitionPeriod"] = json!("1s");
    config["logging"] = json!({"format": "json", "verbosity": 2});
    let config = agent::write_configuration(participant, &config, folder)?;
    let cluster = &args.cluster;
    let kubeconfig = cluster.node_kubeconfig.as_deref().context("no --node-kubeconfig")?;
    let flags = if cluster.node_ip.is_some() { KEBLET_FLAGS } else { KEBLET_FLAGS.trim_end_matches(" --node-ip={ip}") };
    let placeholders = [
        ("{config}", agent::quoted(&config)),
        ("{root}", agent::quoted(&folder.join("root"))),
        ("{kubeconfig}", agent::quoted(kubeconfig)),
        ("{node}", cluster.node_name.clone().unwrap_or_default()),
        ("{ip}", cluster.node_ip.map(|ip| ip.to_string()).unwrap_or_default()),
    ];
    let command = agent::command(participant, node_runtime.keblet, flags, &placeholders);
    Agent::launch(participant.name(), command, folder, &ports)
}

/// A pod without requests that grows.
fn pod(name: &str, speed: u32, image: &str, node: &str) -> anyhow::Result<Pod> {
    let pod = json!({
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {LABEL.0: LABEL.1}},
        "spec": {
            "nodeName": node,
            "hostNetwork": true,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": image,
                "imagePullPolicy": "Never",
                "command": ["/probe", "grow", "--mb-per-s", speed.to_string()],
            }],
        },
    });
    serde_json::from_value(pod).with_context(|| format!("the manifest of pod {name}"))
}

/// memory.available of the node in bytes: what is free, and the inactive part of the page cache.
fn available() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    parse_available(&text).context("/proc/meminfo is malformed")
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Some((field("MemFree:")? + field("Inactive(file):")?) << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_free_or_inactive_cache() {
        let text = "MemTotal:       1000 kB\nMemFree:         300 kB\nInactive:  90 kB\nInactive(file):   50 kB\n";
        assert_eq!(parse_available(text), Some(350 << 10));
        assert_eq!(parse_available("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn only_evictions_without_a_kill_are_won() {
        let race = Race { runs: 4, evicted_first: 3, ..Race::default() };
        assert_eq!(race.won_percent(), Some(75.0));
        assert_eq!(Race::default().won_percent(), None);
    }
}
