//! Bare CRI clients: they make the calls that a pod needs and no others, so that no agent can be faster.

mod lifecycle;
mod process_exit;
mod stop_events;

pub(crate) use lifecycle::RunningPod;
pub(crate) use stop_events::StopEvents;

use std::sync::Arc;

use anyhow::Context as _;
use keblet::runtime::Runtime;
use keblet_proto::cri::v1 as cri;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::manifest;
use super::manifest::PodSettings;
use super::stamps::monotonic_now;
use super::workload::Behaviour;
use super::workload::BenchContainer;
use super::workload::BenchPod;

/// How a bare client detects the exit of a container.
#[derive(Clone, Debug)]
pub(crate) enum ExitDetection {
    /// From the runtime's events.
    Events(Arc<StopEvents>),
    /// From the kernel: a pidfd of the container's first process.
    Pidfd,
}

/// A bare client. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct BareClient {
    runtime: Runtime,
    detection: ExitDetection,
    settings: Arc<PodSettings>,
    permits: Arc<Semaphore>,
}

impl BareClient {
    /// A client that starts or stops at most `parallelism` pods at the same time.
    pub(crate) fn new(runtime: Runtime, detection: ExitDetection, settings: PodSettings, parallelism: usize) -> Self {
        Self { runtime, detection, settings: Arc::new(settings), permits: Arc::new(Semaphore::new(parallelism)) }
    }

    /// Creates the files that the pods mount; to be called before the measurement.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(crate) fn prepare(&self, pods: &[BenchPod]) -> anyhow::Result<()> {
        pods.iter().try_for_each(|pod| self.settings.prepare(pod))
    }

    /// Starts the pods, and restarts each crashed container; returns when each crash was detected (CLOCK_MONOTONIC
    /// nanoseconds). Dropping the future leaves pods behind, which [`super::runtime_pods::sweep`] removes.
    ///
    /// # Errors
    /// The runtime fails a call.
    pub(crate) async fn run(&self, pods: &[BenchPod]) -> anyhow::Result<Vec<(BenchPod, u64)>> {
        let mut running = JoinSet::new();
        for pod in pods {
            let (client, pod) = (self.clone(), pod.clone());
            running.spawn(async move {
                let noticed = client.run_pod(&pod).await.with_context(|| format!("pod {}", pod.name))?;
                anyhow::Ok(noticed.map(|noticed| (pod, noticed)))
            });
        }
        let mut noticed = Vec::new();
        while let Some(done) = running.join_next().await {
            noticed.extend(done.context("the task of a pod was cancelled")??);
        }
        Ok(noticed)
    }

    async fn run_pod(&self, pod: &BenchPod) -> anyhow::Result<Option<u64>> {
        let permit = self.permits.acquire().await?;
        let config = manifest::sandbox(pod, &self.settings);
        let sandbox = self.runtime.run_pod_sandbox(config.clone(), "").await?;
        for init in &pod.init {
            let id = self.start_container(pod, init, 0, &sandbox, &config).await?;
            self.exited(&id).await?;
        }
        let id = self.start_container(pod, &pod.main, 0, &sandbox, &config).await?;
        drop(permit);
        if pod.behaviour == Behaviour::Runs {
            return Ok(None);
        }
        self.exited(&id).await?;
        let noticed = monotonic_now()?;
        if pod.behaviour == Behaviour::CrashesOnce {
            self.start_container(pod, &pod.main, 1, &sandbox, &config).await?;
        }
        Ok(Some(noticed))
    }

    async fn start_container(
        &self,
        pod: &BenchPod,
        container: &BenchContainer,
        attempt: u32,
        sandbox: &str,
        sandbox_config: &cri::PodSandboxConfig,
    ) -> anyhow::Result<String> {
        let config = manifest::container(pod, container, attempt, &self.settings);
        let id = self.runtime.create_container(sandbox, config, sandbox_config.clone()).await?;
        self.runtime.start_container(&id).await?;
        Ok(id)
    }

    async fn exited(&self, id: &str) -> anyhow::Result<()> {
        match &self.detection {
            ExitDetection::Events(events) => events.wait(id).await,
            ExitDetection::Pidfd => process_exit::wait(&self.runtime, id).await,
        }
    }
}
