//! Files that other processes may have changed: opens directories without following links or crossing mount points, removes
//! trees that stay inside one mount, reads no more than expected. Replaces the agent's own files atomically.
//!
//! The kernel detects a mount point while it opens (`RESOLVE_NO_XDEV`, `openat2(2)`). Device numbers do not: a bind
//! mount has the device number of its source, and a check before opening would race with mounting.

mod bounded;
mod mount_table;
mod mounts;
mod openat2;
mod propagation;
mod removal;
mod replacement;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::io;

pub use bounded::holds_exactly;
pub use bounded::open_regular;
pub use bounded::read_bounded;
pub use bounded::read_named;
pub use bounded::read_opened;
pub use bounded::reopen_regular;
pub use mount_table::MountTable;
pub use mount_table::file_system_number;
pub use mount_table::read_mounts;
pub use mounts::force_unmount_at;
pub use mounts::is_disconnected;
pub use mounts::is_mount_point;
pub use mounts::is_mount_point_at;
pub use mounts::lies_in_memory;
pub use mounts::unmount;
pub use mounts::unmount_at;
pub use mounts::unmount_flushed;
pub use openat2::open_below;
pub use openat2::open_dir;
pub use openat2::open_path;
pub use openat2::open_root;
pub use openat2::try_openat2;
pub use propagation::Sharing;
pub use propagation::make_shared;
pub use removal::DirEntry as DirectoryEntry;
pub use removal::entries;
pub use removal::remove_directories;
pub use removal::remove_entry;
pub use removal::remove_tree;
pub use replacement::replace;

/// Runs file calls on a thread that may block. Once begun, they are carried out even if the future is dropped.
///
/// # Errors
/// Those of `work`; the agent is shutting down.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
