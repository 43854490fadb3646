//! All objects of one kind that registered pods refer to.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Client;
use tokio::sync::Semaphore;
use tokio::sync::watch;
use tokio::time::Instant;

use super::ObjectsConfig;
use super::Strategy;
use super::cached_object::CachedObject;
use super::cached_object::PodUse;
use super::error::ObjectError;
use super::kind::Kind;
use super::object_watch::ObjectKey;
use super::panics::Panics;
use super::references::Names;
use super::references::Need;
use super::registration::Changed;
use super::registration::RegistrationId;
use crate::apiserver::recovery::Recovered;

/// Watches at most, of all objects together: each is a long-running request. Further objects are read by GET, as with
/// strategy Cache.
pub(super) const MAX_WATCHES: usize = 512;
/// An object that is not read is watched for this time, or five times `syncFrequency` if that is longer.
const MIN_IDLE: Duration = Duration::from_secs(60);
/// How long the result of a GET is cached, unless the Node's annotation sets another time.
const TIME_TO_LIVE: Duration = Duration::from_secs(60);
/// The longest time to live that the annotation can ask for.
const MAX_TIME_TO_LIVE: Duration = Duration::from_secs(24 * 3600);
const TTL_ANNOTATION: &str = "node.alpha.kubernetes.io/ttl";

/// What is needed to read objects; shared by all kinds.
#[derive(Clone)]
pub(super) struct Reading {
    pub(super) client: Client,
    pub(super) recovered: Recovered,
    pub(super) panics: Panics,
    pub(super) strategy: Strategy,
    pub(super) idle: Duration,
    pub(super) watches: Arc<Semaphore>,
    pub(super) streaming: Arc<AtomicBool>,
    refresh: Duration,
    node: Option<watch::Receiver<Option<Arc<Node>>>>,
}

impl Reading {
    pub(super) fn new(client: Client, config: &ObjectsConfig, panics: Panics) -> Self {
        Self {
            client,
            recovered: config.recovered.clone(),
            panics,
            strategy: config.strategy,
            idle: (config.sync_frequency * 5).max(MIN_IDLE),
            watches: Arc::new(Semaphore::new(MAX_WATCHES)),
            streaming: Arc::new(AtomicBool::new(true)),
            refresh: config.sync_frequency,
            node: config.node.clone(),
        }
    }

    /// How long the result of a GET is cached.
    pub(super) fn time_to_live(&self) -> Duration {
        let node = self.node.as_ref().and_then(|node| node.borrow().clone());
        node.and_then(|node| stated_time_to_live(&node)).unwrap_or(TIME_TO_LIVE)
    }
}

/// The time to live that a Node states. With a negative one every object is read again, as upstream.
fn stated_time_to_live(node: &Node) -> Option<Duration> {
    let seconds: i64 = node.metadata.annotations.as_ref()?.get(TTL_ANNOTATION)?.parse().ok()?;
    Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(MAX_TIME_TO_LIVE))
}

/// The objects of one kind.
pub(super) struct Store<K> {
    reading: Reading,
    registered: Mutex<Registered<K>>,
}

/// The objects that registered pods use.
struct Registered<K> {
    objects: HashMap<ObjectKey, Arc<CachedObject<K>>>,
    /// Those of each registration that has any: registering a pod, or releasing its objects, does not search the objects of
    /// the others.
    by_registration: HashMap<RegistrationId, Vec<Arc<CachedObject<K>>>>,
}

impl<K: Kind> Registered<K> {
    /// The objects of this registration, which has none then; each is to be released or used again.
    fn take(&mut self, id: RegistrationId) -> Vec<Arc<CachedObject<K>>> {
        self.by_registration.remove(&id).unwrap_or_default()
    }

    fn release(&mut self, id: RegistrationId, object: &CachedObject<K>) {
        if object.remove_user(id) {
            self.objects.remove(object.key());
        }
    }
}

impl<K: Kind> Store<K> {
    pub(super) fn new(reading: Reading) -> Self {
        let registered = Registered { objects: HashMap::new(), by_registration: HashMap::new() };
        Self { reading, registered: Mutex::new(registered) }
    }

    fn lock(&self) -> MutexGuard<'_, Registered<K>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the objects that the pod uses.
    pub(super) fn register(&self, id: RegistrationId, names: &Names, changed: &Changed) {
        let mut registered = self.lock();
        for object in registered.take(id) {
            let key = object.key();
            if key.namespace != names.namespace || !names.needs.contains_key(&key.name) {
                registered.release(id, &object);
            }
        }
        let mut used = Vec::new();
        for (name, need) in &names.needs {
            let key = ObjectKey { namespace: names.namespace.clone(), name: name.clone() };
            if !(is_name(&key.namespace) && is_name(name)) {
                continue;
            }
            let objects = &mut registered.objects;
            let object = objects.entry(key.clone()).or_insert_with(|| CachedObject::new(key, self.reading.clone()));
            object.add_user(id, PodUse { changed: changed.clone(), always: *need == Need::Always });
            used.push(object.clone());
        }
        if !used.is_empty() {
            registered.by_registration.insert(id, used);
        }
    }

    /// Releases all objects of the pod.
    pub(super) fn unregister(&self, id: RegistrationId) {
        let mut registered = self.lock();
        for object in registered.take(id) {
            registered.release(id, &object);
        }
    }

    /// The object, if a registered pod refers to it.
    pub(super) fn object(&self, key: &ObjectKey) -> Option<Arc<CachedObject<K>>> {
        self.lock().objects.get(key).cloned()
    }

    /// # Errors
    /// The name is invalid, no registered pod refers to it, it does not exist, or it cannot be read.
    pub(super) async fn get(&self, namespace: &str, name: &str) -> Result<Arc<K>, ObjectError> {
        if !is_name(name) {
            return Err(ObjectError::BadName { kind: K::WORD, name: name.to_owned() });
        }
        let key = ObjectKey { namespace: namespace.to_owned(), name: name.to_owned() };
        let Some(object) = self.object(&key) else {
            return Err(ObjectError::NotRegistered { namespace: namespace.to_owned(), name: name.to_owned() });
        };
        object.get(Instant::now()).await
    }

    /// Whether changes of some of these are not announced.
    pub(super) fn has_unwatched(&self, names: &Names) -> bool {
        let always = names.needs.iter().filter(|(_, need)| **need == Need::Always);
        let registered = self.lock();
        always
            .map(|(name, _)| ObjectKey { namespace: names.namespace.clone(), name: name.clone() })
            .any(|key| registered.objects.get(&key).is_some_and(|object| !object.is_watched()))
    }

    /// When objects that are not watched are read again: `syncFrequency`, and up to half of it as jitter.
    pub(super) fn refresh_period(&self) -> Duration {
        self.reading.refresh.mul_f64(1.0 + fastrand::f64() * 0.5)
    }

    /// Number of objects held, for tests.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().objects.len()
    }
}

/// Whether the text is a DNS subdomain, which needs no escaping in a path or query.
pub(super) fn is_name(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    (1..=253).contains(&text.len())
        && text.chars().all(fits)
        && !text.starts_with(['.', '-'])
        && !text.ends_with(['.', '-'])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_time_to_live_is_the_nodes() {
        let stated = |value: &str| {
            let node = json!({ "metadata": { "annotations": { TTL_ANNOTATION: value } } });
            stated_time_to_live(&serde_json::from_value(node).expect("a Node"))
        };
        let table = [
            ("30", Some(30)),
            ("+15", Some(15)),
            ("0", Some(0)),
            ("-1", Some(0)),
            ("999999", Some(86_400)),
            ("1s", None),
        ];
        for (value, seconds) in table {
            assert_eq!(stated(value), seconds.map(Duration::from_secs), "{value}");
        }
        assert_eq!(stated_time_to_live(&Node::default()), None);
    }
}
