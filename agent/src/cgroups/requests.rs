//! CPU requests that decide the weight of the Burstable QoS class.

use std::fmt::Debug;

/// CPU requested by the active Burstable pods of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedCpu {
    /// The sum, in thousandths of a CPU, including overhead (KEP-688) and pod-level requests (KEP-2837).
    pub milli_cpu: i64,
    /// Every source of pods has been read. Until then there may be more pods than are known.
    pub is_complete: bool,
}

/// Knows the pods of this node. Implemented by the desired pods.
pub trait BurstableRequests: Debug + Send + Sync + 'static {
    /// The sum over all active Burstable pods now. Must not block.
    fn requested(&self) -> RequestedCpu;
}
