//! Which requests wait for a rate limit.

use super::*;

#[test]
fn events_are_not_limited_at_a_rate_of_zero() {
    assert!(events_limiter(&options()).is_some());
    assert!(events_limiter(&Options { events_per_second: 0, ..options() }).is_none());
}

#[tokio::test]
async fn watches_do_not_wait_for_the_rate_limit() {
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
    let line = format!("rest_client_rate_limiter_duration_seconds_count{{host=\"{host}\",verb=\"GET\"}} 1");
    assert!(text.lines().any(|found| found == line), "{line} not in {text}");
}
