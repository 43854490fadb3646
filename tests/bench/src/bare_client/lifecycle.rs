//! Starts, stops and completes pods with the fewest calls that their API objects have to wait for.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use keblet::kernel::pidfd::PinnedProcess;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::BareClient;
use super::process_exit;
use crate::manifest;
use crate::manifest::PodNetwork;
use crate::stamps;
use crate::stamps::monotonic_now;
use crate::workload::BenchPod;

/// The default grace period of pods.
const GRACE: Duration = Duration::from_secs(30);

/// After this a failed stop of a sandbox is tried once more: containerd fails one that meets the exit of a container
/// ("ttrpc: closed"), and agents repeat it, too.
const STOP_RETRY: Duration = Duration::from_millis(100);

/// A pod with one running container.
#[derive(Clone, Debug)]
pub(crate) struct RunningPod {
    sandbox: String,
    container: String,
}

impl RunningPod {
    /// Id of its container.
    pub(crate) fn container(&self) -> &str {
        &self.container
    }
}

/// Times of a pod that completes at once; nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OneShot {
    pub(crate) created: u64,
    /// The process wrote that it exits.
    pub(crate) exited: u64,
    pub(crate) noticed: u64,
    /// The API object could have been removed.
    pub(crate) gone: u64,
    pub(crate) sandbox_removed: u64,
}

impl BareClient {
    /// Starts the pods; returns when all processes run.
    ///
    /// # Errors
    /// The runtime fails a call.
    pub(crate) async fn start(&self, pods: &[BenchPod]) -> anyhow::Result<Vec<RunningPod>> {
        try_join_all(pods.iter().map(|pod| async {
            let _permit = self.permits.acquire().await?;
            self.start_pod(pod).await.with_context(|| format!("pod {}", pod.name))
        }))
        .await
    }

    async fn start_pod(&self, pod: &BenchPod) -> anyhow::Result<RunningPod> {
        let config = manifest::sandbox(pod, &self.settings);
        let sandbox = self.runtime.run_pod_sandbox(config.clone(), "").await?;
        let container = self.start_container(pod, &pod.main, 0, &sandbox, &config).await?;
        Ok(RunningPod { sandbox, container })
    }

    /// Stops the pods, at most `parallelism` at the same time; returns the seconds from the begin until each was gone.
    /// A pod is gone when an agent may remove its API object: on the host's network when its process has exited, with a
    /// network of its own when its sandbox is stopped.
    ///
    /// # Errors
    /// The runtime fails a call.
    pub(crate) async fn stop(&self, pods: &[RunningPod], parallelism: usize) -> anyhow::Result<Vec<f64>> {
        let pin = |pod: RunningPod| async {
            let process = process_exit::pin(&self.runtime, &pod.container).await?;
            anyhow::Ok((pod, process.context("a process exited before its pod was stopped")?))
        };
        let pinned = try_join_all(pods.iter().cloned().map(pin)).await?;
        let permits = Arc::new(Semaphore::new(parallelism));
        let begin = Instant::now();
        let stops = pinned.into_iter().map(|(pod, process)| {
            let (client, permits) = (self.clone(), permits.clone());
            async move {
                let _permit = permits.acquire().await?;
                client.stop_pod(pod, &process, begin).await
            }
        });
        try_join_all(stops).await
    }

    async fn stop_pod(&self, pod: RunningPod, process: &PinnedProcess, begin: Instant) -> anyhow::Result<f64> {
        let runtime = self.runtime.clone();
        let container = pod.container.clone();
        // The runtime responds some 45 ms after the exit, and nothing waits for that response.
        let stopping = tokio::spawn(async move { runtime.stop_container(&container, GRACE).await });
        process.gone().await.with_context(|| format!("cannot wait for container {}", pod.container))?;
        if self.settings.network == PodNetwork::Own {
            self.runtime.stop_pod_sandbox(&pod.sandbox).await?;
        }
        let gone = begin.elapsed().as_secs_f64();
        stopping.await.context("the task that stops a container was cancelled")??;
        Ok(gone)
    }

    /// Stops the pod's container and starts the next one as soon as the process has exited; returns when it began to.
    ///
    /// # Errors
    /// The runtime fails a call.
    pub(crate) async fn restart(&self, pod: &BenchPod, running: &RunningPod) -> anyhow::Result<u64> {
        let process = process_exit::pin(&self.runtime, &running.container).await?;
        let process = process.context("the process exited before it was stopped")?;
        let config = manifest::sandbox(pod, &self.settings);
        let (runtime, container) = (self.runtime.clone(), running.container.clone());
        let begin = monotonic_now()?;
        let stopping = tokio::spawn(async move { runtime.stop_container(&container, GRACE).await });
        process.gone().await.with_context(|| format!("cannot wait for container {}", running.container))?;
        self.start_container(pod, &pod.main, 1, &running.sandbox, &config).await?;
        stopping.await.context("the task that stops a container was cancelled")??;
        Ok(begin)
    }

    /// Runs a pod that completes at once, until an agent may report it as succeeded: on the host's network when its process
    /// has exited, with a network of its own when its sandbox is stopped.
    ///
    /// # Errors
    /// The runtime fails a call.
    pub(crate) async fn complete(&self, pod: &BenchPod) -> anyhow::Result<()> {
        let running = self.start_pod(pod).await?;
        self.exited(&running.container).await?;
        match self.settings.network {
            PodNetwork::Own => self.stop_sandbox(&running.sandbox).await,
            PodNetwork::Host => Ok(()),
        }
    }

    async fn stop_sandbox(&self, sandbox: &str) -> anyhow::Result<()> {
        if self.runtime.stop_pod_sandbox(sandbox).await.is_err() {
            tokio::time::sleep(STOP_RETRY).await;
            self.runtime.stop_pod_sandbox(sandbox).await?;
        }
        Ok(())
    }

    /// Runs a pod that completes at once, then removes it.
    ///
    /// # Errors
    /// The runtime fails a call; the process wrote no stamp.
    pub(crate) async fn complete_and_remove(&self, pod: &BenchPod) -> anyhow::Result<OneShot> {
        let created = monotonic_now()?;
        let running = self.start_pod(pod).await?;
        self.exited(&running.container).await?;
        let noticed = monotonic_now()?;
        self.stop_sandbox(&running.sandbox).await?;
        let stopped = monotonic_now()?;
        self.runtime.remove_pod_sandbox(&running.sandbox).await?;
        let sandbox_removed = monotonic_now()?;
        let gone = match self.settings.network {
            PodNetwork::Own => stopped,
            PodNetwork::Host => noticed,
        };
        Ok(OneShot { created, exited: stamps::exit_of(&pod.main)?, noticed, gone, sandbox_removed })
    }
}
