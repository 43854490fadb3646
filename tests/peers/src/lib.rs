//! A private container runtime, a private control plane and an agent on them, for tests, the demo and the benchmark.
//!
//! Owns the layout of the cache that `cargo xtask setup` fills ([`Cache`]), the handles of a private container runtime
//! ([`PrivateContainerd`]) and of a private control plane ([`ControlPlane`]), and start and stop of an agent on them
//! ([`Node`], [`Agent`]). Runtime and control plane are supervised by processes of their own, `private-containerd` and
//! `private-control-plane`, which clean up when their standard input is closed: however a test, the demo or a terminal
//! exits, nothing stays behind. Installs nothing.

mod agent;
mod cache;
mod containerd;
mod control_plane;
#[cfg(feature = "supervisor")]
mod supervised;
mod supervisor;
mod view;

pub use agent::Agent;
pub use agent::Node;
pub use agent::log_tail;
pub use cache::AGENT_IMAGE;
pub use cache::AGENT_IMAGE_VARIABLE;
pub use cache::BUSYBOX_IMAGE;
pub use cache::CONTAINERD_VARIABLE;
pub use cache::Cache;
pub use cache::KUBEADM_IMAGES;
pub use cache::KUBEADM_REPOSITORY;
pub use cache::PAUSE_IMAGE;
pub use cache::PROBE_IMAGE;
pub use containerd::Options;
pub use containerd::PrivateContainerd;
pub use containerd::Ready;
pub use control_plane::ControlPlane;
pub use control_plane::ControlPlaneOptions;
pub use control_plane::ControlPlaneReady;
pub use control_plane::Credentials;
pub use control_plane::Identity;
pub use control_plane::NodeAccess;
pub use control_plane::Part;
pub use control_plane::PlaneCommand;
pub use control_plane::check_programs;
pub use control_plane::find_programs;
#[cfg(feature = "supervisor")]
pub use supervised::commands;
#[cfg(feature = "supervisor")]
pub use supervised::respond;
pub use supervisor::CleanupReport;
pub use supervisor::Response;
pub use view::ContainerView;
pub use view::PodView;
