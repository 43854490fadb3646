//! Reads a file of a volume that containers write: links are resolved inside the volume, and no more is read than is
//! allowed.

use std::io;
use std::io::Read as _;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use nix::fcntl::OFlag;
use nix::fcntl::OpenHow;
use nix::fcntl::ResolveFlag;
use nix::fcntl::openat2;

use super::VolumeError;
use super::Volumes;
use super::error::OnPath as _;
use super::plugin::blocking;
use super::uid_of;
use super::uses::volumes;
use crate::filesystem;

impl Volumes {
    /// The content of a file in one of the pod's volumes, of at most `limit` bytes.
    ///
    /// # Errors
    /// There is no such volume or file; it is no regular file, or longer.
    pub async fn read_file(&self, pod: &Pod, volume: &str, path: &str, limit: u64) -> Result<Vec<u8>, VolumeError> {
        let found = volumes(pod).find(|found| found.name == volume);
        let found = found.ok_or_else(|| VolumeError::NoSuchVolume { volume: volume.to_owned() })?;
        let plugin = self.plugins.of(found).ok_or_else(|| VolumeError::Unsupported { volume: volume.to_owned() })?;
        let (root, path) = (plugin.mount_path(&self.dirs, uid_of(pod), found)?, path.to_owned());
        blocking(move || read(&root, Path::new(&path), limit).on("read", &root.join(&path))).await
    }
}

fn read(root: &Path, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let root = filesystem::open_root(root)?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = filesystem::reopen_regular(openat2(&root, path, how)?)?;
    let too_long = || io::Error::other(format!("longer than {limit} bytes"));
    // Nothing is read of it then.
    if file.metadata()?.len() > limit {
        return Err(too_long());
    }
    let mut content = Vec::new();
    // It may grow meanwhile.
    file.take(limit.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 <= limit { Ok(content) } else { Err(too_long()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_outside_the_volume_is_read_and_not_more_than_allowed() {
        let dir = tempfile::tempdir().expect("a folder");
        let volume = dir.path().join("volume");
        std::fs::create_dir_all(volume.join("etc")).expect("a folder");
        std::fs::write(volume.join("etc/env"), "inside").expect("a file");
        std::fs::write(dir.path().join("secret"), "outside").expect("a file");
        symlink("/etc/env", volume.join("absolute")).expect("a link");
        symlink("../secret", volume.join("climbing")).expect("a link");
        symlink("/proc/self/root/etc/passwd", volume.join("magic")).expect("a link");
        nix::unistd::mkfifo(&volume.join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let text = |path: &str, limit| read(&volume, Path::new(path), limit).ok();
        assert_eq!(text("etc/env", 6).as_deref(), Some(&b"inside"[..]));
        assert_eq!(text("absolute", 6).as_deref(), Some(&b"inside"[..]), "a link inside the volume");
        assert_eq!(text("etc/env", 5), None, "too long");
        for path in ["climbing", "../secret", "magic", "pipe", "etc", "none"] {
            assert_eq!(text(path, 100), None, "{path}");
        }
    }
}
