//! Responses with values that the agent's types cannot represent, and those that ask to try again later.

use kube::api::Patch;
use kube::api::PatchParams;

use super::watch_errors::in_time;
use super::*;

/// Every user with permission to update an object can write this time, which the client's types cannot represent.
#[tokio::test]
async fn managed_fields_fail_no_request() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let mut odd = object("a");
    odd["metadata"]["managedFields"] = json!([{"manager": "m", "time": "9999-12-31T23:59:59Z"}]);
    let made: ConfigMap = serde_json::from_value(object("a")).expect("an object");
    let server = TestServer::start(&authority, move |seen: &Seen| match seen.path.contains("watch=true") {
        true => Reply::Open(format!("{}\n", json!({"type": "ADDED", "object": odd}))),
        false => Reply::json(200, odd.clone()),
    })
    .await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "token: t"));
    let objects = objects(&api.main);
    objects.get("a").await.expect("the object");
    objects.create(&PostParams::default(), &made).await.expect("the object");
    let patch = Patch::Strategic(json!({"metadata": {"labels": {"a": "b"}}}));
    objects.patch("a", &PatchParams::default(), &patch).await.expect("the object");
    let mut events = std::pin::pin!(watch::follow(objects, Config::default(), api.recovered()));
    assert!(matches!(events.next().await, Some(Event::Init)));
    let event = events.next().await;
    assert!(
        matches!(&event, Some(Event::InitApply(object)) if object.metadata.name.as_deref() == Some("a")),
        "{event:?}"
    );
}

/// The pause is longer than an answer is awaited.
#[tokio::test]
async fn an_answer_is_awaited_after_the_pause_for_which_the_server_asks() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let tries = AtomicUsize::new(0);
    let server = TestServer::start(&authority, move |_| match tries.fetch_add(1, Ordering::SeqCst) {
        1 => Reply::Answer(429, vec![("retry-after", "2".to_owned())], String::new()),
        _ => Reply::json(200, object("a")),
    })
    .await;
    let api = connect(&server.kubeconfig(folder.path(), &authority, "token: t"));
    objects(&api.main).get("a").await.expect("an answer, and a connection");
    let request = http::Request::get("/api/v1/namespaces/default/configmaps/a").body(Vec::new()).expect("a request");
    let send = |request| api.main.request_text(request);
    in_time(Duration::from_millis(1500), request, send).await.expect("an answer after the pause");
    assert_eq!(server.seen().len(), 3);
}
