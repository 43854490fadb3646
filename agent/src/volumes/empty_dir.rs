//! emptyDir on disk.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::chown;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;

use super::PodDirs;
use super::VolumeError;
use super::error::OnPath as _;
use super::layout;
use super::layout::make_dirs;
use super::layout::set_mode;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;

/// `kubernetes.io/empty-dir`, medium `""`.
#[derive(Debug)]
pub(super) struct EmptyDir;

impl VolumePlugin for EmptyDir {
    fn name(&self) -> &'static str {
        layout::EMPTY_DIR
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.empty_dir.is_some()
    }

    fn attributes(&self) -> Attributes {
        Attributes { fs_group: true, owns_content: true, ..Attributes::default() }
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        let (dirs, uid, volume) = (target.dirs.clone(), target.uid.to_owned(), target.volume.name.clone());
        Box::pin(blocking(move || set_up(&dirs, &uid, &volume, target.fs_group).map(|()| Ready::default())))
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let volume = volume.clone();
        Box::pin(blocking(move || volume.delete()))
    }
}

/// Makes the directory, writable for every user of the pod. Set up once, marked as ready; a directory that vanished is
/// made again, empty.
fn set_up(dirs: &PodDirs, uid: &str, volume: &str, fs_group: Option<u32>) -> Result<(), VolumeError> {
    let dir = dirs.volume(uid, &layout::escaped(layout::EMPTY_DIR), volume)?;
    let marker = dirs.ready_marker(uid, volume)?;
    if marker.exists() && dir.is_dir() {
        return Ok(());
    }
    if let Some(parent) = dir.parent() {
        make_dirs(parent)?;
    }
    match fs::DirBuilder::new().mode(0o777).create(&dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => result.on("create", &dir)?,
    }
    // Restores bits that the umask cleared.
    set_mode(&dir, 0o777)?;
    if let Some(group) = fs_group {
        apply_fs_group(&dir, group);
    }
    if let Some(parent) = marker.parent() {
        make_dirs(parent)?;
    }
    fs::write(&marker, "").on("create", &marker)
}

/// New files belong to the pod's group. A failure is logged, not fatal, as upstream.
fn apply_fs_group(dir: &std::path::Path, group: u32) {
    let result = chown(dir, None, Some(group)).on("change the group of", dir);
    if let Err(error) = result.and_then(|()| set_mode(dir, 0o2777)) {
        tracing::warn!(group, %error, "cannot apply fsGroup");
    }
}
