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
pub use events::Delivery;
pub use events::QUEUE_SLOTS;
pub use faults::CallFault;
pub use faults::EventFaults;
pub use faults::FaultKind;
pub use faults::Faults;
pub use images::Images;
pub use kernel::ExitRecord;
pub use kernel::Kernel;
pub use kernel::KernelFact;
pub use kernel::OomRecord;
pub use kernel::Pinned;
pub use method::Method;
pub use options::Features;
pub use options::Options;
pub use options::Timings;
pub use program::Exit;
pub use program::OnTerm;
pub use program::Program;
pub use schedule::FaultSchedule;
pub use schedule::ScheduledAction;
pub use sim::Recovery;
pub use sim::SimRuntime;
pub use sim::WaitTimeout;
pub use trace::Call;
pub use trace::Duplicate;
pub use trace::Instance;
pub use trace::Trace;
pub use transport::MemoryEndpoint;
pub use transport::SocketEndpoint;
