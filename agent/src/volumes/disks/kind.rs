//! The kinds of disks, and what differs between them.

use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::PersistentVolumeSpec;
use k8s_openapi::api::core::v1::Volume;
use tokio::sync::OwnedMutexGuard;

use super::Tools;
use crate::objects::Objects;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::fc;
use crate::volumes::fc::FcDisk;
use crate::volumes::fc::FcSource;
use crate::volumes::iscsi;
use crate::volumes::iscsi::Chap;
use crate::volumes::iscsi::DiskRecord;
use crate::volumes::iscsi::IscsiSource;

/// How disks are connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::volumes) enum Kind {
    Iscsi,
    Fc,
}

impl Kind {
    pub(in crate::volumes) const ALL: [Self; 2] = [Self::Iscsi, Self::Fc];

    /// Name of the plugin.
    pub(in crate::volumes) fn plugin(self) -> &'static str {
        match self {
            Self::Iscsi => iscsi::NAME,
            Self::Fc => fc::NAME,
        }
    }

    /// Places of disks that are attached, or were begun to be. Blocking.
    ///
    /// # Errors
    /// A directory cannot be listed.
    pub(in crate::volumes) fn places(self, dirs: &PodDirs, is_block: bool) -> Result<Vec<PathBuf>, VolumeError> {
        match self {
            Self::Iscsi => iscsi::places(dirs, is_block),
            Self::Fc => fc::places(dirs, is_block),
        }
    }

    /// Names that the Node's status may have for the disk of a place.
    pub(super) fn names_of_place(self, place: &Path) -> Vec<String> {
        match self {
            Self::Iscsi => iscsi::names_of_place(place),
            Self::Fc => fc::names_of_place(place),
        }
    }

    /// The disk of a place by its names; several if they can be read in more than one way.
    pub(super) fn disks_of_place(self, place: &Path) -> Vec<Disk> {
        match self {
            Self::Iscsi => {
                let record = DiskRecord::of_place(place).map(|record| Disk::Iscsi(Box::new(record)));
                record.into_iter().collect()
            }
            Self::Fc => FcDisk::of_place(place).into_iter().map(Disk::Fc).collect(),
        }
    }

    /// As [`Self::disks_of_place`], by what was recorded in the place, on which nothing is mounted. Blocking.
    ///
    /// # Errors
    /// Neither identifies a disk.
    pub(super) fn read_place(self, place: &Path) -> Result<Vec<Disk>, VolumeError> {
        match self {
            Self::Iscsi => Ok(vec![Disk::Iscsi(Box::new(DiskRecord::read(place)?))]),
            Self::Fc => Ok(self.disks_of_place(place)),
        }
    }

    /// Removes a place with its record. Blocking.
    ///
    /// # Errors
    /// It holds something else.
    pub(super) fn remove_place(self, place: &Path) -> Result<(), VolumeError> {
        match self {
            Self::Iscsi => DiskRecord::remove(place),
            Self::Fc => fc::remove_place(place),
        }
    }
}

/// The disk of a volume, as a pod or a persistent volume states it; unchecked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::volumes) enum DiskSource {
    Iscsi(Box<IscsiSource>),
    Fc(Box<FcSource>),
}

impl DiskSource {
    /// Of a volume that names a disk itself.
    pub(in crate::volumes) fn of_pod(volume: &Volume) -> Option<Self> {
        let iscsi = volume.iscsi.as_ref().map(|source| Self::Iscsi(Box::new(source.into())));
        iscsi.or_else(|| volume.fc.as_ref().map(|source| Self::Fc(Box::new(source.into()))))
    }

    /// Of a persistent volume.
    pub(in crate::volumes) fn of_volume(spec: &PersistentVolumeSpec) -> Option<Self> {
        let iscsi = spec.iscsi.as_ref().map(|source| Self::Iscsi(Box::new(source.into())));
        iscsi.or_else(|| spec.fc.as_ref().map(|source| Self::Fc(Box::new(source.into()))))
    }

    pub(in crate::volumes) fn kind(&self) -> Kind {
        match self {
            Self::Iscsi(_) => Kind::Iscsi,
            Self::Fc(_) => Kind::Fc,
        }
    }

    /// Name of the plugin.
    pub(in crate::volumes) fn plugin(&self) -> &'static str {
        self.kind().plugin()
    }

    /// `fsType`; empty for the default.
    pub(super) fn fs_type(&self) -> &str {
        match self {
            Self::Iscsi(source) => &source.fs_type,
            Self::Fc(source) => &source.fs_type,
        }
    }

    pub(super) fn is_read_only(&self) -> bool {
        match self {
            Self::Iscsi(source) => source.read_only,
            Self::Fc(source) => source.read_only,
        }
    }

    /// The disk of a volume with this name, checked.
    ///
    /// # Errors
    /// A field that cannot be used.
    pub(super) fn disk(&self, volume: &str) -> Result<Disk, VolumeError> {
        match self {
            Self::Iscsi(source) => Ok(Disk::Iscsi(Box::new(DiskRecord::of(volume, source)?))),
            Self::Fc(source) => Ok(Disk::Fc(FcDisk::of(source)?)),
        }
    }

    /// Name of the disk in the status of the Node.
    pub(super) fn status_name(&self) -> String {
        match self {
            Self::Iscsi(source) => iscsi::status_name(&source.target_portal, &source.iqn, &source.lun.to_string()),
            Self::Fc(source) => fc::status_name(source),
        }
    }

    /// How the initiator is authenticated, from the Secret that the volume names. `namespace`: the pod's.
    ///
    /// # Errors
    /// The Secret cannot be read or used.
    pub(super) async fn chap(&self, objects: &Objects, namespace: &str) -> Result<Chap, VolumeError> {
        match self {
            Self::Iscsi(source) => Chap::read(objects, source, namespace).await,
            Self::Fc(_) => Ok(Chap::default()),
        }
    }
}

/// A disk of the node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Disk {
    Iscsi(Box<DiskRecord>),
    Fc(FcDisk),
}

impl Disk {
    /// Where it is mounted for the node, or its raw device is used from.
    pub(super) fn place(&self, dirs: &PodDirs, is_block: bool) -> PathBuf {
        match self {
            Self::Iscsi(record) => record.place(dirs, is_block),
            Self::Fc(disk) => disk.place(dirs, is_block),
        }
    }

    /// Attaches it, with its place made before.
    ///
    /// # Errors
    /// Nothing leads to the disk.
    pub(super) async fn attach(&self, tools: &Tools, chap: &Chap, place: &Path) -> Result<PathBuf, VolumeError> {
        match self {
            Self::Iscsi(record) => iscsi::attach(tools, record, chap, place).await,
            Self::Fc(disk) => fc::attach(tools, disk, place).await,
        }
    }

    /// What is locked while disks of the same connection are attached and detached.
    pub(super) fn lock_name(&self) -> &str {
        match self {
            Self::Iscsi(record) => &record.target,
            Self::Fc(_) => fc::NAME,
        }
    }
}

/// Detaches the disk of a place, which has several readings if its names have. `others` are those of other places;
/// `was_mounted`: a file system on it was just unmounted. `connection` is the lock of its connection; `None` is returned if
/// it was released meanwhile.
///
/// # Errors
/// Something of it stays that nothing needs.
pub(super) async fn detach(
    tools: &Tools,
    readings: Vec<Disk>,
    others: Vec<Disk>,
    was_mounted: bool,
    connection: OwnedMutexGuard<()>,
) -> Result<Option<OwnedMutexGuard<()>>, VolumeError> {
    let (records, disks) = apart(readings);
    let (other_records, other_disks) = apart(others);
    for record in &records {
        iscsi::detach(tools, record, &other_records).await?;
    }
    match disks.is_empty() {
        true => Ok(Some(connection)),
        false => fc::detach(tools, disks, other_disks, was_mounted, connection).await,
    }
}

/// Disks by kind.
fn apart(all: Vec<Disk>) -> (Vec<DiskRecord>, Vec<FcDisk>) {
    let (mut records, mut disks) = (Vec::new(), Vec::new());
    for disk in all {
        match disk {
            Disk::Iscsi(record) => records.push(*record),
            Disk::Fc(disk) => disks.push(disk),
        }
    }
    (records, disks)
}
