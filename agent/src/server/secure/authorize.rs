//! Whether a user may do what a request asks for.
//!
//! Each subresource of the node that would do is asked about in turn; the first yes wins, also after a clear no. Answers
//! are remembered: a yes for longer than a no.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReviewSpec, SubjectAccessReviewStatus};
use lru::LruCache;
use tokio::time::Instant;

use super::User;
use super::review::{Reviews, retried};

/// Answers remembered at most.
const CACHE_SIZE: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");
/// Questions this long are not remembered: somebody makes them up.
const MAX_CACHED_LENGTH: usize = 10_000;
const VERSION: &str = "v1";
const RESOURCE: &str = "nodes";

/// How it is decided.
pub(super) enum Authorizer {
    /// Whoever is authenticated may do everything.
    AlwaysAllow,
    /// The API server decides.
    Webhook(Webhook),
}

/// What is to be allowed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes<'a> {
    pub(super) user: &'a User,
    pub(super) verb: &'static str,
    pub(super) subresources: &'static [&'static str],
    /// Without percent signs.
    pub(super) path: &'a str,
}

/// Why it is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// No subresource is allowed.
    Forbidden,
    /// It could not be found out.
    Unknown {
        /// About which subresource.
        subresource: &'static str,
        /// Why.
        error: String,
    },
}

/// A key to the API server, whole: also what its answer is remembered by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ReviewKey {
    user: String,
    uid: String,
    groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
    verb: &'static str,
    subresource: &'static str,
}

/// Asks and remembers.
pub(super) struct Webhook {
    reviews: Arc<dyn Reviews>,
    node: String,
    allowed_ttl: Duration,
    denied_ttl: Duration,
    cache: Mutex<LruCache<ReviewKey, (bool, Instant)>>,
}

impl Authorizer {
    pub(super) async fn authorize(&self, attributes: Attributes<'_>) -> Result<(), Denied> {
        match self {
            Self::AlwaysAllow => Ok(()),
            Self::Webhook(webhook) => webhook.authorize(attributes).await,
        }
    }
}

impl Webhook {
    /// `allowed_ttl` and `denied_ttl` are how long answers are kept.
    pub(super) fn new(reviews: Arc<dyn Reviews>, node: String, allowed_ttl: Duration, denied_ttl: Duration) -> Self {
        Self { reviews, node, allowed_ttl, denied_ttl, cache: Mutex::new(LruCache::new(CACHE_SIZE)) }
    }

    async fn authorize(&self, attributes: Attributes<'_>) -> Result<(), Denied> {
        for &subresource in attributes.subresources {
            let allowed = self.review(attributes, subresource).await;
            if allowed.map_err(|error| Denied::Unknown { subresource, error })? {
                return Ok(());
            }
        }
        Err(Denied::Forbidden)
    }

    async fn review(&self, attributes: Attributes<'_>, subresource: &'static str) -> Result<bool, String> {
        let User { name, uid, groups, extra } = attributes.user.clone();
        let key = ReviewKey { user: name, uid, groups, extra, verb: attributes.verb, subresource };
        match self.cache().get(&key) {
            Some((allowed, until)) if *until > Instant::now() => return Ok(*allowed),
            _ => {}
        }
        let spec = self.spec(&key);
        let status = retried(|| self.reviews.access(&spec)).await.map_err(|error| error.message)?;
        let allowed = interpret(&status)?;
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
    async fn the_question_as_it_is_asked() {
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
    async fn the_first_yes_wins_also_after_a_no() {
        let script = Script::access(|spec| Ok(status(subresource(spec) == "proxy", subresource(spec) == "pods")));
        let webhook = webhook(script.clone());
        let user = ann();
        for _ in 0..2 {
            assert_eq!(webhook.authorize(asked(&user, "/pods")).await, Ok(()));
        }
        assert_eq!(script.asked(), 2, "both answers are remembered");
        tokio::time::advance(Duration::from_secs(30)).await;
        assert_eq!(webhook.authorize(asked(&user, "/pods")).await, Ok(()));
        assert_eq!(script.asked(), 3, "the no for less long than the yes");
        tokio::time::advance(Duration::from_secs(271)).await;
        assert_eq!(webhook.authorize(asked(&user, "/pods")).await, Ok(()));
        assert_eq!(script.asked(), 5);
    }

    #[tokio::test]
    async fn everything_about_the_user_is_part_of_the_question() {
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
    async fn an_error_ends_the_questions_and_is_not_remembered() {
        let script = Script::access(|_| Err(ReviewError { message: "away".to_owned(), again: true, after: None }));
        let webhook = webhook(script.clone());
        let denied = Denied::Unknown { subresource: "pods", error: "away".to_owned() };
        assert_eq!(webhook.authorize(asked(&ann(), "/pods")).await, Err(denied));
        assert_eq!(script.asked(), 5, "five tries about the first subresource, none about the second");
        let script = Script::access(|_| Ok(status(true, true)));
        let both = self::webhook(script).authorize(asked(&ann(), "/pods")).await;
        assert!(matches!(both, Err(Denied::Unknown { .. })), "{both:?}");
    }

    #[tokio::test]
    async fn long_questions_are_not_remembered() {
        let script = Script::access(|_| Ok(status(true, false)));
        let webhook = webhook(script.clone());
        let long = format!("/pods/{}", "x".repeat(MAX_CACHED_LENGTH));
        for _ in 0..2 {
            assert_eq!(webhook.authorize(asked(&ann(), &long)).await, Ok(()));
        }
        assert_eq!(script.asked(), 2);
    }
}
