//! Watches of objects when the scripted API server fails.

use std::time::Duration;

use serde_json::json;

use super::Fixture;
use super::Strategy;
use super::is_notified;

/// How many were requested since requests were last taken.
fn streaming_lists(fixture: &Fixture) -> usize {
    fixture.api.take_requests().iter().filter(|request| request.contains("sendInitialEvents")).count()
}

#[tokio::test(start_paused = true)]
async fn an_object_is_listed_if_its_streaming_lists_fail() {
    for code in [410, 500, 504] {
        let fixture = Fixture::new(Strategy::Watch);
        fixture.put("a", "1");
        fixture.api.state().failing = Some(code);
        let mut registration = fixture.register("u", &["a"], &[]);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(fixture.value("a").await, "1", "{code}");
        assert_eq!(streaming_lists(&fixture), 3, "{code}");
        fixture.put("a", "2");
        assert!(is_notified(&mut registration).await, "{code}");
        // Others are not concerned: the server may serve them.
        fixture.api.state().failing = None;
        fixture.put("b", "1");
        let _other = fixture.register("other", &["b"], &[]);
        assert_eq!(fixture.value("b").await, "1", "{code}");
        assert_eq!(streaming_lists(&fixture), 1, "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_after_failed_streaming_lists_is_not_the_rule_from_then_on() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().failing = Some(500);
    let _registration = fixture.register("u", &["a"], &[]);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!((streaming_lists(&fixture), fixture.value("a").await), (3, "1".to_owned()));
    fixture.api.state().failing = None;
    fixture.api.state().stale = true;
    // Ends the watch, whose resource version is too old then.
    fixture.api.away(true);
    fixture.api.away(false);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!((streaming_lists(&fixture), fixture.api.watches()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn failures_of_long_watches_do_not_grow_the_pause() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    let _registration = fixture.register("u", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "1");
    for life in 0..8 {
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(fixture.api.watches(), 1, "{life}");
        fixture.api.away(true);
        tokio::time::sleep(Duration::from_millis(100)).await;
        fixture.api.away(false);
        // The first pause, with its jitter.
        tokio::time::sleep(Duration::from_millis(1600)).await;
        assert_eq!(fixture.api.watches(), 1, "{life}: it was not resumed");
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_if_the_server_is_slow_to_fail() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.api.state().failing = Some(429);
    fixture.api.state().delay = Duration::from_secs(6);
    let _registration = fixture.register("u", &["a"], &[]);
    tokio::time::sleep(Duration::from_secs(120)).await;
    let requests = fixture.api.take_requests().len();
    // 0.8 + 1.6 + 3.2 + 6.4 + 12.8 + 25.6 + 30 seconds, up to as much again, and 6 seconds for each.
    assert!((4..8).contains(&requests), "{requests}");
}

/// As for a role that may list and not watch. Each list succeeds.
#[tokio::test(start_paused = true)]
async fn pauses_grow_if_watches_after_lists_fail() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().old = true;
    fixture.api.state().unwatchable = true;
    let _registration = fixture.register("u", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "1");
    tokio::time::sleep(Duration::from_secs(120)).await;
    let requests = fixture.api.take_requests().len();
    // A list and a watch after each of seven pauses of less than a second, then of 0.8 + 1.6 + 3.2 + 6.4 + 12.8 + 25.6 + 30
    // seconds, up to as much again.
    assert!((25..=36).contains(&requests), "{requests}");
    assert_eq!(fixture.value("a").await, "1");
}

#[tokio::test(start_paused = true)]
async fn an_object_is_listed_if_only_lists_are_permitted() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().unwatchable = true;
    let _registration = fixture.register("u", &["a"], &[]);
    // The short pauses, and the first long one.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(fixture.value("a").await, "1");
    tokio::time::sleep(Duration::from_secs(300)).await;
    fixture.api.take_requests();
    fixture.put("a", "2");
    // The longest pause is half a minute.
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(fixture.value("a").await, "2");
    let requests = fixture.api.take_requests().len();
    // A streaming list, a list and a watch after each pause.
    assert!((3..=9).contains(&requests), "{requests}");
}

#[tokio::test(start_paused = true)]
async fn an_object_is_listed_by_a_watch_if_only_watches_are_permitted() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().unwatchable = true;
    fixture.api.state().unlistable = true;
    let _registration = fixture.register("u", &["a"], &[]);
    tokio::time::sleep(Duration::from_secs(60)).await;
    fixture.api.state().unwatchable = false;
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(fixture.value("a").await, "1");
}

#[tokio::test(start_paused = true)]
async fn an_object_is_listed_if_the_server_is_silent_at_its_streaming_lists() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().mute = true;
    let mut registration = fixture.register("u", &["a"], &[]);
    // Half a minute, and the pause.
    tokio::time::sleep(Duration::from_secs(32)).await;
    assert_eq!(fixture.value("a").await, "1");
    assert_eq!(streaming_lists(&fixture), 1);
    fixture.put("a", "2");
    assert!(is_notified(&mut registration).await);
}

#[tokio::test(start_paused = true)]
async fn pauses_between_lists_without_a_version_grow() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().old = true;
    fixture.api.state().unversioned = true;
    let _registration = fixture.register("u", &["a"], &[]);
    // Without an idle moment, in which time would pass.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(fixture.api.take_requests().len(), 2, "one streaming list, one other");
    assert_eq!(fixture.value("a").await, "1");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let requests = fixture.api.take_requests().len();
    // 0.8 + 1.6 + 3.2 + 6.4 + 12.8 + 25.6 seconds, up to as much again.
    assert!((3..8).contains(&requests), "{requests}");
}

#[tokio::test(start_paused = true)]
async fn a_streaming_list_that_is_not_answered_is_given_up() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.api.state().delay = Duration::from_secs(24 * 3600);
    let _registration = fixture.register("u", &["a"], &[]);
    tokio::time::sleep(Duration::from_secs(32)).await;
    assert_eq!(fixture.api.take_requests().len(), 2, "one streaming list, one other");
}

#[tokio::test(start_paused = true)]
async fn a_service_has_variables_whatever_its_status_is() {
    let fixture = Fixture::new(Strategy::Watch);
    let condition = json!({"type": "x", "status": "True", "reason": "r", "message": "", "lastTransitionTime": null});
    let service = json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "1"},
        "spec": {"clusterIP": "192.0.2.1", "ports": [{"port": 80}]}, "status": {"conditions": [condition]}});
    fixture.api.state().objects.insert("services".to_owned(), service);
    let variables = fixture.objects.service_variables("ns", true, true).await.expect("listed");
    assert_eq!(variables.get("A_SERVICE_HOST").map(String::as_str), Some("192.0.2.1"));
}
