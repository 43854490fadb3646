//! Wire contracts of the node, client and server side.
//!
//! Owns the `.proto` files, written for this project from the protocols' facts (names, numbers and types), and the code
//! generated from them. Refuses to add behaviour: no defaults, no retries, no conversions.

/// The Container Runtime Interface.
pub mod cri {
    /// Package `runtime.v1` as of Kubernetes 1.36.
    #[expect(
        clippy::allow_attributes_without_reason,
        missing_docs,
        reason = "generated; most names of the interface speak for themselves"
    )]
    pub mod v1 {
        tonic::include_proto!("runtime.v1");
    }

    /// The compiled `.proto` files: an encoded `google.protobuf.FileDescriptorSet`.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
}

/// The gRPC health service.
pub mod health {
    /// Package `grpc.health.v1`.
    #[expect(clippy::allow_attributes_without_reason, missing_docs, reason = "generated")]
    pub mod v1 {
        tonic::include_proto!("grpc.health.v1");
    }
}
