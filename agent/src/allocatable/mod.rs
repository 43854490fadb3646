//! Enforces node allocatable (<https://kubernetes.io/docs/tasks/administer-cluster/reserve-compute-resources/>): limits the
//! cgroup of all pods, and those of reserved daemons, once at each start; that of all pods also when the machine has grown.
//!
//! `limits` decides (pure), `enforce` writes, retries and records. A cgroup that has its values already is not written.

mod enforce;
mod limits;

pub use enforce::EnforcementError;
pub use enforce::Enforcer;
pub use enforce::ReadPodLimits;
pub use limits::Class;
pub use limits::Reservation;
pub use limits::kubepods;
pub use limits::reservations;
