//! The calls keblet makes, under the names that CRI and upstream's metrics give them.

use std::fmt;

macro_rules! operations {
    ($($variant:ident $metric:literal $rpc:literal)*) => {
        /// A CRI call.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Operation {
            $(#[doc = concat!("`", $rpc, "`")] $variant,)*
        }

        impl Operation {
            /// Every operation.
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$variant),*];

            /// Label `operation_type` of the `kubelet_runtime_operations_*` metrics.
            pub fn metric(self) -> &'static str {
                match self { $(Self::$variant => $metric),* }
            }

            /// Name of the call in the CRI.
            pub fn rpc(self) -> &'static str {
                match self { $(Self::$variant => $rpc),* }
            }
        }
    };
}

operations! {
    Version "version" "Version"
    Status "status" "Status"
    RunPodSandbox "run_podsandbox" "RunPodSandbox"
    StopPodSandbox "stop_podsandbox" "StopPodSandbox"
    RemovePodSandbox "remove_podsandbox" "RemovePodSandbox"
    PodSandboxStatus "podsandbox_status" "PodSandboxStatus"
    ListPodSandbox "list_podsandbox" "ListPodSandbox"
    UpdatePodSandboxResources "update_podsandbox_resources" "UpdatePodSandboxResources"
    CreateContainer "create_container" "CreateContainer"
    StartContainer "start_container" "StartContainer"
    StopContainer "stop_container" "StopContainer"
    RemoveContainer "remove_container" "RemoveContainer"
    ListContainers "list_containers" "ListContainers"
    ContainerStatus "container_status" "ContainerStatus"
    UpdateContainerResources "update_container" "UpdateContainerResources"
    ReopenContainerLog "reopen_container_log" "ReopenContainerLog"
    ExecSync "exec_sync" "ExecSync"
    Exec "exec" "Exec"
    Attach "attach" "Attach"
    PortForward "port_forward" "PortForward"
    CheckpointContainer "checkpoint_container" "CheckpointContainer"
    ListContainerStats "list_container_stats" "ListContainerStats"
    GetContainerEvents "get_container_events" "GetContainerEvents"
    RuntimeConfig "runtime_config" "RuntimeConfig"
    UpdateRuntimeConfig "update_runtime_config" "UpdateRuntimeConfig"
    ListImages "list_images" "ListImages"
    ImageStatus "image_status" "ImageStatus"
    PullImage "pull_image" "PullImage"
    RemoveImage "remove_image" "RemoveImage"
    ImageFsInfo "image_fs_info" "ImageFsInfo"
}

impl Operation {
    /// Full name of the service that has the call.
    pub fn service(self) -> &'static str {
        match self {
            Self::ListImages | Self::ImageStatus | Self::PullImage | Self::RemoveImage | Self::ImageFsInfo => {
                "runtime.v1.ImageService"
            }
            _ => "runtime.v1.RuntimeService",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.rpc())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Upstream's values of the label, without those of calls that keblet does not make.
    const UPSTREAM: &str = "version, status, create_container, start_container, stop_container, remove_container, \
        list_containers, container_status, update_container, reopen_container_log, exec_sync, exec, attach, \
        port_forward, checkpoint_container, list_container_stats, run_podsandbox, \
        stop_podsandbox, remove_podsandbox, podsandbox_status, list_podsandbox, update_podsandbox_resources, \
        list_images, image_status, pull_image, remove_image, image_fs_info, get_container_events, runtime_config, update_runtime_config";

    #[test]
    fn metric_labels_are_upstreams() {
        let mut upstream: Vec<_> = UPSTREAM.split(", ").collect();
        let mut ours: Vec<_> = Operation::ALL.iter().map(|o| o.metric()).collect();
        upstream.sort_unstable();
        ours.sort_unstable();
        assert_eq!(ours, upstream);
    }
}
