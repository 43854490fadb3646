//! The agent on a simulated node: its seams joined to the simulated kernel and runtime, and what it saw written down.
//!
//! [`Eyes`] is the agent's observing half alone (sensors and PLEG), for tests that act on the runtime themselves.

mod eyes;
mod kernel;
mod seen;

pub use eyes::{Eyes, Senses};
pub use kernel::{SimWatch, follow_kernel};
pub use seen::Seen;
