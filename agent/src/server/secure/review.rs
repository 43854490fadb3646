//! TokenReviews and SubjectAccessReviews by the API server, with upstream's webhook retries. Caches and decides
//! nothing.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::StatusCode;
use k8s_openapi::api::authentication::v1::TokenReview;
use k8s_openapi::api::authentication::v1::TokenReviewSpec;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewSpec;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewStatus;
use kube::api::PostParams;
use kube::core::Status;
use tokio::time::Instant;

use crate::metrics::Metrics;

/// Attempts in all.
const ATTEMPTS: u32 = 5;
/// Pause before the second attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Factor of each further pause: upstream's for webhooks, so that these pauses are no [`crate::model::Backoff`], which
/// doubles.
const FACTOR: f64 = 1.5;
/// Jitter, as a part of the pause.
const JITTER: f64 = 0.2;

/// Why a review failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ReviewError {
    /// What went wrong.
    pub message: String,
    /// Another attempt may succeed.
    pub again: bool,
    /// The pause that the API server asked for.
    pub after: Option<Duration>,
}

/// Reviews tokens and access. Each call is one attempt.
pub trait Reviews: Send + Sync + 'static {
    /// Reviews a token.
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<TokenReviewStatus, ReviewError>>;

    /// Reviews an access.
    fn access<'a>(
        &'a self,
        spec: &'a SubjectAccessReviewSpec,
    ) -> BoxFuture<'a, Result<SubjectAccessReviewStatus, ReviewError>>;
}

/// Reviews by the API server, with metrics.
pub struct ApiReviews {
    /// The client; it should have a rate limit of its own.
    pub client: kube::Client,
    /// Metrics.
    pub metrics: Arc<Metrics>,
}

/// The status code of a review, for metrics.
fn status<T>(answer: &kube::Result<T>) -> Option<u16> {
    match answer {
        Ok(_) => Some(StatusCode::CREATED.as_u16()),
        Err(kube::Error::Api(status)) => Some(status.code),
        Err(_) => None,
    }
}

impl Reviews for ApiReviews {
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<TokenReviewStatus, ReviewError>> {
        Box::pin(async move {
            let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
            let review = TokenReview { spec, ..TokenReview::default() };
            let (api, began) = (kube::Api::<TokenReview>::all(self.client.clone()), Instant::now());
            let answer = api.create(&PostParams::default(), &review).await;
            self.metrics.access.token_reviewed(status(&answer), began.elapsed());
            answer.map_err(|error| of(&error))?.status.ok_or_else(|| empty("token review"))
        })
    }

    fn access<'a>(
        &'a self,
        spec: &'a SubjectAccessReviewSpec,
    ) -> BoxFuture<'a, Result<SubjectAccessReviewStatus, ReviewError>> {
        Box::pin(async move {
            let review = SubjectAccessReview { spec: spec.clone(), ..SubjectAccessReview::default() };
            let (api, began) = (kube::Api::<SubjectAccessReview>::all(self.client.clone()), Instant::now());
            let answer = api.create(&PostParams::default(), &review).await;
            self.metrics.access.access_reviewed(status(&answer), began.elapsed());
            answer.map_err(|error| of(&error))?.status.ok_or_else(|| empty("access review"))
        })
    }
}

fn empty(what: &str) -> ReviewError {
    ReviewError { message: format!("the API server's {what} has no status"), again: false, after: None }
}

/// Classifies an error.
fn of(error: &kube::Error) -> ReviewError {
    let message = with_causes(error);
    match error {
        kube::Error::Api(status) => {
            let after = retry_after(status);
            let again = after.is_some() || (status.code == 500 && status.reason == "InternalError");
            ReviewError { message, again: again || matches!(status.code, 429 | 504), after }
        }
        other => ReviewError { message, again: connection_lost(other), after: None },
    }
}

fn retry_after(status: &Status) -> Option<Duration> {
    let seconds = status.details.as_ref()?.retry_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

/// Whether the connection broke during the request.
fn connection_lost(error: &(dyn StdError + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let reset = error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::ConnectionReset);
        let closed = error.downcast_ref::<hyper::Error>().is_some_and(|e| e.is_incomplete_message() || e.is_closed());
        if reset || closed {
            return true;
        }
        cause = error.source();
    }
    false
}

fn with_causes(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Attempts until there is an answer, a permanent error, or no attempt left. Can be cancelled.
///
/// # Errors
/// The last error.
pub(super) async fn retried<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, ReviewError>
where
    F: Future<Output = Result<T, ReviewError>>,
{
    let mut wait = FIRST_PAUSE;
    for _ in 1..ATTEMPTS {
        match attempt().await {
            Err(error) if error.again => {
                let jittered = wait.mul_f64(1.0 + JITTER * fastrand::f64());
                tokio::time::sleep(error.after.unwrap_or(jittered)).await;
                wait = wait.mul_f64(FACTOR);
            }
            settled => return settled,
        }
    }
    attempt().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn failure(again: bool) -> ReviewError {
        ReviewError { message: "no".to_owned(), again, after: None }
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_bounded_and_spread() {
        let (tries, start) = (Cell::new(0), Instant::now());
        let outcome = retried(|| {
            tries.set(tries.get() + 1);
            async { Err::<(), _>(failure(true)) }
        })
        .await;
        assert_eq!((outcome, tries.get()), (Err(failure(true)), 5));
        let took = start.elapsed().as_secs_f64();
        assert!((4.06..4.9).contains(&took), "{took}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_permanent_error_ends_the_attempts() {
        let start = Instant::now();
        assert_eq!(retried(|| async { Err::<(), _>(failure(false)) }).await, Err(failure(false)));
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn retry_after_sets_the_pause() {
        let (tries, start) = (Cell::new(0), Instant::now());
        let outcome = retried(|| {
            tries.set(tries.get() + 1);
            let first = tries.get() == 1;
            async move {
                let busy = ReviewError { after: Some(Duration::from_secs(7)), ..failure(true) };
                if first { Err(busy) } else { Ok(()) }
            }
        })
        .await;
        assert_eq!((outcome, start.elapsed()), (Ok(()), Duration::from_secs(7)));
    }

    #[test]
    fn which_errors_are_retried() {
        let status = |code: u16, reason: &str| Status { code, reason: reason.to_owned(), ..Status::default() };
        for (code, reason, again) in [
            (500, "InternalError", true),
            (500, "", false),
            (504, "Timeout", true),
            (429, "TooManyRequests", true),
            (403, "Forbidden", false),
            (401, "Unauthorized", false),
        ] {
            let error = kube::Error::Api(status(code, reason).boxed());
            assert_eq!(of(&error).again, again, "{code} {reason}");
        }
        let reset = kube::Error::Service(io::Error::from(io::ErrorKind::ConnectionReset).into());
        assert!(of(&reset).again);
        let refused = kube::Error::Service(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        assert!(!of(&refused).again);
    }

    /// An API server that answers like this.
    fn answering(code: u16, body: serde_json::Value) -> (ApiReviews, Arc<Metrics>) {
        let answer = move |_: http::Request<kube::client::Body>| {
            let answer = http::Response::builder().status(code);
            let body = kube::client::Body::from(body.to_string().into_bytes());
            async move { answer.body(body).map_err(io::Error::other) }
        };
        let (client, metrics) = (kube::Client::new(tower::service_fn(answer), "default"), Metrics::new());
        (ApiReviews { client, metrics: metrics.clone() }, metrics)
    }

    #[tokio::test]
    async fn reviews_are_counted_by_their_answer() {
        let body = serde_json::json!({"spec": {"token": "t"}, "status": {"authenticated": true}});
        let (reviews, metrics) = answering(201, body);
        reviews.token("t").await.expect("an answer");
        let text = metrics.render().expect("metrics");
        assert!(text.contains("apiserver_delegated_authn_request_total{code=\"201\"} 1\n"), "{text}");
        let count = "apiserver_delegated_authn_request_duration_seconds_count{code=\"201\"} 1\n";
        assert!(text.contains(count) && !text.contains("apiserver_delegated_authz_request_total{"), "{text}");
        let body = serde_json::json!({"kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden"});
        let (reviews, metrics) = answering(403, body);
        reviews.access(&SubjectAccessReviewSpec::default()).await.expect_err("forbidden");
        let text = metrics.render().expect("metrics");
        assert!(text.contains("apiserver_delegated_authz_request_total{code=\"403\"} 1\n"), "{text}");
        let unavailable = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Err::<http::Response<kube::client::Body>, _>(io::Error::other("unavailable"))
        });
        let (client, metrics) = (kube::Client::new(unavailable, "default"), Metrics::new());
        let reviews = ApiReviews { client, metrics: metrics.clone() };
        reviews.token("t").await.expect_err("unavailable");
        let text = metrics.render().expect("metrics");
        assert!(text.contains("apiserver_delegated_authn_request_total{code=\"<error>\"} 1\n"), "{text}");
    }
}
