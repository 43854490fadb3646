//! The agent on a simulated node: its traits implemented on the simulated kernel and runtime, and its reports recorded.
//!
//! [`Agent`] is the whole agent. [`PlegHarness`] is sensors and PLEG without workers, for tests that act on the runtime
//! themselves.

use tempfile::TempDir;

use crate::cri::{Options, SimRuntime};

mod agent;
mod api;
mod kernel;
mod pleg_harness;
mod pods;
mod seen;

pub use agent::Agent;
pub use api::Api;
pub use kernel::{SimWatch, follow_kernel};
pub use pleg_harness::{PlegHarness, SensorSet, runtime};
pub use pods::{PodOf, pod};
pub use seen::Seen;

/// A simulated runtime that has the image of all pods of [`pod`], and a folder for an agent.
pub fn node() -> (SimRuntime, TempDir) {
    let sim = SimRuntime::new(Options::default());
    sim.images(|images| images.store("busybox", 1 << 20));
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("hosts"), "127.0.0.1 localhost\n").expect("a hosts file");
    (sim, folder)
}
