//! Authorization of requests by SubjectAccessReviews, and a cache of the outcomes.
//!
//! The subresources of the node that cover a request are reviewed one after the other; the first that is allowed wins,
//! also after an explicit denial (KEP-2862, fine-grained kubelet API authorization). Allowed outcomes are kept longer
//! than others. Reviews in flight are bounded: what is beyond fails at once.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use k8s_openapi::api::authorization::v1::ResourceAttributes;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewSpec;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewStatus;
use lru::LruCache;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::User;
use super::review::Reviews;
use super::review::retried;

/// Outcomes kept at most.
const CACHE_SIZE: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");
/// Reviews of longer attributes, in bytes, are not cached.
const MAX_CACHED_LENGTH: usize = 10_000;
/// Reviews in flight at most.
const MAX_IN_FLIGHT: usize = 64;
/// A review may take this long, all attempts together.
const DEADLINE: Duration = Duration::from_secs(30);
const VERSION: &str = "v1";
const RESOURCE: &str = "nodes";

/// `authorization.mode`.
pub(super) enum Authorizer {
    /// Every authenticated request is allowed.
    AlwaysAllow,
    /// The API server decides.
    Webhook(Webhook),
}

/// The attributes of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes<'a> {
    pub(super) user: &'a User,
    pub(super) verb: &'static str,
    pub(super) subresources: &'static [&'static str],
    /// Decoded.
    pub(super) path: &'a str,
}

/// Why a request is not allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// No subresource is allowed.
    Forbidden,
    /// Too many reviews are in flight to review it now.
    TooManyReviews,
    /// The review failed.
    Unknown {
        /// Of which subresource.
        subresource: &'static str,
        /// What went wrong.
        error: String,
    },
}

/// Everything that a review depends on: the key of its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ReviewKey {
    user: String,
    uid: String,
    groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
    verb: &'static str,
    subresource: &'static str,
}

/// Reviews access and caches the outcomes.
pub(super) struct Webhook {
    reviews: Arc<dyn Reviews>,
    node: String,
    allowed_ttl: Duration,
    denied_ttl: Duration,
    cache: Mutex<LruCache<ReviewKey, (bool, Instant)>>,
    in_flight: Semaphore,
}

impl Authorizer {
    /// # Errors
    /// The access is not allowed, or cannot be reviewed.
    pub(super) async fn authorize(&self, attributes: Attributes<'_>) -> Result<(), Denied> {
        match self {
            Self::AlwaysAllow => Ok(()),
            Self::Webhook(webhook) => webhook.authorize(attributes).await,
        }
    }
}

impl Webhook {
    /// `allowed_ttl` and `denied_ttl` are how long outcomes are kept.
    pub(super) fn new(reviews: Arc<dyn Reviews>, node: String, allowed_ttl: Duration, denied_ttl: Duration) -> Self {
        Self {
            reviews,
            node,
            allowed_ttl,
            denied_ttl,
            cache: Mutex::new(LruCache::new(CACHE_SIZE)),
            in_flight: Semaphore::new(MAX_IN_FLIGHT),
        }
    }

    async fn authorize(&self, attributes: Attributes<'_>) -> Result<(), Denied> {
        for &subresource in attributes.subresources {
            if self.review(attributes, subresource).await? {
                return Ok(());
            }
        }
        Err(Denied::Forbidden)
    }

    async fn review(&self, attributes: Attributes<'_>, subresource: &'static str) -> Result<bool, Denied> {
        let User { name, uid, groups, extra } = attributes.user.clone();
        let key = ReviewKey { user: name, uid, groups, extra, verb: attributes.verb, subresource };
        match self.cache().get(&key) {
            Some((allowed, until)) if *until > Instant::now() => return Ok(*allowed),
            _ => {}
        }
        let Ok(_permit) = self.in_flight.try_acquire() else { return Err(Denied::TooManyReviews) };
        let failed = |error: String| Denied::Unknown { subresource, error };
        let spec = self.spec(&key);
        let reviewed = tokio::time::timeout(DEADLINE, retried(|| self.reviews.access(&spec))).await;
        let reviewed = reviewed.map_err(|_| failed(format!("no review within {DEADLINE:?}")))?;
        let allowed = interpret(&reviewed.map_err(|error| failed(error.message))?).map_err(failed)?;
        let parts = [attributes.verb, VERSION, RESOURCE, subresource, &self.node, attributes.path];
        if parts.iter().map(|part| part.len()).sum::<usize>() < MAX_CACHED_LENGTH {
            let until = Instant::now() + if allowed { self.allowed_ttl } else { self.denied_ttl };
            self.cache().put(key, (allowed, until));
        }
        Ok(allowed)
    }

    fn spec(&self, key: &ReviewKey) -> SubjectAccessReviewSpec {
        let set = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        SubjectAccessReviewSpec {
            user: set(&key.user),
            uid: set(&key.uid),
            groups: Some(key.groups.clone()).filter(|groups| !groups.is_empty()),
            extra: Some(key.extra.clone()).filter(|extra| !extra.is_empty()),
            resource_attributes: Some(ResourceAttributes {
                name: set(&self.node),
                resource: set(RESOURCE),
                subresource: set(key.subresource),
                verb: set(key.verb),
                version: set(VERSION),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        }
    }

    fn cache(&self) -> MutexGuard<'_, LruCache<ReviewKey, (bool, Instant)>> {
        // Each change is one insertion: a panic elsewhere leaves the map usable.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn interpret(status: &SubjectAccessReviewStatus) -> Result<bool, String> {
    match (status.allowed, status.denied == Some(true)) {
        (true, true) => Err("the API server both allows and denies it".to_owned()),
        (allowed, _) => Ok(allowed),
    }
}

#[cfg(test)]
mod tests {
    use super::super::review::ReviewError;
    use super::super::testing::Script;
    use super::*;

    fn status(allowed: bool, denied: bool) -> SubjectAccessReviewStatus {
        SubjectAccessReviewStatus { allowed, denied: Some(denied), ..SubjectAccessReviewStatus::default() }
    }

    fn subresource(spec: &SubjectAccessReviewSpec) -> &str {
        spec.resource_attributes.as_ref().and_then(|a| a.subresource.as_deref()).unwrap_or_default()
    }

    fn ann() -> User {
        User { name: "ann".to_owned(), groups: vec!["system:authenticated".to_owned()], ..User::default() }
    }

    fn asked<'a>(user: &'a User, path: &'a str) -> Attributes<'a> {
        Attributes { user, verb: "get", subresources: &["pods", "proxy"], path }
    }

    fn webhook(script: Arc<Script>) -> Webhook {
        Webhook::new(script, "n1".to_owned(), Duration::from_secs(300), Duration::from_secs(30))
    }

    #[tokio::test]
    async fn the_review_that_is_sent() {
        let expected = serde_json::json!({
            "user": "ann", "groups": ["system:authenticated"],
            "resourceAttributes": {
                "version": "v1", "resource": "nodes", "name": "n1", "subresource": "pods", "verb": "get"
            }
        });
        let script = Script::access(move |spec| {
            assert_eq!(serde_json::to_value(spec).expect("JSON"), expected);
            Ok(status(true, false))
        });
        assert_eq!(webhook(script).authorize(asked(&ann(), "/pods")).await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_allowed_subresource_wins_also_after_a_denial() {
        let script = Script::access(|spec| Ok(status(subresource(spec) == "proxy", subresource(spec) == "pods")));
        let webhook = webhook(script.clone());
        let user = ann();
        for _ in 0..2 {
            assert_eq!(webhook.authorize(asked(&user, "/pods")).await, Ok(()));
        }
        assert_eq!(script.asked(), 2, "both outcomes are cached");
        tokio::time::advance(Duration::from_secs(30)).await;
        assert_eq!(webhook.authorize(asked(&user, "/pods")).await, Ok(()));
        assert_eq!(script.asked(), 3, "a denial for less long than an allowance");
        tokio::time::advance(Duration::from_secs(271)).await;
        assert_eq!(webhook.authorize(asked(&user, "/pods")).await, Ok(()));
        assert_eq!(script.asked(), 5);
    }

    #[tokio::test]
    async fn everything_about_the_user_is_part_of_the_key() {
        let script = Script::access(|_| Ok(status(false, false)));
        let webhook = webhook(script.clone());
        let users = [
            ann(),
            User { uid: "1".to_owned(), ..ann() },
            User { groups: Vec::new(), ..ann() },
            User { extra: [("k".to_owned(), vec!["v".to_owned()])].into(), ..ann() },
        ];
        for user in &users {
            assert_eq!(webhook.authorize(asked(user, "/pods")).await, Err(Denied::Forbidden));
        }
        assert_eq!(script.asked(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_ends_the_reviews_and_is_not_cached() {
        let script =
            Script::access(|_| Err(ReviewError { message: "unavailable".to_owned(), again: true, after: None }));
        let webhook = webhook(script.clone());
        let denied = Denied::Unknown { subresource: "pods", error: "unavailable".to_owned() };
        assert_eq!(webhook.authorize(asked(&ann(), "/pods")).await, Err(denied));
        assert_eq!(script.asked(), 5, "five attempts for the first subresource, none for the second");
        let script = Script::access(|_| Ok(status(true, true)));
        let both = self::webhook(script).authorize(asked(&ann(), "/pods")).await;
        assert!(matches!(both, Err(Denied::Unknown { .. })), "{both:?}");
    }

    #[tokio::test]
    async fn reviews_of_long_paths_are_not_cached() {
        let script = Script::access(|_| Ok(status(true, false)));
        let webhook = webhook(script.clone());
        let long = format!("/pods/{}", "x".repeat(MAX_CACHED_LENGTH));
        for _ in 0..2 {
            assert_eq!(webhook.authorize(asked(&ann(), &long)).await, Ok(()));
        }
        assert_eq!(script.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn reviews_in_flight_are_bounded() {
        let script = Script::access(|_| Ok(status(true, false))).slow(Duration::from_secs(3600));
        let webhook = webhook(script.clone());
        let asking = (0..200).map(|number| {
            let user = User { name: format!("user-{number}"), ..User::default() };
            let webhook = &webhook;
            async move { webhook.authorize(asked(&user, "/pods")).await }
        });
        let outcomes = futures_util::future::join_all(asking).await;
        let refused = outcomes.iter().filter(|outcome| **outcome == Err(Denied::TooManyReviews)).count();
        assert_eq!((refused, script.asked()), (200 - MAX_IN_FLIGHT, MAX_IN_FLIGHT));
        assert!(outcomes.iter().any(|outcome| matches!(outcome, Err(Denied::Unknown { .. }))), "the rest time out");
    }
}
