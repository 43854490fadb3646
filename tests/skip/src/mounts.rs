//! Mounts for tests that need root.

use std::os::fd::AsRawFd as _;
use std::path::Path;

use nix::mount::MntFlags;
use nix::mount::MsFlags;
use nix::mount::mount;
use nix::mount::umount2;
use nix::sched::CloneFlags;
use nix::sched::unshare;

/// Runs a test on a thread with a mount namespace of its own; its mounts vanish with it, and so does what it leaves in the
/// temporary folder, which is a directory of its own there: what is mounted cannot be removed before. Skipped without root.
///
/// # Panics
/// The test does; there is no such namespace; or as [`crate::skip`].
pub fn in_private_mounts(test: impl FnOnce() + Send) {
    if !crate::is_root("make mounts") {
        return;
    }
    let temporary = tempfile::tempdir().expect("a directory");
    std::thread::scope(|scope| {
        let ran = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(None::<&str>, "/", None::<&str>, private, None::<&str>).expect("private mounts");
            bind(temporary.path(), &std::env::temp_dir());
            test();
        });
        if let Err(panic) = ran.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Makes `target` and bind mounts `source` on it.
///
/// # Panics
/// It cannot.
pub fn bind(source: &Path, target: &Path) {
    std::fs::create_dir_all(target).expect("a directory");
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
}

/// Makes `target` and mounts an empty tmpfs on it.
///
/// # Panics
/// It cannot.
pub fn tmpfs(target: &Path) {
    std::fs::create_dir_all(target).expect("a directory");
    mount(Some("tmpfs"), target, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
}

/// Makes `target` and mounts a file system on it whose server has gone (FUSE): each access fails with ENOTCONN.
///
/// # Panics
/// It cannot.
pub fn disconnected(target: &Path) {
    std::fs::create_dir_all(target).expect("a directory");
    let server = std::fs::File::options().read(true).write(true).open("/dev/fuse").expect("/dev/fuse");
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
    mount(Some("fuse"), target, Some("fuse"), MsFlags::empty(), Some(options.as_str())).expect("a FUSE mount");
}

/// Detaches the mount that an agent has made of its root directory, so that the directory can be removed. Does nothing where
/// there is none.
pub fn detach(root: &Path) {
    // Fails where nothing is mounted.
    let _ = umount2(root, MntFlags::MNT_DETACH);
}
