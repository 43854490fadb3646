//! The source against a server of the test.

use std::sync::Arc;
use std::sync::Mutex;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::*;
use crate::model::testing::Buffer;
use crate::sources::SourcesConfig;
use crate::sources::test_watcher::Watcher;
use crate::sources::test_watcher::config;
use crate::sources::test_watcher::manifest;

const DEADLINE: Duration = Duration::from_secs(20);

/// What the server answers to every request.
#[derive(Clone)]
struct Answer {
    status: u16,
    location: Option<String>,
    body: String,
}

/// A server at a loopback address; ends when dropped.
struct Server {
    url: String,
    answer: Arc<Mutex<Answer>>,
    seen: Arc<Mutex<Vec<HeaderMap>>>,
    _serving: AbortOnDropHandle<()>,
}

impl Server {
    async fn with(status: u16, body: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/pods", listener.local_addr().unwrap());
        let answer = Arc::new(Mutex::new(Answer { status, location: None, body: body.to_owned() }));
        let seen: Arc<Mutex<Vec<HeaderMap>>> = Arc::default();
        let (current, log) = (answer.clone(), seen.clone());
        let router: Router = Router::new().fallback(move |headers: HeaderMap| {
            log.lock().unwrap().push(headers);
            let answer = current.lock().unwrap().clone();
            async move { answer.into_response() }
        });
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, answer, seen, _serving: AbortOnDropHandle::new(serving) }
    }

    fn answer(&self, status: u16, body: &str) {
        *self.answer.lock().unwrap() = Answer { status, location: None, body: body.to_owned() };
    }

    fn redirect_to(&self, location: &str) {
        *self.answer.lock().unwrap() = Answer { status: 302, location: Some(location.to_owned()), body: String::new() };
    }

    fn requests(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// Until the answer to a further request, begun after this call, was processed.
    async fn until_processed(&self) {
        let (wanted, end) = (self.requests() + 3, Instant::now() + DEADLINE);
        while self.requests() < wanted {
            assert!(Instant::now() < end, "no request");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Answer {
    fn into_response(self) -> Response {
        let mut response = Response::builder().status(self.status);
        if let Some(location) = self.location {
            response = response.header("location", location);
        }
        response.body(Body::from(self.body)).unwrap()
    }
}

fn source(url: &str) -> HttpSource {
    HttpSource {
        url: url.to_owned(),
        headers: Vec::new(),
        check_frequency: Duration::from_millis(100),
        node_name: "n".to_owned(),
        prevent_api_references: true,
        proxies: Proxies::default(),
    }
}

fn watch(server: &Server) -> Watcher {
    let (url, often) = (server.url.clone(), Duration::from_millis(100));
    Watcher::start(SourcesConfig { static_pod_url: Some(url), http_check_frequency: often, ..config() })
}

/// Requests of a source, one after another.
struct Requests {
    source: HttpSource,
    client: reqwest::Client,
    last: Vec<u8>,
}

impl Requests {
    fn of(source: HttpSource) -> Self {
        let client = source.client().unwrap();
        Self { source, client, last: Vec::new() }
    }

    async fn fetch(&mut self) -> Result<Option<Vec<Pod>>, FetchError> {
        self.source.fetch(&self.client, &self.source.header_map(), &mut self.last).await
    }

    /// Names of the pods, if they changed.
    async fn names(&mut self) -> Option<Vec<String>> {
        let pods = self.fetch().await.unwrap()?;
        Some(pods.iter().filter_map(|pod| pod.metadata.name.clone()).collect())
    }

    async fn error(&mut self) -> String {
        self.fetch().await.unwrap_err().to_string()
    }
}

fn some<const N: usize>(names: [&str; N]) -> Option<Vec<String>> {
    Some(names.map(str::to_owned).to_vec())
}

#[tokio::test]
async fn every_value_of_a_header_is_sent() {
    let server = Server::with(200, &manifest("a", "1")).await;
    let header = |name: &str, values: &[&str]| {
        let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        (name.to_owned(), values)
    };
    let headers = vec![
        header("X-Token", &["one", "two"]),
        header("bad name", &["x"]),
        header("X-Other", &["bad\nvalue", "good"]),
    ];
    let mut requests = Requests::of(HttpSource { headers, ..source(&server.url) });
    assert_eq!(requests.names().await, some(["a-n"]));
    let seen = server.seen.lock().unwrap().pop().unwrap();
    let sent = |name: &str| seen.get_all(name).iter().map(|value| value.to_str().unwrap()).collect::<Vec<_>>();
    assert_eq!((sent("x-token"), sent("x-other")), (vec!["one", "two"], vec!["good"]));
}

#[tokio::test]
async fn answers_other_than_200_are_errors() {
    let server = Server::with(200, "").await;
    let mut requests = Requests::of(source(&server.url));
    for (status, text) in
        [(201, "201 Created"), (202, "202 Accepted"), (404, "404 Not Found"), (503, "503 Service Unavailable")]
    {
        server.answer(status, &manifest("a", "1"));
        assert_eq!(requests.error().await, format!("{} answers {text}", server.url));
    }
    server.answer(200, &manifest("a", "1"));
    assert_eq!(requests.names().await, some(["a-n"]));
}

#[tokio::test]
async fn a_password_in_the_url_is_sent_and_not_shown() {
    let server = Server::with(404, "").await;
    let with = |password: &str| server.url.replace("http://", &format!("http://u:{password}@"));
    let mut requests = Requests::of(source(&with("hunter2")));
    assert_eq!(requests.error().await, format!("{} answers 404 Not Found", with("masked")));
    let seen = server.seen.lock().unwrap().pop().unwrap();
    assert!(seen.contains_key(http::header::AUTHORIZATION), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_costs_the_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let began = Instant::now();
    let error = Requests::of(source(&url)).fetch().await.unwrap_err();
    assert!(matches!(&error, FetchError::Request { source, .. } if source.is_timeout()), "{error}");
    assert!(began.elapsed() >= TIMEOUT && began.elapsed() < TIMEOUT * 2, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_body_is_used_once_until_it_changes() {
    let server = Server::with(200, &manifest("a", "1")).await;
    let mut requests = Requests::of(source(&server.url));
    assert_eq!(requests.names().await, some(["a-n"]));
    assert_eq!(requests.names().await, None);
    server.answer(500, "");
    requests.error().await;
    server.answer(200, &manifest("a", "1"));
    assert_eq!(requests.names().await, None, "a failure in between changes nothing");
    server.answer(200, "");
    for _ in 0..2 {
        assert_eq!(requests.error().await, format!("zero-length data received from {}", server.url));
    }
    server.answer(200, &manifest("a", "1"));
    assert_eq!(requests.names().await, some(["a-n"]), "the empty body has removed it");
    server.answer(200, "kind: Service\napiVersion: v1\n");
    let error = requests.error().await;
    let expected = format!("the answer of {} is no usable manifest: line 1: kind: Unsupported value", server.url);
    assert!(error.starts_with(&expected), "{error}");
    assert_eq!(requests.names().await, None, "it is an error once");
    server.answer(200, &(manifest("b", "1") + "---\nkind: ["));
    assert_eq!(requests.names().await, some(["b-n"]), "the first document counts");
}

/// The only thread for blocking work is occupied at first.
#[test]
fn a_body_is_not_decoded_on_a_thread_of_the_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let server = Server::with(200, &manifest("a", "1")).await;
        let mut requests = Requests::of(source(&server.url));
        let (free, freed) = std::sync::mpsc::channel::<()>();
        let occupied = tokio::task::spawn_blocking(move || freed.recv());
        let mut names = std::pin::pin!(requests.names());
        let early = tokio::time::timeout(Duration::from_millis(300), &mut names).await;
        assert!(early.is_err(), "decoded meanwhile: {early:?}");
        drop(free);
        assert_eq!(names.await, some(["a-n"]));
        occupied.await.unwrap().expect_err("the sender is gone");
    });
}

#[tokio::test]
async fn a_body_must_be_smaller_than_a_manifest_may_be() {
    let limit = usize::try_from(MAX_MANIFEST_BYTES).unwrap();
    let server = Server::with(200, &"{".repeat(limit)).await;
    let mut requests = Requests::of(source(&server.url));
    let too_big = format!("the answer of {} is too big: must be under {limit} bytes", server.url);
    assert_eq!(requests.error().await, too_big);
    server.answer(200, &"{".repeat(limit - 1));
    let error = requests.error().await;
    assert!(error.contains("is no usable manifest: line 1: is neither YAML nor JSON"), "{error}");
}

fn item(name: &str, image: &str) -> serde_json::Value {
    let containers = json!([{ "name": "c", "image": image }]);
    json!({ "metadata": { "name": name }, "spec": { "containers": containers } })
}

#[tokio::test]
async fn a_list_with_a_bad_item_is_refused_as_a_whole() {
    let list = |items| json!({ "apiVersion": "v1", "kind": "PodList", "items": items }).to_string();
    let server = Server::with(200, &list([item("a", "1"), item("b", "")])).await;
    let mut requests = Requests::of(source(&server.url));
    let error = requests.error().await;
    assert!(error.contains("items[1].spec.containers[0].image: Required value"), "{error}");
    server.answer(200, &list([item("a", "1"), item("b", "1")]));
    assert_eq!(requests.names().await, some(["a-n", "b-n"]));
    // The merge of the source takes the first of two pods with one name.
    server.answer(200, &list([item("a", "1"), item("a", "2")]));
    assert_eq!(requests.names().await, some(["a-n", "a-n"]));
}

#[tokio::test]
async fn pods_stay_while_the_server_fails_and_go_with_an_empty_body() {
    let server = Server::with(200, &manifest("a", "1")).await;
    let mut watcher = watch(&server);
    watcher.until(["a-n=1"]).await;
    for (status, body) in [(500, String::new()), (200, "kind: [".to_owned()), (404, manifest("b", "1"))] {
        server.answer(status, &body);
        server.until_processed().await;
    }
    server.answer(200, "");
    watcher.until([]).await;
    server.answer(200, &manifest("a", "1"));
    watcher.until(["a-n=1"]).await;
    assert_eq!(watcher.take_log(), ["add a-n", "remove a-n", "add a-n"]);
}

/// A proxy that refuses connections: the port was free a moment ago.
async fn closed_proxy() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

fn through(proxy: &str) -> Proxies {
    Proxies::from_variables(|name| (name == "HTTP_PROXY").then(|| proxy.to_owned()))
}

#[tokio::test]
async fn a_url_at_a_loopback_address_needs_no_proxy() {
    let server = Server::with(200, &manifest("a", "1")).await;
    let proxies = through(&closed_proxy().await);
    let mut requests = Requests::of(HttpSource { proxies: proxies.clone(), ..source(&server.url) });
    assert_eq!(requests.names().await, some(["a-n"]));
    let mut requests = Requests::of(HttpSource { proxies, ..source("http://pods.example/") });
    assert!(requests.error().await.starts_with("cannot get http://pods.example/: "));
    assert_eq!(server.requests(), 1);
}

#[tokio::test]
async fn a_redirect_may_lead_from_the_proxy_to_a_loopback_address() {
    let (proxy, server) = (Server::with(200, &manifest("a", "1")).await, Server::with(200, &manifest("b", "1")).await);
    let proxies = through(proxy.url.trim_end_matches("/pods"));
    let mut requests = Requests::of(HttpSource { proxies, ..source("http://pods.example/") });
    assert_eq!(requests.names().await, some(["a-n"]));
    assert_eq!(proxy.seen.lock().unwrap()[0]["host"], "pods.example");
    proxy.redirect_to(&server.url);
    assert_eq!(requests.names().await, some(["b-n"]));
    assert_eq!((proxy.requests(), server.requests()), (2, 1));
}

#[test]
fn failures_in_a_row_are_logged_up_to_a_limit() {
    let buffer = Buffer::default();
    let writer = buffer.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let error = FetchError::Empty { url: "http://pods.example/".to_owned() };
    tracing::subscriber::with_default(lines, || (1..=20).for_each(|failures| report(&error, failures)));
    let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), usize::try_from(LOGGED_FAILURES).unwrap(), "{text}");
    assert!(lines.iter().all(|line| line.contains("zero-length data received from http://pods.example/")), "{text}");
    let announced = lines.iter().position(|line| line.contains("further failures are not logged"));
    assert_eq!(announced, Some(lines.len() - 1), "{text}");
}
