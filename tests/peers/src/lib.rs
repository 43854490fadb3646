//! Real peers: what tests, the demo and the benchmark need from the outside world.
//!
//! Owns the layout of the cache that `cargo xtask setup` fills ([`Cache`]), the handle of a private container runtime
//! ([`PrivateContainerd`]) and the start and end of an agent on it ([`Node`], [`Agent`]). The runtime itself is owned by a process of its own, `private-containerd`, which
//! cleans up when its standard input ends: however a test, the demo or a developer's terminal ends, nothing stays
//! behind. Refuses to install anything and to speak CRI for its users.

mod agent;
mod cache;
mod containerd;
mod view;

pub use agent::Agent;
pub use agent::Node;
pub use agent::log_tail;
pub use cache::BUSYBOX_IMAGE;
pub use cache::Cache;
pub use cache::PAUSE_IMAGE;
pub use cache::PROBE_IMAGE;
pub use containerd::Answer;
pub use containerd::Options;
pub use containerd::PrivateContainerd;
pub use containerd::Ready;
pub use containerd::Remains;
pub use view::ContainerView;
pub use view::PodView;
