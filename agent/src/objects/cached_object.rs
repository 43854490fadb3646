//! One cached object: its state, the pods that use it, and its watch.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::Strategy;
use super::error::ObjectError;
use super::error::code;
use super::error::describe;
use super::kind::Kind;
use super::object_watch;
use super::object_watch::ObjectKey;
use super::object_watch::WatchUpdate;
use super::registration::Changed;
use super::registration::RegistrationId;
use super::store::Reading;

/// How long a read waits for an object that was never received.
const FIRST_READ: Duration = Duration::from_secs(1);
/// Period of the check for unused watches.
const IDLE_CHECK: Duration = Duration::from_secs(60);
/// Timeout of a GET when there is no cached object.
const GET_TIMEOUT: Duration = Duration::from_secs(10);

/// How one pod uses an object.
#[derive(Debug)]
pub(super) struct PodUse {
    /// Counter of changes.
    pub(super) changed: Changed,
    /// Used as long as the pod runs (a volume), not only when a container starts.
    pub(super) always: bool,
}

/// The state of an object.
#[derive(Debug)]
struct Known<K> {
    /// `None`: never read. `Some(None)`: it does not exist.
    object: Option<Option<Arc<K>>>,
    /// Received since the present watch began.
    fresh: bool,
    /// Why the last attempt failed.
    failure: Option<String>,
    /// A read has failed because the object was never received; its pod has to be woken when it is.
    missed: bool,
    /// When a GET returned it; it is read again after its time to live, or if this is `None`.
    fetched: Option<Instant>,
    /// Registrations of new and changed pods so far.
    registrations: u64,
    /// States that watches have received so far.
    watched: u64,
}

impl<K> Known<K> {
    /// The object as it was last received, and why the last attempt failed. That there is none yet is noted in the same
    /// step: the object cannot be stored between the two without waking its pods.
    fn read(&mut self) -> (Option<Option<Arc<K>>>, Option<String>) {
        self.missed |= self.object.is_none();
        (self.object.clone(), self.failure.clone())
    }
}

/// A GET in progress.
#[derive(Clone, Copy)]
struct Fetch {
    began: Instant,
    /// Registrations at its begin.
    registrations: u64,
    /// States that watches had received at its begin.
    watched: u64,
}

impl Fetch {
    /// From when on its answer is kept, after so many registrations. A pod that was registered while it was in progress may
    /// have been created or changed after what it returns, so that the object is read again.
    fn kept_since(self, registrations: u64) -> Option<Instant> {
        (self.registrations == registrations).then_some(self.began)
    }
}

/// One object, shared by the store, its watch and its readers.
pub(super) struct CachedObject<K> {
    shared: Arc<Shared<K>>,
    /// The task of the watch.
    watch: Mutex<Option<AbortOnDropHandle<()>>>,
    reading: Reading,
    /// One GET at a time.
    fetching: tokio::sync::Mutex<()>,
}

struct Shared<K> {
    key: ObjectKey,
    known: watch::Sender<Known<K>>,
    users: Mutex<HashMap<RegistrationId, PodUse>>,
    last_read: Mutex<Instant>,
}

impl<K: Kind> CachedObject<K> {
    pub(super) fn new(key: ObjectKey, reading: Reading) -> Arc<Self> {
        let (object, failure, fetched) = (None, None, None);
        let known = Known { object, fresh: false, failure, missed: false, fetched, registrations: 0, watched: 0 };
        let shared = Shared {
            key,
            known: watch::Sender::new(known),
            users: Mutex::default(),
            last_read: Mutex::new(Instant::now()),
        };
        Arc::new(Self {
            shared: Arc::new(shared),
            watch: Mutex::default(),
            reading,
            fetching: tokio::sync::Mutex::default(),
        })
    }

    /// Which object it is.
    pub(super) fn key(&self) -> &ObjectKey {
        &self.shared.key
    }

    /// Adds a pod that uses the object, or that has changed and still uses it. Reading begins at once.
    pub(super) fn add_user(&self, id: RegistrationId, usage: PodUse) {
        self.shared.users().insert(id, usage);
        if self.reading.strategy == Strategy::Watch {
            self.ensure_watch();
        }
        // A pod that starts must not see what a GET returned before, nor one that was changed to have its volumes refreshed.
        self.shared.known.send_if_modified(|known| {
            known.fetched = None;
            known.registrations += 1;
            false
        });
    }

    /// Removes a pod. True if no pod uses the object any more.
    pub(super) fn remove_user(&self, id: RegistrationId) -> bool {
        let mut users = self.shared.users();
        users.remove(&id);
        users.is_empty()
    }

    /// Whether changes are announced: it is watched, or immutable. Starts the watch if necessary.
    pub(super) fn is_watched(&self) -> bool {
        self.shared.is_immutable() || (self.reading.strategy == Strategy::Watch && self.ensure_watch())
    }

    /// # Errors
    /// It does not exist, or cannot be read.
    pub(super) async fn get(&self, now: Instant) -> Result<Arc<K>, ObjectError> {
        *self.shared.last_read.lock().unwrap_or_else(PoisonError::into_inner) = now;
        if self.is_watched() { self.watched().await } else { self.fetched(now).await }
    }

    /// The object from the watch; after a second without one, the last known state.
    async fn watched(&self) -> Result<Arc<K>, ObjectError> {
        let mut known = self.shared.known.subscribe();
        // The sender lives as long as `self`.
        let _ = tokio::time::timeout(FIRST_READ, known.wait_for(|known| known.fresh)).await;
        let (mut object, mut failure) = (None, None);
        self.shared.known.send_if_modified(|known| {
            (object, failure) = known.read();
            false
        });
        match object {
            Some(object) => self.shared.found(object),
            None => {
                let cause = failure.unwrap_or_else(|| "timed out waiting for the condition".to_owned());
                Err(ObjectError::NotSynced { kind: K::WORD, cause })
            }
        }
    }

    /// The object from a GET: each time with strategy Get, else after the time to live.
    async fn fetched(&self, now: Instant) -> Result<Arc<K>, ObjectError> {
        let _one = self.fetching.lock().await;
        let (object, fetched, failed, fetch) = {
            let known = self.shared.known.borrow();
            let fetch = Fetch { began: now, registrations: known.registrations, watched: known.watched };
            (known.object.clone(), known.fetched, known.failure.is_some(), fetch)
        };
        let good_until = fetched.map(|at| at + self.reading.time_to_live());
        let keeps = self.reading.strategy != Strategy::Get && !failed && good_until.is_some_and(|until| now < until);
        // One that did not exist is read each time, as upstream: pods wait for it, and try again sooner.
        if let (Some(Some(object)), true) = (&object, keeps) {
            return Ok(object.clone());
        }
        // The API server's watch cache is sufficient for an object that was read since the last registration, as what is older
        // is recognised; a pod that is new or changed must not get a stale one.
        let is_known = fetched.is_some() && matches!(object, Some(Some(_)));
        let cheap = self.reading.strategy != Strategy::Get && is_known;
        let timeout = if object.is_some() { FIRST_READ } else { GET_TIMEOUT };
        match self.read(cheap, timeout).await {
            Ok(answer) if cheap && answer.as_ref().is_some_and(|answer| self.shared.is_older(answer)) => {
                // The watch cache of one API server may lag behind another API server.
                self.shared.known.send_modify(|known| {
                    known.fetched = fetch.kept_since(known.registrations);
                    known.failure = None;
                });
                self.shared.found(object.flatten())
            }
            Ok(answer) => {
                self.shared.store(answer, Some(fetch));
                self.shared.found(self.shared.known.borrow().object.clone().flatten())
            }
            Err(error) => {
                self.shared.known.send_modify(|known| known.failure = Some(error.clone()));
                match object {
                    Some(object) if self.reading.strategy != Strategy::Get => self.shared.found(object),
                    _ => Err(ObjectError::Api(error)),
                }
            }
        }
    }

    /// The object, if it exists; if `cheap`, from the API server's watch cache. One that lags behind may not have it yet, so
    /// that its absence is confirmed.
    async fn read(&self, cheap: bool, timeout: Duration) -> Result<Option<K>, String> {
        match self.ask(cheap, timeout).await {
            Ok(None) if cheap => self.ask(false, timeout).await,
            answer => answer,
        }
    }

    async fn ask(&self, cheap: bool, timeout: Duration) -> Result<Option<K>, String> {
        let ObjectKey { namespace, name } = &self.shared.key;
        let version = if cheap { "?resourceVersion=0" } else { "" };
        let uri = format!("/api/v1/namespaces/{namespace}/{}/{name}{version}", K::PLURAL);
        let request = http::Request::get(uri).body(Vec::new()).map_err(|error| error.to_string())?;
        let answer = tokio::time::timeout(timeout, self.reading.client.request::<K>(request)).await;
        match answer {
            Ok(Ok(object)) => Ok(Some(object)),
            Ok(Err(error)) if code(&error) == Some(404) => Ok(None),
            Ok(Err(error)) => Err(describe(&error)),
            Err(_) => Err(format!("reading {} {namespace}/{name} took longer than {timeout:?}", K::WORD)),
        }
    }

    /// Starts the watch if it does not run. False if there are too many watches.
    fn ensure_watch(&self) -> bool {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        if self.shared.is_immutable() || watch.as_ref().is_some_and(|watch| !watch.is_finished()) {
            return true;
        }
        let Ok(permit) = self.reading.watches.clone().try_acquire_owned() else { return false };
        self.shared.known.send_modify(|known| {
            known.fresh = false;
            known.failure = None;
        });
        let watching = keep_watching(self.shared.clone(), self.reading.clone(), permit);
        *watch = Some(self.reading.panics.spawn("watch of an object", watching));
        true
    }
}

/// Watches until the object is immutable, or was not read for `idle`.
async fn keep_watching<K: Kind>(shared: Arc<Shared<K>>, reading: Reading, _permit: OwnedSemaphorePermit) {
    let listener = shared.clone();
    let listen = move |news| match news {
        WatchUpdate::Now(object) => {
            listener.store(object, None);
            if listener.is_immutable() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        WatchUpdate::Failed(error) => {
            tracing::debug!(
                kind = K::WORD,
                namespace = listener.key.namespace,
                name = listener.key.name,
                error,
                "the watch of an object failed"
            );
            listener.known.send_modify(|known| known.failure = Some(error));
            ControlFlow::Continue(())
        }
    };
    tokio::select! {
        () = object_watch::watch(reading.client, reading.recovered, shared.key.clone(), &reading.streaming, listen) => {}
        () = shared.idle(reading.idle) => {}
    }
}

impl<K: Kind> Shared<K> {
    fn users(&self) -> MutexGuard<'_, HashMap<RegistrationId, PodUse>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_immutable(&self) -> bool {
        self.known
            .borrow()
            .object
            .as_ref()
            .is_some_and(|object| object.as_ref().is_some_and(|object| object.is_immutable()))
    }

    fn found(&self, object: Option<Arc<K>>) -> Result<Arc<K>, ObjectError> {
        object.ok_or_else(|| ObjectError::NotFound { kind: K::WORD, name: self.key.name.clone() })
    }

    /// Whether the answer is older than the cached object.
    fn is_older(&self, answer: &K) -> bool {
        let version = |object: &K| object.clone().meta().resource_version.as_ref().and_then(|v| v.parse::<u64>().ok());
        let held = self.known.borrow().object.clone().flatten();
        held.and_then(|held| version(&held)).zip(version(answer)).is_some_and(|(held, new)| new < held)
    }

    /// Stores the state that the watch or a `fetch` received, and counts a change for the pods that use the object if its
    /// content differs.
    fn store(&self, object: Option<K>, fetch: Option<Fetch>) {
        let object = object.map(|mut object| {
            object.trim();
            Arc::new(object)
        });
        let mut news = false;
        self.known.send_modify(|known| {
            // What a watch has received during a GET is at least as new as the answer, and the watch does not repeat it.
            if fetch.is_some_and(|fetch| fetch.watched != known.watched) {
                return;
            }
            news = match &known.object {
                None => known.missed,
                Some(Some(old)) => object.as_ref().is_none_or(|object| !object.same_content(old)),
                Some(None) => object.is_some(),
            };
            // All readers of a version share it, also those that have got it by different requests.
            let held = known.object.take().flatten().filter(|held| object.as_deref() == Some(&**held));
            let (object, registrations) = (Some(held.or(object)), known.registrations);
            let fetched = fetch.and_then(|fetch| fetch.kept_since(registrations));
            let watched = known.watched + u64::from(fetch.is_none());
            *known = Known { object, fresh: true, failure: None, missed: false, fetched, registrations, watched };
        });
        if news {
            self.users().values().for_each(|usage| usage.changed.send_modify(|count| *count += 1));
        }
    }

    /// Returns when the object was received and then not used for `limit`.
    async fn idle(&self, limit: Duration) {
        loop {
            tokio::time::sleep(IDLE_CHECK.min(limit)).await;
            let needed = self.users().values().any(|usage| usage.always);
            let last_read = *self.last_read.lock().unwrap_or_else(PoisonError::into_inner);
            if self.known.borrow().fresh && !needed && last_read.elapsed() > limit {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::SystemTime;

    use futures_util::future::join;
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::super::ObjectsConfig;
    use super::super::panics::Panics;
    use super::super::references::Names;
    use super::super::references::Need;
    use super::super::registration::Registration;
    use super::super::store::Store;
    use super::super::tests::api::Api;
    use super::*;
    use crate::apiserver::recovery::Recovered;
    use crate::model::Clock;

    fn names(name: &str) -> Names {
        Names { namespace: "ns".into(), needs: [(name.to_owned(), Need::Always)].into() }
    }

    /// Without watches.
    fn store() -> Arc<Store<ConfigMap>> {
        let clock = Clock::derived(SystemTime::UNIX_EPOCH);
        let (strategy, recovered, sync_frequency) = (Strategy::Get, Recovered::default(), Duration::from_secs(60));
        let config = ObjectsConfig { strategy, recovered, sync_frequency, clock, node: None };
        Arc::new(Store::new(Reading::new(Api::new(clock).client(), &config, Panics::default())))
    }

    #[tokio::test]
    async fn a_registration_waits_for_no_object_of_another_pod() {
        let store = store();
        let (other, own) = (Registration::new("other".into()), Registration::new("own".into()));
        store.register(other.id, &names("other"), &other.counter);
        let key = ObjectKey { namespace: "ns".into(), name: "other".into() };
        let object = store.object(&key).expect("it is registered");

        let in_use = object.shared.users();
        let (done, registered) = mpsc::channel();
        let (registering, id, counter) = (store.clone(), own.id, own.counter.clone());
        std::thread::spawn(move || {
            registering.register(id, &names("first"), &counter);
            registering.register(id, &names("second"), &counter);
            let held = registering.len();
            registering.unregister(id);
            done.send((held, registering.len()))
        });
        assert_eq!(registered.recv_timeout(Duration::from_secs(10)), Ok((2, 1)));
        drop(in_use);
        store.unregister(other.id);
        assert_eq!(store.len(), 0);
    }

    /// Both orders: reading, and noting that there was nothing, is one step.
    #[tokio::test(start_paused = true)]
    async fn an_object_that_arrives_when_a_read_gives_up_is_read_or_announced() {
        for arrives_first in [true, false] {
            let (store, key) = (store(), ObjectKey { namespace: "ns".into(), name: "a".into() });
            let registration = Registration::new("u".into());
            store.register(registration.id, &names("a"), &registration.counter);
            let object = store.object(&key).expect("it is registered");
            let arrival = async {
                tokio::time::sleep(FIRST_READ).await;
                object.shared.store(Some(ConfigMap::default()), None);
            };
            // Both are due at the same time, and the first one is polled first.
            let read = match arrives_first {
                true => join(arrival, object.watched()).await.1,
                false => join(object.watched(), arrival).await.0,
            };
            let expected = if arrives_first { (true, 0) } else { (false, 1) };
            assert_eq!((read.is_ok(), registration.generation()), expected, "{read:?}");
        }
    }
}
