//! The agent on a simulated node: its seams joined to the simulated kernel and runtime, and what it saw written down.
//!
//! [`Agent`] is the whole of it. [`Eyes`] is its observing half alone (sensors and PLEG), for tests that act on the
//! runtime themselves.

mod agent;
mod eyes;
mod kernel;
mod pods;
mod seen;

pub use agent::Agent;
pub use eyes::{Eyes, Senses, runtime};
pub use kernel::{SimWatch, follow_kernel};
pub use pods::{PodOf, pod};
pub use seen::Seen;
