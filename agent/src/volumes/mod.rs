//! Files of pods on the node: their directories, their volumes, subPaths, hosts and termination message files.
//!
//! [`Volumes`] dispatches to the plugin of each volume (`plugin`). Volumes without a plugin are refused at admission.
//! Nothing here follows a link out of a volume or removes what lies behind a mount point.
//!
//! ```text
//!  <root>/pods/<uid>/volumes/kubernetes.io~empty-dir/<volume>   content, or a tmpfs or hugetlbfs
//!                   /volumes/kubernetes.io~{local-volume,nfs,iscsi,fc}/<persistent volume>   mounts, see `claims`
//!                   /volumes/kubernetes.io~{configmap,secret,downward-api,projected}/<volume>   see `api/atomic.rs`
//!                   /plugins/kubernetes.io~empty-dir/<volume>/ready
//!                   /volumes/<vendor>~<driver>/<volume>   what a FlexVolume driver has mounted, see `flex_volume`
//!                   /volumeDevices/kubernetes.io~{local-volume,iscsi,fc}/<persistent volume>   links, see `block.rs`
//!                   /volume-subpaths/<volume>/<container>/<index>   bind mounts
//!                   /containers/<container>/<8 hex>   termination messages
//!                   /etc-hosts
//!  <root>/plugins/kubernetes.io/{local-volume,iscsi,fc}/...   mounts of devices that pods share, see `global_mounts.rs`
//! ```

mod actual_state;
mod api;
mod attachment;
mod bind_mount;
mod block;
mod claims;
mod disks;
mod empty_dir;
mod error;
mod fc;
mod flex_volume;
mod format;
mod fs_group;
mod global_mounts;
mod host_path;
mod image;
mod in_progress;
mod iscsi;
mod layout;
mod measurable;
mod mount_only;
mod mount_program;
mod nfs;
mod plugin;
mod pod_files;
mod project_quotas;
mod read;
mod resize;
mod set_up;
mod storage_medium;
mod sub_path;
mod teardown;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod unused;
mod uses;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeMount;
use tokio::sync::watch;

pub use api::InvalidPath;
pub use attachment::VolumesInUse;
pub use claims::ClaimError;
pub use claims::ClaimProblem;
pub use error::FailedVolume;
pub use error::Step;
pub use error::VolumeError;
pub use flex_volume::FlexError;
pub use layout::PodDirs;
pub use measurable::MeasurableVolume;
pub use project_quotas::ProjectQuotas;
pub use set_up::RefreshDue;
pub use storage_medium::StorageMediumError;
pub use uses::PodVolumes;

use crate::metrics::Metrics;
use crate::model::Amount;
use crate::objects::Objects;
use crate::recorder::Recorder;
use actual_state::ActualState;
use attachment::Attachment;
use error::OnPath as _;
use in_progress::InProgress;
use plugin::NodeVolumes;
use plugin::Plugins;
use plugin::VolumePlugin;
use plugin::blocking;
use teardown::VolumeOnDisk;
use uses::mounted_volumes;

/// The volumes of all pods below one root directory (`--root-dir`).
#[derive(Clone, Debug)]
pub struct Volumes {
    dirs: PodDirs,
    objects: Objects,
    plugins: Plugins,
    actual: ActualState,
    in_progress: InProgress,
    node: NodeVolumes,
    recorder: Option<Recorder>,
    quotas: Option<ProjectQuotas>,
}

impl Volumes {
    /// Volumes below `root`, without an API server.
    pub fn new(root: &Path) -> Self {
        let (objects, dirs) = (Objects::standalone(), PodDirs::new(root));
        let node = NodeVolumes::new(&dirs);
        let plugins = Plugins::new(&objects, &Arc::default(), &node, None, None);
        Self {
            dirs,
            objects,
            plugins,
            actual: ActualState::default(),
            in_progress: InProgress::default(),
            node,
            recorder: None,
            quotas: None,
        }
    }

    /// Reports attachable volumes in use to the control plane and, if that attaches volumes, uses them once they are
    /// attached. To be called before [`Self::with_objects`].
    pub fn with_attachments(mut self, in_use: watch::Sender<VolumesInUse>, by_control_plane: bool) -> Self {
        let attachment = Attachment::new(in_use, by_control_plane);
        self.node.disks = self.node.disks.with_attachment(attachment.clone());
        self.node.flex_volumes = self.node.flex_volumes.with_attachment(attachment);
        self
    }

    /// Provides FlexVolumes by the drivers in this directory (`volumePluginDir`), which need not exist; calls that attach
    /// have the name of the node. To be called before [`Self::with_objects`].
    pub fn with_flex_volumes(mut self, dir: &Path, node_name: &str) -> Self {
        self.node.flex_volumes = self.node.flex_volumes.with_drivers(dir, node_name);
        self.with_plugins(&Arc::default())
    }

    /// Makes volumes from these objects; `allocatable` is what containers without limits may use of the node.
    pub fn with_objects(mut self, objects: Objects, allocatable: BTreeMap<String, Amount>) -> Self {
        self.objects = objects;
        self.with_plugins(&Arc::new(allocatable))
    }

    /// Has the file system count emptyDirs of pods with a user namespace, where it can. To be called before
    /// [`Self::with_objects`].
    pub fn with_project_quotas(mut self, quotas: ProjectQuotas) -> Self {
        self.quotas = Some(quotas);
        self.with_plugins(&Arc::default())
    }

    fn with_plugins(mut self, allocatable: &Arc<BTreeMap<String, Amount>>) -> Self {
        let (recorder, quotas) = (self.recorder.as_ref(), self.quotas.as_ref());
        self.plugins = Plugins::new(&self.objects, allocatable, &self.node, recorder, quotas);
        self
    }

    /// Records events on pods. To be called before [`Self::with_objects`].
    pub fn with_recorder(mut self, recorder: Recorder) -> Self {
        self.recorder = Some(recorder);
        self
    }

    /// Counts operations in these metrics.
    pub fn with_metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.actual = self.actual.with_metrics(metrics);
        self
    }

    /// Adds the volumes on disk to the actual state. To be called once, before anything is set up. Blocking.
    ///
    /// # Errors
    /// As [`Self::pods_on_disk`].
    pub fn reconstruct(&self) -> Result<(), VolumeError> {
        for uid in self.pods_on_disk()? {
            self.actual.reconstruct(&uid, &self.dirs.pod(&uid)?.join(layout::VOLUMES), &self.plugins);
        }
        if let Some(quotas) = &self.quotas {
            quotas.reconstruct(&self.dirs);
        }
        self.node.flex_volumes.record_in_use()?;
        self.node.disks.report_in_use()
    }

    /// True if the machine swaps and its kernel cannot keep volumes in memory out of that, as kernels before 6.4. Blocking.
    ///
    /// # Errors
    /// The process cannot mount, or there is no directory to try it in.
    pub fn memory_may_be_swapped(&self) -> Result<bool, VolumeError> {
        Ok(api::machine_swaps() && !api::can_avoid_swap(&self.dirs.pods())?)
    }

    /// How many volumes are set up, by plugin (`kubernetes.io/secret`).
    pub fn set_up_by_plugin(&self) -> BTreeMap<&'static str, usize> {
        self.actual.totals()
    }

    /// The plugins of the volumes that a pod mounts, one for each volume, as metrics name them. As upstream, a claim counts
    /// once its persistent volume is known.
    pub fn plugins_wanted(&self, pod: &Pod) -> impl Iterator<Item = Cow<'static, str>> {
        mounted_volumes(pod).filter_map(|volume| match &volume.csi {
            Some(source) => Some(plugin::of_csi(&source.driver)),
            None => self.plugins.of(volume)?.counted_as(uid_of(pod), volume),
        })
    }

    /// Paths of pods' files.
    pub fn dirs(&self) -> &PodDirs {
        &self.dirs
    }

    /// True if a volume cannot be written by containers, whatever its mounts say.
    pub fn is_read_only(&self, of_pod: &PodVolumes<'_>, volume: &str) -> bool {
        self.find(of_pod, volume).is_ok_and(|(plugin, found)| plugin.is_read_only(of_pod.uid(), found))
    }

    /// True if the runtime may relabel the volume's files for a container (SELinux) although the agent did not make them:
    /// those of a local, iSCSI or Fibre Channel volume that may be written, or of one whose FlexVolume driver permits it.
    pub fn is_relabelled(&self, of_pod: &PodVolumes<'_>, volume: &str) -> bool {
        self.find(of_pod, volume).is_ok_and(|(plugin, found)| plugin.is_relabelled(of_pod.uid(), found))
    }

    /// A volume of the pod, and its plugin.
    fn find<'a>(&self, of_pod: &PodVolumes<'a>, volume: &str) -> Result<(&dyn VolumePlugin, &'a Volume), VolumeError> {
        let found = of_pod.get(volume).ok_or_else(|| VolumeError::NoSuchVolume { volume: volume.to_owned() })?;
        let plugin = self.plugins.of(found);
        let plugin = plugin.ok_or_else(|| VolumeError::Unsupported { volume: volume.to_owned() })?;
        Ok((plugin, found))
    }

    /// Groups that the pod's processes join for the sake of its volumes, besides those of its spec: annotation
    /// `pv.beta.kubernetes.io/gid` of the persistent volumes.
    pub fn groups(&self, pod: &Pod) -> BTreeSet<i64> {
        let mounted = mounted_volumes(pod).filter_map(|volume| self.plugins.of(volume)?.group(uid_of(pod), volume));
        let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        let stated = context.and_then(|context| context.supplemental_groups.as_deref()).unwrap_or_default();
        mounted.filter(|group| !stated.contains(group)).collect()
    }

    /// The host path behind one `volumeMounts` entry; `sub_path` is `subPath` or the expanded `subPathExpr`, `index`
    /// the entry's position. With a subPath the volume's part is bind mounted, so that no container can swap it for a link.
    /// The server of the volume may not answer: if the future is dropped, the mount goes on, and [`Self::tear_down`]
    /// waits for it.
    ///
    /// # Errors
    /// There is no such volume; the subPath leads out of it or cannot be mounted.
    pub async fn mount_source(
        &self,
        of_pod: &PodVolumes<'_>,
        container: &str,
        index: usize,
        mount: &VolumeMount,
        sub_path: Option<&str>,
    ) -> Result<PathBuf, VolumeError> {
        let (uid, (plugin, volume)) = (of_pod.uid(), self.find(of_pod, &mount.name)?);
        let path = plugin.mount_path(&self.dirs, uid, volume)?;
        let Some(sub_path) = sub_path.filter(|sub_path| !sub_path.is_empty()) else { return Ok(path) };
        check_sub_path(sub_path)?;
        // By the name of a claim's persistent volume, as a kubelet that takes the node over looks for it.
        let (_, name) = plugin.backing(uid, volume);
        let target = self.dirs.sub_path(uid, &name, container, index)?;
        let (inside, at) = (PathBuf::from(sub_path), target.clone());
        let setting_up = self.in_progress.set_up(uid).await;
        let bind = move || {
            let _setting_up = setting_up;
            Ok(sub_path::bind(&path, &inside, &at))
        };
        let (action, error) = match blocking(bind).await? {
            Ok(()) => return Ok(target),
            Err(sub_path::Failure::Create(error)) => ("create subPath directory", error),
            Err(sub_path::Failure::Prepare(error)) => ("prepare subPath", error),
        };
        tracing::warn!(pod_uid = uid, volume = mount.name, container, sub_path, %error, "cannot {action}");
        Err(VolumeError::SubPath { action, volume: mount.name.clone(), container: container.to_owned() })
    }

    /// The device on the host behind a `volumeDevices` entry, and whether it cannot be written.
    ///
    /// # Errors
    /// There is no such volume, or it is no device.
    pub fn device(&self, of_pod: &PodVolumes<'_>, volume: &str) -> Result<(PathBuf, bool), VolumeError> {
        let (plugin, found) = self.find(of_pod, volume)?;
        let device = plugin.device(&self.dirs, of_pod.uid(), found)?;
        Ok((device, plugin.is_read_only(of_pod.uid(), found)))
    }

    /// Unmounts and deletes the pod's volumes; its other files stay. Content is deleted only where a plugin of this agent
    /// owns it, and never across a mount point; a volume that stays does not keep the others. Set-ups of the pod that only wait
    /// for something give up; one that goes on is waited for, two minutes at most.
    ///
    /// # Errors
    /// The first volume that stays; or a set-up still goes on, and may make what the next call has to tear down.
    pub async fn tear_down(&self, uid: &str) -> Result<(), VolumeError> {
        // A set-up that waits for a server for ever may be what the unmounting ends.
        let alone = tokio::time::timeout(plugin::SET_UP_TIMEOUT, self.in_progress.tear_down(uid)).await;
        self.forget(uid);
        let done = self.tear_down_all(uid).await;
        self.request_unused_search();
        done?;
        // What it still makes is torn down by the next attempt.
        alone.map(drop).map_err(|_| VolumeError::GoesOn(plugin::SET_UP_TIMEOUT))
    }

    async fn tear_down_all(&self, uid: &str) -> Result<(), VolumeError> {
        let (dirs, of_pod) = (self.dirs.clone(), uid.to_owned());
        let Some(found) = blocking(move || teardown::begin(&dirs, &of_pod)).await? else { return Ok(()) };
        // Beside each other: the server of one may not answer.
        let torn_down = join_all(found.volumes.iter().map(|volume| self.tear_down_one(uid, volume))).await;
        let mut all = torn_down.into_iter().fold(found.failed, Result::and);
        all = all.and(block::unmap_all(&self.dirs, uid, &self.actual).await);
        let (dirs, of_pod, plugins) = (self.dirs.clone(), uid.to_owned(), self.plugins.clone());
        let owns =
            move |directory: &str| plugins.of_directory(directory).is_some_and(|(p, _)| p.attributes().owns_content);
        let ended = blocking(move || teardown::end(&dirs, &of_pod, owns)).await;
        all.and(ended)?;
        self.actual.torn_down(uid);
        Ok(())
    }

    async fn tear_down_one(&self, uid: &str, volume: &VolumeOnDisk) -> Result<(), VolumeError> {
        let began = Instant::now();
        let plugin = self.plugins.of_directory(&volume.directory);
        let done = match plugin {
            Some((plugin, _)) => plugin.tear_down(volume).await,
            None => {
                let volume = volume.clone();
                blocking(move || volume.remove_if_empty()).await
            }
        };
        let name = plugin.map(|(_, name)| name);
        self.actual.unmounted(uid, name, &volume.volume(), began.elapsed(), done.is_ok());
        done
    }

    /// Forgets which persistent volumes the pod uses, and when its volumes were requested.
    fn forget(&self, uid: &str) {
        self.actual.forget_requests(uid);
        self.plugins.all().for_each(|plugin| plugin.forget(uid));
        self.node.globals.forget(uid);
    }

    /// True if nothing of the pod's volumes is left, for tests.
    pub fn is_torn_down(&self, uid: &str) -> bool {
        let Ok(pod) = self.dirs.pod(uid) else { return true };
        let is_empty = |dir: PathBuf| std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
        let devices = |plugin: &str| is_empty(pod.join(layout::DEVICES).join(layout::escaped(plugin)));
        !pod.join(layout::SUB_PATHS).exists()
            && is_empty(pod.join(layout::VOLUMES))
            && [claims::LOCAL, iscsi::NAME, fc::NAME].into_iter().all(devices)
    }

    /// UIDs of pods that have a directory.
    ///
    /// # Errors
    /// The directory of all pods cannot be read (a missing one has no pods).
    pub fn pods_on_disk(&self) -> Result<Vec<String>, VolumeError> {
        let dir = self.dirs.pods();
        let entries = match std::fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            result => result.on("list", &dir)?,
        };
        let dirs = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        Ok(dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    /// Removes the directory of a pod that is gone. Content of volumes is not deleted here: a volume that still has some
    /// keeps the directory.
    ///
    /// # Errors
    /// A volume that is not torn down; something that cannot be deleted.
    pub async fn remove_orphan(&self, uid: &str) -> Result<(), VolumeError> {
        let (dirs, uid) = (self.dirs.clone(), uid.to_owned());
        blocking(move || teardown::remove_pod(&dirs, &uid)).await
    }
}

fn uid_of(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    context.and_then(|context| context.fs_group).and_then(|group| u32::try_from(group).ok())
}

/// Whether a `subPath` stays inside its volume.
///
/// # Errors
/// It is absolute, or has a part `..`.
pub fn check_sub_path(sub_path: &str) -> Result<(), VolumeError> {
    if sub_path.starts_with('/') {
        return Err(VolumeError::AbsoluteSubPath(sub_path.to_owned()));
    }
    if sub_path::climbs(Path::new(sub_path)) {
        return Err(VolumeError::ClimbingSubPath(sub_path.to_owned()));
    }
    Ok(())
}
