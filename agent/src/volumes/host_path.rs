//! hostPath: the path is the volume; its type is checked, and made where the type says so.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Component;
use std::path::Path;

use super::VolumeError;
use super::error::OnPath as _;

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
