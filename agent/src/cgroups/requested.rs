//! Requests of pods, by which the QoS classes are weighed and protected.

use std::fmt::Debug;

/// Requests of the active pods of a node, including overhead (KEP-688) and pod-level requests (KEP-2837).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requested {
    /// CPU of the Burstable pods, in thousandths.
    pub burstable_milli_cpu: i64,
    /// Memory of the Guaranteed pods, bytes.
    pub guaranteed_memory: i64,
    /// Memory of the Burstable pods, bytes.
    pub burstable_memory: i64,
    /// Every source of pods has been read. Until then there may be more pods than are known.
    pub is_complete: bool,
}

/// Source of the pods of this node. Implemented by the desired pods.
pub trait PodRequests: Debug + Send + Sync + 'static {
    /// The sums over all active pods now. Must not block.
    fn requested(&self) -> Requested;
}
