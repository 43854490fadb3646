//! Static pods from a folder or a single file.
//!
//! ```text
//!  inotify ─▶ watch ─┐ (open_files: files still being written)
//!  20 s tick ────────┼─▶ listing (stat, read what changed, decode) ─▶ store (pure) ─▶ complete set
//!  store's own timer ┘
//! ```
//!
//! The folder's content decides; events only trigger a scan. A scan costs one stat per file; a file is read
//! again only when its stamp changed. Differences to upstream, all in favour of running pods:
//! - a file that no longer parses keeps its pods until a periodic scan finds it bad and unchanged since an earlier one;
//! - one that cannot be used when the agent starts may be of a pod that runs already: until it can be, or for
//!   [`store::INCOMPLETE_LIMIT`], no running static pod ends for lack of a manifest; nor while one cannot be read;
//! - a file that vanishes keeps its pods for a moment ([`store::REMOVAL_DELAY`]): editors and configuration tools move files
//!   away and back;
//! - of two files with one pod, the one that has it keeps it until the next periodic scan, where the last file name wins;
//! - a file that is open for writing is read when its writer closes it (or, if that never comes, periodically);
//! - a folder or single file that is deleted, renamed or replaced is watched again at once.

mod listing;
mod open_files;
mod store;
mod task;
#[cfg(test)]
mod tests;
mod watch;

pub(super) use task::FileSource;
