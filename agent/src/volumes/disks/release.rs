//! Which disks the node has, which of them no pod uses, and their release.

use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;

use super::Disks;
use super::kind::Disk;
use super::kind::Kind;
use super::kind::detach;
use crate::filesystem;
use crate::volumes::VolumeError;
use crate::volumes::layout;
use crate::volumes::plugin::blocking;

impl Disks {
    /// Reports the disks that pods are about to use, and those that are attached. Blocking.
    ///
    /// # Errors
    /// The places cannot be listed.
    pub(in crate::volumes) fn report_in_use(&self) -> Result<(), VolumeError> {
        self.attachment.report("disks", || self.in_use())
    }

    /// Names of those disks in the status of the Node. Blocking.
    ///
    /// # Errors
    /// The places cannot be listed.
    fn in_use(&self) -> Result<BTreeSet<String>, VolumeError> {
        let on_disk = self.places()?;
        let mut known = self.known();
        let all: BTreeSet<PathBuf> = on_disk.into_iter().chain(self.globals.registered()).collect();
        known.retain(|place, _| all.contains(place));
        let owned = all.iter().filter_map(|place| Some((place, self.kind_of(place)?)));
        let names = owned.flat_map(|(place, kind)| match known.get(place) {
            Some(known) => vec![known.name.clone()],
            None => kind.names_of_place(place),
        });
        Ok(names.collect())
    }

    /// Places of all disks. Blocking.
    ///
    /// # Errors
    /// A directory cannot be listed.
    fn places(&self) -> Result<Vec<PathBuf>, VolumeError> {
        let mut all = Vec::new();
        for kind in Kind::ALL {
            for is_block in [false, true] {
                all.extend(kind.places(&self.dirs, is_block)?);
            }
        }
        Ok(all)
    }

    /// Places of disks that no pod uses. Blocking.
    ///
    /// # Errors
    /// The places, or the table of mounts, cannot be read.
    pub(in crate::volumes) fn unused(&self) -> Result<Vec<PathBuf>, VolumeError> {
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

    /// The kind of the disk of a place; `None` if it is the place of something else.
    pub(in crate::volumes) fn kind_of(&self, place: &Path) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| place.starts_with(self.dirs.plugin(kind.plugin())))
    }

    /// Unmounts and detaches a disk. False if a pod uses it, or if it is still being attached or mounted: other devices are
    /// released meanwhile.
    ///
    /// # Errors
    /// It cannot be unmounted, or something stays attached. The next attempt completes it.
    pub(in crate::volumes) async fn release(&self, place: &Path) -> Result<bool, VolumeError> {
        let Some(kind) = self.kind_of(place) else { return Ok(false) };
        let Some(_alone) = self.globals.try_lock(place) else { return Ok(false) };
        let (own, at) = (self.clone(), place.to_owned());
        let found = blocking(move || {
            let was_mounted = filesystem::is_mount_point(&at).is_ok_and(|is| is);
            match own.globals.unmount_unused(&at)? && !own.has_devices(&at)? {
                true => own.readings(kind, &at).map(|readings| Some((readings, was_mounted))),
                false => Ok(None),
            }
        });
        let Some((readings, was_mounted)) = found.await? else { return Ok(false) };
        let lock = readings.first().map(|disk| disk.lock_name().to_owned()).unwrap_or_default();
        let connection = self.tools.locks.lock(&lock).await;
        let (own, at) = (self.clone(), place.to_owned());
        let others = blocking(move || own.others(&at)).await?;
        // With the lock, if it is held yet: another release would count this disk, which is detached, as one of the others.
        let _connection = detach(&self.tools, readings, others, was_mounted, connection).await?;
        tracing::info!(place = %place.display(), plugin = kind.plugin(), "detached a disk");
        let (own, at) = (self.clone(), place.to_owned());
        blocking(move || {
            kind.remove_place(&at)?;
            own.report_in_use().map(|()| true)
        })
        .await
    }

    /// True if it is the place of a raw device.
    pub(in crate::volumes) fn is_of_device(&self, place: &Path) -> bool {
        let is_below = |kind: Kind| place.starts_with(self.dirs.plugin(kind.plugin()).join(layout::DEVICES));
        Kind::ALL.into_iter().any(is_below)
    }

    /// True if it is the place of a raw device that a pod has: there is a file that is named by the pod.
    fn has_devices(&self, place: &Path) -> Result<bool, VolumeError> {
        if !self.is_of_device(place) {
            return Ok(false);
        }
        let is_device = |path: &PathBuf| path.extension().is_none_or(|end| end != "json");
        Ok(layout::entries(place)?.iter().any(is_device))
    }

    /// The disk of a place that is to be detached, by what is recorded there, or as a pod had it. Blocking.
    fn readings(&self, kind: Kind, place: &Path) -> Result<Vec<Disk>, VolumeError> {
        let known = self.known().get(place).map(|known| known.disk.clone());
        match known {
            Some(disk @ Disk::Fc(_)) => Ok(vec![disk]),
            _ => kind.read_place(place),
        }
    }

    /// The disks of other places: as pods have them, or by the names of places. One that is about to be attached has
    /// its place already. Blocking.
    fn others(&self, place: &Path) -> Result<Vec<Disk>, VolumeError> {
        let known = self.known().clone();
        let of_place = |other: PathBuf| match (known.get(&other), self.kind_of(&other)) {
            (Some(known), _) => vec![known.disk.clone()],
            (None, Some(kind)) => kind.disks_of_place(&other),
            (None, None) => Vec::new(),
        };
        Ok(self.places()?.into_iter().filter(|other| other != place).flat_map(of_place).collect())
    }
}
