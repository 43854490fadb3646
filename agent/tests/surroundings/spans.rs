//! Spans that a real collector receives over OTLP.

use std::io::Read as _;
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::Mutex;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::TraceService;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::TraceServiceServer;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Request;
use tonic::Response;
use tonic::Status;

use super::agent::Agent;
use super::agent::NODE;
use super::agent::until;

/// A collector that stores the received requests.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().expect("no panic").push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Serves until the tokio runtime ends; returns the address.
    async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let service = TraceServiceServer::new(self.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.0.lock().expect("no panic").clone();
        let scopes =
            requests.into_iter().flat_map(|request| request.resource_spans).flat_map(|spans| spans.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    fn resource(&self) -> Vec<KeyValue> {
        let requests = self.0.lock().expect("no panic").clone();
        let first = requests.into_iter().flat_map(|request| request.resource_spans).next();
        first.and_then(|spans| spans.resource).map(|resource| resource.attributes).unwrap_or_default()
    }
}

fn attribute<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    match attribute(attributes, key) {
        Some(Value::StringValue(text)) => text.clone(),
        other => format!("{other:?}"),
    }
}

/// Sends a request to the agent's read-only server as part of a trace.
fn send_request(port: u16) -> Option<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let trace = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    write!(stream, "GET /pods HTTP/1.0\r\nHost: localhost\r\n{trace}\r\n\r\n").ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    response.starts_with("HTTP/1.0 200").then_some(())
}

fn tracing(address: &str, rate: u32) -> serde_json::Value {
    json!({ "tracing": { "endpoint": address, "samplingRatePerMillion": rate } })
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_requests_reach_the_collector() {
    let collector = Collector::default();
    let address = collector.serve().await;
    let agent = Agent::start(&[("OTEL_BSP_SCHEDULE_DELAY", "100")], &tracing(&address, 1_000_000));
    let named = |name: &str| collector.spans().into_iter().find(|span| span.name == name);

    let call = until("a call to the runtime", || named("runtime.v1.RuntimeService/Version"));
    assert_eq!(call.kind, SpanKind::Client as i32);
    assert_eq!(text(&call.attributes, "rpc.system"), "grpc");
    assert_eq!(text(&call.attributes, "rpc.method"), "Version");
    assert_eq!(attribute(&call.attributes, "rpc.grpc.status_code"), Some(&Value::IntValue(14)), "no runtime listens");
    assert_eq!(call.status.expect("a status").code, 2, "the span has the status error");
    let resource = collector.resource();
    assert_eq!((text(&resource, "service.name"), text(&resource, "host.name")), ("kubelet".into(), NODE.into()));

    until("a response", || send_request(agent.port));
    let request = until("a request", || named("/pods"));
    assert_eq!(request.kind, SpanKind::Server as i32);
    assert_eq!(attribute(&request.attributes, "http.response.status_code"), Some(&Value::IntValue(200)));
    assert!(request.parent_span_id.is_empty(), "traces of unauthenticated clients are only linked");
    let linked = &request.links.first().expect("a link").trace_id;
    assert_eq!(linked, &0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.to_be_bytes());
    let (success, output) = agent.end();
    assert!(success, "{output}");
}

/// An API server that rejects all requests and records their trace headers.
async fn refusing(traces: Arc<Mutex<Vec<String>>>) -> std::net::SocketAddr {
    let reject = move |request: axum::extract::Request| {
        let trace = request.headers().get("traceparent").map(|trace| trace.to_str().expect("text").to_owned());
        traces.lock().expect("no panic").extend(trace);
        let status = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403});
        async move { (axum::http::StatusCode::FORBIDDEN, status.to_string()) }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(reject)).await });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_to_the_api_server_carry_their_trace() {
    let (collector, traces) = (Collector::default(), Arc::new(Mutex::new(Vec::new())));
    let (address, server) = (collector.serve().await, refusing(traces.clone()).await);
    let folder = tempfile::tempdir().expect("a folder");
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": format!("http://{server}")}}],
        "users": [{"name": "u", "user": {"token": "sesame"}}],
    });
    let file = folder.path().join("kubeconfig");
    std::fs::write(&file, kubeconfig.to_string()).expect("a file");
    let flags = [format!("--kubeconfig={}", file.display())];
    let agent = Agent::start_with(&[("OTEL_BSP_SCHEDULE_DELAY", "100")], &tracing(&address, 1_000_000), &flags);
    let span = until("a request", || collector.spans().into_iter().find(|span| span.name == "HTTP POST"));
    assert_eq!(span.kind, SpanKind::Client as i32);
    assert_eq!(text(&span.attributes, "http.request.method"), "POST");
    assert_eq!(text(&span.attributes, "server.address"), "127.0.0.1");
    assert_eq!(attribute(&span.attributes, "server.port"), Some(&Value::IntValue(server.port().into())));
    assert!(text(&span.attributes, "url.full").starts_with(&format!("http://{server}/api")), "{span:?}");
    assert_eq!(attribute(&span.attributes, "http.response.status_code"), Some(&Value::IntValue(403)));
    assert_eq!(text(&span.attributes, "error.type"), "403");
    assert_eq!(span.status.as_ref().expect("a status").code, 2, "for the client, a rejected request is an error");
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let trace = format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id));
    assert!(traces.lock().expect("no panic").contains(&trace), "{trace} is not one of {traces:?}");
    let (success, output) = agent.end();
    assert!(success, "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_spans_are_sent_at_the_end() {
    let collector = Collector::default();
    let address = collector.serve().await;
    let agent = Agent::start(&[("OTEL_BSP_SCHEDULE_DELAY", "600000")], &tracing(&address, 1_000_000));
    until("a response", || send_request(agent.port));
    assert!(collector.spans().is_empty());
    let (success, output) = agent.end();
    assert!(success, "{output}");
    assert!(collector.spans().iter().any(|span| span.name == "/pods"));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sampled_unless_asked_for() {
    let collector = Collector::default();
    let address = collector.serve().await;
    let agent = Agent::start(&[("OTEL_BSP_SCHEDULE_DELAY", "100")], &tracing(&address, 0));
    until("a response", || send_request(agent.port));
    let (success, output) = agent.end();
    assert!(success, "{output}");
    assert_eq!(collector.spans(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_collector_does_not_affect_the_agent() {
    let agent = Agent::start(&[("OTEL_BSP_SCHEDULE_DELAY", "100")], &tracing("127.0.0.1:9", 1_000_000));
    until("a response", || send_request(agent.port));
    let (success, output) = agent.end();
    assert!(success && !output.contains("panicked"), "{output}");
}
