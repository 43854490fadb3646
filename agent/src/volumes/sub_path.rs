//! subPath: a part of a volume, pinned by a bind mount before the container sees it. A container of the same pod may
//! write in the volume meanwhile; what was checked is what is mounted.

use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;

use nix::mount::MsFlags;
use nix::mount::mount;
use nix::sys::stat::Mode;
use nix::sys::stat::SFlag;
use nix::sys::stat::fchmod;
use nix::sys::stat::fstat;
use nix::sys::stat::mkdirat;

use super::layout::PRIVATE;
use crate::filesystem;

/// Permission bits that made directories take from the volume's: all, also setgid and the sticky bit.
const INHERITED: u32 = 0o7777;

/// Why a subPath was not mounted.
#[derive(Debug)]
pub(super) enum Failure {
    /// A directory that is missing cannot be made inside the volume.
    Create(io::Error),
    /// What the subPath names cannot be opened inside the volume, or not be mounted.
    Prepare(io::Error),
}

/// Mounts `volume`/`sub_path` at `target`, making directories that are missing in the volume. A mount of the same file
/// that is there already stays. Blocking.
pub(super) fn bind(volume: &Path, sub_path: &Path, target: &Path) -> Result<(), Failure> {
    let pinned = pin(volume, sub_path)?;
    mount_pinned(&pinned, target).map_err(Failure::Prepare)
}

fn mount_pinned(pinned: &OwnedFd, target: &Path) -> io::Result<()> {
    let wanted = fstat(pinned)?;
    match fs::metadata(target) {
        Ok(held) => {
            if filesystem::is_mount_point(target)? {
                if (held.dev(), held.ino()) == (wanted.st_dev, wanted.st_ino) {
                    return Ok(());
                }
                filesystem::unmount(target)?;
            }
            remove_target(target)?;
        }
        Err(error) if filesystem::is_disconnected(&error) => {
            tracing::warn!(target = %target.display(), %error, "a subPath mount is broken and is made anew");
            filesystem::unmount(target)?;
            remove_target(target)?;
        }
        Err(_) => {}
    }
    make_target(target, SFlag::from_bits_truncate(wanted.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR)?;
    let source = format!("/proc/self/fd/{}", pinned.as_raw_fd());
    mount(Some(source.as_str()), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    Ok(())
}

/// Opens the file the subPath names: links are followed as long as they stay inside the volume, then the resolved path
/// is walked again with links refused, so that a link put there in between is not.
fn pin(volume: &Path, sub_path: &Path) -> Result<OwnedFd, Failure> {
    let base = volume.canonicalize().map_err(Failure::Prepare)?;
    // As upstream: a failure counts as one of making directories if any was missing.
    let failed = match base.join(sub_path).exists() {
        true => Failure::Prepare,
        false => Failure::Create,
    };
    let resolve = || {
        let (existing, missing) = existing_prefix(&base, sub_path)?;
        let inside = existing.strip_prefix(&base).map_err(|_| io::Error::other("subPath leads out of the volume"))?;
        let root = filesystem::open_root(&base)?;
        make_missing(&root, inside, &missing, fs::metadata(&base)?.mode() & INHERITED)?;
        let resolved: PathBuf = inside.components().chain(missing.components()).collect();
        Ok((root, resolved))
    };
    let (root, resolved) = resolve().map_err(failed)?;
    filesystem::open_path(&root, or_itself(&resolved)).map_err(Failure::Prepare)
}

/// True if a subPath contains `..`.
pub(super) fn climbs(sub_path: &Path) -> bool {
    sub_path.components().any(|component| component == Component::ParentDir)
}

/// The directory itself, where nothing of a path is left.
fn or_itself(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

/// The longest part of `base`/`relative` that exists, resolved, and the rest.
fn existing_prefix(base: &Path, relative: &Path) -> io::Result<(PathBuf, PathBuf)> {
    let components: Vec<Component<'_>> = relative.components().collect();
    let head = |length: usize| base.join(components[..length].iter().collect::<PathBuf>());
    match head(components.len()).canonicalize() {
        Ok(resolved) => return Ok((resolved, PathBuf::new())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let missing = first_missing(components.len(), |length| head(length).canonicalize().is_ok());
    // A link to nowhere is not a missing directory: making one in its place would follow it later.
    let path = head(missing);
    if fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
        return Err(io::Error::other(format!("{} is a link that leads nowhere", path.display())));
    }
    let existing = missing.checked_sub(1).ok_or(io::ErrorKind::NotFound)?;
    Ok((head(existing).canonicalize()?, components[existing..].iter().collect()))
}

/// The number of components of the shortest prefix of a path that does not exist. The prefix of `longest` components does
/// not, and if one exists, all shorter ones do. A binary search: a look-up takes longer the longer the prefix, and
/// containers can make thousands of nested directories.
fn first_missing(longest: usize, exists: impl Fn(usize) -> bool) -> usize {
    let (mut from, mut to) = (0, longest);
    while from < to {
        let middle = from.midpoint(to);
        if exists(middle) { from = middle + 1 } else { to = middle }
    }
    to
}

/// Makes the directories of `missing` in `inside`, with `mode` whatever the umask.
fn make_missing(root: &OwnedFd, inside: &Path, missing: &Path, mode: u32) -> io::Result<()> {
    let (mut path, mode) = (inside.to_owned(), Mode::from_bits_truncate(mode));
    for component in missing.components() {
        let parent = filesystem::open_path(root, or_itself(&path))?;
        match mkdirat(&parent, component.as_os_str(), mode) {
            Ok(()) => {
                let name = std::ffi::CString::new(component.as_os_str().as_bytes())?;
                fchmod(filesystem::open_dir(&parent, &name)?, mode)?;
            }
            Err(nix::errno::Errno::EEXIST) => {}
            Err(error) => return Err(error.into()),
        }
        path.push(component);
    }
    Ok(())
}

fn make_target(target: &Path, is_dir: bool) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(PRIVATE);
    if is_dir {
        return builder.create(target);
    }
    if let Some(parent) = target.parent() {
        builder.create(parent)?;
    }
    fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o640).open(target).map(drop)
}

fn remove_target(target: &Path) -> io::Result<()> {
    if fs::symlink_metadata(target)?.is_dir() { fs::remove_dir(target) } else { fs::remove_file(target) }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn the_first_missing_part_is_found_in_few_look_ups() {
        for missing in [0, 1, 7, 999, 1999, 2000] {
            let looks = Cell::new(0);
            let exists = |length: usize| {
                looks.set(looks.get() + 1);
                length < missing
            };
            assert_eq!(first_missing(2000, exists), missing);
            assert!(looks.get() <= 11, "{missing}: {looks:?}");
        }
    }

    #[test]
    fn what_exists_of_a_path_is_resolved() {
        let root = tempfile::tempdir().expect("a folder");
        let base = root.path().canonicalize().expect("a path");
        fs::create_dir_all(base.join("a/b")).expect("folders");
        fs::write(base.join("a/file"), "").expect("a file");
        std::os::unix::fs::symlink("a/b", base.join("link")).expect("a link");
        std::os::unix::fs::symlink("nowhere", base.join("a/dangling")).expect("a link");
        for (path, existing, missing) in
            [("a/b", "a/b", ""), ("a/b/c/d", "a/b", "c/d"), ("link/x", "a/b", "x"), ("x/y", "", "x/y"), ("", "", "")]
        {
            let found = existing_prefix(&base, Path::new(path)).expect(path);
            assert_eq!(found, (base.join(existing), PathBuf::from(missing)), "{path}");
        }
        for (path, problem) in [("a/dangling/x", "leads nowhere"), ("a/dangling", "leads nowhere"), ("a/file/x", "")] {
            let error = existing_prefix(&base, Path::new(path)).expect_err(path).to_string();
            assert!(error.contains(problem), "{path}: {error}");
        }
    }
}
