//! Calls for streams and usage: URLs of interactive streams, checkpoints, usage of containers.

use std::time::Duration;

use keblet_proto::cri::v1 as cri;

use super::Operation;
use super::Runtime;
use super::RuntimeError;
use super::features::read_all;

impl Runtime {
    /// The URL at which a command in a container is served. The command starts when a client connects there.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn exec(&self, request: cri::ExecRequest) -> Result<String, RuntimeError> {
        let id = request.container_id.clone();
        let call = self.call(Operation::Exec, &id);
        Ok(call.send(request, async |r| self.runtime().exec(r).await).await?.url)
    }

    /// The URL at which the streams of a container's own process are served.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn attach(&self, request: cri::AttachRequest) -> Result<String, RuntimeError> {
        let id = request.container_id.clone();
        let call = self.call(Operation::Attach, &id);
        Ok(call.send(request, async |r| self.runtime().attach(r).await).await?.url)
    }

    /// The URL at which connections are forwarded into a sandbox. `ports` are for clients that do not name them later.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn port_forward(&self, sandbox_id: &str, ports: Vec<i32>) -> Result<String, RuntimeError> {
        let message = cri::PortForwardRequest { pod_sandbox_id: sandbox_id.to_owned(), port: ports };
        let call = self.call(Operation::PortForward, sandbox_id);
        Ok(call.send(message, async |r| self.runtime().port_forward(r).await).await?.url)
    }

    /// Writes the state of a running container to the file `location`. `timeout` (whole seconds) is passed to the
    /// runtime and is the deadline.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> Result<(), RuntimeError> {
        let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
        let message = cri::CheckpointContainerRequest {
            container_id: id.to_owned(),
            location: location.to_owned(),
            timeout: seconds,
        };
        let call = self.call(Operation::CheckpointContainer, id).within(Some(timeout));
        call.send(message, async |r| self.runtime().checkpoint_container(r).await).await.map(drop)
    }

    /// Usage of the containers that meet all conditions of `filter`; of all running ones by default.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn list_container_stats(
        &self,
        filter: cri::ContainerStatsFilter,
    ) -> Result<Vec<cri::ContainerStats>, RuntimeError> {
        let call = self.call(Operation::ListContainerStats, "");
        let streams = &self.inner.streams.runtime;
        if streams.is_on() {
            let message = cri::StreamContainerStatsRequest { filter: Some(filter.clone()) };
            let stream =
                async |r| read_all(self.runtime().stream_container_stats(r).await?, |m| m.container_stats).await;
            if let Some(listed) = streams.known("StreamContainerStats", call.send(message, stream).await) {
                return listed;
            }
        }
        let message = cri::ListContainerStatsRequest { filter: Some(filter) };
        Ok(call.send(message, async |r| self.runtime().list_container_stats(r).await).await?.stats)
    }

    /// `runtimeRequestTimeout`.
    pub fn usual_deadline(&self) -> Duration {
        self.request_timeout()
    }
}
