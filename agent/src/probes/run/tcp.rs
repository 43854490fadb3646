//! TCP probes: connect, close, send nothing.

use k8s_openapi::api::core::v1::TCPSocketAction;

use super::Outcome;
use super::Subject;
use crate::http_get::dial;
use crate::http_get::join_host_port;
use crate::http_get::resolve_port;

pub(super) async fn run(subject: &Subject<'_>, action: &TCPSocketAction) -> Outcome {
    let ports = subject.target.container.ports.as_deref().unwrap_or_default();
    let port = match resolve_port(&action.port, ports) {
        Ok(port) => port,
        Err(error) => return Outcome::error(error.to_string()),
    };
    let host = action.host.as_deref().filter(|host| !host.is_empty()).unwrap_or(subject.address);
    match tokio::time::timeout(subject.timeout, dial(host, port)).await {
        Ok(Ok(_)) => Outcome::Success,
        Ok(Err(error)) => Outcome::Failure(error.to_string()),
        Err(_) => Outcome::Failure(format!("dial tcp {}: i/o timeout", join_host_port(host, port))),
    }
}
