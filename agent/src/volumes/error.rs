//! Errors of volumes and pods' files.

use std::fmt;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use indexmap::IndexSet;

use super::api::InvalidPath;
use super::claims::ClaimError;
use super::flex_volume::FlexError;
use super::storage_medium::StorageMediumError;
use crate::host_program::ProgramError;
use crate::model::DownwardError;
use crate::objects::ObjectError;

/// A volume or a pod's file that cannot be made or removed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// An operation on a file or directory failed.
    #[error("cannot {verb} {path}: {source}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A UID or name that is no file name.
    #[error("{name:?} cannot be part of a path")]
    NotAFileName {
        /// What was given.
        name: String,
    },
    /// A hostPath that is not what its type says. Texts as upstream since 1.37.
    #[error("hostPath type check failed: {path} is not a {expected}, it's a {found}")]
    HostPathType {
        /// The path.
        path: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// A hostPath with a type that is not there, or is none of the types.
    #[error("hostPath type check failed, {path} is not a {expected}, unable to determine its type: {problem}")]
    HostPathUnknown {
        /// The path.
        path: String,
        /// What it should be.
        expected: &'static str,
        /// Why its type is not known.
        problem: String,
    },
    /// A hostPath of an unknown type, or with `..`.
    #[error("hostPath {path:?}: {problem}")]
    HostPath {
        /// The path.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An emptyDir on a medium that the pod cannot have.
    #[error(transparent)]
    StorageMedium(#[from] StorageMediumError),
    /// Huge pages of another size, or something else, lie where an emptyDir is to be.
    #[error("{path} is not a hugetlbfs with pages of {page_size} bytes")]
    PageSize {
        /// The volume's directory.
        path: PathBuf,
        /// The page size that the pod requests.
        page_size: u64,
    },
    /// A claim that cannot be used.
    #[error(transparent)]
    Claim(Box<ClaimError>),
    /// A step on a volume failed that takes several, as those of claims.
    #[error("{source}")]
    Step {
        /// Its name: of a claim that of the persistent volume.
        name: String,
        /// What was tried.
        step: Step,
        /// The cause.
        source: Box<VolumeError>,
    },
    /// A program of the node failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A FlexVolume driver cannot be used, or failed.
    #[error(transparent)]
    Flex(#[from] FlexError),
    /// A field of an iSCSI or Fibre Channel volume that cannot be used.
    #[error("{kind}: {field} {value:?}: {problem}")]
    DiskField {
        /// `iscsi` or `fc`.
        kind: &'static str,
        /// Its name.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it has to be.
        problem: &'static str,
    },
    /// A Fibre Channel disk that cannot be found or removed.
    #[error("{0}")]
    FcDisk(String),
    /// CHAP without a secret.
    #[error("iscsi: CHAP needs a secretRef with a name")]
    NoChapSecret,
    /// A value of a secret that iscsiadm(8) cannot be given.
    #[error("iscsi: {key} of secret {namespace}/{name} is no text, or has control characters")]
    ChapValue {
        /// Its key.
        key: &'static str,
        /// The secret's namespace.
        namespace: String,
        /// The secret's name.
        name: String,
    },
    /// No portal leads to an iSCSI disk.
    #[error("iscsi: no portal leads to unit {lun} of {target}: {}", .problems.join("; "))]
    NoPath {
        /// The target.
        target: String,
        /// The unit.
        lun: u8,
        /// What happened at each portal.
        problems: Vec<String>,
    },
    /// A portal whose session has no device.
    #[error("portal {portal}: {problem}")]
    Portal {
        /// The portal.
        portal: String,
        /// What is missing.
        problem: String,
    },
    /// The control plane does not let this node have the volume.
    #[error("volume {name} was not attached to this node within {waited:?}: {lack}")]
    NotAttached {
        /// Its name in the status of the Node.
        name: String,
        /// How long it was waited for.
        waited: Duration,
        /// What is missing in the status of the Node.
        lack: &'static str,
    },
    /// An earlier attempt goes on.
    #[error("attaching, formatting and mounting takes longer than {0:?} and goes on in the background")]
    GoesOn(Duration),
    /// The pod has ended while something was waited for.
    #[error("the volumes of the pod are to be torn down")]
    GivenUp,
    /// A type of file system that is no name of one.
    #[error("fsType {0:?} must be a name of at most 32 lowercase letters, digits, dashes and underscores")]
    FileSystemType(String),
    /// A type of file system that the kernel does not read from a device, for a device that holds another one.
    #[error("fsType {0:?} is not the file system on the disk, and the kernel lists no such type of disks")]
    NotOfDevices(String),
    /// A file system that has no program that expands it.
    #[error("ResizeFS.Resize - resize of format {kind} is not supported for device {device} mounted at {mounted}")]
    NotExpandable {
        /// Its type.
        kind: String,
        /// The device.
        device: PathBuf,
        /// Where it is mounted.
        mounted: PathBuf,
    },
    /// The program that expands a file system failed.
    #[error("resize of device {path} failed: {ending}")]
    NotExpanded {
        /// The device, or where it is mounted.
        path: String,
        /// How the program ended, with its name and a part of its output.
        ending: String,
    },
    /// A claim that cannot be read or changed, whose volume is to be expanded.
    #[error("mountVolume.NodeExpandVolume {what}: {source}")]
    ExpandedClaim {
        /// What failed, as upstream writes it; some of its texts have a space before the colon.
        what: &'static str,
        /// The cause.
        source: ObjectError,
    },
    /// A device whose first blocks cannot be read: whether it has a file system is not known.
    #[error("cannot determine what disk {device} holds: {problem}")]
    UnknownFormat {
        /// The device.
        device: PathBuf,
        /// How that was found.
        problem: String,
    },
    /// A device without a file system that must not be written.
    #[error("disk {device} has no file system, and is not formatted since the volume is read-only")]
    Unformatted {
        /// The device.
        device: PathBuf,
    },
    /// A file system that is damaged.
    #[error("fsck cannot repair the file system on {device}: {output}")]
    Damaged {
        /// The device.
        device: PathBuf,
        /// The output of fsck(8), in part.
        output: String,
    },
    /// A device with a file system of another type than the volume has.
    #[error("{source}")]
    OtherFormat {
        /// Why it cannot be mounted.
        source: Box<VolumeError>,
    },
    /// A persistent volume that only one pod may use at a time (KEP-2485); and the name of its plugin, which is not recorded.
    #[error("volume uses the ReadWriteOncePod access mode and is already in use by another pod")]
    InUse(&'static str),
    /// A persistent volume that other nodes have.
    #[error("no matching NodeSelectorTerms")]
    NodeAffinity,
    /// Without the Node object its labels are not known.
    #[error("the Node object was not received yet")]
    NodeUnknown,
    /// A persistent volume with mount options that is not mounted.
    #[error("mount options are not supported for this volume type")]
    MountOptions,
    /// A CSI driver that is not registered at this agent.
    #[error(
        "kubernetes.io/csi: attacher.MountDevice failed to create newCsiDriverClient: driver name {driver} not found in the list of registered CSI drivers"
    )]
    CsiDriver {
        /// Its name.
        driver: String,
    },
    /// A local persistent volume that cannot be mounted.
    #[error("local volume {path}: {problem}")]
    LocalPath {
        /// Its path on the node.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A local persistent volume whose path does not exist, or is neither a directory nor a device. Text as upstream.
    #[error("{0}")]
    LocalType(String),
    /// mount(8) failed.
    #[error("mount failed: {status}\nMounting command: {command}\nMounting arguments: {arguments}\nOutput: {output}\n")]
    MountProgram {
        /// How it ended.
        status: String,
        /// The program, which is systemd-run(1) if that runs mount(8).
        command: &'static str,
        /// Its arguments.
        arguments: Box<str>,
        /// Its output, in part.
        output: Box<str>,
    },
    /// A volume whose place is known only once it is set up.
    #[error("volume {volume:?} is not set up")]
    NotSetUp {
        /// Its name in the spec.
        volume: String,
    },
    /// A volume this agent cannot provide.
    #[error("no volume plugin matched: volume {volume:?} is of a kind that is not supported yet")]
    Unsupported {
        /// Its name in the spec.
        volume: String,
    },
    /// A projected volume without an API server.
    #[error("cannot setup projected volume {volume} because kube client is not configured")]
    NoClient {
        /// Its name in the spec.
        volume: String,
    },
    /// An object that cannot be read.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A field of the pod that the downward API cannot provide.
    #[error(transparent)]
    Downward(#[from] DownwardError),
    /// A key that an object does not have.
    #[error("{what}: {key}")]
    MissingKey {
        /// Upstream's message for this kind of object.
        what: &'static str,
        /// The key.
        key: String,
    },
    /// A path that leaves its volume.
    #[error(transparent)]
    InvalidPath(#[from] InvalidPath),
    /// Files made from API objects and the pod itself that are too large together.
    #[error("the files of a volume made from API objects must have at most {limit} bytes together")]
    ContentTooLarge {
        /// The bound.
        limit: usize,
    },
    /// The API server sets the default; a volume without it did not pass through one.
    #[error("no defaultMode used, not even the default value for it")]
    NoDefaultMode,
    /// Several at once.
    #[error("[{}]", .0.join(", "))]
    Several(Vec<String>),
    /// The blocking task panicked or was cancelled.
    #[error("operation on a volume was interrupted: {0}")]
    Interrupted(String),
    /// A mount of a volume that the spec does not have.
    #[error("volume {volume:?} is not in the pod's spec")]
    NoSuchVolume {
        /// Its name.
        volume: String,
    },
    /// A subPath that is an absolute path.
    #[error("error SubPath `{0}` must not be an absolute path")]
    AbsoluteSubPath(String),
    /// A subPath with `..` in it.
    #[error("unable to provision SubPath `{0}`: must not contain '..'")]
    ClimbingSubPath(String),
    /// A subPath that cannot be mounted. The cause is only logged: it names files of the host, and this
    /// message ends in the pod's status.
    #[error("failed to {action} for volumeMount {volume:?} of container {container:?}")]
    SubPath {
        /// What was tried.
        action: &'static str,
        /// The volume.
        volume: String,
        /// The container.
        container: String,
    },
    /// Content of a plugin that this agent does not serve, or of a volume that was not torn down.
    #[error("{path} is not empty")]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// A mount that this agent did not make, or cannot undo.
    #[error("{path} is a mount point")]
    MountPoint {
        /// What is mounted on.
        path: PathBuf,
    },
}

/// A volume that cannot be set up. Its text is the message of the event.
#[derive(Debug)]
pub struct FailedVolume {
    /// Its name in the spec.
    pub volume: String,
    /// The cause.
    pub error: VolumeError,
}

impl FailedVolume {
    /// True if it is not known what to set up.
    pub fn is_unprocessed(&self) -> bool {
        matches!(self.error, VolumeError::Claim(_))
    }

    /// True if the control plane has not attached it: nothing was tried on this node.
    pub fn is_unattached(&self) -> bool {
        let VolumeError::Step { source, .. } = &self.error else { return false };
        matches!(**source, VolumeError::NotAttached { .. })
    }

    /// Reason of its event.
    pub fn reason(&self) -> &'static str {
        match &self.error {
            VolumeError::Step { step: Step::Map(_) | Step::MapExpanded, .. } => "FailedMapVolume",
            VolumeError::Step { step: Step::Expand, .. } => "VolumeResizeFailed",
            _ => "FailedMount",
        }
    }
}

impl fmt::Display for FailedVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.error {
            VolumeError::Claim(error) => write!(f, "{error}"),
            VolumeError::Step { name, step, source } => {
                write!(f, "{step} for volume {name:?} : {source}")
            }
            error => write!(f, "MountVolume.SetUp failed for volume {:?} : {error}", self.volume),
        }
    }
}

/// A step on a volume with files, or on one that is a raw device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Such as `SetUp`.
    Mount(&'static str),
    /// Such as `MapPodDevice`.
    Map(&'static str),
    /// The check whether a volume with files is one of this node; and the name of its plugin, which is not recorded yet.
    MountAffinity(&'static str),
    /// That of a raw device. As upstream, its event has the reason of mounts.
    MapAffinity,
    /// The expansion of a volume with files that was just mounted for the pod.
    MountExpanded,
    /// That of a raw device.
    MapExpanded,
    /// That of a volume that the pod has.
    Expand,
}

impl fmt::Display for Step {
    /// The failure of the step, in upstream's words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount(step) => write!(f, "MountVolume.{step} failed"),
            Self::Map(step) => write!(f, "MapVolume.{step} failed"),
            Self::MountAffinity(_) => f.write_str("MountVolume.NodeAffinity check failed"),
            Self::MapAffinity => f.write_str("MapVolume.NodeAffinity check failed"),
            Self::MountExpanded => f.write_str("MountVolume.Setup failed while expanding volume"),
            Self::MapExpanded => f.write_str("MapVolume.MarkVolumeAsMounted failed while expanding volume"),
            Self::Expand => f.write_str("NodeExpandVolume.NodeExpandVolume failed"),
        }
    }
}

impl From<ClaimError> for VolumeError {
    fn from(error: ClaimError) -> Self {
        Self::Claim(Box::new(error))
    }
}

impl VolumeError {
    /// This error in a step on the volume of this name.
    pub(super) fn in_step(self, name: &str, step: Step) -> Self {
        Self::Step { name: name.to_owned(), step, source: Box::new(self) }
    }

    /// One error for several: as it is if it is one, in brackets and without repetition if there are more.
    pub(super) fn all_of(mut failed: Vec<Self>) -> Option<Self> {
        if failed.len() <= 1 {
            return failed.pop();
        }
        let texts: IndexSet<String> = failed.iter().map(ToString::to_string).collect();
        match texts.len() {
            1 => failed.pop(),
            _ => Some(Self::Several(texts.into_iter().collect())),
        }
    }
}

/// Adds verb and path to an I/O result.
pub(super) trait OnPath<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, VolumeError>;
}

impl<T> OnPath<T> for io::Result<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, VolumeError> {
        self.map_err(|source| VolumeError::Io { verb, path: path.to_owned(), source })
    }
}

impl<T> OnPath<T> for nix::Result<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, VolumeError> {
        self.map_err(io::Error::from).on(verb, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another file system has its own event on the PersistentVolume; the pod's event has the reason of other failures.
    #[test]
    fn reasons_of_events() {
        let reason = |step| {
            let error = VolumeError::OtherFormat { source: Box::new(VolumeError::InUse("p")) };
            FailedVolume { volume: "v".to_owned(), error: error.in_step("pv", step) }.reason()
        };
        assert_eq!(reason(Step::Mount("MountDevice")), "FailedMount");
        assert_eq!(reason(Step::Map("SetUpDevice")), "FailedMapVolume");
        assert_eq!(reason(Step::MapAffinity), "FailedMount");
        assert_eq!(reason(Step::MountExpanded), "FailedMount");
        assert_eq!(reason(Step::MapExpanded), "FailedMapVolume");
        assert_eq!(reason(Step::Expand), "VolumeResizeFailed");
    }

    /// Comparing each with all before it would take minutes.
    #[test]
    fn any_number_of_errors_becomes_one_without_repetition() {
        let error = |number: usize| VolumeError::NotAFileName { name: number.to_string() };
        let all = VolumeError::all_of((0..100_000).chain([7, 0]).map(error).collect()).expect("an error");
        let VolumeError::Several(texts) = &all else { panic!("{all}") };
        assert_eq!((texts.len(), texts[7].as_str()), (100_000, "\"7\" cannot be part of a path"));
        let same = VolumeError::all_of(vec![error(1), error(1)]).expect("an error").to_string();
        assert_eq!(same, "\"1\" cannot be part of a path");
    }
}
