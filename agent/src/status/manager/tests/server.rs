//! A simulated API server with pods only and scripted faults.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::strategic;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::status::ApiCopies;
use crate::status::manager::Answer;
use crate::status::manager::PodApi;
use crate::status::manager::PodApiError;

/// The fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// None.
    None,
    /// The call is executed, its answer is lost.
    LostAnswer,
    /// The call is executed, its answer cannot be decoded.
    Undecodable,
    /// The call is lost.
    LostCall,
    /// 409 without being executed.
    Conflict,
    /// 403.
    Refused,
    /// 403, after this time.
    SlowlyRefused(Duration),
    /// 500 without being executed.
    Failed,
    /// 404 without being executed, as of a proxy that has lost its API servers.
    NotFound,
    /// It takes this long and succeeds.
    Slow(Duration),
}

/// One call as it arrived.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    pub at: Instant,
    pub verb: &'static str,
    pub name: String,
    pub body: Value,
}

#[derive(Default)]
struct Inner {
    version: u64,
    pods: BTreeMap<String, Pod>,
    /// Copies delivered by the watch, by UID on the node.
    shown: BTreeMap<PodUid, Pod>,
    faults: VecDeque<Fault>,
    calls: Vec<Call>,
    under_way: usize,
    most_under_way: usize,
    /// Status field that this server does not keep.
    dropped_field: Option<&'static str>,
}

/// The server and the watch of it. Clones share it.
#[derive(Clone)]
pub(super) struct Server {
    inner: Arc<Mutex<Inner>>,
    changes: watch::Sender<u64>,
}

impl Server {
    pub(super) fn new() -> Self {
        Self { inner: Arc::default(), changes: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no test panics here")
    }

    /// Creates the pod and delivers it to the watch.
    pub(super) fn put(&self, pod: Pod) {
        self.put_unseen(pod);
        self.show();
    }

    /// Creates the pod without delivering it to the watch.
    pub(super) fn put_unseen(&self, mut pod: Pod) {
        let mut inner = self.lock();
        inner.version += 1;
        pod.metadata.resource_version = Some(inner.version.to_string());
        inner.pods.insert(pod.metadata.name.clone().expect("a name"), pod);
    }

    /// The watch catches up.
    pub(super) fn show(&self) {
        let mut inner = self.lock();
        let shown =
            inner.pods.values().map(|pod| (PodUid::from(pod.metadata.uid.clone().expect("a UID")), pod.clone()));
        inner.shown = shown.collect();
    }

    /// `name` is the mirror pod of the static pod with this UID.
    pub(super) fn show_as(&self, name: &str, uid: &str) {
        let mut inner = self.lock();
        let pod = inner.pods[name].clone();
        inner.shown.insert(PodUid::from(uid), pod);
    }

    /// Faults of the next calls, one each.
    pub(super) fn script(&self, faults: &[Fault]) {
        self.lock().faults.extend(faults);
    }

    /// The server drops this status field, as with its feature gate off.
    pub(super) fn drop_field(&self, field: &'static str) {
        self.lock().dropped_field = Some(field);
    }

    pub(super) fn pod(&self, name: &str) -> Option<Pod> {
        self.lock().pods.get(name).cloned()
    }

    pub(super) fn remove(&self, name: &str) {
        self.lock().pods.remove(name);
    }

    pub(super) fn phase(&self, name: &str) -> String {
        self.pod(name).and_then(|pod| pod.status?.phase).unwrap_or_default()
    }

    pub(super) fn calls(&self) -> Vec<Call> {
        self.lock().calls.clone()
    }

    pub(super) fn verbs(&self) -> Vec<&'static str> {
        self.lock().calls.iter().map(|call| call.verb).collect()
    }

    pub(super) fn most_under_way(&self) -> usize {
        self.lock().most_under_way
    }

    /// Waits until `met`.
    pub(super) async fn until(&self, met: impl Fn(&Self) -> bool) {
        let mut changes = self.changes.subscribe();
        let wait = async {
            while !met(self) {
                changes.changed().await.expect("the server lives");
            }
        };
        tokio::time::timeout(Duration::from_secs(600), wait).await.expect("condition not met in time");
    }

    async fn call<T>(
        &self,
        verb: &'static str,
        name: &str,
        body: Value,
        work: impl FnOnce(&mut Inner) -> Result<T, PodApiError>,
    ) -> Result<T, PodApiError> {
        let fault = {
            let mut inner = self.lock();
            inner.calls.push(Call { at: Instant::now(), verb, name: name.to_owned(), body });
            inner.under_way += 1;
            inner.most_under_way = inner.most_under_way.max(inner.under_way);
            inner.faults.pop_front().unwrap_or(Fault::None)
        };
        let takes = match fault {
            Fault::Slow(time) | Fault::SlowlyRefused(time) => time,
            _ => Duration::from_millis(1),
        };
        tokio::time::sleep(takes).await;
        let mut inner = self.lock();
        inner.under_way -= 1;
        let result = match fault {
            Fault::None | Fault::Slow(_) => work(&mut inner),
            Fault::LostAnswer => work(&mut inner).and(Err(PodApiError::Unanswered("lost".into()))),
            Fault::Undecodable => work(&mut inner).and(Err(PodApiError::Undecodable("startTime".into()))),
            Fault::LostCall => Err(PodApiError::Unanswered("refused".into())),
            Fault::Conflict => Err(PodApiError::Conflict("changed".into())),
            Fault::Refused | Fault::SlowlyRefused(_) => Err(PodApiError::Refused("403".into())),
            Fault::Failed => Err(PodApiError::Failed("500".into())),
            Fault::NotFound => Err(PodApiError::NotFound),
        };
        drop(inner);
        self.changes.send_modify(|count| *count += 1);
        result
    }
}

impl Inner {
    fn patch(&mut self, name: &str, patch: &Value) -> Result<Pod, PodApiError> {
        self.version += 1;
        let version = self.version.to_string();
        let pod = self.pods.get_mut(name).ok_or(PodApiError::NotFound)?;
        if patch["metadata"]["uid"].as_str() != pod.metadata.uid.as_deref() {
            return Err(PodApiError::Conflict("another UID".into()));
        }
        let mut status = serde_json::to_value(&pod.status).expect("a status");
        strategic::apply(&mut status, &patch["status"]);
        if let (Some(field), Some(fields)) = (self.dropped_field, status.as_object_mut()) {
            fields.remove(field);
        }
        pod.status = Some(serde_json::from_value(status).expect("a status"));
        pod.metadata.resource_version = Some(version);
        Ok(pod.clone())
    }

    fn delete(&mut self, pod: &PodRef) -> Result<(), PodApiError> {
        let known = self.pods.get(&*pod.name).ok_or(PodApiError::NotFound)?;
        if known.metadata.uid.as_deref() != Some(pod.uid.as_str()) {
            return Err(PodApiError::Conflict("another UID".into()));
        }
        self.pods.remove(&*pod.name);
        Ok(())
    }
}

impl PodApi for Server {
    fn get<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, Pod> {
        Box::pin(self.call("get", &pod.name, Value::Null, |inner| {
            inner.pods.get(&*pod.name).cloned().ok_or(PodApiError::NotFound)
        }))
    }

    fn patch_status<'a>(&'a self, pod: &'a PodRef, patch: &'a Value) -> Answer<'a, Pod> {
        Box::pin(self.call("patch", &pod.name, patch.clone(), |inner| inner.patch(&pod.name, patch)))
    }

    fn delete<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, ()> {
        Box::pin(self.call("delete", &pod.name, Value::Null, |inner| inner.delete(pod)))
    }

    fn create<'a>(&'a self, pod: &'a Pod) -> Answer<'a, Pod> {
        let name = pod.metadata.name.clone().unwrap_or_default();
        Box::pin(async move {
            self.call("create", &name.clone(), Value::Null, |inner| {
                inner.pods.insert(name, pod.clone());
                Ok(pod.clone())
            })
            .await
        })
    }
}

impl ApiCopies for Server {
    fn api_copy(&self, uid: &PodUid) -> Option<crate::model::Pod> {
        self.lock().shown.get(uid).cloned().map(Arc::new)
    }
}
