//! Replacing files so that a crash leaves the old content or the new one.

use std::fs;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Replaces a file, or makes it, with this mode less the umask, and waits until that is on the disk. Killed or without
/// power at any time, it leaves the old content or the new one under `path`, and perhaps a file named `partial` in the same
/// folder, which the next call removes. `partial` must be a name that readers of the folder ignore. Calls for the same file
/// must not overlap. Blocking.
///
/// # Errors
/// The file cannot be written or renamed: the old content stays, and no temporary file. Or its folder cannot be synced:
/// whether the old content or the new one survives a loss of power is not known.
pub fn replace(path: &Path, partial: &str, content: &[u8], mode: u32) -> io::Result<()> {
    let partial = path.with_file_name(partial);
    // What a killed process has left may have another mode.
    match fs::remove_file(&partial) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let replaced = write_new(&partial, content, mode).and_then(|()| fs::rename(&partial, path));
    if replaced.is_err() {
        // Not there if it could not be made.
        let _ = fs::remove_file(&partial);
    }
    replaced?;
    // Renaming changes the folder.
    fs::File::open(path.with_file_name("."))?.sync_all()
}

fn write_new(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::fs::symlink;

    use keblet_skip::mounts::in_private_mounts;
    use nix::mount::MsFlags;
    use nix::mount::mount;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;
    use crate::filesystem::unmount;

    const PARTIAL: &str = ".record.partial";

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
    }

    #[test]
    fn a_file_has_the_new_content_and_mode() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("record");
        fs::write(dir.path().join(PARTIAL), "left behind by a killed process").expect("written");
        for (content, mode) in [("first", 0o600), ("next", 0o400)] {
            replace(&path, PARTIAL, content.as_bytes(), mode).expect("replaced");
            assert_eq!(fs::read_to_string(&path).expect("text"), content);
            assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, mode);
            assert_eq!(names(dir.path()), ["record"]);
        }
    }

    #[test]
    fn a_full_disk_leaves_the_old_content_and_no_temporary_file() {
        in_private_mounts(|| {
            let dir = tempfile::tempdir().expect("a folder");
            let small = Some("size=64k");
            mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), small).expect("a tmpfs");
            let path = dir.path().join("record");
            replace(&path, PARTIAL, b"old", 0o600).expect("written");
            let too_long = "x".repeat(1 << 17);
            let error = replace(&path, PARTIAL, too_long.as_bytes(), 0o600).expect_err("a full disk");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(fs::read_to_string(&path).expect("text"), "old");
            assert_eq!(names(dir.path()), ["record"]);
            unmount(dir.path()).expect("unmounted");
        });
    }

    #[test]
    fn a_read_only_file_system_keeps_the_old_content() {
        in_private_mounts(|| {
            let dir = tempfile::tempdir().expect("a folder");
            mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
            let path = dir.path().join("record");
            replace(&path, PARTIAL, b"old", 0o600).expect("written");
            let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            mount(None::<&str>, dir.path(), None::<&str>, read_only, None::<&str>).expect("read-only");
            let error = replace(&path, PARTIAL, b"new", 0o600).expect_err("read-only");
            assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
            assert_eq!(fs::read_to_string(&path).expect("text"), "old");
            unmount(dir.path()).expect("unmounted");
        });
    }

    #[test]
    fn nothing_is_written_through_what_lies_in_place_of_either_file() {
        for is_partial in [false, true] {
            let dir = tempfile::tempdir().expect("a folder");
            let (path, other) = (dir.path().join("record"), dir.path().join("other"));
            let taken = if is_partial { dir.path().join(PARTIAL) } else { path.clone() };
            fs::write(&other, "of another program").expect("written");
            for found in [None, Some(InPlace::Pipe), Some(InPlace::Loop)] {
                let _ = fs::remove_file(&taken);
                found.map_or_else(|| symlink(&other, &taken), |found| found.put(&taken)).expect("made");
                let of_record = path.clone();
                let replaced = in_time(move || replace(&of_record, PARTIAL, b"new", 0o600));
                replaced.expect("no other process is waited for").expect("replaced");
                assert!(!path.is_symlink() && fs::read(&path).expect("a file") == b"new", "{found:?}");
            }
            assert_eq!(fs::read_to_string(&other).expect("text"), "of another program");
            assert!(!dir.path().join(PARTIAL).exists());
        }
    }

    #[test]
    fn folders_in_the_way_stay() {
        let dir = tempfile::tempdir().expect("a folder");
        let (path, partial) = (dir.path().join("record"), dir.path().join(PARTIAL));
        fs::create_dir(&path).expect("a folder");
        assert!(replace(&path, PARTIAL, b"new", 0o600).is_err(), "in place of the file");
        assert_eq!(names(dir.path()), ["record"], "no temporary file is left");
        fs::remove_dir(&path).expect("removed");
        fs::write(&path, "old").expect("written");
        fs::create_dir(&partial).expect("a folder");
        assert!(replace(&path, PARTIAL, b"new", 0o600).is_err(), "in place of the temporary file");
        assert!(fs::read_to_string(&path).expect("text") == "old" && partial.is_dir());
    }
}
