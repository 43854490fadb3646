//! The agent on a simulated node: its traits implemented on the simulated kernel and runtime, and its reports recorded.
//!
//! [`Agent`] is the whole agent. [`PlegHarness`] is sensors and PLEG without workers, for tests that act on the runtime
//! themselves.

use std::time::Duration;

use tempfile::TempDir;

use crate::cri::Options;
use crate::cri::SimRuntime;
use crate::cri::Trace;

mod agent;
mod api;
mod kept_events;
mod kernel;
mod pleg_harness;
mod pods;
mod recorded;
mod seen;
pub mod shortage;

pub use agent::Agent;
pub use api::Api;
pub use kernel::SimWatch;
pub use kernel::follow_kernel;
pub use pleg_harness::PlegHarness;
pub use pleg_harness::SensorSet;
pub use pleg_harness::runtime;
pub use pods::PodOf;
pub use pods::pod;
pub use recorded::RecordedEvents;
pub use recorded::recorder;
pub use seen::Seen;

const LIMIT: Duration = Duration::from_secs(900);

/// A simulated runtime that has the image of all pods of [`pod`], and a folder for an agent.
pub fn node() -> (SimRuntime, TempDir) {
    let sim = SimRuntime::new(Options::default());
    sim.images(|images| images.store("busybox", 1 << 20));
    (sim, folder())
}

/// A folder for an agent, with the hosts file of its node.
pub fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("hosts"), "127.0.0.1 localhost\n").expect("a hosts file");
    folder
}

/// Waits until `met`; for a quarter of an hour, more than any pod takes.
///
/// # Panics
/// It is never met.
pub async fn until(sim: &SimRuntime, what: &str, met: impl Fn(&Trace) -> bool) {
    sim.until(what, LIMIT, met).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
}
