//! The end of an outage ends the pauses of watches.

use tracing::Level;

use super::*;
use crate::apiserver::recovery::Recovery;
use crate::model::testing::LogCount;

#[tokio::test(start_paused = true)]
async fn a_lack_of_permission_is_logged_once_until_the_watch_is_served() {
    let warned = LogCount::start("keblet::apiserver::watch", Level::WARN);
    let (mut server, api) = start();
    let mut client = Client::of(api, Config::default());
    // Streaming list and pages in turn; the second time the watch before them.
    for (lines, denials) in [(1, 6), (2, 5)] {
        for _ in 0..denials {
            server.next().await.reject(403, "Forbidden");
        }
        let watch = server.next().await.stream();
        assert_eq!(warned.lines(), lines);
        if lines == 1 {
            send(&watch, "BOOKMARK", bookmark("10", true));
            client.sees("init init init init done").await;
            send(&watch, "MODIFIED", object("a", "11"));
            client.sees("=a").await;
        }
    }
}

/// As for a resource that the API server does not serve.
#[tokio::test(start_paused = true)]
async fn each_change_of_a_denial_is_logged_once() {
    let warned = LogCount::start("keblet::apiserver::watch", Level::WARN);
    let (mut server, api) = start();
    let _client = Client::of(api, Config::default());
    server.next().await.reject(404, "NotFound");
    for (code, reason, lines) in [(404, "NotFound", 1), (403, "Forbidden", 2), (404, "NotFound", 3)] {
        for _ in 0..5 {
            server.next().await.reject(code, reason);
        }
        let unavailable = server.next().await;
        assert_eq!(warned.lines(), lines, "{code}");
        unavailable.reject(503, "ServiceUnavailable");
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_an_absence_ends_the_pause() {
    let (mut server, api) = start();
    let recovery = Recovery::default();
    let mut client = Client::woken_by(api, Config::default(), recovery.subscribe());
    // An outage long enough for pauses of half a minute and more.
    for _ in 0..8 {
        drop(server.next().await);
        recovery.failed();
    }
    // Another request, such as a heartbeat, succeeds.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let back = Instant::now();
    recovery.answered(http::StatusCode::OK);
    let lines = server.next().await.stream();
    assert!(back.elapsed() <= Duration::from_millis(1001), "{:?}", back.elapsed());
    send(&lines, "ADDED", object("a", "9"));
    send(&lines, "BOOKMARK", bookmark("10", true));
    client.sees("init +a done").await;
}

#[tokio::test(start_paused = true)]
async fn pauses_keep_growing_over_repeated_failures() {
    let (mut server, api) = start();
    let recovery = Recovery::default();
    let _client = Client::woken_by(api, Config::default(), recovery.subscribe());
    for _ in 0..8 {
        drop(server.next().await);
    }
    recovery.over();
    drop(server.next().await);
    let failed = Instant::now();
    drop(server.next().await);
    assert!(failed.elapsed() >= LAST_PAUSE, "{:?}", failed.elapsed());
}

/// A server that crashes again and again and is back within a second: pauses have grown, and no request fails meanwhile. The
/// success of another watch ends the pause, and the new server does not have the resource version.
#[tokio::test(start_paused = true)]
async fn an_outage_that_only_breaks_watches_delays_no_list() {
    let recovery = Recovery::default();
    let (mut server, api) = start();
    let mut client = Client::woken_by(api, Config::default(), recovery.subscribe());
    for _ in 0..8 {
        drop(server.next().await);
    }
    let lines = server.next().await.stream();
    send(&lines, "BOOKMARK", bookmark("10", true));
    client.sees("init done").await;
    lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
    let broke = Instant::now();
    recovery.subscribe().broke_off();
    tokio::time::sleep(FIRST_PAUSE).await;
    recovery.answered(http::StatusCode::OK);
    server.next().await.reject(410, "Expired");
    let asked = server.next().await;
    assert!(asked.has_parameter("sendInitialEvents=true"), "{}", asked.query);
    assert!(broke.elapsed() <= Duration::from_secs(5), "{:?}", broke.elapsed());
}

/// As by a server that is killed: its other requests may not notice it.
#[tokio::test(start_paused = true)]
async fn a_watch_that_breaks_off_after_a_while_is_an_outage() {
    for (lived, is_outage) in [(QUIET, true), (QUIET / 2, false)] {
        let recovery = Recovery::default();
        let (mut server, api) = start();
        let mut client = Client::woken_by(api, Config::default(), recovery.subscribe());
        let lines = server.next().await.stream();
        send(&lines, "BOOKMARK", bookmark("10", true));
        client.sees("init done").await;
        tokio::time::sleep(lived).await;
        lines.send(Err(std::io::Error::other("reset by peer"))).expect("the watch is open");
        drop(server.next().await.stream());
        let mut waiting = recovery.subscribe();
        recovery.answered(http::StatusCode::OK);
        assert_eq!(waiting.wait(Duration::from_secs(60)).await, is_outage, "{lived:?}");
    }
}
