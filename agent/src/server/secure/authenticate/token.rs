//! Bearer tokens, reviewed by the API server, and a cache of the outcomes.
//!
//! Tokens themselves are not kept: the cache is keyed by a digest with a secret of this process. Concurrent requests
//! with the same token share one review, which goes on when the requests are cancelled. Everything that a client can
//! multiply by sending ever new tokens is bounded: their length, the reviews in flight, in all and per client address,
//! and the outcomes kept. Rejected tokens have a cache of their own, so that they cannot evict accepted ones.

use std::collections::HashMap;
use std::net::IpAddr;
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
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use lru::LruCache;
use secrecy::ExposeSecret as _;
use secrecy::SecretString;
use sha2::Digest as _;
use sha2::Sha256;
use tokio::time::Instant;

use super::super::User;
use super::super::error::SetupError;
use super::super::review::Reviews;
use super::super::review::retried;
use crate::metrics::Access;
use crate::metrics::Metrics;

/// Outcomes kept at most, for accepted and for rejected tokens each.
const CACHE_SIZE: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// A lookup may take this long, all attempts together.
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest token that is reviewed, in bytes. Tokens of service accounts have one or two thousand.
const MAX_TOKEN_LENGTH: usize = 16 << 10;
/// Reviews in flight at most.
const MAX_IN_FLIGHT: usize = 64;
/// Reviews in flight at most for tokens from one client address.
const MAX_IN_FLIGHT_PER_PEER: usize = 16;
/// The error of a token that the API server rejects.
const INVALID: &str = "invalid bearer token";

type Key = [u8; 32];
/// `Ok(None)`: the API server does not authenticate the token and gives no error.
type Outcome = Result<Option<User>, String>;
type Lookup = Shared<BoxFuture<'static, Outcome>>;

/// Why a token was not authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server::secure) enum TokenError {
    /// It is not accepted (401).
    Rejected(String),
    /// Too many reviews are in flight to review it now (429).
    TooManyReviews,
}

/// Reviews tokens and caches the outcomes. Cheap to clone.
#[derive(Clone)]
pub(in crate::server::secure) struct Tokens {
    shared: Arc<State>,
}

struct State {
    reviews: Arc<dyn Reviews>,
    /// How long an outcome is kept; zero keeps none.
    ttl: Duration,
    secret: Key,
    metrics: Arc<Metrics>,
    cache: Mutex<Cache>,
}

struct Cache {
    accepted: LruCache<Key, (Outcome, Instant)>,
    rejected: LruCache<Key, (Outcome, Instant)>,
    in_flight: HashMap<Key, Lookup>,
    /// Reviews in flight by the address of the client that caused them.
    per_peer: HashMap<IpAddr, usize>,
}

impl Cache {
    /// The outcome if it has not expired at `now`.
    fn outcome(&mut self, key: &Key, now: Instant) -> Option<Outcome> {
        let fresh = |found: Option<&(Outcome, Instant)>| {
            found.filter(|(_, until)| *until > now).map(|(outcome, _)| outcome.clone())
        };
        fresh(self.accepted.get(key)).or_else(|| fresh(self.rejected.get(key)))
    }

    fn keep(&mut self, key: Key, outcome: &Outcome, until: Instant) {
        match outcome {
            Ok(Some(_)) => drop(self.accepted.put(key, (outcome.clone(), until))),
            Ok(None) => drop(self.rejected.put(key, (outcome.clone(), until))),
            Err(_) => {}
        }
    }

    /// Room for one more review caused by `peer`.
    fn has_room(&self, peer: Option<IpAddr>) -> bool {
        let by_peer = peer.and_then(|peer| self.per_peer.get(&peer)).copied().unwrap_or_default();
        self.in_flight.len() < MAX_IN_FLIGHT && by_peer < MAX_IN_FLIGHT_PER_PEER
    }

    fn started(&mut self, key: Key, peer: Option<IpAddr>, lookup: Lookup) {
        self.in_flight.insert(key, lookup);
        if let Some(peer) = peer {
            *self.per_peer.entry(peer).or_default() += 1;
        }
    }

    fn ended(&mut self, key: &Key, peer: Option<IpAddr>) {
        self.in_flight.remove(key);
        if let Some(peer) = peer
            && let Some(count) = self.per_peer.get_mut(&peer)
        {
            *count -= 1;
            if *count == 0 {
                self.per_peer.remove(&peer);
            }
        }
    }
}

impl Tokens {
    /// # Errors
    /// The system has no random bytes for the secret.
    pub(in crate::server::secure) fn new(
        reviews: Arc<dyn Reviews>,
        ttl: Duration,
        metrics: Arc<Metrics>,
    ) -> Result<Self, SetupError> {
        let cache = Mutex::new(Cache {
            accepted: LruCache::new(CACHE_SIZE),
            rejected: LruCache::new(CACHE_SIZE),
            in_flight: HashMap::new(),
            per_peer: HashMap::new(),
        });
        Ok(Self { shared: Arc::new(State { reviews, ttl, secret: secret()?, metrics, cache }) })
    }

    /// The user of a token that a client at `peer` sent.
    ///
    /// # Errors
    /// The token is not accepted, or cannot be reviewed now.
    pub(in crate::server::secure) async fn user(
        &self,
        token: &SecretString,
        peer: Option<IpAddr>,
    ) -> Result<User, TokenError> {
        if token.expose_secret().len() > MAX_TOKEN_LENGTH {
            return Err(TokenError::Rejected(format!("the bearer token is longer than {MAX_TOKEN_LENGTH} bytes")));
        }
        let (key, began, access) = (self.shared.key(token), Instant::now(), &self.shared.metrics.access);
        let lookup = {
            let mut cache = self.shared.cache();
            if let Some(outcome) = cache.outcome(&key, began) {
                access.token_looked_up(true, began.elapsed());
                return into_user(outcome);
            }
            match cache.in_flight.get(&key) {
                Some(lookup) => lookup.clone(),
                None if !cache.has_room(peer) => return Err(TokenError::TooManyReviews),
                None => {
                    let lookup = spawn_lookup(self.shared.clone(), key, peer, token.clone());
                    cache.started(key, peer, lookup.clone());
                    lookup
                }
            }
        };
        let _blocked = GaugeGuard::new(access, Access::token_reviews_blocked);
        let outcome = lookup.await;
        access.token_looked_up(false, began.elapsed());
        into_user(outcome)
    }
}

/// Adds one to a gauge until it is dropped.
struct GaugeGuard<'a> {
    access: &'a Access,
    count: fn(&Access, i64),
}

impl<'a> GaugeGuard<'a> {
    fn new(access: &'a Access, count: fn(&Access, i64)) -> Self {
        count(access, 1);
        Self { access, count }
    }
}

impl Drop for GaugeGuard<'_> {
    fn drop(&mut self) {
        (self.count)(self.access, -1);
    }
}

fn into_user(outcome: Outcome) -> Result<User, TokenError> {
    outcome.map_err(TokenError::Rejected)?.ok_or_else(|| TokenError::Rejected(INVALID.to_owned()))
}

/// A review in a task of its own, which does not end with the requests that wait for it.
fn spawn_lookup(state: Arc<State>, key: Key, peer: Option<IpAddr>, token: SecretString) -> Lookup {
    let task = tokio::spawn(async move {
        let _reviewing = GaugeGuard::new(&state.metrics.access, Access::token_reviews_in_flight);
        // Also a review that panics leaves its place.
        let outcome = AssertUnwindSafe(state.review(&token)).catch_unwind().await;
        let outcome = outcome.unwrap_or_else(|_| Err("the token review panicked".to_owned()));
        state.metrics.access.token_review_ended(outcome.is_ok());
        let mut cache = state.cache();
        cache.ended(&key, peer);
        if !state.ttl.is_zero() {
            cache.keep(key, &outcome, Instant::now() + state.ttl);
        }
        outcome
    });
    async move { task.await.unwrap_or_else(|error| Err(format!("the token review ended early: {error}"))) }
        .boxed()
        .shared()
}

/// An error in the status is an error of the token, and is not cached.
fn interpret(status: TokenReviewStatus) -> Outcome {
    if let Some(error) = status.error.filter(|error| !error.is_empty()) {
        return Err(error);
    }
    if status.authenticated != Some(true) {
        return Ok(None);
    }
    let user = status.user.unwrap_or_default();
    Ok(Some(User {
        name: user.username.unwrap_or_default(),
        uid: user.uid.unwrap_or_default(),
        groups: user.groups.unwrap_or_default(),
        extra: user.extra.unwrap_or_default(),
    }))
}

impl State {
    async fn review(&self, token: &SecretString) -> Outcome {
        let reviewed = retried(|| self.reviews.token(token.expose_secret()));
        match tokio::time::timeout(DEADLINE, reviewed).await {
            Ok(Ok(status)) => interpret(status),
            Ok(Err(error)) => Err(error.message),
            Err(_) => Err(format!("the API server did not review the token within {DEADLINE:?}")),
        }
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        // Each change is one insertion or removal: a panic elsewhere leaves the maps usable.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, token: &SecretString) -> Key {
        Sha256::new().chain_update(self.secret).chain_update(token.expose_secret()).finalize().into()
    }
}

/// The secret of the digests.
fn secret() -> Result<Key, SetupError> {
    let mut key = Key::default();
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut key).map_err(|_| SetupError::Random)?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;

    use super::super::super::testing::Script;
    use super::*;

    fn named(name: &str) -> TokenReviewStatus {
        let user = UserInfo { username: Some(name.to_owned()), ..UserInfo::default() };
        TokenReviewStatus { authenticated: Some(true), user: Some(user), ..TokenReviewStatus::default() }
    }

    const TTL: Duration = Duration::from_secs(120);

    fn rejected(error: &str) -> TokenError {
        TokenError::Rejected(error.to_owned())
    }

    fn tokens_of(script: &Arc<Script>, ttl: Duration) -> Tokens {
        Tokens::new(script.clone(), ttl, Metrics::new()).expect("random bytes")
    }

    #[tokio::test(start_paused = true)]
    async fn outcomes_are_cached_for_their_ttl() {
        let script = Script::tokens(|token| Ok(if token == "good" { named("ann") } else { Default::default() }));
        let tokens = tokens_of(&script, TTL);
        for _ in 0..3 {
            assert_eq!(tokens.user(&"good".into(), None).await.expect("a user").name, "ann");
            assert_eq!(tokens.user(&"bad".into(), None).await, Err(rejected(INVALID)));
        }
        assert_eq!(script.asked(), 2, "rejections are cached too");
        tokio::time::advance(TTL).await;
        assert!(tokens.user(&"good".into(), None).await.is_ok());
        assert_eq!(script.asked(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_review_that_panics_leaves_its_place() {
        let script =
            Script::tokens(|token| if token == "good" { Ok(named("ann")) } else { panic!("as the test wants") });
        let tokens = tokens_of(&script, TTL);
        for number in 0..2 * MAX_IN_FLIGHT {
            let error = tokens.user(&number.to_string().into(), None).await.expect_err("no user");
            assert_eq!(error, rejected("the token review panicked"));
        }
        assert!(tokens.user(&"good".into(), None).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn lookups_are_counted() {
        let script = Script::tokens(|token| match token {
            "good" => Ok(named("ann")),
            _ => Ok(TokenReviewStatus { error: Some("token expired".to_owned()), ..Default::default() }),
        });
        let metrics = Metrics::new();
        let tokens = Tokens::new(script.slow(Duration::from_secs(3)), TTL, metrics.clone()).expect("random bytes");
        let shows = |line: &str| metrics.render().expect("metrics").lines().any(|found| found == line);
        let first = tokio::spawn({
            let tokens = tokens.clone();
            async move { tokens.user(&"good".into(), None).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        for status in ["in_flight", "blocked"] {
            let line =
                |count: u32| format!("authentication_token_cache_active_fetch_count{{status=\"{status}\"}} {count}");
            assert!(shows(&line(1)), "{status}");
        }
        first.await.expect("no panic").expect("a user");
        tokens.user(&"good".into(), None).await.expect("cached");
        tokens.user(&"old".into(), None).await.expect_err("expired");
        for line in [
            "authentication_token_cache_active_fetch_count{status=\"in_flight\"} 0",
            "authentication_token_cache_active_fetch_count{status=\"blocked\"} 0",
            "authentication_token_cache_request_total{status=\"hit\"} 1",
            "authentication_token_cache_request_total{status=\"miss\"} 2",
            "authentication_token_cache_fetch_total{status=\"ok\"} 1",
            "authentication_token_cache_fetch_total{status=\"error\"} 1",
            "authentication_token_cache_request_duration_seconds_bucket{status=\"miss\",le=\"2.5\"} 0",
            "authentication_token_cache_request_duration_seconds_bucket{status=\"miss\",le=\"5\"} 2",
        ] {
            assert!(shows(line), "{line}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn errors_are_not_cached() {
        let refused = TokenReviewStatus { error: Some("token expired".to_owned()), ..Default::default() };
        let script = Script::tokens(move |_| Ok(refused.clone()));
        let tokens = tokens_of(&script, TTL);
        for _ in 0..2 {
            assert_eq!(tokens.user(&"old".into(), None).await, Err(rejected("token expired")));
        }
        assert_eq!(script.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_ttl_of_zero_disables_the_cache() {
        let script = Script::tokens(|_| Ok(named("ann")));
        let tokens = tokens_of(&script, Duration::ZERO);
        for _ in 0..2 {
            assert!(tokens.user(&"good".into(), None).await.is_ok());
        }
        assert_eq!(script.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_requests_share_one_review() {
        let script = Script::tokens(|_| Ok(named("ann"))).slow(Duration::from_secs(5));
        let tokens = tokens_of(&script, TTL);
        let token: SecretString = "good".into();
        // The first request is cancelled during the review.
        let gone = tokio::time::timeout(Duration::from_secs(1), tokens.user(&token, None)).await;
        assert!(gone.is_err());
        let all = futures_util::future::join_all((0..50).map(|_| tokens.user(&token, None))).await;
        assert!(all.iter().all(|user| user.as_ref().is_ok_and(|user| user.name == "ann")));
        assert_eq!(script.asked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_review_has_a_deadline() {
        let script = Script::tokens(|_| Ok(named("ann"))).slow(Duration::from_secs(3600));
        let before = Instant::now();
        let refused = tokens_of(&script, TTL).user(&"good".into(), None).await.expect_err("no answer");
        assert!(matches!(&refused, TokenError::Rejected(error) if error.contains("30s")), "{refused:?}");
        assert_eq!(before.elapsed(), DEADLINE);
    }

    /// The API server never answers; `count` requests come, each with a token of its own.
    async fn flood(tokens: &Tokens, count: usize, peer: Option<IpAddr>) -> usize {
        let asking = (0..count).map(|number| async move {
            let token = SecretString::from(format!("{peer:?}-{number}"));
            tokio::time::timeout(Duration::from_secs(1), tokens.user(&token, peer)).await
        });
        let all = futures_util::future::join_all(asking).await;
        all.iter().filter(|answer| **answer == Ok(Err(TokenError::TooManyReviews))).count()
    }

    #[tokio::test(start_paused = true)]
    async fn ever_new_tokens_are_refused_beyond_the_reviews_in_flight() {
        let script = Script::tokens(|_| Ok(Default::default())).slow(Duration::from_secs(3600));
        let tokens = tokens_of(&script, TTL);
        let began = Instant::now();
        let refused = flood(&tokens, 1000, None).await;
        assert_eq!((refused, script.asked()), (1000 - MAX_IN_FLIGHT, MAX_IN_FLIGHT));
        assert!(began.elapsed() <= Duration::from_secs(1), "refused at once");
        tokio::time::sleep(DEADLINE).await;
        assert_eq!(flood(&tokens, 1, None).await, 0, "there is room again");
    }

    #[tokio::test(start_paused = true)]
    async fn one_client_address_leaves_room_for_others() {
        let script = Script::tokens(|_| Ok(Default::default())).slow(Duration::from_secs(3600));
        let tokens = tokens_of(&script, TTL);
        let peer = |last: u8| Some(IpAddr::from([192, 0, 2, last]));
        assert_eq!(flood(&tokens, 100, peer(1)).await, 100 - MAX_IN_FLIGHT_PER_PEER);
        assert_eq!(flood(&tokens, 1, peer(2)).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn long_tokens_are_not_reviewed() {
        let script = Script::tokens(|_| Ok(named("ann")));
        let tokens = tokens_of(&script, TTL);
        let long = tokens.user(&"x".repeat(MAX_TOKEN_LENGTH + 1).into(), None).await;
        assert!(matches!(long, Err(TokenError::Rejected(_))), "{long:?}");
        assert_eq!(script.asked(), 0);
        assert!(tokens.user(&"x".repeat(MAX_TOKEN_LENGTH).into(), None).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn rejected_tokens_do_not_evict_accepted_ones() {
        let script = Script::tokens(|token| Ok(if token == "good" { named("ann") } else { Default::default() }));
        let tokens = tokens_of(&script, TTL);
        assert!(tokens.user(&"good".into(), None).await.is_ok());
        for number in 0..CACHE_SIZE.get() + 10 {
            let token = SecretString::from(format!("bad-{number}"));
            assert_eq!(tokens.user(&token, None).await, Err(rejected(INVALID)));
        }
        let asked = script.asked();
        assert!(tokens.user(&"good".into(), None).await.is_ok());
        assert_eq!(script.asked(), asked, "from the cache");
    }
}
