use bytes::Bytes;
use futures_util::StreamExt as _;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::sync::oneshot;

use super::*;
use crate::apiserver::managed_fields::WithoutManagedFields;
use crate::apiserver::pauses::FIRST_PAUSE;
use crate::apiserver::pauses::LAST_PAUSE;
use crate::apiserver::pauses::QUIET;
use crate::apiserver::streaming_lists::MOST_FAILED;

#[path = "outage_tests.rs"]
mod outage;
#[path = "undecodable_tests.rs"]
mod undecodable;
#[path = "unserved_tests.rs"]
mod unserved;

/// The server: the test answers one request after another.
struct Server {
    asked: mpsc::UnboundedReceiver<Asked>,
}

struct Asked {
    query: String,
    answer: oneshot::Sender<Response<AnswerBody>>,
}

type AnswerBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// The lines of a watch. The watch ends when this is dropped.
type Lines = mpsc::UnboundedSender<std::io::Result<Frame<Bytes>>>;

fn start() -> (Server, Api<ConfigMap>) {
    let (asking, asked) = mpsc::unbounded_channel();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (answer, answered) = oneshot::channel();
        let query = request.uri().query().unwrap_or_default().to_owned();
        asking.send(Asked { query, answer }).expect("the test is there");
        async move {
            let answer = answered.await.map_err(|_| std::io::Error::other("connection refused"))?;
            std::io::Result::Ok(answer.map(WithoutManagedFields::new))
        }
    });
    (Server { asked }, Api::all(kube::Client::new(service, "default")))
}

impl Server {
    async fn next(&mut self) -> Asked {
        tokio::time::timeout(Duration::from_secs(3600), self.asked.recv()).await.expect("a request").expect("a client")
    }
}

impl Asked {
    fn has_parameter(&self, part: &str) -> bool {
        self.query.split('&').any(|pair| pair == part)
    }

    fn json(self, status: u16, body: &Value) {
        let body = Full::from(body.to_string()).map_err(|never| match never {}).boxed_unsync();
        drop(self.answer.send(Response::builder().status(status).body(body).expect("a response")));
    }

    fn reject(self, code: u16, reason: &str) {
        self.json(code, &status(code, reason));
    }

    fn stream(self) -> Lines {
        let (lines, receiver) = mpsc::unbounded_channel();
        let body = StreamBody::new(tokio_stream::wrappers::UnboundedReceiverStream::new(receiver));
        let body = body.boxed_unsync();
        drop(self.answer.send(Response::new(body)));
        lines
    }
}

fn status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason, "code": code})
}

/// The server has not got to a resource version.
fn too_large() -> Value {
    let mut value = status(504, "Timeout");
    let cause = json!({"reason": "ResourceVersionTooLarge", "message": "Too large resource version"});
    value["details"] = json!({"causes": [cause]});
    value
}

fn list(items: &Value, version: &str, more: &str) -> Value {
    json!({"kind": "ConfigMapList", "apiVersion": "v1", "items": items,
           "metadata": {"resourceVersion": version, "continue": more}})
}

fn object(name: &str, version: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "resourceVersion": version}})
}

fn send(lines: &Lines, kind: &str, object: Value) {
    let line = format!("{}\n", json!({"type": kind, "object": object}));
    lines.send(Ok(Frame::data(Bytes::from(line)))).expect("the watch is open");
}

fn bookmark(version: &str, end: bool) -> Value {
    let annotations = if end { json!({"k8s.io/initial-events-end": "true"}) } else { json!({}) };
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"resourceVersion": version, "annotations": annotations}})
}

/// The event as text.
fn shown(event: Event<ConfigMap>) -> String {
    let name = |object: &ConfigMap| object.metadata.name.clone().unwrap_or_default();
    match event {
        Event::Init => "init".to_owned(),
        Event::InitApply(object) => format!("+{}", name(&object)),
        Event::InitKeep(object) => format!("~{}", object.name),
        Event::InitDone => "done".to_owned(),
        Event::Apply(object) => format!("={}", name(&object)),
        Event::Delete(object) => format!("-{}", object.name),
    }
}

struct Client(mpsc::UnboundedReceiver<String>);

impl Client {
    fn of(api: Api<ConfigMap>, config: Config) -> Self {
        Self::woken_by(api, config, Recovered::default())
    }

    fn woken_by(api: Api<ConfigMap>, config: Config, recovered: Recovered) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut events = std::pin::pin!(follow(api, config, recovered));
            while let Some(event) = events.next().await {
                if sender.send(shown(event)).is_err() {
                    return;
                }
            }
        });
        Self(receiver)
    }

    async fn sees(&mut self, expected: &str) {
        let mut seen = Vec::new();
        for _ in expected.split(' ') {
            let event = tokio::time::timeout(Duration::from_secs(3600), self.0.recv()).await;
            seen.push(event.unwrap_or_else(|_| panic!("only {seen:?}")).expect("an endless stream"));
        }
        assert_eq!(seen.join(" "), expected);
    }
}

/// A client that has listed one object and watches from version 10 on.
async fn watching() -> (Server, Client, Lines) {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default().fields("metadata.name=a"));
    let asked = server.next().await;
    assert!(
        asked.has_parameter("sendInitialEvents=true") && asked.has_parameter("resourceVersionMatch=NotOlderThan"),
        "{}",
        asked.query
    );
    assert!(
        asked.has_parameter("allowWatchBookmarks=true") && asked.has_parameter("fieldSelector=metadata.name%3Da"),
        "{}",
        asked.query
    );
    let lines = asked.stream();
    send(&lines, "ADDED", object("a", "9"));
    send(&lines, "BOOKMARK", bookmark("10", true));
    client.sees("init +a done").await;
    (server, client, lines)
}

#[tokio::test(start_paused = true)]
async fn a_streaming_list_continues_as_watch() {
    let (_server, mut client, lines) = watching().await;
    send(&lines, "MODIFIED", object("a", "11"));
    send(&lines, "DELETED", object("a", "12"));
    client.sees("=a -a").await;
}

#[tokio::test(start_paused = true)]
async fn watches_are_requested_for_five_to_ten_minutes() {
    let (mut server, api) = start();
    let _client = Client::of(api, Config::default());
    let mut different = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let asked = server.next().await;
        let seconds = asked.query.split('&').find_map(|pair| pair.strip_prefix("timeoutSeconds=")).expect("a timeout");
        let seconds: u32 = seconds.parse().expect("a number");
        assert!((300..600).contains(&seconds), "{seconds}");
        different.insert(seconds);
    }
    assert!(different.len() > 5, "{different:?}");
}

#[tokio::test(start_paused = true)]
async fn a_server_without_streaming_lists_gets_paginated_lists() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    server.next().await.reject(422, "Invalid");
    let asked = server.next().await;
    assert!(asked.has_parameter("resourceVersion=0") && !asked.query.contains("limit="), "{}", asked.query);
    asked.json(200, &list(&json!([object("a", "1")]), "5", "next"));
    let asked = server.next().await;
    assert!(asked.has_parameter("continue=next") && asked.has_parameter("limit=500"), "{}", asked.query);
    asked.json(200, &list(&json!([object("b", "2")]), "5", ""));
    client.sees("init +a +b done").await;
    let asked = server.next().await;
    assert!(asked.has_parameter("watch=true") && asked.has_parameter("resourceVersion=5"), "{}", asked.query);
    assert!(!asked.query.contains("sendInitialEvents"), "{}", asked.query);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_in_time_is_resumed_at_once() {
    let (mut server, mut client, lines) = watching().await;
    send(&lines, "BOOKMARK", bookmark("17", false));
    tokio::time::sleep(Duration::from_secs(250)).await;
    drop(lines);
    let ended = Instant::now();
    let asked = server.next().await;
    assert!(
        asked.has_parameter("resourceVersion=17") && ended.elapsed() < Duration::from_millis(10),
        "{}",
        asked.query
    );
    send(&asked.stream(), "MODIFIED", object("a", "18"));
    client.sees("=a").await;
}

#[tokio::test(start_paused = true)]
async fn a_broken_connection_is_waited_out_and_nothing_is_listed_twice() {
    let (mut server, mut client, lines) = watching().await;
    let broke = Instant::now();
    lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
    // An outage: no request is answered.
    for _ in 0..8 {
        drop(server.next().await);
    }
    let away = broke.elapsed();
    // 0.8 + 1.6 + 3.2 + 6.4 + 12.8 + 25.6 + 30 + 30 seconds, and up to as much again.
    assert!(away >= Duration::from_secs(110) && away <= Duration::from_secs(222), "{away:?}");
    let asked = server.next().await;
    assert!(asked.has_parameter("resourceVersion=10"), "{}", asked.query);
    let lines = asked.stream();
    send(&lines, "MODIFIED", object("a", "30"));
    client.sees("=a").await;
}

#[tokio::test(start_paused = true)]
async fn an_expired_resource_version_leads_to_a_new_list() {
    for in_stream in [true, false] {
        let (mut server, mut client, lines) = watching().await;
        if in_stream {
            send(&lines, "ERROR", status(410, "Expired"));
        } else {
            drop(lines);
            // It ended at once, so a pause comes first.
            server.next().await.reject(410, "Expired");
        }
        let asked = server.next().await;
        assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
        let lines = asked.stream();
        send(&lines, "ADDED", object("b", "40"));
        send(&lines, "BOOKMARK", bookmark("41", true));
        client.sees("init +b done").await;
    }
}

/// What its cache has may be older than what is known: objects that exist would be gone.
#[tokio::test(start_paused = true)]
async fn a_streaming_list_is_retried_if_the_server_lags_behind() {
    let (mut server, mut client, lines) = watching().await;
    send(&lines, "ERROR", status(410, "Expired"));
    for code in [504, 410] {
        let asked = server.next().await;
        assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
        let answered = Instant::now();
        asked.json(code, &if code == 504 { too_large() } else { status(code, "Expired") });
        let asked = server.next().await;
        assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
        assert!(answered.elapsed() >= FIRST_PAUSE, "{:?}", answered.elapsed());
        drop(asked);
    }
    let lines = server.next().await.stream();
    send(&lines, "ADDED", object("a", "40"));
    send(&lines, "BOOKMARK", bookmark("41", true));
    client.sees("init +a done").await;
}

#[tokio::test(start_paused = true)]
async fn the_latest_list_is_requested_in_pages_if_the_server_never_catches_up() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    for _ in 0..3 {
        let asked = server.next().await;
        assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
        asked.json(504, &too_large());
    }
    let asked = server.next().await;
    assert!(asked.has_parameter("limit=500") && !asked.query.contains("resourceVersion"), "{}", asked.query);
    asked.json(200, &list(&json!([object("a", "1")]), "5", ""));
    client.sees("init +a done").await;
}

/// As with an etcd that does not report its progress.
#[tokio::test(start_paused = true)]
async fn pages_are_requested_until_the_next_list_if_streaming_lists_fail() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    for _ in 0..3 {
        let asked = server.next().await;
        assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
        send(&asked.stream(), "ERROR", status(500, "InternalError"));
    }
    let asked = server.next().await;
    assert!(asked.has_parameter("limit=500") && !asked.query.contains("resourceVersion"), "{}", asked.query);
    asked.json(200, &list(&json!([object("a", "1")]), "5", ""));
    client.sees("init init init init +a done").await;
    send(&server.next().await.stream(), "ERROR", status(410, "Expired"));
    let asked = server.next().await;
    assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
}

#[tokio::test(start_paused = true)]
async fn a_later_list_in_pages_is_not_older_than_what_is_known() {
    let (mut server, mut client, lines) = watching().await;
    send(&lines, "MODIFIED", object("a", "20"));
    client.sees("=a").await;
    send(&lines, "ERROR", status(410, "Expired"));
    server.next().await.reject(422, "Invalid");
    let asked = server.next().await;
    assert!(asked.has_parameter("resourceVersion=20") && !asked.query.contains("limit="), "{}", asked.query);
    assert!(asked.has_parameter("resourceVersionMatch=NotOlderThan"), "{}", asked.query);
    asked.json(200, &list(&json!([object("b", "21")]), "30", ""));
    client.sees("init +b done").await;
    let asked = server.next().await;
    assert!(asked.has_parameter("watch=true") && asked.has_parameter("resourceVersion=30"), "{}", asked.query);
}

#[tokio::test(start_paused = true)]
async fn the_latest_list_is_requested_if_the_server_was_restored_to_an_earlier_state() {
    for watch_tells in [true, false] {
        let (mut server, mut client, lines) = watching().await;
        send(&lines, "ERROR", if watch_tells { too_large() } else { status(410, "Expired") });
        server.next().await.reject(422, "Invalid");
        if !watch_tells {
            let asked = server.next().await;
            assert!(asked.has_parameter("resourceVersion=10"), "{}", asked.query);
            asked.json(504, &too_large());
            client.sees("init").await;
        }
        let asked = server.next().await;
        assert!(asked.has_parameter("limit=500") && !asked.query.contains("resourceVersion"), "{}", asked.query);
        asked.json(200, &list(&json!([object("b", "2")]), "3", ""));
        client.sees("init +b done").await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_interrupted_list_is_restarted() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    let lines = server.next().await.stream();
    send(&lines, "ADDED", object("a", "1"));
    client.sees("init +a").await;
    drop(lines);
    let lines = server.next().await.stream();
    send(&lines, "ADDED", object("b", "2"));
    send(&lines, "BOOKMARK", bookmark("3", true));
    client.sees("init +b done").await;
}

/// A server that has just started may accept a watch before it can serve it.
#[tokio::test(start_paused = true)]
async fn a_watch_that_is_not_answered_is_requested_again() {
    let (mut server, mut client, lines) = watching().await;
    lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
    let unanswered = server.next().await;
    let began = Instant::now();
    let asked = server.next().await;
    assert!(asked.has_parameter("resourceVersion=10"), "{}", asked.query);
    assert!(began.elapsed() <= WATCH_SILENCE + FIRST_PAUSE * 4, "{:?}", began.elapsed());
    send(&asked.stream(), "MODIFIED", object("a", "11"));
    client.sees("=a").await;
    drop(unanswered);
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_do_not_spin() {
    let (mut server, _client, lines) = watching().await;
    drop(lines);
    let began = Instant::now();
    for _ in 0..6 {
        drop(server.next().await.stream());
    }
    assert!(began.elapsed() > Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_hanging_watch_is_given_up_when_its_end_is_overdue() {
    let (mut server, _client, lines) = watching().await;
    let began = Instant::now();
    let asked = server.next().await;
    assert!(asked.has_parameter("resourceVersion=10"), "{}", asked.query);
    assert!(began.elapsed() <= Duration::from_secs(615), "{:?}", began.elapsed());
    drop(lines);
}

#[tokio::test(start_paused = true)]
async fn failures_of_long_watches_do_not_grow_the_pause() {
    let (mut server, mut client, mut lines) = watching().await;
    for life in 0..8 {
        tokio::time::sleep(QUIET * 2).await;
        drop(lines.send(Err(std::io::Error::other("connection reset"))));
        let broken = Instant::now();
        // The restarted server does not have the resource version, which is the next error.
        let asked = server.next().await;
        assert!(
            asked.has_parameter("resourceVersion=10") && broken.elapsed() <= FIRST_PAUSE * 2,
            "{life}: {:?}",
            broken.elapsed()
        );
        asked.reject(410, "Expired");
        lines = server.next().await.stream();
        assert!(broken.elapsed() <= FIRST_PAUSE * 6, "{life}: {:?}", broken.elapsed());
        send(&lines, "BOOKMARK", bookmark("10", true));
        client.sees("init done").await;
    }
}
