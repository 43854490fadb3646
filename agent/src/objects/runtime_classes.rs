//! RuntimeClasses (KEP-585): the runtime handler that each names, by one watch of all of them, which begins when the first
//! pod refers to one. Few clusters have more than a handful, and each is a name.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::OnceLock;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::Client;
use kube::runtime::watcher::Config;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::error::ObjectError;
use super::error::describe;
use super::panics::Panics;
use super::store::is_name;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch::Event;
use crate::apiserver::watch::follow;

/// How long a sandbox waits for the first list of classes.
const FIRST_READ: Duration = Duration::from_secs(1);
/// How long a sandbox waits for the answer about one class that the watch does not have.
const GET_TIMEOUT: Duration = Duration::from_secs(2);
/// The resource, as messages name it.
const WORD: &str = "runtimeclass.node.k8s.io";

/// Handlers by class.
type Handlers = HashMap<String, String>;

/// All classes.
pub(super) struct RuntimeClasses {
    client: Client,
    recovered: Recovered,
    panics: Panics,
    watched: OnceLock<Watched>,
}

/// The watch, which ends with this.
struct Watched {
    /// `None` until the classes were listed once.
    handlers: watch::Receiver<Option<Handlers>>,
    _watch: AbortOnDropHandle<()>,
}

impl RuntimeClasses {
    pub(super) fn new(client: Client, recovered: Recovered, panics: Panics) -> Self {
        Self { client, recovered, panics, watched: OnceLock::new() }
    }

    /// Starts the watch unless it runs.
    pub(super) fn ensure_watch(&self) {
        self.watched();
    }

    fn watched(&self) -> &Watched {
        self.watched.get_or_init(|| {
            let (sender, handlers) = watch::channel(None);
            let watching = keep(self.client.clone(), self.recovered.clone(), sender);
            Watched { handlers, _watch: self.panics.spawn("watch of runtime classes", watching) }
        })
    }

    /// The handler of a class. One that the watch does not have is requested: it may have been created with its pod.
    ///
    /// # Errors
    /// There is no such class; the classes were never listed and are not within a second.
    pub(super) async fn handler(&self, class: &str) -> Result<String, ObjectError> {
        if !is_name(class) {
            return Err(ObjectError::BadName { kind: WORD, name: class.to_owned() });
        }
        let mut handlers = self.watched().handlers.clone();
        // What is there after the wait counts, whether it came in time or not.
        let _ = tokio::time::timeout(FIRST_READ, handlers.wait_for(Option::is_some)).await;
        let is_listed = match &*handlers.borrow() {
            Some(handlers) if let Some(handler) = handlers.get(class) => return Ok(handler.clone()),
            listed => listed.is_some(),
        };
        let api = Api::<RuntimeClass>::all(self.client.clone());
        let cause = match tokio::time::timeout(GET_TIMEOUT, api.get_opt(class)).await {
            Ok(Ok(Some(found))) => return Ok(found.handler),
            Ok(Ok(None)) => return Err(ObjectError::NotFound { kind: WORD, name: class.to_owned() }),
            // The watch would have it if it were not new.
            _ if is_listed => return Err(ObjectError::NotFound { kind: WORD, name: class.to_owned() }),
            Ok(Err(error)) => describe(&error),
            Err(_) => "timed out waiting for the condition".to_owned(),
        };
        Err(ObjectError::NotSynced { kind: WORD, cause })
    }
}

async fn keep(client: Client, recovered: Recovered, sender: watch::Sender<Option<Handlers>>) {
    let mut events = pin!(follow(Api::<RuntimeClass>::all(client), Config::default(), recovered));
    let mut listing = Handlers::new();
    while let Some(event) = events.next().await {
        match event {
            Event::Init => listing = Handlers::new(),
            Event::InitApply(class) => put(&mut listing, class),
            Event::InitKeep(class) => {
                if let Some(handler) = sender.borrow().as_ref().and_then(|known| known.get(&class.name)) {
                    listing.insert(class.name, handler.clone());
                }
            }
            Event::InitDone => {
                sender.send_replace(Some(std::mem::take(&mut listing)));
            }
            Event::Apply(class) => sender.send_modify(|handlers| put(handlers.get_or_insert_default(), class)),
            Event::Delete(class) => sender.send_modify(|handlers| {
                handlers.get_or_insert_default().remove(&class.name);
            }),
        }
    }
}

fn put(handlers: &mut Handlers, class: RuntimeClass) {
    handlers.insert(class.metadata.name.unwrap_or_default(), class.handler);
}
