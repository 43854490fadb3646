//! Requests that are accepted and not served, or not permitted.

use tracing::Level;

use super::*;
use crate::model::testing::LogCount;

async fn asks_for_a_streaming_list(server: &mut Server) -> Asked {
    let asked = server.next().await;
    assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
    asked
}

/// What the server has cached is enough: the network of many nodes may have been silent.
async fn asks_for_what_is_cached(server: &mut Server) {
    let asked = server.next().await;
    assert!(asked.has_parameter("resourceVersion=0") && !asked.query.contains("watch="), "{}", asked.query);
    asked.json(200, &list(&json!([object("a", "1")]), "5", ""));
}

/// As through a proxy that collects an answer before it hands it on.
#[tokio::test(start_paused = true)]
async fn pages_are_requested_until_the_next_list_if_streaming_lists_stay_silent() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    let (silent, began) = (asks_for_a_streaming_list(&mut server).await.stream(), Instant::now());
    asks_for_what_is_cached(&mut server).await;
    assert!(began.elapsed() <= WATCH_SILENCE + FIRST_PAUSE * 2, "{:?}", began.elapsed());
    client.sees("init init +a done").await;
    send(&server.next().await.stream(), "ERROR", status(410, "Expired"));
    asks_for_a_streaming_list(&mut server).await;
    drop(silent);
}

#[tokio::test(start_paused = true)]
async fn pages_are_requested_if_streaming_lists_are_not_answered() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    let (unanswered, began) = (asks_for_a_streaming_list(&mut server).await, Instant::now());
    asks_for_what_is_cached(&mut server).await;
    assert!(began.elapsed() <= WATCH_SILENCE + FIRST_PAUSE * 2, "{:?}", began.elapsed());
    client.sees("init +a done").await;
    drop(unanswered);
}

#[tokio::test(start_paused = true)]
async fn pages_are_requested_if_streaming_lists_break_off() {
    for has_error in [true, false] {
        let (mut server, api) = start();
        let mut client = Client::of(api, Config::default());
        for _ in 0..MOST_FAILED {
            let lines = asks_for_a_streaming_list(&mut server).await.stream();
            send(&lines, "ADDED", object("a", "1"));
            if has_error {
                lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
            }
        }
        asks_for_what_is_cached(&mut server).await;
        client.sees("init +a init +a init +a init +a done").await;
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_if_the_server_is_slow_to_fail() {
    for is_opened in [true, false] {
        let (mut server, _client, lines) = watching().await;
        lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
        for _ in 0..8 {
            let asked = server.next().await;
            assert!(asked.has_parameter("resourceVersion=10"), "{}", asked.query);
            if is_opened {
                let lines = asked.stream();
                tokio::time::sleep(QUIET * 2).await;
                send(&lines, "ERROR", status(503, "ServiceUnavailable"));
            } else {
                tokio::time::sleep(QUIET * 2).await;
                asked.reject(504, "Timeout");
            }
        }
        let failed = Instant::now();
        drop(server.next().await);
        assert!(failed.elapsed() >= LAST_PAUSE, "{is_opened}: {:?}", failed.elapsed());
    }
}

/// As through a proxy that ends what is silent for a while.
#[tokio::test(start_paused = true)]
async fn a_watch_that_was_silent_is_resumed_soon() {
    let (mut server, _client, mut lines) = watching().await;
    for life in 0..8 {
        tokio::time::sleep(QUIET * 2).await;
        lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
        let broken = Instant::now();
        let asked = server.next().await;
        assert!(asked.has_parameter("resourceVersion=10"), "{}", asked.query);
        assert!(broken.elapsed() <= FIRST_PAUSE * 2, "{life}: {:?}", broken.elapsed());
        lines = asked.stream();
    }
}

/// As by client-go. Pauses grow, although every list succeeds.
#[tokio::test(start_paused = true)]
async fn a_role_that_may_list_and_not_watch_is_served_by_lists() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    let mut lists = Vec::new();
    for version in ["0", "5", "5", "5", "5", "5", "5"] {
        asks_for_a_streaming_list(&mut server).await.reject(403, "cannot watch");
        let asked = server.next().await;
        assert!(asked.has_parameter(&format!("resourceVersion={version}")), "{}", asked.query);
        assert!(!asked.query.contains("watch=") && !asked.query.contains("limit="), "{}", asked.query);
        asked.json(200, &list(&json!([object("a", "1")]), "5", ""));
        client.sees("init +a done").await;
        lists.push(Instant::now());
        let asked = server.next().await;
        assert!(asked.has_parameter("watch=true") && asked.has_parameter("resourceVersion=5"), "{}", asked.query);
        asked.reject(403, "cannot watch");
    }
    let pauses: Vec<Duration> = lists.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses[0] <= FIRST_PAUSE * 3 && pauses[5] >= LAST_PAUSE * 4 / 5, "{pauses:?}");
}

#[tokio::test(start_paused = true)]
async fn a_role_that_may_watch_and_not_list_is_served_by_streaming_lists() {
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    // Neither is permitted yet.
    asks_for_a_streaming_list(&mut server).await.reject(403, "cannot watch");
    server.next().await.reject(403, "cannot list");
    let lines = asks_for_a_streaming_list(&mut server).await.stream();
    send(&lines, "ADDED", object("a", "9"));
    send(&lines, "BOOKMARK", bookmark("10", true));
    client.sees("init init +a done").await;
    lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
    let asked = server.next().await;
    assert!(asked.has_parameter("watch=true") && asked.has_parameter("resourceVersion=10"), "{}", asked.query);
}

/// The verbs are refused in turn, each with a reason of its own.
#[tokio::test(start_paused = true)]
async fn a_role_without_permissions_is_logged_once() {
    let warned = LogCount::start("keblet::apiserver::watch", Level::WARN);
    let (mut server, api) = start();
    let _client = Client::of(api, Config::default());
    for _ in 0..10 {
        asks_for_a_streaming_list(&mut server).await.reject(403, "cannot watch");
        server.next().await.reject(403, "cannot list");
    }
    asks_for_a_streaming_list(&mut server).await;
    assert_eq!(warned.lines(), 1);
}
