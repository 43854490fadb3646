//! The path of every request: rate limit, headers, one of the shared connections, metrics, and retries that the server
//! asks for or that a broken connection requires.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;
use std::time::SystemTime;

use bytes::Bytes;
use http::HeaderMap;
use http::HeaderName;
use http::HeaderValue;
use http::Method;
use http::Request;
use http::Response;
use http::StatusCode;
use http::Uri;
use http::header::AUTHORIZATION;
use http::header::RETRY_AFTER;
use http::header::USER_AGENT;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use kube::client::Body;
use rustls::sign::CertifiedKey;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::credentials::Authorizer;
use super::managed_fields::WithoutManagedFields;
use super::reachability::Reachability;
use super::recovery::Recovery;
use super::sent_at::SentAt;
use super::tls;
use super::tls::Identity;
use super::transport::ResponseBody;
use super::transport::Transport;
use super::transport::TransportError;
use super::warnings::Warned;
use super::warnings::warnings;
use crate::metrics::Metrics;
use crate::model::RateLimiter;
use crate::telemetry;

/// Identifies the request in the API server's audit log.
const AUDIT_ID: HeaderName = HeaderName::from_static("audit-id");
/// Attempts at most when the server asks to try again later, or connections break.
const MAX_TRIES: u32 = 11;
/// The pause before a read is sent again whose connection broke, as by client-go.
const BROKEN_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause that a server can ask for with `Retry-After`.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(5 * 60);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The parts that all clients of one API server share.
pub(super) struct Shared {
    /// Connections.
    pub transport: Transport,
    /// The client certificate.
    pub identity: Identity,
    /// Credentials.
    pub authorizer: Authorizer,
    /// The headers by which requests are executed as another user.
    pub impersonation: HeaderMap,
    /// The place of the client certificate, if it is in the kubeconfig.
    pub certificate: Option<String>,
    /// Whether the server is reachable and accepts our credentials.
    pub reachability: Reachability,
    /// Ends pauses of retries.
    pub recovery: Recovery,
    /// Warnings of the server that were logged.
    pub warned: Warned,
    /// `User-Agent`.
    pub user_agent: HeaderValue,
    /// Host and port, for metrics.
    pub host: String,
    /// Metrics of requests.
    pub metrics: Arc<Metrics>,
}

impl Shared {
    /// Uses another client certificate; reconnects if it differs from the previous one.
    pub(super) fn identify(&self, key: Arc<CertifiedKey>) -> bool {
        let changed = self.identity.set(Some(key));
        if changed {
            // Connections without a certificate are closed, too: clients are authenticated when they are opened.
            self.transport.reconnect();
            self.recovery.over();
        }
        changed
    }

    /// The credentials of requests for log lines: their source, and their expiry if it is known.
    fn credentials(&self) -> String {
        let issued = self.authorizer.source();
        let Some(key) = self.identity.get() else { return issued.unwrap_or_else(|| "no credentials".to_owned()) };
        let place = self.certificate.iter().map(|place| format!(" {place}")).collect::<String>();
        let certificate = format!("client certificate{place}, {}", tls::lifetime(&key, SystemTime::now()));
        issued.into_iter().chain([certificate]).collect::<Vec<_>>().join(" and ")
    }
}

/// The service below one client.
#[derive(Clone)]
pub(super) struct Requests {
    /// Shared with the other clients.
    pub shared: Arc<Shared>,
    /// The client's rate limit.
    pub limiter: Option<Arc<RateLimiter>>,
    /// How long one request may take, body included.
    pub timeout: Option<Duration>,
}

/// A request took longer than its client allows.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {0:?}")]
pub(super) struct RequestTimeout(Duration);

impl tower::Service<Request<Body>> for Requests {
    type Response = Response<WithoutManagedFields<ResponseBody>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { this.perform(request).await.map(|answer| answer.map(WithoutManagedFields::new)) })
    }
}

impl Requests {
    async fn perform(self, request: Request<Body>) -> Result<Response<ResponseBody>, BoxError> {
        let latency = (!is_watch(request.uri())).then(|| Latency {
            shared: self.shared.clone(),
            method: request.method().clone(),
            began: Instant::now(),
        });
        let Some(limit) = self.timeout else {
            return Ok(self.try_until_settled(request).await?.map(|body| body.measured_by(latency)));
        };
        match tokio::time::timeout(limit, self.try_until_settled(request)).await {
            Ok(answer) => Ok(answer?.map(|body| body.until(Instant::now() + limit).measured_by(latency))),
            Err(_) => {
                // Perhaps only this connection hangs: further requests get another one.
                self.shared.transport.retire();
                self.shared.recovery.failed();
                Err(RequestTimeout(limit).into())
            }
        }
    }

    /// Sends until the server does not ask to try again later, and no broken connection requires it.
    async fn try_until_settled(&self, request: Request<Body>) -> Result<Response<ResponseBody>, BoxError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let audit_id = head.headers.get(AUDIT_ID).cloned().unwrap_or_else(new_audit_id);
        let (mut tries, mut is_retry) = (1, false);
        let is_watch = is_watch(&head.uri);
        loop {
            if is_watch {
                self.shared.reachability.wait_until_authenticated().await;
            }
            // As by client-go, no watch waits: hundreds that resume after an outage would delay all other requests.
            if !is_watch || tries > 1 {
                self.acquire_permit(&head.method).await;
            }
            let mut request = Request::new(Full::new(body.clone()));
            *request.method_mut() = head.method.clone();
            *request.uri_mut() = head.uri.clone();
            *request.headers_mut() = head.headers.clone();
            request.headers_mut().insert(AUDIT_ID, audit_id.clone());
            request.headers_mut().insert(USER_AGENT, self.shared.user_agent.clone());
            request.headers_mut().extend(self.shared.impersonation.clone());
            let answer = match self.once(request, &body, is_retry).await {
                Err(error) if tries < MAX_TRIES && may_be_resent(&head.method, &error) => {
                    tries += 1;
                    continue;
                }
                // A watch has pauses of its own.
                Err(error) if tries < MAX_TRIES && !is_watch && is_broken_read(&head.method, &error) => {
                    (tries, is_retry) = (tries + 1, true);
                    tracing::debug!(uri = %head.uri, "the connection broke, sending the request again: {error}");
                    tokio::time::sleep(BROKEN_PAUSE).await;
                    continue;
                }
                answer => answer?,
            };
            let pause = retry_after(&answer).filter(|_| tries < MAX_TRIES);
            let Some(pause) = pause else { return Ok(answer) };
            (tries, is_retry) = (tries + 1, true);
            tracing::debug!(status = %answer.status(), ?pause, "the API server asks to try again later");
            drop(answer);
            if let Some(sent_at) = head.extensions.get::<SentAt>() {
                sent_at.postpone(pause);
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn acquire_permit(&self, method: &http::Method) {
        let Some(limiter) = &self.limiter else { return };
        let asked = Instant::now();
        limiter.acquire().await;
        self.shared.metrics.rest_client.waited(method.as_str(), &self.shared.host, asked.elapsed());
    }

    /// `is_retry`: the API server has asked to try again later, or a connection broke.
    async fn once(
        &self,
        mut request: Request<Full<Bytes>>,
        body: &Bytes,
        is_retry: bool,
    ) -> Result<Response<ResponseBody>, BoxError> {
        let shared = &self.shared;
        let method = request.method().clone();
        let issued = shared.authorizer.issue().await.inspect_err(|error| shared.reachability.no_credentials(error))?;
        if let Some(value) = issued.header {
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        if let Some(key) = issued.key {
            shared.identify(key);
        }
        let span = telemetry::api_request(&method, request.uri());
        telemetry::pass_on_http(&span, request.headers_mut());
        let began = Instant::now();
        let bytes = (!is_watch(request.uri())).then_some(body.len());
        let mut attempt = Attempt { shared, method: &method, bytes, is_retry, status: None };
        let answer = shared.transport.send(request).instrument(span.clone()).await;
        attempt.status = answer.as_ref().ok().map(|answer| answer.status().as_u16());
        drop(attempt);
        match answer {
            Ok(answer) => {
                shared.reachability.answered(answer.status(), began, || shared.credentials());
                shared.recovery.answered(answer.status());
                telemetry::api_answered(&span, answer.status(), answer.version());
                for warning in warnings(&answer).into_iter().filter(|warning| shared.warned.is_new(warning)) {
                    tracing::warn!(%method, "the API server warns: {warning}");
                }
                if answer.status() == StatusCode::UNAUTHORIZED {
                    shared.authorizer.refused().await;
                }
                if let Some(length) = hyper::body::Body::size_hint(answer.body()).exact() {
                    shared.metrics.rest_client.received(method.as_str(), &shared.host, length);
                }
                // The span ends with the body, which for a watch takes minutes.
                Ok(answer.map(|body| body.within(span)))
            }
            Err(error) => {
                telemetry::api_failed(&span);
                if !error.is_graceful_go_away() {
                    shared.reachability.failed(&error, began);
                    shared.recovery.failed();
                }
                Err(error.into())
            }
        }
    }
}

/// One request that was sent. Counted when it is dropped, since a timeout drops it without an answer.
struct Attempt<'a> {
    shared: &'a Shared,
    method: &'a Method,
    /// Length of its body, unless it is a watch.
    bytes: Option<usize>,
    /// The API server has asked to try again later, or a connection broke.
    is_retry: bool,
    /// Of the answer, if there is one.
    status: Option<u16>,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let (metrics, method, host) = (&self.shared.metrics.rest_client, self.method.as_str(), &self.shared.host);
        metrics.answered(method, host, self.status);
        if let Some(bytes) = self.bytes {
            metrics.sent(method, host, bytes);
        }
        if self.is_retry {
            metrics.retried(method, host, self.status);
        }
    }
}

/// A request with all its attempts and pauses; as by client-go, no watch. Measured when it is dropped: with the body of its
/// answer, or without an answer.
pub(super) struct Latency {
    shared: Arc<Shared>,
    method: Method,
    began: Instant,
}

impl Drop for Latency {
    fn drop(&mut self) {
        self.shared.metrics.rest_client.took(self.method.as_str(), &self.shared.host, self.began.elapsed());
    }
}

fn is_watch(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|part| part == "watch=true"))
}

/// Whether a read failed with its connection. It may have been executed, so nothing else is sent again.
fn is_broken_read(method: &Method, error: &BoxError) -> bool {
    method == Method::GET && error.downcast_ref::<TransportError>().is_some_and(TransportError::is_broken_connection)
}

/// Whether a request that failed with its connection may be sent on another one.
fn may_be_resent(method: &Method, error: &BoxError) -> bool {
    match error.downcast_ref::<TransportError>() {
        // It may have been executed, so only reads are sent again.
        Some(TransportError::ConnectionReplaced) => method == Method::GET,
        // The server has not processed it. In a rare race of the client library it has, and its answer is lost;
        // requests of a node may be executed twice.
        Some(error) => error.is_graceful_go_away(),
        None => false,
    }
}

/// The pause before the request is sent again, if the server asks for that with `Retry-After`.
fn retry_after<B>(answer: &Response<B>) -> Option<Duration> {
    let status = answer.status();
    let asks = status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error();
    let seconds = answer.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    asks.then(|| Duration::from_secs(seconds).min(MAX_RETRY_AFTER))
}

/// A random UUID that identifies a request in the server's audit log and in ours.
fn new_audit_id() -> HeaderValue {
    let random = fastrand::u128(..);
    // Version 4, variant 1 (RFC 9562).
    let id = (random & !(0xf << 76) & !(0b11 << 62)) | (4 << 76) | (0b10 << 62);
    let digits = format!("{id:032x}");
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    HeaderValue::try_from(parts.join("-")).unwrap_or_else(|_| HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audit_ids_are_random_uuids() {
        let id = new_audit_id();
        let text = id.to_str().expect("hexadecimal digits");
        let lengths: Vec<usize> = text.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert_eq!(&text[14..15], "4");
        assert!("89ab".contains(&text[19..20]), "{text}");
        assert_ne!(id, new_audit_id());
    }

    #[test]
    fn only_answers_with_retry_after_are_retried() {
        let answer = |status: u16, header: Option<&str>| {
            let mut answer = Response::builder().status(status);
            if let Some(value) = header {
                answer = answer.header(RETRY_AFTER, value);
            }
            retry_after(&answer.body(()).expect("a response"))
        };
        assert_eq!(answer(429, Some("2")), Some(Duration::from_secs(2)));
        assert_eq!(answer(503, Some("0")), Some(Duration::ZERO));
        assert_eq!(answer(503, Some("18446744073709551615")), Some(MAX_RETRY_AFTER));
        assert_eq!(answer(429, None), None);
        assert_eq!(answer(409, Some("1")), None);
        assert_eq!(answer(500, Some("Fri, 31 Dec 1999 23:59:59 GMT")), None);
    }
}
