//! Makes the kernel kill: starts a pod per case, sets the limit, lets the process run out of memory, and compares the
//! kernel's log with what the agent reports.

use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::case::Case;
use super::case::Scope;
use super::case::Victim;
use super::case::cases;
use super::judge;
use super::matrix::Matrix;
use super::reports;
use super::reports::Log;
use super::reports::Terminated;
use crate::pressure::PressureArgs;
use crate::pressure::cgroups::Cgroup;
use crate::pressure::cgroups::Limit;
use crate::pressure::kernel_log::KernelLog;
use crate::pressure::kernel_log::Kill;
use crate::pressure::node::PodSpec;
use crate::pressure::node::PressureNode;
use crate::pressure::node::RunningPod;
use crate::stamps::seconds;

/// Pods that are started at once: starting them takes longer than the kills.
const BATCH: usize = 8;
/// The limit that is exceeded, or for other limits the memory beyond what is used.
const LIMIT: u64 = 24 << 20;
/// What the victim touches.
const HUNGER: u32 = 96;
/// Memory of the node's victim when the OOM killer is triggered; more than that of any other process with its score.
const HELD: u32 = 32;
/// Until the kernel kills; in emulation processes take seconds to touch memory.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// The members of a group are killed within this time.
const GROUP_SETTLE: Duration = Duration::from_millis(100);
/// Asks the kernel to kill a process as if the node had no memory left.
const SYSRQ: &str = "/proc/sysrq-trigger";

/// What was measured of one participant.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Outcome {
    /// Victim and exceeded limit, by the agent's log.
    pub(crate) verdicts: Matrix,
    /// Reasons of terminated containers.
    pub(crate) reasons: Matrix,
    /// Kill to the line in the agent's log, in seconds.
    #[serde(skip)]
    pub(crate) to_report: Vec<f64>,
    /// Kill of a main process to the container's terminated state, in seconds.
    #[serde(skip)]
    pub(crate) to_status: Vec<f64>,
    /// Cases in which something else happened than planned.
    pub(crate) failures: Vec<String>,
}

/// Lets the kernel kill and compares.
///
/// # Errors
/// The kernel log cannot be read, or the agent exited. Cases that fail are in the outcome.
pub(crate) async fn measure(node: &mut PressureNode, args: &PressureArgs, prefix: &str) -> anyhow::Result<Outcome> {
    let log = Log::open(node.folder())?;
    let mut driver = Driver { node, args, kernel: KernelLog::open()?, log, outcome: Outcome::default() };
    let cases = cases(args.kills, args.node_oom, prefix);
    for (index, batch) in cases.chunks(BATCH).enumerate() {
        eprintln!("  oom: pods {} of {}", index * BATCH, cases.len());
        driver.batch(batch).await?;
    }
    Ok(driver.outcome)
}

struct Driver<'a> {
    node: &'a mut PressureNode,
    args: &'a PressureArgs,
    kernel: KernelLog,
    log: Log,
    outcome: Outcome,
}

impl Driver<'_> {
    async fn batch(&mut self, cases: &[Case]) -> anyhow::Result<()> {
        // Pods that end or start release memory (runc's own, for example) to the cgroups around them, which may suffice for a
        // victim whose limit was set meanwhile.
        self.node.until_empty().await?;
        for case in cases {
            self.node.write(&specification(case))?;
        }
        let mut pods = Vec::new();
        for case in cases {
            pods.push(self.node.until_running(&case.name).await);
        }
        for (case, pod) in cases.iter().zip(pods) {
            let measured = async { self.case(case, pod?).await };
            if let Err(error) = measured.await {
                self.node.check_running()?;
                let failure = format!("{} / {}: {error:#}", case.victim.name(), case.scope.name());
                eprintln!("  {failure}");
                self.outcome.failures.push(failure);
            }
        }
        for case in cases {
            self.node.remove(&case.name)?;
        }
        Ok(())
    }

    async fn case(&mut self, case: &Case, pod: RunningPod) -> anyhow::Result<()> {
        let mut terminated = None;
        for _ in 0..case.kills {
            let (kills, ended) = self.kill(case, &pod).await?;
            judge::as_planned(case, pod.pid, &kills).map_err(anyhow::Error::msg)?;
            self.judge(case, &kills);
            if let (Some(kill), Some(ended)) = (kills.first(), &ended) {
                self.outcome.to_status.push(seconds(kill.at, ended.seen));
            }
            terminated = ended;
        }
        if !case.victim.ends_container() {
            pod.command("exit 3").await?;
            terminated = reports::terminated(self.node.agent(), &case.name, self.args.report_time).await?;
        }
        let reason = terminated.as_ref().map(|ended| ended.reason.as_str());
        self.outcome.reasons.count(judge::reason(case, reason));
        Ok(())
    }

    /// Lets one process of the pod run out of memory. Returns what [`Self::observe`] does.
    async fn kill(&mut self, case: &Case, pod: &RunningPod) -> anyhow::Result<(Vec<Kill>, Option<Terminated>)> {
        let container = Cgroup::of(pod.pid)?;
        let group = if case.victim == Victim::Group { "1" } else { "0" };
        container.write("memory.oom.group", group)?;
        let (of_pod, pods) = (container.parent(), self.node.kubepods());
        let limit = match case.scope {
            Scope::Node => None,
            // In the pod's spec. The limit of the pod, whose only container it is, would be reached first: it includes the
            // sandbox.
            Scope::Container => {
                of_pod.write("memory.max", "max")?;
                None
            }
            Scope::Pod => Some(Limit::beyond_usage(of_pod, LIMIT)?),
            Scope::QosClass => Some(Limit::beyond_usage(of_pod.parent(), LIMIT)?),
            Scope::NodeAllocatable => Some(Limit::beyond_usage(pods, LIMIT)?),
        };
        let size = if case.scope == Scope::Node { HELD } else { HUNGER };
        let _exec = trigger(case.victim, pod, size).await?;
        if case.scope == Scope::Node {
            until_held(&container).await?;
            std::fs::write(SYSRQ, "f").with_context(|| format!("cannot write to {SYSRQ}"))?;
        }
        self.observe(case, limit).await
    }

    /// Waits for the kill, the agent's report of it and, if the container ends with it, the terminated state. All three are
    /// looked for at the same time: none of them delays when another one is seen.
    async fn observe(&mut self, case: &Case, limit: Option<Limit>) -> anyhow::Result<(Vec<Kill>, Option<Terminated>)> {
        let Self { node, args, kernel, log, .. } = self;
        let (killed, ended) = (CancellationToken::new(), CancellationToken::new());
        let kills = async {
            let kills = log.during(kernel.kills(KILL_LIMIT, GROUP_SETTLE, &killed)).await;
            // The limit is restored here: what else is in its cgroup is to end the container unharmed.
            let kills = match limit {
                Some(limit) => kills.with_context(|| limit.to_string()),
                None => kills,
            }?;
            log.until_reported(&kills, args.report_time, ended.cancelled()).await?;
            anyhow::Ok(kills)
        };
        let terminated = async {
            let _ended = ended.clone().drop_guard();
            if !case.victim.ends_container() {
                return Ok(None);
            }
            killed.cancelled().await;
            reports::terminated(node.agent(), &case.name, args.report_time).await
        };
        tokio::try_join!(kills, terminated)
    }

    /// Counts what the agent reports of a kill.
    fn judge(&mut self, case: &Case, kills: &[Kill]) {
        let reports = self.log.reports();
        self.outcome.verdicts.count(judge::verdict(case, kills, reports));
        let reported = kills.iter().find_map(|kill| Some((kill.at, reports.iter().find(|r| r.pid == kill.pid)?.seen)));
        self.outcome.to_report.extend(reported.map(|(at, seen)| seconds(at, seen)));
    }
}

/// The pod of a case; its container has a limit if that is to be exceeded.
fn specification(case: &Case) -> PodSpec {
    PodSpec { name: case.name.clone(), memory: (case.scope == Scope::Container).then_some(LIMIT) }
}

/// Starts the victim. An exec returns when its process is gone.
async fn trigger(victim: Victim, pod: &RunningPod, megabytes: u32) -> anyhow::Result<Option<JoinHandle<()>>> {
    match victim {
        Victim::Main => pod.command(&format!("main {megabytes}")).await?,
        Victim::Child | Victim::Group => pod.command(&format!("child {megabytes}")).await?,
        Victim::Exec => return Ok(Some(pod.exec(&["/probe", "oom", "--mb", &megabytes.to_string()], KILL_LIMIT))),
    }
    Ok(None)
}

/// Waits until the victim of the node holds its memory.
async fn until_held(container: &Cgroup) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + KILL_LIMIT;
    while container.memory_current()? < u64::from(HELD) << 20 {
        if tokio::time::Instant::now() > deadline {
            bail!("the victim does not hold {HELD} MiB after {}", humantime::format_duration(KILL_LIMIT));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}
