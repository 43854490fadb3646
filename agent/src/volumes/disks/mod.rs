//! Disks that are attached to the node, iSCSI and Fibre Channel: named by the pod itself or by a persistent volume.
//!
//! ```text
//!  source ─▶ disk ─▶ attached by the control plane? ─▶ attach ─▶ format, mount ─▶ bind mount for the pod
//!         (checked)        (see `attachment`)     (`iscsi`, `fc`)  (one for the node)  └▶ raw block: see `block`
//!
//!  the last pod's mount is gone ─▶ unmount ─▶ detach     (`Disks::release`)
//! ```
//!
//! Places and records are a kubelet's, so that either can detach what the other has attached.

mod host;
mod kind;
mod plugin;
mod release;
mod remove;
#[cfg(test)]
pub(super) mod testing;

use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use super::PodDirs;
use super::VolumeError;
use super::attachment;
use super::attachment::Attachment;
use super::bind_mount;
use super::block::BlockMap;
use super::error::Step;
use super::format::DeviceMount;
use super::fs_group;
use super::global_mounts::GlobalMounts;
use super::global_mounts::Locks;
use super::iscsi::Chap;
use super::layout;
use super::plugin::Target;
use super::plugin::blocking;
use crate::filesystem;
use crate::host_program::HostPrograms;
use crate::host_program::Programs;
use crate::objects::Objects;
use crate::recorder::EventType;
use kind::Disk;

pub(super) use host::Host;
pub(super) use host::names;
pub(super) use host::text;
pub(super) use kind::DiskSource;
pub(super) use kind::Kind;
pub(super) use plugin::DiskVolumes;
pub(super) use remove::delete_unused;
pub(super) use remove::flush_multipath;
pub(super) use remove::mounts;

/// The disks of the node. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Disks {
    dirs: PodDirs,
    pub(super) globals: GlobalMounts,
    attachment: Attachment,
    pub(super) tools: Tools,
    /// Disks that pods of this agent use or used, by place.
    known: Arc<Mutex<HashMap<PathBuf, Known>>>,
}

/// What attaches and detaches disks. Clones share the locks.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    pub(super) programs: Arc<dyn Programs>,
    pub(super) host: Host,
    /// Locks of iSCSI targets, one for all Fibre Channel disks, and one for each of their devices that is being removed.
    pub(super) locks: Locks,
}

/// What the names of a place do not contain.
#[derive(Clone, Debug)]
struct Known {
    disk: Disk,
    /// Name in the status of the Node.
    name: String,
}

/// A disk as one pod uses it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use<'a> {
    pub(super) target: Target<'a>,
    /// Name of the volume: the pod's, or that of the persistent volume.
    pub(super) volume: &'a str,
    pub(super) source: &'a DiskSource,
    pub(super) read_only: bool,
    /// Mount options.
    pub(super) options: &'a [String],
    pub(super) objects: &'a Objects,
}

impl Disks {
    pub(super) fn new(dirs: PodDirs, globals: GlobalMounts) -> Self {
        let tools = Tools { programs: Arc::new(HostPrograms), host: Host::this(), locks: Locks::default() };
        Self { dirs, globals, attachment: Attachment::default(), tools, known: Arc::default() }
    }

    /// Reports disks that are in use, and waits for the control plane if that attaches them.
    pub(super) fn with_attachment(self, attachment: Attachment) -> Self {
        Self { attachment, ..self }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<PathBuf, Known>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attaches, mounts for the node and bind mounts for the pod what is not yet.
    ///
    /// # Errors
    /// The step that failed.
    pub(super) async fn mount(&self, wanted: Use<'_>) -> Result<(), VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(wanted.volume, Step::Mount(step));
        let disk = wanted.source.disk(wanted.volume).map_err(failed("SetUp"))?;
        let place = disk.place(&self.dirs, false);
        let (uid, plugin) = (wanted.target.uid, wanted.source.plugin());
        let dir = wanted.target.dirs.volume(uid, &layout::escaped(plugin), wanted.volume).map_err(failed("SetUp"))?;
        self.register(uid, &place, &disk, wanted).await?;
        if bind_mount::is_there(&dir).await.map_err(failed("SetUp"))? {
            return Ok(());
        }
        self.attach_and_mount(&disk, &place, wanted).await?;
        if let Some(group) = wanted.target.fs_group.filter(|_| !wanted.read_only) {
            let policy = fs_group::ChangePolicy::of_pod(wanted.target.pod);
            let shown = self.dirs.shown(&dir);
            // A kubelet records this event for local volumes alone.
            let log = |_: EventType, _: &str, message: &str| tracing::warn!("{message}");
            let given = fs_group::give(&place, group, policy, shown, log);
            // As upstream, the pod starts all the same. The next one has the files changed again.
            if let Err(error) = wanted.target.actual.timed(fs_group::OPERATION, plugin, given).await {
                tracing::warn!(volume = wanted.volume, %error, "not all files of the volume are the group's");
            }
        }
        bind_mount::make(&place, &dir, wanted.read_only).await.map_err(failed("SetUp"))
    }

    async fn attach_and_mount(&self, disk: &Disk, place: &Path, wanted: Use<'_>) -> Result<(), VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(wanted.volume, Step::Mount(step));
        // With the lock: a release may have found the place unused before this pod was registered, and unmounts it yet.
        let at = place.to_owned();
        let is_there = self.globals.carry_out(place, async move { bind_mount::is_there(&at).await });
        if wanted.target.unless_over(is_there).await.map_err(failed("MountDevice"))? {
            return Ok(());
        }
        let chap = self.admit(wanted).await.map_err(failed("WaitForAttach"))?;
        let (tools, disk, at) = (self.tools.clone(), disk.clone(), place.to_owned());
        let (volume, read_only, options) = (wanted.volume.to_owned(), wanted.read_only, wanted.options.to_vec());
        let kind = wanted.source.fs_type().to_owned();
        let work = async move {
            let failed = |step| {
                let volume = &volume;
                move |error: VolumeError| error.in_step(volume, Step::Mount(step))
            };
            // Another pod may have done it while this one waited.
            if bind_mount::is_there(&at).await.map_err(failed("MountDevice"))? {
                return Ok(());
            }
            let device = disk.attach(&tools, &chap, &at).await.map_err(failed("WaitForAttach"))?;
            let mount = DeviceMount { device: &device, target: &at, kind: &kind, read_only, options: &options };
            mount.run(&*tools.programs).await.map_err(failed("MountDevice"))
        };
        // A teardown does not wait for it: nothing of it is the pod's yet, and the disk is released after it.
        // Boxed, as a large future, which each of those around it would hold.
        let done = wanted.target.unless_over(self.globals.carry_out(place, Box::pin(work))).await;
        done.map_err(
            |error| if matches!(error, VolumeError::Step { .. }) { error } else { failed("MountDevice")(error) },
        )
    }

    /// Attaches a raw device and maps it for the pod. The map, if it is new.
    ///
    /// # Errors
    /// The step that failed.
    pub(super) async fn map(&self, wanted: Use<'_>) -> Result<Option<BlockMap>, VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(wanted.volume, Step::Map(step));
        let disk = wanted.source.disk(wanted.volume).map_err(failed("MapPodDevice"))?;
        let place = disk.place(&self.dirs, true);
        let (uid, plugin) = (wanted.target.uid, layout::escaped(wanted.source.plugin()));
        let link = wanted.target.dirs.device(uid, &plugin, wanted.volume);
        let map = BlockMap { global: place.join(uid), link: link.map_err(failed("MapPodDevice"))? };
        self.register(uid, &place, &disk, wanted).await?;
        let (global, link) = (map.global.clone(), map.link.clone());
        let held = blocking(move || Ok(held_device(&global, &link))).await.map_err(failed("MapPodDevice"))?;
        let device = match held {
            Some(device) => device,
            None => {
                let chap = self.admit(wanted).await.map_err(failed("WaitForAttach"))?;
                let (tools, at) = (self.tools.clone(), place.clone());
                let work = async move { disk.attach(&tools, &chap, &at).await };
                let attached = wanted.target.unless_over(self.globals.carry_out(&place, Box::pin(work))).await;
                attached.map_err(failed("WaitForAttach"))?
            }
        };
        let is_new = map.map(&device).await.map_err(failed("MapPodDevice"))?;
        Ok(is_new.then_some(map))
    }

    /// The pod is about to use the disk; what is in use is reported.
    async fn register(&self, uid: &str, place: &Path, disk: &Disk, wanted: Use<'_>) -> Result<(), VolumeError> {
        let known = Known { disk: disk.clone(), name: wanted.source.status_name() };
        let (own, uid, place) = (self.clone(), uid.to_owned(), place.to_owned());
        blocking(move || {
            // In this order: what no pod is registered for is forgotten.
            own.globals.register(&uid, &place);
            own.known().insert(place, known);
            own.report_in_use()
        })
        .await
    }

    /// Waits until the control plane permits the use of the disk, and reads the secret.
    async fn admit(&self, wanted: Use<'_>) -> Result<Chap, VolumeError> {
        let name = wanted.source.status_name();
        let attached = wanted.target.unless_over(self.attachment.wait(wanted.objects, &name));
        wanted.target.actual.timed(attachment::OPERATION, wanted.source.plugin(), attached).await?;
        let namespace = wanted.target.pod.metadata.namespace.as_deref().unwrap_or_default();
        wanted.target.unless_over(wanted.source.chap(wanted.objects, namespace)).await
    }
}

/// The device that a pod has, if its map is complete but for the loop device.
fn held_device(global: &Path, link: &Path) -> Option<PathBuf> {
    let device = std::fs::read_link(link).ok()?;
    (filesystem::is_mount_point(global).is_ok_and(|is| is) && device.exists()).then_some(device)
}
