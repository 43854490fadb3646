//! Probes of every kind on a real runtime: they make containers ready and unready, and restart them.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use axum::Router;
use axum::routing::get;
use http::StatusCode;
use keblet_proto::health::v1::HealthCheckRequest;
use keblet_proto::health::v1::HealthCheckResponse;
use keblet_proto::health::v1::health_check_response::ServingStatus;
use keblet_proto::health::v1::health_server::Health;
use keblet_proto::health::v1::health_server::HealthServer;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Request;
use tonic::Response;
use tonic::Status;

/// Servers that the probes of a pod on the host's network ask. They answer as `healthy` says; the TCP server listens or not.
struct Servers {
    runtime: Runtime,
    healthy: Arc<AtomicBool>,
    /// Of HTTP, TCP and gRPC.
    ports: [u16; 3],
    tcp: Option<JoinHandle<()>>,
}

/// The only service that [`HealthOf`] knows.
const SERVICE: &str = "web";

struct HealthOf(Arc<AtomicBool>);

#[tonic::async_trait]
impl Health for HealthOf {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        if request.get_ref().service != SERVICE {
            return Err(Status::not_found("another service"));
        }
        let healthy = self.0.load(Ordering::Relaxed);
        let status = if healthy { ServingStatus::Serving } else { ServingStatus::NotServing };
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }
}

impl Servers {
    fn start() -> Result<Self> {
        let runtime = Runtime::new()?;
        let bind = || runtime.block_on(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)));
        let listeners = [bind()?, bind()?, bind()?];
        let mut ports = [0; 3];
        for (port, listener) in ports.iter_mut().zip(&listeners) {
            *port = listener.local_addr()?.port();
        }
        let [http, tcp, grpc] = listeners;
        let healthy = Arc::new(AtomicBool::new(true));
        let answers = healthy.clone();
        let healthz = move || async move {
            if answers.load(Ordering::Relaxed) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
        };
        runtime.spawn(async move { axum::serve(http, Router::new().route("/healthz", get(healthz))).await });
        let health = HealthServer::new(HealthOf(healthy.clone()));
        let server = tonic::transport::Server::builder().add_service(health);
        runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(grpc)));
        let tcp = Some(runtime.spawn(accept(tcp)));
        Ok(Self { runtime, healthy, ports, tcp })
    }

    fn set_healthy(&mut self, healthy: bool) -> Result<()> {
        self.healthy.store(healthy, Ordering::Relaxed);
        if !healthy {
            self.tcp.take().context("it does not listen")?.abort();
        } else {
            let listener = self.runtime.block_on(TcpListener::bind((Ipv4Addr::UNSPECIFIED, self.ports[1])))?;
            self.tcp = Some(self.runtime.spawn(accept(listener)));
        }
        Ok(())
    }
}

async fn accept(listener: TcpListener) {
    while listener.accept().await.is_ok() {}
}

/// A pod with a container for each kind of probe.
fn pod(node: &StandaloneNode, [http, tcp, grpc]: [u16; 3]) -> Value {
    let mut pod = node.pod("web", &["run"]);
    let template = pod["spec"]["containers"][0].clone();
    let container = |name: &str, kind: &str, action: Value| {
        let mut container = template.clone();
        let mut probe = json!({ "periodSeconds": 1, "failureThreshold": 2 });
        probe.as_object_mut().expect("a probe").extend(action.as_object().expect("an action").clone());
        container["name"] = json!(name);
        container["command"] = json!(["/probe", "run", "--stamp", node.stamp(name)]);
        container[kind] = probe;
        container
    };
    let command = ["/probe", "obey", "--commands", &node.stamp("answer")];
    pod["spec"]["containers"] = json!([
        container("exec", "readinessProbe", json!({ "exec": { "command": command } })),
        container(
            "http",
            "readinessProbe",
            json!({ "httpGet": { "host": "127.0.0.1", "port": http, "path": "/healthz" } })
        ),
        container("tcp", "readinessProbe", json!({ "tcpSocket": { "host": "127.0.0.1", "port": tcp } })),
        container("grpc", "livenessProbe", json!({ "grpc": { "port": grpc, "service": SERVICE } })),
    ]);
    pod
}

/// A field of the status of each container, by name.
fn of_containers(node: &StandaloneNode, field: &str) -> Vec<(String, Value)> {
    let statuses = node.status("web")["containerStatuses"].as_array().cloned().unwrap_or_default();
    statuses
        .iter()
        .map(|status| (status["name"].as_str().unwrap_or_default().to_owned(), status[field].clone()))
        .collect()
}

fn is_ready(node: &StandaloneNode, expected: [(&str, bool); 4]) -> bool {
    of_containers(node, "ready") == expected.map(|(name, ready)| (name.to_owned(), json!(ready)))
}

const ALL: [(&str, bool); 4] = [("exec", true), ("grpc", true), ("http", true), ("tcp", true)];

#[test]
#[ignore = "real runtime"]
fn probes_of_every_kind_decide_on_readiness_and_restarts() -> Result<()> {
    let mut servers = Servers::start()?;
    let mut node = StandaloneNode::new()?;
    let answer = node.stamps.join("answer");
    std::fs::write(&answer, "exit 0\n")?;
    node.layout.write_manifest("web", &pod(&node, servers.ports))?;
    node.start()?;
    node.until_true("all containers ready", |node| Ok(is_ready(node, ALL)))?;
    ensure!(node.starts("grpc") == 1, "a healthy container was restarted");

    std::fs::write(&answer, "exit 1\n")?;
    servers.set_healthy(false)?;
    node.until_true("the others unready", |node| {
        let ready = of_containers(node, "ready");
        Ok(ready.iter().filter(|(name, _)| name != "grpc").all(|(_, ready)| *ready == json!(false)) && ready.len() == 4)
    })?;
    node.until_true("a restart for liveness", |node| Ok(node.starts("grpc") >= 2))?;
    for text in [
        "Readiness probe failed: HTTP probe failed with statuscode: 503",
        "Readiness probe failed: dial tcp 127.0.0.1",
        "Liveness probe failed: service unhealthy (responded with",
        "Container grpc failed liveness probe, will be restarted",
    ] {
        ensure!(node.log_contains(&[text]), "no event {text:?}");
    }

    std::fs::write(&answer, "exit 0\n")?;
    servers.set_healthy(true)?;
    node.until_true("all containers ready again", |node| Ok(is_ready(node, ALL)))?;
    let others = ["exec", "http", "tcp"].map(|name| node.starts(name));
    ensure!(others == [1; 3], "readiness restarted a container: {others:?}");
    let counted = node.probe_metrics("prober_probe_total");
    ensure!(counted.iter().any(|line| line.contains("result=\"failed\"") && line.contains("Liveness")), "{counted:?}");

    node.layout.remove_manifest("web")?;
    node.until_true("no sandbox in the runtime", |node| Ok(node.sandboxes("web")?.is_empty()))?;
    node.until_true("no series of its probes", |node| Ok(node.probe_metrics("prober_").is_empty()))?;
    node.stop()
}
