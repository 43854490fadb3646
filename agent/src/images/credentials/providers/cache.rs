//! Cached responses of one plugin. Pure: time is an argument.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use tokio::time::Instant;

use super::plugin::CacheBy;
use super::plugin::CredentialProviderResponse;
use crate::images::access::AccountUse;

/// Responses that are kept; the one that was used longest ago is dropped.
const CAPACITY: NonZeroUsize = NonZeroUsize::new(512).expect("not zero");

/// What beside the image a response depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct AccountKey {
    pub(super) account: Option<AccountUse>,
    pub(super) annotations: BTreeMap<String, String>,
    /// Hash of the token, if responses are not shared between tokens.
    pub(super) token: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    /// Image, registry, or empty for all images.
    base: String,
    account: AccountKey,
}

/// Responses by what they are valid for.
#[derive(Debug)]
pub(super) struct Cache(LruCache<Key, (Instant, Arc<CredentialProviderResponse>)>);

impl Default for Cache {
    fn default() -> Self {
        Self(LruCache::new(CAPACITY))
    }
}

fn base(cache_by: CacheBy, image: &str) -> String {
    match cache_by {
        CacheBy::Image => image.to_owned(),
        CacheBy::Registry => image.split('/').next().unwrap_or(image).to_owned(),
        CacheBy::Global => String::new(),
    }
}

impl Cache {
    /// A response for this image, the most special first.
    pub(super) fn get(
        &mut self,
        image: &str,
        account: &AccountKey,
        now: Instant,
    ) -> Option<Arc<CredentialProviderResponse>> {
        [CacheBy::Image, CacheBy::Registry, CacheBy::Global].into_iter().find_map(|cache_by| {
            let key = Key { base: base(cache_by, image), account: account.clone() };
            let found = self.0.get(&key).filter(|(until, _)| now < *until).map(|(_, response)| response.clone());
            if found.is_none() {
                self.0.pop(&key);
            }
            found
        })
    }

    /// Keeps a response until `until`.
    pub(super) fn insert(
        &mut self,
        image: &str,
        account: AccountKey,
        until: Instant,
        response: Arc<CredentialProviderResponse>,
    ) {
        self.0.put(Key { base: base(response.cache_by, image), account }, (until, response));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn responses_are_shared_as_they_say() {
        let now = Instant::now();
        let until = now + Duration::from_secs(1);
        let none = AccountKey::default();
        for (cache_by, found) in [
            (CacheBy::Image, [true, false, false]),
            (CacheBy::Registry, [true, true, false]),
            (CacheBy::Global, [true, true, true]),
        ] {
            let mut cache = Cache::default();
            let response = Arc::new(CredentialProviderResponse { cache_by, lifetime: None, auth: Vec::new() });
            cache.insert("r.io/a", none.clone(), until, response);
            let has = ["r.io/a", "r.io/b", "q.io/a"].map(|image| cache.get(image, &none, now).is_some());
            assert_eq!(has, found, "{cache_by:?}");
            let other = AccountKey { token: Some("t".to_owned()), ..AccountKey::default() };
            assert!(cache.get("r.io/a", &other, now).is_none());
            assert!(cache.get("r.io/a", &none, until).is_none(), "expired");
        }
    }
}
