//! What a kind of volume provides, and which plugin provides a volume.
//!
//! Upstream has the same split: `pkg/volume/plugins.go` (plugins) and `pkg/kubelet/volumemanager` (what is set up when).
//! A plugin implements its kind of volume; when volumes are set up, refreshed and torn down is decided outside.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;
use tokio_util::sync::CancellationToken;

use super::PodDirs;
use super::VolumeError;
use super::actual_state::ActualState;
use super::api;
use super::claims::BoundVolumes;
use super::claims::Claims;
use super::disks;
use super::disks::DiskVolumes;
use super::disks::Disks;
use super::empty_dir::EmptyDir;
use super::flex_volume::FlexVolume;
use super::flex_volume::FlexVolumes;
use super::global_mounts::GlobalMounts;
use super::host_path::HostPath;
use super::image::Image;
use super::layout;
use super::mount_only::MountOnly;
use super::nfs::Nfs;
use super::project_quotas::ProjectQuotas;
use super::teardown::VolumeOnDisk;
use super::uses::ContainerUses;
use crate::kernel::usage::MeasuredBy;
use crate::model::Amount;
use crate::objects::Objects;
use crate::recorder::Recorder;

/// How long a pod waits for a volume in one attempt, as upstream (`podAttachAndMountTimeout`).
pub(super) const SET_UP_TIMEOUT: Duration = Duration::from_secs(123);

/// One kind of volume.
pub(super) trait VolumePlugin: Debug + Send + Sync {
    /// The name in specs of metrics, `kubernetes.io/secret`. With `~` for `/` it names the plugin's directory in the
    /// `volumes` of a pod.
    fn name(&self) -> &'static str;

    /// The name of the plugin whose directory in the `volumes` of a pod this is, if it is one of this plugin: of a
    /// FlexVolume that of its driver.
    fn name_of_directory(&self, directory: &str) -> Option<&'static str> {
        (layout::escaped(self.name()) == directory).then(|| self.name())
    }

    /// True if the volume is of this kind.
    fn supports(&self, volume: &Volume) -> bool;

    /// The plugin and the name of the volume behind a pod's volume, which name its directory: for a claim those of its
    /// persistent volume, once that is known.
    fn backing(&self, _uid: &str, volume: &Volume) -> (&'static str, String) {
        (self.name(), volume.name.clone())
    }

    /// The plugin behind a pod's volume as metrics name it; `None` if that is not known yet.
    fn counted_as(&self, uid: &str, volume: &Volume) -> Option<Cow<'static, str>> {
        Some(Cow::Borrowed(self.backing(uid, volume).0))
    }

    /// What holds for all volumes of this kind.
    fn attributes(&self) -> Attributes;

    /// The directory or file on the host that containers mount.
    ///
    /// # Errors
    /// A name that is no file name.
    fn mount_path(&self, dirs: &PodDirs, uid: &str, volume: &Volume) -> Result<PathBuf, VolumeError> {
        dirs.volume(uid, &layout::escaped(self.name()), &volume.name)
    }

    /// The device on the host that containers get of a raw block volume. It is set up.
    ///
    /// # Errors
    /// The volume is no device.
    fn device(&self, _dirs: &PodDirs, _uid: &str, volume: &Volume) -> Result<PathBuf, VolumeError> {
        Err(VolumeError::Unsupported { volume: volume.name.clone() })
    }

    /// True if containers cannot write the volume, whatever their mounts say. It is set up.
    fn is_read_only(&self, _uid: &str, _volume: &Volume) -> bool {
        self.attributes().read_only
    }

    /// How the size of the volume is measured, where it is set up; `None` if it is not.
    fn measured_by(&self, _uid: &str, _volume: &Volume) -> Option<MeasuredBy> {
        self.attributes().owns_content.then_some(MeasuredBy::Walk)
    }

    /// True if the runtime may relabel files for a container (SELinux) that the agent did not make. The volume is set up.
    fn is_relabelled(&self, _uid: &str, _volume: &Volume) -> bool {
        false
    }

    /// True if the volume is what the host has: it is checked once, not again when a container restarts.
    fn is_of_host(&self, _uid: &str, _volume: &Volume) -> bool {
        false
    }

    /// True if the capacity of the volume may grow while it is set up: it is refreshed from time to time, which expands it
    /// and does nothing else, beside other set-ups of it.
    fn can_grow(&self, _uid: &str, _volume: &Volume) -> bool {
        false
    }

    /// A group that the pod's processes join for the sake of the volume. It is set up.
    fn group(&self, _uid: &str, _volume: &Volume) -> Option<i64> {
        None
    }

    /// Makes the volume available, or brings it up to date if [`Attributes::refreshes`]; one that is there stays. A future
    /// that is dropped may leave a part of the work done, which the next call completes. What is only waited for is given up
    /// when the pod is over ([`Target::unless_over`]).
    ///
    /// # Errors
    /// The volume cannot be set up, or keeps its old content.
    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>>;

    /// Unmounts and removes a volume that this agent, its predecessor or another kubelet has set up. The pod's spec may
    /// be unknown.
    ///
    /// # Errors
    /// Something of the volume stays.
    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>>;

    /// The pod is over: removes what is kept of its volumes.
    fn forget(&self, _uid: &str) {}
}

/// Volumes of a CSI driver as metrics name them.
pub(super) fn of_csi(driver: &str) -> Cow<'static, str> {
    Cow::Owned(format!("kubernetes.io/csi:{driver}"))
}

/// What holds for all volumes of a plugin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Attributes {
    /// Containers cannot write them, whatever their mounts say.
    pub(super) read_only: bool,
    /// Their files are given to the pod's `fsGroup`.
    pub(super) fs_group: bool,
    /// Their content follows the objects they are made from: they are set up again when those change.
    pub(super) refreshes: bool,
    /// Their content is the agent's, and deleted with the volume.
    pub(super) owns_content: bool,
}

/// A volume that is to be set up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'a> {
    pub(super) dirs: &'a PodDirs,
    /// Where the steps of the set-up are counted.
    pub(super) actual: &'a ActualState,
    pub(super) pod: &'a Pod,
    pub(super) uid: &'a str,
    pub(super) volume: &'a Volume,
    /// How the pod's containers use its volumes.
    pub(super) uses: &'a ContainerUses,
    /// The pod's `fsGroup`, if the plugin applies it.
    pub(super) fs_group: Option<u32>,
    /// Bytes that a volume in memory may take; `None`: as many as the kernel allows.
    pub(super) memory: Option<i64>,
    /// It is brought up to date, and no container waits for it.
    pub(super) is_refresh: bool,
    /// Cancelled when the pod's volumes are to be torn down.
    pub(super) over: &'a CancellationToken,
}

impl Target<'_> {
    /// As [`unless_over`].
    pub(super) async fn unless_over<T>(
        self,
        waiting: impl Future<Output = Result<T, VolumeError>>,
    ) -> Result<T, VolumeError> {
        unless_over(self.over, waiting).await
    }
}

/// Waits for what can be given up at any moment, since it leaves nothing that a teardown would miss.
///
/// # Errors
/// Those of `waiting`; the pod is over.
pub(super) async fn unless_over<T>(
    over: &CancellationToken,
    waiting: impl Future<Output = Result<T, VolumeError>>,
) -> Result<T, VolumeError> {
    over.run_until_cancelled(waiting).await.unwrap_or(Err(VolumeError::GivenUp))
}

/// A volume that is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Ready {
    /// When it is to be refreshed at the latest.
    pub(super) refresh_at: Option<SystemTime>,
}

/// The plugins of this agent.
#[derive(Clone, Debug)]
pub(super) struct Plugins(Arc<[Box<dyn VolumePlugin>]>);

/// State of the plugins, of all volumes of the node. It outlives them: they are made again with other objects.
#[derive(Clone, Debug)]
pub(super) struct NodeVolumes {
    /// The persistent volumes of pods.
    pub(super) claims: BoundVolumes,
    pub(super) globals: GlobalMounts,
    pub(super) disks: Disks,
    pub(super) flex_volumes: FlexVolumes,
}

impl NodeVolumes {
    pub(super) fn new(dirs: &PodDirs) -> Self {
        let globals = GlobalMounts::new(dirs.clone());
        let disks = Disks::new(dirs.clone(), globals.clone());
        let flex_volumes = FlexVolumes::new(dirs.clone(), globals.clone());
        Self { claims: BoundVolumes::default(), globals, disks, flex_volumes }
    }
}

impl Plugins {
    /// All plugins. Volumes are made from these objects; `allocatable` is what containers without limits may use; events on
    /// pods go to `recorder`; `quotas` give projects to volumes.
    pub(super) fn new(
        objects: &Objects,
        allocatable: &Arc<BTreeMap<String, Amount>>,
        node: &NodeVolumes,
        recorder: Option<&Recorder>,
        quotas: Option<&ProjectQuotas>,
    ) -> Self {
        let of_disks = |kind| DiskVolumes::new(kind, node.disks.clone(), objects.clone());
        let of_disks = disks::Kind::ALL.map(of_disks);
        let flex_volume = FlexVolume::new(node.flex_volumes.clone(), objects.clone());
        let claims = Claims::new(objects.clone(), node.clone(), recorder.cloned());
        let mut all: Vec<Box<dyn VolumePlugin>> = vec![
            Box::new(EmptyDir { quotas: quotas.cloned() }),
            Box::new(HostPath::default()),
            Box::new(Image),
            Box::new(Nfs::default()),
            Box::new(flex_volume),
            Box::new(claims),
        ];
        all.extend(of_disks.map(|plugin| Box::new(plugin) as Box<dyn VolumePlugin>));
        for kind in api::Kind::ALL {
            let (objects, allocatable) = (objects.clone(), allocatable.clone());
            all.push(Box::new(api::ObjectVolumes::new(kind, objects, allocatable, recorder.cloned())));
        }
        all.extend(MountOnly::all().map(|plugin| Box::new(plugin) as Box<dyn VolumePlugin>));
        Self(all.into())
    }

    /// This plugin alone.
    #[cfg(test)]
    pub(super) fn only(plugin: impl VolumePlugin + 'static) -> Self {
        Self(vec![Box::new(plugin) as Box<dyn VolumePlugin>].into())
    }

    /// The plugin that provides a volume.
    pub(super) fn of(&self, volume: &Volume) -> Option<&dyn VolumePlugin> {
        self.0.iter().find(|plugin| plugin.supports(volume)).map(|plugin| &**plugin)
    }

    /// All plugins.
    pub(super) fn all(&self) -> impl Iterator<Item = &dyn VolumePlugin> {
        self.0.iter().map(|plugin| &**plugin)
    }

    /// The plugin of a directory in a pod's `volumes`, and its name as of this directory.
    pub(super) fn of_directory(&self, directory: &str) -> Option<(&dyn VolumePlugin, &'static str)> {
        self.0.iter().find_map(|plugin| Some((&**plugin, plugin.name_of_directory(directory)?)))
    }
}

/// Runs work that may block on a thread for that.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(VolumeError::Interrupted(error.to_string())))
}
