//! Volumes of claims: `persistentVolumeClaim` and generic `ephemeral` volumes, bound to `hostPath`, `local`, `nfs`, `iscsi`,
//! `fc` and `flexVolume` volumes.
//!
//! ```text
//!  claim ─▶ bound? ─▶ persistent volume ─▶ of this claim? ─▶ node affinity ─▶ hostPath: its path
//!  (GET)                  (GET)                                             ├▶ local: bind mount, fsGroup
//!                                                                           ├▶ nfs: mount(8)
//!                                                                           ├▶ iscsi, fc: see `disks`
//!                                                                           ├▶ flexVolume: see `flex_volume`
//!                                                                           └▶ local, iscsi, fc, raw block: see `block`
//! ```
//!
//! CSI and other sources are refused.

mod bound;
mod bound_volumes;
mod exclusive;
mod expand;
mod expansion;
mod local;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::Volume;

pub use bound::ClaimError;
pub use bound::ClaimProblem;

pub(super) use bound_volumes::BoundVolumes;
pub(super) use local::places;
pub(super) use local::release;

use super::PodDirs;
use super::VolumeError;
use super::block::BlockMap;
use super::disks;
use super::disks::DiskSource;
use super::disks::Disks;
use super::error::Step;
use super::flex_volume;
use super::flex_volume::FlexSource;
use super::flex_volume::FlexVolumes;
use super::fs_group;
use super::fs_group::ChangePolicy;
use super::global_mounts::GlobalMounts;
use super::host_path;
use super::layout;
use super::nfs;
use super::plugin;
use super::plugin::Attributes;
use super::plugin::NodeVolumes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;
use crate::host_program::HostPrograms;
use crate::kernel::usage::MeasuredBy;
use crate::model::node_selector;
use crate::objects::Objects;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use bound::ClaimSource;
use bound::Uses;
use bound_volumes::BoundVolume;
use bound_volumes::Source;
use expand::ClaimedVolume;
use expansion::Need;
use local::LocalMount;

/// Plugin of local volumes, by which their directories are named.
pub(super) const LOCAL: &str = "kubernetes.io/local-volume";

/// `kubernetes.io/persistent-claim`.
#[derive(Debug)]
pub(super) struct Claims {
    objects: Objects,
    known: BoundVolumes,
    globals: GlobalMounts,
    disks: Disks,
    flex_volumes: FlexVolumes,
    checks: host_path::Checks,
    recorder: Option<Recorder>,
}

impl Claims {
    pub(super) fn new(objects: Objects, node: NodeVolumes, recorder: Option<Recorder>) -> Self {
        let NodeVolumes { claims, globals, disks, flex_volumes } = node;
        let checks = host_path::Checks::default();
        Self { objects, known: claims, globals, disks, flex_volumes, checks, recorder }
    }

    /// What the volume is: as recorded, or read from the API server and checked.
    async fn resolve(&self, target: Target<'_>) -> Result<Arc<BoundVolume>, VolumeError> {
        if let Some(used) = self.known.get(target.uid, &target.volume.name) {
            return Ok(used);
        }
        let wanted = ClaimSource::of(target.pod, target.volume);
        let wanted = wanted.ok_or_else(|| VolumeError::Unsupported { volume: target.volume.name.clone() })?;
        let (claim, volume) = self.read(target, &wanted).await.map_err(|problem| ClaimError {
            namespace: target.pod.metadata.namespace.clone().unwrap_or_default(),
            claim: wanted.claim.clone(),
            problem,
        })?;
        let name = volume.metadata.name.clone().unwrap_or_default();
        let source = Source::of(&volume);
        let affinity = match bound::is_block(&volume) {
            true => Step::MapAffinity,
            false => Step::MountAffinity(source.plugin().unwrap_or_else(|| self.name())),
        };
        self.check_affinity(&volume).map_err(|error| error.in_step(&name, affinity))?;
        let is_directory = match &source {
            Source::Local(source) => local::is_directory(source).await,
            _ => false,
        };
        let used = BoundVolume {
            name: name.clone(),
            uid: volume.metadata.uid.clone(),
            source,
            is_directory,
            is_block: bound::is_block(&volume),
            read_only: wanted.read_only,
            is_exclusive: bound::is_exclusive(&volume),
            options: bound_volumes::options(&volume),
            gid: bound_volumes::gid(&volume),
            is_larger: expansion::need(&claim, &volume, wanted.read_only) != Need::Nothing,
        };
        let step = if used.is_block { Step::Map("SetUpDevice") } else { Step::Mount("SetUp") };
        self.remember(target, used).await.map_err(|error| error.in_step(&name, step))
    }

    /// Records what the volume is, unless only one pod may use it and another one does.
    async fn remember(&self, target: Target<'_>, used: BoundVolume) -> Result<Arc<BoundVolume>, VolumeError> {
        let plugin = used.source.plugin().unwrap_or_else(|| self.name());
        if used.is_exclusive {
            let (dirs, uid, wanted) = (target.dirs.clone(), target.uid.to_owned(), used.clone());
            if blocking(move || exclusive::is_in_use(&dirs, &uid, &wanted)).await? {
                return Err(VolumeError::InUse(plugin));
            }
        }
        self.known.put(target.uid, &target.volume.name, used).ok_or(VolumeError::InUse(plugin))
    }

    /// The claim and its persistent volume.
    async fn read(
        &self,
        target: Target<'_>,
        wanted: &ClaimSource,
    ) -> Result<(PersistentVolumeClaim, PersistentVolume), ClaimProblem> {
        let namespace = target.pod.metadata.namespace.as_deref().unwrap_or_default();
        let claim =
            self.objects.persistent_volume_claim(namespace, &wanted.claim).await.map_err(ClaimProblem::Unreadable)?;
        let name = bound::volume_of(&claim, wanted, target.pod)?;
        let volume = self.objects.persistent_volume(name).await;
        let unreadable = |error| ClaimProblem::UnreadableVolume { name: name.to_owned(), error };
        let volume = volume.map_err(unreadable)?;
        let (mounted, as_device) = target.uses.of_volume(&target.volume.name);
        bound::check_volume(&volume, &claim, target.volume, Uses { mounted, as_device })?;
        Ok((claim, volume))
    }

    fn check_affinity(&self, volume: &PersistentVolume) -> Result<(), VolumeError> {
        let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
        let Some(required) = affinity.and_then(|affinity| affinity.required.as_ref()) else { return Ok(()) };
        let node = self.objects.node().ok_or(VolumeError::NodeUnknown)?;
        let labels = node.metadata.labels.clone().unwrap_or_default();
        let name = node.metadata.name.as_deref().unwrap_or_default();
        if node_selector::matches(required, name, &labels) { Ok(()) } else { Err(VolumeError::NodeAffinity) }
    }

    /// Maps the device of a raw block volume.
    async fn map(&self, target: Target<'_>, used: &BoundVolume) -> Result<(), VolumeError> {
        let failed = |error: VolumeError| error.in_step(&used.name, Step::Map("MapPodDevice"));
        let mapped = match &used.source {
            Source::Local(source) => {
                let map = BlockMap::local(target.dirs, target.uid, &used.name).map_err(failed)?;
                map.map(&Path::new("/").join(&source.path)).await.map_err(failed)?.then_some(map)
            }
            Source::Disk(source) => self.disks.map(self.disk(target, used, source)).await?,
            _ => return Err(failed(VolumeError::Unsupported { volume: target.volume.name.clone() })),
        };
        let (Some(map), Some(recorder)) = (mapped, &self.recorder) else { return Ok(()) };
        for (place, path) in [("globalMapPath", map.global.parent()), ("volumeMapPath", map.link.parent())] {
            let path = path.unwrap_or(Path::new("")).to_string_lossy();
            let message = format!("MapVolume.MapPodDevice succeeded for volume {:?} {place} {path:?}", used.name);
            recorder.pod_event(target.pod, "", EventType::Normal, "SuccessfulMountVolume", &message);
        }
        Ok(())
    }

    /// Reports, on the persistent volume itself, that its device holds another file system than it states.
    fn report_format(&self, used: &BoundVolume, error: &VolumeError) {
        let VolumeError::Step { source, .. } = error else { return };
        let (VolumeError::OtherFormat { .. }, Some(recorder)) = (&**source, &self.recorder) else { return };
        let volume = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolume".to_owned()),
            name: Some(used.name.clone()),
            uid: used.uid.clone(),
            ..ObjectReference::default()
        };
        let message = format!("MountVolume failed for volume {:?} {source}", used.name);
        recorder.event(volume, EventType::Warning, "FailedMountOnFilesystemMismatch", &message, BTreeMap::new());
    }

    fn disk<'a>(&'a self, target: Target<'a>, used: &'a BoundVolume, source: &'a DiskSource) -> disks::Use<'a> {
        disks::Use {
            target,
            volume: &used.name,
            source,
            read_only: used.read_only,
            options: &used.options,
            objects: &self.objects,
        }
    }

    fn flex_volume<'a>(
        &'a self,
        target: Target<'a>,
        used: &'a BoundVolume,
        source: &'a FlexSource,
    ) -> flex_volume::Use<'a> {
        flex_volume::Use { target, volume: &used.name, source, read_only: used.read_only, objects: &self.objects }
    }

    /// True if this agent expands the volume when its capacity grows, as upstream's plugins: FlexVolume drivers state it.
    fn is_expandable(&self, used: &BoundVolume) -> bool {
        match &used.source {
            Source::Local(_) => true,
            Source::Flex(source) => self.flex_volumes.is_expandable(&source.driver),
            _ => false,
        }
    }

    /// Expands a volume to its capacity if the claim has less. `is_new`: it was just mounted for the pod.
    async fn expand(&self, target: Target<'_>, used: &Arc<BoundVolume>, is_new: bool) -> Result<(), VolumeError> {
        let Some(wanted) = ClaimSource::of(target.pod, target.volume) else { return Ok(()) };
        let place = match &used.source {
            Source::Flex(source) => self.flex_volumes.place(&source.driver, &used.name),
            _ => local::place(target.dirs, &used.name),
        };
        let volume = ClaimedVolume {
            objects: self.objects.clone(),
            recorder: self.recorder.clone(),
            flex_volumes: self.flex_volumes.clone(),
            pod: target.pod.clone(),
            claim: wanted.claim,
            used: used.clone(),
            place: place.clone(),
            is_new,
        };
        // For one pod after another: the first one expands it for all. A teardown does not wait for that, except for a driver
        // of FlexVolumes, nor for the API server: the device is not released before it has ended.
        let work = self.globals.carry_out(&place, async move { Box::pin(volume.expand(&HostPrograms)).await });
        let work = target.unless_over(work);
        let plugin = used.source.plugin().unwrap_or(LOCAL);
        let done = match is_new {
            true => work.await.map(|_| ()),
            false => target.actual.timed("volume_fs_resize", plugin, work).await,
        };
        done.map_err(|error| error.in_step(&used.name, expanding(used, is_new)))
    }

    async fn mount(&self, target: Target<'_>, used: &BoundVolume) -> Result<(), VolumeError> {
        if used.is_block {
            return self.map(target, used).await;
        }
        match &used.source {
            Source::HostPath(_) | Source::Flex(_) if !used.options.is_empty() => {
                Err(failed(&used.name, "MountOptionSupport check", VolumeError::MountOptions))
            }
            Source::HostPath(source) => {
                let checked = target.unless_over(self.checks.run(source)).await;
                checked.map_err(|error| failed(&used.name, "SetUp", error))
            }
            Source::Local(source) => {
                let mount = LocalMount {
                    name: used.name.clone(),
                    source: Path::new("/").join(&source.path),
                    kind: source.fs_type.clone().unwrap_or_default(),
                    target: target.dirs.volume(target.uid, &layout::escaped(LOCAL), &used.name)?,
                    read_only: used.read_only,
                    options: used.options.clone(),
                    group: target.fs_group.map(|group| (group, ChangePolicy::of_pod(target.pod))),
                };
                let notify = fs_group::notices(self.recorder.as_ref(), target.pod);
                mount.run(target, &self.globals, notify).await
            }
            Source::Disk(source) => self.disks.mount(self.disk(target, used, source)).await,
            Source::Nfs(source) => {
                let dir = target.dirs.volume(target.uid, &layout::escaped(nfs::NAME), &used.name)?;
                let mounted = nfs::mount(source, used.read_only, &used.options, &dir, target.over).await;
                mounted.map_err(|error| failed(&used.name, "SetUp", error))
            }
            Source::Flex(source) => self.flex_volumes.mount(self.flex_volume(target, used, source)).await,
            Source::Csi(driver) => {
                let error = VolumeError::CsiDriver { driver: driver.clone() };
                Err(failed(&used.name, "MountDevice", error))
            }
            Source::Other => {
                Err(failed(&used.name, "SetUp", VolumeError::Unsupported { volume: target.volume.name.clone() }))
            }
        }
    }
}

/// The step that an expansion is. `is_new`: the volume was just mounted for the pod.
fn expanding(used: &BoundVolume, is_new: bool) -> Step {
    match (is_new, used.is_block) {
        (true, false) => Step::MountExpanded,
        (true, true) => Step::MapExpanded,
        (false, _) => Step::Expand,
    }
}

/// The error of a step on a persistent volume.
fn failed(name: &str, step: &'static str, error: VolumeError) -> VolumeError {
    error.in_step(name, Step::Mount(step))
}

impl VolumePlugin for Claims {
    fn name(&self) -> &'static str {
        "kubernetes.io/persistent-claim"
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some()
    }

    fn backing(&self, uid: &str, volume: &Volume) -> (&'static str, String) {
        let Some(used) = self.known.get(uid, &volume.name) else { return (self.name(), volume.name.clone()) };
        (used.source.plugin().unwrap_or_else(|| self.name()), used.name.clone())
    }

    fn counted_as(&self, uid: &str, volume: &Volume) -> Option<Cow<'static, str>> {
        match &self.known.get(uid, &volume.name)?.source {
            Source::Csi(driver) => Some(plugin::of_csi(driver)),
            source => source.plugin().map(Cow::Borrowed),
        }
    }

    fn attributes(&self) -> Attributes {
        Attributes { fs_group: true, ..Attributes::default() }
    }

    /// As upstream, the use of the claim decides, not the source of its persistent volume.
    fn is_read_only(&self, uid: &str, volume: &Volume) -> bool {
        self.known.get(uid, &volume.name).is_some_and(|used| used.read_only)
    }

    /// As upstream, not if the pod only reads it. A directory in use needs no expansion: its claim gets the new capacity
    /// when the next pod starts with it, and is not read until then.
    fn can_grow(&self, uid: &str, volume: &Volume) -> bool {
        let grows = |used: Arc<BoundVolume>| self.is_expandable(&used) && !used.is_directory && !used.read_only;
        self.known.get(uid, &volume.name).is_some_and(grows)
    }

    fn is_of_host(&self, uid: &str, volume: &Volume) -> bool {
        self.known.get(uid, &volume.name).is_some_and(|used| matches!(used.source, Source::HostPath(_)))
    }

    fn measured_by(&self, uid: &str, volume: &Volume) -> Option<MeasuredBy> {
        let used = self.known.get(uid, &volume.name)?;
        match used.source {
            Source::Local(_) | Source::Disk(_) if used.is_block => Some(MeasuredBy::Device),
            Source::Local(_) | Source::Disk(_) | Source::Nfs(_) => Some(MeasuredBy::FileSystem),
            Source::Flex(ref source) => self.flex_volumes.measured_by(&source.driver),
            // The content of a path of the host does not count for the claim.
            Source::HostPath(_) | Source::Csi(_) | Source::Other => None,
        }
    }

    fn is_relabelled(&self, uid: &str, volume: &Volume) -> bool {
        self.known.get(uid, &volume.name).is_some_and(|used| match &used.source {
            // Files behind a read-only mount cannot be changed.
            Source::Local(_) | Source::Disk(_) => !used.read_only,
            Source::Flex(source) => !used.read_only && self.flex_volumes.is_relabelled(&source.driver),
            _ => false,
        })
    }

    fn group(&self, uid: &str, volume: &Volume) -> Option<i64> {
        self.known.get(uid, &volume.name)?.gid
    }

    fn device(&self, dirs: &PodDirs, uid: &str, volume: &Volume) -> Result<PathBuf, VolumeError> {
        let used = self.known.get(uid, &volume.name).filter(|used| used.is_block);
        let used = used.ok_or_else(|| VolumeError::NotSetUp { volume: volume.name.clone() })?;
        let plugin = if let Source::Disk(source) = &used.source { source.plugin() } else { LOCAL };
        dirs.device(uid, &layout::escaped(plugin), &used.name)
    }

    fn mount_path(&self, dirs: &PodDirs, uid: &str, volume: &Volume) -> Result<PathBuf, VolumeError> {
        let used = self.known.get(uid, &volume.name);
        let used = used.ok_or_else(|| VolumeError::NotSetUp { volume: volume.name.clone() })?;
        match &used.source {
            Source::HostPath(source) => Ok(PathBuf::from(&source.path)),
            Source::Local(_) => dirs.volume(uid, &layout::escaped(LOCAL), &used.name),
            Source::Nfs(_) => dirs.volume(uid, &layout::escaped(nfs::NAME), &used.name),
            Source::Disk(source) => dirs.volume(uid, &layout::escaped(source.plugin()), &used.name),
            Source::Flex(source) => self.flex_volumes.mount_path(uid, &source.driver, &used.name),
            Source::Csi(_) | Source::Other => Err(VolumeError::Unsupported { volume: volume.name.clone() }),
        }
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async move {
            let used = target.unless_over(self.resolve(target)).await?;
            let is_new = !target.actual.is_set_up(target.uid, &self.backing(target.uid, target.volume));
            if is_new || !target.is_refresh {
                let mounted = self.mount(target, &used).await;
                mounted.inspect_err(|error| self.report_format(&used, error))?;
            }
            let is_due = if is_new { used.is_larger } else { target.is_refresh };
            if is_due && self.is_expandable(&used) {
                Box::pin(self.expand(target, &used, is_new)).await?;
            }
            Ok(Ready::default())
        })
    }

    /// Directories of claims are those of the plugins that their volumes have.
    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let volume = volume.clone();
        Box::pin(blocking(move || volume.remove_if_empty()))
    }

    fn forget(&self, uid: &str) {
        self.known.forget(uid);
    }
}
