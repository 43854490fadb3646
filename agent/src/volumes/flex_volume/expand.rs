//! Expands the file systems of persistent volumes that drivers have mounted (upstream: `expander.go`,
//! `expander-defaults.go`).

use std::path::Path;

use super::FlexSource;
use super::FlexVolumes;
use super::device::is_listed;
use super::options;
use super::options::Options;
use super::reply::Answer;
use crate::objects::Objects;
use crate::volumes::VolumeError;
use crate::volumes::plugin::blocking;
use crate::volumes::resize;

/// A persistent volume that a pod has, and may write, with the size that it is to have.
#[derive(Clone, Copy, Debug)]
pub(in crate::volumes) struct FlexExpansion<'a> {
    /// The pod's.
    pub(in crate::volumes) uid: &'a str,
    /// Name of the persistent volume.
    pub(in crate::volumes) volume: &'a str,
    pub(in crate::volumes) source: &'a FlexSource,
    pub(in crate::volumes) objects: &'a Objects,
    /// Bytes that it is to have.
    pub(in crate::volumes) to: i64,
    /// Bytes that its claim has.
    pub(in crate::volumes) from: i64,
}

impl FlexVolumes {
    /// True if volumes of this driver are expanded on the node. False until it is initialised.
    pub(in crate::volumes) fn is_expandable(&self, driver: &str) -> bool {
        self.drivers.known(driver).is_some_and(|driver| driver.capabilities.requires_fs_resize)
    }

    /// Has the driver expand the file system. If it leaves that to the agent, the file system is expanded to the size of
    /// the device, if there is one. The lock of the volume's place is held.
    ///
    /// # Errors
    /// The driver, or the program that expands the file system, fails; the pod has the volume no longer, or it is being
    /// unmounted.
    pub(in crate::volumes) async fn expand(&self, wanted: FlexExpansion<'_>) -> Result<(), VolumeError> {
        let driver = self.drivers.find(&wanted.source.driver).await?;
        let dir = self.mount_path(wanted.uid, driver.name, wanted.volume)?;
        // With the lock: a teardown may have had it unmounted, and does not meanwhile. It is not waited for: while its driver
        // hangs, other pods could not use the volume, whose place is locked.
        let Some(_alone) = self.globals.try_lock(&dir) else { return Err(VolumeError::GivenUp) };
        let at = dir.clone();
        if !blocking(move || is_listed(&at)).await? {
            return Err(VolumeError::GivenUp);
        }
        let options = options::of_volume(wanted.source, wanted.volume, false, Options::new());
        let device = self.device(&driver, &options, wanted).await?;
        let (path, to, from) = (dir.to_string_lossy(), wanted.to.to_string(), wanted.from.to_string());
        match driver.call("expandfs", &[], &[&options, &device, &path, &to, &from]).await? {
            Answer::Done(_) => Ok(()),
            // As upstream: blkid(8) finds nothing, and what has no file system is large enough.
            Answer::NotSupported if device.is_empty() => Ok(()),
            Answer::NotSupported => resize::run(Path::new(&device), &dir, &*self.drivers.programs).await,
        }
    }
}
