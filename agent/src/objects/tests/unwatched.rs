//! Objects that are read by GET against the scripted API server, whose watch cache may lag behind.

use std::time::Duration;

use super::Fixture;
use super::Registration;
use super::Strategy;
use super::pod;
use super::store;

const LATEST: &str = "GET /api/v1/namespaces/ns/configmaps/a?";
const CACHED: &str = "GET /api/v1/namespaces/ns/configmaps/a?resourceVersion=0";

/// Longer than the result of a GET is kept.
const EXPIRED: Duration = Duration::from_secs(61);

/// Uses all watches, so that the next object has none.
async fn use_all_watches(fixture: &Fixture) -> Registration {
    let names: Vec<String> = (0..store::MAX_WATCHES).map(|n| format!("n{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let registration = fixture.register("all", &names, &[]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    fixture.api.take_requests();
    registration
}

#[tokio::test(start_paused = true)]
async fn an_object_without_a_watch_is_read_again_from_the_watch_cache() {
    let fixture = Fixture::new(Strategy::Watch);
    let _all = use_all_watches(&fixture).await;
    fixture.put("a", "1");
    let _one = fixture.register("one", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "1");
    assert_eq!(fixture.api.take_requests(), [LATEST]);
    fixture.put("a", "2");
    tokio::time::sleep(EXPIRED).await;
    assert_eq!(fixture.value("a").await, "2");
    assert_eq!(fixture.api.take_requests(), [CACHED]);

    fixture.api.lag();
    fixture.put("a", "3");
    let _two = fixture.register("two", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "3", "a new pod sees the newest");
    assert_eq!(fixture.api.take_requests(), [LATEST]);
    tokio::time::sleep(EXPIRED).await;
    assert_eq!(fixture.value("a").await, "3", "never an older one than before");
    assert_eq!(fixture.api.take_requests(), [CACHED]);
}

#[tokio::test(start_paused = true)]
async fn an_object_that_did_not_exist_is_read_at_its_next_use() {
    for strategy in [Strategy::Watch, Strategy::Cache] {
        let fixture = Fixture::new(strategy);
        let _all = use_all_watches(&fixture).await;
        let _one = fixture.register("one", &["a"], &[]);
        assert_eq!(fixture.value("a").await, "configmap \"a\" not found");
        fixture.put("a", "1");
        assert_eq!((fixture.value("a").await, fixture.value("a").await), ("1".into(), "1".into()), "{strategy:?}");
        assert_eq!(fixture.api.take_requests(), [LATEST, LATEST], "{strategy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_pod_sees_the_newest() {
    for strategy in [Strategy::Watch, Strategy::Cache] {
        let fixture = Fixture::new(strategy);
        let _all = use_all_watches(&fixture).await;
        fixture.put("a", "1");
        let mut registration = fixture.register("one", &["a"], &[]);
        assert_eq!(fixture.value("a").await, "1");
        fixture.api.lag();
        fixture.put("a", "2");
        fixture.objects.register(&pod("one", &["a"], &[]), &mut registration);
        assert_eq!(fixture.value("a").await, "2", "{strategy:?}");
        assert_eq!(fixture.api.take_requests(), [LATEST, LATEST], "{strategy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_pod_does_not_get_what_was_being_read_before() {
    let fixture = Fixture::new(Strategy::Cache);
    fixture.put("a", "1");
    let _one = fixture.register("one", &["a"], &[]);
    fixture.api.state().delay = Duration::from_millis(500);
    let change_and_register = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        fixture.put("a", "2");
        fixture.register("two", &["a"], &[])
    };
    let (before, _two) = tokio::join!(fixture.value("a"), change_and_register);
    assert_eq!((before, fixture.value("a").await), ("1".into(), "2".into()));
}

#[tokio::test(start_paused = true)]
async fn a_get_does_not_replace_what_a_watch_has_received_meanwhile() {
    let fixture = Fixture::new(Strategy::Watch);
    let all = use_all_watches(&fixture).await;
    fixture.put("a", "1");
    let _one = fixture.register("one", &["a"], &[]);
    fixture.api.state().delay = Duration::from_millis(500);
    let change_and_watch = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        fixture.api.state().delay = Duration::ZERO;
        fixture.put("a", "2");
        drop(all);
        tokio::time::sleep(Duration::from_millis(100)).await;
        fixture.register("two", &["a"], &[])
    };
    let (before, _two) = tokio::join!(fixture.value("a"), change_and_watch);
    assert_eq!((before, fixture.value("a").await), ("2".into(), "2".into()));
}

#[tokio::test(start_paused = true)]
async fn an_older_answer_ends_a_failure() {
    let fixture = Fixture::new(Strategy::Cache);
    fixture.put("a", "1");
    fixture.api.lag();
    fixture.put("a", "2");
    let _one = fixture.register("one", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "2");
    tokio::time::sleep(EXPIRED).await;
    fixture.api.away(true);
    assert_eq!(fixture.value("a").await, "2");
    fixture.api.away(false);
    assert_eq!((fixture.value("a").await, fixture.value("a").await), ("2".into(), "2".into()));
    assert_eq!(fixture.api.take_requests(), [LATEST, CACHED, CACHED], "not at every read");
}

#[tokio::test(start_paused = true)]
async fn a_watch_cache_that_lags_behind_hides_no_object() {
    let fixture = Fixture::new(Strategy::Cache);
    fixture.api.lag();
    fixture.put("a", "1");
    let _one = fixture.register("one", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "1");
    tokio::time::sleep(EXPIRED).await;
    assert_eq!(fixture.value("a").await, "1");
    assert_eq!(fixture.api.take_requests(), [LATEST, CACHED, LATEST]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_cache_that_lags_behind_brings_no_deleted_object_back() {
    let fixture = Fixture::new(Strategy::Cache);
    fixture.put("a", "1");
    fixture.api.lag();
    fixture.api.delete("configmaps/ns/a");
    let _one = fixture.register("one", &["a"], &[]);
    for _ in 0..2 {
        assert_eq!(fixture.value("a").await, "configmap \"a\" not found");
        tokio::time::sleep(EXPIRED).await;
    }
    assert_eq!(fixture.api.take_requests(), [LATEST, LATEST]);
}
