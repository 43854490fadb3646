//! Identity and features of the runtime, found by probing.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use futures_util::TryStreamExt;
use keblet_proto::cri::v1 as cri;
use tonic::Response;
use tonic::Status;
use tonic::Streaming;

use super::Operation;
use super::Runtime;
use super::RuntimeError;
use crate::model::Backoff;

/// Version of the caller's API that upstream sends, and that runtimes expect.
const CALLER_VERSION: &str = "0.1.0";

/// A filter that matches no sandbox: probes list streaming without listing anything.
const NO_SANDBOX: &str = "keblet.dev/no-such-sandbox";

/// Identity and features of a runtime.
#[derive(Clone, PartialEq, Debug)]
pub struct Features {
    /// Such as `containerd`.
    pub runtime_name: String,
    /// The runtime's own version.
    pub runtime_version: String,
    /// The cgroup driver the runtime uses; `None` if unknown: the configuration decides.
    pub cgroup_driver: Option<cri::CgroupDriver>,
    /// Lists can be streamed in portions.
    pub streaming_lists: bool,
}

impl Runtime {
    /// Name and versions of the runtime.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn version(&self) -> Result<cri::VersionResponse, RuntimeError> {
        let message = cri::VersionRequest { version: CALLER_VERSION.to_owned() };
        let call = self.call(Operation::Version, "");
        call.send(message, async |r| self.runtime().version(r).await).await
    }

    /// Status of the runtime (conditions `RuntimeReady` and `NetworkReady`), its handlers and their features.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn status(&self, verbose: bool) -> Result<cri::StatusResponse, RuntimeError> {
        let call = self.call(Operation::Status, "");
        let answer = call.send(cri::StatusRequest { verbose }, async |r| self.runtime().status(r).await).await?;
        call.required("status", answer.status.as_ref())?;
        Ok(answer)
    }

    /// The cgroup driver of the runtime; `None` if it does not implement the call or does not report one.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, answers with an error, or has a driver that is not known here.
    pub async fn runtime_config(&self) -> Result<Option<cri::CgroupDriver>, RuntimeError> {
        let call = self.call(Operation::RuntimeConfig, "");
        match call.send(cri::RuntimeConfigRequest {}, async |r| self.runtime().runtime_config(r).await).await {
            // The default of an unknown value would be `systemd`.
            Ok(answer) => answer
                .linux
                .map(|linux| {
                    let known = cri::CgroupDriver::try_from(linux.cgroup_driver).ok();
                    call.required("a known cgroup driver", known)
                })
                .transpose(),
            Err(error) if error.is_unimplemented() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// UpdateRuntimeConfig with the node's pod CIDR.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn set_pod_cidr(&self, cidr: &str) -> Result<(), RuntimeError> {
        let network_config = Some(cri::NetworkConfig { pod_cidr: cidr.to_owned() });
        let runtime_config = Some(cri::RuntimeConfig { network_config });
        let message = cri::UpdateRuntimeConfigRequest { runtime_config };
        let call = self.call(Operation::UpdateRuntimeConfig, cidr);
        call.send(message, async |r| self.runtime().update_runtime_config(r).await).await.map(drop)
    }

    /// Probes the runtime's features. Repeat it after a reconnect: the version may have changed.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn features(&self) -> Result<Features, RuntimeError> {
        let version = self.version().await?;
        let cgroup_driver = self.runtime_config().await?;
        let streaming_lists = self.try_streaming_lists().await?;
        Ok(Features {
            runtime_name: version.runtime_name,
            runtime_version: version.runtime_version,
            cgroup_driver,
            streaming_lists,
        })
    }

    /// Waits without limit until the runtime answers. Logs once when it does not and once when it does.
    pub async fn until_ready(&self) -> cri::VersionResponse {
        let mut backoff = Backoff::new(super::FIRST_RETRY, super::LAST_RETRY);
        let mut is_logged = false;
        loop {
            let error = match self.version().await {
                Ok(version) => {
                    if is_logged {
                        tracing::info!(
                            endpoint = self.endpoint(),
                            version = version.runtime_version,
                            "runtime answers"
                        );
                    }
                    return version;
                }
                Err(error) => error,
            };
            if !std::mem::replace(&mut is_logged, true) {
                tracing::warn!(%error, "waiting for the runtime");
            }
            tokio::time::sleep(backoff.failed(0.0)).await;
        }
    }

    async fn try_streaming_lists(&self) -> Result<bool, RuntimeError> {
        let filter = cri::PodSandboxFilter { id: NO_SANDBOX.to_owned(), ..Default::default() };
        let message = cri::StreamPodSandboxesRequest { filter: Some(filter) };
        let call = self.call(Operation::ListPodSandbox, "");
        let stream = async |r| read_all(self.runtime().stream_pod_sandboxes(r).await?, |m| m.pod_sandboxes).await;
        match call.send(message, stream).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_unimplemented() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Whether lists are streamed, by service.
#[derive(Debug)]
pub(super) struct Streams {
    pub(super) runtime: Streamed,
    pub(super) images: Streamed,
}

impl Streams {
    pub(super) fn new(wanted: bool) -> Self {
        let service = || Streamed(AtomicBool::new(wanted));
        Self { runtime: service(), images: service() }
    }

    /// Of another version of the runtime it is not known which calls it lacks.
    pub(super) fn renew(&self, wanted: bool) {
        [&self.runtime, &self.images].into_iter().for_each(|service| service.0.store(wanted, Relaxed));
    }
}

/// Whether lists of one service are streamed.
#[derive(Debug)]
pub(super) struct Streamed(AtomicBool);

impl Streamed {
    pub(super) fn is_on(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// The result of a list that was streamed by `rpc`; `None` if the service does not know the call, and from then on
    /// streaming is off. A list that breaks off is logged as by a kubelet.
    pub(super) fn known<T>(&self, rpc: &str, listed: Result<T, RuntimeError>) -> Option<Result<T, RuntimeError>> {
        match listed {
            Err(error) if error.is_unimplemented() => {
                self.0.store(false, Relaxed);
                None
            }
            Err(error) => {
                // That the runtime cannot be reached is logged once for all calls.
                if !error.is_unreachable() {
                    tracing::warn!(%error, "{rpc} recv failed");
                }
                Some(Err(error))
            }
            listed => Some(listed),
        }
    }
}

/// All items of a streamed list.
///
/// # Errors
/// The stream breaks off.
pub(super) async fn read_all<M, T>(
    stream: Response<Streaming<M>>,
    items: impl Fn(M) -> Vec<T>,
) -> Result<Response<Vec<T>>, Status> {
    let mut stream = stream.into_inner();
    let mut all = Vec::new();
    while let Some(chunk) = stream.try_next().await? {
        all.extend(items(chunk));
    }
    Ok(Response::new(all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::Buffer;

    #[test]
    fn a_list_that_breaks_off_is_logged_by_the_name_of_its_call() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let _logging = tracing::subscriber::set_default(lines);
        let listed = |status: &Status| -> Result<(), RuntimeError> {
            Err(RuntimeError::from_status(Operation::ListContainers, "", "unix:///runtime.sock", status))
        };
        let streamed = Streamed(AtomicBool::new(true));
        assert!(streamed.known("StreamContainers", listed(&Status::internal("lost"))).is_some_and(|all| all.is_err()));
        assert!(streamed.is_on(), "the service knows the call");
        assert!(streamed.known("StreamImages", listed(&Status::unimplemented("unknown"))).is_none());
        assert!(!streamed.is_on());
        let logged = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        assert!(logged.contains("StreamContainers recv failed error=ListContainers: lost (Internal)"), "{logged}");
        assert!(!logged.contains("StreamImages"), "{logged}");
    }
}
