//! The pods of each workload, and what their stamps must say in the end.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use super::WorkloadKind;

/// Where containers find the folder of stamps.
pub(super) const STAMPS_IN_CONTAINER: &str = "/stamps";

/// Init containers of a chain, and chains at the same time.
const CHAIN_LENGTH: u32 = 4;
const CHAINS: u32 = 10;
/// Chains of one pod are quick, so one round has several.
const CHAIN_REPEATS: u32 = 5;

/// Time for all pods to be up before the first one crashes; the slowest agent known needs 0.23 s per pod.
const BEFORE_FIRST_CRASH: Duration = Duration::from_secs(3);
const BEFORE_FIRST_CRASH_PER_POD: Duration = Duration::from_millis(250);
/// Crashes are spread, so that each restart is measured and not the queue before the runtime.
const BETWEEN_CRASHES: Duration = Duration::from_millis(150);

/// A pod that any column can run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BenchPod {
    /// Unique in the run.
    pub(super) name: String,
    /// Run one after the other, before `main`.
    pub(super) init: Vec<BenchContainer>,
    /// The container that stays up in the end.
    pub(super) main: BenchContainer,
    /// `main` exits once.
    pub(super) crashes: bool,
}

/// A container of the test program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BenchContainer {
    pub(super) name: String,
    /// Arguments of `/probe`.
    pub(super) args: Vec<String>,
    /// Its stamps, on this side of the mount.
    pub(super) stamps: PathBuf,
}

/// Pods that are started together, batch after batch.
pub(super) fn batches(kind: WorkloadKind, pods: u32, prefix: &str, folder: &Path) -> Vec<Vec<BenchPod>> {
    let many = |count: u32, make: &dyn Fn(String, u32) -> BenchPod| {
        (0..count).map(|index| make(format!("{prefix}-{index}"), index)).collect::<Vec<_>>()
    };
    match kind {
        WorkloadKind::Crash => {
            let first = BEFORE_FIRST_CRASH + BEFORE_FIRST_CRASH_PER_POD * pods;
            vec![many(pods, &|name, index| crashing(name, first + BETWEEN_CRASHES * index, folder))]
        }
        WorkloadKind::Chain => {
            many(CHAIN_REPEATS, &|name, _| chain(name, folder)).into_iter().map(|p| vec![p]).collect()
        }
        WorkloadKind::Chains => vec![many(CHAINS, &|name, _| chain(name, folder))],
        WorkloadKind::Start | WorkloadKind::Idle => vec![many(pods, &|name, _| quiet(name, folder))],
    }
}

/// How long the slowest agent may take for one batch.
pub(super) fn time_limit(kind: WorkloadKind, pods: u32) -> Duration {
    let starting = Duration::from_secs(60) + Duration::from_millis(500) * pods;
    match kind {
        WorkloadKind::Crash => starting + (BEFORE_FIRST_CRASH_PER_POD + BETWEEN_CRASHES) * pods,
        _ => starting,
    }
}

fn quiet(name: String, folder: &Path) -> BenchPod {
    let main = container(&name, "main", &["run"], folder);
    BenchPod { name, init: Vec::new(), main, crashes: false }
}

fn crashing(name: String, after: Duration, folder: &Path) -> BenchPod {
    let once = format!("{STAMPS_IN_CONTAINER}/{name}.once");
    let after = after.as_millis().to_string();
    let args = ["exit", "--code", "1", "--after-ms", &after, "--once-file", &once];
    let main = container(&name, "main", &args, folder);
    BenchPod { name, init: Vec::new(), main, crashes: true }
}

fn chain(name: String, folder: &Path) -> BenchPod {
    let step = |index| container(&name, &format!("init-{index}"), &["exit", "--code", "0"], folder);
    let init = (0..CHAIN_LENGTH).map(step).collect();
    BenchPod { init, ..quiet(name, folder) }
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
            let pods: Vec<_> = batches(kind, 7, "p", Path::new("/host")).into_iter().flatten().collect();
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
    fn crashes_are_spread() {
        let batches = batches(WorkloadKind::Crash, 3, "p", Path::new("/host"));
        let after: Vec<_> = batches[0].iter().map(|pod| pod.main.args[4].as_str()).collect();
        assert_eq!(after, ["3750", "3900", "4050"]);
        assert_eq!(batches[0][1].main.args.last().unwrap(), "/stamps/p-1.main");
        assert_eq!(batches[0][1].main.stamps, Path::new("/host/p-1.main"));
    }
}
