//! A pod thrashes and stalls the whole node: how soon the node is relieved, and what a pod that needs its page cache notices.

mod bystander;
mod stall;

use std::fs::File;
use std::io::ErrorKind;
use std::io::Write as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use keblet_skip::ports;
use nix::sys::statfs::OVERLAYFS_SUPER_MAGIC;
use nix::sys::statfs::TMPFS_MAGIC;
use nix::sys::statfs::statfs;
use serde_json::Value;
use serde_json::json;
use tokio_util::task::AbortOnDropHandle;

use super::PressureArgs;
use super::cluster_node;
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
use bystander::Asking;
use stall::StallSeries;

const NODE_LIMIT: Duration = Duration::from_secs(300);
/// Until a pod runs, in emulation.
const START_LIMIT: Duration = Duration::from_secs(180);
/// Until the pod has filled the memory and stalls the node.
const STALL_LIMIT: Duration = Duration::from_secs(180);
/// The node is observed for so long from the moment at which the threshold holds, with and without a policy.
const OBSERVED: Duration = Duration::from_secs(30);
/// And the bystander for so long before and after.
const CALM: Duration = Duration::from_secs(10);
const GONE_LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);
/// The agent's own histogram; other agents have none.
const DECISIONS: &str = "keblet_eviction_decision_seconds";
/// The machine has the memory that is left to the thrashing pod, and some for the rest: this file does not fit in it.
const FILE: &str = "thrash.data";
/// The file that the bystander serves; the kernel keeps it in the page cache until it reclaims the memory.
const CONTENT: &str = "content.data";
const CONTENT_MB: u32 = 16;
/// Where a pod finds the folder of its file.
const DATA: &str = "/data";

/// All stalls of one participant. Times in seconds.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Stalls that were observed.
    pub(crate) runs: u32,
    /// Stalls in which the thrashing pod, and no other, was evicted.
    pub(crate) evicted: u32,
    /// Stalls in which the bystander was evicted or ended.
    pub(crate) wrong: u32,
    /// Threshold held to all tasks waiting for less than 5 % of a second; all of [`OBSERVED`] without a relief in that time.
    pub(crate) to_relief: Vec<f64>,
    /// Threshold held to the status of the evicted pod in a watch.
    pub(crate) to_evicted: Vec<f64>,
    /// What woke the agent to its decision to evict, by the agent's own histogram.
    pub(crate) to_decision: Buckets,
    /// Answers of the bystander before a pod thrashes.
    pub(crate) before: Vec<f64>,
    /// From the moment at which the threshold holds, for [`OBSERVED`].
    pub(crate) during: Vec<f64>,
    /// Once the thrashing pod is gone.
    pub(crate) after: Vec<f64>,
    /// Stalls that could not be observed.
    pub(crate) failures: Vec<String>,
}

impl Outcome {
    /// Share of stalls that did not end with the eviction of the thrashing pod and no other, in percent.
    pub(crate) fn missed_percent(&self) -> Option<f64> {
        (self.runs > 0).then(|| 100.0 * f64::from(self.runs - self.evicted) / f64::from(self.runs))
    }
}

/// An agent as a node of the cluster.
struct ThrashNode<'a> {
    agent: Agent,
    client: ClusterClient,
    observed: ObservedPods,
    _watching: AbortOnDropHandle<()>,
    image: &'a str,
    node: &'a str,
    data: DataFolder,
    args: &'a PressureArgs,
}

/// Measures all stalls of one participant.
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
    let data = DataFolder::create(args.thrash_folder.as_ref().unwrap_or(&args.common.output), args.thrash_mb)?;
    stay_in_memory()?;
    let client = ClusterClient::connect(kubeconfig, node).await?;
    client.until_usable().await?;
    client.sweep().await?;
    // Only the policy is to act.
    let agent = cluster_node::launch(participant, node_runtime, &args.cluster, "0%", folder)?;
    let (observed, _watching) = client.watch();
    let image = node_runtime.image;
    let mut thrashing = ThrashNode { agent, client, observed, _watching, image, node, data, args };
    let measured = thrashing.all(prefix).await;
    thrashing.client.sweep().await?;
    thrashing.agent.stop().await?;
    cluster_node::keep_log(folder, &args.common.output, &format!("thrash-{prefix}"))?;
    measured
}

impl ThrashNode<'_> {
    async fn all(&mut self, prefix: &str) -> anyhow::Result<Outcome> {
        let client = self.client.clone();
        let ready = self.agent.while_running(async {
            tokio::time::timeout(NODE_LIMIT, client.node_ready()).await.context("the node does not become Ready")?
        });
        ready.await?;
        let mut outcome = Outcome::default();
        let (bystander, port) = (format!("{prefix}-bystander"), ports::free());
        self.client.create(&[self.bystander(&bystander, port)?]).await?;
        self.observed.wait(std::slice::from_ref(&bystander), "Ready", |times| times.ready, START_LIMIT).await?;
        for run in 0..self.args.stalls {
            let name = format!("{prefix}-thrash-{run}");
            eprintln!("  stall {name}");
            if let Err(error) = self.one(&mut outcome, &name, &bystander, port).await {
                self.agent.check_running()?;
                eprintln!("  {error:#}");
                outcome.failures.push(format!("stall {name}: {error:#}"));
            }
        }
        outcome.to_decision = self.agent.exposition().await?.histogram(DECISIONS, &[]);
        Ok(outcome)
    }

    async fn one(&self, outcome: &mut Outcome, name: &str, bystander: &str, port: u16) -> anyhow::Result<()> {
        let free = tokio::time::timeout(GONE_LIMIT, self.client.without_memory_pressure()).await;
        free.context("the node still has memory pressure")??;
        let asking = Asking::begin(port)?;
        let calm = monotonic_now()?;
        tokio::time::sleep(CALM).await;
        let create = monotonic_now()?;
        let stalls = StallSeries::follow()?;
        self.client.create(&[self.thrashing(name)?]).await?;
        let stalled = self.stalled(name, &stalls).await;
        let names = [name.to_owned()];
        // Also after a failure, or the next stall would begin in this one.
        self.client.delete(&names).await?;
        let gone = self.observed.wait(&names, "gone", |times| times.gone, GONE_LIMIT).await?;
        let held = stalled?;
        tokio::time::sleep(CALM.max(Asking::limit())).await;
        let times = self.observed.of(name);
        outcome.runs += 1;
        let is_wrong = self.observed.of(bystander).ended().is_some();
        outcome.wrong += u32::from(is_wrong);
        outcome.evicted += u32::from(times.disrupted.is_some() && !is_wrong);
        // The end of the pod relieves the node too, if nothing else did before.
        let observed = held + OBSERVED.as_nanos() as u64;
        let relief = until_relief(held, stalls.relieved(held));
        outcome.to_relief.push(relief);
        if let (Some(_), Some(ended)) = (times.disrupted, times.ended()) {
            outcome.to_evicted.push(seconds(held, ended));
        }
        outcome.before.extend(asking.between(calm, create));
        outcome.during.extend(asking.between(held, observed));
        outcome
            .after
            .extend(gone.first().iter().flat_map(|gone| asking.between(**gone, **gone + CALM.as_nanos() as u64)));
        eprintln!(
            "    threshold held after {:.1} s, relieved {relief:.2} s later, evicted: {}, status {:?} s later",
            seconds(create, held),
            times.disrupted.is_some(),
            times.ended().filter(|_| times.disrupted.is_some()).map(|ended| seconds(held, ended)),
        );
        Ok(())
    }

    /// Waits until the pod has stalled the node, and until the time of observation has passed. Returns when the threshold
    /// was held.
    async fn stalled(&self, name: &str, stalls: &StallSeries) -> anyhow::Result<u64> {
        let deadline = tokio::time::Instant::now() + STALL_LIMIT;
        let held = loop {
            if let Some(held) = stalls.held() {
                break held;
            }
            let times = self.observed.of(name);
            if let Some(ended) = PodTimes::ended(&times).or(times.terminated) {
                // What was sampled before its end is known a moment later.
                tokio::time::sleep(POLL * 4).await;
                match stalls.held() {
                    Some(held) if held <= ended => break held,
                    _ => bail!("the pod ended before the threshold held, evicted: {}", times.disrupted.is_some()),
                }
            }
            if tokio::time::Instant::now() > deadline {
                let share = 100.0 * stalls.share().unwrap_or_default();
                bail!("all tasks waited for {share:.0} % of the last seconds only: the machine has too much memory");
            }
            tokio::time::sleep(POLL).await;
        };
        let passed = Duration::from_secs_f64(seconds(held, monotonic_now()?));
        tokio::time::sleep(OBSERVED.saturating_sub(passed)).await;
        Ok(held)
    }

    /// A Burstable pod that answers requests with what it reads from a file.
    fn bystander(&self, name: &str, port: u16) -> anyhow::Result<Pod> {
        let main = json!({
            "command": ["/probe", "web", "--port", port.to_string(), "--content", format!("{DATA}/{CONTENT}")],
            // No limit of CPU time: it would delay answers by itself.
            "resources": {"requests": {"cpu": "200m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
        });
        self.pod(name, main)
    }

    /// A BestEffort pod that thrashes.
    fn thrashing(&self, name: &str) -> anyhow::Result<Pod> {
        let (file, leave) = (format!("{DATA}/{FILE}"), self.args.leave_mb.to_string());
        let main = json!({
            "command": ["/probe", "thrash", "--file", file, "--leave-mb", leave],
        });
        self.pod(name, main)
    }

    fn pod(&self, name: &str, mut main: Value) -> anyhow::Result<Pod> {
        main["name"] = json!("main");
        main["volumeMounts"] = json!([{"name": "data", "mountPath": DATA, "readOnly": true}]);
        main["image"] = json!(self.image);
        main["imagePullPolicy"] = json!("Never");
        let pod = json!({
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {LABEL.0: LABEL.1}},
            "spec": {
                "nodeName": self.node,
                // The condition of the stall before may just be ending.
                "tolerations": [
                    {"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"},
                ],
                "hostNetwork": true,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [main],
                "volumes": [{"name": "data", "hostPath": {"path": self.data.path}}],
            },
        });
        serde_json::from_value(pod).with_context(|| format!("the manifest of pod {name}"))
    }
}

/// Seconds from the moment at which the threshold held to the relief, at most [`OBSERVED`]. Left out, a stall that goes on would
/// make all figures better than they are.
fn until_relief(held: u64, relieved: Option<u64>) -> f64 {
    let observed = OBSERVED.as_secs_f64();
    relieved.map_or(observed, |at| seconds(held, at).min(observed))
}

/// The files of the pods, on a disk; removed on drop.
#[derive(Debug)]
struct DataFolder {
    path: PathBuf,
}

impl DataFolder {
    /// Creates a file to thrash of so many MiB, and what the bystander serves.
    fn create(path: &Path, megabytes: u32) -> anyhow::Result<Self> {
        let context = || format!("cannot create the files of the pods in {}", path.display());
        std::fs::create_dir_all(path).with_context(context)?;
        let kind = statfs(path).with_context(context)?.filesystem_type();
        ensure!(
            kind != TMPFS_MAGIC && kind != OVERLAYFS_SUPER_MAGIC,
            "--thrash-folder {} may be in memory: a file in it is never evicted from memory, and nothing would thrash",
            path.display()
        );
        let created = Self { path: std::fs::canonicalize(path).with_context(context)? };
        // Not a hole, which is read without the disk.
        let block = vec![1; 1 << 20];
        for (name, megabytes) in [(FILE, megabytes), (CONTENT, CONTENT_MB)] {
            let mut file = File::create(created.path.join(name)).with_context(context)?;
            (0..megabytes).try_for_each(|_| file.write_all(&block)).with_context(context)?;
            file.sync_all().with_context(context)?;
        }
        Ok(created)
    }
}

impl Drop for DataFolder {
    fn drop(&mut self) {
        for name in [FILE, CONTENT] {
            let path = self.path.join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    eprintln!("  cannot remove {}: {error}", path.display());
                }
                _ => {}
            }
        }
    }
}

/// Keeps this process from waiting for memory itself, or it would measure its own delays.
fn stay_in_memory() -> anyhow::Result<()> {
    use nix::libc;
    // SAFETY: the call has no pointers.
    let result = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    nix::errno::Errno::result(result).map(drop).context("cannot keep the benchmark in memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_without_the_right_eviction_are_missed() {
        assert_eq!(Outcome { runs: 4, evicted: 3, ..Outcome::default() }.missed_percent(), Some(25.0));
        assert_eq!(Outcome::default().missed_percent(), None);
    }

    #[test]
    fn a_stall_without_relief_counts_with_the_whole_time_of_observation() {
        let second = 1_000_000_000;
        assert_eq!(until_relief(second, Some(3 * second)), 2.0);
        assert_eq!(until_relief(second, Some(90 * second)), 30.0);
        assert_eq!(until_relief(second, None), 30.0);
    }

    #[test]
    fn the_files_exist_as_long_as_they_are_needed() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path();
        let kind = statfs(folder).unwrap().filesystem_type();
        let created = DataFolder::create(folder, 1);
        if kind == TMPFS_MAGIC || kind == OVERLAYFS_SUPER_MAGIC {
            assert!(created.unwrap_err().to_string().contains("--thrash-folder"));
            return;
        }
        let length = |name| std::fs::metadata(folder.join(name)).unwrap().len();
        assert_eq!((length(FILE), length(CONTENT)), (1 << 20, 16 << 20));
        drop(created);
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
    }
}
