//! All services with a cluster IP, by one watch; only what becomes variables is kept.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::Client;
use kube::runtime::watcher::Config;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::error::ObjectError;
use super::panics::Panics;
use super::service_env;
use super::service_env::Links;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch::Event;
use crate::apiserver::watch::follow_specs;

/// How long a container waits for the first list of services.
const FIRST_READ: Duration = Duration::from_secs(1);
/// Headless services have no variables.
const WITH_ADDRESS: &str = "spec.clusterIP!=None";

/// The services; `None` until they were listed once.
pub(super) struct Services {
    links: watch::Receiver<Option<Links>>,
    _watch: AbortOnDropHandle<()>,
}

impl Services {
    pub(super) fn start(client: Client, recovered: Recovered, panics: &Panics) -> Self {
        let (sender, links) = watch::channel(None);
        Self { links, _watch: panics.spawn("watch of services", keep(client, recovered, sender)) }
    }

    /// # Errors
    /// With `must_know`: the services were not listed within a second.
    pub(super) async fn variables(
        &self,
        namespace: &str,
        all: bool,
        must_know: bool,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        let mut links = self.links.clone();
        if must_know {
            let read = tokio::time::timeout(FIRST_READ, links.wait_for(Option::is_some)).await;
            read.map_err(|_| ObjectError::NoServices)?.map_err(|_| ObjectError::NoServices)?;
        }
        let links = self.links.borrow();
        Ok(links.as_ref().map(|links| service_env::variables(links, namespace, all)).unwrap_or_default())
    }
}

async fn keep(client: Client, recovered: Recovered, sender: watch::Sender<Option<Links>>) {
    let config = Config::default().fields(WITH_ADDRESS);
    let mut events = pin!(follow_specs(Api::<Service>::all(client), config, recovered));
    let mut listing = Links::new();
    while let Some(event) = events.next().await {
        match event {
            Event::Init => listing = Links::new(),
            Event::InitApply(service) => put(&mut listing, &service),
            Event::InitKeep(service) => {
                let key = (service.namespace, service.name);
                if let Some(link) = sender.borrow().as_ref().and_then(|known| known.get(&key)) {
                    listing.insert(key, link.clone());
                }
            }
            Event::InitDone => {
                sender.send_replace(Some(std::mem::take(&mut listing)));
            }
            Event::Apply(service) => change(&sender, |links| put(links, &service)),
            Event::Delete(service) => change(&sender, |links| {
                links.remove(&(service.namespace, service.name));
            }),
        }
    }
}

fn put(links: &mut Links, service: &Service) {
    match service_env::link(service) {
        Some((key, Some(link))) => {
            links.insert(key, link);
        }
        Some((key, None)) => {
            links.remove(&key);
        }
        None => {}
    }
}

fn change(sender: &watch::Sender<Option<Links>>, edit: impl FnOnce(&mut Links)) {
    sender.send_modify(|links| edit(links.get_or_insert_default()));
}
