//! Status manager: PATCHes pod statuses to the API server and DELETEs terminated pods there.
//!
//! Level-triggered: the next request for a pod follows from its cached status and its API copy, and is decided again
//! whenever either changes. A status superseded while it waits is never sent; the last one always is.
//!
//! ```text
//!  cache changed ──┐                        ┌─ merge: the wanted API status       (pure)
//!  copy changed ───┼─▶ queue of pods ─▶ action ─ diff: the smallest patch         (pure)
//!  10 s, retries ──┘    (coalesced)         │
//!                                           ├─▶ PATCH pods/status ─▶ answer: the newest copy
//!                                           ├─▶ DELETE, grace 0, this UID only
//!                                           └─▶ GET, after a lost answer, and some time after a 404
//! ```
//!
//! Pauses after failed requests grow; a status that has changed waits no longer than a second after the last request.
//! One request per pod at a time, several pods in parallel. The API copy is the watch's or the last answer's, whichever
//! is newer, so that a change costs one request. Never writes the status cache.

mod action;
mod api;
mod backoff;
mod diff;
mod final_ends;
mod merge;
mod sync_state;
mod task;
#[cfg(test)]
mod tests;

pub use api::Answer;
pub use api::KubePods;
pub use api::PodApi;
pub use api::PodApiError;
pub use backoff::after as retry_after;
pub use task::StatusManager;
