//! Authorization of requests by SubjectAccessReviews, and a cache of the outcomes.
//!
//! The subresources of the node that cover a request are reviewed one after the other; the first that is allowed decides,
//! also after an explicit denial (KEP-2862, fine-grained kubelet API authorization). Allowed outcomes are kept longer
//! than others. A path counts only by its subresources, so that it is no part of the cache's keys.
//!
//! Concurrent requests that need the same review share it; it goes on when they are cancelled. Reviews in flight are
//! bounded, in all and per user, so that no user can keep others out: what is beyond fails at once.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use futures_util::future::Shared;
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewSpec;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewStatus;
use lru::LruCache;
use tokio::time::Instant;

use super::User;
use super::review::Reviews;
use super::review::retried;

/// Outcomes kept at most.
const CACHE_SIZE: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");
/// Reviews in flight at most.
const MAX_IN_FLIGHT: usize = 64;
/// Reviews in flight at most for requests of one user name.
const MAX_IN_FLIGHT_PER_USER: usize = 16;
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

/// Allowed or not; an error is that of the review.
type Outcome = Result<bool, String>;
type Lookup = Shared<BoxFuture<'static, Outcome>>;

/// Reviews access and caches the outcomes.
pub(super) struct Webhook {
    shared: Arc<State>,
}

struct State {
    reviews: Arc<dyn Reviews>,
    node: String,
    allowed_ttl: Duration,
    denied_ttl: Duration,
    cache: Mutex<Cache>,
}

struct Cache {
    /// Whether it is allowed, and until when that counts.
    outcomes: LruCache<ReviewKey, (bool, Instant)>,
    in_flight: HashMap<ReviewKey, Lookup>,
    /// Reviews in flight by the name of the user whose requests need them.
    per_user: HashMap<String, usize>,
}

impl Cache {
    /// The outcome if it has not expired at `now`.
    fn outcome(&mut self, key: &ReviewKey, now: Instant) -> Option<bool> {
        self.outcomes.get(key).filter(|(_, until)| *until > now).map(|(allowed, _)| *allowed)
    }

    /// Room for one more review of this user.
    fn has_room(&self, user: &str) -> bool {
        let of_user = self.per_user.get(user).copied().unwrap_or_default();
        self.in_flight.len() < MAX_IN_FLIGHT && of_user < MAX_IN_FLIGHT_PER_USER
    }

    fn started(&mut self, key: ReviewKey, lookup: Lookup) {
        *self.per_user.entry(key.user.clone()).or_default() += 1;
        self.in_flight.insert(key, lookup);
    }

    fn ended(&mut self, key: &ReviewKey) {
        self.in_flight.remove(key);
        if let Some(count) = self.per_user.get_mut(&key.user) {
            *count -= 1;
            if *count == 0 {
                self.per_user.remove(&key.user);
            }
        }
    }
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
        let outcomes = LruCache::new(CACHE_SIZE);
        let cache = Mutex::new(Cache { outcomes, in_flight: HashMap::new(), per_user: HashMap::new() });
        Self { shared: Arc::new(State { reviews, node, allowed_ttl, denied_ttl, cache }) }
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
        let lookup = {
            let mut cache = self.shared.cache();
            if let Some(allowed) = cache.outcome(&key, Instant::now()) {
                return Ok(allowed);
            }
            match cache.in_flight.get(&key) {
                Some(lookup) => lookup.clone(),
                None if !cache.has_room(&key.user) => return Err(Denied::TooManyReviews),
                None => {
                    let lookup = spawn_lookup(self.shared.clone(), key.clone());
                    cache.started(key, lookup.clone());
                    lookup
                }
            }
        };
        lookup.await.map_err(|error| Denied::Unknown { subresource, error })
    }
}

/// A review in a task of its own, which does not end with the requests that wait for it.
fn spawn_lookup(state: Arc<State>, key: ReviewKey) -> Lookup {
    let task = tokio::spawn(async move {
        // Also a review that panics leaves its place.
        let outcome = AssertUnwindSafe(state.review(&key)).catch_unwind().await;
        let outcome = outcome.unwrap_or_else(|_| Err("the access review panicked".to_owned()));
        let mut cache = state.cache();
        cache.ended(&key);
        if let Ok(allowed) = outcome {
            let ttl = if allowed { state.allowed_ttl } else { state.denied_ttl };
            cache.outcomes.put(key, (allowed, Instant::now() + ttl));
        }
        outcome
    });
    async move { task.await.unwrap_or_else(|error| Err(format!("the access review ended early: {error}"))) }
        .boxed()
        .shared()
}

impl State {
    async fn review(&self, key: &ReviewKey) -> Outcome {
        let spec = self.spec(key);
        let reviewed = tokio::time::timeout(DEADLINE, retried(|| self.reviews.access(&spec))).await;
        let reviewed = reviewed.map_err(|_| format!("no review within {DEADLINE:?}"))?;
        interpret(&reviewed.map_err(|error| error.message)?)
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

    fn cache(&self) -> MutexGuard<'_, Cache> {
        // Each change is one insertion or removal: a panic elsewhere leaves the maps usable.
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

    #[tokio::test]
    async fn everything_about_the_user_is_reviewed() {
        let user = User { uid: "7".to_owned(), extra: [("k".to_owned(), vec!["v".to_owned()])].into(), ..ann() };
        let expected = user.clone();
        let script = Script::access(move |spec| {
            let is_same = spec.uid.as_ref() == Some(&expected.uid) && spec.extra.as_ref() == Some(&expected.extra);
            Ok(status(is_same, false))
        });
        assert_eq!(webhook(script).authorize(asked(&user, "/pods")).await, Ok(()));
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
    async fn a_long_path_causes_no_further_review() {
        let script = Script::access(|_| Ok(status(false, false)));
        let webhook = webhook(script.clone());
        let user = ann();
        for number in 0..3 {
            let long = format!("/pods/{number}{}", "x".repeat(10_000));
            assert_eq!(webhook.authorize(asked(&user, &long)).await, Err(Denied::Forbidden));
        }
        assert_eq!(script.asked(), 2, "one for each subresource");
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_requests_share_one_review() {
        let script = Script::access(|_| Ok(status(true, false))).slow(Duration::from_secs(5));
        let (webhook, user) = (webhook(script.clone()), ann());
        // The first request is cancelled during the review.
        let gone = tokio::time::timeout(Duration::from_secs(1), webhook.authorize(asked(&user, "/pods"))).await;
        assert!(gone.is_err());
        let all = futures_util::future::join_all((0..200).map(|_| webhook.authorize(asked(&user, "/pods")))).await;
        assert!(all.iter().all(Result::is_ok), "{all:?}");
        assert_eq!(script.asked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn one_user_leaves_room_for_others() {
        let script = Script::access(|_| Ok(status(true, false))).slow(Duration::from_secs(5));
        let webhook = webhook(script.clone());
        let asking = (0..200).map(|number| {
            let user = User { uid: format!("{number}"), ..ann() };
            let webhook = &webhook;
            async move { webhook.authorize(asked(&user, "/pods")).await }
        });
        let bob = User { name: "bob".to_owned(), ..User::default() };
        let (outcomes, of_bob) =
            tokio::join!(futures_util::future::join_all(asking), webhook.authorize(asked(&bob, "/pods")));
        let refused = outcomes.iter().filter(|outcome| **outcome == Err(Denied::TooManyReviews)).count();
        assert_eq!((refused, of_bob), (200 - MAX_IN_FLIGHT_PER_USER, Ok(())));
        assert_eq!(script.asked(), MAX_IN_FLIGHT_PER_USER + 1);
        let user = User { uid: "new".to_owned(), ..ann() };
        assert_eq!(webhook.authorize(asked(&user, "/pods")).await, Ok(()), "there is room again");
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
