//! Volumes of drivers that attach: attached by the control plane or by the agent, mounted once for the node, and released
//! when no pod has them (upstream: `attacher.go`, `detacher.go`).
//!
//! ```text
//!  attached by the control plane? ─▶ attach ─▶ waitforattach ─▶ mountdevice ─▶ mount, for each pod
//!                                                 the last pod's volume is gone ─▶ unmountdevice ─▶ detach
//! ```

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use super::Driver;
use super::FlexError;
use super::FlexExpansion;
use super::FlexVolumes;
use super::MOUNTS;
use super::NAME;
use super::Use;
use super::driver;
use super::options;
use super::options::Options;
use super::reply::Answer;
use crate::filesystem;
use crate::host_program::Programs;
use crate::objects::Objects;
use crate::volumes::VolumeError;
use crate::volumes::attachment;
use crate::volumes::bind_mount;
use crate::volumes::error::OnPath as _;
use crate::volumes::error::Step;
use crate::volumes::format::DeviceMount;
use crate::volumes::layout;
use crate::volumes::layout::make_dirs;
use crate::volumes::plugin::blocking;

/// What distinguishes volumes of one name: type of the file system, and options.
type Settings = (String, BTreeMap<String, String>);

/// A volume that pods of this agent use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Held {
    settings: Settings,
    /// Its device, empty if the driver names none; `None` until this agent has attached it.
    device: Option<String>,
}

/// A volume that is about to be attached and mounted for the node.
#[derive(Clone, Debug)]
struct Mounting {
    driver: Arc<Driver>,
    place: PathBuf,
    /// For every call.
    options: String,
    fs_type: String,
    read_only: bool,
    node_name: String,
    /// The device, if the control plane has attached it.
    attached: Option<String>,
}

impl Mounting {
    /// Attaches the volume. The device; empty if the driver names none.
    async fn attach(&self) -> Result<String, VolumeError> {
        // Before that: what has a place is released.
        let place = self.place.clone();
        blocking(move || make_dirs(&place)).await?;
        let device = match &self.attached {
            Some(device) => device.clone(),
            None => match self.driver.call("attach", &[], &[&self.options, &self.node_name]).await? {
                Answer::Done(reply) => reply.device,
                Answer::NotSupported => String::new(),
            },
        };
        match self.driver.call("waitforattach", &[&device], &[&self.options]).await? {
            Answer::Done(reply) => Ok(reply.device),
            Answer::NotSupported => Ok(device),
        }
    }

    async fn mount(&self, device: &str, programs: &dyn Programs) -> Result<(), VolumeError> {
        let arguments = [&*self.place.to_string_lossy(), device];
        match self.driver.call("mountdevice", &arguments, &[&self.options]).await? {
            Answer::Done(_) => Ok(()),
            // The driver attaches nothing.
            Answer::NotSupported if device.is_empty() => Ok(()),
            Answer::NotSupported => {
                let (device, target, kind) = (Path::new(device), self.place.as_path(), self.fs_type.as_str());
                DeviceMount { device, target, kind, read_only: self.read_only, options: &[] }.run(programs).await
            }
        }
    }
}

impl FlexVolumes {
    /// Where a volume is mounted for the node.
    pub(in crate::volumes) fn place(&self, driver: &str, volume: &str) -> PathBuf {
        self.dirs.plugin(NAME).join(driver).join(MOUNTS).join(volume)
    }

    /// The device of a volume that is mounted for the node: as this agent has attached it, or as the driver names it again,
    /// after a restart of the agent. Empty if it has none. `options`: of the volume.
    ///
    /// # Errors
    /// The driver fails.
    pub(super) async fn device(
        &self,
        driver: &Arc<Driver>,
        options: &str,
        wanted: FlexExpansion<'_>,
    ) -> Result<String, VolumeError> {
        if !driver.capabilities.attach {
            return Ok(String::new());
        }
        let place = self.place(driver.name, wanted.volume);
        if let Some(device) = self.held().get(&place).and_then(|held| held.device.clone()) {
            return Ok(device);
        }
        let is_attached = self.attachment.is_by_control_plane(wanted.objects);
        let name = status_name(driver.name, wanted.volume);
        let mounting = Mounting {
            driver: driver.clone(),
            place,
            options: options.to_owned(),
            fs_type: wanted.source.fs_type.clone(),
            read_only: false,
            node_name: self.node_name.clone(),
            attached: is_attached.then(|| device_of(wanted.objects, &name)),
        };
        let device = Box::pin(mounting.attach()).await?;
        self.keep_device(&mounting.place, &device);
        Ok(device)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<PathBuf, Held>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep_device(&self, place: &Path, device: &str) {
        if let Some(held) = self.held().get_mut(place) {
            held.device = Some(device.to_owned());
        }
    }

    /// Attaches the volume unless the control plane does, and has it mounted for the node unless it is.
    ///
    /// # Errors
    /// The step that failed.
    pub(super) async fn mount_device(&self, driver: &Arc<Driver>, wanted: Use<'_>) -> Result<(), VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(wanted.volume, Step::Mount(step));
        let place = self.place(driver.name, wanted.volume);
        self.register(driver.name, &place, wanted).await.map_err(failed("MountDevice"))?;
        // With the lock: a release may have found the place unused before this pod was registered, and unmounts it yet.
        let at = place.clone();
        let is_there = self.globals.carry_out(&place, async move { bind_mount::is_there(&at).await });
        if wanted.target.unless_over(is_there).await.map_err(failed("MountDevice"))? {
            return Ok(());
        }
        let mounting = Mounting {
            driver: driver.clone(),
            options: options::of_volume(wanted.source, wanted.volume, wanted.read_only, Options::new()),
            fs_type: wanted.source.fs_type.clone(),
            read_only: wanted.read_only,
            node_name: self.node_name.clone(),
            attached: self.attached(driver.name, wanted).await.map_err(failed("WaitForAttach"))?,
            place: place.clone(),
        };
        let (own, programs, volume) = (self.clone(), self.drivers.programs.clone(), wanted.volume.to_owned());
        let work = async move {
            let failed = |step| {
                let volume = &volume;
                move |error: VolumeError| error.in_step(volume, Step::Mount(step))
            };
            // Another pod may have done it while this one waited.
            if bind_mount::is_there(&mounting.place).await.map_err(failed("MountDevice"))? {
                return Ok(());
            }
            let device = mounting.attach().await.map_err(failed("WaitForAttach"))?;
            own.keep_device(&mounting.place, &device);
            mounting.mount(&device, &*programs).await.map_err(failed("MountDevice"))
        };
        // A teardown does not wait for it: nothing of it is the pod's yet, and the volume is released after it.
        // Boxed, as a large future, which each of those around it would hold.
        let done = wanted.target.unless_over(self.globals.carry_out(&place, Box::pin(work))).await;
        done.map_err(
            |error| if matches!(error, VolumeError::Step { .. }) { error } else { failed("MountDevice")(error) },
        )
    }

    /// The pod is about to use the volume; what is in use is reported.
    ///
    /// # Errors
    /// The node has another volume of this name: the pod would get its files.
    async fn register(&self, driver: &'static str, place: &Path, wanted: Use<'_>) -> Result<(), VolumeError> {
        let settings = (wanted.source.fs_type.clone(), wanted.source.options.clone());
        let (own, uid, place) = (self.clone(), wanted.target.uid.to_owned(), place.to_owned());
        let name: Box<str> = wanted.volume.into();
        blocking(move || match own.admit(&uid, &place, settings)? {
            true => own.report_in_use(),
            false => Err(FlexError::OtherVolume { name, driver }.into()),
        })
        .await
    }

    /// Registers a pod for a volume, unless one with other settings has its place. Blocking.
    ///
    /// # Errors
    /// The places cannot be listed.
    fn admit(&self, uid: &str, place: &Path, settings: Settings) -> Result<bool, VolumeError> {
        let on_disk = self.places()?;
        // With the lock: of two volumes one is the first.
        let mut held = self.held();
        held.retain(|place, _| on_disk.contains(place) || self.globals.is_registered(place));
        if held.get(place).is_some_and(|other| other.settings != settings) {
            return Ok(false);
        }
        self.globals.register(uid, place);
        held.entry(place.to_owned()).or_insert(Held { settings, device: None });
        Ok(true)
    }

    /// The device of a volume that the control plane has attached, once it has; `None` if the agent is to attach it.
    async fn attached(&self, driver: &str, wanted: Use<'_>) -> Result<Option<String>, VolumeError> {
        let name = status_name(driver, wanted.volume);
        let waiting = wanted.target.unless_over(self.attachment.wait(wanted.objects, &name));
        wanted.target.actual.timed(attachment::OPERATION, driver, waiting).await?;
        let is_attached = self.attachment.is_by_control_plane(wanted.objects);
        Ok(is_attached.then(|| device_of(wanted.objects, &name)))
    }

    /// Volumes of drivers that attach which pods are about to use, and those that are attached. Blocking.
    ///
    /// # Errors
    /// The places cannot be listed.
    fn in_use(&self) -> Result<BTreeSet<String>, VolumeError> {
        let registered = self.globals.registered().into_iter().filter(|place| self.owns(place));
        let all = self.places()?.into_iter().chain(registered);
        let name = |place: PathBuf| self.of_place(&place).map(|(driver, volume)| status_name(&driver, &volume));
        Ok(all.filter_map(name).collect())
    }

    /// As [`Self::report_in_use`], to be published with the volumes of the next plugin that reports some. Blocking.
    ///
    /// # Errors
    /// The places cannot be listed.
    pub(in crate::volumes) fn record_in_use(&self) -> Result<(), VolumeError> {
        self.attachment.record(NAME, self.in_use()?);
        Ok(())
    }

    fn report_in_use(&self) -> Result<(), VolumeError> {
        self.attachment.report(NAME, || self.in_use())
    }

    /// True if it is the place of a FlexVolume.
    pub(in crate::volumes) fn owns(&self, place: &Path) -> bool {
        place.starts_with(self.dirs.plugin(NAME))
    }

    /// Driver and volume of a place.
    fn of_place(&self, place: &Path) -> Option<(String, String)> {
        let below = place.strip_prefix(self.dirs.plugin(NAME)).ok()?.to_str()?;
        let (rest, volume) = below.rsplit_once('/')?;
        let driver = rest.strip_suffix(MOUNTS)?.strip_suffix('/')?;
        driver::is_name(driver).then(|| (driver.to_owned(), volume.to_owned()))
    }

    /// The driver of a place as metrics name it.
    pub(in crate::volumes) fn plugin_of_place(&self, place: &Path) -> &'static str {
        self.of_place(place).and_then(|(driver, _)| self.known_name(&driver)).unwrap_or(NAME)
    }

    /// Places of all volumes, also of drivers that are gone. Blocking.
    ///
    /// # Errors
    /// A directory cannot be listed.
    fn places(&self) -> Result<Vec<PathBuf>, VolumeError> {
        let (mut found, mut unread) = (Vec::new(), vec![self.dirs.plugin(NAME)]);
        while let Some(dir) = unread.pop() {
            for path in entries(&dir)? {
                match path.ends_with(MOUNTS) {
                    true => found.extend(entries(&path)?),
                    false if self.is_of_drivers(&path) => unread.push(path),
                    false => {}
                }
            }
        }
        Ok(found)
    }

    /// True if drivers may have their directories below this one. Not below a link, which may lead to itself, nor below what
    /// a driver has mounted for itself, which may have any number of files and a server that does not answer. Blocking.
    fn is_of_drivers(&self, dir: &Path) -> bool {
        let below = dir.strip_prefix(self.dirs.plugin(NAME)).ok().and_then(Path::to_str);
        let is_mounted = || filesystem::is_mount_point(dir).is_ok_and(|is| is);
        // In this order: whether a mount is a link, its server would have to answer.
        below.is_some_and(driver::is_name) && !is_mounted() && !dir.is_symlink()
    }

    /// Places of volumes that no pod uses. Blocking.
    ///
    /// # Errors
    /// A directory cannot be listed.
    pub(in crate::volumes) fn unused(&self) -> Result<Vec<PathBuf>, VolumeError> {
        // A pod may have gone before its volume was attached.
        self.report_in_use()?;
        let mut unused = Vec::new();
        for place in self.places()? {
            if !self.is_used(&place)? {
                unused.push(place);
            }
        }
        Ok(unused)
    }

    /// True if a pod is about to use the volume, or has a directory of it. Blocking.
    fn is_used(&self, place: &Path) -> Result<bool, VolumeError> {
        let Some((driver, volume)) = self.of_place(place).filter(|_| !self.globals.is_registered(place)) else {
            return Ok(true);
        };
        for pod in layout::entries(&self.dirs.pods())? {
            let Some(uid) = pod.file_name().and_then(|name| name.to_str()) else { continue };
            let dir = self.mount_path(uid, &driver, &volume)?;
            if is_listed(&dir)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Has a volume unmounted, and detached unless the control plane does that. False if a pod uses it, or if it is still
    /// being attached or mounted.
    ///
    /// # Errors
    /// There is no such driver, or it fails: the next attempt completes it.
    pub(in crate::volumes) async fn release(&self, place: &Path, objects: &Objects) -> Result<bool, VolumeError> {
        let Some(_alone) = self.globals.try_lock(place) else { return Ok(false) };
        let (own, at) = (self.clone(), place.to_owned());
        let found = blocking(move || match own.is_used(&at)? {
            true => Ok(None),
            false => Ok(own.of_place(&at)),
        });
        let Some((driver, volume)) = found.await? else { return Ok(false) };
        let driver = self.drivers.find(&driver).await?;
        if bind_mount::is_there(place).await? {
            let answer = driver.call("unmountdevice", &[&*place.to_string_lossy()], &[]).await?;
            if answer == Answer::NotSupported {
                unmount(place).await?;
            }
        }
        if !self.attachment.is_by_control_plane(objects) {
            // A driver that does not support it has nothing to detach.
            driver.call("detach", &[&volume, &self.node_name], &[]).await?;
        }
        tracing::info!(driver = driver.name, volume, "released a FlexVolume");
        let (own, at) = (self.clone(), place.to_owned());
        blocking(move || {
            match fs::remove_dir(&at) {
                // The driver may have removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.on("remove", &at)?,
            }
            own.report_in_use().map(|()| true)
        })
        .await
    }
}

async fn unmount(place: &Path) -> Result<(), VolumeError> {
    let at = place.to_owned();
    blocking(move || {
        while filesystem::is_mount_point(&at).on("inspect", &at)? {
            filesystem::unmount_flushed(&at).on("unmount", &at)?;
        }
        Ok(())
    })
    .await
}

/// What is in a directory; nothing if it is none.
///
/// # Errors
/// It cannot be listed to its end.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, VolumeError> {
    match layout::entries(dir) {
        Err(VolumeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotADirectory => Ok(Vec::new()),
        listed => listed,
    }
}

/// True if its parent has this directory. It is not inspected itself: it may be a mount whose server does not answer.
/// Blocking.
///
/// # Errors
/// The parent cannot be listed.
pub(super) fn is_listed(dir: &Path) -> Result<bool, VolumeError> {
    let Some(parent) = dir.parent() else { return Ok(false) };
    Ok(entries(parent)?.iter().any(|entry| entry == dir))
}

/// Name of a volume in the status of the Node.
fn status_name(driver: &str, volume: &str) -> String {
    format!("{driver}/{volume}")
}

/// The device that the control plane reports for a volume of this name.
fn device_of(objects: &Objects, name: &str) -> String {
    let node = objects.node();
    let attached = node.iter().flat_map(|node| node.status.iter()).flat_map(|status| status.volumes_attached.iter());
    let found = attached.flatten().find(|attached| attached.name == name);
    found.map(|attached| attached.device_path.clone()).unwrap_or_default()
}
