//! Removal beside mounts, in mount namespaces of their own.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use keblet_skip::mounts::bind;
use keblet_skip::mounts::in_private_mounts;
use keblet_skip::mounts::tmpfs;
use nix::mount::MntFlags;
use nix::mount::MsFlags;
use nix::mount::mount;
use nix::mount::umount2;

use super::*;

/// A directory with content that must survive.
fn source(root: &Path) -> std::path::PathBuf {
    let source = root.join("source");
    fs::create_dir_all(source.join("inner")).expect("a directory");
    fs::write(source.join("data"), "x").expect("a file");
    fs::write(source.join("inner/data"), "y").expect("a file");
    source
}

fn is_whole(source: &Path) -> bool {
    source.join("data").exists() && source.join("inner/data").exists()
}

#[test]
fn removal_stops_at_a_mount_point_at_any_level() {
    in_private_mounts(|| {
        for below in ["", "a", "a/b/c"] {
            let root = tempfile::tempdir().expect("a directory");
            let (source, tree) = (source(root.path()), root.path().join("tree"));
            bind(&source, &tree.join(below));
            let error = remove_tree(&tree).expect_err("a mount point");
            assert_eq!(error.kind(), ErrorKind::CrossesDevices, "{below}: {error}");
            assert!(is_whole(&source), "{below}");
            unmount(&tree.join(below)).expect("unmounted");
            remove_tree(&tree).expect("removed");
            assert!(!tree.exists() && is_whole(&source), "{below}");
        }
    });
}

#[test]
fn a_file_with_a_mount_on_it_stays() {
    in_private_mounts(|| {
        let root = tempfile::tempdir().expect("a directory");
        let (source, tree) = (source(root.path()), root.path().join("tree"));
        fs::create_dir(&tree).expect("a directory");
        fs::write(tree.join("file"), "").expect("a file");
        let from = source.join("data");
        mount(Some(&from), &tree.join("file"), None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        assert_eq!(remove_tree(&tree).expect_err("a mount point").kind(), ErrorKind::CrossesDevices);
        assert_eq!(fs::read_to_string(from).expect("a file"), "x");
    });
}

#[test]
fn a_mount_below_the_depth_at_which_directories_move_up_survives() {
    in_private_mounts(|| {
        for below in ["e/f/point", "point"] {
            let root = tempfile::tempdir().expect("a directory");
            let (source, tree) = (source(root.path()), root.path().join("tree"));
            let deep = (0..64).fold(tree.clone(), |path, _| path.join("d"));
            bind(&source, &deep.join(below));
            assert_eq!(remove_tree(&tree).expect_err("a mount point").kind(), ErrorKind::CrossesDevices, "{below}");
            assert!(is_whole(&source), "{below}");
        }
    });
}

#[test]
fn only_directories_are_removed_and_no_link_or_mount_is_entered() {
    in_private_mounts(|| {
        let root = tempfile::tempdir().expect("a directory");
        let (dir, tree) = (fs::File::open(root.path()).expect("opened"), root.path().join("tree"));
        let deep = (0..100).map(|_| "d").collect::<Vec<_>>().join("/");
        let wide = (0..1500).map(|number| format!("w{number}")).collect::<Vec<_>>().join(" ");
        for (directories, file, expected) in [
            ("", None, Ok(())),
            ("dir/subdir1 dir2/subdir2/subdir3 dir3", None, Ok(())),
            (wide.as_str(), None, Ok(())),
            ("dir dir2", Some("dir/file"), Err(ErrorKind::DirectoryNotEmpty)),
            ("dir dir2", Some("file2"), Err(ErrorKind::DirectoryNotEmpty)),
            (deep.as_str(), None, Err(ErrorKind::DirectoryNotEmpty)),
        ] {
            fs::create_dir_all(&tree).expect("a directory");
            directories.split_whitespace().for_each(|below| fs::create_dir_all(tree.join(below)).expect("directories"));
            file.iter().for_each(|file| fs::write(tree.join(file), "").expect("a file"));
            assert_eq!(remove_directories(&dir, c"tree").map_err(|error| error.kind()), expected, "{directories}");
            assert_eq!(tree.exists(), expected.is_err(), "{directories}");
            assert!(file.is_none_or(|file| tree.join(file).exists()));
            remove_tree(&tree).expect("removed");
        }
        remove_directories(&dir, c"tree").expect("nothing to remove");
        let (source, link) = (source(root.path()), tree.join("dir/link"));
        fs::create_dir_all(tree.join("dir")).expect("directories");
        symlink(&source, &link).expect("a link");
        let error = remove_directories(&dir, c"tree").expect_err("a link");
        assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty, "{error}");
        assert!(link.is_symlink() && is_whole(&source));
        fs::remove_file(&link).expect("removed");
        for below in ["", "mount", "dir/dir2/mount"] {
            bind(&source, &tree.join(below));
            let error = remove_directories(&dir, c"tree").expect_err("a mount point");
            assert_eq!(error.kind(), ErrorKind::CrossesDevices, "{below}: {error}");
            assert!(is_whole(&source), "{below}");
            unmount(&tree.join(below)).expect("unmounted");
        }
    });
}

/// Mounts come and go while the tree is removed, between every check and the step after it.
#[test]
fn mounts_that_appear_during_removal_are_not_entered() {
    in_private_mounts(|| {
        let root = tempfile::tempdir().expect("a directory");
        let (source, tree, ended) = (source(root.path()), root.path().join("tree"), AtomicBool::new(false));
        let point = tree.join("a/point");
        std::thread::scope(|scope| {
            let mounting = scope.spawn(|| {
                let mut count = 0;
                while !ended.load(Relaxed) {
                    let mounted = mount(Some(&source), &point, None::<&str>, MsFlags::MS_BIND, None::<&str>).is_ok();
                    count += usize::from(mounted);
                    std::thread::yield_now();
                    if mounted {
                        while umount2(&point, MntFlags::MNT_DETACH).is_ok() {}
                    }
                }
                count
            });
            let (mut removed, mut refused) = (0, 0);
            let begin = std::time::Instant::now();
            while (removed < 50 || refused < 50) && begin.elapsed().as_secs() < 20 {
                fs::create_dir_all(&point).expect("a directory");
                match remove_tree(&tree) {
                    Ok(()) => removed += 1,
                    Err(_) => refused += 1,
                }
                if !is_whole(&source) {
                    break;
                }
            }
            ended.store(true, Relaxed);
            let mounted = mounting.join().expect("the mounting thread");
            assert!(is_whole(&source), "after {removed} removals, {refused} refusals and {mounted} mounts");
            assert!(refused > 0 && mounted > 0, "{removed} removals, {refused} refusals, {mounted} mounts");
        });
    });
}

#[test]
fn mount_points_are_distinguished_from_directories() {
    in_private_mounts(|| {
        let root = tempfile::tempdir().expect("a directory");
        let (source, memory, bound) = (source(root.path()), root.path().join("memory"), root.path().join("bound"));
        tmpfs(&memory);
        bind(&source, &bound);
        let dir = open_root(root.path()).expect("a directory");
        let inspect = |name| (is_mount_point_at(&dir, name).expect("an answer"), lies_in_memory(&dir, name).ok());
        assert_eq!(inspect(c"memory"), (true, Some(true)));
        assert!(inspect(c"bound").0 && !inspect(c"source").0);
        assert!(is_mount_point(&bound).expect("an answer") && !is_mount_point(&source).expect("an answer"));
        unmount_at(&dir, c"bound", false).expect("unmounted");
        assert!(!inspect(c"bound").0 && is_whole(&source));
    });
}

#[test]
fn removal_follows_no_link() {
    let root = tempfile::tempdir().expect("a directory");
    let (source, tree) = (source(root.path()), root.path().join("tree"));
    fs::create_dir(&tree).expect("a directory");
    symlink(&source, tree.join("link")).expect("a link");
    remove_tree(&tree).expect("removed");
    symlink(&source, &tree).expect("a link");
    remove_tree(&tree).expect("the link is removed");
    assert!(!tree.is_symlink() && is_whole(&source));
    remove_tree(&tree).expect("nothing to remove");
    remove_tree(&root.path().join("no/parent")).expect("nothing to remove");
}

/// A container can write names of its own, and a removal that was interrupted leaves some.
#[test]
fn names_in_a_tree_do_not_prevent_its_removal() {
    let root = tempfile::tempdir().expect("a directory");
    let tree = root.path().join("tree");
    for first in [".keblet-removal-1", ".keblet-removal-2", "d"] {
        fs::create_dir_all((0..70).fold(tree.join(first), |path, _| path.join("d"))).expect("directories");
    }
    remove_tree(&tree).expect("removed");
    assert!(!tree.exists());
}

#[test]
fn reads_are_bounded() {
    let root = tempfile::tempdir().expect("a directory");
    let file = root.path().join("file");
    fs::write(&file, "12345").expect("a file");
    assert_eq!(read_bounded(&file, 5).expect("short enough"), b"12345");
    assert_eq!(read_bounded(&file, 4).expect_err("too long").kind(), ErrorKind::FileTooLarge);
    assert!(holds_exactly(&file, b"12345") && !holds_exactly(&file, b"1234") && !holds_exactly(&file, b"123456"));
    assert!(!holds_exactly(root.path(), b"") && !holds_exactly(&root.path().join("none"), b""));
    symlink(&file, root.path().join("link")).expect("a link");
    assert!(!holds_exactly(&root.path().join("link"), b"12345"));
    // A sparse file of a terabyte: comparing must not read it.
    fs::File::options().write(true).open(&file).expect("a file").set_len(1 << 40).expect("a length");
    let began = std::time::Instant::now();
    assert!(!holds_exactly(&file, b"12345"));
    assert!(began.elapsed().as_secs() < 5);
}
