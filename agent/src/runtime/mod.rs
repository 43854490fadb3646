//! Speaks CRI v1 with one container runtime: a method per call, each with its deadline.
//!
//! Owns the connection (lazy, remade by the first call after it broke), the deadlines, the message limits, and what is
//! known of the runtime's abilities. Refuses policy: it never retries a call that changes something, never caches an
//! answer, and does not bound how many calls run at once - each pod's worker runs one at a time, and one hung call must
//! not keep the others out.
//!
//! Every method may be cancelled by dropping its future; the runtime is told, but may have acted already.
//!
//! ```text
//!  Runtime ── Call (deadline, observer) ── tonic client ── transport ── unix socket
//!     │
//!     └─ ContainerEvents: the event stream, without a deadline
//! ```

mod backoff;
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

pub use backoff::Backoff;
pub use call::CallObserver;
pub use call::FinishedCall;
pub use client::Runtime;
pub use client::RuntimeOptions;
pub use containers::ContainerInspection;
pub use endpoint::EndpointError;
pub use endpoint::RuntimeEndpoint;
pub use error::RuntimeError;
pub use events::ContainerEvents;
pub use events::EventSupport;
pub use features::Features;
pub use operation::Operation;
pub use sandboxes::SandboxInspection;
pub use state::HandlerOffer;
pub use state::RuntimeOffer;
pub use state::RuntimeState;
pub use state::watch_runtime;
