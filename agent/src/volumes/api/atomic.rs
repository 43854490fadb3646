//! Changing all files of a volume in one step.
//!
//! ```text
//!  T/..2026_01_31_12_00_00.123456789/<path>   a version: never changed once it is in use
//!  T/..data ─▶ that directory                 the one link whose replacement switches
//!  T/<name> ─▶ ..data/<name>                  what containers open
//! ```
//!
//! A reader sees either all of the old version or all of the new one, wherever a write is interrupted; the next write
//! removes what it left. Upstream: `pkg/volume/util/atomic_writer.go`.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::io::Read as _;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::fcntl::OFlag;
use nix::fcntl::OpenHow;
use nix::fcntl::ResolveFlag;
use nix::fcntl::openat2;
use nix::fcntl::readlinkat;
use nix::fcntl::renameat;
use nix::sys::stat::Mode;
use nix::sys::stat::fchmod;
use nix::sys::stat::fstat;
use nix::sys::stat::mkdirat;
use nix::unistd::Gid;
use nix::unistd::Uid;
use nix::unistd::UnlinkatFlags;
use nix::unistd::fchown;
use nix::unistd::fchownat;
use nix::unistd::symlinkat;
use nix::unistd::unlinkat;

use super::ownership::Owners;
use super::payload::File;
use super::payload::Payload;
use crate::filesystem;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;

const DATA: &str = "..data";
/// Not upstream's `..data_tmp`: a kubelet does not remove a stale one, and each of its writes fails while there is one.
/// After a hand-over it would never update the volume.
const NEW_DATA: &str = "..data_new";
/// Directories inside a version.
const DIR_MODE: u32 = 0o755;

/// Outcome of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Written {
    /// The volume had this content already.
    Unchanged,
    /// The content was replaced.
    Changed,
}

/// Steps of a write; tests interrupt it after each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WriteStep {
    Directory,
    File,
    Owned,
    Linked,
    Switched,
    NamesLinked,
    StaleRemoved,
}

/// Brings the content of the directory `dir` to `payload`.
///
/// # Errors
/// The step that failed. Readers see the old or the new version, as a whole.
pub(crate) fn write(dir: &Path, payload: &Payload, owners: Owners) -> Result<Written, VolumeError> {
    write_stepwise(dir, payload, owners, |_| Ok(()))
}

/// [`write`] that stops with the error of `after`, called after each step.
pub(super) fn write_stepwise(
    dir: &Path,
    payload: &Payload,
    owners: Owners,
    mut after: impl FnMut(WriteStep) -> io::Result<()>,
) -> Result<Written, VolumeError> {
    payload.check()?;
    let root = filesystem::open_root(dir).on("open", dir)?;
    let current = current_version(&root).on("read", &dir.join(DATA))?;
    remove_stale(dir, current.as_deref(), None)?;
    if let Some(current) = &current
        && holds(&root, &dir.join(current), current, payload).on("read", dir)?
    {
        link_names(&root, payload).on("link files in", dir)?;
        remove_stale(dir, Some(current), Some(payload))?;
        return Ok(Written::Unchanged);
    }
    let fresh = make_version(&root, payload, owners, &mut after).on("write files in", dir)?;
    own_root(&root, owners);
    after(WriteStep::Owned).on("write", dir)?;
    symlinkat(fresh.as_str(), &root, NEW_DATA).on("link in", dir)?;
    after(WriteStep::Linked).on("write", dir)?;
    renameat(&root, NEW_DATA, &root, DATA).on("switch", dir)?;
    after(WriteStep::Switched).on("write", dir)?;
    link_names(&root, payload).on("link files in", dir)?;
    after(WriteStep::NamesLinked).on("write", dir)?;
    remove_stale(dir, Some(&fresh), Some(payload))?;
    after(WriteStep::StaleRemoved).on("write", dir)?;
    Ok(Written::Changed)
}

/// The version in use; `None` if there is none, or the link was not made here.
///
/// # Errors
/// The link cannot be read: the version in use is not known, so none may be removed.
pub(super) fn current_version(root: &OwnedFd) -> nix::Result<Option<String>> {
    let target = match readlinkat(root, DATA) {
        // Something else than a link.
        Err(Errno::ENOENT | Errno::EINVAL) => return Ok(None),
        target => target?,
    };
    let is_version = |name: &String| name.starts_with("..") && name != ".." && !name.contains('/');
    Ok(target.into_string().ok().filter(is_version))
}

/// True if the version has exactly these files with exactly this content.
fn holds(root: &OwnedFd, path: &Path, version: &str, payload: &Payload) -> io::Result<bool> {
    let Ok(below) = open_dir(root, version) else { return Ok(false) };
    for (name, file) in payload.files() {
        let how = opening(OFlag::O_RDONLY | OFlag::O_NONBLOCK);
        let Ok(opened) = openat2(&below, name, how) else { return Ok(false) };
        let mut held = Vec::with_capacity(file.data.len());
        // One byte more detects a longer file.
        fs::File::from(opened).take(file.data.len() as u64 + 1).read_to_end(&mut held)?;
        if held != file.data {
            return Ok(false);
        }
    }
    Ok(count_files(path)? == payload.len())
}

fn count_files(dir: &Path) -> io::Result<usize> {
    let mut count = 0;
    let mut left: Vec<PathBuf> = vec![dir.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => left.push(entry.path()),
                false => count += 1,
            }
        }
    }
    Ok(count)
}

/// Writes all files to a new version and returns its name.
fn make_version(
    root: &OwnedFd,
    payload: &Payload,
    owners: Owners,
    after: &mut impl FnMut(WriteStep) -> io::Result<()>,
) -> io::Result<String> {
    let now = Timestamp::now().strftime("%Y_%m_%d_%H_%M_%S").to_string();
    let name = format!("..{now}.{}", fastrand::u32(..));
    let version = make_dir(root, &name, owners)?;
    after(WriteStep::Directory)?;
    let mut previous = "";
    for (path, file) in payload.files() {
        make_parents(&version, previous, path, owners)?;
        make_file(&version, path, file, owners)?;
        after(WriteStep::File)?;
        previous = path;
    }
    Ok(name)
}

/// Makes the directories of a file, except those that the previous file has made: many files may have one deep path, and the
/// kernel walks it anew for each directory.
fn make_parents(version: &OwnedFd, previous: &str, path: &str, owners: Owners) -> io::Result<()> {
    let common = previous.bytes().zip(path.bytes()).take_while(|(previous, own)| previous == own).count();
    for (end, _) in path.match_indices('/').filter(|(end, _)| *end >= common) {
        match make_dir(version, &path[..end], owners) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => drop(result?),
        }
    }
    Ok(())
}

fn make_dir(parent: &OwnedFd, path: &str, owners: Owners) -> io::Result<OwnedFd> {
    mkdirat(parent, path, Mode::from_bits_truncate(DIR_MODE))?;
    let made = open_dir(parent, path)?;
    own(&made, None, owners.group)?;
    fchmod(&made, Mode::from_bits_truncate(owners.dir_mode(DIR_MODE)))?;
    Ok(made)
}

fn make_file(version: &OwnedFd, path: &str, file: &File, owners: Owners) -> io::Result<()> {
    let how = opening(OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL).mode(Mode::from_bits_truncate(0o600));
    let mut made = fs::File::from(openat2(version, path, how)?);
    made.write_all(&file.data)?;
    // The owner first: changing it clears mode bits.
    own(&made, file.owner, owners.group)?;
    fchmod(&made, Mode::from_bits_truncate(owners.file_mode(file.mode)))?;
    Ok(())
}

fn own(file: impl AsFd, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
    if user.is_none() && group.is_none() {
        return Ok(());
    }
    Ok(fchown(file, user.map(Uid::from_raw), group.map(Gid::from_raw))?)
}

/// The volume's own directory belongs to the group as well. A failure is logged, not fatal, as upstream.
fn own_root(root: &OwnedFd, owners: Owners) {
    let Some(group) = owners.group else { return };
    let result = fstat(root).and_then(|held| {
        let mode = held.st_mode & 0o7777;
        // Root's group has the directory from the start.
        if (held.st_gid, mode) == (group, owners.dir_mode(mode)) {
            return Ok(());
        }
        fchown(root, None, Some(Gid::from_raw(group)))?;
        fchmod(root, Mode::from_bits_truncate(owners.dir_mode(mode)))
    });
    if let Err(error) = result {
        tracing::warn!(group, %error, "cannot apply fsGroup to a volume");
    }
}

/// Links each name that containers open to the version in use.
fn link_names(root: &OwnedFd, payload: &Payload) -> io::Result<()> {
    for name in payload.top_names() {
        let target = format!("{DATA}/{name}");
        match readlinkat(root, name) {
            Ok(held) if held == OsStr::new(&target) => continue,
            Err(Errno::ENOENT) => {}
            // A directory: a container has another volume mounted there, which hides the link anyway.
            Err(Errno::EINVAL) if open_dir(root, name).is_ok() => continue,
            _ => unlinkat(root, name, UnlinkatFlags::NoRemoveDir)?,
        }
        symlinkat(target.as_str(), root, name)?;
        if let Some(owner) = payload.get(name).and_then(|file| file.owner) {
            fchownat(root, name, Some(Uid::from_raw(owner)), None, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        }
    }
    Ok(())
}

/// Removes versions other than `current`, and with `payload` the links to names it does not have.
fn remove_stale(dir: &Path, current: Option<&str>, payload: Option<&Payload>) -> Result<(), VolumeError> {
    let names = payload.map(Payload::top_names);
    for entry in fs::read_dir(dir).on("list", dir)? {
        let entry = entry.on("list", dir)?;
        let (name, path) = (entry.file_name(), entry.path());
        let text = name.to_string_lossy();
        if text.starts_with("..") {
            if text != DATA && current != Some(&text) {
                remove(&path)?;
            }
        } else if let Some(names) = &names
            && !names.contains(&*text)
            && fs::read_link(&path).is_ok_and(|target| target.starts_with(DATA))
        {
            remove(&path)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<(), VolumeError> {
    filesystem::remove_tree(path).on("remove", path)
}

fn opening(flags: OFlag) -> OpenHow {
    OpenHow::new()
        .flags(flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS)
}

fn open_dir(parent: &OwnedFd, path: &str) -> io::Result<OwnedFd> {
    Ok(openat2(parent, path, opening(OFlag::O_RDONLY | OFlag::O_DIRECTORY))?)
}
