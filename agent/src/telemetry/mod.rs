//! Spans: what took how long and what it was part of, for an OpenTelemetry collector as `tracing:` asks.
//!
//! Owns the names and attributes of spans, the passing on of their context, and their export. Refuses to be a second log:
//! spans carry what upstream's carry, and nobody reads them here. Without `tracing:` no layer is installed, and a span
//! costs the look at one number.

mod endpoint;
mod export;

use http::HeaderMap;
use opentelemetry::global;
use opentelemetry::propagation::Extractor;
use opentelemetry::propagation::Injector;
use opentelemetry::trace::TraceContextExt as _;
use tonic::metadata::MetadataMap;
use tonic::metadata::MetadataValue;
use tracing::Span;
use tracing::field::Empty;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::model::PodRef;

pub use self::export::SpanLayer;
pub use self::export::Spans;
pub use self::export::SpansError;

/// Spans have a target of their own, so that no log filter takes them for lines.
const TARGET: &str = "spans";

/// One pass of a pod's worker; `name` is upstream's `syncPod`, `syncTerminatingPod` or `syncTerminatedPod`.
pub fn pod_pass(name: &'static str, operation: &'static str, pod: &PodRef) -> Span {
    let span = tracing::trace_span!(
        target: TARGET,
        "pod",
        otel.name = name,
        k8s.pod.uid = %pod.uid,
        k8s.pod = %pod,
        k8s.pod.name = %pod.name,
        k8s.pod.update_type = Empty,
        k8s.namespace.name = %pod.namespace,
    );
    if name == "syncPod" {
        span.record("k8s.pod.update_type", operation);
    }
    span
}

/// One call over gRPC, such as `RunPodSandbox` of `runtime.v1.RuntimeService`.
pub fn call(service: &'static str, method: &'static str) -> Span {
    let span = tracing::trace_span!(
        target: TARGET,
        "call",
        otel.name = Empty,
        otel.kind = "client",
        otel.status_code = Empty,
        rpc.system = "grpc",
        rpc.service = service,
        rpc.method = method,
        rpc.grpc.status_code = Empty,
    );
    if !span.is_disabled() {
        span.record("otel.name", format!("{service}/{method}"));
    }
    span
}

/// Tells how a call ended: 0, or the number of its error.
pub fn called(span: &Span, code: tonic::Code) {
    span.record("rpc.grpc.status_code", i32::from(code));
    if code != tonic::Code::Ok {
        span.record("otel.status_code", "ERROR");
    }
}

/// One request to our own servers, named by its route. Whose word is trusted may make it part of its own trace; a
/// stranger's trace is only linked.
pub fn request(method: &http::Method, route: &str, headers: &HeaderMap, trusted: bool) -> Span {
    let span = tracing::trace_span!(
        target: TARGET,
        "request",
        otel.name = route,
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.method = %method,
        http.route = route,
        http.response.status_code = Empty,
    );
    if span.is_disabled() {
        return span;
    }
    let context = global::get_text_map_propagator(|propagator| propagator.extract(&Headers(headers)));
    if trusted {
        if let Err(error) = span.set_parent(context) {
            tracing::debug!(%error, "a request's trace is not continued");
        }
    } else {
        span.add_link(context.span().span_context().clone());
    }
    span
}

/// Tells how a request was answered. Only what is the server's fault is an error.
pub fn answered(span: &Span, status: http::StatusCode) {
    span.record("http.response.status_code", i64::from(status.as_u16()));
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
}

/// One request to the API server, each try on its own, with the attributes that HTTP clients are watched by.
pub fn api_request(method: &http::Method, url: &http::Uri) -> Span {
    let span = tracing::trace_span!(
        target: TARGET,
        "api request",
        otel.name = Empty,
        otel.kind = "client",
        otel.status_code = Empty,
        http.request.method = %method,
        server.address = url.host(),
        // Signed, like all numbers that spans know.
        server.port = url.port_u16().map(i64::from),
        url.full = %url,
        network.protocol.version = Empty,
        http.response.status_code = Empty,
        error.type = Empty,
    );
    if !span.is_disabled() {
        span.record("otel.name", format!("HTTP {method}"));
    }
    span
}

/// Tells how it was answered. To who asks, every refusal is an error.
pub fn api_answered(span: &Span, status: http::StatusCode, version: http::Version) {
    if span.is_disabled() {
        return;
    }
    span.record("http.response.status_code", i64::from(status.as_u16()));
    let version = match version {
        http::Version::HTTP_2 => "2",
        _ => "1.1",
    };
    span.record("network.protocol.version", version);
    if status.is_client_error() || status.is_server_error() {
        span.record("otel.status_code", "ERROR");
        span.record("error.type", status.as_str());
    }
}

/// Tells that there was no answer.
pub fn api_failed(span: &Span) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", "_OTHER");
}

/// Lets the other side of a request continue the trace of `span`.
pub fn pass_on_http(span: &Span, headers: &mut HeaderMap) {
    if span.is_disabled() {
        return;
    }
    let context = span.context();
    global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut Carried(headers)));
}

/// Lets the other side of a call continue the trace of `span` (W3C trace context and baggage).
pub fn pass_on(span: &Span, metadata: &mut MetadataMap) {
    if span.is_disabled() {
        return;
    }
    let context = span.context();
    global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut Metadata(metadata)));
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

struct Carried<'a>(&'a mut HeaderMap);

impl Injector for Carried<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (http::HeaderName::try_from(key), http::HeaderValue::try_from(value)) {
            self.0.insert(key, value);
        }
    }
}

struct Metadata<'a>(&'a mut MetadataMap);

impl Injector for Metadata<'_> {
    fn set(&mut self, key: &str, value: String) {
        let key = tonic::metadata::MetadataKey::from_bytes(key.as_bytes());
        if let (Ok(key), Ok(value)) = (key, MetadataValue::try_from(value)) {
            self.0.insert(key, value);
        }
    }
}
