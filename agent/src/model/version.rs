//! The Kubernetes version that this agent implements.

/// The Kubernetes version whose kubelet this agent stands in for; reported to the cluster and to probed servers.
pub const KUBERNETES: &str = "v1.36.3";
