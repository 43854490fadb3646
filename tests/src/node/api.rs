//! A simulated API server for the status manager: pods by name, which can be patched and deleted; it can be
//! unavailable.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use keblet::model::Pod;
use keblet::model::PodRef;
use keblet::status::manager::Answer;
use keblet::status::manager::PodApi;
use keblet::status::manager::PodApiError;
use serde_json::Value;

/// Pods of the API server. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Api(Arc<Mutex<Server>>);

#[derive(Debug, Default)]
struct Server {
    unavailable: bool,
    version: u64,
    pods: BTreeMap<String, Pod>,
    deleted: Vec<Pod>,
    /// Name of the pod and new phase, for each status update that changed it.
    phases: Vec<(String, String)>,
}

impl Api {
    /// Makes the server unavailable, or available again.
    pub fn set_unavailable(&self, unavailable: bool) {
        self.server().unavailable = unavailable;
    }

    /// Creates or replaces a pod, keeping an existing status; returns the stored pod.
    pub fn put(&self, pod: &Pod) -> Pod {
        let mut server = self.server();
        let mut pod = ApiPod::clone(pod);
        let existing = server.pods.get(name(&pod));
        pod.status = existing.and_then(|existing| existing.status.clone()).or(pod.status);
        server.store(pod)
    }

    /// The stored pod with this name.
    pub fn pod(&self, name: &str) -> Option<Pod> {
        self.server().pods.get(name).cloned()
    }

    /// Last versions of pods that were deleted.
    pub fn deleted(&self) -> Vec<Pod> {
        self.server().deleted.clone()
    }

    /// The phases that status updates have set for this pod, oldest first.
    pub fn phases_sent(&self, pod: &str) -> Vec<String> {
        self.server().phases.iter().filter(|(name, _)| name == pod).map(|(_, phase)| phase.clone()).collect()
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer<T: Send + 'static>(
        &self,
        at: &PodRef,
        work: impl FnOnce(&mut Server, ApiPod) -> T,
    ) -> Answer<'static, T> {
        let mut server = self.server();
        let result = match server.pods.get(&*at.name).cloned() {
            _ if server.unavailable => Err(PodApiError::Unanswered("connection refused".to_owned())),
            None => Err(PodApiError::NotFound),
            Some(pod) => Ok(work(&mut server, ApiPod::clone(&pod))),
        };
        Box::pin(std::future::ready(result))
    }
}

impl Server {
    fn store(&mut self, mut pod: ApiPod) -> Pod {
        self.version += 1;
        pod.metadata.resource_version = Some(self.version.to_string());
        let pod = Arc::new(pod);
        self.pods.insert(name(&pod).to_owned(), pod.clone());
        pod
    }
}

impl PodApi for Api {
    fn get<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, ApiPod> {
        self.answer(pod, |_, pod| pod)
    }

    fn patch_status<'a>(&'a self, pod: &'a PodRef, patch: &'a Value) -> Answer<'a, ApiPod> {
        self.answer(pod, |server, pod| {
            if let Some(phase) = patch["status"]["phase"].as_str() {
                server.phases.push((name(&pod).to_owned(), phase.to_owned()));
            }
            let mut value = serde_json::to_value(&pod).unwrap_or_default();
            merge(&mut value, patch);
            // A patch that gives an invalid pod changes nothing, and the test times out.
            let patched = serde_json::from_value(value).unwrap_or(pod);
            ApiPod::clone(&server.store(patched))
        })
    }

    fn delete<'a>(&'a self, at: &'a PodRef) -> Answer<'a, ()> {
        self.answer(at, |server, pod| {
            server.deleted.extend(server.pods.remove(name(&pod)));
        })
    }

    fn create<'a>(&'a self, pod: &'a ApiPod) -> Answer<'a, ApiPod> {
        let refused = PodApiError::Refused(format!("creation of {} is not simulated", name(pod)));
        Box::pin(std::future::ready(Err(refused)))
    }
}

fn name(pod: &ApiPod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// A strategic merge as far as statuses need it: objects by key, conditions by type, any other list replaced.
fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                match value {
                    Value::Null => drop(into.remove(key)),
                    value => merge(into.entry(key).or_insert(Value::Null), value),
                }
            }
        }
        (Value::Array(into), Value::Array(patch)) if patch.iter().all(|item| item.get("type").is_some()) => {
            patch.iter().for_each(|condition| merge_condition(into, condition));
        }
        (into, Value::Array(patch)) => {
            *into = patch.iter().filter(|item| item.get(DIRECTIVE).is_none()).cloned().collect();
        }
        (into, patch) => *into = patch.clone(),
    }
}

/// Key of a merge directive.
const DIRECTIVE: &str = "$patch";

fn merge_condition(into: &mut Vec<Value>, condition: &Value) {
    let existing = into.iter().position(|existing| existing["type"] == condition["type"]);
    match existing {
        Some(at) if condition.get(DIRECTIVE).is_some() => drop(into.remove(at)),
        Some(at) => merge(&mut into[at], condition),
        None => into.push(condition.clone()),
    }
}
