//! Reads the signals of this node and the usage of its pods, and removes what no pod needs.

use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use tokio::time::Instant;

use super::decision::Reclaim;
use super::disks::Disk;
use super::disks::FileSystem;
use super::local_limits::Needs;
use super::ranking::signed;
use super::readings::DiskLayout;
use super::readings::Reading;
use super::readings::Readings;
use super::walks::Folder;
use super::walks::Walks;
use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::MemoryUsage;
use crate::config::eviction::Signal;
use crate::kernel::usage::Machine;
use crate::kernel::usage::ProcessCounts;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::node;
use crate::runtime::Runtime;
use crate::stats::PodUsage;
use crate::stats::Stats;
use crate::volumes::Volumes;

/// What the eviction manager sees of the node, and does to it.
pub trait Observe: Send + 'static {
    /// The signals now. Reads a few files.
    fn readings(&mut self) -> impl Future<Output = Readings> + Send;

    /// Usage of the pods that have any, measured now; the disks too `with_disks`.
    ///
    /// # Errors
    /// Usage cannot be measured.
    fn usage(
        &mut self,
        pods: &[Pod],
        with_disks: bool,
    ) -> impl Future<Output = Result<HashMap<PodUid, PodUsage>, String>> + Send;

    /// Usage of pods as far as their limits on files need it, measured at bounded cost: it may be a little old.
    ///
    /// # Errors
    /// Usage cannot be measured.
    fn limited(
        &mut self,
        pods: &[(Pod, Needs)],
    ) -> impl Future<Output = Result<HashMap<PodUid, PodUsage>, String>> + Send;

    /// Removes from the node what no pod needs.
    fn reclaim(&mut self, what: Reclaim) -> impl Future<Output = ()> + Send;
}

/// Removes what no pod needs.
pub trait Garbage: Send + Sync + 'static {
    /// Removes dead containers of pods that have terminated.
    fn remove_dead_containers(&self) -> impl Future<Output = ()> + Send;

    /// Removes images that no container uses and that have been on the node for `min_age`.
    fn remove_unused_images(&self, min_age: Duration) -> impl Future<Output = ()> + Send;
}

/// Where this node is observed.
pub struct Sources<G> {
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
    /// The cgroup of all pods.
    pub kubepods: Option<String>,
    /// `--root-dir`.
    pub root: PathBuf,
    /// Tells where its images are.
    pub runtime: Runtime,
    /// Usage of pods.
    pub stats: Stats,
    /// Where volumes are.
    pub volumes: Volumes,
    /// What can be removed.
    pub garbage: G,
    /// `imageMinimumGCAge`
    pub min_image_age: Duration,
}

/// This node.
pub struct ThisNode<G> {
    sources: Sources<G>,
    node_fs: Disk,
    /// File systems of images and of writable layers, once the runtime has reported them.
    of_runtime: Option<(Disk, Disk)>,
    layout: Option<DiskLayout>,
    walks: Walks,
}

impl<G: Garbage> ThisNode<G> {
    /// Nothing is read yet.
    pub fn new(sources: Sources<G>) -> Self {
        let node_fs = Disk::new(sources.root.clone());
        Self { sources, node_fs, of_runtime: None, layout: None, walks: Walks::default() }
    }

    /// Asks the runtime where images and writable layers are, until it has answered.
    async fn find_disks(&mut self) {
        if self.of_runtime.is_some() {
            return;
        }
        let mount = |list: &[cri::FilesystemUsage]| {
            let id = list.first()?.fs_id.as_ref()?;
            Some(PathBuf::from(&id.mountpoint)).filter(|path| path.is_absolute())
        };
        match self.sources.runtime.image_fs_info().await {
            Ok(info) => {
                let Some(images) = mount(&info.image_filesystems) else {
                    return tracing::warn!("the runtime reports no image file system: its disk cannot be observed");
                };
                let containers = mount(&info.container_filesystems).unwrap_or_else(|| images.clone());
                self.of_runtime = Some((Disk::new(images), Disk::new(containers)));
            }
            Err(error) => tracing::debug!(%error, "cannot get the image file system from the runtime"),
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
            volumes.map(move |(volume, path)| Folder { uid: uid.clone(), volume, path }).collect::<Vec<_>>()
        };
        pods.into_iter().flat_map(of_pod).collect()
    }

    async fn add_volumes(&mut self, usage: &mut HashMap<PodUid, PodUsage>, folders: Vec<Folder>, now: bool) {
        for (uid, sizes) in self.walks.sizes(folders, now).await {
            if let Some(usage) = usage.get_mut(&uid) {
                usage.volumes = sizes.into_iter().collect();
            }
        }
    }
}

impl<G: Garbage> Observe for ThisNode<G> {
    async fn readings(&mut self) -> Readings {
        let (layout, kubepods) = (self.sources.layout.clone(), self.sources.kubepods.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let of_pods = kubepods.and_then(|path| CgroupPlace::at(&layout, &path).read_memory());
            (Machine::memory(&layout), node::hugepages_in_all(), of_pods, Machine::processes())
        });
        let mut readings = Readings::default();
        if let Ok((machine, hugepages, of_pods, processes)) = reading.await {
            memory(&mut readings, machine, hugepages, of_pods);
            process_ids(&mut readings, processes);
        }
        self.disks(&mut readings).await;
        readings
    }

    async fn usage(&mut self, pods: &[Pod], with_disks: bool) -> Result<HashMap<PodUid, PodUsage>, String> {
        let mut usage = self.sources.stats.pods(with_disks).await.map_err(|error| error.to_string())?;
        if with_disks {
            let folders = self.folders(pods);
            self.add_volumes(&mut usage, folders, true).await;
        }
        Ok(usage)
    }

    async fn limited(&mut self, pods: &[(Pod, Needs)]) -> Result<HashMap<PodUid, PodUsage>, String> {
        let mut usage: HashMap<PodUid, PodUsage> = match pods.iter().any(|(_, needs)| needs.containers) {
            true => self.sources.stats.pods(true).await.map_err(|error| error.to_string())?,
            false => HashMap::new(),
        };
        usage.retain(|uid, _| pods.iter().any(|(pod, _)| pod_ref(pod).uid == *uid));
        for (pod, _) in pods.iter().filter(|(_, needs)| !needs.containers) {
            usage.insert(pod_ref(pod).uid, PodUsage::default());
        }
        let folders = self.folders(pods.iter().map(|(pod, _)| pod));
        self.add_volumes(&mut usage, folders, false).await;
        Ok(usage)
    }

    async fn reclaim(&mut self, what: Reclaim) {
        if what.containers {
            self.sources.garbage.remove_dead_containers().await;
        }
        if what.images {
            self.sources.garbage.remove_unused_images(self.sources.min_image_age).await;
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
fn memory(readings: &mut Readings, machine: MemoryUsage, hugepages: u64, of_pods: Option<MemoryUsage>) {
    if let Some(total) = machine.limit {
        let available = total.saturating_sub(machine.working_set).saturating_sub(hugepages);
        readings.insert(Signal::MemoryAvailable, available, available.saturating_add(machine.working_set));
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
        memory(&mut readings, machine, 100, Some(pods));
        let shown = |signal| (readings.signals[&signal].available, readings.signals[&signal].capacity);
        assert_eq!(shown(Signal::MemoryAvailable), (600, 900));
        assert_eq!(shown(Signal::AllocatableMemoryAvailable), (0, 200));
        let mut unlimited = Readings::default();
        memory(&mut unlimited, machine, 0, Some(MemoryUsage::default()));
        assert!(!unlimited.signals.contains_key(&Signal::AllocatableMemoryAvailable));
        process_ids(&mut unlimited, ProcessCounts { max: Some(100), current: Some(130) });
        assert_eq!(unlimited.signals[&Signal::PidAvailable].available, 0);
    }

    #[test]
    fn file_systems_are_told_apart_by_their_device() {
        let on = |device| FileSystem { usage: DiskUsage::default(), device };
        assert_eq!(layout_of(on(1), on(1), on(1)), DiskLayout::Shared);
        assert_eq!(layout_of(on(1), on(2), on(2)), DiskLayout::Dedicated);
        assert_eq!(layout_of(on(1), on(2), on(1)), DiskLayout::Split);
    }
}
