//! A simulated CRI runtime: the whole protocol with containerd's behaviour, on tokio's (pausable) clock and a seed,
//! with injected faults and a trace of what really happened.
//!
//! ```text
//!  client ── transport ──▶ runtime_service, image_service ──▶ engine (faults, counters)
//!                                                               │
//!                       trace ◀── lifecycle ◀── sandboxes · containers · node
//!                                     │   │
//!                     kernel facts ◀──┘   └──▶ events queue ──▶ client's stream
//! ```
//!
//! It simulates what a runtime reports and when; no processes, files or cgroups exist.
//! [`SimRuntime`] is the handle for tests; [`Trace`] is what a client is checked against.

pub mod client;
mod clock;
mod containers;
mod engine;
mod events;
mod faults;
mod image_service;
mod images;
mod kernel;
mod lifecycle;
mod method;
mod node;
mod options;
mod program;
mod runtime_service;
mod sandboxes;
mod schedule;
mod sim;
mod status;
mod store;
mod trace;
mod transport;

pub use clock::SimClock;
pub use engine::ExecResult;
pub use events::{Delivery, QUEUE_SLOTS};
pub use faults::{CallFault, EventFaults, FaultKind, Faults};
pub use images::Images;
pub use kernel::{ExitRecord, Kernel, KernelFact, OomRecord, Pinned};
pub use method::Method;
pub use options::{Features, Options, Timings};
pub use program::{Exit, OnTerm, Program};
pub use schedule::{FaultSchedule, ScheduledAction};
pub use sim::{Recovery, SimRuntime, WaitTimeout};
pub use trace::{Call, Duplicate, Instance, Trace};
pub use transport::{MemoryEndpoint, SocketEndpoint};
