//! Disk, network and process usage for the full summary.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use keblet_proto::cri::v1 as cri;

use super::StatsError;
use super::StatsSource;
use super::disks::Usages;
use super::files::PodFiles;
use super::sample::PodSample;
use super::sample::Sample;
use super::walks::Sizes;
use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupPlace;
use crate::kernel::usage::DiskUsage;
use crate::kernel::usage::InterfaceUsage;
use crate::kernel::usage::Machine;
use crate::kernel::usage::MeasuredBy;
use crate::kernel::usage::ProcessCounts;
use crate::kernel::usage::interfaces_of;
use crate::model::Clock;
use crate::model::PodUid;
use crate::model::runtime_keys;
use crate::runtime::Runtime;
use crate::volumes::MeasurableVolume;

/// Pods are few if at most one of so many is among them.
const FEW: usize = 4;

/// Folders of the agent.
#[derive(Clone, Debug)]
pub struct Folders {
    /// `--root-dir`.
    pub root: PathBuf,
    /// `podLogsDir`.
    pub pod_logs: PathBuf,
}

/// Bytes and inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsUsage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
}

impl std::ops::Add for FsUsage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(other.bytes), inodes: self.inodes.saturating_add(other.inodes) }
    }
}

/// Measured for the full summary.
#[derive(Clone, Debug, Default)]
pub(super) struct Extras {
    /// Nanoseconds since the Unix epoch.
    pub(super) at: i64,
    pub(super) root_fs: DiskUsage,
    pub(super) image_fs: RuntimeFs,
    /// Where writable layers are, if not on the file system of images.
    pub(super) container_fs: Option<RuntimeFs>,
    pub(super) processes: ProcessCounts,
    pub(super) interfaces: Vec<InterfaceUsage>,
    pub(super) pods: HashMap<PodUid, PodExtras>,
    /// Writable layers, by container id.
    pub(super) writable: HashMap<String, FsUsage>,
}

/// A file system of the runtime.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RuntimeFs {
    /// Its size; `None` if it is not visible to the agent.
    pub(super) disk: Option<DiskUsage>,
    /// What the runtime takes of it.
    pub(super) used: FsUsage,
}

/// The first file systems of images and of writable layers, as the runtime reports them.
pub(super) struct ReportedDisks {
    images: cri::FilesystemUsage,
    containers: Option<cri::FilesystemUsage>,
}

/// Measured for one pod.
#[derive(Clone, Debug, Default)]
pub(super) struct PodExtras {
    pub(super) interfaces: Vec<InterfaceUsage>,
    pub(super) files: PodFiles,
    /// Processes in the containers' cgroups; absent if they are unknown.
    pub(super) processes: Option<u64>,
    /// `None` if volumes are not measured.
    pub(super) volumes: Option<Vec<VolumeUsage>>,
}

/// A measured volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VolumeUsage {
    pub(super) name: String,
    pub(super) claim: Option<String>,
    pub(super) is_local: bool,
    /// The file system that it is on, or its device.
    pub(super) disk: DiskUsage,
    pub(super) used: FsUsage,
}

/// Volumes of pods, and what is known of their usage.
#[derive(Debug, Default)]
pub(super) struct MeasuredVolumes {
    pub(super) all: HashMap<PodUid, Vec<MeasurableVolume>>,
    /// Of those that are walked.
    pub(super) sizes: Sizes,
    /// Of the others.
    pub(super) disks: Usages,
}

/// What was measured before, for the part that reads files.
pub(super) struct PriorMeasurements {
    /// Files of pods outside their volumes.
    pub(super) files: HashMap<PodUid, PodFiles>,
    /// `None` if volumes are not measured.
    pub(super) volumes: Option<MeasuredVolumes>,
    /// The runtime's file systems.
    pub(super) reported: ReportedDisks,
    /// Writable layers, by container id.
    pub(super) writable: HashMap<String, FsUsage>,
}

/// The runtime's file systems. One call.
pub(super) async fn reported_disks(runtime: &Runtime) -> Result<ReportedDisks, StatsError> {
    let info = runtime.image_fs_info().await.map_err(|error| StatsError::ImageFs(error.rpc_text()))?;
    let first = info.image_filesystems.into_iter().next();
    let images = first.ok_or_else(|| StatsError::ImageFs("the runtime reports no image file system".to_owned()))?;
    Ok(ReportedDisks { images, containers: info.container_filesystems.into_iter().next() })
}

/// Writable layers, by container id. One call to the runtime.
pub(super) async fn writable_layers(runtime: &Runtime) -> Result<HashMap<String, FsUsage>, StatsError> {
    layers(runtime, cri::ContainerStatsFilter::default()).await
}

/// Writable layers, by container id, of these pods and perhaps of others; `of_all`: how many pods there are. The runtime
/// also reads the cgroups of every requested container: a few pods are requested one after another.
pub(super) async fn writable_layers_of(
    runtime: &Runtime,
    pods: &[&PodUid],
    of_all: usize,
) -> Result<HashMap<String, FsUsage>, StatsError> {
    if pods.len() * FEW > of_all {
        return writable_layers(runtime).await;
    }
    let mut all = HashMap::new();
    for uid in pods {
        let label_selector = [(runtime_keys::POD_UID.to_owned(), uid.to_string())].into();
        let filter = cri::ContainerStatsFilter { label_selector, ..cri::ContainerStatsFilter::default() };
        all.extend(layers(runtime, filter).await?);
    }
    Ok(all)
}

async fn layers(runtime: &Runtime, filter: cri::ContainerStatsFilter) -> Result<HashMap<String, FsUsage>, StatsError> {
    let stats = runtime.list_container_stats(filter).await;
    let stats = stats.map_err(|error| StatsError::Pods(error.rpc_text()))?;
    let layer = |stats: cri::ContainerStats| Some((stats.attributes?.id, used(&stats.writable_layer?)));
    Ok(stats.into_iter().filter_map(layer).collect())
}

fn used(usage: &cri::FilesystemUsage) -> FsUsage {
    let value = |value: &Option<cri::UInt64Value>| value.as_ref().map_or(0, |value| value.value);
    FsUsage { bytes: value(&usage.used_bytes), inodes: value(&usage.inodes_used) }
}

/// Reads the rest. Blocks.
pub(super) fn measure(
    source: &StatsSource,
    sample: &Sample,
    mut known: PriorMeasurements,
) -> Result<Extras, StatsError> {
    let root = &source.folders.root;
    let root_fs = DiskUsage::of(root)
        .map_err(|error| StatsError::RootFs(format!("cannot read the usage of {}: {error}", root.display())))?;
    let ReportedDisks { images, containers } = &known.reported;
    let image_fs = runtime_fs(images)?;
    let container_fs = containers.as_ref().filter(|containers| is_split(images, containers));
    let container_fs = container_fs.map(runtime_fs).transpose()?;
    let pods = sample.pods.iter().map(|pod| (pod.pod.uid.clone(), of_pod(source, pod, &mut known)));
    let pods = pods.collect();
    Ok(Extras {
        at: Clock::System.wall_nanos(),
        root_fs,
        image_fs,
        container_fs,
        processes: Machine::processes_in(&source.proc),
        interfaces: interfaces_of(&source.proc.join("self")).unwrap_or_default(),
        pods,
        writable: known.writable,
    })
}

/// Writable layers are on another device than images. As upstream, two folders of one device are one file system.
fn is_split(images: &cri::FilesystemUsage, containers: &cri::FilesystemUsage) -> bool {
    let (Some(images), Some(containers)) = (&images.fs_id, &containers.fs_id) else { return false };
    let device = |id: &cri::FilesystemIdentifier| std::fs::metadata(&id.mountpoint).ok().map(|found| found.dev());
    images.mountpoint != containers.mountpoint && device(images) != device(containers)
}

fn runtime_fs(reported: &cri::FilesystemUsage) -> Result<RuntimeFs, StatsError> {
    let mount = reported.fs_id.as_ref().map(|id| PathBuf::from(&id.mountpoint)).unwrap_or_default();
    let disk = match DiskUsage::of(&mount) {
        Ok(disk) => Some(disk),
        // Of a runtime in another mount namespace: upstream leaves the capacity out.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => {
            return Err(StatsError::ImageFs(format!("cannot read the usage of {}: {error}", mount.display())));
        }
    };
    Ok(RuntimeFs { disk, used: used(reported) })
}

fn of_pod(source: &StatsSource, pod: &PodSample, known: &mut PriorMeasurements) -> PodExtras {
    let uid = &pod.pod.uid;
    // Fails for a process that has just ended.
    let interfaces = pod.network_of.and_then(|pid| interfaces_of(&source.proc.join(pid.to_string())).ok());
    PodExtras {
        interfaces: interfaces.unwrap_or_default(),
        files: known.files.remove(uid).unwrap_or_default(),
        processes: processes(&source.layout, pod),
        volumes: known.volumes.as_mut().map(|volumes| volumes.take(uid)),
    }
}

fn processes(layout: &Layout, pod: &PodSample) -> Option<u64> {
    let paths = pod.containers.iter().map(|container| container.measured.path.as_deref());
    paths.map(|path| Some(CgroupPlace::at(layout, path?).processes().len() as u64)).sum()
}

impl MeasuredVolumes {
    /// True if no pod has a volume.
    pub(super) fn is_empty(&self) -> bool {
        self.all.values().all(Vec::is_empty)
    }

    /// Takes the volumes of a pod out: those whose usage is known. Blocks.
    pub(super) fn take(&mut self, uid: &PodUid) -> Vec<VolumeUsage> {
        let (volumes, sizes) = (self.all.remove(uid).unwrap_or_default(), self.sizes.remove(uid).unwrap_or_default());
        volumes.into_iter().filter_map(|volume| volume_usage(volume, &sizes, &self.disks)).collect()
    }
}

fn volume_usage(volume: MeasurableVolume, sizes: &[(String, FsUsage)], disks: &Usages) -> Option<VolumeUsage> {
    let MeasurableVolume { name, path, claim, is_local, by, project: _ } = volume;
    let (disk, used) = match by {
        MeasuredBy::Walk => {
            let used = sizes.iter().find(|(counted, _)| *counted == name)?.1;
            (DiskUsage::of(&path).ok()?, used)
        }
        MeasuredBy::FileSystem | MeasuredBy::Device => {
            let disk = *disks.get(&path)?;
            (disk, FsUsage { bytes: disk.used, inodes: disk.inodes_used })
        }
    };
    Some(VolumeUsage { name, claim, is_local, disk, used })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_volume_that_reports_the_largest_size_hides_nothing_else() {
        let (volume, logs) = (FsUsage { bytes: u64::MAX, inodes: u64::MAX }, FsUsage { bytes: 4096, inodes: 1 });
        assert_eq!(volume + logs, volume);
    }

    #[test]
    fn volumes_that_were_not_measured_or_are_gone_are_absent() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, path: &Path, by| MeasurableVolume {
            name: name.to_owned(),
            path: path.to_owned(),
            claim: Some("claim".to_owned()),
            is_local: false,
            by,
            project: None,
        };
        let used = FsUsage { bytes: 7, inodes: 1 };
        let sizes = vec![("data".to_owned(), used), ("gone".to_owned(), used)];
        let disk = DiskUsage { capacity: 9, used: 5, inodes_used: 3, ..DiskUsage::default() };
        let walked = |name: &str, path: &Path| at(name, path, MeasuredBy::Walk);
        let all = vec![
            walked("data", dir.path()),
            walked("gone", &dir.path().join("none")),
            walked("new", dir.path()),
            at("export", Path::new("/export"), MeasuredBy::FileSystem),
            at("silent", Path::new("/silent"), MeasuredBy::FileSystem),
        ];
        let mut volumes = MeasuredVolumes {
            all: [("uid".into(), all)].into(),
            sizes: [("uid".into(), sizes)].into(),
            disks: [("/export".into(), disk)].into(),
        };
        assert!(!volumes.is_empty());
        let found = volumes.take(&"uid".into());
        let [data, export] = &found[..] else { panic!("{found:?}") };
        assert_eq!((data.name.as_str(), data.used, data.claim.as_deref()), ("data", used, Some("claim")));
        assert!(data.disk.capacity > 0);
        assert_eq!((export.name.as_str(), export.disk), ("export", disk));
        assert_eq!(export.used, FsUsage { bytes: 5, inodes: 3 });
        assert!(volumes.is_empty());
    }

    fn on(mountpoint: impl Into<String>) -> cri::FilesystemUsage {
        cri::FilesystemUsage {
            fs_id: Some(cri::FilesystemIdentifier { mountpoint: mountpoint.into() }),
            used_bytes: Some(cri::UInt64Value { value: 5 }),
            ..Default::default()
        }
    }

    #[test]
    fn an_invisible_image_file_system_has_no_size() {
        let found = runtime_fs(&on("/no/such/folder")).unwrap();
        assert_eq!((found.disk, found.used.bytes), (None, 5));
        assert!(runtime_fs(&on("/")).unwrap().disk.is_some());
    }

    #[test]
    fn file_systems_of_the_runtime_are_split_by_their_device() {
        assert!(is_split(&on("/"), &on("/proc")));
        assert!(!is_split(&on("/"), &on("/")));
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("images")).unwrap();
        let path = |path: &Path| path.to_string_lossy().into_owned();
        assert!(!is_split(&on(path(&dir.path().join("images"))), &on(path(dir.path()))), "folders of one device");
        assert!(!is_split(&on("/no/such"), &on("/no/such/folder")), "both are invisible");
        assert!(!is_split(&on("/"), &cri::FilesystemUsage::default()), "the place is unknown");
    }
}
