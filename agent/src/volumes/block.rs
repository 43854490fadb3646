//! Raw block volumes (`volumeMode: Block`) of persistent volumes: containers get the device itself.
//!
//! ```text
//!  <root>/plugins/kubernetes.io~local-volume/volumeDevices/<persistent volume>/<pod UID>   the device, bind mounted
//!  <root>/plugins/kubernetes.io/iscsi/volumeDevices/iface-<interface>/<portal>-<target>-lun-<unit>/<pod UID>   likewise
//!  <root>/plugins/kubernetes.io/fc/volumeDevices/{<target>-lun-<unit>,<identifier>}/<pod UID>   likewise
//!  <root>/pods/<UID>/volumeDevices/kubernetes.io~{local-volume,iscsi,fc}/<persistent volume>   a link to the device
//! ```
//!
//! A loop device on the bind mount keeps the device in use while the pod has it, so that the kernel does not give its
//! number to another one.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use nix::mount::MsFlags;
use nix::mount::mount;
use tokio::time::Instant;

use super::PodDirs;
use super::VolumeError;
use super::actual_state::ActualState;
use super::actual_state::UNMAP_VOLUME;
use super::claims;
use super::disks::Kind;
use super::error::OnPath as _;
use super::layout;
use super::layout::make_dirs;
use super::layout::resolved;
use super::plugin::blocking;
use crate::filesystem;
use crate::host_program;
use crate::host_program::Call;
use crate::host_program::HostPrograms;

/// Where the kernel lists loop devices.
const LOOPS: &str = "/sys/block";
/// How long losetup(8) may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The device of one persistent volume for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlockMap {
    /// The bind mount of the device.
    pub(super) global: PathBuf,
    /// The link to the device, which containers are given.
    pub(super) link: PathBuf,
}

impl BlockMap {
    /// The places for a pod's use of a local persistent volume.
    ///
    /// # Errors
    /// A name that is no file name.
    pub(super) fn local(dirs: &PodDirs, uid: &str, volume: &str) -> Result<Self, VolumeError> {
        let plugin = layout::escaped(claims::LOCAL);
        Ok(Self { global: dirs.device_map(&plugin, volume, uid)?, link: dirs.device(uid, &plugin, volume)? })
    }

    /// Maps the device for the pod. True if it was not mapped before.
    ///
    /// # Errors
    /// It is no block device; a step fails. The next call completes what was begun.
    pub(super) async fn map(&self, device: &Path) -> Result<bool, VolumeError> {
        let (own, of) = (self.clone(), device.to_owned());
        let is_new = blocking(move || own.place(&of)).await?;
        if loops_on(&self.global).await?.is_empty() {
            losetup(&["--find", "--show"], &self.global).await?;
        }
        Ok(is_new)
    }

    fn place(&self, device: &Path) -> Result<bool, VolumeError> {
        let found = fs::metadata(device).on("inspect", device)?;
        if !found.file_type().is_block_device() {
            return Err(VolumeError::LocalPath {
                path: device.to_owned(),
                problem: "is not a block device".to_owned(),
            });
        }
        for parent in [self.global.parent(), self.link.parent()].into_iter().flatten() {
            make_dirs(parent)?;
        }
        let mut is_new = false;
        // The link first: by it the mount is found after the agent was killed in between.
        if fs::read_link(&self.link).ok().as_deref() != Some(device) {
            remove_file(&self.link)?;
            symlink(device, &self.link).on("create", &self.link)?;
            is_new = true;
        }
        if !filesystem::is_mount_point(&self.global).unwrap_or(false) {
            let file = fs::OpenOptions::new().create(true).truncate(false).write(true).mode(0o640).open(&self.global);
            file.on("create", &self.global)?;
            let bound = mount(Some(device), &self.global, None::<&str>, MsFlags::MS_BIND, None::<&str>);
            bound.on("bind mount the device on", &self.global)?;
            is_new = true;
        }
        Ok(is_new)
    }

    /// Undoes [`Self::map`], also one of another kubelet.
    ///
    /// # Errors
    /// The device is in use, or something cannot be removed.
    pub(super) async fn unmap(&self) -> Result<(), VolumeError> {
        release(&self.global).await?;
        let own = self.clone();
        blocking(move || {
            if let Some(dir) = own.global.parent() {
                // Other pods may use the volume.
                let _ = fs::remove_dir(dir);
            }
            remove_file(&own.link)
        })
        .await
    }
}

/// Undoes the bind mount of a device, and what keeps the device in use.
async fn release(global: &Path) -> Result<(), VolumeError> {
    for device in loops_on(global).await? {
        losetup(&["--detach"], &device).await?;
    }
    let global = global.to_owned();
    blocking(move || {
        if fs::symlink_metadata(&global).is_ok() {
            while filesystem::is_mount_point(&global).on("inspect", &global)? {
                filesystem::unmount(&global).on("unmount", &global)?;
            }
            remove_file(&global)?;
        }
        Ok(())
    })
    .await
}

/// Unmaps all devices of a pod, which `actual` counts and forgets.
///
/// # Errors
/// The first that stays mapped.
pub(super) async fn unmap_all(dirs: &PodDirs, uid: &str, actual: &ActualState) -> Result<(), VolumeError> {
    let mut all = Ok(());
    for link in links(dirs, uid, claims::LOCAL).await? {
        let volume = link.file_name().unwrap_or_default().to_string_lossy();
        let began = Instant::now();
        let unmapped = match BlockMap::local(dirs, uid, &volume) {
            Ok(map) => map.unmap().await,
            Err(error) => Err(error),
        };
        actual.unmapped(uid, claims::LOCAL, &volume, began.elapsed(), unmapped.is_ok());
        all = all.and(unmapped);
    }
    for kind in Kind::ALL {
        all = all.and(unmap_disks(dirs, uid, kind, actual).await);
    }
    all
}

/// Unmaps the devices of one kind of disks of a pod.
async fn unmap_disks(dirs: &PodDirs, uid: &str, kind: Kind, actual: &ActualState) -> Result<(), VolumeError> {
    // The place of a device does not follow from the name of its volume. It stays until the disk is detached.
    let (of_node, pod) = (dirs.clone(), uid.to_owned());
    let of_pod = move || -> Result<Vec<PathBuf>, VolumeError> {
        let places = kind.places(&of_node, true)?.into_iter().map(|place| place.join(&pod));
        Ok(places.filter(|global| fs::symlink_metadata(global).is_ok()).collect())
    };
    let mut all = Ok(());
    for global in blocking(of_pod).await? {
        let began = Instant::now();
        let released = release(&global).await;
        actual.operation(UNMAP_VOLUME, kind.plugin(), began.elapsed(), released.is_ok());
        all = all.and(released);
    }
    all?;
    for link in links(dirs, uid, kind.plugin()).await? {
        let removed = link.clone();
        blocking(move || remove_file(&removed)).await?;
        actual.remove(uid, kind.plugin(), &link.file_name().unwrap_or_default().to_string_lossy());
    }
    Ok(())
}

/// A pod's links to devices of a plugin.
async fn links(dirs: &PodDirs, uid: &str, plugin: &str) -> Result<Vec<PathBuf>, VolumeError> {
    let directory = dirs.devices(uid, &layout::escaped(plugin))?;
    blocking(move || layout::entries(&directory)).await
}

fn remove_file(path: &Path) -> Result<(), VolumeError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.on("remove", path),
    }
}

/// As [`loops_of`], of this machine.
async fn loops_on(file: &Path) -> Result<Vec<PathBuf>, VolumeError> {
    let file = file.to_owned();
    blocking(move || Ok(loops_of(Path::new(LOOPS), &file))).await
}

/// Loop devices on this file, also a removed one, by the kernel's list.
fn loops_of(list: &Path, file: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(list).into_iter().flatten().flatten();
    let real = resolved(file);
    let is_backed = |path: &PathBuf| {
        let backing = fs::read_to_string(path.join("loop/backing_file")).unwrap_or_default();
        let backing = backing.trim_end_matches('\n');
        let backing = Path::new(backing.strip_suffix(" (deleted)").unwrap_or(backing));
        backing == file || backing == real
    };
    let backed = entries.map(|entry| entry.path()).filter(is_backed);
    backed.filter_map(|path| Some(Path::new("/dev").join(path.file_name()?))).collect()
}

async fn losetup(arguments: &[&str], device: &Path) -> Result<(), VolumeError> {
    let device = device.to_string_lossy();
    let all = arguments.iter().copied().chain([&*device]);
    // It only asks the kernel.
    host_program::succeed(&HostPrograms, &Call::new("losetup", all).within(TIMEOUT)).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use keblet_skip::mounts::in_private_mounts;

    use super::*;
    use crate::volumes::testing::LoopDevice;

    #[test]
    fn the_places_of_a_device() {
        let map = BlockMap::local(&PodDirs::new(Path::new("/r")), "u-1", "pv").expect("names");
        assert_eq!(map.global, Path::new("/r/plugins/kubernetes.io~local-volume/volumeDevices/pv/u-1"));
        assert_eq!(map.link, Path::new("/r/pods/u-1/volumeDevices/kubernetes.io~local-volume/pv"));
        assert!(BlockMap::local(&PodDirs::new(Path::new("/r")), "u-1", "../pv").is_err());
    }

    /// A list of loop devices with these files.
    fn list_of(loops: &[(&str, Option<&str>)]) -> tempfile::TempDir {
        let list = tempfile::tempdir().expect("a folder");
        for (name, backing) in loops {
            fs::create_dir_all(list.path().join(name).join("loop")).expect("a folder");
            if let Some(backing) = backing {
                fs::write(list.path().join(name).join("loop/backing_file"), backing).expect("a file");
            }
        }
        list
    }

    #[test]
    fn loop_devices_are_found_by_their_file() {
        let list = list_of(&[
            ("loop0", Some("/r/a\n")),
            ("loop1", Some("/r/a/b\n")),
            ("loop2", None),
            ("loop3", Some("/r/a (deleted)\n")),
        ]);
        let mut found = loops_of(list.path(), Path::new("/r/a"));
        found.sort();
        assert_eq!(found, [Path::new("/dev/loop0"), Path::new("/dev/loop3")]);
        assert_eq!(loops_of(list.path(), Path::new("/r/c")), Vec::<PathBuf>::new());
    }

    #[test]
    fn loop_devices_are_found_below_a_root_directory_that_is_a_link() {
        let root = tempfile::tempdir().expect("a folder");
        let (disk, linked) = (root.path().join("disk"), root.path().join("kubelet"));
        fs::create_dir_all(disk.join("pv")).expect("folders");
        symlink(&disk, &linked).expect("a link");
        // The kernel names files without links.
        let real = disk.canonicalize().expect("it exists").join("pv/u-1");
        let list = list_of(&[("loop7", real.to_str())]);
        assert_eq!(loops_of(list.path(), &linked.join("pv/u-1")), [Path::new("/dev/loop7")]);
    }

    #[test]
    fn the_link_is_made_before_the_mount_that_is_found_by_it() {
        if !Path::new("/dev/loop-control").exists() {
            return keblet_skip::skip("needs loop devices");
        }
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a folder");
            let device = LoopDevice::on(&root.path().join("disk"), 1 << 20);
            let dirs = PodDirs::new(root.path());
            let map = BlockMap::local(&dirs, "u-1", "pv").expect("names");
            // No device can be mounted here.
            fs::create_dir_all(&map.global).expect("a folder");
            map.place(&device.0).expect_err("a folder is in the way");
            assert_eq!(fs::read_link(&map.link).expect("a link"), device.0);

            // The agent is killed before the mount, and the pod deleted.
            fs::remove_dir(&map.global).expect("removed");
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            runtime.block_on(unmap_all(&dirs, "u-1", &ActualState::default())).expect("nothing is mounted");
            let is_there = |path: &Path| fs::symlink_metadata(path).is_ok();
            assert!(!is_there(&map.link) && !is_there(map.global.parent().expect("a folder")));
        });
    }

    /// A disk that hangs would keep the thread from everything else: each pod that ends is unmapped.
    #[test]
    fn devices_are_looked_for_on_threads_that_may_block() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().expect("a runtime");
        runtime.block_on(async {
            let root = tempfile::tempdir().expect("a folder");
            let (dirs, actual) = (PodDirs::new(root.path()), ActualState::default());
            let (release, released) = std::sync::mpsc::channel::<()>();
            let held = tokio::task::spawn_blocking(move || released.recv());
            let mut unmapped = std::pin::pin!(unmap_all(&dirs, "u-1", &actual));
            assert!(futures_util::poll!(&mut unmapped).is_pending(), "it needs no such thread");
            release.send(()).expect("the thread waits");
            held.await.expect("no panic").expect("released");
            unmapped.await.expect("nothing is mapped");
        });
    }

    #[tokio::test]
    async fn what_is_no_device_is_not_mapped() {
        let root = tempfile::tempdir().expect("a folder");
        let map = BlockMap::local(&PodDirs::new(root.path()), "u-1", "pv").expect("names");
        let error = map.map(root.path()).await.expect_err("a folder").to_string();
        assert!(error.ends_with("is not a block device"), "{error}");
        assert!(!map.link.exists() && !root.path().join("plugins").exists());
        map.unmap().await.expect("nothing to undo");
    }
}
