//! NFS exports, named by the pod itself or by a persistent volume. Mounted by mount(8), whose helper the host must have.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::NFSVolumeSource;
use k8s_openapi::api::core::v1::Volume;
use tokio::time::Instant;
use tokio::time::sleep_until;
use tokio::time::timeout;
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

use super::VolumeError;
use super::bind_mount;
use super::error::OnPath as _;
use super::layout::make_dirs;
use super::layout::resolved;
use super::mount_program::MountCall;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::plugin::unless_over;
use super::teardown::VolumeOnDisk;
use crate::filesystem::MountTable;
use crate::host_program::HostPrograms;
use crate::kernel::usage::Disk;
use crate::kernel::usage::MeasuredBy;
use crate::model::Backoff;

/// How long an unmount is tried before it is forced, as upstream.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(60);
/// First and longest pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Name of the plugin.
pub(super) const NAME: &str = "kubernetes.io/nfs";

/// `kubernetes.io/nfs`.
#[derive(Debug, Default)]
pub(super) struct Nfs {
    /// Mounts that are to be undone, until they are.
    undone: Mutex<BTreeSet<PathBuf>>,
}

impl Nfs {
    fn undone(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.undone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn undo(&self, volume: &VolumeOnDisk) -> Result<(), VolumeError> {
        let mount = volume.path();
        self.undone().insert(mount.clone());
        let unmount = |work: fn(&VolumeOnDisk) -> Result<(), VolumeError>| {
            let volume = volume.clone();
            blocking(move || work(&volume))
        };
        let disk = Arc::new(tokio::sync::Mutex::new(Disk::of_volume(mount.clone())));
        let is_silent = || {
            let disk = disk.clone();
            async move {
                let mut disk = disk.lock().await;
                disk.measure().await.is_none() && disk.is_waiting()
            }
        };
        let is_shared = || {
            let (mount, undone) = (mount.clone(), self.undone().clone());
            blocking(move || is_mounted_elsewhere(&mount, &undone))
        };
        let usual = || unmount(VolumeOnDisk::unmount);
        let done = unmount_or_force(usual, is_silent, is_shared, unmount(VolumeOnDisk::force_unmount)).await;
        if done.is_ok() {
            self.undone().remove(&mount);
        }
        done
    }
}

impl VolumePlugin for Nfs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.nfs.is_some()
    }

    fn attributes(&self) -> Attributes {
        Attributes::default()
    }

    fn is_read_only(&self, _uid: &str, volume: &Volume) -> bool {
        volume.nfs.as_ref().is_some_and(|source| source.read_only == Some(true))
    }

    fn measured_by(&self, _uid: &str, _volume: &Volume) -> Option<MeasuredBy> {
        Some(MeasuredBy::FileSystem)
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async move {
            let dir = self.mount_path(target.dirs, target.uid, target.volume)?;
            let source = target.volume.nfs.clone().unwrap_or_default();
            let mounted = mount(&source, source.read_only == Some(true), &[], &dir, target.over).await;
            mounted.map(|()| Ready::default())
        })
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        Box::pin(self.undo(volume))
    }
}

/// Mounts an export, unless something is mounted there already. Nothing is left of a mount that fails. A mount that waits for
/// its server is given up when the pod is over.
///
/// # Errors
/// The directory cannot be made; mount(8) fails, is given up, or waits for the server for longer than two minutes.
pub(super) async fn mount(
    source: &NFSVolumeSource,
    read_only: bool,
    options: &[String],
    dir: &Path,
    over: &CancellationToken,
) -> Result<(), VolumeError> {
    // First, and without a request to the server, which may no longer answer.
    if bind_mount::is_there(dir).await? {
        return Ok(());
    }
    let target = dir.to_owned();
    blocking(move || make_dirs(&target)).await?;
    let mut all: Vec<String> = options.to_vec();
    if read_only && !all.iter().any(|option| option == "ro") {
        all.push("ro".to_owned());
    }
    let export = export(source);
    let call = MountCall { kind: Some("nfs"), source: &export, target: dir, options: all };
    let mounted = unless_over(over, call.run(&HostPrograms)).await;
    if mounted.is_err() {
        let target = dir.to_owned();
        // Stays if the mount was made all the same: the next attempt uses it.
        let _ = blocking(move || fs::remove_dir(&target).on("remove", &target)).await;
    }
    mounted
}

/// Unmounts, by force if that takes longer than a minute: writes, or a reading of the size, may wait for a server that does not
/// answer. Neither is waited for any longer; the next attempt finds what they have achieved. What is forced fails all that waits
/// for the server on any mount of the file system (MNT_FORCE), so it is not if the file system `is_shared`. `is_silent`: the
/// server does not answer.
///
/// # Errors
/// The mount is in use otherwise, or cannot be undone.
async fn unmount_or_force<Usual, Silent, Shared>(
    usual: impl Fn() -> Usual,
    is_silent: impl Fn() -> Silent,
    is_shared: impl Fn() -> Shared,
    by_force: impl Future<Output = Result<(), VolumeError>>,
) -> Result<(), VolumeError>
where
    Usual: Future<Output = Result<(), VolumeError>>,
    Silent: Future<Output = bool>,
    Shared: Future<Output = Result<bool, VolumeError>>,
{
    let unanswered = || VolumeError::Interrupted("the server of the volume does not answer".to_owned());
    let (deadline, mut pauses) = (Instant::now() + UNMOUNT_TIMEOUT, Backoff::new(FIRST_PAUSE, LAST_PAUSE));
    while Instant::now() < deadline {
        let busy = match timeout_at(deadline, usual()).await {
            Ok(Err(error)) if is_busy(&error) => error,
            Ok(done) => return done,
            Err(_) => break,
        };
        // In this order: a reading that waits for the server keeps the mount busy.
        if is_shared().await? || !is_silent().await {
            return Err(busy);
        }
        sleep_until((Instant::now() + pauses.failed(0.0)).min(deadline)).await;
    }
    if is_shared().await? {
        return Err(unanswered());
    }
    timeout(UNMOUNT_TIMEOUT, by_force).await.unwrap_or_else(|_| Err(unanswered()))
}

fn is_busy(error: &VolumeError) -> bool {
    matches!(error, VolumeError::Io { source, .. } if source.kind() == io::ErrorKind::ResourceBusy)
}

/// True if the file system of this mount is mounted elsewhere, too, where it is not to be undone as well. Blocking.
///
/// # Errors
/// The table of mounts cannot be read.
fn is_mounted_elsewhere(mount: &Path, undone: &BTreeSet<PathBuf>) -> Result<bool, VolumeError> {
    let table = MountTable::read().on("read the table of mounts for", mount)?;
    let undone: Vec<PathBuf> = undone.iter().map(|mount| resolved(mount)).collect();
    Ok(table.is_mounted_elsewhere(&resolved(mount), &undone))
}

/// The export as mount(8) reads it; an IPv6 address is in brackets.
fn export(source: &NFSVolumeSource) -> String {
    let NFSVolumeSource { server, path, .. } = source;
    match server.parse::<std::net::Ipv6Addr>() {
        Ok(_) => format!("[{server}]:{path}"),
        Err(_) => format!("{server}:{path}"),
    }
}

#[cfg(test)]
mod tests {
    use keblet_skip::mounts::bind;
    use keblet_skip::mounts::in_private_mounts;
    use keblet_skip::mounts::tmpfs;

    use super::*;

    #[test]
    fn exports() {
        for (server, expected) in
            [("nfs.example", "nfs.example:/e"), ("192.0.2.1", "192.0.2.1:/e"), ("fd00::1", "[fd00::1]:/e")]
        {
            let source = NFSVolumeSource { server: server.to_owned(), path: "/e".to_owned(), read_only: None };
            assert_eq!(export(&source), expected);
        }
    }

    fn busy() -> Result<(), VolumeError> {
        Err(io::Error::from(io::ErrorKind::ResourceBusy)).on("unmount", Path::new("/"))
    }

    /// Seconds until the unmount has ended, its result, and whether it was forced.
    async fn ended<Usual: Future<Output = Result<(), VolumeError>>>(
        usual: impl Fn() -> Usual,
        is_silent: bool,
        is_shared: bool,
        by_force: impl Future<Output = Result<(), VolumeError>>,
    ) -> (u64, String, bool) {
        let (began, mut is_forced) = (Instant::now(), false);
        let by_force = async {
            is_forced = true;
            by_force.await
        };
        let (silent, shared) = (|| std::future::ready(is_silent), || std::future::ready(Ok(is_shared)));
        let done = unmount_or_force(usual, silent, shared, by_force).await;
        (began.elapsed().as_secs(), done.map_or_else(|error| error.to_string(), |()| String::new()), is_forced)
    }

    #[tokio::test(start_paused = true)]
    async fn an_unmount_that_takes_longer_than_a_minute_is_forced() {
        let done = || std::future::ready(Ok(()));
        let fine = |after, is_forced| (after, String::new(), is_forced);
        assert_eq!(ended(done, true, false, done()).await, fine(0, false));
        assert_eq!(ended(std::future::pending, true, false, done()).await, fine(60, true));
        let (after, error, is_forced) = ended(std::future::pending, true, false, std::future::pending()).await;
        assert!((after, is_forced) == (120, true) && error.contains("does not answer"), "{after}: {error}");
        let other = || std::future::ready(Err(VolumeError::InUse("p")));
        let (after, error, is_forced) = ended(other, true, false, done()).await;
        assert!((after, is_forced) == (0, false) && error.contains("in use"), "an error is not forced away: {error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_mount_is_forced_after_a_minute_without_an_answer_of_its_server() {
        let (done, in_use) = (|| std::future::ready(Ok(())), || std::future::ready(busy()));
        assert_eq!(ended(in_use, true, false, done()).await, (60, String::new(), true));
        let released = Instant::now() + Duration::from_secs(30);
        let for_a_while = || std::future::ready(if Instant::now() < released { busy() } else { Ok(()) });
        let (after, error, is_forced) = ended(for_a_while, true, false, done()).await;
        assert!((30..=35).contains(&after) && error.is_empty() && !is_forced, "{after}: {error}");
        for (is_silent, is_shared) in [(false, false), (true, true)] {
            let (after, error, is_forced) = ended(in_use, is_silent, is_shared, done()).await;
            assert!((after, is_forced) == (0, false) && error.contains("busy"), "{is_shared}, {after}: {error}");
        }
        let (after, error, is_forced) = ended(std::future::pending, true, true, done()).await;
        assert!((after, is_forced) == (60, false) && error.contains("does not answer"), "{after}: {error}");
    }

    #[test]
    fn what_other_pods_have_mounted_is_not_forced() {
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a folder");
            let (real, linked) = (root.path().join("real"), root.path().join("linked"));
            fs::create_dir(&real).expect("a folder");
            std::os::unix::fs::symlink(&real, &linked).expect("a link");
            let [one, two] = ["u-1", "u-2"].map(|uid| linked.join(format!("pods/{uid}/volumes/kubernetes.io~nfs/v")));
            let is_shared = |undone: &[&PathBuf]| {
                let undone = undone.iter().map(|mount| (*mount).clone()).collect();
                is_mounted_elsewhere(&one, &undone).expect("a table")
            };
            tmpfs(&one);
            assert!(!is_shared(&[&one]));
            bind(&one, &two);
            assert!(is_shared(&[&one]));
            assert!(!is_shared(&[&one, &two]), "both are to be undone");
            crate::filesystem::unmount(&two).expect("unmounted");
            assert!(!is_shared(&[&one]));
        });
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_mount_that_fails() {
        let root = tempfile::tempdir().expect("a folder");
        let dir = root.path().join("pods/u/volumes/kubernetes.io~nfs/v");
        let source = NFSVolumeSource { server: "0.0.0.0:0".to_owned(), path: "no-export".to_owned(), read_only: None };
        let (options, over) = (["nosuchoption=1".to_owned()], CancellationToken::new());
        let error = mount(&source, true, &options, &dir, &over).await.expect_err("no such export");
        let error = error.to_string();
        let shown = "Mounting command: mount\nMounting arguments: -t nfs -o nosuchoption=1,ro -- 0.0.0.0:0:no-export";
        assert!(error.contains(shown), "{error}");
        assert!(!dir.exists());
    }
}
