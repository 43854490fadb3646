//! Gives the files of a volume to the pod's `fsGroup` (KEP-695): a walk that follows no link, enters no mount and leaves the
//! volume's own directory to the end, so that an interrupted one begins anew. As upstream, what cannot be changed is counted
//! and logged, and what cannot be read interrupts it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::fcntl::OFlag;
use nix::fcntl::OpenHow;
use nix::fcntl::ResolveFlag;
use nix::fcntl::openat2;
use nix::sys::stat::FileStat;
use nix::sys::stat::SFlag;
use nix::sys::stat::fstat;
use nix::unistd::Gid;
use nix::unistd::fchownat;
use tokio::time::Instant;

use super::VolumeError;
use super::error::OnPath as _;
use super::plugin::blocking;
use crate::filesystem;
use crate::kernel::listing::Listing;
use crate::recorder::EventType;
use crate::recorder::Recorder;

/// What metrics call the change.
pub(super) const OPERATION: &str = "volume_apply_access_control";

/// When a walk is reported for the first time, and how often then.
const FIRST_REPORT: Duration = Duration::from_secs(30);
const NEXT_REPORT: Duration = Duration::from_secs(60);

/// Directories that are open at a time, each with a part of its list.
const MOST_OPEN: usize = 32;

/// Permissions that files get, and what directories get beside them: to be entered, and new files get their group.
const FILE: u32 = 0o660;
const DIRECTORY: u32 = 0o2110;

/// `fsGroupChangePolicy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum ChangePolicy {
    /// Every time the volume is set up.
    #[default]
    Always,
    /// Unless the volume's own directory has group and permissions already.
    OnRootMismatch,
}

impl ChangePolicy {
    pub(super) fn of(policy: Option<&str>) -> Self {
        if policy == Some("OnRootMismatch") { Self::OnRootMismatch } else { Self::Always }
    }

    pub(super) fn of_pod(pod: &Pod) -> Self {
        let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        Self::of(context.and_then(|context| context.fs_group_change_policy.as_deref()))
    }

    /// True if the walk is not needed for a directory of this group and mode.
    fn is_satisfied(self, group: u32, found_group: u32, found_mode: u32) -> bool {
        let wanted = FILE | DIRECTORY;
        self == Self::OnRootMismatch && found_group == group && found_mode & wanted == wanted
    }
}

/// Mode of a file after the walk.
fn changed(mode: u32, is_dir: bool) -> u32 {
    mode | FILE | if is_dir { DIRECTORY } else { 0 }
}

/// Applies the group to everything in the directory `root`. `count` grows by one for each file. False if the policy needs no
/// walk. Blocking.
///
/// # Errors
/// The directory, or one below it, cannot be read.
fn apply(root: &Path, group: u32, policy: ChangePolicy, count: &AtomicU64) -> Result<bool, VolumeError> {
    let dir = filesystem::open_root(root).on("open", root)?;
    let held = fstat(&dir).on("inspect", root)?;
    if policy.is_satisfied(group, held.st_gid, held.st_mode) {
        return Ok(false);
    }
    let mut walk = Walk::new(dir, group, count);
    walk.run();
    if let Some((path, error)) = walk.failed {
        tracing::warn!(root = %root.display(), group, first = %path.display(), %error, "cannot apply fsGroup to every file");
    }
    match walk.interrupted {
        Some((path, error)) => Err(error).on("apply fsGroup to", &root.join(path)),
        None => Ok(true),
    }
}

/// As [`apply`], without blocking; a walk that takes long is logged, and reported with `notify`, as one of the volume at
/// `shown`.
///
/// # Errors
/// As [`apply`]; the directory cannot be resolved.
pub(super) async fn give(
    root: &Path,
    group: u32,
    policy: ChangePolicy,
    shown: &Path,
    notify: impl Fn(EventType, &str, &str),
) -> Result<bool, VolumeError> {
    let (count, root) = (Arc::new(AtomicU64::new(0)), root.to_owned());
    let counted = count.clone();
    let walk = blocking(move || {
        // The operator's path may be a link.
        let root = root.canonicalize().on("resolve", &root)?;
        apply(&root, group, policy, &counted)
    });
    let notify = |message: String| notify(EventType::Warning, "VolumePermissionChangeInProgress", &message);
    with_reports(walk, shown, &count, notify).await
}

/// Records events on a pod: type, reason and message.
pub(super) fn notices<'a>(recorder: Option<&'a Recorder>, pod: &'a Pod) -> impl Fn(EventType, &str, &str) + use<'a> {
    move |kind, reason, message| {
        if let Some(recorder) = recorder {
            recorder.pod_event(pod, "", kind, reason, message);
        }
    }
}

/// A walk through a tree that containers write: what is kept of it has a bound. Directories within each other are at most as
/// many as a path can name.
struct Walk<'a> {
    root: OwnedFd,
    group: u32,
    count: &'a AtomicU64,
    /// The current file, below the root.
    path: PathBuf,
    /// From the root to the directory that is being read.
    levels: Vec<Level>,
    /// The first file that stays as it is.
    failed: Option<(PathBuf, io::Error)>,
    /// The file or directory that cannot be read: the walk has ended at it.
    interrupted: Option<(PathBuf, io::Error)>,
}

/// A directory that is not read to its end.
struct Level {
    device: libc::dev_t,
    inode: libc::ino_t,
    /// Where its list goes on after the last entry.
    position: i64,
    /// `None` while it is closed.
    list: Option<Listing>,
}

impl<'a> Walk<'a> {
    fn new(root: OwnedFd, group: u32, count: &'a AtomicU64) -> Self {
        Self { root, group, count, path: PathBuf::new(), levels: Vec::new(), failed: None, interrupted: None }
    }

    /// Directories are opened from the root again: no tree exhausts descriptors, and none is left meanwhile.
    fn run(&mut self) {
        self.enter();
        self.finish();
    }

    /// The volume's own directory comes last, and only if nothing below it was left out.
    fn finish(&mut self) {
        while !self.levels.is_empty() {
            self.step();
        }
        if self.interrupted.is_none() {
            self.visit();
        }
    }

    /// Changes one entry, or leaves a directory that has no more.
    fn step(&mut self) {
        match self.advance() {
            Ok(true) => {
                if self.visit() {
                    self.enter();
                } else {
                    self.path.pop();
                }
            }
            Ok(false) => self.leave(),
            Err(error) => self.interrupt(error),
        }
    }

    /// Goes down into the directory at the path.
    fn enter(&mut self) {
        if let Some(far) = self.levels.len().checked_sub(MOST_OPEN) {
            self.levels[far].list = None;
        }
        match Level::open(&self.root, &self.path) {
            Ok(level) => self.levels.push(level),
            Err(error) => self.interrupt(error),
        }
    }

    /// Goes up.
    fn leave(&mut self) {
        self.levels.pop();
        self.path.pop();
    }

    /// Adds the next entry of the directory to the path; false if there is none.
    fn advance(&mut self) -> io::Result<bool> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        if level.list.is_none() {
            level.list = Some(level.reopen(&self.root, &self.path)?);
        }
        let Some(list) = &mut level.list else { return Ok(false) };
        let Some(entry) = list.next_entry()? else { return Ok(false) };
        level.position = entry.next;
        self.path.push(OsStr::from_bytes(entry.name.to_bytes()));
        Ok(true)
    }

    /// Changes the file at the path; true if it is a directory below the root.
    fn visit(&mut self) -> bool {
        self.count.fetch_add(1, Relaxed);
        let file = open(&self.root, &self.path, OFlag::O_PATH);
        match file.and_then(|file| fstat(&file).map(|held| (file, held))) {
            Ok((file, held)) => {
                if let Err(error) = self.change(&file, &held) {
                    self.failed.get_or_insert_with(|| (self.path.clone(), error));
                }
                kind(&held) == SFlag::S_IFDIR && !self.path.as_os_str().is_empty()
            }
            // Something of the agent's or the host's is mounted there, which is not the volume's; or a container has removed
            // it meanwhile.
            Err(Errno::EXDEV | Errno::ENOENT) => false,
            Err(error) => {
                self.interrupt(error.into());
                false
            }
        }
    }

    fn change(&self, file: &OwnedFd, held: &FileStat) -> io::Result<()> {
        fchownat(file, "", None, Some(Gid::from_raw(self.group)), AtFlags::AT_EMPTY_PATH)?;
        // A link has no permissions of its own.
        if kind(held) == SFlag::S_IFLNK {
            return Ok(());
        }
        // The owner first: changing it clears mode bits.
        let mode = changed(held.st_mode & 0o7777, kind(held) == SFlag::S_IFDIR);
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        fs::set_permissions(itself, fs::Permissions::from_mode(mode))
    }

    /// Ends the walk at the path.
    fn interrupt(&mut self, error: io::Error) {
        self.interrupted.get_or_insert_with(|| (self.path.clone(), error));
        self.levels.clear();
    }
}

impl Level {
    fn open(root: &OwnedFd, path: &Path) -> io::Result<Self> {
        let dir = open(root, path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        let held = fstat(&dir)?;
        Ok(Self { device: held.st_dev, inode: held.st_ino, position: 0, list: Some(Listing::new(dir)) })
    }

    /// Its list from the position on, unless another directory is at its path by now.
    fn reopen(&self, root: &OwnedFd, path: &Path) -> io::Result<Listing> {
        let dir = open(root, path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        let held = fstat(&dir)?;
        if (held.st_dev, held.st_ino) != (self.device, self.inode) {
            return Err(io::Error::other("replaced while its files were changed"));
        }
        Ok(Listing::resumed(dir, self.position)?)
    }
}

fn open(root: &OwnedFd, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let how = OpenHow::new()
        .flags(flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    openat2(root, path, how)
}

fn kind(held: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(held.st_mode) & SFlag::S_IFMT
}

/// Waits for a walk through `dir`, and reports with `notify` that it takes long: `count` is how many files it has changed.
async fn with_reports<T>(walk: impl Future<Output = T>, dir: &Path, count: &AtomicU64, notify: impl Fn(String)) -> T {
    let mut walk = std::pin::pin!(walk);
    let mut next = Instant::now() + FIRST_REPORT;
    let mut is_first = true;
    loop {
        tokio::select! {
            biased;
            done = &mut walk => return done,
            () = tokio::time::sleep_until(next) => {
                next += NEXT_REPORT;
                notify(report(dir, (!is_first).then(|| count.load(Relaxed))));
                is_first = false;
            }
        }
    }
}

/// Upstream's message of event `VolumePermissionChangeInProgress`; `None`: the first one.
fn report(dir: &Path, count: Option<u64>) -> String {
    let dir = dir.display();
    match count {
        Some(count) => format!("Setting volume ownership for {dir}, processed {count} files."),
        None => format!(
            "Setting volume ownership for {dir} is taking longer than expected, consider using OnRootMismatch - \
             https://kubernetes.io/docs/tasks/configure-pod-container/security-context/#configure-volume-permission-and-ownership-change-policy-for-pods"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::os::unix::fs::symlink;
    use std::sync::Mutex;

    use keblet_skip::mounts::in_private_mounts;
    use keblet_skip::mounts::tmpfs;

    use super::*;
    use crate::volumes::PodDirs;

    #[test]
    fn the_policy_and_the_modes() {
        for (policy, group, mode, expected) in [
            (None, 7, 0o2770, false),
            (Some("Always"), 7, 0o2770, false),
            (Some("OnRootMismatch"), 7, 0o2770, true),
            (Some("OnRootMismatch"), 7, 0o42775, true),
            (Some("OnRootMismatch"), 8, 0o2770, false),
            (Some("OnRootMismatch"), 7, 0o770, false),
            (Some("OnRootMismatch"), 7, 0o2750, false),
            (Some("Sometimes"), 7, 0o2770, false),
        ] {
            assert_eq!(ChangePolicy::of(policy).is_satisfied(7, group, mode), expected, "{policy:?} {group} {mode:o}");
        }
        let table = [(0o644, false, 0o664), (0o4755, false, 0o4775), (0o755, true, 0o2775), (0o700, true, 0o2770)];
        for (mode, is_dir, expected) in table {
            assert_eq!(changed(mode, is_dir), expected);
        }
    }

    fn seen(path: &Path) -> (u32, u32) {
        let held = fs::symlink_metadata(path).expect("it exists");
        (held.gid(), held.mode() & 0o7777)
    }

    #[test]
    fn every_file_of_the_volume_and_no_other() {
        in_private_mounts(|| {
            let dir = tempfile::tempdir().expect("a folder");
            let (volume, outside) = (dir.path().join("volume"), dir.path().join("outside"));
            fs::create_dir_all(volume.join("a/b")).expect("folders");
            for file in [volume.join("f"), volume.join("a/b/f"), outside.clone()] {
                fs::write(&file, "").expect("a file");
                fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("a mode");
            }
            symlink(&outside, volume.join("a/link")).expect("a link");
            symlink(dir.path(), volume.join("dir-link")).expect("a link");
            tmpfs(&volume.join("mounted"));
            fs::write(volume.join("mounted/f"), "").expect("a file");
            fs::set_permissions(&volume, fs::Permissions::from_mode(0o700)).expect("a mode");

            let count = AtomicU64::new(0);
            assert!(apply(&volume, 77, ChangePolicy::OnRootMismatch, &count).expect("applied"));
            assert_eq!([seen(&volume), seen(&volume.join("a/b"))], [(77, 0o2770), (77, 0o2775)]);
            assert_eq!([seen(&volume.join("f")), seen(&volume.join("a/b/f"))], [(77, 0o660); 2]);
            assert_eq!(seen(&volume.join("a/link")).0, 77, "the link itself");
            assert_eq!(seen(&outside), (0, 0o600));
            assert_eq!((seen(dir.path()).0, seen(&volume.join("mounted/f")).0), (0, 0));
            assert_eq!(count.load(Relaxed), 8);

            fs::write(volume.join("new"), "").expect("a file");
            std::os::unix::fs::chown(volume.join("new"), None, Some(5)).expect("a group");
            assert!(!apply(&volume, 77, ChangePolicy::OnRootMismatch, &count).expect("nothing to do"));
            assert_eq!((seen(&volume.join("new")).0, count.load(Relaxed)), (5, 8));
            assert!(apply(&volume, 77, ChangePolicy::Always, &count).expect("applied"));
            assert_eq!(seen(&volume.join("new")).0, 77);
            apply(&dir.path().join("none"), 77, ChangePolicy::Always, &count).expect_err("no volume");
        });
    }

    /// A walk with the test's own group, which needs no privilege.
    fn walk<'a>(dir: &Path, count: &'a AtomicU64) -> Walk<'a> {
        let mut walk = Walk::new(filesystem::open_root(dir).expect("a folder"), nix::unistd::getgid().as_raw(), count);
        walk.enter();
        walk
    }

    #[test]
    fn of_a_wide_and_deep_tree_little_is_kept() {
        const WIDE: usize = 2000;
        const DEEP: usize = 3 * MOST_OPEN;
        let dir = tempfile::tempdir().expect("a folder");
        let mut folder = dir.path().to_owned();
        for _ in 0..DEEP {
            folder.push("d");
            fs::create_dir(&folder).expect("a folder");
            (0..2).for_each(|number| fs::create_dir(folder.join(number.to_string())).expect("a folder"));
            fs::write(folder.join("file"), "").expect("a file");
        }
        // More than one part of the list, with the deep folder among them.
        (0..WIDE).for_each(|number| fs::create_dir(dir.path().join(number.to_string())).expect("a folder"));
        let count = AtomicU64::new(0);
        let mut walk = walk(dir.path(), &count);
        let (mut visited, mut deepest) = (0, 0);
        while !walk.levels.is_empty() {
            walk.step();
            let open = walk.levels.iter().filter(|level| level.list.is_some()).count();
            assert!(open <= MOST_OPEN, "{open}");
            deepest = deepest.max(walk.levels.len());
            let now = count.load(Relaxed);
            assert!(now <= visited + 1, "one at a time");
            visited = now;
        }
        assert_eq!((visited, deepest), ((WIDE + 4 * DEEP) as u64, DEEP + 2));
        assert!(walk.failed.is_none() && walk.interrupted.is_none() && walk.path.as_os_str().is_empty());
        assert_eq!((seen(&folder).1 & 0o2770, seen(&folder.join("file")).1 & 0o660), (0o2770, 0o660));
    }

    #[test]
    fn a_directory_that_is_replaced_while_it_is_closed_is_left() {
        let dir = tempfile::tempdir().expect("a folder");
        let top = dir.path().join("d");
        let deep = (0..2 * MOST_OPEN).fold(top.clone(), |path, _| path.join("d"));
        fs::create_dir_all(deep).expect("folders");
        let count = AtomicU64::new(0);
        let mut walk = walk(dir.path(), &count);
        while walk.levels.len() < 2 * MOST_OPEN {
            walk.step();
        }
        fs::rename(&top, dir.path().join("moved")).expect("moved");
        fs::create_dir(&top).expect("another folder");
        let before = seen(dir.path());
        walk.finish();
        let (path, error) = walk.interrupted.expect("some are not read to their end");
        assert!(path.starts_with("d") && error.kind() == io::ErrorKind::NotFound, "{} {error}", path.display());
        assert_eq!(seen(dir.path()), before, "the next walk is not left out");
    }

    /// The operator's path may be a link. The kernel clears the bit of a file whose group is changed.
    #[tokio::test]
    async fn a_linked_volume_is_walked_and_its_files_stay_setuid() {
        let root = tempfile::tempdir().expect("a folder");
        let (file, linked) = (root.path().join("real/f"), root.path().join("linked"));
        fs::create_dir(root.path().join("real")).expect("a folder");
        fs::write(&file, "").expect("a file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).expect("a mode");
        symlink("real", &linked).expect("a link");
        let group = nix::unistd::getgid().as_raw();
        assert!(give(&linked, group, ChangePolicy::Always, &linked, |_, _, _| {}).await.expect("walked"));
        assert_eq!(seen(&file), (group, 0o4775));
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_walk_is_reported() {
        let (notices, count) = (Mutex::new(Vec::new()), AtomicU64::new(0));
        let walk = async {
            tokio::time::sleep(Duration::from_secs(100)).await;
            count.store(9, Relaxed);
            tokio::time::sleep(Duration::from_secs(55)).await;
            "done"
        };
        let notify = |text| notices.lock().expect("unpoisoned").push(text);
        let dirs = PodDirs::new(Path::new("/r"));
        let volume = dirs.volume("u-1", "p", "v").expect("a path");
        assert_eq!(with_reports(walk, dirs.shown(&volume), &count, notify).await, "done");
        let notices = notices.into_inner().expect("unpoisoned");
        let begin = "Setting volume ownership for u-1/volumes/p/v";
        assert!(notices[0].starts_with(&format!("{begin} is taking longer than expected, consider using")));
        let rest = [0, 9].map(|count| format!("{begin}, processed {count} files."));
        assert_eq!(notices[1..], rest);
    }
}
