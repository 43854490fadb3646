//! This machine as an object of the cluster: registration, status, heartbeats, and the end of the machine.
//!
//! Owns the Node object's fields that a node agent writes (and no other), its Lease, and the order in which pods end
//! when the machine shuts down. Refuses to judge: what the runtime, the sensors and the eviction say of the node comes
//! in as values; taints for what is wrong are the control plane's.
//!
//! ```text
//!  machine · network · images ─┐                              ┌─▶ register (create, or reconcile)
//!  runtime state · sensors ────┼─▶ content ─▶ Node as it ─────┼─▶ patch of status, if anything differs
//!  pressures · shutdown ───────┘   (pure)     should be       └─▶ events, podCIDR to the runtime
//!          cache ◀── watch of the own Node       lease: a heartbeat of its own
//! ```
//!
//! The status is computed every `nodeStatusUpdateFrequency`, and at once when something changed that others wait for;
//! it is sent only when it differs or `nodeStatusReportFrequency` has passed.

pub mod addresses;
mod cache;
mod call;
mod conditions;
mod config;
mod content;
mod events;
mod host;
mod images;
mod initial;
mod lease;
mod machine;
mod network;
mod patch;
mod pleg_health;
mod reconcile;
mod report;
pub mod resources;
mod runtime_view;
pub mod shutdown;
mod standalone;
mod startup;
mod status;
#[cfg(test)]
mod tests;
mod time;

pub use cache::NodeCache;
pub use cache::follow;
pub use call::OnHeartbeatFailure;
pub use conditions::Pressures;
pub use config::NodeConfig;
pub use events::RecordNodeEvent;
pub use host::Host;
pub use host::ThisHost;
pub use lease::LeaseController;
pub use machine::Machine;
pub use machine::Sizes;
pub use pleg_health::PlegHealth;
pub use standalone::standalone;
pub use status::Inputs;
pub use status::StatusLoop;
