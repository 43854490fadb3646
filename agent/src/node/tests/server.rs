//! A simulated API server with Nodes and Leases: merges patches and returns scripted errors.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;

use http::Method;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;

/// A received request.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) what: String,
    pub(super) body: Value,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    asked: Vec<Asked>,
    /// A field of every status that is not stored.
    dropped: Option<&'static str>,
    /// Scripted responses by method: a status code, or none.
    failures: VecDeque<(Method, Option<u16>)>,
}

/// The server. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Server(Arc<Mutex<State>>);

pub(super) const NODE: &str = "/api/v1/nodes/n";
pub(super) const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n";

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panics while it holds the server")
    }

    /// A client of the server.
    pub(super) fn client(&self) -> Client {
        let server = self.clone();
        let answer = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        Client::new(answer, "default")
    }

    /// Stores an object as another client.
    pub(super) fn put(&self, path: &str, object: Value) {
        self.state().store(path, object);
    }

    /// Deletes an object as another client.
    pub(super) fn delete(&self, path: &str) {
        self.state().objects.remove(path);
    }

    /// The stored object.
    pub(super) fn get(&self, path: &str) -> Value {
        self.state().objects.get(path).cloned().unwrap_or(Value::Null)
    }

    /// The next request of this method fails with this status; with `None` it gets no response.
    pub(super) fn fail(&self, method: Method, code: Option<u16>) {
        self.state().failures.push_back((method, code));
    }

    /// This field of a status is not stored: its feature gate is off.
    pub(super) fn drop_field(&self, field: &'static str) {
        self.state().dropped = Some(field);
    }

    /// Takes the requests received since the last call.
    pub(super) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state().asked)
    }

    /// Takes the requests without bodies.
    pub(super) fn calls(&self) -> Vec<String> {
        self.asked().into_iter().map(|asked| asked.what).collect()
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let bytes = body.collect().await.expect("bodies are in memory").to_bytes();
        let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let path = parts.uri.path().to_owned();
        let failures = self.state().receive(&parts.method, &path, &body);
        match failures {
            Some(None) => std::future::pending().await,
            Some(Some(code)) => reply(code, status(code)),
            None => self.state().perform(&parts.method, &path, body),
        }
    }
}

impl State {
    fn receive(&mut self, method: &Method, path: &str, body: &Value) -> Option<Option<u16>> {
        self.asked.push(Asked { what: format!("{method} {path}"), body: body.clone() });
        let index = self.failures.iter().position(|(troubled, _)| troubled == method)?;
        self.failures.remove(index).map(|(_, code)| code)
    }

    fn store(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if let (Some(field), Some(status)) = (self.dropped, object.get_mut("status").and_then(Value::as_object_mut)) {
            status.remove(field);
        }
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.version));
        }
        self.objects.insert(path.to_owned(), object.clone());
        object
    }

    fn perform(&mut self, method: &Method, path: &str, body: Value) -> Response<Body> {
        let object = path.strip_suffix("/status").unwrap_or(path).to_owned();
        let name = body["metadata"]["name"].as_str().unwrap_or_default();
        let created = format!("{path}/{name}");
        let known = self.objects.get(&object).cloned();
        match (method.as_str(), known) {
            ("POST", _) if self.objects.contains_key(&created) => reply(409, status(409)),
            ("POST", _) => reply(201, self.store(&created, body)),
            (_, None) => reply(404, status(404)),
            ("GET", Some(known)) => reply(200, known),
            ("PUT", Some(known)) if known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] => {
                reply(409, status(409))
            }
            ("PUT", Some(_)) => reply(200, self.store(&object, body)),
            ("PATCH", Some(mut known)) => {
                merge(&mut known, &body);
                reply(200, self.store(&object, known))
            }
            _ => reply(405, status(405)),
        }
    }
}

fn status(code: u16) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "", "message": "scripted" })
}

fn reply(code: u16, body: Value) -> Response<Body> {
    let body = Body::from(serde_json::to_vec(&body).expect("JSON"));
    Response::builder().status(code).body(body).expect("a response")
}

/// A strategic merge for Nodes: conditions by type, addresses by replacement.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (field, value) in fields {
        match (field.as_str(), value) {
            (_, Value::Null) => drop(target.as_object_mut().expect("an object").remove(field)),
            ("conditions", Value::Array(entries)) => merge_by_type(&mut target[field], entries),
            ("addresses", Value::Array(entries)) => {
                let all = entries.iter().filter(|entry| entry.get("$patch").is_none()).cloned();
                target[field] = all.collect();
            }
            _ => merge(&mut target[field], value),
        }
    }
}

fn merge_by_type(target: &mut Value, entries: &[Value]) {
    if !target.is_array() {
        *target = json!([]);
    }
    let list = target.as_array_mut().expect("an array");
    for entry in entries {
        match list.iter_mut().find(|known| known["type"] == entry["type"]) {
            Some(known) => merge(known, entry),
            None => list.push(entry.clone()),
        }
    }
}
