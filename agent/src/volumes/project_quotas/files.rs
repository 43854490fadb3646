//! `/etc/projects` and `/etc/projid` on disk: locked while they are changed, and replaced, never written. Blocking.
//!
//! A kubelet locks both files and renames its own over them, too. So a lock counts only if the locked file is still the one
//! with the name.

use std::fs;
use std::fs::File;
use std::fs::OpenOptions;
use std::fs::TryLockError;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::fs::fchown;
use std::path::Path;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use super::entries::Entries;
use super::error::ProjectQuotaError;
use crate::filesystem;

/// Longest file that is read: a hundred thousand volumes.
const MAX_FILE: usize = 16 << 20;
/// How long another process may keep a file locked; a kubelet needs milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two attempts to lock a file.
const PAUSE: Duration = Duration::from_millis(10);

/// Where the two files are.
#[derive(Clone, Debug)]
pub(super) struct ProjectFiles {
    projects: PathBuf,
    names: PathBuf,
}

/// What a change does, which decides the file that is replaced first: an agent that is killed in between leaves a directory
/// without a name, which the next one completes or removes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// Adds a volume.
    Add,
    /// Removes volumes.
    Remove,
}

impl ProjectFiles {
    /// In this directory, `/etc`.
    pub(super) fn new(directory: &Path) -> Self {
        Self { projects: directory.join("projects"), names: directory.join("projid") }
    }

    /// The content of the files. One that does not exist is empty.
    ///
    /// # Errors
    /// A file cannot be read, or is too long.
    pub(super) fn read(&self) -> Result<Entries, ProjectQuotaError> {
        Ok(Entries { projects: read(&self.projects)?, names: read(&self.names)? })
    }

    /// Replaces the files by what `edit` makes of them; one that stays the same is left alone. `edit` is called while both are
    /// locked.
    ///
    /// # Errors
    /// A file cannot be locked, read or replaced, or is not a regular one; that of `edit`.
    pub(super) fn edit<T>(
        &self,
        change: Change,
        edit: impl FnOnce(&Entries) -> Result<(Entries, T), ProjectQuotaError>,
    ) -> Result<T, ProjectQuotaError> {
        let (projects, names) = (lock(&self.projects)?, lock(&self.names)?);
        let content = |file, path| filesystem::read_opened(file, MAX_FILE).on("read", path);
        let before = Entries { projects: content(&projects, &self.projects)?, names: content(&names, &self.names)? };
        let (after, result) = edit(&before)?;
        let mut replaced = [
            (&self.projects, &projects, before.projects != after.projects, &after.projects),
            (&self.names, &names, before.names != after.names, &after.names),
        ];
        if change == Change::Remove {
            replaced.reverse();
        }
        // Both are on the disk before one of them gets its name.
        let differing = replaced.into_iter().filter(|(_, _, differs, _)| *differs);
        let written = differing.map(|(path, old, _, content)| Replacement::write(path, old, content));
        let written: Vec<Replacement> = written.collect::<Result<_, _>>()?;
        written.into_iter().try_for_each(Replacement::put_in_place)?;
        Ok(result)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ProjectQuotaError> {
    match open(path, File::options().read(true)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        opened => opened.and_then(|file| filesystem::read_opened(&file, MAX_FILE)).on("read", path),
    }
}

/// Opens the file, which is made if there is none, and locks it.
fn lock(path: &Path) -> Result<File, ProjectQuotaError> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        let file = open(path, File::options().read(true).append(true).create(true).mode(0o644)).on("open", path)?;
        match file.try_lock() {
            Ok(()) if is_at(&file, path).on("inspect", path)? => return Ok(file),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error).on("lock", path),
        }
        if Instant::now() >= deadline {
            return Err(ProjectQuotaError::Locked { path: path.to_owned() });
        }
        thread::sleep(PAUSE);
    }
}

/// No link is followed, and nothing but a regular file is waited for or accepted.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok(file)
}

/// True if the opened file still has this name.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let identity = |found: fs::Metadata| (found.dev(), found.ino());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        named => Ok(identity(named?) == identity(file.metadata()?)),
    }
}

/// A new file beside the one that it is to replace. Removed when dropped, unless it has taken its place: from then on the
/// name is that of another process, which has locked the new file.
struct Replacement<'a> {
    partial: PathBuf,
    path: &'a Path,
    is_in_place: bool,
}

impl<'a> Replacement<'a> {
    /// Writes a file with the owner and mode of the old one, and waits until it is on the disk.
    fn write(path: &'a Path, old: &File, content: &[u8]) -> Result<Self, ProjectQuotaError> {
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(".keblet");
        let partial = path.with_file_name(name);
        // One that a killed agent has left; no other process writes it while the old file is locked.
        match fs::remove_file(&partial) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result.on("remove", &partial)?,
        }
        let replacement = Self { partial, path, is_in_place: false };
        let written = || -> io::Result<()> {
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&replacement.partial)?;
            let found = old.metadata()?;
            fchown(&file, Some(found.uid()), Some(found.gid()))?;
            file.set_permissions(found.permissions())?;
            file.write_all(content)?;
            file.sync_all()
        };
        written().on("write", &replacement.partial)?;
        Ok(replacement)
    }

    fn put_in_place(mut self) -> Result<(), ProjectQuotaError> {
        let sync = |folder: &Path| File::open(folder)?.sync_all();
        let renamed = fs::rename(&self.partial, self.path);
        self.is_in_place = renamed.is_ok();
        renamed.and_then(|()| self.path.parent().map_or(Ok(()), sync)).on("replace", self.path)
    }
}

impl Drop for Replacement<'_> {
    fn drop(&mut self) {
        if !self.is_in_place {
            // Fails if it was not made.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Adds verb and path to an I/O result.
pub(super) trait OnPath<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, ProjectQuotaError>;
}

impl<T> OnPath<T> for io::Result<T> {
    fn on(self, verb: &'static str, path: &Path) -> Result<T, ProjectQuotaError> {
        self.map_err(|source| ProjectQuotaError::Io { verb, path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::fs::symlink;

    use super::*;

    struct Etc {
        dir: tempfile::TempDir,
        files: ProjectFiles,
    }

    impl Etc {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let files = ProjectFiles::new(dir.path());
            Self { dir, files }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn add(&self, id: u32) -> Result<(), ProjectQuotaError> {
            let volume = PathBuf::from(format!("/v{id}"));
            self.files.edit(Change::Add, |entries| Ok((entries.with(id, &volume), ())))
        }

        fn read(&self, name: &str) -> String {
            fs::read_to_string(self.path(name)).expect("a file")
        }

        /// Names in the directory.
        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.dir.path()).expect("a directory").flatten();
            let mut names: Vec<String> =
                entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        }
    }

    #[test]
    fn files_are_made_and_replaced_with_their_mode() {
        let etc = Etc::new();
        assert_eq!(etc.files.read().expect("nothing"), Entries::default());
        assert_eq!(etc.names(), Vec::<String>::new(), "reading makes none");
        etc.add(1_048_577).expect("written");
        assert_eq!(
            (etc.read("projects"), etc.read("projid")),
            ("1048577:/v1048577\n".into(), "volume1048577:1048577\n".into())
        );
        fs::set_permissions(etc.path("projid"), fs::Permissions::from_mode(0o600)).expect("a mode");
        // Left by an agent that was killed.
        symlink(etc.path("projid"), etc.path(".projid.keblet")).expect("a link");
        etc.add(1_048_578).expect("written");
        assert_eq!(etc.read("projid"), "volume1048577:1048577\nvolume1048578:1048578\n");
        let mode = |name: &str| fs::metadata(etc.path(name)).expect("a file").permissions().mode() & 0o777;
        assert_eq!((mode("projid"), mode("projects") & 0o600), (0o600, 0o600));
        assert_eq!(etc.names(), ["projects", "projid"], "nothing else is left");
    }

    #[test]
    fn a_change_that_fails_or_is_none_writes_nothing() {
        let etc = Etc::new();
        etc.add(1_048_577).expect("written");
        let inode = || fs::metadata(etc.path("projects")).expect("a file").ino();
        let before = inode();
        etc.files.edit(Change::Remove, |entries| Ok((entries.clone(), ()))).expect("no change");
        let failed: Result<(), _> = etc.files.edit(Change::Add, |_| Err(ProjectQuotaError::NoneFree { tries: 1 }));
        assert!(matches!(failed, Err(ProjectQuotaError::NoneFree { .. })));
        assert_eq!(inode(), before);
    }

    #[test]
    fn only_regular_files_are_read_and_replaced() {
        let etc = Etc::new();
        fs::write(etc.path("elsewhere"), "1:/x\n").expect("a file");
        symlink(etc.path("elsewhere"), etc.path("projid")).expect("a link");
        let error = etc.add(1_048_577).expect_err("a link").to_string();
        assert!(error.starts_with(&format!("cannot open {}: ", etc.path("projid").display())), "{error}");
        assert_eq!(etc.read("elsewhere"), "1:/x\n");
        fs::remove_file(etc.path("projid")).expect("removed");
        nix::unistd::mkfifo(&etc.path("projid"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let error = etc.add(1_048_577).expect_err("a pipe").to_string();
        assert!(error.ends_with("projid: it is not a regular file"), "{error}");
    }

    #[test]
    fn concurrent_changes_are_all_kept() {
        let etc = Etc::new();
        std::thread::scope(|scope| {
            for id in 1_048_577..1_048_593 {
                let etc = &etc;
                scope.spawn(move || etc.add(id).expect("written"));
            }
        });
        let mut lines: Vec<String> = etc.read("projects").lines().map(str::to_owned).collect();
        lines.sort();
        let expected: Vec<String> = (1_048_577..1_048_593).map(|id| format!("{id}:/v{id}")).collect();
        assert_eq!(lines, expected);
        assert_eq!(etc.read("projid").lines().count(), expected.len());
    }

    #[test]
    fn a_lock_on_a_file_that_was_replaced_does_not_count() {
        let etc = Etc::new();
        etc.add(1_048_577).expect("written");
        let old = open(&etc.path("projects"), File::options().read(true)).expect("a file");
        assert!(is_at(&old, &etc.path("projects")).expect("looked at"));
        etc.add(1_048_578).expect("replaced");
        assert!(!is_at(&old, &etc.path("projects")).expect("looked at"));
        fs::remove_file(etc.path("projects")).expect("removed");
        assert!(!is_at(&old, &etc.path("projects")).expect("looked at"));
    }
}
