//! emptyDir on disk, in memory (tmpfs) and on huge pages (hugetlbfs).

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::chown;
use std::path::Path;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;
use nix::mount::MsFlags;
use nix::mount::mount;
use nix::sys::statfs::HUGETLBFS_MAGIC;
use tokio::time::Instant;

use super::VolumeError;
use super::actual_state::ActualState;
use super::api;
use super::error::OnPath as _;
use super::fs_group;
use super::layout;
use super::layout::make_dirs;
use super::layout::set_mode;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::project_quotas::ProjectQuotas;
use super::storage_medium::StorageMedium;
use super::teardown::VolumeOnDisk;
use crate::filesystem;
use crate::model::spec;

/// `kubernetes.io/empty-dir`.
#[derive(Debug)]
pub(super) struct EmptyDir {
    /// Count volumes on disk of pods with a user namespace.
    pub(super) quotas: Option<ProjectQuotas>,
}

impl VolumePlugin for EmptyDir {
    fn name(&self) -> &'static str {
        layout::EMPTY_DIR
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.empty_dir.is_some()
    }

    fn attributes(&self) -> Attributes {
        Attributes { fs_group: true, owns_content: true, ..Attributes::default() }
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        let source = target.volume.empty_dir.clone().unwrap_or_default();
        let medium = StorageMedium::of(target.pod, &source, target.memory);
        let (fs_group, actual) = (target.fs_group, target.actual.clone());
        // Users of the node's user namespace may move files to another project.
        let quotas = self.quotas.clone().filter(|_| spec::has_user_namespace(target.pod));
        Box::pin(async move {
            let medium = medium?;
            let Target { dirs, uid, volume, .. } = target;
            let dir = dirs.volume(uid, &layout::escaped(layout::EMPTY_DIR), &volume.name)?;
            let marker = dirs.ready_marker(uid, &volume.name)?;
            let set_up = move || set_up(&dir, &marker, medium, fs_group, quotas.as_ref(), &actual);
            blocking(set_up).await.map(|()| Ready::default())
        })
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let (volume, quotas) = (volume.clone(), self.quotas.clone());
        Box::pin(blocking(move || {
            volume.delete()?;
            if let Some(quotas) = quotas {
                quotas.release(&volume.path());
            }
            Ok(())
        }))
    }
}

/// Set up once, marked as ready; a directory or mount that vanished, as a mount does when the machine restarts, is made
/// again, empty.
fn set_up(
    dir: &Path,
    marker: &Path,
    medium: StorageMedium,
    fs_group: Option<u32>,
    quotas: Option<&ProjectQuotas>,
    actual: &ActualState,
) -> Result<(), VolumeError> {
    if marker.exists() && is_there(dir, medium)? {
        return Ok(());
    }
    make(dir, medium, quotas)?;
    if let Some(group) = fs_group {
        let began = Instant::now();
        let ok = apply_fs_group(dir, group);
        actual.operation(fs_group::OPERATION, layout::EMPTY_DIR, began.elapsed(), ok);
    }
    if let Some(parent) = marker.parent() {
        make_dirs(parent)?;
    }
    fs::write(marker, "").on("create", marker)
}

/// Makes the directory, writable for every user of the pod, and mounts its medium.
fn make(dir: &Path, medium: StorageMedium, quotas: Option<&ProjectQuotas>) -> Result<(), VolumeError> {
    if let Some(parent) = dir.parent() {
        make_dirs(parent)?;
    }
    match fs::DirBuilder::new().mode(0o777).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => result.on("create", dir)?,
    }
    if is_mount_point(dir)? {
        return Ok(());
    }
    // Restores bits that the umask cleared.
    set_mode(dir, 0o777)?;
    match medium {
        StorageMedium::Disk => assign_project(dir, quotas),
        StorageMedium::Memory { size } => api::mount_memory(dir, size).on("mount tmpfs on", dir)?,
        StorageMedium::HugePages { page_size, size } => mount_huge_pages(dir, page_size, size)?,
    }
    Ok(())
}

/// Files that are there already would not be counted.
fn assign_project(dir: &Path, quotas: Option<&ProjectQuotas>) {
    let is_empty = || fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
    if let Some(quotas) = quotas.filter(|_| is_empty()) {
        quotas.assign(dir);
    }
}

/// True if the volume needs no work. A pod's pages cannot change: other pages are those of another volume.
fn is_there(dir: &Path, medium: StorageMedium) -> Result<bool, VolumeError> {
    match medium {
        StorageMedium::Disk => Ok(dir.is_dir()),
        StorageMedium::Memory { .. } => Ok(dir.is_dir() && is_mount_point(dir)?),
        StorageMedium::HugePages { page_size, .. } => {
            if !(dir.is_dir() && is_mount_point(dir)?) {
                return Ok(false);
            }
            let mounted = nix::sys::statfs::statfs(dir).on("inspect", dir)?;
            let of_size = u64::try_from(mounted.block_size()).is_ok_and(|size| size == page_size);
            if mounted.filesystem_type() == HUGETLBFS_MAGIC && of_size {
                return Ok(true);
            }
            Err(VolumeError::PageSize { path: dir.to_owned(), page_size })
        }
    }
}

fn is_mount_point(dir: &Path) -> Result<bool, VolumeError> {
    filesystem::is_mount_point(dir).on("inspect", dir)
}

fn mount_huge_pages(dir: &Path, page_size: u64, size: Option<i64>) -> Result<(), VolumeError> {
    let size = size.map(|size| format!(",size={size}")).unwrap_or_default();
    let options = format!("pagesize={page_size}{size}");
    let mounted = mount(Some("nodev"), dir, Some("hugetlbfs"), MsFlags::empty(), Some(options.as_str()));
    mounted.on("mount hugetlbfs on", dir)
}

/// New files belong to the pod's group. A failure is logged, not fatal, as upstream; false is returned.
fn apply_fs_group(dir: &Path, group: u32) -> bool {
    let apply = || {
        let mode = fs::metadata(dir).on("inspect", dir)?.mode() & 0o7777;
        chown(dir, None, Some(group)).on("change the group of", dir)?;
        set_mode(dir, mode | 0o2770)
    };
    apply().inspect_err(|error| tracing::warn!(group, %error, "cannot apply fsGroup")).is_ok()
}
