//! Pods bound to this node, from the API server. Waits out every absence of the server: what it said last stays desired.
//!
//! The first complete list, and every later one, is a set; what happens between lists is handed on as changes, so that
//! one pod among a thousand costs what one pod costs.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::Api;
use kube::runtime::watcher::Config;
use kube::runtime::watcher::Event;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::News;
use super::hostile;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch;
use crate::model::ConfigSource;
use crate::model::Pod;

/// Changes handed on together at most.
const BATCH: usize = 256;

/// Settings of the API source.
pub struct ApiSource {
    /// Access to pods of all namespaces.
    pub client: kube::Client,
    /// Ends the waits for it.
    pub recovered: Recovered,
    /// This node's name.
    pub node_name: String,
}

impl ApiSource {
    /// Sends news until cancelled or until nobody listens.
    pub async fn run(self, news: mpsc::Sender<(ConfigSource, News)>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.follow(news) => {}
        }
    }

    async fn follow(self, news: mpsc::Sender<(ConfigSource, News)>) {
        let pods: Api<ApiPod> = Api::all(self.client);
        let mine = Config::default().fields(&format!("spec.nodeName={}", self.node_name));
        // Whatever has arrived by the time the merger takes the last news goes on together.
        let events = watch::follow(pods, mine, self.recovered).ready_chunks(BATCH);
        let mut events = std::pin::pin!(events);
        let mut gathering = Gathering::default();
        while let Some(batch) = events.next().await {
            for event in batch {
                gathering.take(event);
            }
            for told in gathering.news() {
                if news.send((ConfigSource::Api, told)).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Events of the watch on their way to news. Pure.
#[derive(Default)]
struct Gathering {
    /// A list that is not complete yet.
    list: Option<Vec<Pod>>,
    /// A complete list that nobody has been told of.
    set: Option<Vec<Pod>>,
    /// What came after it: the pod as last seen, or that it is gone.
    changes: HashMap<String, Option<Pod>>,
    /// UIDs in `changes` in the order of their first appearance.
    order: Vec<String>,
}

impl Gathering {
    fn take(&mut self, event: Event<ApiPod>) {
        match event {
            Event::Init => self.list = Some(Vec::new()),
            Event::InitApply(pod) => self.list.get_or_insert_default().extend(accept(pod)),
            Event::InitDone => {
                self.set = self.list.take();
                // The list knows all that came before it.
                self.changes.clear();
                self.order.clear();
            }
            Event::Apply(pod) => {
                if let Some(pod) = accept(pod) {
                    let uid = pod.metadata.uid.clone().unwrap_or_default();
                    self.change(uid, Some(pod));
                }
            }
            Event::Delete(pod) => self.change(pod.metadata.uid.unwrap_or_default(), None),
        }
    }

    fn change(&mut self, uid: String, pod: Option<Pod>) {
        if self.changes.insert(uid.clone(), pod).is_none() {
            self.order.push(uid);
        }
    }

    /// What there is to tell, oldest first.
    fn news(&mut self) -> Vec<News> {
        let mut news: Vec<News> = self.set.take().map(News::Set).into_iter().collect();
        let mut changes = std::mem::take(&mut self.changes);
        let (mut there, mut gone) = (Vec::new(), Vec::new());
        for uid in std::mem::take(&mut self.order) {
            match changes.remove(&uid) {
                Some(Some(pod)) => there.push(pod),
                Some(None) => gone.push(uid),
                None => {}
            }
        }
        if !there.is_empty() || !gone.is_empty() {
            news.push(News::Change { there, gone });
        }
        news
    }
}

/// The pod as it is kept, or nothing if its very name is an attack: it can be neither run nor reported.
fn accept(mut pod: ApiPod) -> Option<Pod> {
    if let Some(problem) = hostile::identity(&pod.metadata) {
        tracing::error!(source = "api", "pod ignored: {problem}");
        return None;
    }
    // Half the size of many pods, and of no use here.
    pod.metadata.managed_fields = None;
    Some(Arc::new(pod))
}

#[cfg(test)]
#[path = "api_tests.rs"]
mod tests;
