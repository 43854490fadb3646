//! File operations on one log and those rotated from it. They block.
//!
//! Everything in the folder may come from a container that mounts it: links are not followed, only regular files are read
//! and renamed, and a file is written only where there was none.

use std::fs;
use std::fs::File;
use std::fs::OpenOptions;
use std::fs::Permissions;
use std::io;
use std::io::BufWriter;
use std::io::Read as _;
use std::io::Write;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;
use k8s_openapi::jiff::civil::DateTime;
use tokio_util::sync::CancellationToken;

use super::RotationError;
use super::plan;

/// Bytes that are compressed between two checks whether the agent ends.
const CHUNK: usize = 64 * 1024;

/// A container's log file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Log {
    folder: PathBuf,
    name: String,
}

/// What is at the path of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// A file of this many bytes.
    File(u64),
    /// Nothing.
    Missing,
    /// No regular file, or it cannot be examined: it is not rotated.
    Other,
}

impl Log {
    /// The log at this path; `None` if it names no file.
    pub(super) fn at(path: &str) -> Option<Self> {
        let path = Path::new(path);
        let (folder, name) = path.parent().zip(path.file_name())?;
        Some(Self { folder: folder.to_owned(), name: name.to_str()?.to_owned() }).filter(|_| path.is_absolute())
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// What is at its path.
    pub(super) fn find(&self) -> Found {
        match fs::symlink_metadata(self.path()) {
            Ok(found) if found.is_file() => Found::File(found.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Missing,
            Ok(_) | Err(_) => Found::Other,
        }
    }

    /// Deletes and compresses rotated files, so that there is room for another. Returns the name to rename the log to.
    ///
    /// # Errors
    /// The first operation that failed; what was there before is there still, if not as planned. Also when the agent ends.
    pub(super) fn make_room(
        &self,
        max_files: usize,
        now: DateTime,
        ends: &CancellationToken,
    ) -> Result<String, RotationError> {
        let files = self.files()?;
        let rotation = plan::rotation(&self.name, &files, max_files, now);
        self.delete(&rotation.delete)?;
        for name in rotation.compress {
            if !fs::symlink_metadata(self.folder.join(name)).is_ok_and(|found| found.is_file()) {
                continue;
            }
            compress(&self.folder, name, ends, BufWriter::new).map_err(self.failed("compress", name))?;
        }
        Ok(rotation.rename_to)
    }

    /// Renames the log.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub(super) fn rename_to(&self, name: &str) -> Result<(), RotationError> {
        fs::rename(self.path(), self.folder.join(name)).map_err(self.failed("rename", &self.name))
    }

    /// Restores the name of a renamed log, unless the runtime has created a new log meanwhile, which it writes then.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub(super) fn rename_back(&self, name: &str) -> Result<(), RotationError> {
        let renamed = self.folder.join(name);
        // Unlike a rename this never replaces a file.
        match fs::hard_link(&renamed, self.path()) {
            Ok(()) => fs::remove_file(&renamed).map_err(self.failed("delete", name)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(self.failed("rename back", name)(error)),
        }
    }

    /// Removes what an agent that was killed during a rotation left behind. The log of a container that has exited gets
    /// its name back; of a running one the runtime is to make another.
    ///
    /// # Errors
    /// The first operation that failed.
    pub(super) fn recover(&self, has_exited: bool) -> Result<(), RotationError> {
        let files = match self.files() {
            Err(RotationError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
            files => files?,
        };
        self.delete(&plan::leftovers(&self.name, &files))?;
        match plan::plain(&self.name, &self.files()?).last() {
            Some(newest) if has_exited && self.find() == Found::Missing => self.rename_back(newest),
            // An agent was killed before it removed the other name: a rotation would compress the file that is written.
            Some(newest) if self.is_also(newest) => self.delete(&[*newest]),
            _ => Ok(()),
        }
    }

    /// True if this is another name of the log.
    fn is_also(&self, name: &str) -> bool {
        let identity = |path: PathBuf| fs::symlink_metadata(path).map(|found| (found.dev(), found.ino())).ok();
        let log = identity(self.path());
        log.is_some() && log == identity(self.folder.join(name))
    }

    /// Names of files and links whose names begin as the log's.
    fn files(&self) -> Result<Vec<String>, RotationError> {
        let entries = fs::read_dir(&self.folder).map_err(self.failed("list", ""))?.flatten();
        let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()));
        let names = files.filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter(|name| name.starts_with(&self.name)).collect())
    }

    fn delete(&self, names: &[&str]) -> Result<(), RotationError> {
        for name in names {
            match fs::remove_file(self.folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(self.failed("delete", name)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn failed(&self, attempt: &'static str, name: &str) -> impl FnOnce(io::Error) -> RotationError + use<> {
        let path = if name.is_empty() { self.folder.clone() } else { self.folder.join(name) };
        move |source| RotationError::File { attempt, path, source }
    }
}

/// Replaces a file by its compressed form, with the same permissions. At every moment one of them is complete: the
/// compressed one gets its name when it is on disk, and the other one is deleted after that. `buffered` wraps the file
/// that is written.
fn compress<W: Write>(
    folder: &Path,
    name: &str,
    ends: &CancellationToken,
    buffered: impl FnOnce(File) -> W,
) -> io::Result<()> {
    let plain = folder.join(name);
    let source = open_regular(&plain)?;
    let unfinished = folder.join(format!("{name}.tmp"));
    let compressed = folder.join(format!("{name}.gz"));
    let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let written = target.try_clone().and_then(|written| {
        written.set_permissions(Permissions::from_mode(source.metadata()?.permissions().mode() & 0o777))?;
        pack(source, buffered(target), ends)?;
        written.sync_all()?;
        fs::rename(&unfinished, &compressed)
    });
    if let Err(error) = written {
        // It has not got its name; if it cannot be deleted now, the next rotation does.
        let _ = fs::remove_file(&unfinished);
        return Err(error);
    }
    fs::remove_file(&plain)
}

fn pack(mut source: File, target: impl Write, ends: &CancellationToken) -> io::Result<()> {
    let (mut encoder, mut buffer) = (GzEncoder::new(target, Compression::default()), vec![0; CHUNK]);
    loop {
        if ends.is_cancelled() {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the agent is shutting down"));
        }
        let read = source.read(&mut buffer)?;
        if read == 0 {
            return encoder.finish()?.flush();
        }
        encoder.write_all(&buffer[..read])?;
    }
}

/// Opens a regular file for reading.
fn open_regular(path: &Path) -> io::Result<File> {
    // Opening a FIFO must not wait for its writer.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

#[cfg(test)]
mod tests {
    use flate2::read::GzDecoder;

    use super::*;

    const NOW: DateTime = DateTime::constant(2026, 1, 1, 0, 4, 0, 0);
    const A: &str = "0.log.20260101-000000";
    const B: &str = "0.log.20260101-000100";

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn with(files: &[(&str, &str)]) -> Self {
            let folder = Self(tempfile::tempdir().expect("a folder"));
            for (name, content) in files {
                fs::write(folder.path(name), content).expect("a file");
            }
            folder
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn log(&self) -> Log {
            Log::at(&self.path("0.log").to_string_lossy()).expect("a log")
        }

        /// All files with their content, by name; compressed ones unpacked.
        fn content(&self) -> Vec<(String, String)> {
            let mut all: Vec<_> = fs::read_dir(self.0.path())
                .expect("a folder")
                .flatten()
                .map(|entry| {
                    let (name, mut text) = (entry.file_name().into_string().expect("a name"), String::new());
                    let mut file = File::open(entry.path()).expect("readable");
                    let read = match name.ends_with(".gz") {
                        true => GzDecoder::new(file).read_to_string(&mut text),
                        false => file.read_to_string(&mut text),
                    };
                    read.expect("complete");
                    (name, text)
                })
                .collect();
            all.sort();
            all
        }

        fn holds(&self, expected: &[(&str, &str)]) {
            let content = self.content();
            let content: Vec<_> = content.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
            assert_eq!(content, expected);
        }
    }

    fn runs() -> CancellationToken {
        CancellationToken::new()
    }

    #[test]
    fn a_rotation_compresses_and_deletes_what_its_plan_says() {
        let oldest = "0.log.20251231-000000.gz";
        let folder = Folder::with(&[("0.log", "now"), (A, "a"), (B, "b"), (oldest, ""), ("1.log", "other")]);
        fs::set_permissions(folder.path(A), Permissions::from_mode(0o640)).expect("permitted");
        let name = folder.log().make_room(4, NOW, &runs()).expect("room");
        folder.log().rename_to(&name).expect("renamed");
        folder.holds(&[
            ("0.log.20260101-000000.gz", "a"),
            ("0.log.20260101-000100.gz", "b"),
            ("0.log.20260101-000400", "now"),
            ("1.log", "other"),
        ]);
        let mode = fs::metadata(folder.path("0.log.20260101-000000.gz")).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(folder.log().find(), Found::Missing);
    }

    /// A target on a full disk.
    struct Full(File);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.write_all(&bytes[..bytes.len().min(7)])?;
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    #[test]
    fn a_full_disk_loses_nothing() {
        let folder = Folder::with(&[("0.log", "now"), (A, "a")]);
        let error = compress(folder.0.path(), A, &runs(), Full).expect_err("the disk is full");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        folder.holds(&[("0.log", "now"), (A, "a")]);
    }

    #[test]
    fn an_agent_that_ends_interrupts_a_compression() {
        let folder = Folder::with(&[("0.log", "now"), (A, "a")]);
        let ends = CancellationToken::new();
        ends.cancel();
        let error = folder.log().make_room(5, NOW, &ends).expect_err("interrupted").to_string();
        assert_eq!(error, format!("cannot compress {}: the agent is shutting down", folder.path(A).display()));
        folder.holds(&[("0.log", "now"), (A, "a")]);
    }

    #[test]
    fn a_log_gets_its_name_back_unless_there_is_another() {
        let folder = Folder::with(&[(A, "a")]);
        folder.log().rename_back(A).expect("renamed");
        folder.holds(&[("0.log", "a")]);
        let folder = Folder::with(&[("0.log", "new"), (A, "a")]);
        folder.log().rename_back(A).expect("nothing to do");
        folder.holds(&[("0.log", "new"), (A, "a")]);
    }

    #[test]
    fn an_interrupted_rotation_is_recovered_from() {
        let [unfinished, a_gz] = [format!("{B}.tmp"), format!("{A}.gz")];
        let left = [(A, "a"), (a_gz.as_str(), ""), (B, "b"), (unfinished.as_str(), "half")];
        for has_exited in [false, true] {
            let folder = Folder::with(&left);
            let packed = GzEncoder::new(Vec::new(), Compression::default()).finish().expect("packed");
            fs::write(folder.path(&a_gz), packed).expect("a file");
            folder.log().recover(has_exited).expect("recovered");
            let name = if has_exited { "0.log" } else { B };
            let mut expected = [(name, "b"), (a_gz.as_str(), "")];
            expected.sort();
            folder.holds(&expected);
        }
        let folder = Folder::with(&[]);
        Log::at(&folder.path("none/0.log").to_string_lossy()).expect("a log").recover(true).expect("nothing is there");
    }

    #[test]
    fn a_log_that_has_both_names_loses_that_of_a_rotated_one() {
        for has_exited in [false, true] {
            let folder = Folder::with(&[(A, "a"), ("0.log", "b")]);
            fs::hard_link(folder.path("0.log"), folder.path(B)).expect("a link");
            folder.log().recover(has_exited).expect("recovered");
            folder.holds(&[("0.log", "b"), (A, "a")]);
            folder.log().recover(has_exited).expect("nothing to do");
            folder.holds(&[("0.log", "b"), (A, "a")]);
        }
    }

    #[test]
    fn links_and_other_files_are_neither_read_nor_rotated() {
        let plain = "0.log.20260101-000200";
        let folder = Folder::with(&[("secret", "s"), (plain, "p")]);
        let link = |name: &str| std::os::unix::fs::symlink(folder.path("secret"), folder.path(name)).expect("a link");
        for name in ["0.log", A, &format!("{plain}.tmp")] {
            link(name);
        }
        nix::unistd::mkfifo(&folder.path(B), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        assert_eq!(folder.log().find(), Found::Other);
        folder.log().make_room(9, NOW, &runs()).expect("room");
        let left: Vec<_> = [A, B, plain].map(|name| folder.path(name).symlink_metadata().is_ok()).into();
        assert_eq!(left, [true, true, false]);
        assert_eq!(fs::read_to_string(folder.path("secret")).expect("there"), "s");
        folder.log().make_room(2, NOW, &runs()).expect("room");
        assert!(folder.path("secret").exists() && !folder.path(A).is_symlink(), "the link is deleted");
    }

    #[test]
    fn paths_of_logs() {
        for path in ["", "/", "0.log", "relative/0.log"] {
            assert_eq!(Log::at(path), None, "{path}");
        }
        assert_eq!(Log::at("/a/0.log").expect("a log").path(), Path::new("/a/0.log"));
    }
}
