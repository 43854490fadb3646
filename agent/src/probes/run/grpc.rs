//! gRPC probes: the health service of KEP-2727, without TLS. Whatever goes wrong is a failure, never an error.

use std::time::Duration;

use http::HeaderValue;
use http::header::USER_AGENT;
use k8s_openapi::api::core::v1::GRPCAction;
use keblet_proto::health::v1::HealthCheckRequest;
use keblet_proto::health::v1::HealthCheckResponse;
use keblet_proto::health::v1::health_check_response::ServingStatus;
use keblet_proto::health::v1::health_client::HealthClient;
use tokio::time::Instant;
use tokio::time::timeout_at;
use tonic::Code;
use tonic::Request;
use tonic::Status;

use super::Outcome;
use super::Subject;
use crate::http_get::Caller;
use crate::http_get::Http2;
use crate::http_get::dial;
use crate::http_get::join_host_port;
use crate::model::go_duration;
use crate::runtime::go_name;

/// Pause between attempts to connect. A server that does not listen yet may do so within the timeout.
const REDIAL: Duration = Duration::from_millis(100);
/// The longest answer, in bytes. One of the health service has two.
const MAX_ANSWER: usize = 4096;

pub(super) async fn run(caller: &Caller, subject: &Subject<'_>, action: &GRPCAction) -> Outcome {
    let deadline = Instant::now() + subject.timeout;
    let limit = go_duration(subject.timeout);
    let Ok(port) = u16::try_from(action.port) else {
        return Outcome::Failure(format!("error: invalid port number: {}", action.port));
    };
    let host = if subject.address.is_empty() { "127.0.0.1" } else { subject.address };
    let address = join_host_port(host, port);
    let connected = timeout_at(deadline, connect(host, port)).await;
    let connection = match connected {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => {
            return Outcome::Failure(format!("error: failed to connect service at {address:?}: {error}"));
        }
        Err(_) => {
            let text = "context deadline exceeded";
            return Outcome::Failure(format!("timeout: failed to connect service {address:?} within {limit}: {text}"));
        }
    };
    let service = action.service.clone().unwrap_or_default();
    match timeout_at(deadline, check(connection, &address, service, caller.user_agent())).await {
        Ok(Ok(answer)) => of_answer(&answer),
        Ok(Err(status)) => of_status(&status, &limit),
        Err(_) => Outcome::Failure(format!("timeout: health rpc did not complete within {limit}")),
    }
}

/// Connects, as soon as the server listens.
async fn connect(host: &str, port: u16) -> Result<Http2<tonic::body::Body>, hyper::Error> {
    loop {
        match dial(host, port).await {
            Ok(stream) => return Http2::connect(stream).await,
            Err(error) => tracing::trace!(%error, "a gRPC probe connects again"),
        }
        tokio::time::sleep(REDIAL).await;
    }
}

async fn check(
    connection: Http2<tonic::body::Body>,
    address: &str,
    service: String,
    agent: &str,
) -> Result<HealthCheckResponse, Status> {
    let invalid = |error: &dyn std::fmt::Display| Status::internal(error.to_string());
    let agent = HeaderValue::from_str(agent).map_err(|error| invalid(&error))?;
    let origin = format!("http://{address}").parse().map_err(|error| invalid(&error as &dyn std::fmt::Display))?;
    let sender = connection.sender.clone();
    let transport = tower::service_fn(move |mut message: http::Request<tonic::body::Body>| {
        message.headers_mut().insert(USER_AGENT, agent.clone());
        let mut sender = sender.clone();
        async move {
            sender.ready().await?;
            sender.send_request(message).await
        }
    });
    let mut client = HealthClient::with_origin(transport, origin);
    client = client.max_decoding_message_size(MAX_ANSWER);
    client.check(Request::new(HealthCheckRequest { service })).await.map(tonic::Response::into_inner)
}

fn of_answer(answer: &HealthCheckResponse) -> Outcome {
    let name = match ServingStatus::try_from(answer.status) {
        Ok(ServingStatus::Serving) => return Outcome::Success,
        Ok(other) => other.as_str_name().to_owned(),
        // As Go shows a number without a name.
        Err(_) => answer.status.to_string(),
    };
    Outcome::Failure(format!("service unhealthy (responded with {name:?})"))
}

fn of_status(status: &Status, limit: &str) -> Outcome {
    let message = status.message();
    Outcome::Failure(match status.code() {
        Code::Unimplemented => {
            format!("error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {message}")
        }
        Code::DeadlineExceeded => format!("timeout: health rpc did not complete within {limit}"),
        code => format!("error: health rpc probe failed: rpc error: code = {} desc = {message}", go_name(code)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_shown_by_name_or_number() {
        let unhealthy = |shown: &str| Outcome::Failure(format!("service unhealthy (responded with \"{shown}\")"));
        let table = [
            (1, Outcome::Success),
            (0, unhealthy("UNKNOWN")),
            (3, unhealthy("SERVICE_UNKNOWN")),
            (7, unhealthy("7")),
            (-1, unhealthy("-1")),
        ];
        for (status, expected) in table {
            assert_eq!(of_answer(&HealthCheckResponse { status }), expected, "{status}");
        }
    }
}
