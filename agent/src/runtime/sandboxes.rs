//! Calls on pod sandboxes.

use keblet_proto::cri::v1 as cri;
use serde::Deserialize;

use super::Operation;
use super::Runtime;
use super::RuntimeError;
use super::features::read_all;

impl Runtime {
    /// Creates and starts a sandbox, network included, and returns its id. An empty `runtime_handler` is the default
    /// one. May take twice the usual deadline.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn run_pod_sandbox(
        &self,
        config: cri::PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<String, RuntimeError> {
        let name = full_name(&config);
        let call = self.call(Operation::RunPodSandbox, &name).within(Some(self.request_timeout().saturating_mul(2)));
        let message = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: runtime_handler.to_owned() };
        let answer = call.send(message, async |r| self.runtime().run_pod_sandbox(r).await).await;
        if answer.is_err() {
            self.inner.sandbox_failed.notify_one();
        }
        call.required_id("pod_sandbox_id", answer?.pod_sandbox_id)
    }

    /// Kills what runs in the sandbox and frees its network. May be repeated.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn stop_pod_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        let message = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let call = self.call(Operation::StopPodSandbox, id);
        call.send(message, async |r| self.runtime().stop_pod_sandbox(r).await).await.map(drop)
    }

    /// Removes the sandbox and its containers. May be repeated.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn remove_pod_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        let message = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let call = self.call(Operation::RemovePodSandbox, id);
        call.send(message, async |r| self.runtime().remove_pod_sandbox(r).await).await.map(drop)
    }

    /// PodSandboxStatus of one sandbox; its metadata is present.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn pod_sandbox_status(&self, id: &str) -> Result<cri::PodSandboxStatus, RuntimeError> {
        let message = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        let call = self.call(Operation::PodSandboxStatus, id);
        let answer = call.send(message, async |r| self.runtime().pod_sandbox_status(r).await).await?;
        let status = call.required("status", answer.status)?;
        call.required("status.metadata", status.metadata.as_ref())?;
        Ok(status)
    }

    /// The image that a sandbox was made from, by a verbose PodSandboxStatus; `None` if the runtime does not report it.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn sandbox_image(&self, id: &str) -> Result<Option<String>, RuntimeError> {
        let message = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
        let call = self.call(Operation::PodSandboxStatus, id);
        let answer = call.send(message, async |r| self.runtime().pod_sandbox_status(r).await).await?;
        Ok(answer.info.get("info").and_then(|info| image_of(info)))
    }

    /// Sandboxes that meet all conditions of `filter`; all of them by default.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn list_pod_sandboxes(
        &self,
        filter: cri::PodSandboxFilter,
    ) -> Result<Vec<cri::PodSandbox>, RuntimeError> {
        let call = self.call(Operation::ListPodSandbox, "");
        let streams = &self.inner.streams.runtime;
        if streams.is_on() {
            let message = cri::StreamPodSandboxesRequest { filter: Some(filter.clone()) };
            let stream = async |r| read_all(self.runtime().stream_pod_sandboxes(r).await?, |m| m.pod_sandboxes).await;
            if let Some(listed) = streams.known("StreamPodSandboxes", call.send(message, stream).await) {
                return listed;
            }
        }
        let message = cri::ListPodSandboxRequest { filter: Some(filter) };
        Ok(call.send(message, async |r| self.runtime().list_pod_sandbox(r).await).await?.items)
    }

    /// UpdatePodSandboxResources. Runtimes older than CRI 1.32 answer `Unimplemented`.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn update_pod_sandbox_resources(
        &self,
        id: &str,
        overhead: Option<cri::LinuxContainerResources>,
        resources: Option<cri::LinuxContainerResources>,
    ) -> Result<(), RuntimeError> {
        let message = cri::UpdatePodSandboxResourcesRequest { pod_sandbox_id: id.to_owned(), overhead, resources };
        let call = self.call(Operation::UpdatePodSandboxResources, id);
        call.send(message, async |r| self.runtime().update_pod_sandbox_resources(r).await).await.map(drop)
    }
}

/// The image in the verbose information of a sandbox: containerd and CRI-O both put JSON with an `image` under the
/// key `info`.
fn image_of(info: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Info {
        image: String,
    }
    let info: Info = serde_json::from_str(info).ok()?;
    Some(info.image).filter(|image| !image.is_empty())
}

/// `namespace/name`, because the sandbox has no id yet.
fn full_name(config: &cri::PodSandboxConfig) -> String {
    config.metadata.as_ref().map_or_else(String::new, |m| format!("{}/{}", m.namespace, m.name))
}

#[cfg(test)]
mod tests {
    use super::image_of;

    #[test]
    fn image_from_verbose_information() {
        for (info, image) in [
            (r#"{"pid":7,"image":"registry.k8s.io/pause:3.10","runtimeSpec":{}}"#, Some("registry.k8s.io/pause:3.10")),
            (r#"{"image":""}"#, None),
            (r#"{"pid":7}"#, None),
            ("no json", None),
        ] {
            assert_eq!(image_of(info).as_deref(), image, "{info}");
        }
    }
}
