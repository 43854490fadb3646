//! Bearer tokens, by the API server's word, which is remembered for a while.
//!
//! Tokens themselves are not kept: what is remembered is found by a digest with a key of this process. However many
//! requests bring the same token at once, the API server is asked once; a request that goes away does not end that.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use lru::LruCache;
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::super::User;
use super::super::error::SetupError;
use super::super::review::{Reviews, retried};
use crate::metrics::{Access, Metrics};

/// Answers remembered at most.
const CACHE_SIZE: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// A lookup may take this long, all tries together.
const DEADLINE: Duration = Duration::from_secs(30);
/// What is said of a token that is nobody's.
const INVALID: &str = "invalid bearer token";

type Key = [u8; 32];
/// `Ok(None)`: the API server says that the token is nobody's, without saying why.
type Outcome = Result<Option<User>, String>;
type Lookup = Shared<BoxFuture<'static, Outcome>>;

/// Asks and remembers. Cheap to clone.
#[derive(Clone)]
pub(in crate::server::secure) struct Tokens {
    shared: Arc<State>,
}

struct State {
    reviews: Arc<dyn Reviews>,
    /// How long an answer is kept; zero keeps none.
    ttl: Duration,
    secret: Key,
    metrics: Arc<Metrics>,
    cache: Mutex<Cache>,
}

struct Cache {
    outcomes: LruCache<Key, (Outcome, Instant)>,
    in_flight: HashMap<Key, Lookup>,
}

impl Tokens {
    pub(in crate::server::secure) fn new(
        reviews: Arc<dyn Reviews>,
        ttl: Duration,
        metrics: Arc<Metrics>,
    ) -> Result<Self, SetupError> {
        let cache = Cache { outcomes: LruCache::new(CACHE_SIZE), in_flight: HashMap::new() };
        let (secret, cache) = (secret()?, Mutex::new(cache));
        Ok(Self { shared: Arc::new(State { reviews, ttl, secret, metrics, cache }) })
    }

    /// Whose token this is, or why it is refused.
    pub(in crate::server::secure) async fn user(&self, token: &SecretString) -> Result<User, String> {
        let (key, began, access) = (self.shared.key(token), Instant::now(), &self.shared.metrics.access);
        let lookup = {
            let mut cache = self.shared.cache();
            match cache.outcomes.get(&key) {
                Some((outcome, until)) if *until > began => {
                    access.token_looked_up(true, began.elapsed());
                    return into_user(outcome.clone());
                }
                _ => {}
            }
            cache.in_flight.entry(key).or_insert_with(|| spawn_lookup(self.shared.clone(), key, token.clone())).clone()
        };
        let _blocked = GaugeGuard::new(access, Access::token_waiting);
        let outcome = lookup.await;
        access.token_looked_up(false, began.elapsed());
        into_user(outcome)
    }
}

/// One more for as long as it lives.
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

fn into_user(outcome: Outcome) -> Result<User, String> {
    outcome?.ok_or_else(|| INVALID.to_owned())
}

/// A lookup that ends by itself, whoever still waits for it.
fn spawn_lookup(state: Arc<State>, key: Key, token: SecretString) -> Lookup {
    let task = tokio::spawn(async move {
        let _asking = GaugeGuard::new(&state.metrics.access, Access::token_asking);
        let asked = retried(|| state.reviews.token(token.expose_secret()));
        let outcome = match tokio::time::timeout(DEADLINE, asked).await {
            Ok(Ok(status)) => interpret(status),
            Ok(Err(error)) => Err(error.message),
            Err(_) => Err(format!("the API server did not review the token within {DEADLINE:?}")),
        };
        state.metrics.access.token_asked(outcome.is_ok());
        let mut cache = state.cache();
        cache.in_flight.remove(&key);
        if outcome.is_ok() && !state.ttl.is_zero() {
            cache.outcomes.put(key, (outcome.clone(), Instant::now() + state.ttl));
        }
        outcome
    });
    async move { task.await.unwrap_or_else(|error| Err(format!("the token review ended early: {error}"))) }
        .boxed()
        .shared()
}

/// An error in the answer is one of the token, and not remembered.
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
    fn cache(&self) -> MutexGuard<'_, Cache> {
        // Each change is one insertion or removal: a panic elsewhere leaves the maps usable.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, token: &SecretString) -> Key {
        Sha256::new().chain_update(self.secret).chain_update(token.expose_secret()).finalize().into()
    }
}

/// A key nobody else knows.
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

    fn tokens_of(script: &Arc<Script>, ttl: Duration) -> Tokens {
        Tokens::new(script.clone(), ttl, Metrics::new()).expect("random bytes")
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_remembered_for_their_time() {
        let script = Script::tokens(|token| Ok(if token == "good" { named("ann") } else { Default::default() }));
        let tokens = tokens_of(&script, TTL);
        for _ in 0..3 {
            assert_eq!(tokens.user(&"good".into()).await.expect("a user").name, "ann");
            assert_eq!(tokens.user(&"bad".into()).await, Err(INVALID.to_owned()));
        }
        assert_eq!(script.asked(), 2, "a no is remembered too");
        tokio::time::advance(TTL).await;
        assert!(tokens.user(&"good".into()).await.is_ok());
        assert_eq!(script.asked(), 3);
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
            async move { tokens.user(&"good".into()).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        for status in ["in_flight", "blocked"] {
            let line =
                |count: u32| format!("authentication_token_cache_active_fetch_count{{status=\"{status}\"}} {count}");
            assert!(shows(&line(1)), "{status}");
        }
        first.await.expect("no panic").expect("a user");
        tokens.user(&"good".into()).await.expect("remembered");
        tokens.user(&"old".into()).await.expect_err("expired");
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
    async fn errors_are_not_remembered() {
        let refused = TokenReviewStatus { error: Some("token expired".to_owned()), ..Default::default() };
        let script = Script::tokens(move |_| Ok(refused.clone()));
        let tokens = tokens_of(&script, TTL);
        for _ in 0..2 {
            assert_eq!(tokens.user(&"old".into()).await, Err("token expired".to_owned()));
        }
        assert_eq!(script.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn no_time_no_memory() {
        let script = Script::tokens(|_| Ok(named("ann")));
        let tokens = tokens_of(&script, Duration::ZERO);
        for _ in 0..2 {
            assert!(tokens.user(&"good".into()).await.is_ok());
        }
        assert_eq!(script.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn many_at_once_ask_once_and_survive_each_other() {
        let script = Script::tokens(|_| Ok(named("ann"))).slow(Duration::from_secs(5));
        let tokens = tokens_of(&script, TTL);
        let token: SecretString = "good".into();
        // The first to come goes away again while the API server thinks.
        let gone = tokio::time::timeout(Duration::from_secs(1), tokens.user(&token)).await;
        assert!(gone.is_err());
        let all = futures_util::future::join_all((0..50).map(|_| tokens.user(&token))).await;
        assert!(all.iter().all(|user| user.as_ref().is_ok_and(|user| user.name == "ann")));
        assert_eq!(script.asked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_api_server_is_not_waited_for_forever() {
        let script = Script::tokens(|_| Ok(named("ann"))).slow(Duration::from_secs(3600));
        let before = Instant::now();
        let refused = tokens_of(&script, TTL).user(&"good".into()).await.expect_err("no answer");
        assert!(refused.contains("30s"), "{refused}");
        assert_eq!(before.elapsed(), DEADLINE);
    }
}
