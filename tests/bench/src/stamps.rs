//! Stamps that the processes of the containers write: at their start, and before they exit.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use nix::time::ClockId;
use nix::time::clock_gettime;
use tokio::time::Instant;

use super::WorkloadKind;
use super::workload::BenchContainer;
use super::workload::BenchPod;

/// Poll interval. It only delays the next step: the measured times are those in the files.
const POLL: Duration = Duration::from_millis(100);

/// One line of a stamp file; nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stamp {
    /// A process began.
    Start(u64),
    /// A process is about to exit.
    Exit(u64),
    /// A server is about to answer that it is not healthy.
    Fail(u64),
}

/// CLOCK_MONOTONIC now, in nanoseconds.
pub(crate) fn monotonic_now() -> anyhow::Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("cannot read CLOCK_MONOTONIC")?;
    let seconds = u64::try_from(now.tv_sec()).context("CLOCK_MONOTONIC is negative")?;
    let nanos = u64::try_from(now.tv_nsec()).context("CLOCK_MONOTONIC is negative")?;
    Ok(seconds * 1_000_000_000 + nanos)
}

/// Waits until the main container of every pod has started as often as required.
///
/// # Errors
/// A pod has not after `limit`, or a stamp file cannot be read.
pub(crate) async fn wait_done(pods: &[BenchPod], limit: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let mut waiting = Vec::new();
        for pod in pods {
            if !is_done(pod)? {
                waiting.push(pod.name.as_str());
            }
        }
        if waiting.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let limit = humantime::format_duration(limit);
            bail!("{} of {} pods are not done after {limit}, for example {}", waiting.len(), pods.len(), waiting[0]);
        }
        tokio::time::sleep(POLL).await;
    }
}

fn is_done(pod: &BenchPod) -> anyhow::Result<bool> {
    let starts = read(&pod.main)?.iter().filter(|stamp| matches!(stamp, Stamp::Start(_))).count();
    Ok(starts >= pod.behaviour.starts())
}

/// The stamps of a container; none before its start.
pub(crate) fn read(container: &BenchContainer) -> anyhow::Result<Vec<Stamp>> {
    read_file(&container.stamps)
}

/// When the first process of the container was about to exit.
pub(crate) fn exit_of(container: &BenchContainer) -> anyhow::Result<u64> {
    let stamps = read(container)?;
    let exit = stamps.iter().find_map(|stamp| match stamp {
        Stamp::Exit(nanos) => Some(*nanos),
        Stamp::Start(_) | Stamp::Fail(_) => None,
    });
    exit.with_context(|| format!("{}: expected an exit but found {stamps:?}", container.stamps.display()))
}

fn read_file(path: &Path) -> anyhow::Result<Vec<Stamp>> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text).with_context(|| format!("stamp file {}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Ignores an incomplete last line.
fn parse(text: &str) -> anyhow::Result<Vec<Stamp>> {
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete.lines().map(parse_line).collect()
}

fn parse_line(line: &str) -> anyhow::Result<Stamp> {
    let (word, nanos) = line.split_once(' ').with_context(|| format!("line {line:?} is not a stamp"))?;
    let nanos = nanos.parse().with_context(|| format!("line {line:?} is not a stamp"))?;
    match word {
        "start" => Ok(Stamp::Start(nanos)),
        "exit" => Ok(Stamp::Exit(nanos)),
        "fail" => Ok(Stamp::Fail(nanos)),
        _ => bail!("line {line:?} is not a stamp"),
    }
}

/// Seconds that a batch took: a value per pod, or one for all pods that started at `begin`.
pub(crate) fn durations(kind: WorkloadKind, pods: &[BenchPod], begin: u64) -> anyhow::Result<Vec<f64>> {
    match kind {
        WorkloadKind::Crash => pods.iter().map(restart).collect(),
        WorkloadKind::Chain | WorkloadKind::Chains => pods.iter().map(chain).collect(),
        WorkloadKind::Start => {
            let starts: Vec<_> = pods.iter().map(|pod| first_start(&pod.main)).collect::<Result<_, _>>()?;
            Ok(vec![seconds(begin, starts.into_iter().max().unwrap_or(begin))])
        }
        WorkloadKind::Idle => Ok(Vec::new()),
    }
}

/// Seconds from the exit of the first process, or its failure, to the start of the second one.
pub(crate) fn restart(pod: &BenchPod) -> anyhow::Result<f64> {
    let (exit, start) = crash(pod)?;
    Ok(seconds(exit, start))
}

/// When the first process of a crashing pod exited, or failed, and when the second one started.
pub(crate) fn crash(pod: &BenchPod) -> anyhow::Result<(u64, u64)> {
    match read(&pod.main)?.as_slice() {
        [Stamp::Start(_), Stamp::Exit(end) | Stamp::Fail(end), Stamp::Start(start)] => Ok((*end, *start)),
        other => bail!("pod {}: expected start, exit or failure, start but found {other:?}", pod.name),
    }
}

/// Seconds from the first process of the init containers to the main one.
///
/// # Errors
/// One of them has not started.
pub(crate) fn chain(pod: &BenchPod) -> anyhow::Result<f64> {
    let first = pod.init.first().with_context(|| format!("pod {} has no init container", pod.name))?;
    Ok(seconds(first_start(first)?, first_start(&pod.main)?))
}

/// When the first process of the container started.
///
/// # Errors
/// It has not.
pub(crate) fn first_start(container: &BenchContainer) -> anyhow::Result<u64> {
    match read(container)?.first() {
        Some(Stamp::Start(nanos)) => Ok(*nanos),
        other => bail!("{}: expected a start but found {other:?}", container.stamps.display()),
    }
}

/// When the last process of the container started.
///
/// # Errors
/// None has.
pub(crate) fn last_start(container: &BenchContainer) -> anyhow::Result<u64> {
    let stamps = read(container)?;
    let last = stamps.iter().rev().find_map(|stamp| match stamp {
        Stamp::Start(nanos) => Some(*nanos),
        Stamp::Exit(_) | Stamp::Fail(_) => None,
    });
    last.with_context(|| format!("{}: expected a start but found {stamps:?}", container.stamps.display()))
}

/// Returns a container that did not start as often as required.
pub(crate) fn unexpected_starts(pod: &BenchPod) -> anyhow::Result<Option<String>> {
    for container in pod.init.iter().chain([&pod.main]) {
        let starts = read(container)?.iter().filter(|stamp| matches!(stamp, Stamp::Start(_))).count();
        let due = if container.name == pod.main.name { pod.behaviour.starts() } else { 1 };
        if starts != due {
            return Ok(Some(format!("container {} started {starts} times instead of {due}", container.name)));
        }
    }
    Ok(None)
}

/// From `begin` to `end`; negative if `end` is earlier.
pub(crate) fn seconds(begin: u64, end: u64) -> f64 {
    (end as f64 - begin as f64) / 1e9
}

#[cfg(test)]
mod tests {
    use super::super::workload::batches;
    use super::*;

    fn write(container: &BenchContainer, text: &str) {
        std::fs::write(&container.stamps, text).unwrap();
    }

    fn first_batch(kind: WorkloadKind, count: u32, folder: &Path) -> Vec<BenchPod> {
        batches(kind, count, "p", folder, 0).remove(0)
    }

    #[test]
    fn lines() {
        assert_eq!(parse("start 5\nexit 7\nstart 9\n").unwrap(), [Stamp::Start(5), Stamp::Exit(7), Stamp::Start(9)]);
        assert_eq!(parse("start 5\nfail 7\n").unwrap(), [Stamp::Start(5), Stamp::Fail(7)]);
        assert_eq!(parse("start 5\nexi").unwrap(), [Stamp::Start(5)], "the last line is not complete");
        assert_eq!(parse("").unwrap(), []);
        for bad in ["start\n", "begin 5\n", "start 5 6\n", "start -1\n"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_crash_is_from_exit_to_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let pods = first_batch(WorkloadKind::Crash, 2, folder.path());
        write(&pods[0].main, "start 1\nexit 1000000000\nstart 1065000000\n");
        assert!(durations(WorkloadKind::Crash, &pods, 0).is_err(), "the second pod has no stamps");
        assert!(!is_done(&pods[1]).unwrap());

        write(&pods[1].main, "start 1\nexit 2000000000\nstart 2100000000\n");
        assert_eq!(durations(WorkloadKind::Crash, &pods, 0).unwrap(), [0.065, 0.1]);
        assert_eq!(unexpected_starts(&pods[1]).unwrap(), None);
        write(&pods[1].main, "start 1\nexit 2\nstart 3\nstart 4\n");
        assert!(unexpected_starts(&pods[1]).unwrap().unwrap().contains("3 times instead of 2"));
    }

    #[test]
    fn a_chain_is_from_the_first_process_to_the_main_one() {
        let folder = tempfile::tempdir().unwrap();
        let pods = first_batch(WorkloadKind::Chain, 1, folder.path());
        for (index, container) in pods[0].init.iter().enumerate() {
            write(container, &format!("start {0}\nexit {0}\n", (index as u64 + 1) * 100_000_000));
        }
        write(&pods[0].main, "start 500000000\n");
        assert_eq!(durations(WorkloadKind::Chain, &pods, 0).unwrap(), [0.4]);
    }

    #[test]
    fn a_start_is_from_the_agents_start_to_the_last_process() {
        let folder = tempfile::tempdir().unwrap();
        let pods = first_batch(WorkloadKind::Start, 3, folder.path());
        for (pod, text) in pods.iter().zip(["start 2000000000\n", "start 4000000000\n", "start 3000000000\n"]) {
            write(&pod.main, text);
        }
        assert_eq!(durations(WorkloadKind::Start, &pods, 1_000_000_000).unwrap(), [3.0]);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_fails_with_the_name_of_a_pod_that_is_not_done() {
        let folder = tempfile::tempdir().unwrap();
        let pods = first_batch(WorkloadKind::Start, 2, folder.path());
        write(&pods[0].main, "start 1\n");
        let error = wait_done(&pods, Duration::from_secs(60)).await.unwrap_err().to_string();
        assert_eq!(error, "1 of 2 pods are not done after 1m, for example p-1");
        write(&pods[1].main, "start 1\n");
        wait_done(&pods, Duration::ZERO).await.unwrap();
    }
}
