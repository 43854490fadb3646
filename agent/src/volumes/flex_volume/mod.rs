//! FlexVolumes, named by the pod itself or by a persistent volume: programs of the operator mount them (upstream:
//! `pkg/volume/flexvolume`, deprecated there).
//!
//! ```text
//!  <volumePluginDir>/<vendor>~<driver>/<driver>            the program: `init`, `mount`, `unmount`, ... (see `driver`)
//!  <root>/pods/<uid>/volumes/<vendor>~<driver>/<volume>    what `mount` has mounted for a pod
//!  <root>/plugins/kubernetes.io/flexvolume/<vendor>/<driver>/mounts/<volume>
//!                                                          what `mountdevice` has mounted for the node (see `device`)
//! ```
//!
//! What a driver does not support, the agent does. Beyond a kubelet, it binds no directory on which nothing is mounted, and
//! of two volumes that a driver attaches by the same name, the second waits until the first is released. Nothing is
//! recorded: another agent, or a kubelet, unmounts by the names of the directories.

mod device;
mod driver;
mod error;
mod expand;
mod options;
mod plugin;
mod pod_mount;
mod reply;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;

pub use error::FlexError;

pub(super) use expand::FlexExpansion;
pub(super) use options::FlexSource;
pub(super) use plugin::FlexVolume;

use super::PodDirs;
use super::VolumeError;
use super::attachment::Attachment;
use super::bind_mount;
use super::error::Step;
use super::global_mounts::GlobalMounts;
use super::layout;
use super::plugin::Target;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;
use crate::kernel::usage::MeasuredBy;
use crate::objects::Objects;
use device::Held;
use driver::Driver;
use driver::Drivers;
use pod_mount::PodMount;

/// Name of the plugin, for volumes whose driver is not known. With a driver they have its name.
pub(super) const NAME: &str = "kubernetes.io/flexvolume";
/// Directory of global mounts, in that of a driver.
const MOUNTS: &str = "mounts";

/// The FlexVolumes of the node. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct FlexVolumes {
    dirs: PodDirs,
    globals: GlobalMounts,
    attachment: Attachment,
    drivers: Drivers,
    /// Of volumes that pods of this agent use, by place, until they are released.
    held: Arc<Mutex<HashMap<PathBuf, Held>>>,
    /// As it is passed to drivers.
    node_name: String,
}

/// A volume as one pod uses it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use<'a> {
    pub(super) target: Target<'a>,
    /// Name of the volume: the pod's, or that of the persistent volume.
    pub(super) volume: &'a str,
    pub(super) source: &'a FlexSource,
    pub(super) read_only: bool,
    pub(super) objects: &'a Objects,
}

impl FlexVolumes {
    /// Without drivers.
    pub(super) fn new(dirs: PodDirs, globals: GlobalMounts) -> Self {
        let (attachment, drivers) = (Attachment::default(), Drivers::new(None));
        Self { dirs, globals, attachment, drivers, held: Arc::default(), node_name: String::new() }
    }

    /// Runs the drivers in this directory, which need not exist, on the node of this name.
    pub(super) fn with_drivers(self, dir: &Path, node_name: &str) -> Self {
        Self { drivers: Drivers::new(Some(dir)), node_name: node_name.to_owned(), ..self }
    }

    /// Reports volumes that are in use, and waits for the control plane if that attaches them.
    pub(super) fn with_attachment(self, attachment: Attachment) -> Self {
        Self { attachment, ..self }
    }

    /// The name of a driver that was used since the agent has started.
    pub(super) fn known_name(&self, driver: &str) -> Option<&'static str> {
        self.drivers.known(driver).map(|driver| driver.name)
    }

    /// The driver by whose name a directory in a pod's `volumes` is named, installed or not.
    pub(super) fn name_of_directory(&self, directory: &str) -> Option<&'static str> {
        let name = driver::of_directory(directory).filter(|_| self.drivers.has_directory());
        name.map(|name| driver::interned(&name))
    }

    /// How the size of a volume of this driver is measured.
    pub(super) fn measured_by(&self, driver: &str) -> Option<MeasuredBy> {
        self.drivers.known(driver)?.capabilities.supports_metrics.then_some(MeasuredBy::FileSystem)
    }

    /// True if the runtime may relabel the files of this driver's volumes.
    pub(super) fn is_relabelled(&self, driver: &str) -> bool {
        self.drivers.known(driver).is_some_and(|driver| driver.capabilities.selinux_relabel)
    }

    /// Where a volume is mounted for a pod.
    ///
    /// # Errors
    /// A name that no driver can have, or that is no file name.
    pub(super) fn mount_path(&self, uid: &str, driver: &str, volume: &str) -> Result<PathBuf, VolumeError> {
        match driver::is_name(driver) {
            true => self.dirs.volume(uid, &layout::escaped(driver), volume),
            false => Err(VolumeError::NotAFileName { name: driver.to_owned() }),
        }
    }

    /// Has the driver mount the volume for the pod, unless this agent has, or something is mounted there. What a driver has
    /// begun goes on if the future is dropped.
    ///
    /// # Errors
    /// The step that failed.
    pub(super) async fn mount(&self, wanted: Use<'_>) -> Result<(), VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(wanted.volume, Step::Mount(step));
        let Target { uid, actual, .. } = wanted.target;
        // The driver may leave files without a mount, and it may be gone when a container restarts.
        let known = self.known_name(&wanted.source.driver);
        if known.is_some_and(|name| actual.is_set_up(uid, &(name, wanted.volume.to_owned()))) {
            return Ok(());
        }
        let found = wanted.target.unless_over(Box::pin(self.drivers.find(&wanted.source.driver))).await;
        let driver = found.map_err(failed("SetUp"))?;
        let dir = self.mount_path(uid, driver.name, wanted.volume).map_err(failed("SetUp"))?;
        if driver.capabilities.attach {
            self.mount_device(&driver, wanted).await?;
        }
        self.mount_for_pod(&driver, &dir, wanted).await.map_err(failed("SetUp"))
    }

    async fn mount_for_pod(&self, driver: &Arc<Driver>, dir: &Path, wanted: Use<'_>) -> Result<(), VolumeError> {
        // With the lock: an earlier attempt may have mounted it, and gives its files to the group yet.
        let at = dir.to_owned();
        if self.globals.carry_out(dir, async move { bind_mount::is_there(&at).await }).await? {
            return Ok(());
        }
        let Target { pod, actual, fs_group, .. } = wanted.target;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let secrets = options::secrets(wanted.objects, wanted.source, namespace);
        let mut more = options::of_pod(pod, fs_group);
        more.extend(wanted.target.unless_over(secrets).await?);
        let mount = PodMount {
            driver: driver.clone(),
            dir: dir.to_owned(),
            place: self.place(driver.name, wanted.volume),
            options: options::of_volume(wanted.source, wanted.volume, wanted.read_only, more),
            read_only: wanted.read_only,
            group: fs_group,
            dirs: self.dirs.clone(),
            pod: pod.clone(),
            actual: actual.clone(),
        };
        self.globals.carry_out(dir, async move { mount.run().await }).await
    }

    /// Has the driver unmount a pod's volume, and removes its directory. If the driver leaves that to the agent, or is
    /// removed from the node with its directory, the agent unmounts it. Files stay, and keep the pod's directory.
    ///
    /// # Errors
    /// There is no such driver, or it fails; the volume is in use, or has content; a call takes long, and goes on.
    pub(super) async fn unmount(&self, volume: &VolumeOnDisk) -> Result<(), VolumeError> {
        let name = driver::of_directory(&volume.directory).unwrap_or_default();
        let is_removed = self.drivers.is_removed(&name).await?;
        let driver = if is_removed { None } else { Some(self.drivers.find(&name).await?) };
        let (path, volume) = (volume.path(), volume.clone());
        let at = path.clone();
        let work = async move {
            match &driver {
                Some(driver) => drop(driver.call("unmount", &[&*at.to_string_lossy()], &[]).await?),
                None => tracing::warn!(volume = %at.display(), driver = name, "unmounting a volume without its driver"),
            }
            blocking(move || match volume.unmount() {
                // As of any plugin that this agent does not have.
                Err(VolumeError::NotEmpty { .. }) if is_removed => volume.remove_if_empty(),
                done => done,
            })
            .await
        };
        // With the lock: a mount may go on.
        self.globals.carry_out(&path, work).await
    }
}

/// The plugin by whose name the directories of a persistent volume's driver are named.
pub(super) fn plugin_of(source: &FlexSource) -> Option<&'static str> {
    driver::is_name(&source.driver).then(|| driver::interned(&source.driver))
}
