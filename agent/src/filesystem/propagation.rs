//! Mount propagation of a directory (mount_namespaces(7)).

use std::fs;
use std::io;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::fcntl::open;
use nix::mount::MsFlags;
use nix::mount::mount;
use nix::sys::stat::Mode;

use super::mount_table::THREAD_MOUNTS;
use super::mount_table::escaped;
use super::mount_table::mount_id;
use super::mount_table::read_mounts;

/// What was found or done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Mounts below the directory were propagated already.
    Shared,
    /// The directory was mounted on itself, shared.
    Made,
    /// Nothing was changed: a mount on the directory would hide the mounts below it.
    HasMounts,
}

/// Makes mounts below a directory propagate to containers that ask for it, and theirs to the node: unless the mount that the
/// directory lies on is shared, mounts it on itself as a shared one.
///
/// # Errors
/// The directory cannot be opened, the table of mounts cannot be read, or the process may not mount.
pub fn make_shared(path: &Path) -> io::Result<Sharing> {
    let path = fs::canonicalize(path)?;
    let directory = open(&path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let (id, table) = (mount_id(&directory)?, read_mounts(Path::new(THREAD_MOUNTS))?);
    if is_shared(&table, &id) {
        return Ok(Sharing::Shared);
    }
    if has_mounts_below(&table, &path) {
        return Ok(Sharing::HasMounts);
    }
    drop(directory);
    mount(Some(&path), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    mount(None::<&str>, &path, None::<&str>, MsFlags::MS_SHARED | MsFlags::MS_REC, None::<&str>)?;
    Ok(Sharing::Made)
}

/// True if the mount with this id is in a peer group. Optional fields stand between the sixth one and a hyphen.
fn is_shared(table: &str, id: &str) -> bool {
    let mut lines = table.lines().map(|line| line.split(' '));
    let Some(mut fields) = lines.find_map(|mut fields| (fields.next() == Some(id)).then_some(fields)) else {
        return false;
    };
    fields.by_ref().skip(5).take_while(|field| *field != "-").any(|field| field.starts_with("shared:"))
}

/// True if something is mounted below the path.
fn has_mounts_below(table: &str, path: &Path) -> bool {
    let path = escaped(&path.to_string_lossy());
    let path = Path::new(&path);
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    points.map(Path::new).any(|point| point != path && point.starts_with(path))
}

#[cfg(test)]
mod tests {
    use keblet_skip::mounts::in_private_mounts;
    use keblet_skip::mounts::tmpfs;

    use super::*;
    use crate::filesystem::unmount;

    const TABLE: &str = "\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:20 / /srv rw shared:4 master:2 - tmpfs none rw
31 22 0:21 / /var/lib/node/pods/a/volumes/m rw,relatime - tmpfs shared:9 rw
";

    #[test]
    fn optional_fields_tell_a_shared_mount() {
        assert!(is_shared(TABLE, "30"));
        assert!(!is_shared(TABLE, "22") && !is_shared(TABLE, "31") && !is_shared(TABLE, "3"));
    }

    #[test]
    fn a_directory_is_shared_once() {
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a directory");
            let dir = root.path().join("a b");
            fs::create_dir(&dir).expect("a directory");
            fs::write(dir.join("file"), "x").expect("a file");
            assert_eq!(make_shared(&dir).expect("mounted"), Sharing::Made);
            assert_eq!(make_shared(&dir).expect("looked at"), Sharing::Shared);
            assert_eq!(
                make_shared(&dir.join("file/..")).map_err(|error| error.kind()),
                Err(io::ErrorKind::NotADirectory)
            );
            assert_eq!(fs::read_to_string(dir.join("file")).expect("a file"), "x");
            unmount(&dir).expect("unmounted");
        });
    }

    #[test]
    fn mounts_of_pods_are_not_hidden() {
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a directory");
            let dir = root.path().join("a b");
            tmpfs(&dir.join("pods/m"));
            assert_eq!(make_shared(&dir).expect("looked at"), Sharing::HasMounts);
            assert!(crate::filesystem::is_mount_point(&dir.join("pods/m")).expect("looked at"));
            unmount(&dir.join("pods/m")).expect("unmounted");
            assert_eq!(make_shared(&dir).expect("mounted"), Sharing::Made);
            unmount(&dir).expect("unmounted");
        });
    }

    #[test]
    fn mounts_below_are_found() {
        assert!(has_mounts_below(TABLE, Path::new("/var/lib/node")));
        assert!(!has_mounts_below(TABLE, Path::new("/srv")) && !has_mounts_below(TABLE, Path::new("/var/lib/no")));
    }
}
