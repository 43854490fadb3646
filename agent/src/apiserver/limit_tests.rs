//! Which requests wait for a rate limit, and which are measured.

use super::*;

#[test]
fn events_are_not_limited_at_a_rate_of_zero() {
    assert!(events_limiter(&options()).is_some());
    assert!(events_limiter(&Options { events_per_second: 0, ..options() }).is_none());
}

#[tokio::test]
async fn watches_do_not_wait_for_the_rate_limit_and_are_not_measured() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |seen: &Seen| match seen.path.contains("watch=true") {
        true => Reply::Open(format!("{}\n", json!({"type": "ADDED", "object": object("a")}))),
        false => Reply::json(200, object("a")),
    })
    .await;
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "token: t")).expect("access");
    let (limited, metrics) = (Options { per_second: 50, burst: 100, ..options() }, Metrics::new());
    let api = ApiServer::connect(&access, &limited, metrics.clone(), CancellationToken::new()).expect("clients");
    let objects = objects(&api.main);
    objects.get("a").await.expect("an answer");
    let mut events = std::pin::pin!(objects.watch(&Default::default(), "0").await.expect("a watch"));
    events.next().await.expect("an event").expect("an object");
    let (text, host) = (metrics.render().expect("metrics"), server.address);
    for name in [
        "rest_client_rate_limiter_duration_seconds",
        "rest_client_request_duration_seconds",
        "rest_client_request_size_bytes",
    ] {
        let line = format!("{name}_count{{host=\"{host}\",verb=\"GET\"}} 1");
        assert!(text.lines().any(|found| found == line), "{line} not in {text}");
    }
}

/// Clients of this node's server cause reviews, as many as they like.
#[tokio::test]
async fn reviews_have_a_limiter_of_their_own() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_: &Seen| Reply::json(200, object("a"))).await;
    let access = kubeconfig::load(&server.kubeconfig(folder.path(), &authority, "token: t")).expect("access");
    let one_a_second = Options { per_second: 1, burst: 1, ..options() };
    let api = ApiServer::connect(&access, &one_a_second, Metrics::new(), CancellationToken::new()).expect("clients");
    let began = std::time::Instant::now();
    for _ in 0..20 {
        objects(&api.reviews).get("a").await.expect("an answer");
    }
    objects(&api.main).get("a").await.expect("an answer");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // The burst is used up.
    for _ in 0..40 {
        objects(&api.reviews).get("a").await.expect("an answer");
    }
    assert!(began.elapsed() > Duration::from_millis(900), "{:?}: reviews are limited, too", began.elapsed());
}
