//! Disk, network and process usage for the full summary.

use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;

use keblet_proto::cri::v1 as cri;

use super::StatsError;
use super::sample::Sample;
use crate::kernel::usage::DiskUsage;
use crate::kernel::usage::InterfaceUsage;
use crate::kernel::usage::Machine;
use crate::kernel::usage::ProcessCounts;
use crate::kernel::usage::interfaces_of;
use crate::kernel::usage::tree_usage;
use crate::model::Clock;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::runtime::Runtime;

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
pub struct Used {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
}

impl std::ops::Add for Used {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, inodes: self.inodes + other.inodes }
    }
}

/// Measured for the full summary.
#[derive(Clone, Debug, Default)]
pub(super) struct Extras {
    /// Nanoseconds since the Unix epoch.
    pub(super) at: i64,
    pub(super) root_fs: DiskUsage,
    /// The file system of images and, with the same numbers, of containers.
    pub(super) image_fs: DiskUsage,
    pub(super) processes: ProcessCounts,
    pub(super) interfaces: Vec<InterfaceUsage>,
    pub(super) pods: HashMap<PodUid, PodExtras>,
    /// Writable layers, by container id.
    pub(super) writable: HashMap<String, Used>,
}

/// Measured for one pod.
#[derive(Clone, Debug, Default)]
pub(super) struct PodExtras {
    pub(super) interfaces: Vec<InterfaceUsage>,
    pub(super) files: PodFiles,
}

/// Files of one pod outside its volumes.
#[derive(Clone, Debug, Default)]
pub(super) struct PodFiles {
    /// Logs by container.
    pub(super) logs: HashMap<String, Used>,
    /// Other files of the pod: in its log folder, and its hosts file.
    pub(super) other: Used,
}

/// Measures, with two calls to the runtime.
pub(super) async fn measure(runtime: &Runtime, folders: &Folders, sample: &Sample) -> Result<Extras, StatsError> {
    let images = runtime.image_fs_info().await.map_err(|error| StatsError::ImageFs(error.rpc_text()))?;
    let writable = writable_layers(runtime).await?;
    let (folders, pods) = (folders.clone(), sample.pods.iter().map(|pod| (pod.pod.clone(), pod.network_of)));
    let pods: Vec<(PodRef, Option<u32>)> = pods.collect();
    let files = tokio::task::spawn_blocking(move || of_files(&folders, images.image_filesystems.first(), &pods)).await;
    let files = files.map_err(|error| StatsError::Stopped(error.to_string()))??;
    Ok(Extras { writable, ..files })
}

/// Writable layers, by container id. One call to the runtime.
pub(super) async fn writable_layers(runtime: &Runtime) -> Result<HashMap<String, Used>, StatsError> {
    let stats = runtime.list_container_stats(cri::ContainerStatsFilter::default()).await;
    let stats = stats.map_err(|error| StatsError::Pods(error.rpc_text()))?;
    let layer = |stats: cri::ContainerStats| Some((stats.attributes?.id, used(&stats.writable_layer?)));
    Ok(stats.into_iter().filter_map(layer).collect())
}

fn used(usage: &cri::FilesystemUsage) -> Used {
    let value = |value: &Option<cri::UInt64Value>| value.as_ref().map_or(0, |value| value.value);
    Used { bytes: value(&usage.used_bytes), inodes: value(&usage.inodes_used) }
}

fn of_files(
    folders: &Folders,
    images: Option<&cri::FilesystemUsage>,
    pods: &[(PodRef, Option<u32>)],
) -> Result<Extras, StatsError> {
    let root_fs = DiskUsage::of(&folders.root)
        .map_err(|error| StatsError::RootFs(format!("cannot read the usage of {}: {error}", folders.root.display())))?;
    let images = images.ok_or_else(|| StatsError::ImageFs("the runtime reports no image file system".to_owned()))?;
    let mount = images.fs_id.as_ref().map(|id| PathBuf::from(&id.mountpoint)).unwrap_or_default();
    let mut image_fs = DiskUsage::of(&mount)
        .map_err(|error| StatsError::ImageFs(format!("cannot read the usage of {}: {error}", mount.display())))?;
    let Used { bytes, inodes } = used(images);
    (image_fs.used, image_fs.inodes_used) = (bytes, inodes);
    Ok(Extras {
        at: Clock::System.wall_nanos(),
        root_fs,
        image_fs,
        processes: Machine::processes(),
        interfaces: interfaces_of(std::process::id()).unwrap_or_default(),
        pods: pods.iter().map(|(pod, process)| (pod.uid.clone(), of_pod(folders, pod, *process))).collect(),
        writable: HashMap::new(),
    })
}

fn of_pod(folders: &Folders, pod: &PodRef, process: Option<u32>) -> PodExtras {
    PodExtras {
        // Fails for a process that has just ended.
        interfaces: process.and_then(|pid| interfaces_of(pid).ok()).unwrap_or_default(),
        files: files_of(folders, pod),
    }
}

/// Logs and other files of a pod. Blocks.
pub(super) fn files_of(folders: &Folders, pod: &PodRef) -> PodFiles {
    let folder = folders.pod_logs.join(pod.log_dir_name());
    let hosts = folders.root.join("pods").join(pod.uid.as_str()).join("etc-hosts");
    let mut files = PodFiles { other: file(&hosts), logs: HashMap::new() };
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let (bytes, inodes) = tree_usage(&entry.path());
            files.logs.insert(entry.file_name().to_string_lossy().into_owned(), Used { bytes, inodes });
        } else {
            files.other = files.other + file(&entry.path());
        }
    }
    files
}

fn file(path: &Path) -> Used {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::symlink_metadata(path).map(|meta| Used { bytes: meta.blocks() * 512, inodes: 1 }).unwrap_or_default()
}
