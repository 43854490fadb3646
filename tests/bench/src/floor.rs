//! Bare CRI clients: no agent can be faster at the same parallelism, for they do nothing else.

mod gone;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;

use anyhow::Context as _;
use futures_util::StreamExt;
use keblet_proto::cri::v1 as cri;
use tokio::sync::Semaphore;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::manifest;
use super::manifest::Ingredients;
use super::stamps::monotonic_now;
use super::workload::BenchContainer;
use super::workload::BenchPod;
use keblet::runtime::ContainerEvents;
use keblet::runtime::Runtime;

/// How a floor learns that a container ended.
#[derive(Clone, Debug)]
pub(super) enum Sense {
    /// From the runtime.
    Events(Arc<Stopped>),
    /// From the kernel.
    Pidfd,
}

/// A bare client.
#[derive(Clone, Debug)]
pub(super) struct Floor {
    runtime: Runtime,
    sense: Sense,
    image: String,
    stamps: PathBuf,
    logs: PathBuf,
    starting: Arc<Semaphore>,
}

impl Floor {
    /// A client that starts at most `parallelism` pods at the same time.
    pub(super) fn new(
        runtime: Runtime,
        sense: Sense,
        image: &str,
        folder: &std::path::Path,
        parallelism: usize,
    ) -> Self {
        Self {
            runtime,
            sense,
            image: image.to_owned(),
            stamps: folder.join("stamps"),
            logs: folder.join("logs"),
            starting: Arc::new(Semaphore::new(parallelism)),
        }
    }

    /// Runs the pods to the end of their story; returns when each crash was noticed (CLOCK_MONOTONIC nanoseconds).
    pub(super) async fn run(&self, pods: &[BenchPod]) -> anyhow::Result<Vec<(BenchPod, u64)>> {
        let mut running = JoinSet::new();
        for pod in pods {
            let (floor, pod) = (self.clone(), pod.clone());
            running.spawn(async move {
                let noticed = floor.run_pod(&pod).await.with_context(|| format!("pod {}", pod.name))?;
                anyhow::Ok(noticed.map(|noticed| (pod, noticed)))
            });
        }
        let mut noticed = Vec::new();
        while let Some(done) = running.join_next().await {
            noticed.extend(done.context("a pod's task ended")??);
        }
        Ok(noticed)
    }

    async fn run_pod(&self, pod: &BenchPod) -> anyhow::Result<Option<u64>> {
        let turn = self.starting.acquire().await?;
        let config = manifest::sandbox(pod, self.ingredients());
        let sandbox = self.runtime.run_pod_sandbox(config.clone(), "").await?;
        for init in &pod.init {
            let id = self.start(pod, init, 0, &sandbox, &config).await?;
            self.gone(&id).await?;
        }
        let id = self.start(pod, &pod.main, 0, &sandbox, &config).await?;
        drop(turn);
        if !pod.crashes {
            return Ok(None);
        }
        self.gone(&id).await?;
        let noticed = monotonic_now()?;
        self.start(pod, &pod.main, 1, &sandbox, &config).await?;
        Ok(Some(noticed))
    }

    async fn start(
        &self,
        pod: &BenchPod,
        container: &BenchContainer,
        attempt: u32,
        sandbox: &str,
        sandbox_config: &cri::PodSandboxConfig,
    ) -> anyhow::Result<String> {
        let config = manifest::container(pod, container, attempt, self.ingredients());
        let id = self.runtime.create_container(sandbox, config, sandbox_config.clone()).await?;
        self.runtime.start_container(&id).await?;
        Ok(id)
    }

    async fn gone(&self, id: &str) -> anyhow::Result<()> {
        match &self.sense {
            Sense::Events(stopped) => stopped.wait(id).await,
            Sense::Pidfd => gone::wait(&self.runtime, id).await,
        }
    }

    fn ingredients(&self) -> Ingredients<'_> {
        Ingredients { image: &self.image, stamps: &self.stamps, logs: &self.logs }
    }
}

/// Containers that the runtime said have stopped, and those who wait for one.
#[derive(Debug, Default)]
pub(super) struct Stopped {
    known: Mutex<HashMap<String, Known>>,
}

#[derive(Debug)]
enum Known {
    Stopped,
    Awaited(oneshot::Sender<()>),
}

impl Stopped {
    /// Reads `events` until they end; then nobody can wait any longer.
    pub(super) async fn read(&self, mut events: ContainerEvents) {
        while let Some(Ok(event)) = events.next().await {
            if event.container_event_type() == cri::ContainerEventType::ContainerStoppedEvent {
                self.stopped(event.container_id);
            }
        }
        self.lock().clear();
    }

    fn stopped(&self, id: String) {
        if let Some(Known::Awaited(waiter)) = self.lock().insert(id, Known::Stopped) {
            // A waiter that is gone was told to end.
            let _ = waiter.send(());
        }
    }

    async fn wait(&self, id: &str) -> anyhow::Result<()> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut known = self.lock();
            if let Some(Known::Stopped) = known.get(id) {
                return Ok(());
            }
            known.insert(id.to_owned(), Known::Awaited(sender));
        }
        receiver.await.context("the event stream ended")
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_stop_is_seen_whether_it_comes_before_or_after_the_wait() {
        let stopped = Stopped::default();
        stopped.stopped("early".to_owned());
        stopped.wait("early").now_or_never().expect("known already").unwrap();

        let mut late = std::pin::pin!(stopped.wait("late"));
        assert!(late.as_mut().now_or_never().is_none());
        stopped.stopped("other".to_owned());
        assert!(late.as_mut().now_or_never().is_none());
        stopped.stopped("late".to_owned());
        late.await.unwrap();
    }

    #[tokio::test]
    async fn waiting_ends_with_the_stream() {
        let stopped = Stopped::default();
        let wait = stopped.wait("a");
        let mut wait = std::pin::pin!(wait);
        assert!(wait.as_mut().now_or_never().is_none());
        stopped.lock().clear();
        assert!(wait.await.is_err());
    }
}
