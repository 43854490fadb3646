//! Usage of the node, its pods and containers, for `/stats/summary`, `/metrics/resource` and `/metrics/cadvisor`.
//!
//! Measures on demand only; requests within [`FRESH`] of each other get the same sample.
//!
//! ```text
//!  pod cache ─▶ pids ─▶ cgroup files ─┐
//!  runtime (of containers elsewhere) ─┴▶ sample ─▶ rates ─▶ build ─▶ summary
//!  disks · network · runtime ───────────▶ extras ───────────┘
//!  volumes ─▶ disks (file systems and devices of claims) ───┤
//!          ├▶ quotas (of file systems that count them) ─────┤
//!          └▶ walks (rests fifty times as long as it works)─┘
//!  sample ─▶ more of the same cgroups' files ─▶ cadvisor
//! ```

mod build;
mod cadvisor;
mod claims;
mod collect;
mod descriptors;
mod disks;
mod durations;
mod error;
mod evictions;
mod extras;
mod family;
mod files;
mod filesystems;
mod open_cgroups;
mod pod_usage;
mod quotas;
mod resource;
mod sample;
mod sandbox_image;
mod summary;
mod walks;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::PoisonError;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use prometheus::proto::MetricFamily;
use tokio::sync::Mutex;
use tokio::time::Instant;

use self::build::NodeIdentity;
pub use self::build::Summary;
pub use self::cadvisor::Scrape;
pub use self::claims::ClaimUsage;
pub use self::collect::SystemCgroup;
pub use self::collect::SystemCgroups;
use self::descriptors::Descriptors;
use self::disks::Disks;
use self::durations::Durations;
pub use self::error::StatsError;
use self::extras::Extras;
pub use self::extras::Folders;
pub use self::extras::FsUsage;
use self::extras::MeasuredVolumes;
use self::files::Effort;
use self::files::Files;
use self::files::Found;
use self::files::PodFiles;
use self::filesystems::FileSystem;
use self::filesystems::MountTable;
use self::open_cgroups::OpenCgroups;
pub use self::pod_usage::ContainerUsage;
pub use self::pod_usage::PodUsage;
use self::quotas::Quotas;
use self::sample::Sample;
use self::sandbox_image::SandboxImage;
pub use self::walks::Folder;
use self::walks::Recount;
pub use self::walks::Sizes;
use self::walks::Walks;
use crate::cgroups::Layout;
use crate::cgroups::LimitWrites;
use crate::kernel::usage::Machine;
use crate::kernel::usage::MeasuredBy;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::oom::OomCounts;
use crate::runtime::Runtime;
use crate::volumes::MeasurableVolume;

/// How long a sample is reused.
const FRESH: Duration = Duration::from_secs(5);
/// How long disk and log usage is reused, which changes slowly and costs more.
const FRESH_EXTRAS: Duration = Duration::from_secs(10);
/// Time between two samples if there is no recent one to compute rates from.
const APART: Duration = Duration::from_millis(200);
/// How long a scrape waits for the files of cgroups, which take milliseconds.
const SCRAPE_FILES_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a scrape waits for the runtime: scrapers give up after ten seconds, and two samples may be taken.
const SCRAPE_RUNTIME_TIMEOUT: Duration = Duration::from_secs(4);
/// How long an eviction waits for it.
const EVICTION_RUNTIME_TIMEOUT: Duration = Duration::from_secs(2);

/// What runs on the node.
pub trait Snapshots: Send + Sync {
    /// Snapshots of all pods.
    fn all(&self) -> Vec<Arc<PodSnapshot>>;

    /// Volumes that are set up for pods and can be measured.
    fn volumes(&self) -> HashMap<PodUid, Vec<MeasurableVolume>> {
        HashMap::new()
    }
}

/// Sources of measurements.
pub struct StatsSource {
    /// The node's name.
    pub node_name: String,
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
    /// Where the kernel's process files are: `/proc`, except in tests.
    pub proc: PathBuf,
    /// Cgroups that are reported by name.
    pub system: SystemCgroups,
    /// Where the agent keeps its files.
    pub folders: Folders,
    /// `volumeStatsAggPeriod`: the shortest time between two counts of a volume; `None` if volumes are not measured.
    pub volume_period: Option<Duration>,
    /// The container runtime.
    pub runtime: Runtime,
    /// Snapshots of all pods.
    pub snapshots: Arc<dyn Snapshots>,
    /// OOM events of containers.
    pub ooms: OomCounts,
}

/// Extras, and when they were measured.
type Aged = (Instant, Arc<Extras>);

/// Measures usage. Cheap to clone; all clones share the samples.
#[derive(Clone)]
pub struct Stats {
    source: Arc<StatsSource>,
    identity: Arc<NodeIdentity>,
    sample: Arc<Mutex<Option<Arc<Sample>>>>,
    /// Held by the thread that reads files for a scrape.
    reading: Arc<Mutex<()>>,
    extras: Arc<Mutex<Option<Aged>>>,
    files: Files,
    descriptors: Arc<Mutex<Descriptors>>,
    sandbox_image: SandboxImage,
    /// Of volumes.
    disks: Arc<Disks>,
    /// Of the machine.
    machine_disks: Arc<Disks>,
    mount_table: Arc<Mutex<MountTable>>,
    quotas: Arc<Quotas>,
    walks: Arc<Walks>,
    durations: Durations,
    limit_writes: LimitWrites,
    /// Why the runtime did not measure containers in its last call.
    runtime_failure: Arc<std::sync::Mutex<Option<String>>>,
}

impl Stats {
    /// Measures nothing yet.
    pub fn new(source: StatsSource) -> Self {
        let identity = NodeIdentity {
            node_name: source.node_name.clone(),
            booted: Machine::boot_time(&source.proc).unwrap_or(0).saturating_mul(1_000_000_000),
            agent_started: Clock::System.wall_nanos(),
        };
        Self {
            source: Arc::new(source),
            identity: Arc::new(identity),
            sample: Arc::default(),
            reading: Arc::default(),
            extras: Arc::default(),
            files: Files::default(),
            descriptors: Arc::default(),
            sandbox_image: SandboxImage::default(),
            disks: Arc::default(),
            machine_disks: Arc::default(),
            mount_table: Arc::default(),
            quotas: Arc::default(),
            walks: Arc::default(),
            durations: Durations::default(),
            limit_writes: LimitWrites::default(),
            runtime_failure: Arc::default(),
        }
    }

    /// Times measurements of volumes in these metrics; earlier clones do not.
    pub fn with_metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.durations = Durations::new(metrics);
        self.disks = Arc::new(Disks::new(self.durations.clone()));
        self.quotas = Arc::new(Quotas::default().with_durations(self.durations.clone()));
        self.walks = Arc::new(Walks::new(self.durations.clone()));
        self
    }

    /// Reads limits of pods again after writes that are counted here; earlier clones do not.
    pub fn with_limit_writes(self, limit_writes: LimitWrites) -> Self {
        Self { limit_writes, ..self }
    }

    /// The summary, which is still to be encoded.
    ///
    /// # Errors
    /// The runtime or a file system returned an error.
    pub async fn summary(&self, only_cpu_and_memory: bool) -> Result<Summary, StatsError> {
        let sample = self.sample(true).await?;
        let extras = if only_cpu_and_memory { None } else { Some(self.extras(&sample).await?) };
        Ok(Summary { identity: self.identity.clone(), sample, extras })
    }

    /// The families of `/metrics/resource`; `resource_scrape_error` if usage, or that of some containers, cannot be measured.
    pub async fn resource_metrics(&self) -> Vec<MetricFamily> {
        let sample = self.sample(false).await;
        let sample = sample.inspect_err(|error| tracing::warn!(%error, "cannot measure usage")).ok();
        // A full node has thousands of samples.
        let families = tokio::task::spawn_blocking(move || resource::families(sample.as_deref())).await;
        // The agent is shutting down.
        families.unwrap_or_default()
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
        let (file_systems, source) = (self.file_systems().await, self.source.clone());
        let image = self.sandbox_image.get(&source.runtime, &sample).await.to_owned();
        // Held by the thread: one that hangs keeps no others.
        let mut descriptors = self.descriptors.clone().lock_owned().await;
        let limit_writes = self.limit_writes.count();
        let scrape = tokio::task::spawn_blocking(move || {
            let StatsSource { layout, proc, ooms, .. } = &*source;
            let reader = cadvisor::Reader::new(layout, proc, &image, ooms, limit_writes);
            cadvisor::take(&reader, file_systems, &sample, &mut descriptors)
        })
        .await;
        // The agent is shutting down.
        scrape.unwrap_or_default()
    }

    /// File systems of the machine. Those that do not answer are absent, or have their last size.
    async fn file_systems(&self) -> Vec<FileSystem> {
        // Held by the thread: one that hangs keeps no others.
        let (proc, mut table) = (self.source.proc.clone(), self.mount_table.clone().lock_owned().await);
        let mounted = tokio::task::spawn_blocking(move || table.mounted(&proc)).await;
        // The agent is shutting down.
        let mounted = mounted.unwrap_or_default();
        let points: Vec<_> = mounted.iter().map(|mount| (mount.point.clone(), MeasuredBy::FileSystem)).collect();
        let sizes = self.machine_disks.usages(&points, FRESH_EXTRAS).await;
        filesystems::file_systems(mounted, &sizes)
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
        let mut before = last.take();
        if with_rates && !before.as_ref().is_some_and(|sample| sample.is_recent(now)) {
            before = Some(Arc::new(self.take(before).await?));
        }
        if let Some(before) = before.as_ref().filter(|_| with_rates) {
            tokio::time::sleep_until(before.taken() + APART).await;
        }
        let mut sample = self.take(before.clone()).await?;
        if let Some(before) = before {
            sample.rate_since(&before);
        }
        Ok(last.insert(Arc::new(sample)).clone())
    }

    async fn sizes(&self, folders: Vec<Folder>, recount: Recount) -> Sizes {
        let (mut sizes, walked) = self.quotas.sizes(folders).await;
        for (uid, of_pod) in self.walks.sizes(walked, recount).await {
            sizes.entry(uid).or_default().extend(of_pod);
        }
        sizes
    }

    /// Bytes of the logs of running containers: the pod, the container's name, and the size. Blocks for a few milliseconds, or
    /// for some seconds if a folder hangs.
    pub fn logs(&self) -> Vec<(PodRef, String, u64)> {
        let (snapshots, files) = (self.source.snapshots.all(), self.files(|_| true, Effort::SCRAPE));
        let of_pod = |snapshot: &Arc<PodSnapshot>| {
            let logs = files.get(&snapshot.pod.uid).map(|files| &files.logs);
            let size = |name: &String| logs.and_then(|logs| logs.get(name)).map_or(0, |used| used.bytes);
            let running = snapshot.running().map(|container| &container.name);
            running.map(|name| (snapshot.pod.clone(), name.clone(), size(name))).collect::<Vec<_>>()
        };
        snapshots.iter().flat_map(of_pod).collect()
    }

    /// Files of the wanted pods, whether they run or not, as far as they are known. Blocks, for some seconds if a folder hangs.
    fn files(&self, wanted: impl Fn(&PodUid) -> bool, effort: Effort) -> HashMap<PodUid, PodFiles> {
        self.found_files(wanted, effort).files
    }

    fn found_files(&self, wanted: impl Fn(&PodUid) -> bool, effort: Effort) -> Found {
        let pods: Vec<PodRef> = self.source.snapshots.all().iter().map(|snapshot| snapshot.pod.clone()).collect();
        self.files.measure(&self.source.folders, &pods, wanted, effort)
    }

    /// Usage of volumes that belong to a claim, one for each claim; only those that were measured.
    pub async fn claims(&self) -> Vec<ClaimUsage> {
        let volumes = self.measured_volumes(|at| at.claim.is_some()).await;
        let Some(volumes) = volumes.filter(|volumes| !volumes.is_empty()) else { return Vec::new() };
        let snapshots = self.source.snapshots.all();
        let measured = tokio::task::spawn_blocking(move || claims::measure(&snapshots, volumes)).await;
        // The agent is shutting down.
        measured.unwrap_or_default()
    }

    /// Volumes of pods, and what is known of their usage; `None` if volumes are not measured.
    async fn measured_volumes(&self, wanted: impl Fn(&MeasurableVolume) -> bool) -> Option<MeasuredVolumes> {
        let period = self.source.volume_period?;
        let mut all = self.source.snapshots.volumes();
        all.values_mut().for_each(|volumes| volumes.retain(|at| wanted(at)));
        let (mut walked, mut asked) = (Vec::new(), Vec::new());
        for (uid, at) in all.iter().flat_map(|(uid, volumes)| volumes.iter().map(move |at| (uid, at))) {
            let (path, project) = (at.path.clone(), at.project);
            match at.by {
                MeasuredBy::Walk => walked.push(Folder { uid: uid.clone(), volume: at.name.clone(), path, project }),
                MeasuredBy::FileSystem | MeasuredBy::Device => asked.push((path, at.by)),
            }
        }
        let sizes = self.sizes(walked, Recount::After(period));
        let (sizes, disks) = tokio::join!(sizes, self.disks.usages(&asked, period));
        Some(MeasuredVolumes { all, sizes, disks })
    }

    /// Measures everything now. If the runtime is slow, what it alone can measure is absent: a container in a virtual machine
    /// must not hide all others.
    async fn take(&self, before: Option<Arc<Sample>>) -> Result<Sample, StatsError> {
        let mut sample = collect::take_within(SCRAPE_FILES_TIMEOUT, &self.reading, &self.source, before).await?;
        if sample.needs_runtime() {
            self.ask_runtime(&mut sample, SCRAPE_RUNTIME_TIMEOUT).await;
        }
        Ok(sample)
    }

    /// Measures what can be read from files, however long that takes. Keeps no folders open, since evictions wait for the
    /// runtime with it.
    async fn take_files(&self) -> Result<Sample, StatsError> {
        let (source, snapshots) = (self.source.clone(), self.source.snapshots.all());
        let taken =
            tokio::task::spawn_blocking(move || collect::take(&source, &snapshots, OpenCgroups::default())).await;
        taken.map_err(|error| StatsError::Stopped(error.to_string()))
    }

    async fn ask_runtime(&self, sample: &mut Sample, timeout: Duration) {
        let stats = self.source.runtime.list_container_stats(cri::ContainerStatsFilter::default());
        let failure = match tokio::time::timeout(timeout, stats).await {
            Ok(Ok(stats)) => {
                collect::add_runtime_stats(sample, &stats);
                None
            }
            Ok(Err(error)) => Some(error.rpc_text()),
            Err(_) => Some("it did not answer in time".to_owned()),
        };
        sample.is_incomplete = failure.is_some();
        self.note_runtime(failure);
    }

    /// Logs a reason for which the runtime does not measure containers only when it changes.
    fn note_runtime(&self, failure: Option<String>) {
        let mut known = self.runtime_failure.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == failure {
            return;
        }
        match &failure {
            Some(error) => tracing::warn!(error, "the runtime does not report usage that only it can measure"),
            None => tracing::info!("the runtime measures containers again"),
        }
        *known = failure;
    }

    async fn extras(&self, sample: &Arc<Sample>) -> Result<Arc<Extras>, StatsError> {
        let mut last = self.extras.clone().lock_owned().await;
        if let Some((at, extras)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH_EXTRAS) {
            tracing::trace!(age = ?at.elapsed(), "disk usage is reused");
            return Ok(extras.clone());
        }
        let reported = extras::reported_disks(&self.source.runtime).await?;
        let writable = extras::writable_layers(&self.source.runtime).await?;
        let (volumes, stats, sample) = (self.measured_volumes(|_| true).await, self.clone(), sample.clone());
        // Holds the lock also after the request was cancelled: one that hangs keeps no other threads.
        let measured = tokio::task::spawn_blocking(move || -> Result<Arc<Extras>, StatsError> {
            let files = stats.files(|_| true, Effort::SCRAPE);
            let extras = extras::measure(
                &stats.source,
                &sample,
                extras::PriorMeasurements { files, volumes, reported, writable },
            )?;
            let (_, extras) = last.insert((Instant::now(), Arc::new(extras)));
            Ok(extras.clone())
        });
        measured.await.map_err(|error| StatsError::Stopped(error.to_string()))?
    }
}

impl Sample {
    fn taken(&self) -> Instant {
        self.taken
    }
}

#[cfg(test)]
mod dashboard_tests;
#[cfg(test)]
mod tests;
