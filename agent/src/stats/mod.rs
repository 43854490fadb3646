//! Usage of the node, its pods and containers, for `/stats/summary`, `/metrics/resource` and `/metrics/cadvisor`.
//!
//! Measures on demand only; requests within [`FRESH`] of each other get the same sample.
//!
//! ```text
//!  pod cache ─▶ pids ─▶ cgroup files ─┐
//!  runtime (where no pid is known) ───┴▶ sample ─▶ rates ─▶ build ─▶ summary
//!  disks · network · runtime ───────────▶ extras ───────────┘
//!  sample ─▶ more of the same cgroups' files ─▶ cadvisor
//! ```

mod build;
mod cadvisor;
mod collect;
mod extras;
mod family;
mod pod_usage;
mod resource;
mod sample;
mod summary;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use prometheus::proto::MetricFamily;
use tokio::sync::Mutex;
use tokio::time::Instant;

use self::build::NodeIdentity;
pub use self::cadvisor::Scrape;
pub use self::collect::SystemCgroups;
use self::extras::Extras;
pub use self::extras::Folders;
pub use self::extras::Used;
pub use self::pod_usage::ContainerUsage;
pub use self::pod_usage::PodUsage;
use self::sample::Sample;
use crate::cgroups::Layout;
use crate::kernel::usage::Machine;
use crate::model::Clock;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::runtime::Runtime;

/// How long a sample is reused.
const FRESH: Duration = Duration::from_secs(5);
/// How long disk and log usage is reused, which changes slowly and costs more.
const FRESH_EXTRAS: Duration = Duration::from_secs(10);
/// Time between two samples if there is no recent one to compute rates from.
const APART: Duration = Duration::from_millis(200);

/// Usage is not available. The texts begin as those of upstream do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatsError {
    /// The file system of the agent's root directory.
    #[error("failed to get rootFs stats: {0}")]
    RootFs(String),
    /// The runtime's file system.
    #[error("failed to get imageFs stats: {0}")]
    ImageFs(String),
    /// Pods and containers.
    #[error("failed to list pod stats: {0}")]
    Pods(String),
    /// The agent is shutting down.
    #[error("cannot measure usage: {0}")]
    Stopped(String),
    /// The summary cannot be encoded.
    #[error("cannot encode the summary: {0}")]
    Encode(String),
}

/// What runs on the node.
pub trait Snapshots: Send + Sync {
    /// Snapshots of all pods.
    fn all(&self) -> Vec<Arc<PodSnapshot>>;
}

/// Sources of measurements.
pub struct StatsSource {
    /// The node's name.
    pub node_name: String,
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
    /// Cgroups that are reported by name.
    pub system: SystemCgroups,
    /// Where the agent keeps its files.
    pub folders: Folders,
    /// The container runtime.
    pub runtime: Runtime,
    /// Snapshots of all pods.
    pub snapshots: Arc<dyn Snapshots>,
}

/// Extras, and when they were measured.
type Aged = (Instant, Arc<Extras>);

/// Measures usage. Cheap to clone; all clones share the samples.
#[derive(Clone)]
pub struct Stats {
    source: Arc<StatsSource>,
    identity: Arc<NodeIdentity>,
    sample: Arc<Mutex<Option<Arc<Sample>>>>,
    extras: Arc<Mutex<Option<Aged>>>,
}

impl Stats {
    /// Measures nothing yet.
    pub fn new(source: StatsSource) -> Self {
        let identity = NodeIdentity {
            node_name: source.node_name.clone(),
            booted: Machine::boot_time().unwrap_or(0).saturating_mul(1_000_000_000),
            agent_started: Clock::System.wall_nanos(),
        };
        Self { source: Arc::new(source), identity: Arc::new(identity), sample: Arc::default(), extras: Arc::default() }
    }

    /// The summary as JSON, indented by one blank as the kubelet does.
    ///
    /// # Errors
    /// The runtime or a file system returned an error.
    pub async fn summary(&self, only_cpu_and_memory: bool) -> Result<Vec<u8>, StatsError> {
        let sample = self.sample(true).await?;
        let extras = if only_cpu_and_memory { None } else { Some(self.extras(&sample).await?) };
        let body = build::summary(&self.identity, &sample, extras.as_deref());
        let mut json = Vec::new();
        let formatter = serde_json::ser::PrettyFormatter::with_indent(b" ");
        let mut serializer = serde_json::Serializer::with_formatter(&mut json, formatter);
        serde::Serialize::serialize(&body, &mut serializer).map_err(|error| StatsError::Encode(error.to_string()))?;
        Ok(json)
    }

    /// The families of `/metrics/resource`; `resource_scrape_error` if usage cannot be measured.
    pub async fn resource_metrics(&self) -> Vec<MetricFamily> {
        match self.sample(false).await {
            Ok(sample) => resource::families(Some(&sample)),
            Err(error) => {
                tracing::warn!(%error, "cannot measure usage");
                resource::families(None)
            }
        }
    }

    /// The families of `/metrics/cadvisor`; `container_scrape_error` if usage cannot be measured. They have cAdvisor's
    /// labels, unlike the `container_*` families of `/metrics/resource`.
    pub async fn cadvisor_metrics(&self) -> Scrape {
        let sample = match self.sample(false).await {
            Ok(sample) => sample,
            Err(error) => {
                tracing::warn!(%error, "cannot measure usage");
                return Scrape::default();
            }
        };
        let source = self.source.clone();
        let scrape = tokio::task::spawn_blocking(move || cadvisor::take(&source.layout, &sample)).await;
        // The agent is shutting down.
        scrape.unwrap_or_default()
    }

    /// A fresh sample. `with_rates`: takes two if there is no recent one to compute rates from.
    async fn sample(&self, with_rates: bool) -> Result<Arc<Sample>, StatsError> {
        // Held while measuring, so that concurrent requests get the same sample.
        let mut last = self.sample.lock().await;
        let now = Instant::now();
        if let Some(sample) = last.as_ref().filter(|sample| now.duration_since(sample.taken()) < FRESH) {
            let has_rates = sample.node.nano_cores.is_some();
            if has_rates || !with_rates {
                return Ok(sample.clone());
            }
        }
        let before = match last.take().filter(|sample| sample.is_recent(now)) {
            Some(sample) => Some(sample),
            None if with_rates => Some(Arc::new(self.take().await?)),
            None => None,
        };
        if let Some(before) = before.as_ref().filter(|_| with_rates) {
            tokio::time::sleep_until(before.taken() + APART).await;
        }
        let mut sample = self.take().await?;
        if let Some(before) = before {
            sample.rate_since(&before);
        }
        Ok(last.insert(Arc::new(sample)).clone())
    }

    /// What every pod with running containers uses, measured now; its writable layers and logs too `with_disks`.
    ///
    /// # Errors
    /// The runtime returned an error.
    pub async fn pods(&self, with_disks: bool) -> Result<HashMap<PodUid, PodUsage>, StatsError> {
        let sample = self.take().await?;
        if !with_disks {
            return Ok(sample.pods.iter().map(|pod| (pod.pod.uid.clone(), PodUsage::of(pod))).collect());
        }
        let writable = extras::writable_layers(&self.source.runtime).await?;
        let source = self.source.clone();
        let measured = tokio::task::spawn_blocking(move || {
            let of_pod = |pod: &sample::PodSample| {
                let files = extras::files_of(&source.folders, &pod.pod);
                (pod.pod.uid.clone(), PodUsage::of(pod).with_disks(pod, &files, &writable))
            };
            sample.pods.iter().map(of_pod).collect()
        })
        .await;
        measured.map_err(|error| StatsError::Stopped(error.to_string()))
    }

    async fn take(&self) -> Result<Sample, StatsError> {
        let snapshots = self.source.snapshots.all();
        let runtime_stats = if collect::needs_runtime(&snapshots) {
            let stats = self.source.runtime.list_container_stats(cri::ContainerStatsFilter::default()).await;
            stats.map_err(|error| StatsError::Pods(error.rpc_text()))?
        } else {
            Vec::new()
        };
        let source = self.source.clone();
        let taken = tokio::task::spawn_blocking(move || {
            collect::take(&source.layout, &source.system, &snapshots, &runtime_stats)
        })
        .await;
        taken.map_err(|error| StatsError::Stopped(error.to_string()))
    }

    async fn extras(&self, sample: &Sample) -> Result<Arc<Extras>, StatsError> {
        let mut last = self.extras.lock().await;
        if let Some((at, extras)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH_EXTRAS) {
            tracing::trace!(age = ?at.elapsed(), "disk usage is reused");
            return Ok(extras.clone());
        }
        let extras = Arc::new(extras::measure(&self.source.runtime, &self.source.folders, sample).await?);
        *last = Some((Instant::now(), extras.clone()));
        Ok(extras)
    }
}

impl Sample {
    fn taken(&self) -> Instant {
        self.taken
    }
}

#[cfg(test)]
mod tests;
