//! The folder of one measurement: created, and removed with everything that an agent left in it.

use std::io;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use nix::mount::MntFlags;
use nix::mount::umount2;

/// Creates the folders that agents and bare clients work in.
pub(crate) fn create(folder: &Path) -> anyhow::Result<()> {
    for name in ["manifests", "root", "stamps", "logs"] {
        let path = folder.join(name);
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    Ok(())
}

/// Removes the folder after unmounting mount points below it: kubelets bind-mount their root folder to itself.
pub(crate) fn remove(folder: &Path) -> anyhow::Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    for mount in mounts_below(&mounts, folder) {
        umount2(&mount, MntFlags::MNT_DETACH).with_context(|| format!("cannot unmount {}", mount.display()))?;
    }
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Mount points below `folder`, the latest first: the order in which they can be unmounted.
fn mounts_below(mountinfo: &str, folder: &Path) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescaped);
    let mut below: Vec<_> = points.filter(|point| point.starts_with(folder) && point != folder).collect();
    below.reverse();
    below
}

/// Decodes the kernel's octal escapes of white space and backslashes.
fn unescaped(field: &str) -> PathBuf {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    PathBuf::from(escapes.iter().fold(field.to_owned(), |text, (code, char)| text.replace(code, char)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_below_the_folder_are_unmounted_the_latest_first() {
        let mountinfo = "\
            27 1 254:0 / / rw - ext4 /dev/vda rw\n\
            30 27 254:0 /tmp/b /tmp/b rw - ext4 /dev/vda rw\n\
            31 27 254:0 /tmp/b/root /tmp/b/root rw shared:1 - ext4 /dev/vda rw\n\
            32 31 0:5 / /tmp/b/root/a\\040pod rw - tmpfs tmpfs rw\n\
            33 27 0:6 / /tmp/bb/root rw - tmpfs tmpfs rw\n";
        let below = mounts_below(mountinfo, Path::new("/tmp/b"));
        assert_eq!(below, [Path::new("/tmp/b/root/a pod"), Path::new("/tmp/b/root")]);
    }

    #[test]
    fn a_folder_is_created_and_removed() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("f");
        create(&folder).unwrap();
        std::fs::write(folder.join("root/file"), "left by an agent").unwrap();
        remove(&folder).unwrap();
        assert!(!folder.exists());
        remove(&folder).unwrap();
    }
}
