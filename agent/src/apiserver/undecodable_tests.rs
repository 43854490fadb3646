//! Objects that the API server accepts and the agent's types cannot represent.

use tracing::Level;

use super::*;
use crate::model::testing::LogCount;

/// A time that the API server accepts and the agent's types cannot represent.
const BEYOND: &str = "9999-12-31T23:59:59Z";

fn undecodable(name: &str, version: &str) -> Value {
    let mut object = object(name, version);
    object["metadata"]["uid"] = json!(format!("{name}-uid"));
    object["metadata"]["creationTimestamp"] = json!(BEYOND);
    object
}

#[tokio::test(start_paused = true)]
async fn managed_fields_hide_no_object() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    let lines = server.next().await.stream();
    let mut odd = object("b", "2");
    odd["metadata"]["managedFields"] = json!([{"manager": "m", "operation": "Update", "time": BEYOND}]);
    send(&lines, "ADDED", object("a", "1"));
    send(&lines, "ADDED", odd.clone());
    send(&lines, "ADDED", object("c", "3"));
    send(&lines, "BOOKMARK", bookmark("4", true));
    client.sees("init +a +b +c done").await;
    send(&lines, "MODIFIED", odd);
    client.sees("=b").await;
}

/// Counts the log lines about objects that cannot be decoded.
fn count_logged() -> LogCount {
    LogCount::start("keblet::apiserver::decode", Level::TRACE)
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_decoded_hides_no_other_and_counts_as_present() {
    let logged = count_logged();
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    let list = |lines: &Lines| {
        send(lines, "ADDED", object("a", "1"));
        send(lines, "ADDED", undecodable("b", "2"));
        send(lines, "ADDED", object("c", "3"));
        send(lines, "BOOKMARK", bookmark("4", true));
    };
    let lines = server.next().await.stream();
    list(&lines);
    client.sees("init +a ~b +c done").await;
    send(&lines, "MODIFIED", undecodable("b", "5"));
    send(&lines, "MODIFIED", object("a", "6"));
    send(&lines, "MODIFIED", undecodable("b", "7"));
    client.sees("=a").await;
    // The watch goes on from the version of the object that is ignored.
    drop(lines);
    let asked = server.next().await;
    assert!(asked.has_parameter("resourceVersion=7"), "{}", asked.query);
    asked.reject(410, "Expired");
    let lines = server.next().await.stream();
    list(&lines);
    client.sees("init +a ~b +c done").await;
    assert_eq!(logged.lines(), 1, "one line, however often it is received");
    send(&lines, "DELETED", undecodable("b", "8"));
    client.sees("-b").await;
}

/// A pod can be deleted with so long a grace period that the end of it is beyond the times that can be decoded.
#[tokio::test(start_paused = true)]
async fn an_object_that_is_to_be_deleted_and_cannot_be_decoded_counts_as_gone() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    let lines = server.next().await.stream();
    send(&lines, "ADDED", object("a", "1"));
    send(&lines, "BOOKMARK", bookmark("2", true));
    client.sees("init +a done").await;
    let mut deleted = object("a", "3");
    deleted["metadata"]["deletionTimestamp"] = json!(BEYOND);
    send(&lines, "MODIFIED", deleted.clone());
    client.sees("-a").await;
    // It is known again when it can be decoded.
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    send(&lines, "MODIFIED", deleted);
    client.sees("=a").await;
}

#[tokio::test(start_paused = true)]
async fn an_object_may_be_followed_without_the_fields_that_cannot_be_decoded() {
    let logged = count_logged();
    let (mut server, api) = start();
    let mut events = std::pin::pin!(follow_in_part(api, Config::default(), Recovered::default()).map(shown));
    let test = async {
        let lines = server.next().await.stream();
        send(&lines, "ADDED", undecodable("a", "1"));
        send(&lines, "BOOKMARK", bookmark("2", true));
        send(&lines, "MODIFIED", undecodable("a", "3"));
        let mut whole = undecodable("b", "4");
        whole["metadata"]["finalizers"] = json!([1]);
        send(&lines, "ADDED", whole);
        send(&lines, "MODIFIED", object("a", "5"));
        std::future::pending::<()>().await;
    };
    let seen = async {
        let mut seen = Vec::new();
        for _ in 0..5 {
            seen.extend(events.next().await);
        }
        seen
    };
    let seen = tokio::select! {
        seen = seen => seen,
        () = test => Vec::new(),
    };
    assert_eq!(seen, ["init", "+a", "done", "=a", "=a"], "of b nothing is left");
    assert_eq!(logged.lines(), 2, "one line for each object");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_decoded_hides_no_other_of_a_list_in_pages() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    server.next().await.reject(422, "Invalid");
    let items = json!([object("a", "1"), undecodable("b", "2"), object("c", "3")]);
    server.next().await.json(200, &list(&items, "5", ""));
    client.sees("init +a ~b +c done").await;
    let asked = server.next().await;
    assert!(asked.has_parameter("watch=true") && asked.has_parameter("resourceVersion=5"), "{}", asked.query);
}
