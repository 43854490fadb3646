//! Local persistent volumes: a directory of the node, bind mounted into the pod's directory.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use nix::mount::MsFlags;
use nix::mount::mount;

use crate::filesystem;
use crate::recorder::EventType;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::fs_group;
use crate::volumes::fs_group::ChangePolicy;
use crate::volumes::layout;
use crate::volumes::layout::make_dirs;
use crate::volumes::mount_program::MountCall;
use crate::volumes::plugin::blocking;

/// A local volume that is about to be mounted.
#[derive(Clone, Debug)]
pub(super) struct LocalMount {
    /// Name of the persistent volume.
    pub(super) name: String,
    /// The directory on the node.
    pub(super) source: PathBuf,
    pub(super) target: PathBuf,
    pub(super) read_only: bool,
    pub(super) options: Vec<String>,
    /// The pod's `fsGroup` and its policy.
    pub(super) group: Option<(u32, ChangePolicy)>,
}

/// What was found before mounting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    /// It is mounted for this pod.
    Mounted,
    /// It is not; `shared`: it is mounted for another pod. `group`: of its directory.
    Absent { shared: bool, group: u32 },
}

impl LocalMount {
    /// Mounts the volume unless it is mounted. Files are given to the pod's group before that, and only if no other pod has
    /// the volume. `notify`: events on the pod, with type, reason and message.
    ///
    /// # Errors
    /// The directory does not exist or is none; the mount fails. Nothing is left of it then.
    pub(super) async fn run(&self, dirs: &PodDirs, notify: impl Fn(EventType, &str, &str)) -> Result<(), VolumeError> {
        let (own, dirs) = (self.clone(), dirs.clone());
        let Found::Absent { shared, group: held } = blocking(move || own.inspect(&dirs)).await? else { return Ok(()) };
        if let Some((group, policy)) = self.group.filter(|_| !self.read_only) {
            if !shared {
                self.give_to(group, policy, &notify).await?;
            } else if held != group {
                let name = &self.name;
                let message = format!(
                    "The requested fsGroup is {group}, but the volume {name} has GID {held}. The volume may not be shareable."
                );
                notify(EventType::Warning, "AlreadyMountedVolume", &message);
            }
        }
        if self.options.is_empty() {
            let own = self.clone();
            return blocking(move || own.bind()).await;
        }
        let mut options = vec!["bind".to_owned()];
        options.extend(self.read_only.then(|| "ro".to_owned()));
        options.extend(self.options.iter().cloned());
        let source = self.source.to_string_lossy();
        let call = MountCall { kind: None, source: &source, target: &self.target, options };
        let mounted = call.run("mount").await;
        if mounted.is_err() {
            let target = self.target.clone();
            let _ = blocking(move || fs::remove_dir(&target).on("remove", &target)).await;
        }
        mounted
    }

    fn inspect(&self, dirs: &PodDirs) -> Result<Found, VolumeError> {
        make_dirs(&self.target)?;
        if is_mount_point(&self.target)? {
            return Ok(Found::Mounted);
        }
        let checked = self.check_source();
        if checked.is_err() {
            let _ = fs::remove_dir(&self.target);
        }
        Ok(Found::Absent { group: checked?, shared: is_mounted_elsewhere(dirs, &self.target) })
    }

    /// Checks the directory on the node and returns its group.
    fn check_source(&self) -> Result<u32, VolumeError> {
        let wrong = |problem: &str| VolumeError::LocalPath { path: self.source.clone(), problem: problem.to_owned() };
        if self.source.components().any(|component| component == Component::ParentDir) {
            return Err(wrong("must not contain '..'"));
        }
        let found = fs::metadata(&self.source).on("inspect", &self.source)?;
        if found.file_type().is_block_device() {
            return Err(wrong("is a block device, which this node cannot format and mount yet"));
        }
        match found.is_dir() {
            true => Ok(found.gid()),
            false => Err(wrong("only directory and block device are supported")),
        }
    }

    async fn give_to(
        &self,
        group: u32,
        policy: ChangePolicy,
        notify: impl Fn(EventType, &str, &str),
    ) -> Result<(), VolumeError> {
        let (count, source) = (Arc::new(AtomicU64::new(0)), self.source.clone());
        let counted = count.clone();
        let walk = blocking(move || {
            // The operator's path may be a link.
            let root = source.canonicalize().on("resolve", &source)?;
            fs_group::apply(&root, group, policy, &counted)
        });
        let notify = |message: String| notify(EventType::Warning, "VolumePermissionChangeInProgress", &message);
        fs_group::with_reports(walk, &self.target, &count, notify).await
    }

    fn bind(&self) -> Result<(), VolumeError> {
        let bound = mount(Some(&self.source), &self.target, None::<&str>, MsFlags::MS_BIND, None::<&str>);
        if let Err(error) = bound.on("bind mount the volume on", &self.target) {
            let _ = fs::remove_dir(&self.target);
            return Err(error);
        }
        if !self.read_only {
            return Ok(());
        }
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        let remounted = mount(None::<&str>, &self.target, None::<&str>, flags, None::<&str>);
        if remounted.is_err() {
            let _ = filesystem::unmount(&self.target);
            let _ = fs::remove_dir(&self.target);
        }
        remounted.on("make read-only", &self.target)
    }
}

fn is_mount_point(path: &Path) -> Result<bool, VolumeError> {
    filesystem::is_mount_point(path).on("inspect", path)
}

/// True if another pod has the same volume: its mount has the same place in that pod's directory.
fn is_mounted_elsewhere(dirs: &PodDirs, target: &Path) -> bool {
    let Some(name) = target.file_name() else { return false };
    let below = Path::new(layout::VOLUMES).join(layout::escaped(super::LOCAL)).join(name);
    let pods = fs::read_dir(dirs.pods()).into_iter().flatten().flatten();
    pods.map(|pod| pod.path().join(&below))
        .any(|other| other != target && filesystem::is_mount_point(&other).unwrap_or(false))
}
