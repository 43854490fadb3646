//! One object: what is known of it, who uses it, and the watch that keeps it up to date.

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

/// How long a reader waits for an object that has never been read.
const FIRST_READ: Duration = Duration::from_secs(1);
/// Idle watches are looked for this often.
const IDLE_CHECK: Duration = Duration::from_secs(60);
/// How long one GET may take where nothing older would do.
const GET_TIMEOUT: Duration = Duration::from_secs(10);

/// How one pod uses an object.
#[derive(Debug)]
pub(super) struct PodUse {
    /// Told of changes.
    pub(super) changed: Changed,
    /// As long as it runs, not only when a container starts.
    pub(super) always: bool,
}

/// What is known of an object.
#[derive(Debug)]
struct Known<K> {
    /// `None`: never read. `Some(None)`: there is none.
    object: Option<Option<Arc<K>>>,
    /// Read since the watch now running began.
    fresh: bool,
    /// Why the last try failed.
    failure: Option<String>,
    /// Somebody went away without an answer, and wants to know.
    missed: bool,
    /// When a GET brought it; it is asked for anew after its time to live, or if this is `None`.
    fetched: Option<Instant>,
}

/// One object, shared by the store, its watch and its readers.
pub(super) struct CachedObject<K> {
    shared: Arc<Shared<K>>,
    /// The watch; `None` while there is none.
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
        let known = Known { object: None, fresh: false, failure: None, missed: false, fetched: None };
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

    /// A pod needs the object. Reading begins at once.
    pub(super) fn add_user(&self, id: RegistrationId, usage: PodUse) {
        let first = self.shared.users().insert(id, usage).is_none();
        if self.reading.strategy == Strategy::Watch {
            self.ensure_watch();
        }
        if first {
            // A pod that starts must not see what a GET brought for another one long ago.
            self.shared.known.send_if_modified(|known| {
                known.fetched = None;
                false
            });
        }
    }

    /// The pod does not need it any more. True if nobody does.
    pub(super) fn remove_user(&self, id: RegistrationId) -> bool {
        let mut users = self.shared.users();
        users.remove(&id);
        users.is_empty()
    }

    /// Readers will hear of changes: it is watched, or cannot change.
    pub(super) fn tells_changes(&self) -> bool {
        self.shared.is_immutable() || (self.reading.strategy == Strategy::Watch && self.ensure_watch())
    }

    pub(super) async fn get(&self, now: Instant) -> Result<Arc<K>, ObjectError> {
        *self.shared.last_read.lock().unwrap_or_else(PoisonError::into_inner) = now;
        if self.tells_changes() { self.watched().await } else { self.fetched(now).await }
    }

    /// What the watch says, once it has said something; else what an earlier one said.
    async fn watched(&self) -> Result<Arc<K>, ObjectError> {
        let mut known = self.shared.known.subscribe();
        // The sender lives as long as `self`.
        let _ = tokio::time::timeout(FIRST_READ, known.wait_for(|known| known.fresh)).await;
        let (object, failure) = {
            let known = known.borrow();
            (known.object.clone(), known.failure.clone())
        };
        match object {
            Some(object) => self.shared.found(object),
            None => {
                self.shared.known.send_if_modified(|known| {
                    known.missed = true;
                    false
                });
                let cause = failure.unwrap_or_else(|| "timed out waiting for the condition".to_owned());
                Err(ObjectError::NotSynced { kind: K::WORD, cause })
            }
        }
    }

    /// What a GET says: always with strategy Get, else after the time to live.
    async fn fetched(&self, now: Instant) -> Result<Arc<K>, ObjectError> {
        let _one = self.fetching.lock().await;
        let (object, fetched, failed) = {
            let known = self.shared.known.borrow();
            (known.object.clone(), known.fetched, known.failure.is_some())
        };
        let good_until = fetched.map(|at| at + self.reading.time_to_live());
        let keeps = self.reading.strategy != Strategy::Get && !failed && good_until.is_some_and(|until| now < until);
        if let (Some(object), true) = (&object, keeps) {
            return self.shared.found(object.clone());
        }
        // A cached answer is enough where this object has been seen before; a new pod must not get an old one.
        let cheap = self.reading.strategy == Strategy::Cache && fetched.is_some();
        let timeout = if object.is_some() { FIRST_READ } else { GET_TIMEOUT };
        match self.ask(cheap, timeout).await {
            Ok(answer) if cheap && answer.as_ref().is_some_and(|answer| self.shared.is_older(answer)) => {
                // A cache of the API server lags behind what another one said.
                self.shared.known.send_modify(|known| known.fetched = Some(now));
                self.shared.found(object.flatten())
            }
            Ok(answer) => {
                self.shared.store(answer, Some(now));
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

    /// Sees to it that the object is watched. False if too many are.
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
        *watch = Some(AbortOnDropHandle::new(tokio::spawn(keep_watching(
            self.shared.clone(),
            self.reading.clone(),
            permit,
        ))));
        true
    }
}

/// Watches until the object turns out to be immutable, or nobody has asked for it for long.
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
                "not watched"
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

    /// The answer is from before what is known.
    fn is_older(&self, answer: &K) -> bool {
        let version = |object: &K| object.clone().meta().resource_version.as_ref().and_then(|v| v.parse::<u64>().ok());
        let held = self.known.borrow().object.clone().flatten();
        held.and_then(|held| version(&held)).zip(version(answer)).is_some_and(|(held, new)| new < held)
    }

    /// Takes in what the API server says, and tells the users if that is news to them.
    fn store(&self, object: Option<K>, fetched: Option<Instant>) {
        let object = object.map(|mut object| {
            object.trim();
            Arc::new(object)
        });
        let mut news = false;
        self.known.send_modify(|known| {
            news = match &known.object {
                None => known.missed,
                Some(Some(old)) => object.as_ref().is_none_or(|object| !object.same_content(old)),
                Some(None) => object.is_some(),
            };
            *known = Known { object: Some(object), fresh: true, failure: None, missed: false, fetched };
        });
        if news {
            self.users().values().for_each(|usage| usage.changed.send_modify(|count| *count += 1));
        }
    }

    /// Returns when the object has been read and then nobody needed it for `limit`.
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
