//! The benchmark's pods in the runtime: their removal, and checks of their containers.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use futures_util::StreamExt;
use futures_util::TryStreamExt;
use futures_util::stream;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use keblet::runtime::RuntimeError;
use keblet_proto::cri::v1 as cri;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use tokio::time::Instant;

use super::manifest::LABEL;
use super::workload::BenchPod;

/// Concurrent removals; more only queue in the runtime.
const PARALLEL: usize = 8;
/// Several times the duration of the largest run's removal.
const SWEEP_LIMIT: Duration = Duration::from_secs(300);
const SWEEP_PAUSE: Duration = Duration::from_millis(300);

/// Removes every pod of the benchmark through CRI.
///
/// # Errors
/// Some cannot be removed within [`SWEEP_LIMIT`].
pub(crate) async fn sweep(runtime: &Runtime) -> anyhow::Result<()> {
    let deadline = Instant::now() + SWEEP_LIMIT;
    loop {
        let sandboxes = ours(runtime).await.context("cannot list the benchmark's sandboxes")?;
        if sandboxes.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("{} of the benchmark's sandboxes cannot be removed", sandboxes.len());
        }
        let removals = stream::iter(sandboxes).map(|sandbox| remove(runtime, sandbox.id));
        let failed = removals.buffer_unordered(PARALLEL).try_collect::<()>().await;
        if let Err(error) = failed {
            tracing::debug!(%error, "removing a sandbox again");
            tokio::time::sleep(SWEEP_PAUSE).await;
        }
    }
}

async fn remove(runtime: &Runtime, id: String) -> Result<(), RuntimeError> {
    runtime.stop_pod_sandbox(&id).await?;
    runtime.remove_pod_sandbox(&id).await
}

/// UIDs of the benchmark's pods that have a sandbox, running or not.
///
/// # Errors
/// The runtime fails the list call.
pub(crate) async fn uids(runtime: &Runtime) -> anyhow::Result<BTreeSet<String>> {
    let sandboxes = ours(runtime).await.context("cannot list the benchmark's sandboxes")?;
    Ok(sandboxes.into_iter().filter_map(|sandbox| sandbox.metadata).map(|metadata| metadata.uid).collect())
}

/// The main process of each of these pods, which have one container and no earlier ones; in the same order.
///
/// # Errors
/// A pod has no container, or no process of it is known.
pub(crate) async fn main_pids(runtime: &Runtime, pods: &[String]) -> anyhow::Result<Vec<u32>> {
    let containers = runtime.list_containers(Default::default()).await?;
    let mut pids = Vec::new();
    for pod in pods {
        let is_its = |container: &&cri::Container| container.labels.get("io.kubernetes.pod.name") == Some(pod);
        let container = containers.iter().find(is_its).with_context(|| format!("pod {pod} has no container"))?;
        let inspection = runtime.container_status(&container.id, true).await?;
        let pid = inspection.pid();
        pids.push(pid.with_context(|| format!("the runtime reports no PID of container {}", container.id))?);
    }
    Ok(pids)
}

async fn ours(runtime: &Runtime) -> Result<Vec<cri::PodSandbox>, RuntimeError> {
    let label_selector = BTreeMap::from([(LABEL.0.to_owned(), LABEL.1.to_owned())]);
    runtime.list_pod_sandboxes(cri::PodSandboxFilter { label_selector, ..Default::default() }).await
}

/// Returns each pod that has not exactly one sandbox with container attempts counted from 0.
pub(crate) async fn inspect(runtime: &Runtime, pods: &[BenchPod]) -> anyhow::Result<Vec<String>> {
    let sandboxes = ours(runtime).await?;
    let containers = runtime.list_containers(Default::default()).await?;
    Ok(pods
        .iter()
        .filter_map(|pod| check_pod(pod, &sandboxes, &containers).map(|w| format!("pod {}: {w}", pod.name)))
        .collect())
}

/// Names of static pods have the node's name as suffix.
fn check_pod(pod: &BenchPod, sandboxes: &[cri::PodSandbox], containers: &[cri::Container]) -> Option<String> {
    let is_its = |metadata: &cri::PodSandboxMetadata| {
        metadata.name.strip_prefix(&pod.name).is_some_and(|rest| rest.is_empty() || rest.starts_with("-"))
    };
    let its: Vec<_> = sandboxes.iter().filter(|s| s.metadata.as_ref().is_some_and(is_its)).collect();
    let [sandbox] = its.as_slice() else {
        return Some(format!("{} sandboxes instead of 1", its.len()));
    };
    for container in pod.init.iter().chain([&pod.main]) {
        let attempts: BTreeSet<u32> = containers
            .iter()
            .filter(|container| container.pod_sandbox_id == sandbox.id)
            .filter_map(|container| container.metadata.as_ref())
            .filter(|metadata| metadata.name == container.name)
            .map(|metadata| metadata.attempt)
            .collect();
        let starts = if container.name == pod.main.name { pod.behaviour.starts() } else { 1 };
        let expected: BTreeSet<u32> = (0..).take(starts).collect();
        if attempts != expected {
            return Some(format!("container {} has instances {attempts:?} instead of {expected:?}", container.name));
        }
    }
    None
}

/// The PID of the process that listens on the socket, if it is visible in this PID namespace.
pub(crate) fn runtime_pid(endpoint: &RuntimeEndpoint) -> anyhow::Result<Option<u32>> {
    let socket = UnixStream::connect(endpoint.path()).with_context(|| format!("cannot connect to {endpoint}"))?;
    let peer = getsockopt(&socket, PeerCredentials)
        .with_context(|| format!("cannot read the peer credentials of {endpoint}"))?;
    Ok(u32::try_from(peer.pid()).ok().filter(|pid| *pid > 0))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::WorkloadKind;
    use super::super::workload::batches;
    use super::*;

    fn sandbox(id: &str, name: &str) -> cri::PodSandbox {
        let metadata = Some(cri::PodSandboxMetadata { name: name.to_owned(), ..Default::default() });
        cri::PodSandbox { id: id.to_owned(), metadata, ..Default::default() }
    }

    fn container(sandbox: &str, attempt: u32) -> cri::Container {
        let metadata = Some(cri::ContainerMetadata { name: "main".to_owned(), attempt });
        cri::Container { pod_sandbox_id: sandbox.to_owned(), metadata, ..Default::default() }
    }

    #[test]
    fn a_pod_has_one_sandbox_and_the_expected_attempts() {
        let pod = &batches(WorkloadKind::Crash, 1, "p", Path::new("/s"), 0)[0][0];
        let sandboxes = [sandbox("a", "p-0-node"), sandbox("b", "p-01")];
        let good = [container("a", 0), container("a", 1), container("b", 7)];
        assert_eq!(check_pod(pod, &sandboxes, &good), None);

        let cases: [(&[cri::PodSandbox], &[cri::Container], &str); 4] = [
            (&sandboxes, &good[1..], "{1} instead of {0, 1}"),
            (&sandboxes, &[container("a", 0), container("a", 1), container("a", 2)], "{0, 1, 2}"),
            (&[], &good, "0 sandboxes"),
            (&[sandbox("a", "p-0"), sandbox("c", "p-0")], &good, "2 sandboxes"),
        ];
        for (sandboxes, containers, part) in cases {
            let wrong = check_pod(pod, sandboxes, containers).unwrap();
            assert!(wrong.contains(part), "{wrong}");
        }
    }
}
