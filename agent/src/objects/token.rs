//! Service account tokens: requested with TokenRequest and cached; replaced after 80 % of their lifetime or 24 hours,
//! whichever comes first, as upstream's token manager does.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use futures_util::future::Shared;
use futures_util::future::WeakShared;
use k8s_openapi::api::authentication::v1::BoundObjectReference;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authentication::v1::TokenRequestSpec;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::Client;
use kube::api::PostParams;
use secrecy::ExposeSecret as _;
use secrecy::SecretString;
use tokio::sync::OnceCell;

use super::error::ObjectError;
use super::error::code;
use super::error::describe;
use super::retry::Retry;
use crate::model::Backoff;
use crate::model::Clock;
use crate::model::PodUid;

/// Age at which every token is replaced.
const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// Spreads the replacement of tokens that were issued together.
const MAX_JITTER_SECONDS: u64 = 10;
/// Pause after a failed replacement while the cached token is still valid; doubled after each further failure.
const FIRST_RETRY: Duration = Duration::from_secs(30);
/// The longest such pause.
const LAST_RETRY: Duration = Duration::from_secs(5 * 60);
/// The longest such pause once the cached token has expired: its users fail until it is replaced.
const EXPIRED_RETRY: Duration = Duration::from_secs(30);
/// How long a request for a first token may take.
const FIRST_TOKEN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a request for another one may take: containers that are restarted wait for it.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the read of a service account may take.
const ACCOUNT_TIMEOUT: Duration = Duration::from_secs(10);
const NO_TOKEN: &str = "the response of the API server has no token";

/// What identifies a token: the contents of its TokenRequest.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TokenKey {
    /// Namespace of service account and pod.
    pub namespace: String,
    /// `spec.serviceAccountName`.
    pub service_account: String,
    /// `audiences`; empty for the API server itself.
    pub audiences: Vec<String>,
    /// Requested lifetime in seconds; the API server may choose another one.
    pub expiration_seconds: Option<i64>,
    /// The pod that it is bound to: name and UID.
    pub pod: (String, PodUid),
}

/// A token for a pod.
#[derive(Clone, Debug)]
pub struct Token {
    /// The token itself.
    pub text: SecretString,
    /// When it is due for replacement; `None`: never.
    pub refresh_at: Option<SystemTime>,
}

/// Why a TokenRequest failed.
#[derive(Clone, Debug)]
struct Failure {
    /// 403: not allowed, or not yet: the API server's node authorizer receives a pod after the node does.
    refused: bool,
    cause: String,
}

impl Failure {
    fn of(cause: impl Into<String>) -> Self {
        Self { refused: false, cause: cause.into() }
    }
}

#[derive(Clone, Debug)]
struct CachedToken {
    token: Token,
    expires: SystemTime,
    /// The last failed replacement: when the next one is due, how many failed in a row, and why this one failed.
    failed: Option<FailedReplacement>,
}

#[derive(Clone, Debug)]
struct FailedReplacement {
    retry_at: SystemTime,
    backoff: Backoff,
    cause: String,
}

impl CachedToken {
    fn is_due(&self, now: SystemTime) -> bool {
        self.retry_at(now).or(self.token.refresh_at).is_some_and(|at| at <= now)
    }

    /// When the replacement that failed last is tried again. No pause is longer than [`LAST_RETRY`], unless the clock was
    /// set back: then the token is due by its own age.
    fn retry_at(&self, now: SystemTime) -> Option<SystemTime> {
        let retry_at = self.failed.as_ref().map(|failed| failed.retry_at);
        retry_at.filter(|at| *at <= now + LAST_RETRY)
    }

    /// The last failure to replace this token, which has expired, if another attempt is too early.
    fn held_back(&self, now: SystemTime) -> Option<&FailedReplacement> {
        // No pause is longer, unless the clock was set back.
        let is_early = |failed: &&FailedReplacement| now < failed.retry_at && failed.retry_at <= now + EXPIRED_RETRY;
        self.failed.as_ref().filter(is_early)
    }
}

/// A token, and the UID of the service account if it is to be of that one only.
type HeldKey = (TokenKey, Option<String>);

/// A request in progress.
type Request = BoxFuture<'static, Result<CachedToken, Failure>>;

/// The cached tokens of all pods.
pub(super) struct Tokens {
    issuer: Issuer,
    clock: Clock,
    held: Mutex<HashMap<HeldKey, CachedToken>>,
    requests: Mutex<HashMap<HeldKey, WeakShared<Request>>>,
}

impl Tokens {
    pub(super) fn new(client: Client, clock: Clock) -> Self {
        let issuer = Issuer { client, offered: Arc::default() };
        Self { issuer, clock, held: Mutex::default(), requests: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<HeldKey, CachedToken>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A service account.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ObjectError> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.issuer.client.clone(), namespace);
        match tokio::time::timeout(ACCOUNT_TIMEOUT, accounts.get(name)).await {
            Ok(read) => read.map_err(|error| ObjectError::Api(describe(&error))),
            Err(_) => Err(ObjectError::Api(format!("the API server did not answer within {ACCOUNT_TIMEOUT:?}"))),
        }
    }

    /// `account`: UID that the service account must have.
    ///
    /// # Errors
    /// No token was issued, and no cached one is still valid. If one has expired, requests are separated by pauses, during
    /// which the error is that of the last attempt.
    pub(super) async fn get(&self, key: &TokenKey, account: Option<&str>) -> Result<Token, ObjectError> {
        let held_key = (key.clone(), account.map(str::to_owned));
        let held = self.lock().get(&held_key).cloned();
        let now = self.clock.wall();
        let is_valid = held.as_ref().is_some_and(|held| now < held.expires);
        if let Some(held) = &held
            && !held.is_due(now)
            && (is_valid || held.token.refresh_at.is_none())
        {
            return Ok(Token { refresh_at: held.retry_at(now).or(held.token.refresh_at), ..held.token.clone() });
        }
        if let Some(failed) = held.as_ref().and_then(|held| held.held_back(now)) {
            return Err(ObjectError::TokenExpired { key: key.to_string(), cause: failed.cause.clone() });
        }
        let timeout = if is_valid { RENEWAL_TIMEOUT } else { FIRST_TOKEN_TIMEOUT };
        let asked = self.request(&held_key, timeout, is_valid).await;
        match asked {
            Ok(fresh) => {
                let now = self.clock.wall();
                let mut all = self.lock();
                // One that could not be replaced is still asked for.
                all.retain(|_, held| now < held.expires || held.failed.is_some());
                all.insert(held_key, fresh.clone());
                Ok(fresh.token)
            }
            Err(failure) => self.fall_back(&held_key, held, failure.cause),
        }
    }

    /// The request for a token that is in progress, or a new one: volumes of a pod that are set up at the same time need one
    /// request. It ends when all futures that wait for it are dropped.
    fn request(&self, held_key: &HeldKey, timeout: Duration, is_valid: bool) -> Shared<Request> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(request) = requests.get(held_key).and_then(WeakShared::upgrade) {
            return request;
        }
        let (issuer, (key, account)) = (self.issuer.clone(), held_key.clone());
        let request = async move { issuer.issue(&key, account.as_deref(), timeout, is_valid).await }.boxed().shared();
        requests.retain(|_, request| request.upgrade().is_some());
        requests.extend(request.downgrade().map(|weak| (held_key.clone(), weak)));
        request
    }

    /// Records that the cached token was not replaced, and returns it as long as it is valid.
    fn fall_back(&self, held_key: &HeldKey, held: Option<CachedToken>, cause: String) -> Result<Token, ObjectError> {
        let (key, now) = (&held_key.0, self.clock.wall());
        let Some(held) = held else { return Err(ObjectError::NoToken(cause)) };
        let is_valid = now < held.expires;
        let mut backoff = held.failed.as_ref().map_or(Backoff::new(FIRST_RETRY, LAST_RETRY), |failed| failed.backoff);
        if is_valid && held.failed.as_ref().is_none_or(|failed| failed.cause != cause) {
            tracing::warn!(%key, cause, "cannot replace a service account token, the previous one is still valid");
        }
        let pause = backoff.failed(0.0);
        let retry_at = if is_valid { (now + pause).min(held.expires) } else { now + pause.min(EXPIRED_RETRY) };
        if let Some(cached) = self.lock().get_mut(held_key) {
            cached.failed = Some(FailedReplacement { retry_at, backoff, cause: cause.clone() });
        }
        match is_valid {
            true => Ok(Token { refresh_at: Some(retry_at), ..held.token }),
            false => Err(ObjectError::TokenExpired { key: key.to_string(), cause }),
        }
    }

    pub(super) fn forget_pod(&self, uid: &PodUid) {
        self.lock().retain(|(key, _), _| key.pod.1 != *uid);
    }
}

/// Sends TokenRequests. Clones share what is known of the API server.
#[derive(Clone)]
struct Issuer {
    client: Client,
    /// Whether the API server has the subresource `serviceaccounts/token`.
    offered: Arc<OnceCell<bool>>,
}

impl Issuer {
    /// Requests a token. `is_valid`: the cached one is still valid. `timeout`: of each request.
    async fn issue(
        &self,
        key: &TokenKey,
        account: Option<&str>,
        timeout: Duration,
        is_valid: bool,
    ) -> Result<CachedToken, Failure> {
        let mut retry = Retry::default();
        loop {
            match self.request(key, account, timeout).await {
                // Only without a valid token: others can wait for the next time.
                Err(Failure { refused: true, .. }) if !is_valid && let Some(soon) = retry.soon() => {
                    tokio::time::sleep(soon).await;
                }
                asked => return asked,
            }
        }
    }

    async fn request(&self, key: &TokenKey, account: Option<&str>, timeout: Duration) -> Result<CachedToken, Failure> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &key.namespace);
        let wanted = request_of(key, account);
        let params = PostParams::default();
        let asked = accounts.create_token_request(&key.service_account, &params, &wanted);
        let answer = match tokio::time::timeout(timeout, asked).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) if code(&error) == Some(404) && !self.offers_tokens().await => {
                return Err(Failure::of("the API server does not have TokenRequest endpoints enabled"));
            }
            Ok(Err(error)) => {
                return Err(Failure { refused: code(&error) == Some(403), ..Failure::of(describe(&error)) });
            }
            Err(_) => return Err(Failure::of(format!("the API server did not answer within {timeout:?}"))),
        };
        let status = answer.status.ok_or_else(|| Failure::of(NO_TOKEN))?;
        let (Some(text), Some(expires)) = (status.token, status.expiration_timestamp) else {
            return Err(Failure::of(NO_TOKEN));
        };
        let expires = SystemTime::from(expires.0);
        let jitter = Duration::from_secs(fastrand::u64(..MAX_JITTER_SECONDS));
        let lifetime = answer.spec.and_then(|spec| spec.expiration_seconds);
        let lifetime = lifetime.and_then(|seconds| u64::try_from(seconds).ok());
        if lifetime.is_none() {
            tracing::error!(%key, "a service account token has no expirationSeconds and is never replaced");
        }
        let refresh_at = lifetime.map(|seconds| refresh_at(expires, Duration::from_secs(seconds), jitter));
        Ok(CachedToken { token: Token { text: text.into(), refresh_at }, expires, failed: None })
    }

    /// Discovered once; if that fails the subresource is assumed to exist.
    async fn offers_tokens(&self) -> bool {
        let discover = || async {
            let resources = self.client.list_core_api_resources("v1").await?;
            Ok::<_, kube::Error>(resources.resources.iter().any(|resource| resource.name == "serviceaccounts/token"))
        };
        self.offered.get_or_try_init(discover).await.copied().unwrap_or(true)
    }
}

fn request_of(key: &TokenKey, account: Option<&str>) -> TokenRequest {
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(key.pod.0.clone()),
        uid: Some(key.pod.1.to_string()),
    };
    TokenRequest {
        metadata: ObjectMeta { uid: account.map(str::to_owned), ..ObjectMeta::default() },
        spec: Some(TokenRequestSpec {
            audiences: Some(key.audiences.clone()).filter(|audiences| !audiences.is_empty()),
            bound_object_ref: Some(bound),
            expiration_seconds: key.expiration_seconds,
        }),
        ..TokenRequest::default()
    }
}

/// When a token is replaced. The time of its issue is computed from its expiry. A lifetime that no clock can represent,
/// as a broken API server may state it, makes the token due at once.
fn refresh_at(expires: SystemTime, lifetime: Duration, jitter: Duration) -> SystemTime {
    let fifth = Duration::from_secs(lifetime.as_secs() / 5);
    let by_lifetime = expires.checked_sub(fifth + jitter);
    let by_age = expires.checked_sub(lifetime).and_then(|issued| (issued + MAX_AGE).checked_sub(jitter));
    by_lifetime.zip(by_age).map_or(SystemTime::UNIX_EPOCH, |(by_lifetime, by_age)| by_lifetime.min(by_age))
}

impl fmt::Display for TokenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, service_account, audiences, expiration_seconds, pod: (pod, uid) } = self;
        let seconds = expiration_seconds.unwrap_or(0);
        write!(f, "{service_account:?}/{namespace:?}/{audiences:?}/{seconds}/{pod:?}({uid})")
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.text.expose_secret() == other.text.expose_secret() && self.refresh_at == other.refresh_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_set_back_does_not_put_off_the_replacement_of_a_token() {
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let failed = |retry_at| {
            let backoff = Backoff::new(FIRST_RETRY, LAST_RETRY);
            let failed = FailedReplacement { retry_at, backoff, cause: "no answer".to_owned() };
            let token = Token { text: String::from("t").into(), refresh_at: Some(at(2880)) };
            CachedToken { token, expires: at(3600), failed: Some(failed) }
        };
        for (retry_at, now, is_due) in [
            (2930, 2900, false),
            (2930, 2930, true),
            // The attempt failed while the clock was two hours ahead.
            (10_000, 2800, false),
            (10_000, 2880, true),
            (10_000, 9800, false),
        ] {
            assert_eq!(failed(at(retry_at)).is_due(at(now)), is_due, "{retry_at} {now}");
        }
        assert_eq!(failed(at(10_000)).retry_at(at(2800)), None, "no sync of the pod is due in two hours");
    }

    #[test]
    fn replaced_after_four_fifths_or_a_day() {
        let issued = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let none = Duration::ZERO;
        for (lifetime, expected) in [(3607, 2886), (600, 480), (86_400, 69_120), (31_536_000, 86_400)] {
            let lifetime = Duration::from_secs(lifetime);
            let at = refresh_at(issued + lifetime, lifetime, none);
            assert_eq!(at.duration_since(issued).expect("later").as_secs(), expected, "{lifetime:?}");
            let earlier = refresh_at(issued + lifetime, lifetime, Duration::from_secs(9));
            assert_eq!(at.duration_since(earlier).expect("earlier").as_secs(), 9);
        }
        assert_eq!(
            refresh_at(issued, Duration::from_secs(u64::MAX), none),
            SystemTime::UNIX_EPOCH,
            "no clock goes so far"
        );
    }
}
