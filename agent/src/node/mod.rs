//! The Node object: registration, status, heartbeats; and graceful node shutdown.
//!
//! Writes the fields of the Node that a kubelet owns, and its Lease. State of runtime, sensors and eviction arrives as
//! values; taints are set by the control plane.
//!
//! ```text
//!  machine · network · images ─┐                              ┌─▶ register (create, or reconcile)
//!  runtime state · sensors ────┼─▶ content ─▶ Node as it ─────┼─▶ patch of status, if anything differs
//!  pressures · shutdown ───────┘   (pure)     should be       └─▶ events, podCIDR to the runtime
//!          cache ◀── watch of the own Node       lease: renewed by a task of its own
//! ```
//!
//! The status is computed every `nodeStatusUpdateFrequency`, and at once when an input changes; it is sent only if it
//! differs or `nodeStatusReportFrequency` has passed.

pub mod addresses;
mod cache;
mod call;
mod conditions;
mod config;
mod content;
mod devices;
mod events;
mod host;
mod images;
mod initial;
mod interfaces;
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
pub use call::Connections;
pub use config::NodeConfig;
pub use devices::device_resources;
pub use devices::make_folder as make_device_folder;
pub use host::Host;
pub use host::ThisHost;
pub use initial::node as initial_node;
pub use lease::LeaseController;
pub use machine::Machine;
pub use machine::RootFs;
pub use machine::Sizes;
pub(crate) use machine::architecture;
pub use pleg_health::PlegHealth;
pub use standalone::standalone;
pub use status::Inputs;
pub use status::StatusLoop;
