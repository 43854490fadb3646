//! Client of one container runtime, by CRI v1: a method per call, each with its deadline.
//!
//! Owns the connection (lazy, re-established by the first call after it broke), deadlines, message limits, and the features
//! of the runtime. No policy: never retries a call that changes something, never caches an answer, and does not limit
//! concurrent calls, because each pod worker makes one at a time and a hung call must not block other pods.
//!
//! Every method may be cancelled by dropping its future; the call is then cancelled in the runtime too, which may have
//! acted already.
//!
//! ```text
//!  Runtime ── Call (deadline, observer) ── tonic client ── transport ── unix socket
//!     │
//!     └─ ContainerEvents: the event stream, without a deadline
//! ```

mod call;
mod client;
mod containers;
mod endpoint;
mod error;
mod events;
mod features;
mod images;
mod operation;
mod sandboxes;
mod state;
mod streaming;
#[cfg(test)]
pub(crate) mod tests;
mod transport;

pub use call::CallObserver;
pub use call::FinishedCall;
pub use client::Runtime;
pub use client::RuntimeOptions;
pub use containers::ContainerInspection;
pub use endpoint::EndpointError;
pub use endpoint::RuntimeEndpoint;
pub use error::RuntimeError;
pub(crate) use error::go_name;
pub use events::ContainerEvents;
pub use features::Features;
pub use operation::Operation;
pub use state::HandlerOffer;
pub use state::RuntimeOffer;
pub use state::RuntimeState;
pub use state::watch_runtime;

/// First pause between attempts to reach the runtime, and the longest.
pub const FIRST_RETRY: std::time::Duration = std::time::Duration::from_millis(100);
/// See [`FIRST_RETRY`].
pub const LAST_RETRY: std::time::Duration = std::time::Duration::from_secs(3);
