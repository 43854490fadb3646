//! Pods' statuses on their way to the API server, and the end of pods that are over there.
//!
//! Level-triggered: what is to be done for a pod follows from the status on the board and the API's copy of the pod, and
//! is decided anew whenever either changes. A status that was overtaken while it waited is never sent; the last one
//! always is.
//!
//! ```text
//!  board: changed ─┐                      ┌─ merge: what the copy should say     (pure)
//!  copy: changed ──┼─▶ queue of pods ─▶ step ─ diff: the smallest patch for it   (pure)
//!  10 s, retries ──┘    (coalesced)       │
//!                                         ├─▶ PATCH pods/status ─▶ answer: the newest copy
//!                                         ├─▶ DELETE, grace 0, this UID only
//!                                         └─▶ GET, after an answer that was lost
//! ```
//!
//! One request per pod at a time, many pods at once. The copy is the one the watch brought or the last answer, whichever
//! is newer, so that a change costs one request. Decides nothing about containers, and never writes the board.

mod api;
mod backoff;
mod diff;
mod merge;
mod step;
mod task;
#[cfg(test)]
mod tests;
mod told;

pub use api::Answer;
pub use api::KubePods;
pub use api::PodApi;
pub use api::PodApiError;
pub use backoff::after as retry_after;
pub use task::StatusManager;
