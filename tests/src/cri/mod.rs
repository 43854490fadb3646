//! A simulated CRI runtime: the whole protocol with containerd's habits, driven by tokio's (pausable) clock and a
//! seed, with faults on demand and a ledger of what truly happened.
//!
//! ```text
//!  client ── transport ──▶ runtime_service, image_service ──▶ engine (faults, counters)
//!                                                               │
//!                       ledger ◀── lifecycle ◀── sandboxes · containers · node
//!                                     │   │
//!                     kernel facts ◀──┘   └──▶ events queue ──▶ client's stream
//! ```
//!
//! It simulates what a runtime says and when, not what containers compute: no processes, files or cgroups exist.
//! [`SimRuntime`] is the test's hand on it; [`Ledger`] the truth to judge a client by.

mod chaos;
pub mod client;
mod clock;
mod containers;
mod engine;
mod events;
mod faults;
mod image_service;
mod images;
mod kernel;
mod ledger;
mod lifecycle;
mod method;
mod node;
mod options;
mod program;
mod runtime_service;
mod sandboxes;
mod sim;
mod status;
mod store;
mod transport;

pub use chaos::{Chaos, Step};
pub use clock::SimClock;
pub use engine::ExecResult;
pub use events::{Delivery, QUEUE_SLOTS};
pub use faults::{CallFault, EventFaults, Faults, Trouble};
pub use images::Images;
pub use kernel::{ExitRecord, Kernel, KernelFact, OomRecord, Pinned};
pub use ledger::{Call, Duplicate, Instance, Ledger};
pub use method::Method;
pub use options::{Features, Options, Timings};
pub use program::{Exit, OnTerm, Program};
pub use sim::{Recovery, SimRuntime, Unmet};
pub use transport::{MemoryEndpoint, SocketEndpoint};
