//! Reviews by the API server: whose token this is, and who may do what.
//!
//! Owns the calls and their repetition; remembers nothing and decides nothing.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::{SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus};
use kube::api::PostParams;
use kube::core::Status;

/// Tries in all.
const TRIES: u32 = 5;
/// Wait before the second try.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Each further wait is this much longer.
const FACTOR: f64 = 1.5;
/// And up to this part longer again, by chance.
const JITTER: f64 = 0.2;

/// Why there is no review.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ReviewError {
    /// What went wrong.
    pub message: String,
    /// Another try may go better.
    pub again: bool,
    /// The API server asked to wait this long before.
    pub after: Option<Duration>,
}

/// Who can be asked. An implementation is asked once per try.
pub trait Reviews: Send + Sync + 'static {
    /// Whose token this is.
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<TokenReviewStatus, ReviewError>>;

    /// Whether this access is allowed.
    fn access<'a>(
        &'a self,
        spec: &'a SubjectAccessReviewSpec,
    ) -> BoxFuture<'a, Result<SubjectAccessReviewStatus, ReviewError>>;
}

impl Reviews for kube::Client {
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<TokenReviewStatus, ReviewError>> {
        Box::pin(async move {
            let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
            let review = TokenReview { spec, ..TokenReview::default() };
            let api = kube::Api::<TokenReview>::all(self.clone());
            let answer = api.create(&PostParams::default(), &review).await.map_err(|error| of(&error))?;
            answer.status.ok_or_else(|| empty("token review"))
        })
    }

    fn access<'a>(
        &'a self,
        spec: &'a SubjectAccessReviewSpec,
    ) -> BoxFuture<'a, Result<SubjectAccessReviewStatus, ReviewError>> {
        Box::pin(async move {
            let review = SubjectAccessReview { spec: spec.clone(), ..SubjectAccessReview::default() };
            let api = kube::Api::<SubjectAccessReview>::all(self.clone());
            let answer = api.create(&PostParams::default(), &review).await.map_err(|error| of(&error))?;
            answer.status.ok_or_else(|| empty("access review"))
        })
    }
}

fn empty(what: &str) -> ReviewError {
    ReviewError { message: format!("the API server's {what} has no status"), again: false, after: None }
}

/// Which errors are worth another try.
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

/// The connection broke while the request was under way.
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

/// Tries until there is an answer, an error that no try can mend, or no try left.
pub(super) async fn retried<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, ReviewError>
where
    F: Future<Output = Result<T, ReviewError>>,
{
    let mut wait = FIRST_WAIT;
    for _ in 1..TRIES {
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

    use tokio::time::Instant;

    use super::*;

    fn failure(again: bool) -> ReviewError {
        ReviewError { message: "no".to_owned(), again, after: None }
    }

    #[tokio::test(start_paused = true)]
    async fn tries_are_bounded_and_spread() {
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
    async fn an_error_that_will_stay_is_told_at_once() {
        let start = Instant::now();
        assert_eq!(retried(|| async { Err::<(), _>(failure(false)) }).await, Err(failure(false)));
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn the_api_servers_wish_sets_the_wait() {
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
    fn which_errors_are_worth_another_try() {
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
}
