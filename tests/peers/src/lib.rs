//! Real peers: what tests, the demo and the benchmark need from the outside world.
//!
//! Owns the layout of the cache that `cargo xtask setup` fills ([`Cache`]) and the handle of a private container
//! runtime ([`PrivateContainerd`]). The runtime itself is owned by a process of its own, `private-containerd`, which
//! cleans up when its standard input ends: however a test, the demo or a developer's terminal ends, nothing stays
//! behind. Refuses to install anything and to speak CRI for its users.

mod cache;
mod containerd;

pub use cache::BUSYBOX_IMAGE;
pub use cache::Cache;
pub use cache::PAUSE_IMAGE;
pub use cache::PROBE_IMAGE;
pub use containerd::Options;
pub use containerd::PrivateContainerd;
pub use containerd::Ready;
pub use containerd::Remains;
