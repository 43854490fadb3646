//! In-place resizes of a container's CPU limit, one after the other.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;
use serde_json::json;

use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::parts::Row;
use crate::metric::Metric;
use crate::runtime_pods;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload;
use crate::workload::Extras;

/// The resolution of the times.
const POLL: Duration = Duration::from_millis(1);
/// The limit before the first resize, and what each one adds; in thousandths of a processor.
const LIMIT: u32 = 200;
const STEP: u32 = 10;
/// More would reach a whole processor, which the API writes in another form.
const MOST: u32 = 50;
/// Microseconds of a period of the kernel's quota.
const CFS_PERIOD: i64 = 100_000;

/// Measures as many resizes as other parts have pods, at most [`MOST`].
///
/// # Errors
/// The agent exited, or a resize is not applied in time.
pub(super) async fn measure(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let mut pods = workload::running(1, &format!("{prefix}-resize"), &node.settings.stamps());
    let pod = pods[0].name.clone();
    let resources = json!({ "requests": { "cpu": "100m" }, "limits": { "cpu": format!("{LIMIT}m") } });
    pods[0].extras = Extras::main("resources", resources);
    node.create(context, &pods, "Ready", |times| times.ready).await?;
    let quota = quota_of(context, &pod).await?;
    let (mut applied, mut reported) = (Vec::new(), Vec::new());
    for limit in limits(context.args.pods) {
        let (observed, quota) = (node.observed.clone(), &quota);
        let resize = async {
            let begin = monotonic_now()?;
            context.client.resize(&pod, &format!("{limit}m")).await?;
            let at = tokio::time::timeout(context.limit(1), until_quota(quota, quota_of_limit(limit))).await;
            let at = at.with_context(|| format!("the limit of {limit}m is not applied in time"))??;
            let shown = |times: &super::observed::PodTimes| times.cpu_limits.get(&format!("{limit}m")).copied();
            let seen = observed.wait(std::slice::from_ref(&pod), "resized", shown, context.limit(1)).await?;
            Ok((seconds(begin, at), seen.iter().map(|seen| seconds(begin, *seen)).collect::<Vec<_>>()))
        };
        let (at, seen) = node.agent.while_running(resize).await?;
        applied.push(at);
        reported.extend(seen);
    }
    row.add(Metric::ResizeToApplied, applied);
    row.add(Metric::ResizeToReported, reported);
    node.delete(context, &pods).await.map(drop)
}

/// The runtime's part of the same resizes of a running container.
///
/// # Errors
/// The runtime fails a call.
pub(super) async fn call_runtime(context: &Context, container: &str, row: &mut Row<'_>) -> anyhow::Result<()> {
    let mut took = Vec::new();
    for limit in limits(context.args.pods) {
        let resources = cri::LinuxContainerResources {
            cpu_period: CFS_PERIOD,
            cpu_quota: quota_of_limit(limit),
            cpu_shares: 102,
            ..Default::default()
        };
        let begin = monotonic_now()?;
        context.runtime.update_container_resources(container, resources).await?;
        took.push(seconds(begin, monotonic_now()?));
    }
    row.add(Metric::ResizeToApplied, took);
    Ok(())
}

/// The limit of each resize.
fn limits(count: u32) -> impl Iterator<Item = u32> {
    (1..=count.min(MOST)).map(|index| LIMIT + STEP * index)
}

fn quota_of_limit(limit: u32) -> i64 {
    CFS_PERIOD * i64::from(limit) / 1000
}

/// The file with the CPU quota of the pod's container.
async fn quota_of(context: &Context, pod: &str) -> anyhow::Result<PathBuf> {
    let pids = runtime_pods::main_pids(&context.runtime, &[pod.to_owned()]).await?;
    let pid = pids.first().with_context(|| format!("pod {pod} has no process"))?;
    let file = format!("/proc/{pid}/cgroup");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    quota_file(&text).with_context(|| format!("{file} has no cgroup with a CPU controller: {text}"))
}

/// The file with the quota in the cgroup that limits CPU time; `text` is `/proc/PID/cgroup`.
fn quota_file(text: &str) -> Option<PathBuf> {
    let mut unified = None;
    for line in text.lines() {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let path = path.trim_start_matches('/');
        if controllers.split(',').any(|controller| controller == "cpu") {
            return Some(PathBuf::from("/sys/fs/cgroup/cpu").join(path).join("cpu.cfs_quota_us"));
        }
        if controllers.is_empty() {
            unified = Some(PathBuf::from("/sys/fs/cgroup").join(path).join("cpu.max"));
        }
    }
    unified
}

/// Waits until the kernel has this quota; returns when.
async fn until_quota(file: &std::path::Path, quota: i64) -> anyhow::Result<u64> {
    loop {
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        if text.split_whitespace().next().and_then(|word| word.parse().ok()) == Some(quota) {
            return monotonic_now();
        }
        tokio::time::sleep(POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_is_found_with_both_versions_of_cgroups() {
        let hybrid = "5:cpu,cpuacct:/k/pod\n4:memory:/k/pod\n0::/k/pod\n";
        assert_eq!(quota_file(hybrid).unwrap(), PathBuf::from("/sys/fs/cgroup/cpu/k/pod/cpu.cfs_quota_us"));
        assert_eq!(quota_file("0::/k/pod\n").unwrap(), PathBuf::from("/sys/fs/cgroup/k/pod/cpu.max"));
        assert_eq!(quota_file("4:memory:/k/pod\n"), None);
        assert_eq!(limits(500).last(), Some(700));
        assert_eq!(limits(2).map(quota_of_limit).collect::<Vec<_>>(), [21_000, 22_000]);
    }
}
