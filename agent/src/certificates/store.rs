//! Pairs on disk, under kubelet's names: each in a file with a timestamp in its name, and a symbolic link
//! `…-current.pem` to the newest, which is replaced atomically.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::time::SystemTime;

use secrecy::ExposeSecret as _;

use super::pair::Pair;
use super::template::Purpose;
use crate::apiserver::tls::PairError;
use crate::filesystem;

/// Why pairs cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file that should be readable is not, or one cannot be written.
    #[error("cannot {verb} {}: {source}", path.display())]
    File {
        /// What was tried.
        verb: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Something else is in place of a link: it may be the only copy of a pair.
    #[error("expected {path:?} to be a symlink but it is a file")]
    NoLink {
        /// Where the link should be.
        path: PathBuf,
    },
    /// A file exists but holds no valid pair.
    #[error("{}: {source}", path.display())]
    Pair {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: PairError,
    },
}

/// Longest file that is read, bytes.
const MAX_FILE: usize = 1 << 20;

/// The pairs of one purpose.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
    purpose: Purpose,
    /// The pair of the configuration, used as long as none was issued.
    configured: Option<(PathBuf, PathBuf)>,
}

type Stored<T> = Result<T, StoreError>;

fn failed(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File { verb, path, source }
}

impl Store {
    /// Pairs in `folder` (`--cert-dir`). `configured` names certificate and key files that are used until one is
    /// issued.
    pub fn new(folder: &Path, purpose: Purpose, configured: Option<(PathBuf, PathBuf)>) -> Self {
        // The target of a link is relative to the link, and a path in a kubeconfig to that file.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { folder, purpose, configured }
    }

    /// What the pairs are for.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// The link to the newest pair.
    pub fn current_path(&self) -> PathBuf {
        self.folder.join(format!("{}-current.pem", self.purpose.prefix()))
    }

    fn updated_path(&self) -> PathBuf {
        self.folder.join(format!("{}-updated.pem", self.purpose.prefix()))
    }

    /// The initial pair; finishes an interrupted replacement. Blocks.
    ///
    /// # Errors
    /// A pair exists but cannot be used; something else than a link is where an interrupted replacement leaves one.
    pub fn load(&self) -> Stored<Option<Pair>> {
        let (current, updated) = (self.current_path(), self.updated_path());
        if !exists(&current)? && is_link(&updated)? {
            fs::rename(&updated, &current).map_err(failed("finish the replacement by", &updated))?;
        }
        self.files()?.map(|(certificate, key)| self.read(&certificate, &key)).transpose()
    }

    /// Reads a pair of [`Self::files`]. Files that are configured may be pipes.
    fn read(&self, certificate: &Path, key: &Path) -> Stored<Pair> {
        let is_configured = self.configured.as_ref().is_some_and(|(named, _)| named == certificate);
        let read = if is_configured { filesystem::read_named } else { filesystem::read_bounded };
        let text = |path: &Path| read(path, MAX_FILE).map(|content| lossy(&content)).map_err(failed("read", path));
        let (chain, secret) = (text(certificate)?, text(key)?);
        Pair::parse(&chain, &secret).map_err(|source| StoreError::Pair { path: certificate.to_owned(), source })
    }

    /// The files of the pair in use.
    fn files(&self) -> Stored<Option<(PathBuf, PathBuf)>> {
        let current = self.current_path();
        if exists(&current)? {
            return Ok(Some((current.clone(), current)));
        }
        let prefix = self.purpose.prefix();
        let plain = (self.folder.join(format!("{prefix}.crt")), self.folder.join(format!("{prefix}.key")));
        for (certificate, key) in self.configured.iter().chain([&plain]) {
            if exists(certificate)? && exists(key)? {
                return Ok(Some((certificate.clone(), key.clone())));
            }
        }
        Ok(None)
    }

    /// The file of the certificate in use, or where it would be, for log lines.
    pub fn place(&self) -> String {
        let file = self.files().ok().flatten().map_or_else(|| self.current_path(), |(certificate, _)| certificate);
        file.display().to_string()
    }

    /// Makes `pair` the current one. Blocks.
    ///
    /// # Errors
    /// It cannot be written, or something else than a link is in place of one; the previous pair stays current.
    pub fn replace(&self, pair: &Pair, now: SystemTime) -> Stored<()> {
        let folder = &self.folder;
        fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(failed("create", folder))?;
        let (current, updated) = (self.current_path(), self.updated_path());
        // First: each attempt would leave a file.
        is_link(&current)?;
        let is_left = is_link(&updated)?;
        let file = folder.join(format!("{}-{}.pem", self.purpose.prefix(), stamp(now)));
        // One name for all, so that the next pair replaces what a killed agent has left: it holds a key.
        let partial = format!("{}.pem.new", self.purpose.prefix());
        let written = filesystem::replace(&file, &partial, pair.text().expose_secret().as_bytes(), 0o600);
        written.map_err(failed("write", &file))?;
        if is_left {
            fs::remove_file(&updated).map_err(failed("remove", &updated))?;
        }
        symlink(&file, &updated).map_err(failed("create the link", &updated))?;
        fs::rename(&updated, &current).map_err(failed("replace", &current))?;
        let synced = fs::File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(failed("sync", folder))
    }
}

/// Writes a file atomically, with mode 0600, and waits until it is on the disk: without power, a certificate that the API
/// server has issued must not be lost. Blocks.
///
/// # Errors
/// It cannot be written.
pub(super) fn write_private(path: &Path, text: &str) -> Stored<()> {
    let partial = format!("{}.new", path.file_name().unwrap_or_default().display());
    filesystem::replace(path, &partial, text.as_bytes(), 0o600).map_err(failed("write", path))
}

/// True for a link, false if there is nothing.
///
/// # Errors
/// It is something else, which is left alone as upstream; the folder cannot be accessed.
fn is_link(path: &Path) -> Stored<bool> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("access", path)(error)),
        Ok(found) if found.is_symlink() => Ok(true),
        Ok(_) => Err(StoreError::NoLink { path: path.to_owned() }),
    }
}

/// A dangling link counts as missing.
fn exists(path: &Path) -> Stored<bool> {
    path.try_exists().map_err(failed("access", path))
}

/// The text of a file of the agent. Blocks.
///
/// # Errors
/// It cannot be read, is no regular file, or too long.
pub(super) fn text(path: &Path) -> Stored<String> {
    filesystem::read_bounded(path, MAX_FILE).map(|content| lossy(&content)).map_err(failed("read", path))
}

/// What is not UTF-8 is replaced: it may stand between the blocks of PEM, and never in one.
fn lossy(content: &[u8]) -> String {
    String::from_utf8_lossy(content).into_owned()
}

/// `YYYY-MM-DD-HH-MM-SS`, UTC.
fn stamp(now: SystemTime) -> String {
    humantime::format_rfc3339_seconds(now).to_string().trim_end_matches('Z').replace(['T', ':'], "-")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::super::testing::pair;
    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    fn at(second: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + second)
    }

    fn store(folder: &Path) -> Store {
        Store::new(folder, Purpose::Client, None)
    }

    fn name(store: &Store) -> String {
        store.load().expect("readable").map(|pair| pair.leaf.common_name).unwrap_or_default()
    }

    #[test]
    fn the_newest_pair_is_behind_the_link_and_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(&folder.path().join("pki"));
        assert_eq!(name(&store), "");
        store.replace(&pair("first", 0, 100), at(0)).expect("written");
        fs::write(folder.path().join("pki/kubelet-client.pem.new"), "of a killed agent").expect("written");
        store.replace(&pair("second", 0, 100), at(1)).expect("written");
        assert_eq!(name(&store), "second");
        let target = fs::read_link(store.current_path()).expect("a link");
        assert_eq!(target.file_name().expect("a name"), "kubelet-client-2023-11-14-22-13-21.pem");
        assert_eq!(fs::metadata(&target).expect("a file").permissions().mode() & 0o777, 0o600);
        let mut files: Vec<_> = fs::read_dir(folder.path().join("pki")).expect("a folder").flatten().collect();
        files.retain(|file| !file.file_name().to_string_lossy().starts_with("kubelet-client-2023"));
        assert_eq!(files.len(), 1, "nothing but the link beside the pairs: {files:?}");
    }

    #[test]
    fn a_relative_folder_is_one_of_the_working_directory() {
        let folder = tempfile::tempdir().expect("a folder");
        let here = std::env::current_dir().expect("a working directory");
        let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
        let store = store(&up.join(folder.path().strip_prefix("/").expect("an absolute path")));
        store.replace(&pair("n", 0, 100), at(0)).expect("written");
        let target = fs::read_link(store.current_path()).expect("a link");
        assert!(target.is_absolute() && store.current_path().is_absolute(), "{}", target.display());
        assert_eq!(name(&store), "n");
    }

    #[test]
    fn an_interrupted_replacement_is_finished() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(folder.path());
        store.replace(&pair("n", 0, 100), at(0)).expect("written");
        fs::rename(store.current_path(), store.updated_path()).expect("renamed");
        assert_eq!(name(&store), "n");
        assert!(store.current_path().is_symlink() && !store.updated_path().is_symlink());
    }

    #[test]
    fn a_link_that_an_interrupted_replacement_has_left_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(folder.path());
        store.replace(&pair("first", 0, 100), at(0)).expect("written");
        symlink("gone.pem", store.updated_path()).expect("a link");
        assert_eq!(name(&store), "first", "the current one counts");
        store.replace(&pair("second", 0, 100), at(1)).expect("written");
        assert_eq!(name(&store), "second");
        assert!(!store.updated_path().is_symlink());
    }

    #[test]
    fn issued_pairs_precede_configured_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let put = |stem: &str, pair: &Pair| {
            fs::write(folder.path().join(format!("{stem}.crt")), &pair.chain).expect("written");
            fs::write(folder.path().join(format!("{stem}.key")), pair.key.expose_secret()).expect("written");
        };
        let path = |name: &str| folder.path().join(name);
        let store = Store::new(folder.path(), Purpose::Serving, Some((path("own.crt"), path("own.key"))));
        fs::write(path("own.crt"), "a certificate without its key").expect("written");
        assert_eq!(name(&store), "");
        put("kubelet-server", &pair("plain", 0, 100));
        assert_eq!(name(&store), "plain");
        put("own", &pair("configured", 0, 100));
        assert_eq!(name(&store), "configured");
        store.replace(&pair("signed", 0, 100), at(0)).expect("written");
        assert_eq!(name(&store), "signed");
    }

    #[test]
    fn a_configured_pair_may_come_through_pipes() {
        let folder = tempfile::tempdir().expect("a folder");
        let (certificate, key) = (folder.path().join("own.crt"), folder.path().join("own.key"));
        let configured = pair("configured", 0, 100);
        let texts = [(&certificate, configured.chain.clone()), (&key, configured.key.expose_secret().to_owned())];
        let writers = texts.map(|(path, text)| {
            InPlace::Pipe.put(path).expect("made");
            let path = path.clone();
            std::thread::spawn(move || fs::write(path, text))
        });
        let store = Store::new(folder.path(), Purpose::Client, Some((certificate, key)));
        let name = in_time(move || store.load().map(|pair| pair.map(|pair| pair.leaf.common_name)));
        assert_eq!(name.expect("it ends").expect("readable").as_deref(), Some("configured"));
        for writer in writers {
            writer.join().expect("no panic").expect("written");
        }
    }

    #[test]
    fn an_unusable_pair_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(folder.path());
        fs::write(store.current_path(), "nonsense").expect("written");
        let error = store.load().expect_err("no pair").to_string();
        assert!(error.contains("kubelet-client-current.pem"), "{error}");
    }

    #[test]
    fn what_lies_in_place_of_the_link_is_named_and_stays() {
        for found in InPlace::ALL {
            let folder = tempfile::tempdir().expect("a folder");
            let store = store(folder.path());
            let path = store.current_path();
            found.put(&path).expect("made");
            let of_thread = store.clone();
            let loaded = in_time(move || of_thread.load()).expect("no other process is waited for");
            let error = loaded.expect_err("no pair").to_string();
            assert!(error.contains("kubelet-client-current.pem"), "{found:?}: {error}");
            if found == InPlace::Loop {
                continue;
            }
            let error = store.replace(&pair("n", 0, 100), at(0)).expect_err("it may be the only copy").to_string();
            assert_eq!(error, format!("expected {path:?} to be a symlink but it is a file"));
            assert!(found.is_at(&path), "{found:?}");
            assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "no pair is written");
        }
    }

    #[test]
    fn a_file_in_place_of_an_interrupted_replacement_is_named_and_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(folder.path());
        let path = store.updated_path();
        InPlace::Garbage.put(&path).expect("made");
        let expected = format!("expected {path:?} to be a symlink but it is a file");
        assert_eq!(store.load().expect_err("it is no link").to_string(), expected);
        let replaced = store.replace(&pair("n", 0, 100), at(0));
        assert_eq!(replaced.expect_err("it would be lost").to_string(), expected);
        assert!(InPlace::Garbage.is_at(&path) && !store.current_path().is_symlink());
    }

    /// A kubelet writes the pair, makes the second link, removes the first one and renames the second. It may be killed
    /// after each step, as this agent, which removes none: the next agent finds a pair, and can replace it.
    #[test]
    fn a_replacement_that_was_interrupted_anywhere_leaves_a_pair() {
        for steps in 0..=3 {
            let folder = tempfile::tempdir().expect("a folder");
            let store = store(folder.path());
            store.replace(&pair("first", 0, 100), at(0)).expect("written");
            let second = folder.path().join("kubelet-client-2023-11-14-22-13-21.pem");
            if steps > 0 {
                write_private(&second, pair("second", 0, 100).text().expose_secret()).expect("written");
            }
            if steps > 1 {
                symlink(&second, store.updated_path()).expect("a link");
            }
            if steps > 2 {
                fs::remove_file(store.current_path()).expect("removed");
            }
            assert_eq!(name(&store), if steps > 2 { "second" } else { "first" }, "after {steps} steps");
            store.replace(&pair("third", 0, 100), at(2)).expect("replaced");
            assert_eq!(name(&store), "third", "after {steps} steps");
            assert!(!store.updated_path().is_symlink());
        }
    }
}
