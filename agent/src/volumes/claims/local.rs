//! Local persistent volumes: a directory of the node, bind mounted into the pod's directory; or a device of the node with a
//! file system, which is mounted for the node first.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::LocalVolumeSource;
use tokio::time::timeout;

use super::exclusive::is_mounted;
use crate::filesystem;
use crate::filesystem::MountTable;
use crate::host_program::HostPrograms;
use crate::recorder::EventType;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::actual_state::ActualState;
use crate::volumes::bind_mount;
use crate::volumes::error::OnPath as _;
use crate::volumes::error::Step;
use crate::volumes::format::DeviceMount;
use crate::volumes::fs_group;
use crate::volumes::fs_group::ChangePolicy;
use crate::volumes::global_mounts::GlobalMounts;
use crate::volumes::host_path;
use crate::volumes::layout;
use crate::volumes::layout::make_dirs;
use crate::volumes::mount_program::MountCall;
use crate::volumes::plugin::SET_UP_TIMEOUT;
use crate::volumes::plugin::Target;
use crate::volumes::plugin::blocking;

/// Directory of global mounts, in that of the plugin.
const MOUNTS: &str = "mounts";

/// A local volume that is about to be mounted.
#[derive(Clone, Debug)]
pub(super) struct LocalMount {
    /// Name of the persistent volume.
    pub(super) name: String,
    /// The directory or device on the node.
    pub(super) source: PathBuf,
    /// `fsType` of a device.
    pub(super) kind: String,
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
    /// It is not. `device`: it is a device with a file system.
    Absent { device: bool },
}

impl LocalMount {
    /// Mounts the volume `of` a pod unless it is mounted. Files are given to the pod's group before that, and only if no other
    /// pod has the volume. `notify`: events on the pod, with type, reason and message.
    ///
    /// # Errors
    /// The directory does not exist or is none; a device cannot be formatted; the mount fails: the step that did. Nothing is
    /// left of it then. Or another pod takes too long with the volume.
    pub(super) async fn run(
        &self,
        of: Target<'_>,
        globals: &GlobalMounts,
        notify: impl Fn(EventType, &str, &str),
    ) -> Result<(), VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(&self.name, Step::Mount(step));
        let own = self.clone();
        let Found::Absent { device } = blocking(move || own.inspect()).await? else {
            return Ok(());
        };
        let mut source = self.source.clone();
        if device {
            source = place(of.dirs, &self.name);
            globals.register(of.uid, &source);
            // A teardown does not wait for it: nothing of it is the pod's yet, and the device is released after it.
            of.unless_over(self.mount_device(globals, &source)).await.map_err(failed("MountDevice"))?;
        }
        // One pod after another, as upstream: the next one finds the mount of the first, whose group the files keep.
        let lock = async {
            let held = timeout(SET_UP_TIMEOUT, globals.lock(&self.source)).await;
            held.map_err(|_| VolumeError::GoesOn(SET_UP_TIMEOUT))
        };
        let _locked = of.unless_over(lock).await.map_err(failed("SetUp"))?;
        self.mount(of.dirs, &source, device, of.actual, notify).await.map_err(failed("SetUp"))
    }

    async fn mount(
        &self,
        dirs: &PodDirs,
        source: &Path,
        has_options: bool,
        actual: &ActualState,
        notify: impl Fn(EventType, &str, &str),
    ) -> Result<(), VolumeError> {
        let shown = dirs.shown(&self.target);
        let (dirs, target, from) = (dirs.clone(), self.target.clone(), source.to_owned());
        let inspect = move || {
            let group = fs::metadata(&from).on("inspect", &from)?.gid();
            Ok((group, is_mounted_elsewhere(&dirs, &target)? || is_bound_for_a_pod(&dirs, &from)?))
        };
        let (held, shared) = blocking(inspect).await?;
        if let Some((group, policy)) = self.group.filter(|_| shared || !self.read_only) {
            if !shared {
                let given = fs_group::give(source, group, policy, shown, &notify);
                actual.timed(fs_group::OPERATION, super::LOCAL, given).await?;
            } else if held != group {
                let name = &self.name;
                let message = format!(
                    "The requested fsGroup is {group}, but the volume {name} has GID {held}. The volume may not be shareable."
                );
                notify(EventType::Warning, "AlreadyMountedVolume", &message);
            }
        }
        if self.options.is_empty() || has_options {
            return bind_mount::make(source, &self.target, self.read_only).await;
        }
        let target = self.target.clone();
        blocking(move || make_dirs(&target)).await?;
        let mut options = vec!["bind".to_owned()];
        options.extend(self.read_only.then(|| "ro".to_owned()));
        options.extend(self.options.iter().cloned());
        let source = source.to_string_lossy();
        let call = MountCall { kind: None, source: &source, target: &self.target, options };
        let mounted = call.run(&HostPrograms).await;
        if mounted.is_err() {
            let target = self.target.clone();
            let _ = blocking(move || fs::remove_dir(&target).on("remove", &target)).await;
        }
        mounted
    }

    fn inspect(&self) -> Result<Found, VolumeError> {
        let failed = |step| move |error: VolumeError| error.in_step(&self.name, Step::Mount(step));
        match filesystem::is_mount_point(&self.target) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            result if result.as_ref().is_ok_and(|is| !is) => {}
            result => return result.on("inspect", &self.target).map(|_| Found::Mounted).map_err(failed("SetUp")),
        }
        if self.source.components().any(|component| component == Component::ParentDir) {
            let problem = "must not contain '..'".to_owned();
            return Err(failed("SetUp")(VolumeError::LocalPath { path: self.source.clone(), problem }));
        }
        let found = match host_path::type_of(&self.source) {
            Ok("Directory") => Ok(Found::Absent { device: false }),
            Ok("BlockDevice") => Ok(Found::Absent { device: true }),
            Ok(_) => Err("only directory and block device are supported".to_owned()),
            Err(problem) => Err(problem),
        };
        found.map_err(VolumeError::LocalType).map_err(failed("NewMounter initialization"))
    }

    /// Mounts the device for the node, unless it is.
    async fn mount_device(&self, globals: &GlobalMounts, place: &Path) -> Result<(), VolumeError> {
        let (own, at) = (self.clone(), place.to_owned());
        let work = async move {
            if bind_mount::is_there(&at).await? {
                return Ok(());
            }
            let target = at.clone();
            blocking(move || make_dirs(&target)).await?;
            let (device, kind, options) = (&own.source, &own.kind, &own.options);
            let mount = DeviceMount { device, target: &at, kind, read_only: own.read_only, options };
            let mounted = mount.run(&HostPrograms).await;
            if mounted.is_err() {
                let _ = blocking(move || fs::remove_dir(&at).on("remove", &at)).await;
            }
            mounted
        };
        // Boxed, as a large future, which each of those around it would hold.
        globals.carry_out(place, Box::pin(work)).await
    }
}

/// True if the volume is a directory of the node; false if that cannot be determined.
pub(super) async fn is_directory(source: &LocalVolumeSource) -> bool {
    let path = Path::new("/").join(&source.path);
    blocking(move || Ok(path.is_dir())).await.unwrap_or(false)
}

/// Where the device of a persistent volume is mounted for the node.
pub(super) fn place(dirs: &PodDirs, volume: &str) -> PathBuf {
    dirs.plugin(super::LOCAL).join(MOUNTS).join(volume)
}

/// Devices that are mounted for the node, or were begun to be. Blocking.
///
/// # Errors
/// The directory cannot be listed.
pub(in crate::volumes) fn places(dirs: &PodDirs) -> Result<Vec<PathBuf>, VolumeError> {
    layout::entries(&dirs.plugin(super::LOCAL).join(MOUNTS))
}

/// Unmounts a device for the node. False if a pod uses it, or if it is still being mounted: other devices are released
/// meanwhile.
///
/// # Errors
/// It is in use otherwise.
pub(in crate::volumes) async fn release(globals: &GlobalMounts, place: &Path) -> Result<bool, VolumeError> {
    let Some(_alone) = globals.try_lock(place) else { return Ok(false) };
    let (globals, place) = (globals.clone(), place.to_owned());
    blocking(move || match globals.unmount_unused(&place)? {
        true => fs::remove_dir(&place).on("remove", &place).map(|()| true),
        false => Ok(false),
    })
    .await
}

/// True if another pod has the same volume: its mount has the same place in that pod's directory.
///
/// # Errors
/// A directory cannot be read: whether another pod has the volume is not known.
fn is_mounted_elsewhere(dirs: &PodDirs, target: &Path) -> Result<bool, VolumeError> {
    let Some(name) = target.file_name() else { return Ok(false) };
    let below = Path::new(layout::VOLUMES).join(layout::escaped(super::LOCAL)).join(name);
    let pods = layout::entries(&dirs.pods())?;
    for other in pods.iter().map(|pod| pod.join(&below)).filter(|other| other != target) {
        if is_mounted(&other)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True if some pod has the directory, or what is mounted there: as upstream, two persistent volumes may have the same path.
///
/// # Errors
/// The table of mounts cannot be read.
fn is_bound_for_a_pod(dirs: &PodDirs, path: &Path) -> Result<bool, VolumeError> {
    let table = MountTable::read().on("read the table of mounts for", path)?;
    // The way to either is the operator's and may have links, which the table has not.
    let resolved = |path: PathBuf| path.canonicalize().unwrap_or(path);
    Ok(table.is_bound_below(&resolved(path.to_owned()), &resolved(dirs.pods())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Else files in use would be given to the group of another pod.
    #[test]
    fn whether_another_pod_has_the_volume_is_known_or_an_error() {
        let root = tempfile::tempdir().expect("a folder");
        let dirs = PodDirs::new(root.path());
        let below = format!("volumes/{}/pv", layout::escaped(super::super::LOCAL));
        let target = dirs.pods().join("u-1").join(below);
        let found = || is_mounted_elsewhere(&dirs, &target);
        assert!(!found().expect("no pods"));
        fs::create_dir_all(dirs.pods().join("u-2")).expect("a folder");
        fs::write(dirs.pods().join("u-3"), "").expect("a file");
        assert!(!found().expect("it has no volumes"));
        std::os::unix::fs::symlink("volumes", dirs.pods().join("u-2/volumes")).expect("a link");
        found().expect_err("the link leads to itself");
        fs::remove_dir_all(dirs.pods()).expect("removed");
        fs::write(dirs.pods(), "").expect("a file");
        found().expect_err("the pods cannot be listed");
    }
}
