//! Against a server on the loopback.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::StatusCode;
use axum::routing::get;

use crate::sources::SourcesConfig;
use crate::sources::test_watcher::Watcher;
use crate::sources::test_watcher::config;
use crate::sources::test_watcher::manifest;

/// What the server says, and what it heard.
#[derive(Default)]
struct Script {
    status: u16,
    body: String,
    requests: u64,
    tokens: Vec<String>,
}

#[derive(Clone, Default)]
struct Server(Arc<Mutex<Script>>);

impl Server {
    fn says(&self, status: u16, body: &str) {
        let mut script = self.0.lock().expect("no panic while locked");
        (script.status, script.body) = (status, body.to_owned());
    }

    fn requests(&self) -> u64 {
        self.0.lock().expect("no panic while locked").requests
    }

    /// Waits for two more requests: the first may have been answered before what was said last.
    async fn heard_again(&self) {
        let until = self.requests() + 2;
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while self.requests() < until {
            assert!(tokio::time::Instant::now() < deadline, "nobody asks any more");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn answer(State(server): State<Self>, headers: HeaderMap) -> (StatusCode, String) {
        let mut script = server.0.lock().expect("no panic while locked");
        script.requests += 1;
        let token = |value: &axum::http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
        script.tokens = headers.get_all("x-token").iter().map(token).collect();
        (StatusCode::from_u16(script.status).expect("a status"), script.body.clone())
    }
}

async fn serve(status: u16, body: &str) -> (Server, Watcher) {
    let server = Server::default();
    server.says(status, body);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/pods", listener.local_addr().expect("an address"));
    let router = Router::new().route("/pods", get(Server::answer)).with_state(server.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    let watcher = Watcher::start(SourcesConfig {
        static_pod_url: Some(url),
        static_pod_url_headers: vec![
            ("X-Token".into(), vec!["one".into(), "two".into()]),
            ("bad header".into(), vec!["x".into()]),
        ],
        http_check_frequency: Duration::from_millis(100),
        ..config()
    });
    (server, watcher)
}

fn list(names: &[&str]) -> String {
    let items: Vec<String> = names
        .iter()
        .map(|name| format!("{{\"metadata\":{{\"name\":\"{name}\"}},\"spec\":{{\"containers\":[{{\"name\":\"c\",\"image\":\"1\"}}]}}}}"))
        .collect();
    format!("{{\"apiVersion\":\"v1\",\"kind\":\"PodList\",\"items\":[{}]}}", items.join(","))
}

#[tokio::test]
async fn one_pod_then_a_list_with_headers() {
    let (server, mut watcher) = serve(200, &manifest("a", "1")).await;
    watcher.until(["a-n=1"]).await;
    assert_eq!(server.0.lock().expect("no panic while locked").tokens, ["one", "two"]);
    assert!(watcher.handle.all_ready());
    server.says(200, &list(&["b", "c"]));
    watcher.until(["b-n=1", "c-n=1"]).await;
    assert_eq!(watcher.take_log(), ["add a-n", "remove a-n", "add b-n", "add c-n"]);
}

#[tokio::test]
async fn failures_keep_the_pods() {
    let (server, mut watcher) = serve(200, &manifest("a", "1")).await;
    watcher.until(["a-n=1"]).await;
    for (status, body) in [(500, "oops"), (404, ""), (200, "kind: ["), (200, "apiVersion: v1\nkind: Service\n")] {
        server.says(status, body);
        server.heard_again().await;
    }
    // One bad item refuses the whole list.
    server.says(200, &list(&["b", "../c"]));
    server.heard_again().await;
    server.says(200, &list(&["b"]));
    watcher.until(["b-n=1"]).await;
    assert_eq!(watcher.take_log(), ["add a-n", "remove a-n", "add b-n"], "nothing in between");
}

#[tokio::test]
async fn an_empty_answer_removes_the_pods_and_the_old_one_brings_them_back() {
    let (server, mut watcher) = serve(200, &manifest("a", "1")).await;
    watcher.until(["a-n=1"]).await;
    server.says(200, "");
    watcher.until([]).await;
    server.says(200, &manifest("a", "1"));
    watcher.until(["a-n=1"]).await;
}

#[tokio::test]
async fn a_source_that_never_answers_is_never_ready() {
    let (server, mut watcher) = serve(503, "").await;
    server.heard_again().await;
    assert!(!watcher.handle.all_ready());
    server.says(200, "");
    watcher.update().await;
    assert_eq!(watcher.take_log(), ["add"], "empty, but alive");
    assert!(watcher.handle.all_ready());
}

#[tokio::test]
async fn too_much_is_refused() {
    let (server, mut watcher) = serve(200, &format!("#{}", "x".repeat(10 << 20))).await;
    server.heard_again().await;
    assert!(!watcher.handle.all_ready());
    server.says(200, &manifest("a", "1"));
    watcher.until(["a-n=1"]).await;
}
