//! Calls on containers.

use std::collections::BTreeMap;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use serde::Deserialize;
use tokio::time::Instant;

use super::Operation;
use super::Runtime;
use super::RuntimeError;
use super::features::read_all;

/// Upper bound for grace periods, ten years: durations of Go runtimes overflow after 292 years, which would mean an
/// immediate SIGKILL.
const LONGEST_GRACE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Answer to ContainerStatus.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerInspection {
    /// The container; its metadata is present.
    pub status: cri::ContainerStatus,
    /// Verbose information, runtime specific.
    pub info: BTreeMap<String, String>,
}

impl ContainerInspection {
    /// Pid of the init process from a verbose answer (containerd and CRI-O both put JSON with a `pid` under the key
    /// `info`). Not below 1, and meaningless once the container exited.
    pub fn pid(&self) -> Option<u32> {
        #[derive(Deserialize)]
        struct Info {
            pid: u32,
        }
        let info: Info = serde_json::from_str(self.info.get("info")?).ok()?;
        Some(info.pid).filter(|pid| *pid > 0)
    }
}

impl Runtime {
    /// Creates a container in a sandbox and returns its id. `sandbox_config` is that of RunPodSandbox.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn create_container(
        &self,
        sandbox_id: &str,
        config: cri::ContainerConfig,
        sandbox_config: cri::PodSandboxConfig,
    ) -> Result<String, RuntimeError> {
        let name = config.metadata.as_ref().map_or_else(String::new, |m| m.name.clone());
        let message = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let call = self.call(Operation::CreateContainer, &name);
        let answer = call.send(message, async |r| self.runtime().create_container(r).await).await?;
        call.required_id("container_id", answer.container_id)
    }

    /// Starts a created container.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn start_container(&self, id: &str) -> Result<(), RuntimeError> {
        let message = cri::StartContainerRequest { container_id: id.to_owned() };
        let (call, sent) = (self.call(Operation::StartContainer, id), Instant::now());
        call.send(message, async |r| self.runtime().start_container(r).await).await?;
        self.inner.started.send_replace(Some(sent));
        Ok(())
    }

    /// Sends the stop signal, waits for `grace` (whole seconds, rounded up), then kills. May be repeated. The grace period
    /// is added to the deadline.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), RuntimeError> {
        let grace = grace.min(LONGEST_GRACE);
        let message = cri::StopContainerRequest { container_id: id.to_owned(), timeout: whole_seconds(grace) };
        let deadline = self.request_timeout().saturating_add(grace);
        let call = self.call(Operation::StopContainer, id).within(Some(deadline));
        call.send(message, async |r| self.runtime().stop_container(r).await).await.map(drop)
    }

    /// Removes a container, killing it if it runs. May be repeated.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn remove_container(&self, id: &str) -> Result<(), RuntimeError> {
        let message = cri::RemoveContainerRequest { container_id: id.to_owned() };
        let call = self.call(Operation::RemoveContainer, id);
        call.send(message, async |r| self.runtime().remove_container(r).await).await.map(drop)
    }

    /// ContainerStatus of one container.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn container_status(&self, id: &str, verbose: bool) -> Result<ContainerInspection, RuntimeError> {
        let message = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose };
        let call = self.call(Operation::ContainerStatus, id);
        let answer = call.send(message, async |r| self.runtime().container_status(r).await).await?;
        let status = call.required("status", answer.status)?;
        call.required("status.metadata", status.metadata.as_ref())?;
        Ok(ContainerInspection { status, info: answer.info })
    }

    /// Containers that meet all conditions of `filter`; all of them by default.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn list_containers(&self, filter: cri::ContainerFilter) -> Result<Vec<cri::Container>, RuntimeError> {
        let call = self.call(Operation::ListContainers, "");
        let streams = &self.inner.streams.runtime;
        if streams.is_on() {
            let message = cri::StreamContainersRequest { filter: Some(filter.clone()) };
            let stream = async |r| read_all(self.runtime().stream_containers(r).await?, |m| m.containers).await;
            if let Some(listed) = streams.known("StreamContainers", call.send(message, stream).await) {
                return listed;
            }
        }
        let message = cri::ListContainersRequest { filter: Some(filter) };
        Ok(call.send(message, async |r| self.runtime().list_containers(r).await).await?.containers)
    }

    /// UpdateContainerResources.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn update_container_resources(
        &self,
        id: &str,
        resources: cri::LinuxContainerResources,
    ) -> Result<(), RuntimeError> {
        let message = cri::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources),
            ..Default::default()
        };
        let call = self.call(Operation::UpdateContainerResources, id);
        call.send(message, async |r| self.runtime().update_container_resources(r).await).await.map(drop)
    }

    /// Makes the runtime write to a new log file after the old one was moved away.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn reopen_container_log(&self, id: &str) -> Result<(), RuntimeError> {
        let message = cri::ReopenContainerLogRequest { container_id: id.to_owned() };
        let call = self.call(Operation::ReopenContainerLog, id);
        call.send(message, async |r| self.runtime().reopen_container_log(r).await).await.map(drop)
    }

    /// Runs a command in a container and waits for its end. The runtime kills it after `timeout` (whole seconds, rounded
    /// up); zero means never, and then there is no deadline here either.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn exec_sync(
        &self,
        id: &str,
        cmd: Vec<String>,
        timeout: Duration,
    ) -> Result<cri::ExecSyncResponse, RuntimeError> {
        let deadline = (!timeout.is_zero()).then(|| self.request_timeout().saturating_add(timeout));
        let message = cri::ExecSyncRequest { container_id: id.to_owned(), cmd, timeout: whole_seconds(timeout) };
        let call = self.call(Operation::ExecSync, id).within(deadline);
        call.send(message, async |r| self.runtime().exec_sync(r).await).await
    }
}

fn whole_seconds(duration: Duration) -> i64 {
    let seconds = duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0));
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_periods_are_rounded_up_to_whole_seconds() {
        for (millis, seconds) in [(0, 0), (1, 1), (500, 1), (1000, 1), (1001, 2), (30_000, 30)] {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds, "{millis} ms");
        }
    }

    #[test]
    fn pid_from_a_verbose_inspection() {
        let cases = [
            (Some(r#"{"sandboxID":"a","pid":4711,"removing":false}"#), Some(4711)),
            (Some(r#"{"pid":0}"#), None),
            (Some(r#"{"pid":-1}"#), None),
            (Some("no JSON"), None),
            (None, None),
        ];
        for (info, pid) in cases {
            let info = info.map(|text| ("info".to_owned(), text.to_owned())).into_iter().collect();
            assert_eq!(ContainerInspection { status: Default::default(), info }.pid(), pid);
        }
    }
}
