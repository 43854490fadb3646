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
use k8s_openapi::api::core::v1::HostPathVolumeSource;
use k8s_openapi::api::core::v1::Volume;
use tokio::time::Instant;
use tokio::time::timeout_at;

use super::PodDirs;
use super::VolumeError;
use super::error::OnPath as _;
use super::global_mounts::Locks;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::SET_UP_TIMEOUT;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;

/// Name of the plugin.
pub(super) const NAME: &str = "kubernetes.io/host-path";

/// `kubernetes.io/host-path`.
#[derive(Debug, Default)]
pub(super) struct HostPath {
    checks: Checks,
}

/// Checks of paths. One whose server does not answer keeps one thread, however often it is tried.
#[derive(Debug, Default)]
pub(super) struct Checks(Locks);

impl Checks {
    /// Checks (or makes) the path as its type demands. A check that is given up goes on, and keeps the path.
    ///
    /// # Errors
    /// As [`check`]; or it, or an earlier check of the same path, takes too long.
    pub(super) async fn run(&self, source: &HostPathVolumeSource) -> Result<(), VolumeError> {
        let deadline = Instant::now() + SET_UP_TIMEOUT;
        let goes_on = |_| VolumeError::GoesOn(SET_UP_TIMEOUT);
        let held = timeout_at(deadline, self.0.lock(&source.path)).await.map_err(goes_on)?;
        let (path, kind) = (source.path.clone(), source.type_.clone().unwrap_or_default());
        let checked = blocking(move || {
            let _held = held;
            check(&path, &kind)
        });
        timeout_at(deadline, checked).await.map_err(goes_on)?
    }
}

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

    fn is_of_host(&self, _uid: &str, _volume: &Volume) -> bool {
        true
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        let source = target.volume.host_path.clone().unwrap_or_default();
        Box::pin(async move { target.unless_over(self.checks.run(&source)).await.map(|()| Ready::default()) })
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
    let must = |wanted: &str, expected| must_be(target, wanted, expected);
    match kind {
        "" => Ok(()),
        "DirectoryOrCreate" => {
            if fs::symlink_metadata(target).is_err() {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(target).on("create", target)?;
            }
            must("Directory", "directory")
        }
        "FileOrCreate" => {
            make_file(target)?;
            must("File", "file")
        }
        "Directory" => must(kind, "directory"),
        "File" => must(kind, "file"),
        "Socket" => must(kind, "socket file"),
        "CharDevice" => must(kind, "character device"),
        "BlockDevice" => must(kind, "block device"),
        _ => Err(wrong(&format!("unknown type {kind:?}"))),
    }
}

/// Checks that a path is of the type `wanted`, which messages call `expected`.
fn must_be(target: &Path, wanted: &str, expected: &'static str) -> Result<(), VolumeError> {
    let path = target.display().to_string();
    match type_of(target) {
        Ok(found) if found == wanted => Ok(()),
        Ok(found) => Err(VolumeError::HostPathType { path, expected, found }),
        Err(problem) => Err(VolumeError::HostPathUnknown { path, expected, problem }),
    }
}

/// The type that a path has, as a hostPath names it; else why it has none.
pub(super) fn type_of(target: &Path) -> Result<&'static str, String> {
    let found = match fs::metadata(target) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(format!("path {target:?} does not exist")),
        Err(error) => return Err(format!("stat {}: {error}", target.display())),
    };
    match found {
        found if found.is_dir() => Ok("Directory"),
        found if found.is_file() => Ok("File"),
        found if found.is_socket() => Ok("Socket"),
        found if found.is_char_device() => Ok("CharDevice"),
        found if found.is_block_device() => Ok("BlockDevice"),
        _ => Err("only recognise file, directory, socket, block device and character device".to_owned()),
    }
}

/// Makes a file unless the path leads to something. As upstream, where a link leads that has no target yet.
fn make_file(path: &Path) -> Result<(), VolumeError> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // What it is, or why that is not known, is determined by the caller.
        _ => return Ok(()),
    }
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o644);
    // What another process puts there meanwhile keeps its content; the other end of a pipe is not waited for.
    options.custom_flags(libc::O_NONBLOCK).open(path).map(drop).on("create", path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use keblet_skip::mounts::in_private_mounts;

    use super::*;

    /// Whatever the umask of the agent is.
    #[test]
    fn what_is_made_can_be_written_by_its_owner_alone() {
        in_private_mounts(|| {
            // A thread with a mount namespace of its own has a umask of its own.
            nix::sys::stat::umask(nix::sys::stat::Mode::empty());
            let root = tempfile::tempdir().expect("a folder");
            let mode = |path: &Path| fs::metadata(path).expect("it exists").permissions().mode() & 0o7777;
            let (dir, file) = (root.path().join("a/b"), root.path().join("f"));
            check(dir.to_str().expect("text"), "DirectoryOrCreate").expect("made");
            check(file.to_str().expect("text"), "FileOrCreate").expect("made");
            assert_eq!([mode(&root.path().join("a")), mode(&dir), mode(&file)], [0o755, 0o755, 0o644]);
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("a mode");
            check(dir.to_str().expect("text"), "DirectoryOrCreate").expect("it is there");
            assert_eq!(mode(&dir), 0o700, "what is there stays as it is");
        });
    }

    #[test]
    fn a_file_is_made_where_a_link_leads_and_what_is_there_stays() {
        let root = tempfile::tempdir().expect("a folder");
        let (link, target) = (root.path().join("link"), root.path().join("target"));
        let path = link.to_str().expect("text");
        std::os::unix::fs::symlink("target", &link).expect("a link");
        check(path, "FileOrCreate").expect("made");
        fs::write(&target, "kept").expect("a file");
        check(path, "FileOrCreate").expect("it is there");
        assert!(link.is_symlink() && fs::read_to_string(&target).expect("text") == "kept");
        fs::remove_file(&target).expect("removed");
        std::os::unix::fs::symlink("target", &target).expect("a link to itself");
        let error = check(path, "FileOrCreate").expect_err("it leads to nothing").to_string();
        assert!(error.contains("is not a file, unable to determine its type: stat"), "{error}");
    }
}
