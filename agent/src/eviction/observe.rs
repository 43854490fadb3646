//! Reads the signals of this node and the usage of its pods, and removes what no pod needs.

use std::collections::HashMap;
use std::collections::HashSet;
use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::BoxFuture;
use keblet_proto::cri::v1 as cri;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::decision::Reclaim;
use super::image_fs_retry::ImageFsRetry;
use super::local_limits::Needs;
use super::ranking::request;
use super::ranking::signed;
use super::readings::DiskLayout;
use super::readings::Reading;
use super::readings::Readings;
use crate::cgroups::Cgroups;
use crate::cgroups::Layout;
use crate::cgroups::memory_high::Raise;
use crate::cgroups::memory_high::Raised;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::MemoryUsage;
use crate::config::eviction::Signal;
use crate::config::keblet::MemoryAvailable;
use crate::kernel::usage::AvailableMemory;
use crate::kernel::usage::Disk;
use crate::kernel::usage::FileSystem;
use crate::kernel::usage::Machine;
use crate::kernel::usage::ProcessCounts;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::qos::qos_class;
use crate::model::runtime_keys;
use crate::model::spec;
use crate::pressure::NodeSample;
use crate::pressure::PodPlace;
use crate::pressure::PodSample;
use crate::pressure::PressureReader;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;
use crate::stats::Folder;
use crate::stats::PodUsage;
use crate::stats::Sizes;
use crate::stats::Stats;
use crate::volumes::MeasurableVolume;
use crate::volumes::Volumes;

/// How long a pass waits for an answer of the runtime: no pod is evicted meanwhile.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(2);
/// Period at which a runtime that has reported the place of its images is queried again: it may be restarted with another
/// folder.
const DISKS_PERIOD: Duration = Duration::from_secs(300);

/// The node as the eviction manager observes and changes it.
pub trait Observe: Send + 'static {
    /// The signals now. Reads a few files.
    fn readings(&mut self) -> impl Future<Output = Readings> + Send;

    /// Usage of the pods that have any, measured now; the disks too `with_disks`, for which a runtime or a disk that hangs is
    /// waited for. An error says why usage cannot be measured.
    fn usage(
        &mut self,
        pods: &[Pod],
        with_disks: bool,
    ) -> BoxFuture<'static, Result<HashMap<PodUid, PodUsage>, String>>;

    /// Usage of pods as far as their limits on files need it, measured at bounded cost: it may be a little old. A runtime that
    /// hangs is waited for; an error says why usage cannot be measured.
    fn limited(&mut self, pods: &[(Pod, Needs)]) -> BoxFuture<'static, Result<HashMap<PodUid, PodUsage>, String>>;

    /// Sizes of the pod's volumes that are counted by walking them, each counted now and without a pause, which may take
    /// minutes. One that cannot be counted is absent.
    fn recount(&mut self, pod: &Pod) -> BoxFuture<'static, Sizes>;

    /// Removes from the node what no pod needs. A runtime that hangs is waited for.
    fn reclaim(&mut self, what: Reclaim) -> BoxFuture<'static, ()>;

    /// No disk is short of space: nothing needs to be removed.
    fn disks_suffice(&mut self);

    /// Bytes of memory that are charged to the pod's cgroup; `None` once it was removed.
    fn held(&mut self, pod: &Pod) -> impl Future<Output = Option<u64>> + Send;

    /// Suspends all processes in the pod's cgroup for a while, where the node can. Does not wait for it.
    fn suspend(&mut self, pod: &Pod, duration: Duration);

    /// Kills all processes in the pod's cgroup, if there are any left.
    fn kill(&mut self, pod: &Pod) -> impl Future<Output = ()> + Send;

    /// When the containers of the pod were created that the runtime has, in nanoseconds since the Unix epoch.
    ///
    /// # Errors
    /// The runtime does not answer.
    fn created(&mut self, uid: &PodUid) -> impl Future<Output = Result<Vec<i64>, String>> + Send;

    /// Why tasks of the node wait; `available`: bytes of memory that are left. `None` if it cannot be read.
    fn pressure(&mut self, available: Option<u64>) -> impl Future<Output = Option<NodeSample>> + Send;

    /// Why tasks of these pods wait; without those that have no cgroup. Reads a few files for each.
    fn pressure_of(&mut self, pods: &[Pod]) -> impl Future<Output = Vec<PodSample>> + Send;

    /// Raises `memory.high`.
    fn raise(&mut self, raises: &[Raise]) -> impl Future<Output = Raised> + Send;
}

/// Removes what no pod needs.
pub trait Garbage: Clone + Send + Sync + 'static {
    /// Removes dead containers of pods that have terminated.
    fn remove_dead_containers(&self) -> impl Future<Output = ()> + Send;

    /// Removes images that no container uses and that have been on the node for `min_age`.
    fn remove_unused_images(&self, min_age: Duration) -> impl Future<Output = ()> + Send;

    /// Nothing needs to be removed any more: what has failed is not tried again, until the next shortage.
    fn is_not_needed(&self);
}

/// Nothing is removed.
impl Garbage for () {
    async fn remove_dead_containers(&self) {}

    async fn remove_unused_images(&self, _min_age: Duration) {}

    fn is_not_needed(&self) {}
}

/// Where this node is observed.
pub struct Sources<G> {
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
    /// The cgroup of all pods.
    pub kubepods: Option<String>,
    /// The cgroups of pods.
    pub cgroups: Option<Cgroups>,
    /// Why tasks wait.
    pub pressure: PressureReader,
    /// `--root-dir`.
    pub root: PathBuf,
    /// Reports where its images are.
    pub runtime: Runtime,
    /// Usage of pods.
    pub stats: Stats,
    /// Where volumes are.
    pub volumes: Volumes,
    /// What can be removed.
    pub garbage: G,
    /// `imageMinimumGCAge`
    pub min_image_age: Duration,
    /// What `memory.available` is.
    pub memory_available: MemoryAvailable,
}

/// This node.
pub struct ThisNode<G> {
    sources: Sources<G>,
    node_fs: Disk,
    /// File systems of images and of writable layers, once the runtime has reported them.
    of_runtime: Option<(Disk, Disk)>,
    /// The call for them; at most one.
    asked: JoinSet<Result<cri::ImageFsInfoResponse, RuntimeError>>,
    /// When the last one was answered.
    answered: Option<Instant>,
    retry: ImageFsRetry,
    layout: Option<DiskLayout>,
}

impl<G: Garbage> ThisNode<G> {
    /// Nothing is read yet.
    pub fn new(sources: Sources<G>) -> Self {
        let node_fs = Disk::new(sources.root.clone());
        let (asked, retry) = (JoinSet::new(), ImageFsRetry::default());
        Self { sources, node_fs, of_runtime: None, asked, answered: None, retry, layout: None }
    }

    /// Queries the runtime for the places of images and writable layers, until it has answered, and again after
    /// [`DISKS_PERIOD`]. Later passes do not wait for a call that hangs; once the places are known, no pass waits.
    async fn find_disks(&mut self) {
        let is_known = self.of_runtime.is_some();
        if self.retry.is_early() || (is_known && self.answered.is_some_and(|at| at.elapsed() < DISKS_PERIOD)) {
            return;
        }
        let mut timeout = Duration::ZERO;
        if self.asked.is_empty() {
            let runtime = self.sources.runtime.clone();
            self.asked.spawn(async move { runtime.image_fs_info().await });
            timeout = if is_known { Duration::ZERO } else { RUNTIME_TIMEOUT };
        }
        let Ok(Some(Ok(answer))) = tokio::time::timeout(timeout, self.asked.join_next()).await else { return };
        self.answered = Some(Instant::now());
        let mount = |list: &[cri::FilesystemUsage]| {
            let id = list.first()?.fs_id.as_ref()?;
            Some(PathBuf::from(&id.mountpoint)).filter(|path| path.is_absolute())
        };
        match answer {
            Ok(info) => {
                let Some(images) = mount(&info.image_filesystems) else {
                    return self.retry.failed("the runtime reports none");
                };
                let containers = mount(&info.container_filesystems).unwrap_or_else(|| images.clone());
                let has_moved = |(known, layers): &(Disk, Disk)| known.path() != images || layers.path() != containers;
                if self.of_runtime.as_ref().is_none_or(has_moved) {
                    self.of_runtime = Some((Disk::new(images), Disk::new(containers)));
                }
                self.retry.succeeded();
            }
            Err(error) => self.retry.failed(&error.to_string()),
        }
    }

    async fn disks(&mut self, readings: &mut Readings) {
        self.find_disks().await;
        let of_runtime = async {
            match &mut self.of_runtime {
                Some((images, containers)) => tokio::join!(images.measure(), containers.measure()),
                None => (None, None),
            }
        };
        let (node, (images, containers)) = tokio::join!(self.node_fs.measure(), of_runtime);
        if let (Some(node), Some(images), Some(containers)) = (node, images, containers) {
            self.layout = Some(layout_of(node, images, containers));
        }
        readings.disks = self.layout;
        for (found, available, inodes) in [
            (node, Signal::NodeFsAvailable, Signal::NodeFsInodesFree),
            (images, Signal::ImageFsAvailable, Signal::ImageFsInodesFree),
            (containers, Signal::ContainerFsAvailable, Signal::ContainerFsInodesFree),
        ] {
            let Some(FileSystem { usage, .. }) = found else { continue };
            readings.insert(available, usage.available, usage.capacity);
            // File systems without a fixed number of inodes report none.
            if usage.inodes > 0 {
                readings.insert(inodes, usage.inodes_free, usage.inodes);
            }
        }
    }

    /// Folders of the pods' volumes on this disk.
    fn folders<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) -> Vec<Folder> {
        let of_pod = |pod: &Pod| {
            let uid = pod_ref(pod).uid;
            let volumes = self.sources.volumes.on_disk(pod).into_iter();
            let folder = move |MeasurableVolume { name, path, project, .. }| Folder {
                uid: uid.clone(),
                volume: name,
                path,
                project,
            };
            volumes.map(folder).collect::<Vec<_>>()
        };
        pods.into_iter().flat_map(of_pod).collect()
    }

    /// The pod's cgroup; `None` with `cgroupsPerQOS: false`.
    fn place(&self, pod: &Pod) -> Option<PodPlace> {
        let (name, class) = (pod_ref(pod), qos_class(pod).ok()?);
        let path = self.sources.cgroups.as_ref()?.parent_for_runtime(class, name.uid.as_str()).ok()?;
        Some(PodPlace {
            name: format!("{}/{}", name.namespace, name.name),
            uid: name.uid,
            critical: spec::is_critical(pod),
            priority: pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0),
            requested: u64::try_from(request(pod, "memory").value()).unwrap_or(0),
            path,
        })
    }
}

impl<G: Garbage> Observe for ThisNode<G> {
    async fn readings(&mut self) -> Readings {
        let (layout, kubepods) = (self.sources.layout.clone(), self.sources.kubepods.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let of_pods = kubepods.and_then(|path| CgroupPlace::at(&layout, &path).read_memory());
            (AvailableMemory::read(&layout), of_pods, Machine::processes())
        });
        let mut readings = Readings::default();
        if let Ok((machine, of_pods, processes)) = reading.await {
            memory(&mut readings, machine, self.sources.memory_available, of_pods);
            process_ids(&mut readings, processes);
        }
        self.disks(&mut readings).await;
        readings
    }

    fn usage(
        &mut self,
        pods: &[Pod],
        with_disks: bool,
    ) -> BoxFuture<'static, Result<HashMap<PodUid, PodUsage>, String>> {
        let (stats, folders) = (self.sources.stats.clone(), with_disks.then(|| self.folders(pods)));
        Box::pin(async move {
            let mut usage = stats.pods(with_disks).await.map_err(|error| error.to_string())?;
            if let Some(folders) = folders {
                add_volumes(&mut usage, stats.volume_sizes(folders, true).await);
            }
            Ok(usage)
        })
    }

    fn limited(&mut self, pods: &[(Pod, Needs)]) -> BoxFuture<'static, Result<HashMap<PodUid, PodUsage>, String>> {
        let (stats, folders) = (self.sources.stats.clone(), self.folders(pods.iter().map(|(pod, _)| pod)));
        let uids = |containers: bool| -> HashSet<PodUid> {
            let pods = pods.iter().filter(|(_, needs)| needs.containers == containers);
            pods.map(|(pod, _)| pod_ref(pod).uid).collect()
        };
        let (of_containers, of_volumes) = (uids(true), uids(false));
        Box::pin(async move {
            let mut usage = stats.files_of(of_containers).await.map_err(|error| error.to_string())?;
            usage.extend(of_volumes.into_iter().map(|uid| (uid, PodUsage::default())));
            add_volumes(&mut usage, stats.volume_sizes(folders, false).await);
            Ok(usage)
        })
    }

    fn recount(&mut self, pod: &Pod) -> BoxFuture<'static, Sizes> {
        let (stats, folders) = (self.sources.stats.clone(), self.folders([pod]));
        Box::pin(async move { stats.recounted(folders).await })
    }

    async fn held(&mut self, pod: &Pod) -> Option<u64> {
        let (path, reader) = (self.place(pod)?.path, self.sources.pressure.clone());
        tokio::task::spawn_blocking(move || reader.held(&path)).await.ok()?
    }

    fn suspend(&mut self, pod: &Pod, duration: Duration) {
        if let (Some(cgroups), Ok(class)) = (&self.sources.cgroups, qos_class(pod)) {
            cgroups.suspend_pod(class, pod_ref(pod).uid.as_str(), duration);
        }
    }

    async fn kill(&mut self, pod: &Pod) {
        let (Some(cgroups), Ok(class)) = (&self.sources.cgroups, qos_class(pod)) else { return };
        let pod = pod_ref(pod);
        match cgroups.kill_pod(class, pod.uid.as_str()).await {
            Ok(true) => {
                let pod = pod.full_name();
                tracing::warn!(pod, "the runtime did not stop an evicted pod in time: its processes were killed");
            }
            // They have ended; what the pod had is still being released.
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(pod = %pod.full_name(), %error, "cannot kill the processes of an evicted pod");
            }
        }
    }

    async fn created(&mut self, uid: &PodUid) -> Result<Vec<i64>, String> {
        let of_pod = [(runtime_keys::POD_UID.to_owned(), uid.to_string())].into();
        let filter = cri::ContainerFilter { label_selector: of_pod, ..cri::ContainerFilter::default() };
        let listing = tokio::time::timeout(RUNTIME_TIMEOUT, self.sources.runtime.list_containers(filter)).await;
        let listed = listing.map_err(|_| format!("the runtime did not answer within {RUNTIME_TIMEOUT:?}"))?;
        let listed = listed.map_err(|error| error.to_string())?;
        Ok(listed.into_iter().map(|container| container.created_at).collect())
    }

    async fn pressure(&mut self, available: Option<u64>) -> Option<NodeSample> {
        let reader = self.sources.pressure.clone();
        tokio::task::spawn_blocking(move || reader.node(available)).await.ok()
    }

    async fn pressure_of(&mut self, pods: &[Pod]) -> Vec<PodSample> {
        let places: Vec<PodPlace> = pods.iter().filter_map(|pod| self.place(pod)).collect();
        let reader = self.sources.pressure.clone();
        tokio::task::spawn_blocking(move || reader.pods(&places)).await.unwrap_or_default()
    }

    async fn raise(&mut self, raises: &[Raise]) -> Raised {
        match &self.sources.cgroups {
            Some(cgroups) => cgroups.raise_memory_high(raises).await,
            // Pods without cgroups of their own have no values.
            None => Raised::default(),
        }
    }

    fn reclaim(&mut self, what: Reclaim) -> BoxFuture<'static, ()> {
        let (garbage, min_age) = (self.sources.garbage.clone(), self.sources.min_image_age);
        Box::pin(async move {
            if what.containers {
                garbage.remove_dead_containers().await;
            }
            if what.images {
                garbage.remove_unused_images(min_age).await;
            }
        })
    }

    fn disks_suffice(&mut self) {
        self.sources.garbage.is_not_needed();
    }
}

fn add_volumes(usage: &mut HashMap<PodUid, PodUsage>, sizes: Sizes) {
    for (uid, sizes) in sizes {
        if let Some(usage) = usage.get_mut(&uid) {
            usage.volumes = sizes.into_iter().collect();
        }
    }
}

impl Readings {
    fn insert(&mut self, signal: Signal, available: u64, capacity: u64) {
        let (available, capacity) = (signed(available), signed(capacity));
        self.signals.insert(signal, Reading { available, capacity, at: Instant::now() });
    }
}

/// Memory of the machine, without its huge pages, and of the pods below the limit of their cgroup.
fn memory(
    readings: &mut Readings,
    machine: Option<AvailableMemory>,
    by: MemoryAvailable,
    of_pods: Option<MemoryUsage>,
) {
    if let Some(machine) = machine {
        let available = match by {
            MemoryAvailable::WorkingSet => machine.working_set,
            MemoryAvailable::MemAvailable => machine.mem_available.unwrap_or(machine.working_set),
        };
        readings.insert(Signal::MemoryAvailable, available, machine.capacity);
    }
    if let Some((pods, limit)) = of_pods.and_then(|pods| Some((pods, pods.limit?))) {
        readings.insert(Signal::AllocatableMemoryAvailable, limit.saturating_sub(pods.working_set), limit);
    }
}

fn process_ids(readings: &mut Readings, processes: ProcessCounts) {
    let count = |number: i64| u64::try_from(number).unwrap_or(0);
    if let (Some(max), Some(current)) = (processes.max, processes.current) {
        readings.insert(Signal::PidAvailable, count(max.saturating_sub(current)), count(max));
    }
}

fn layout_of(node: FileSystem, images: FileSystem, containers: FileSystem) -> DiskLayout {
    if images.device != containers.device {
        DiskLayout::Split
    } else if images.device != node.device {
        DiskLayout::Dedicated
    } else {
        DiskLayout::Shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::usage::DiskUsage;

    #[tokio::test]
    async fn huge_pages_are_not_available() {
        let mut readings = Readings::default();
        let machine = MemoryUsage { working_set: 300, limit: Some(1000), ..MemoryUsage::default() };
        let pods = MemoryUsage { working_set: 250, limit: Some(200), ..MemoryUsage::default() };
        let available = AvailableMemory::of(machine, 100, Some(700));
        memory(&mut readings, available, MemoryAvailable::WorkingSet, Some(pods));
        let shown = |signal| (readings.signals[&signal].available, readings.signals[&signal].capacity);
        assert_eq!(shown(Signal::MemoryAvailable), (600, 900));
        assert_eq!(shown(Signal::AllocatableMemoryAvailable), (0, 200));
        let mut unlimited = Readings::default();
        memory(&mut unlimited, available, MemoryAvailable::MemAvailable, Some(MemoryUsage::default()));
        assert_eq!(unlimited.signals[&Signal::MemoryAvailable].available, 700);
        let unknown = AvailableMemory::of(machine, 100, None);
        memory(&mut unlimited, unknown, MemoryAvailable::MemAvailable, None);
        assert_eq!(unlimited.signals[&Signal::MemoryAvailable].available, 600, "the kernel does not report it");
        assert!(!unlimited.signals.contains_key(&Signal::AllocatableMemoryAvailable));
        process_ids(&mut unlimited, ProcessCounts { max: Some(100), current: Some(130) });
        assert_eq!(unlimited.signals[&Signal::PidAvailable].available, 0);
    }

    #[test]
    fn file_systems_are_distinguished_by_their_device() {
        let on = |device| FileSystem { usage: DiskUsage::default(), device };
        assert_eq!(layout_of(on(1), on(1), on(1)), DiskLayout::Shared);
        assert_eq!(layout_of(on(1), on(2), on(2)), DiskLayout::Dedicated);
        assert_eq!(layout_of(on(1), on(2), on(1)), DiskLayout::Split);
    }
}
