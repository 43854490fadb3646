//! Names of the CRI's calls, as keys for counters and fault rules.

/// A call of RuntimeService or ImageService. `Debug` prints the name as in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are the protocol's own")]
pub enum Method {
    Version,
    RunPodSandbox,
    StopPodSandbox,
    RemovePodSandbox,
    PodSandboxStatus,
    ListPodSandbox,
    StreamPodSandboxes,
    CreateContainer,
    StartContainer,
    StopContainer,
    RemoveContainer,
    ListContainers,
    StreamContainers,
    ContainerStatus,
    UpdateContainerResources,
    ReopenContainerLog,
    ExecSync,
    Exec,
    Attach,
    PortForward,
    ContainerStats,
    ListContainerStats,
    StreamContainerStats,
    PodSandboxStats,
    ListPodSandboxStats,
    StreamPodSandboxStats,
    UpdateRuntimeConfig,
    Status,
    CheckpointContainer,
    GetContainerEvents,
    ListMetricDescriptors,
    ListPodSandboxMetrics,
    StreamPodSandboxMetrics,
    RuntimeConfig,
    UpdatePodSandboxResources,
    ListImages,
    StreamImages,
    ImageStatus,
    PullImage,
    RemoveImage,
    ImageFsInfo,
}

impl Method {
    /// Whether the call changes what runs on the node.
    pub fn acts(self) -> bool {
        use Method::*;
        matches!(
            self,
            RunPodSandbox
                | StopPodSandbox
                | RemovePodSandbox
                | CreateContainer
                | StartContainer
                | StopContainer
                | RemoveContainer
        )
    }
}
