//! The pods of each workload, and the required starts of their containers.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use serde_json::json;

use super::WorkloadKind;

/// Path of the stamp folder in containers.
pub(crate) const STAMPS_IN_CONTAINER: &str = "/stamps";

/// Init containers of a chain, and chains at the same time.
const CHAIN_LENGTH: u32 = 4;
const CHAINS: u32 = 10;
/// Chains of a single pod are quick, so a run has several.
pub(crate) const CHAIN_REPEATS: u32 = 5;
/// Port of pods that serve HTTP.
const PORT: u16 = 8080;

/// Memory that a hungry process touches, in MiB, and the limit of its container.
const HUNGER: u32 = 96;
const MEMORY_LIMIT: &str = "32Mi";

/// Time until all pods run before the first one exits; the slowest known agent needs 0.23 s per pod.
const BEFORE_FIRST_EXIT: Duration = Duration::from_secs(3);
const BEFORE_FIRST_EXIT_PER_POD: Duration = Duration::from_millis(250);
/// Exits are spread, so that the reaction to each is measured and not the runtime's queue.
const BETWEEN_EXITS: Duration = Duration::from_millis(150);
/// The next probe notices a failure, within a second: farther apart than exits, so that few come together.
const BETWEEN_FAILURES: Duration = Duration::from_millis(500);
/// Before the first liveness probe, so that it does not fail while the port is not open yet.
const LIVENESS_DELAY: u32 = 2;

/// A pod that any participant can run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct BenchPod {
    /// Unique in the run.
    pub(crate) name: String,
    /// Run one after the other, before `main`.
    pub(crate) init: Vec<BenchContainer>,
    pub(crate) main: BenchContainer,
    pub(crate) behaviour: Behaviour,
    pub(crate) extras: Extras,
}

/// What a pod has beside its programs. A bare client has no use for it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Extras {
    /// Fields of the main container.
    pub(crate) main: serde_json::Map<String, Value>,
    /// Volumes, and where the main container has them.
    pub(crate) volumes: Vec<(Value, String)>,
}

impl Extras {
    /// A field of the main container.
    pub(crate) fn main(field: &str, value: Value) -> Self {
        Self { main: [(field.to_owned(), value)].into_iter().collect(), volumes: Vec::new() }
    }
}

/// How a server is probed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Check {
    Tcp,
    Http,
}

impl Check {
    /// A probe with this period that decides on its first result.
    pub(crate) fn probe(self, period: u32) -> Value {
        let mut probe = json!({ "periodSeconds": period, "failureThreshold": 1, "timeoutSeconds": 5 });
        match self {
            Self::Tcp => probe["tcpSocket"] = json!({ "port": PORT }),
            Self::Http => probe["httpGet"] = json!({ "port": PORT, "path": "/" }),
        }
        probe
    }
}

/// Behaviour of the main container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Behaviour {
    /// Runs until SIGTERM.
    Runs,
    /// Exits once with an error and runs after its restart.
    CrashesOnce,
    /// Exits with success, or is killed, and is not restarted.
    Completes,
}

impl Behaviour {
    /// The pod's `restartPolicy`.
    pub(crate) fn restart_policy(self) -> &'static str {
        match self {
            Self::Runs | Self::CrashesOnce => "Always",
            Self::Completes => "Never",
        }
    }

    /// Required starts of the main container.
    pub(crate) fn starts(self) -> usize {
        match self {
            Self::CrashesOnce => 2,
            Self::Runs | Self::Completes => 1,
        }
    }
}

/// A container of the test program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct BenchContainer {
    pub(crate) name: String,
    /// Arguments of `/probe`.
    pub(crate) args: Vec<String>,
    /// Host path of its stamps.
    pub(crate) stamps: PathBuf,
}

/// Pods that are started together `now`, by CLOCK_MONOTONIC in nanoseconds, batch after batch.
pub(crate) fn batches(kind: WorkloadKind, pods: u32, prefix: &str, folder: &Path, now: u64) -> Vec<Vec<BenchPod>> {
    match kind {
        WorkloadKind::Crash => vec![crashing(pods, prefix, folder, now)],
        WorkloadKind::Chain => {
            names(CHAIN_REPEATS, prefix).map(|name| vec![init_chain(name, CHAIN_LENGTH, folder)]).collect()
        }
        WorkloadKind::Chains => {
            vec![names(CHAINS, prefix).map(|name| init_chain(name, CHAIN_LENGTH, folder)).collect()]
        }
        WorkloadKind::Start | WorkloadKind::Idle => vec![running(pods, prefix, folder)],
    }
}

/// How long the slowest agent may take for this many pods, without the time until their exits.
pub(crate) fn time_limit(pods: u32) -> Duration {
    Duration::from_secs(60) + (Duration::from_millis(500) + BEFORE_FIRST_EXIT_PER_POD + BETWEEN_EXITS) * pods
}

/// Pods that run until SIGTERM.
pub(crate) fn running(pods: u32, prefix: &str, folder: &Path) -> Vec<BenchPod> {
    names(pods, prefix).map(|name| runs(name, folder)).collect()
}

/// Pods that crash once, one after the other once all of them run. They are started `now`, by CLOCK_MONOTONIC in
/// nanoseconds.
pub(crate) fn crashing(pods: u32, prefix: &str, folder: &Path, now: u64) -> Vec<BenchPod> {
    let pod = |(name, after): (String, Duration)| {
        let once = format!("{STAMPS_IN_CONTAINER}/{name}.once");
        let at = time_after(now, after);
        let args = ["exit", "--code", "1", "--at-ns", &at, "--once-file", &once];
        let main = container(&name, "main", &args, folder);
        BenchPod { name, init: Vec::new(), main, behaviour: Behaviour::CrashesOnce, extras: Extras::default() }
    };
    names(pods, prefix).zip(exit_times(pods)).map(pod).collect()
}

/// Pods that complete, one after the other once all of them run. They are started `now`, by CLOCK_MONOTONIC in
/// nanoseconds.
pub(crate) fn completing(pods: u32, prefix: &str, folder: &Path, now: u64) -> Vec<BenchPod> {
    let pod = |(name, after)| completes(name, &["--at-ns", &time_after(now, after)], folder);
    names(pods, prefix).zip(exit_times(pods)).map(pod).collect()
}

/// Pods whose main process exceeds the memory limit of its container, one after the other once all of them run. They are
/// started `now`, by CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn hungry(pods: u32, prefix: &str, folder: &Path, now: u64) -> Vec<BenchPod> {
    let pod = |(name, after): (String, Duration)| {
        let args = ["oom", "--mb", &HUNGER.to_string(), "--at-ns", &time_after(now, after)];
        let main = container(&name, "main", &args, folder);
        let resources = json!({ "requests": { "memory": "4Mi" }, "limits": { "memory": MEMORY_LIMIT } });
        let extras = Extras::main("resources", resources);
        BenchPod { name, init: Vec::new(), main, behaviour: Behaviour::Completes, extras }
    };
    names(pods, prefix).zip(exit_times(pods)).map(pod).collect()
}

/// Pods that complete at once.
pub(crate) fn one_shots(pods: u32, prefix: &str, folder: &Path) -> Vec<BenchPod> {
    names(pods, prefix).map(|name| completes(name, &[], folder)).collect()
}

/// Pods with so many init containers that complete at once.
pub(crate) fn init_chains(pods: u32, length: u32, prefix: &str, folder: &Path) -> Vec<BenchPod> {
    names(pods, prefix).map(|name| init_chain(name, length, folder)).collect()
}

/// Pods that serve HTTP until SIGTERM, with a readiness probe.
pub(crate) fn serving(pods: u32, prefix: &str, folder: &Path, check: Check, period: u32) -> Vec<BenchPod> {
    let pod = |name: String| {
        let main = container(&name, "main", &["web", "--port", &PORT.to_string()], folder);
        let extras = Extras::main("readinessProbe", check.probe(period));
        BenchPod { name, init: Vec::new(), main, behaviour: Behaviour::Runs, extras }
    };
    names(pods, prefix).map(pod).collect()
}

/// Pods that serve HTTP and are not healthy any more, one after the other once all of them run, until they are restarted.
/// They are started `now`, by CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn failing(pods: u32, prefix: &str, folder: &Path, now: u64) -> Vec<BenchPod> {
    let pod = |(name, after): (String, Duration)| {
        let once = format!("{STAMPS_IN_CONTAINER}/{name}.once");
        let args = ["web", "--port", &PORT.to_string(), "--fail-at-ns", &time_after(now, after), "--once-file", &once];
        let main = container(&name, "main", &args, folder);
        let mut probe = Check::Http.probe(1);
        probe["initialDelaySeconds"] = json!(LIVENESS_DELAY);
        let extras = Extras::main("livenessProbe", probe);
        BenchPod { name, init: Vec::new(), main, behaviour: Behaviour::CrashesOnce, extras }
    };
    names(pods, prefix).zip(times(pods, BETWEEN_FAILURES)).map(pod).collect()
}

fn names(pods: u32, prefix: &str) -> impl Iterator<Item = String> {
    (0..pods).map(move |index| format!("{prefix}-{index}"))
}

/// Times of the exits of `pods` pods after the first of them is created.
fn exit_times(pods: u32) -> impl Iterator<Item = Duration> {
    times(pods, BETWEEN_EXITS)
}

fn times(pods: u32, between: Duration) -> impl Iterator<Item = Duration> {
    let first = BEFORE_FIRST_EXIT + BEFORE_FIRST_EXIT_PER_POD * pods;
    (0..pods).map(move |index| first + between * index)
}

fn runs(name: String, folder: &Path) -> BenchPod {
    let main = container(&name, "main", &["run"], folder);
    BenchPod { name, init: Vec::new(), main, behaviour: Behaviour::Runs, extras: Extras::default() }
}

/// An argument for this long after `now`, by CLOCK_MONOTONIC in nanoseconds. Timed from the start of each container, exits would
/// fall together, since starts take turns.
fn time_after(now: u64, after: Duration) -> String {
    (u128::from(now) + after.as_nanos()).to_string()
}

fn completes(name: String, when: &[&str], folder: &Path) -> BenchPod {
    let args = [&["exit", "--code", "0"], when].concat();
    let main = container(&name, "main", &args, folder);
    BenchPod { name, init: Vec::new(), main, behaviour: Behaviour::Completes, extras: Extras::default() }
}

fn init_chain(name: String, length: u32, folder: &Path) -> BenchPod {
    let step = |index| container(&name, &format!("init-{index}"), &["exit", "--code", "0"], folder);
    let init = (0..length).map(step).collect();
    BenchPod { init, ..runs(name, folder) }
}

fn container(pod: &str, name: &str, action: &[&str], folder: &Path) -> BenchContainer {
    let file = format!("{pod}.{name}");
    let stamp = format!("{STAMPS_IN_CONTAINER}/{file}");
    let args = action.iter().copied().chain(["--stamp", &stamp]).map(str::to_owned).collect();
    BenchContainer { name: name.to_owned(), args, stamps: folder.join(file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_container_has_its_own_stamps() {
        for kind in WorkloadKind::ALL {
            let pods: Vec<_> = batches(kind, 7, "p", Path::new("/host"), 0).into_iter().flatten().collect();
            let containers = pods.iter().flat_map(|pod| pod.init.iter().chain([&pod.main]));
            let mut stamps: Vec<_> = containers.map(|container| &container.stamps).collect();
            let count = stamps.len();
            stamps.sort();
            stamps.dedup();
            assert_eq!(stamps.len(), count, "{kind:?}");
            assert!(count >= 7, "{kind:?}: {count}");
        }
    }

    #[test]
    fn exits_are_spread() {
        let pods = crashing(3, "p", Path::new("/host"), 7);
        let at: Vec<_> = pods.iter().map(|pod| pod.main.args[4].as_str()).collect();
        assert_eq!(at, ["3750000007", "3900000007", "4050000007"]);
        assert_eq!(pods[1].main.args.last().unwrap(), "/stamps/p-1.main");
        assert_eq!(pods[1].main.stamps, Path::new("/host/p-1.main"));
        assert_eq!(completing(3, "q", Path::new("/host"), 0)[2].main.args[4], "4050000000");
        assert_eq!(
            hungry(3, "h", Path::new("/host"), 7)[1].main.args[..5],
            ["oom", "--mb", "96", "--at-ns", "3900000007"]
        );
        assert_eq!(failing(3, "f", Path::new("/host"), 7)[1].main.args[4], "4250000007");
    }
}
