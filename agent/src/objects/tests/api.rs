//! A scripted API server: single objects with watches, tokens, services. Records requests, and fails on demand.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::model::Clock;

type Out = UnsyncBoxBody<Bytes, Infallible>;

/// A watch and the sender of its frames.
type Watcher = (String, mpsc::UnboundedSender<Result<Frame<Bytes>, Infallible>>);

pub(crate) struct State {
    /// Objects by `configmaps/ns/name`; at most one service, `services`.
    pub(super) objects: BTreeMap<String, Value>,
    /// What the watch cache has, from which GETs of `resourceVersion=0` are answered, if it lags behind.
    lagging: Option<BTreeMap<String, Value>>,
    /// How long a GET is in progress after its answer was made.
    pub(crate) delay: Duration,
    version: u64,
    watchers: Vec<Watcher>,
    /// Every request as `GET path?query`.
    pub(crate) requests: Vec<String>,
    /// Connections are refused.
    pub(crate) away: bool,
    /// Requests for tokens are never answered.
    pub(crate) silent: bool,
    /// This many further requests are answered with 403.
    pub(crate) refusals: usize,
    /// Streaming lists are not supported.
    pub(crate) old: bool,
    /// Streaming lists are accepted, and fail with this status.
    pub(super) failing: Option<u16>,
    /// Streaming lists are accepted, and nothing is sent.
    pub(super) mute: bool,
    /// Lists have no resource version.
    pub(super) unversioned: bool,
    /// The next watch of an object from a resource version fails: the version is too old.
    pub(super) stale: bool,
    /// All watches of objects are answered with 403, also streaming lists that are supported.
    pub(super) unwatchable: bool,
    /// All lists of objects are answered with 403.
    pub(super) unlistable: bool,
    pub(crate) tokens: usize,
    /// The last request for a token.
    pub(crate) last_token: Value,
    /// Versions of `certificates.k8s.io` and the resources in them.
    pub(crate) certificates: BTreeMap<&'static str, Vec<&'static str>>,
}

/// The server, shared with the test.
#[derive(Clone)]
pub(crate) struct Api(Arc<Mutex<State>>, Clock);

impl Api {
    pub(crate) fn new(clock: Clock) -> Self {
        let state = State {
            objects: BTreeMap::new(),
            lagging: None,
            delay: Duration::ZERO,
            version: 100,
            watchers: Vec::new(),
            requests: Vec::new(),
            away: false,
            silent: false,
            refusals: 0,
            old: false,
            failing: None,
            mute: false,
            unversioned: false,
            stale: false,
            unwatchable: false,
            unlistable: false,
            tokens: 0,
            last_token: Value::Null,
            certificates: BTreeMap::new(),
        };
        Self(Arc::new(Mutex::new(state)), clock)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("unpoisoned")
    }

    pub(crate) fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move { api.answer(request).await }
        });
        Client::new(service, "default")
    }

    /// Creates or changes an object, and notifies its watches.
    pub(crate) fn put(&self, key: &str, mut object: Value) {
        let mut state = self.state();
        state.version += 1;
        let (namespace, name) = split(key);
        let kind = match key.split('/').next() {
            Some("secrets") => "Secret",
            Some("serviceaccounts") => "ServiceAccount",
            _ => "ConfigMap",
        };
        object["apiVersion"] = json!("v1");
        object["kind"] = json!(kind);
        let mut metadata = json!({"name": name, "namespace": namespace, "resourceVersion": state.version.to_string(),
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "long"}});
        if let (Some(all), Some(given)) = (metadata.as_object_mut(), object["metadata"].as_object()) {
            all.extend(given.clone());
        }
        object["metadata"] = metadata;
        let word = if state.objects.insert(key.to_owned(), object.clone()).is_some() { "MODIFIED" } else { "ADDED" };
        state.send(key, word, &object);
    }

    /// Creates or changes a RuntimeClass; its watch gets it only if `announced`.
    pub(super) fn put_class(&self, name: &str, handler: &str, announced: bool) {
        let mut state = self.state();
        state.version += 1;
        let object = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": handler,
            "metadata": {"name": name, "resourceVersion": state.version.to_string()}});
        if announced {
            state.send("runtimeclasses/", "ADDED", &object);
        }
        state.objects.insert(format!("runtimeclasses/{name}"), object);
    }

    pub(crate) fn delete(&self, key: &str) {
        let mut state = self.state();
        if let Some(object) = state.objects.remove(key) {
            state.version += 1;
            state.send(key, "DELETED", &object);
            state.send(&collection(key), "DELETED", &object);
        }
    }

    /// Creates or changes an object of `certificates.k8s.io`, and notifies the watch of its collection; `metadata` has at
    /// least its name.
    pub(crate) fn put_certificate_object(&self, plural: &str, kind: &str, mut object: Value) {
        let mut state = self.state();
        state.version += 1;
        object["apiVersion"] = json!("certificates.k8s.io/v1beta1");
        object["kind"] = json!(kind);
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let key = format!("{plural}/{}", object["metadata"]["name"].as_str().expect("a name"));
        let word = if state.objects.insert(key.clone(), object.clone()).is_some() { "MODIFIED" } else { "ADDED" };
        state.send(&collection(&key), word, &object);
    }

    /// All PodCertificateRequests.
    pub(crate) fn certificate_requests(&self) -> Vec<Value> {
        let state = self.state();
        let requests = state.objects.iter().filter(|(key, _)| key.starts_with(REQUESTS));
        requests.map(|(_, object)| object.clone()).collect()
    }

    /// Answers a PodCertificateRequest as its signer does.
    pub(crate) fn answer_certificate_request(&self, name: &str, status: Value) {
        let mut object = self.state().objects.get(&format!("{REQUESTS}{name}")).expect("a request").clone();
        object["status"] = status;
        self.put_certificate_object(REQUESTS.trim_end_matches('/'), "PodCertificateRequest", object);
    }

    /// The watch cache receives no further change.
    pub(super) fn lag(&self) {
        let mut state = self.state();
        state.lagging = Some(state.objects.clone());
    }

    /// Begins or ends an outage; ends all watches.
    pub(crate) fn away(&self, away: bool) {
        let mut state = self.state();
        state.away = away;
        state.watchers.clear();
    }

    /// Number of open watches of single objects.
    pub(crate) fn watches(&self) -> usize {
        let mut state = self.state();
        state.watchers.retain(|(_, sender)| !sender.is_closed());
        state.watchers.iter().filter(|(key, _)| key != "services" && !key.ends_with('/')).count()
    }

    /// Requests since they were last taken, those about services left out.
    pub(crate) fn take_requests(&self) -> Vec<String> {
        let all = std::mem::take(&mut self.state().requests);
        all.into_iter().filter(|request| !request.contains("services")).collect()
    }

    async fn answer(&self, request: Request<Body>) -> Result<Response<Out>, std::io::Error> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        {
            let mut state = self.state();
            state.requests.push(format!("{} {path}?{query}", parts.method));
            if state.away {
                return Err(std::io::Error::other("connection refused"));
            }
            if state.refusals > 0 {
                state.refusals -= 1;
                return Ok(status(403, "Forbidden", "no relationship found between node and this object"));
            }
        }
        let is_silent = self.state().silent;
        if is_silent && path.ends_with("/token") {
            std::future::pending::<()>().await;
        }
        if parts.method == Method::POST {
            let body = body.collect_bytes().await.expect("a body");
            let body = serde_json::from_slice(&body).expect("JSON");
            return Ok(match path.ends_with("podcertificaterequests") {
                true => self.certificate_request(body),
                false => self.token(&body),
            });
        }
        let answer = self.read(&path, &query);
        let delay = self.state().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        Ok(answer)
    }

    fn read(&self, path: &str, query: &str) -> Response<Out> {
        let mut state = self.state();
        let field = query.split('&').find_map(|part| part.strip_prefix("fieldSelector=metadata.name%3D"));
        if let Some(version) = path.strip_prefix("/apis/certificates.k8s.io/").filter(|version| !version.contains('/'))
        {
            let Some(resources) = state.certificates.get(version) else { return status(404, "NotFound", "not found") };
            let resource =
                |name| json!({"name": name, "singularName": "", "namespaced": false, "kind": "K", "verbs": ["watch"]});
            let resources: Vec<Value> = resources.iter().map(resource).collect();
            return say(&json!({"groupVersion": format!("certificates.k8s.io/{version}"), "resources": resources}));
        }
        let mut rest = match path.strip_prefix("/apis/certificates.k8s.io/") {
            Some(rest) => rest.split_once('/').map_or("", |(_, rest)| rest),
            None => path.trim_start_matches("/api/v1/").trim_start_matches("/apis/node.k8s.io/v1/"),
        }
        .split('/');
        let key = match (rest.next(), rest.next(), rest.next(), rest.next().or(field)) {
            (Some("namespaces"), Some(namespace), Some(kind), Some(name)) => format!("{kind}/{namespace}/{name}"),
            (Some("services"), ..) => "services".to_owned(),
            (Some("runtimeclasses"), name, ..) => format!("runtimeclasses/{}", name.unwrap_or_default()),
            (Some(plural @ ("clustertrustbundles" | "podcertificaterequests")), None, ..) => format!("{plural}/"),
            _ => panic!("unexpected {path}?{query}"),
        };
        if !query.contains("watch=true") {
            if state.unlistable && field.is_some() {
                return status(403, "Forbidden", "cannot list");
            }
            let lagging = state.lagging.as_ref().filter(|_| query == "resourceVersion=0");
            return match (field, lagging.unwrap_or(&state.objects).get(&key).cloned()) {
                (None, Some(object)) => say(&object),
                (None, None) => status(404, "NotFound", "not found"),
                (Some(_), object) => {
                    let items: Vec<Value> = object.into_iter().collect();
                    let version = (!state.unversioned).then(|| state.version.to_string());
                    say(&json!({"metadata": {"resourceVersion": version}, "items": items}))
                }
            };
        }
        let initial = query.contains("sendInitialEvents=true");
        if initial && state.old && key != "services" {
            return status(
                422,
                "Invalid",
                "sendInitialEvents is forbidden for watch unless the feature gate is enabled",
            );
        }
        if state.unwatchable && key != "services" {
            return status(403, "Forbidden", "cannot watch");
        }
        if let Some(code) = state.failing.filter(|_| initial && key != "services") {
            return say(&json!({"type": "ERROR", "object": failure(code, "InternalError", "scripted")}));
        }
        if state.mute && initial && key != "services" {
            let silence = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
            return Response::new(StreamBody::new(silence).boxed_unsync());
        }
        if state.stale && !initial && key != "services" {
            state.stale = false;
            return status(410, "Expired", "too old resource version");
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        state.watchers.push((key.clone(), sender));
        if initial {
            let of_key = |name: &String| *name == key || (key.ends_with('/') && name.starts_with(&key));
            let all: Vec<Value> =
                state.objects.iter().filter(|(name, _)| of_key(name)).map(|(_, o)| o.clone()).collect();
            all.iter().for_each(|object| state.send(&key, "ADDED", object));
            let bookmark = json!({"apiVersion": "v1", "kind": "X", "metadata": {"resourceVersion": state.version.to_string(),
                "annotations": {"k8s.io/initial-events-end": "true"}}});
            state.send(&key, "BOOKMARK", &bookmark);
        }
        Response::new(StreamBody::new(UnboundedReceiverStream::new(receiver)).boxed_unsync())
    }

    fn certificate_request(&self, mut asked: Value) -> Response<Out> {
        let count = self.certificate_requests().len();
        asked["metadata"]["name"] =
            json!(format!("{}{count}", asked["metadata"]["generateName"].as_str().expect("a prefix")));
        self.put_certificate_object(REQUESTS.trim_end_matches('/'), "PodCertificateRequest", asked.clone());
        say(&asked)
    }

    fn token(&self, asked: &Value) -> Response<Out> {
        let mut state = self.state();
        state.tokens += 1;
        state.last_token = asked.clone();
        let seconds = asked["spec"]["expirationSeconds"].as_u64().unwrap_or(3600);
        let expires = Timestamp::try_from(self.1.wall() + Duration::from_secs(seconds)).expect("in range");
        let mut answer = asked.clone();
        answer["spec"]["expirationSeconds"] = seconds.into();
        answer["status"] =
            json!({"token": format!("token-{}", state.tokens), "expirationTimestamp": expires.to_string()});
        say(&answer)
    }
}

impl State {
    fn send(&mut self, key: &str, word: &str, object: &Value) {
        let line = Bytes::from(format!("{}\n", json!({"type": word, "object": object})));
        for (_, sender) in self.watchers.iter().filter(|(watched, _)| watched == key) {
            let _ = sender.send(Ok(Frame::data(line.clone())));
        }
    }
}

const REQUESTS: &str = "podcertificaterequests/";

/// The key of the watch of all objects of a kind.
fn collection(key: &str) -> String {
    format!("{}/", key.split('/').next().unwrap_or_default())
}

fn split(key: &str) -> (&str, &str) {
    let mut parts = key.split('/').skip(1);
    (parts.next().expect("a namespace"), parts.next().expect("a name"))
}

fn say(object: &Value) -> Response<Out> {
    Response::new(Full::new(Bytes::from(object.to_string())).boxed_unsync())
}

fn failure(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
        "message": message})
}

fn status(code: u16, reason: &str, message: &str) -> Response<Out> {
    let mut response = say(&failure(code, reason, message));
    *response.status_mut() = http::StatusCode::from_u16(code).expect("a code");
    response
}
