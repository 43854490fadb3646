//! TCP and gRPC probes of real servers.

use std::net::SocketAddr;
use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::GRPCAction;
use k8s_openapi::api::core::v1::Probe;
use k8s_openapi::api::core::v1::TCPSocketAction;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use keblet_proto::health::v1::HealthCheckRequest;
use keblet_proto::health::v1::HealthCheckResponse;
use keblet_proto::health::v1::health_check_response::ServingStatus;
use keblet_proto::health::v1::health_server::Health;
use keblet_proto::health::v1::health_server::HealthServer;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::Request;
use tonic::Response;
use tonic::Status;
use tonic::transport::Server;

use super::*;
use crate::http_get::Caller;
use crate::model::ProbeKind;

const LIMIT: Duration = Duration::from_secs(1);

fn target(ports: serde_json::Value) -> Target {
    Target {
        kind: ProbeKind::Liveness,
        is_sidecar: false,
        has_startup_probe: false,
        probe: Probe::default(),
        container: serde_json::from_value::<Container>(serde_json::json!({ "name": "c", "ports": ports })).expect("c"),
    }
}

fn subject<'a>(pod: &'a PodRef, id: &'a ContainerId, target: &'a Target) -> Subject<'a> {
    Subject { pod, container: id, address: "127.0.0.1", target, timeout: LIMIT }
}

fn ids() -> (PodRef, ContainerId) {
    (PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() }, ContainerId::from("id"))
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

async fn tcp_of(port: IntOrString, target: &Target) -> Outcome {
    let (pod, id) = ids();
    tcp::run(&subject(&pod, &id, target), &TCPSocketAction { host: None, port }).await
}

#[tokio::test]
async fn tcp_probes_connect() {
    let (listening, address) = listener().await;
    let named = target(serde_json::json!([{ "name": "web", "containerPort": address.port() }]));
    assert_eq!(tcp_of(IntOrString::String("web".into()), &named).await, Outcome::Success);
    assert_eq!(tcp_of(IntOrString::Int(0), &named).await, Outcome::error("invalid port number: 0".into()));
    let ((pod, id), target) = (ids(), target(serde_json::json!([])));
    for (of_pod, host) in [("192.0.2.1", "127.0.0.1"), ("127.0.0.1", "")] {
        let action = TCPSocketAction { host: Some(host.to_owned()), port: IntOrString::Int(address.port().into()) };
        let subject = Subject { address: of_pod, ..subject(&pod, &id, &target) };
        assert_eq!(tcp::run(&subject, &action).await, Outcome::Success, "{of_pod} {host}");
    }
    drop(listening);
    let refused = format!("dial tcp {address}: connect: connection refused");
    assert_eq!(tcp_of(IntOrString::Int(address.port().into()), &named).await, Outcome::Failure(refused));
}

/// Answers by the name of the service.
struct Services;

#[tonic::async_trait]
impl Health for Services {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let agent = request.metadata().get("user-agent").and_then(|agent| agent.to_str().ok()).unwrap_or_default();
        assert_eq!(agent, "kube-probe/1.36");
        let status = match request.into_inner().service.as_str() {
            "" => ServingStatus::Serving,
            "ill" => ServingStatus::NotServing,
            "hangs" => std::future::pending().await,
            "cancelled" => return Err(Status::cancelled("it ends")),
            _ => return Err(Status::not_found("unknown service")),
        };
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }
}

async fn grpc_of(address: SocketAddr, service: &str) -> (Outcome, Duration) {
    let (pod, id, target) = (ids().0, ids().1, target(serde_json::json!([])));
    let action = GRPCAction { port: address.port().into(), service: Some(service.to_owned()) };
    let began = Instant::now();
    let outcome = grpc::run(&Caller::probe("v1.36.3"), &subject(&pod, &id, &target), &action).await;
    (outcome, began.elapsed())
}

#[tokio::test]
async fn grpc_probes_ask_the_health_service() {
    let (listening, address) = listener().await;
    let server = Server::builder().add_service(HealthServer::new(Services));
    let serving = server.serve_with_incoming(TcpListenerStream::new(listening));
    let _serving = AbortOnDropHandle::new(tokio::spawn(serving));
    let not_found = "error: health rpc probe failed: rpc error: code = NotFound desc = unknown service";
    let cancelled = "error: health rpc probe failed: rpc error: code = Canceled desc = it ends";
    for (service, expected) in [
        ("", Outcome::Success),
        ("ill", Outcome::Failure("service unhealthy (responded with \"NOT_SERVING\")".into())),
        ("other", Outcome::Failure(not_found.into())),
        ("cancelled", Outcome::Failure(cancelled.into())),
        ("hangs", Outcome::Failure("timeout: health rpc did not complete within 1s".into())),
    ] {
        assert_eq!(grpc_of(address, service).await.0, expected, "{service:?}");
    }
}

#[tokio::test]
async fn servers_without_the_health_service_fail() {
    let (listening, address) = listener().await;
    let router = axum::Router::new().fallback(|| async {
        let headers = [("content-type", "application/grpc"), ("grpc-status", "12"), ("grpc-message", "no such thing")];
        (headers, "")
    });
    let _serving = AbortOnDropHandle::new(tokio::spawn(async move {
        while let Ok((stream, _)) = listening.accept().await {
            let service = hyper_util::service::TowerToHyperService::new(router.clone());
            let builder = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
            tokio::spawn(builder.serve_connection(hyper_util::rt::TokioIo::new(stream), service));
        }
    }));
    let (outcome, _) = grpc_of(address, "").await;
    let expected =
        "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): no such thing";
    assert_eq!(outcome, Outcome::Failure(expected.into()));
}

/// A server of another protocol that closes the connection, or sends without end frames that HTTP/2 does not or does define.
#[tokio::test]
async fn servers_of_other_protocols_fail_within_the_timeout() {
    const SETTINGS: &str = "\0\0\0\u{4}\0\0\0\0\0";
    for (words, is_endless) in [
        ("", false),
        ("HTTP/1.1 400 Bad Request\r\n\r\n", false),
        ("SSH-2.0-OpenSSH_9.9\r\n", true),
        (SETTINGS, false),
        (SETTINGS, true),
    ] {
        let (listening, address) = listener().await;
        let _serving = AbortOnDropHandle::new(tokio::spawn(async move {
            while let Ok((mut stream, _)) = listening.accept().await {
                tokio::spawn(async move {
                    drop(stream.write_all(words.as_bytes()).await);
                    while is_endless && stream.write_all(words.as_bytes()).await.is_ok() {}
                });
            }
        }));
        let (outcome, took) = grpc_of(address, "").await;
        assert!(matches!(outcome, Outcome::Failure(_)), "{words:?}: {outcome:?}");
        assert!(took < 10 * LIMIT, "{words:?}: {took:?}");
    }
}

#[tokio::test]
async fn unreachable_grpc_servers_cost_the_timeout() {
    let (listening, address) = listener().await;
    let (outcome, took) = grpc_of(address, "").await;
    assert_eq!(outcome, Outcome::Failure("timeout: health rpc did not complete within 1s".into()), "it accepts alone");
    assert!(took >= LIMIT);
    drop(listening);
    let (outcome, took) = grpc_of(address, "").await;
    let expected =
        format!("timeout: failed to connect service {:?} within 1s: context deadline exceeded", address.to_string());
    assert_eq!(outcome, Outcome::Failure(expected));
    assert!(took >= LIMIT);
}
