//! hostPath: the path is the volume; its type is checked, and made where the type says so.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;

use super::PodDirs;
use super::VolumeError;
use super::error::OnPath as _;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;

/// Name of the plugin.
pub(super) const NAME: &str = "kubernetes.io/host-path";

/// `kubernetes.io/host-path`.
#[derive(Debug)]
pub(super) struct HostPath;

impl VolumePlugin for HostPath {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.host_path.is_some()
    }

    fn attributes(&self) -> Attributes {
        Attributes::default()
    }

    fn mount_path(&self, _dirs: &PodDirs, _uid: &str, volume: &Volume) -> Result<PathBuf, VolumeError> {
        Ok(volume.host_path.iter().map(|source| &source.path).collect())
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        let source = target.volume.host_path.clone().unwrap_or_default();
        // The path may lie on a file system whose server does not answer.
        Box::pin(blocking(move || {
            check(&source.path, source.type_.as_deref().unwrap_or_default()).map(|()| Ready::default())
        }))
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let volume = volume.clone();
        Box::pin(blocking(move || volume.remove_if_empty()))
    }
}

/// Checks (or makes) the path as its type demands. Links are followed: the path is the operator's.
pub(super) fn check(path: &str, kind: &str) -> Result<(), VolumeError> {
    let wrong = |problem: &str| VolumeError::HostPath { path: path.to_owned(), problem: problem.to_owned() };
    let target = Path::new(path);
    if path.is_empty() || target.components().any(|component| component == Component::ParentDir) {
        return Err(wrong("must not be empty and must not contain '..'"));
    }
    let is = |test: fn(&fs::FileType) -> bool| fs::metadata(target).is_ok_and(|found| test(&found.file_type()));
    let must = |holds: bool, expected: &'static str| match holds {
        true => Ok(()),
        false => Err(VolumeError::HostPathType { path: path.to_owned(), expected }),
    };
    match kind {
        "" => Ok(()),
        "DirectoryOrCreate" => {
            if fs::symlink_metadata(target).is_err() {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(target).on("create", target)?;
            }
            must(is(fs::FileType::is_dir), "directory")
        }
        "FileOrCreate" => {
            make_file(target)?;
            must(is(fs::FileType::is_file), "file")
        }
        "Directory" => must(is(fs::FileType::is_dir), "directory"),
        "File" => must(is(fs::FileType::is_file), "file"),
        "Socket" => must(is(|found| found.is_socket()), "socket file"),
        "CharDevice" => must(is(|found| found.is_char_device()), "character device"),
        "BlockDevice" => must(is(|found| found.is_block_device()), "block device"),
        _ => Err(wrong(&format!("unknown type {kind:?}"))),
    }
}

fn make_file(path: &Path) -> Result<(), VolumeError> {
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result.map(drop).on("create", path),
    }
}
