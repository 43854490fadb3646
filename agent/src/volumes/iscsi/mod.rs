//! iSCSI volumes, named by the pod itself or by a persistent volume (upstream: `pkg/volume/iscsi`).
//!
//! ```text
//!  source ─▶ record ─▶ attached by the control plane? ─▶ attach ─▶ format, mount ─▶ bind mount for the pod
//!           (checked)        (see `attachment`)         (iscsiadm)   (one for the node)    └▶ raw block: see `block`
//!
//!  the last pod's mount is gone ─▶ unmount ─▶ remove devices ─▶ log out     (`Disks::release`)
//! ```
//!
//! The host has to have iscsiadm(8) with a running iscsid(8), and udev. Places and records are a kubelet's.

mod attach;
mod chap;
mod commands;
mod detach;
mod disk;
mod host;
mod plugin;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
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
use super::layout;
use super::plugin::Target;
use super::plugin::blocking;
use crate::filesystem;
use crate::host_program::HostPrograms;
use crate::host_program::Programs;
use crate::objects::Objects;
use crate::recorder::Recorder;
use attach::Attaching;
use chap::Chap;
use detach::Detaching;
use host::Host;

use disk::DiskRecord;
pub(super) use disk::IscsiSource;
pub(super) use plugin::Iscsi;

/// Name of the plugin.
pub(super) const NAME: &str = crate::model::iscsi::PLUGIN;

/// The disks of the node. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Disks {
    dirs: PodDirs,
    globals: GlobalMounts,
    attachment: Attachment,
    programs: Arc<dyn Programs>,
    host: Host,
    /// Locks of targets.
    targets: Locks,
    /// Disks that pods of this agent use or used, by place.
    known: Arc<Mutex<HashMap<PathBuf, Known>>>,
}

/// What the names of a place do not contain.
#[derive(Clone, Debug)]
struct Known {
    record: DiskRecord,
    /// Name in the status of the Node.
    name: String,
}

/// A disk as one pod uses it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use<'a> {
    pub(super) target: Target<'a>,
    /// Name of the volume: the pod's, or that of the persistent volume.
    pub(super) volume: &'a str,
    pub(super) source: &'a IscsiSource,
    pub(super) read_only: bool,
    /// Mount options.
    pub(super) options: &'a [String],
    pub(super) objects: &'a Objects,
    pub(super) recorder: Option<&'a Recorder>,
}

impl Disks {
    pub(super) fn new(dirs: PodDirs, globals: GlobalMounts) -> Self {
        Self {
            dirs,
            globals,
            attachment: Attachment::default(),
            programs: Arc::new(HostPrograms),
            host: Host::this(),
            targets: Locks::default(),
            known: Arc::default(),
        }
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
        let record = DiskRecord::of(wanted.volume, wanted.source).map_err(failed("SetUp"))?;
        let place = record.place(&self.dirs, false);
        let (uid, plugin) = (wanted.target.uid, layout::escaped(NAME));
        let dir = wanted.target.dirs.volume(uid, &plugin, wanted.volume).map_err(failed("SetUp"))?;
        self.register(uid, &place, &record, wanted).await?;
        if bind_mount::is_there(&dir).await.map_err(failed("SetUp"))? {
            return Ok(());
        }
        self.attach_and_mount(&record, &place, wanted).await?;
        if let Some(group) = wanted.target.fs_group.filter(|_| !wanted.read_only) {
            let policy = fs_group::ChangePolicy::of_pod(wanted.target.pod);
            let notify = fs_group::notices(wanted.recorder, wanted.target.pod);
            let shown = self.dirs.shown(&dir);
            let given = fs_group::give(&place, group, policy, shown, notify);
            // As upstream, the pod starts all the same. The next one has the files changed again.
            if let Err(error) = wanted.target.actual.timed(fs_group::OPERATION, NAME, given).await {
                tracing::warn!(volume = wanted.volume, %error, "not all files of the volume are the group's");
            }
        }
        bind_mount::make(&place, &dir, wanted.read_only).await.map_err(failed("SetUp"))
    }

    async fn attach_and_mount(&self, record: &DiskRecord, place: &Path, wanted: Use<'_>) -> Result<(), VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(wanted.volume, Step::Mount(step));
        // With the lock: a release may have found the place unused before this pod was registered, and unmounts it yet.
        let at = place.to_owned();
        let is_there = self.globals.carry_out(place, async move { bind_mount::is_there(&at).await });
        if is_there.await.map_err(failed("MountDevice"))? {
            return Ok(());
        }
        let chap = self.admit(record, wanted).await.map_err(failed("WaitForAttach"))?;
        let (own, record, at) = (self.clone(), record.clone(), place.to_owned());
        let (volume, read_only, options) = (wanted.volume.to_owned(), wanted.read_only, wanted.options.to_vec());
        let kind = wanted.source.fs_type.clone();
        let work = async move {
            let failed = |step| {
                let volume = &volume;
                move |error: VolumeError| error.in_step(volume, Step::Mount(step))
            };
            // Another pod may have done it while this one waited.
            if bind_mount::is_there(&at).await.map_err(failed("MountDevice"))? {
                return Ok(());
            }
            let device = own.attach(&record, &chap, &at).await.map_err(failed("WaitForAttach"))?;
            let mount = DeviceMount { device: &device, target: &at, kind: &kind, read_only, options: &options };
            mount.run(&*own.programs).await.map_err(failed("MountDevice"))
        };
        let done = self.globals.carry_out(place, work).await;
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
        let record = DiskRecord::of(wanted.volume, wanted.source).map_err(failed("MapPodDevice"))?;
        let place = record.place(&self.dirs, true);
        let uid = wanted.target.uid;
        let link = wanted.target.dirs.device(uid, &layout::escaped(NAME), wanted.volume);
        let map = BlockMap { global: place.join(uid), link: link.map_err(failed("MapPodDevice"))? };
        self.register(uid, &place, &record, wanted).await?;
        let (global, link) = (map.global.clone(), map.link.clone());
        let held = blocking(move || Ok(held_device(&global, &link))).await.map_err(failed("MapPodDevice"))?;
        let device = match held {
            Some(device) => device,
            None => {
                let chap = self.admit(&record, wanted).await.map_err(failed("WaitForAttach"))?;
                let (own, at) = (self.clone(), place.clone());
                let work = async move { own.attach(&record, &chap, &at).await };
                self.globals.carry_out(&place, work).await.map_err(failed("WaitForAttach"))?
            }
        };
        let is_new = map.map(&device).await.map_err(failed("MapPodDevice"))?;
        Ok(is_new.then_some(map))
    }

    /// The pod is about to use the disk; what is in use is reported.
    async fn register(&self, uid: &str, place: &Path, record: &DiskRecord, wanted: Use<'_>) -> Result<(), VolumeError> {
        let name = disk::status_name(&wanted.source.target_portal, &record.target, &record.lun);
        let known = Known { record: record.clone(), name };
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
    async fn admit(&self, record: &DiskRecord, wanted: Use<'_>) -> Result<Chap, VolumeError> {
        let name = disk::status_name(&wanted.source.target_portal, &record.target, &record.lun);
        let attached = wanted.target.unless_over(self.attachment.wait(wanted.objects, &name));
        wanted.target.actual.timed(attachment::OPERATION, NAME, attached).await?;
        let namespace = wanted.target.pod.metadata.namespace.as_deref().unwrap_or_default();
        wanted.target.unless_over(Chap::read(wanted.objects, wanted.source, namespace)).await
    }

    /// Attaches the disk and leaves its record in its place.
    async fn attach(&self, record: &DiskRecord, chap: &Chap, place: &Path) -> Result<PathBuf, VolumeError> {
        let base = attach::interface(&*self.programs, record).await?;
        // Before the login: only a recorded session is logged out.
        let (to_write, at) = (record.clone(), place.to_owned());
        blocking(move || to_write.write(&at)).await?;
        let attaching = Attaching { programs: &*self.programs, host: &self.host, targets: &self.targets, record, chap };
        attaching.run(&base).await
    }

    /// Reports the disks that pods are about to use, and those that are attached. Blocking.
    ///
    /// # Errors
    /// The places cannot be listed.
    pub(super) fn report_in_use(&self) -> Result<(), VolumeError> {
        let on_disk = self.places()?;
        let mut known = self.known();
        let all: BTreeSet<PathBuf> = on_disk.into_iter().chain(self.globals.registered()).collect();
        known.retain(|place, _| all.contains(place));
        let names = all.iter().filter(|place| self.owns(place)).flat_map(|place| match known.get(place) {
            Some(known) => vec![known.name.clone()],
            None => disk::names_of_place(place),
        });
        self.attachment.report(names.collect());
        Ok(())
    }

    /// Places of all disks. Blocking.
    ///
    /// # Errors
    /// A directory cannot be listed.
    fn places(&self) -> Result<Vec<PathBuf>, VolumeError> {
        Ok([disk::places(&self.dirs, false)?, places_of_devices(&self.dirs)?].concat())
    }

    /// Places of disks that no pod uses. Blocking.
    ///
    /// # Errors
    /// The places, or the table of mounts, cannot be read.
    pub(super) fn unused(&self) -> Result<Vec<PathBuf>, VolumeError> {
        // A pod may have gone before its disk was attached.
        self.report_in_use()?;
        let mut unused = Vec::new();
        for place in self.places()? {
            if self.globals.is_unused(&place)? && !self.has_devices(&place)? {
                unused.push(place);
            }
        }
        Ok(unused)
    }

    /// True if it is the place of a disk.
    pub(super) fn owns(&self, place: &Path) -> bool {
        place.starts_with(self.dirs.plugin(NAME))
    }

    /// Unmounts and detaches a disk. False if a pod uses it, or if it is still being attached or mounted: other devices are
    /// released meanwhile.
    ///
    /// # Errors
    /// It cannot be unmounted, or a session stays. The next attempt completes it.
    pub(super) async fn release(&self, place: &Path) -> Result<bool, VolumeError> {
        let Some(_alone) = self.globals.try_lock(place) else { return Ok(false) };
        let (own, at) = (self.clone(), place.to_owned());
        let record = blocking(move || match own.globals.unmount_unused(&at)? && !own.has_devices(&at)? {
            true => DiskRecord::read(&at).map(Some),
            false => Ok(None),
        });
        let Some(record) = record.await? else { return Ok(false) };
        let _target = self.targets.lock(&record.target).await;
        let (own, at) = (self.clone(), place.to_owned());
        let others = blocking(move || own.others(&at)).await?;
        let detaching = Detaching { programs: &*self.programs, host: &self.host, record: &record, others: &others };
        detaching.run().await?;
        tracing::info!(target = record.target, unit = record.lun, volume = record.volume, "detached an iSCSI disk");
        let (own, at) = (self.clone(), place.to_owned());
        blocking(move || {
            DiskRecord::remove(&at)?;
            own.report_in_use().map(|()| true)
        })
        .await
    }

    /// True if it is the place of a raw device.
    pub(super) fn is_of_device(&self, place: &Path) -> bool {
        place.starts_with(self.dirs.plugin(NAME).join(layout::DEVICES))
    }

    /// True if it is the place of a raw device that a pod has: there is a file that is named by the pod.
    fn has_devices(&self, place: &Path) -> Result<bool, VolumeError> {
        if !self.is_of_device(place) {
            return Ok(false);
        }
        let is_device = |path: &PathBuf| path.extension().is_none_or(|end| end != "json");
        Ok(layout::entries(place)?.iter().any(is_device))
    }

    /// The disks of other places: as pods have them, or by the names of places. One that is about to be attached has
    /// its place already. Blocking.
    fn others(&self, place: &Path) -> Result<Vec<DiskRecord>, VolumeError> {
        let known = self.known().clone();
        let record = |other: PathBuf| match known.get(&other) {
            Some(known) => Some(known.record.clone()),
            None => DiskRecord::of_place(&other),
        };
        Ok(self.places()?.into_iter().filter(|other| other != place).filter_map(record).collect())
    }
}

/// Places of raw devices. Blocking.
///
/// # Errors
/// A directory cannot be listed.
pub(super) fn places_of_devices(dirs: &PodDirs) -> Result<Vec<PathBuf>, VolumeError> {
    disk::places(dirs, true)
}

/// The device that a pod has, if its map is complete but for the loop device.
fn held_device(global: &Path, link: &Path) -> Option<PathBuf> {
    let device = std::fs::read_link(link).ok()?;
    (filesystem::is_mount_point(global).is_ok_and(|is| is) && device.exists()).then_some(device)
}
