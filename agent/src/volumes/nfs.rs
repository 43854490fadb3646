//! NFS exports, named by the pod itself or by a persistent volume. Mounted by mount(8), whose helper the host must have.

use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::NFSVolumeSource;
use k8s_openapi::api::core::v1::Volume;

use super::VolumeError;
use super::bind_mount;
use super::error::OnPath as _;
use super::host_program::HostPrograms;
use super::layout::make_dirs;
use super::mount_program::MountCall;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;
use crate::kernel::usage::Disk;
use crate::kernel::usage::MeasuredBy;

/// How long an unmount is waited for before it is forced.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(60);

/// Name of the plugin.
pub(super) const NAME: &str = "kubernetes.io/nfs";

/// `kubernetes.io/nfs`.
#[derive(Debug)]
pub(super) struct Nfs;

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
            mount(&source, source.read_only == Some(true), &[], &dir).await.map(|()| Ready::default())
        })
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let (volume, again) = (volume.clone(), volume.clone());
        let (usual, by_force) = (blocking(move || volume.unmount()), blocking(move || again.force_unmount()));
        let answers = |mount: PathBuf| async move { Disk::of_volume(mount).measure().await.is_some() };
        Box::pin(unmount_or_force(usual, answers, by_force))
    }
}

/// Mounts an export, unless something is mounted there already. Nothing is left of a mount that fails.
///
/// # Errors
/// The directory cannot be made; mount(8) fails, or waits for the server for longer than two minutes.
pub(super) async fn mount(
    source: &NFSVolumeSource,
    read_only: bool,
    options: &[String],
    dir: &Path,
) -> Result<(), VolumeError> {
    // First, and without asking the server, which may no longer answer.
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
    let mounted = call.run(&HostPrograms).await;
    if mounted.is_err() {
        let target = dir.to_owned();
        // Stays if the mount was made all the same: the next attempt uses it.
        let _ = blocking(move || fs::remove_dir(&target).on("remove", &target)).await;
    }
    mounted
}

/// Unmounts, by force if that takes longer than a minute, since writes may wait for a server that does not answer, or if the
/// mount is busy and its server does not answer: a reading of its size that waits for the server keeps it busy. Neither is
/// waited for any longer; the next attempt finds what they have achieved.
async fn unmount_or_force<Answers: Future<Output = bool>>(
    usual: impl Future<Output = Result<(), VolumeError>>,
    answers: impl FnOnce(PathBuf) -> Answers,
    by_force: impl Future<Output = Result<(), VolumeError>>,
) -> Result<(), VolumeError> {
    match tokio::time::timeout(UNMOUNT_TIMEOUT, usual).await {
        Ok(Err(VolumeError::Io { verb, path, source })) if source.kind() == io::ErrorKind::ResourceBusy => {
            if answers(path.clone()).await {
                return Err(VolumeError::Io { verb, path, source });
            }
        }
        Ok(done) => return done,
        Err(_) => {}
    }
    let forced = tokio::time::timeout(UNMOUNT_TIMEOUT, by_force).await;
    forced.unwrap_or_else(|_| Err(VolumeError::Interrupted("the server of the volume does not answer".to_owned())))
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

    #[tokio::test(start_paused = true)]
    async fn an_unmount_that_hangs_is_forced() {
        let done = async || Ok(());
        let silent = |_| std::future::ready(false);
        let busy = async || Err(VolumeError::Interrupted("busy".to_owned()));
        unmount_or_force(done(), silent, busy()).await.expect("not forced");
        unmount_or_force(std::future::pending(), silent, done()).await.expect("forced");
        let error = unmount_or_force(busy(), silent, done()).await.expect_err("an error is not forced away");
        assert!(error.to_string().contains("busy"), "{error}");
        let in_use = async || Err(io::Error::from(io::ErrorKind::ResourceBusy)).on("unmount", Path::new("/"));
        let error = unmount_or_force(in_use(), |_| std::future::ready(true), done()).await.expect_err("it answers");
        assert!(error.to_string().contains("busy"), "{error}");
        unmount_or_force(in_use(), silent, done()).await.expect("forced");
        let began = tokio::time::Instant::now();
        let error =
            unmount_or_force(std::future::pending(), silent, std::future::pending()).await.expect_err("given up");
        assert!(error.to_string().contains("does not answer"), "{error}");
        assert_eq!(began.elapsed(), 2 * UNMOUNT_TIMEOUT);
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_mount_that_fails() {
        let root = tempfile::tempdir().expect("a folder");
        let dir = root.path().join("pods/u/volumes/kubernetes.io~nfs/v");
        let source = NFSVolumeSource { server: "0.0.0.0:0".to_owned(), path: "no-export".to_owned(), read_only: None };
        let error = mount(&source, true, &["nosuchoption=1".to_owned()], &dir).await.expect_err("no such export");
        let error = error.to_string();
        assert!(error.contains("Mounting arguments: -t nfs -o nosuchoption=1,ro -- 0.0.0.0:0:no-export"), "{error}");
        assert!(!dir.exists());
    }
}
