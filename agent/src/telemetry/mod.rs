//! OpenTelemetry spans, exported as `tracing:` configures (KEP-2831).
//!
//! Owns the names and attributes of spans, the propagation of their context, and their export; names and attributes are
//! upstream's. Without `tracing:` no layer is installed, and a disabled span costs one atomic load.

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

/// The target of spans, which log filters exclude.
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

/// Records the status code of a call.
pub fn called(span: &Span, code: tonic::Code) {
    span.record("rpc.grpc.status_code", i32::from(code));
    if code != tonic::Code::Ok {
        span.record("otel.status_code", "ERROR");
    }
}

/// One request to the agent's servers, named by its route. A trusted client's trace is continued; the trace of another
/// one is only linked.
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

/// Records the response of a request. Only server errors count as errors.
pub fn answered(span: &Span, status: http::StatusCode) {
    span.record("http.response.status_code", i64::from(status.as_u16()));
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
}

/// One attempt of a request to the API server, with the attributes of OpenTelemetry's HTTP conventions.
pub fn api_request(method: &http::Method, url: &http::Uri) -> Span {
    let span = tracing::trace_span!(
        target: TARGET,
        "api request",
        otel.name = Empty,
        otel.kind = "client",
        otel.status_code = Empty,
        http.request.method = %method,
        server.address = url.host(),
        // Signed, like all integers of spans.
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

/// Records the response. For a client, every 4xx is an error, too.
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

/// Records that there was no response.
pub fn api_failed(span: &Span) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", "_OTHER");
}

/// Propagates the trace of `span` in HTTP headers.
pub fn pass_on_http(span: &Span, headers: &mut HeaderMap) {
    if span.is_disabled() {
        return;
    }
    let context = span.context();
    global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut Carried(headers)));
}

/// Propagates the trace of `span` in gRPC metadata (W3C trace context and baggage).
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
