//! The object cache against a scripted API server, on paused time.

pub(crate) mod api;
mod certificates;
mod panics;
mod trust_bundles;
mod unwatched;
mod watched;

use std::time::Duration;
use std::time::SystemTime;

use secrecy::ExposeSecret as _;
use serde_json::json;

use super::*;
use crate::apiserver::recovery::Recovered;
use api::Api;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// The object cache and its API server.
struct Fixture {
    api: Api,
    objects: Objects,
    clock: Clock,
}

impl Fixture {
    fn new(strategy: Strategy) -> Self {
        let clock = Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let api = Api::new(clock);
        let (recovered, sync_frequency) = (Recovered::default(), Duration::from_secs(60));
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "n-uid"}})).expect("a Node");
        let node = Some(watch::channel(Some(Arc::new(node))).1);
        let config = ObjectsConfig { strategy, recovered, sync_frequency, clock, node };
        let objects = Objects::new(&api.client(), config);
        Self { api, objects, clock }
    }

    async fn value(&self, name: &str) -> String {
        match self.objects.config_map("ns", name).await {
            Ok(object) => object.data.as_ref().and_then(|data| data.get("k")).cloned().unwrap_or_default(),
            Err(error) => error.to_string(),
        }
    }

    fn put(&self, name: &str, value: &str) {
        self.api.put(&format!("configmaps/ns/{name}"), json!({"data": {"k": value}}));
    }

    fn register(&self, uid: &str, volumes: &[&str], envs: &[&str]) -> Registration {
        let mut registration = Registration::new(uid.into());
        self.objects.register(&pod(uid, volumes, envs), &mut registration);
        registration
    }
}

fn pod(uid: &str, volumes: &[&str], envs: &[&str]) -> Pod {
    let volumes: Vec<_> = volumes.iter().map(|name| json!({"name": name, "configMap": {"name": name}})).collect();
    let envs: Vec<_> = envs.iter().map(|name| json!({"configMapRef": {"name": name}})).collect();
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": uid},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "envFrom": envs}]}}))
    .expect("a pod")
}

/// The next change is announced within a second.
async fn is_notified(registration: &mut Registration) -> bool {
    tokio::time::timeout(Duration::from_secs(1), registration.changed()).await.is_ok()
}

#[tokio::test(start_paused = true)]
async fn an_object_is_read_once_and_its_changes_are_announced() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    let mut registration = fixture.register("u", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "1");
    assert_eq!(fixture.value("a").await, "1");
    let requests = fixture.api.take_requests();
    assert_eq!(requests.len(), 1, "{requests:?}");
    assert!(requests[0].contains("/configmaps?fieldSelector=metadata.name%3Da&watch=true"), "{requests:?}");
    assert!(!is_notified(&mut registration).await, "what is read first is no change");

    fixture.put("a", "2");
    assert!(is_notified(&mut registration).await);
    assert_eq!((registration.generation(), fixture.value("a").await), (1, "2".into()));
    fixture.put("a", "2");
    assert!(!is_notified(&mut registration).await, "the same again");
    fixture.api.delete("configmaps/ns/a");
    assert!(is_notified(&mut registration).await);
    assert_eq!(fixture.value("a").await, "configmap \"a\" not found");
    fixture.put("a", "3");
    assert!(is_notified(&mut registration).await);
    assert_eq!(fixture.value("a").await, "3");
    assert!(
        fixture.objects.config_map("ns", "a").await.expect("it is there").metadata.annotations.is_none(),
        "trimmed"
    );
    assert_eq!(fixture.api.take_requests(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn only_what_pods_refer_to_is_read_and_only_as_long() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    assert_eq!(fixture.value("a").await, "object \"ns\"/\"a\" not registered");
    let one = fixture.register("one", &["a", "b"], &["c"]);
    let mut two = fixture.register("two", &["a"], &[]);
    assert_eq!(fixture.value("b").await, "configmap \"b\" not found");
    assert_eq!((fixture.value("a").await, fixture.api.watches()), ("1".into(), 3));
    drop(one);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((fixture.value("a").await, fixture.api.watches()), ("1".into(), 1));
    fixture.objects.register(&pod("two", &["d"], &[]), &mut two);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.value("a").await, "object \"ns\"/\"a\" not registered");
    assert_eq!(fixture.api.watches(), 1);
    // A new registration precedes the drop of the previous one.
    let three = fixture.register("two", &["d"], &[]);
    drop(two);
    assert_eq!(fixture.value("d").await, "configmap \"d\" not found");
    drop(three);
    assert_eq!(fixture.objects.inner.as_ref().expect("not standalone").config_maps.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_first_read_waits_at_most_a_second() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.api.away(true);
    let mut registration = fixture.register("u", &["a"], &[]);
    let began = tokio::time::Instant::now();
    let error = fixture.value("a").await;
    assert!(error.starts_with("failed to sync configmap cache: "), "{error}");
    assert!(error.contains("connection refused"), "{error}");
    assert_eq!(began.elapsed(), Duration::from_secs(1));
    fixture.api.away(false);
    fixture.put("a", "1");
    tokio::time::timeout(Duration::from_secs(60), registration.changed())
        .await
        .expect("a change once the object can be read");
    assert_eq!(fixture.value("a").await, "1");
}

#[tokio::test(start_paused = true)]
async fn cached_objects_are_served_during_an_outage() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    let mut registration = fixture.register("u", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "1");
    fixture.api.away(true);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(fixture.value("a").await, "1");
    fixture.put("a", "2");
    fixture.api.away(false);
    let went = tokio::time::Instant::now();
    // The watch was resumed; earlier changes are not announced until the watch is renewed.
    fixture.put("a", "3");
    tokio::time::timeout(Duration::from_secs(61), async {
        while fixture.value("a").await != "3" {
            fixture.put("a", "3");
            let _ = tokio::time::timeout(Duration::from_secs(1), registration.changed()).await;
        }
    })
    .await
    .expect("the watch is open again");
    assert!(went.elapsed() < Duration::from_secs(61));
}

#[tokio::test(start_paused = true)]
async fn a_late_authorization_is_waited_for() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().refusals = 5;
    let _registration = fixture.register("u", &["a"], &[]);
    let began = tokio::time::Instant::now();
    assert_eq!(fixture.value("a").await, "1");
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn servers_without_streaming_lists_are_listed() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("a", "1");
    fixture.api.state().old = true;
    let mut registration = fixture.register("u", &["a"], &["b"]);
    assert_eq!((fixture.value("a").await, fixture.value("b").await), ("1".into(), "configmap \"b\" not found".into()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    fixture.put("a", "2");
    assert!(is_notified(&mut registration).await);
    assert_eq!(fixture.value("a").await, "2");
}

#[tokio::test(start_paused = true)]
async fn immutable_objects_are_not_watched() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.api.put("configmaps/ns/a", json!({"immutable": true, "data": {"k": "1"}}));
    let _registration = fixture.register("u", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "1");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.api.watches(), 0);
    fixture.api.take_requests();
    tokio::time::sleep(DAY).await;
    assert_eq!((fixture.value("a").await, fixture.api.take_requests().len()), ("1".into(), 0));
    assert_eq!(fixture.objects.refresh_period(&pod("u", &["a"], &[])), None);
}

#[tokio::test(start_paused = true)]
async fn objects_needed_at_start_only_are_not_watched_for_ever() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.put("env", "1");
    fixture.put("volume", "1");
    let _registration = fixture.register("u", &["volume"], &["env"]);
    assert_eq!((fixture.value("env").await, fixture.api.watches()), ("1".into(), 2));
    tokio::time::sleep(Duration::from_secs(240)).await;
    assert_eq!(fixture.api.watches(), 2);
    tokio::time::sleep(Duration::from_secs(240)).await;
    assert_eq!(fixture.api.watches(), 1, "no pod needed it for five minutes");
    fixture.put("env", "2");
    assert_eq!((fixture.value("env").await, fixture.api.watches()), ("2".into(), 2));
    tokio::time::sleep(Duration::from_secs(600)).await;
    fixture.api.away(true);
    assert_eq!(fixture.value("env").await, "2", "an old answer is better than none");
}

#[tokio::test(start_paused = true)]
async fn more_objects_than_watches_are_read_as_needed() {
    let fixture = Fixture::new(Strategy::Watch);
    let names: Vec<String> = (0..store::MAX_WATCHES + 3).map(|n| format!("n{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let _registration = fixture.register("u", &names, &[]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.api.watches(), store::MAX_WATCHES);
    let period = fixture.objects.refresh_period(&pod("u", &names, &[])).expect("some have to be read again");
    assert!((60..=90).contains(&period.as_secs()), "{period:?}");
    for name in names {
        assert_eq!(fixture.value(name).await, format!("configmap {name:?} not found"));
    }
}

#[tokio::test(start_paused = true)]
async fn strategy_cache_reads_again_after_its_time() {
    let fixture = Fixture::new(Strategy::Cache);
    fixture.put("a", "1");
    let _one = fixture.register("one", &["a"], &[]);
    assert_eq!((fixture.value("a").await, fixture.value("a").await), ("1".into(), "1".into()));
    assert_eq!(fixture.api.take_requests(), ["GET /api/v1/namespaces/ns/configmaps/a?"]);
    fixture.put("a", "2");
    assert_eq!(fixture.value("a").await, "1");
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(fixture.value("a").await, "2");
    assert_eq!(fixture.api.take_requests(), ["GET /api/v1/namespaces/ns/configmaps/a?resourceVersion=0"]);
    fixture.put("a", "3");
    let _two = fixture.register("two", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "3", "a new pod sees the newest");
    assert_eq!(fixture.api.take_requests(), ["GET /api/v1/namespaces/ns/configmaps/a?"]);
    fixture.api.away(true);
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(fixture.value("a").await, "3");
    assert!(fixture.objects.refresh_period(&pod("one", &["a"], &[])).is_some());
}

#[tokio::test(start_paused = true)]
async fn strategy_get_reads_every_time() {
    let fixture = Fixture::new(Strategy::Get);
    let _one = fixture.register("one", &["a"], &[]);
    assert_eq!(fixture.value("a").await, "configmap \"a\" not found");
    fixture.put("a", "1");
    assert_eq!((fixture.value("a").await, fixture.value("a").await), ("1".into(), "1".into()));
    assert_eq!(fixture.api.take_requests().len(), 3);
    let read = async || fixture.objects.config_map("ns", "a").await.expect("it is there");
    assert!(Arc::ptr_eq(&read().await, &read().await), "the same version is shared");
    fixture.api.away(true);
    assert!(fixture.value("a").await.contains("connection refused"));
}

#[tokio::test(start_paused = true)]
async fn invalid_names_are_not_requested() {
    let fixture = Fixture::new(Strategy::Watch);
    let names = ["../secrets/x", "a?b", "a&watch=false", "a%2f", "A", "", "-a", &"a".repeat(254)];
    let _registration = fixture.register("u", &names, &[]);
    for name in names {
        let error = fixture.objects.config_map("ns", name).await.expect_err("no name");
        assert!(error.to_string().contains("the name is not a DNS subdomain"), "{error}");
        assert!(error.is_not_found(), "an optional reference may have any name");
    }
    assert_eq!(fixture.api.take_requests(), [""; 0]);
}

fn key(seconds: i64) -> TokenKey {
    TokenKey {
        namespace: "ns".into(),
        service_account: "sa".into(),
        audiences: Vec::new(),
        expiration_seconds: Some(seconds),
        pod: ("p".into(), "u".into()),
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_are_kept_and_replaced_in_time() {
    let fixture = Fixture::new(Strategy::Watch);
    let registration = fixture.register("u", &[], &[]);
    let text = async |seconds| match fixture.objects.token(&key(seconds)).await {
        Ok(token) => token.text.expose_secret().to_owned(),
        Err(error) => error.to_string(),
    };
    assert_eq!((text(3600).await, text(3600).await), ("token-1".into(), "token-1".into()));
    assert_eq!(text(600).await, "token-2", "another lifetime is another token");
    let request = fixture.api.take_requests().remove(0);
    assert_eq!(request, "POST /api/v1/namespaces/ns/serviceaccounts/sa/token?");
    tokio::time::sleep(Duration::from_secs(2860)).await;
    assert_eq!(text(3600).await, "token-1");
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(text(3600).await, "token-3", "four fifths are over");
    fixture.api.away(true);
    tokio::time::sleep(Duration::from_secs(3000)).await;
    let token = fixture.objects.token(&key(3600)).await.expect("the old one is still valid");
    assert_eq!(token.text.expose_secret(), "token-3");
    assert!(token.refresh_at.is_some(), "to be tried again");
    tokio::time::sleep(Duration::from_secs(700)).await;
    let error = text(3600).await;
    assert!(error.contains("expired and refresh failed: ") && error.contains("connection refused"), "{error}");
    assert!(text(601).await.starts_with("failed to fetch token: "));
    fixture.api.away(false);
    assert!(text(3600).await.contains("connection refused"), "it is asked for after a pause");
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(text(3600).await, "token-4");
    drop(registration);
    assert_eq!(text(3600).await, "token-5", "forgotten with the pod");
}

/// A container that is restarted waits for it each time.
#[tokio::test(start_paused = true)]
async fn an_expired_token_is_requested_again_after_a_pause() {
    let fixture = Fixture::new(Strategy::Watch);
    let _registration = fixture.register("u", &[], &[]);
    fixture.objects.token(&key(3600)).await.expect("a token");
    fixture.api.state().silent = true;
    tokio::time::sleep(Duration::from_secs(3601)).await;
    fixture.api.take_requests();
    let took = async || {
        let began = tokio::time::Instant::now();
        let error = fixture.objects.token(&key(3600)).await.expect_err("no answer").to_string();
        assert!(error.ends_with("expired and refresh failed: the API server did not answer within 30s"), "{error}");
        began.elapsed().as_secs()
    };
    assert_eq!((took().await, took().await, fixture.api.take_requests().len()), (30, 0, 1));
    // The success of another pod changes nothing.
    fixture.api.state().silent = false;
    fixture.objects.token(&key(600)).await.expect("a token");
    fixture.api.state().silent = true;
    fixture.api.take_requests();
    assert_eq!((took().await, fixture.api.take_requests().len()), (0, 0));
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!((took().await, took().await, fixture.api.take_requests().len()), (30, 0, 1), "it is asked for again");
    fixture.api.state().silent = false;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(fixture.objects.token(&key(3600)).await.expect("a token").text.expose_secret(), "token-3");
}

#[tokio::test(start_paused = true)]
async fn what_needs_a_token_at_the_same_time_shares_one_request() {
    let fixture = Fixture::new(Strategy::Watch);
    let texts = async || {
        let asked = (0..4).map(|_| async { fixture.objects.token(&key(3600)).await.map(|token| token.text) });
        let texts = futures_util::future::try_join_all(asked).await.expect("a token each");
        texts.iter().map(|text| text.expose_secret().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(texts().await, ["token-1"; 4]);
    // A caller that gives up does not end the request of the others.
    let needed = key(600);
    let [mut dropped, mut kept] = [(), ()].map(|()| Box::pin(fixture.objects.token(&needed)));
    assert!(futures_util::poll!(&mut dropped).is_pending() && futures_util::poll!(&mut kept).is_pending());
    drop(dropped);
    let token = kept.await;
    assert_eq!(token.expect("a token").text.expose_secret(), "token-2");
    assert_eq!(fixture.api.state().tokens, 2);
}

#[tokio::test(start_paused = true)]
async fn a_token_of_one_service_account_only() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.api.put("serviceaccounts/ns/sa", json!({"metadata": {"name": "sa", "uid": "first"}}));
    let account = fixture.objects.service_account("ns", "sa").await.expect("there");
    assert_eq!(account.metadata.uid.as_deref(), Some("first"));
    let text = async |account| {
        let token = fixture.objects.token_of_account(&key(600), account).await.expect("a token");
        token.text.expose_secret().to_owned()
    };
    assert_eq!((text("first").await, text("first").await), ("token-1".into(), "token-1".into()));
    assert_eq!(text("second").await, "token-2", "not the token of the account that had the name before");
    assert_eq!(fixture.api.state().last_token["metadata"]["uid"], "second");
    fixture.objects.service_account("ns", "none").await.expect_err("absent");
}

#[tokio::test(start_paused = true)]
async fn a_token_request_denied_at_first_is_retried_soon() {
    let fixture = Fixture::new(Strategy::Watch);
    let _registration = fixture.register("u", &[], &[]);
    let refused = |times| fixture.api.state().refusals = times;
    refused(5);
    let began = tokio::time::Instant::now();
    let token = fixture.objects.token(&key(3600)).await.expect("the API server has learnt whose pod it is");
    assert_eq!(token.text.expose_secret(), "token-1");
    assert!(began.elapsed() < Duration::from_millis(400), "{:?}", began.elapsed());
    // A lasting denial becomes an error.
    refused(100);
    let error = fixture.objects.token(&key(600)).await.expect_err("refused").to_string();
    assert!(error.starts_with("failed to fetch token: ") && error.contains("no relationship found"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn must_know_waits_for_services() {
    let fixture = Fixture::new(Strategy::Watch);
    let variables = fixture.objects.service_variables("ns", true, true).await.expect("an empty list is an answer");
    assert!(variables.is_empty());
    let away = Fixture::new(Strategy::Watch);
    away.api.away(true);
    let error = away.objects.service_variables("ns", true, true).await.expect_err("never read").to_string();
    assert_eq!(error, "services have not yet been read at least once, cannot construct envvars");
    assert!(away.objects.service_variables("ns", true, false).await.expect("static pods do not wait").is_empty());
}

#[tokio::test]
async fn standalone_reads_fail() {
    let objects = Objects::standalone();
    let text = "not supported due to running kubelet in standalone mode";
    assert_eq!(objects.config_map("ns", "a").await.expect_err("nothing").to_string(), text);
    assert_eq!(objects.secret("ns", "a").await.expect_err("nothing").to_string(), text);
    let error = objects.token(&key(600)).await.expect_err("nothing").to_string();
    assert_eq!(error, "cannot use TokenManager when kubelet is in standalone mode");
    assert!(objects.service_variables("ns", true, true).await.expect("none").is_empty());
}

fn with_class(class: Option<&str>) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"runtimeClassName": class, "containers": []}}))
    .expect("a pod")
}

async fn handler(objects: &Objects, class: Option<&str>) -> Result<String, String> {
    objects.runtime_handler(&with_class(class)).await.map_err(|error| error.to_string())
}

#[tokio::test(start_paused = true)]
async fn runtime_classes_are_watched_once_a_pod_names_one() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.api.put_class("sandboxed", "runsc", true);
    assert_eq!(handler(&fixture.objects, None).await, Ok(String::new()));
    assert_eq!(handler(&fixture.objects, Some("")).await, Ok(String::new()));
    assert_eq!(fixture.api.take_requests(), [""; 0], "no pod names a class");

    fixture.objects.register(&with_class(Some("sandboxed")), &mut Registration::new("u".into()));
    assert_eq!(handler(&fixture.objects, Some("sandboxed")).await, Ok("runsc".into()));
    assert_eq!(handler(&fixture.objects, Some("sandboxed")).await, Ok("runsc".into()));
    let requests = fixture.api.take_requests();
    assert!(requests.len() == 1 && requests[0].contains("/runtimeclasses?"), "{requests:?}");
    let unknown = Err("runtimeclass.node.k8s.io \"other\" not found".to_owned());
    assert_eq!(handler(&fixture.objects, Some("other")).await, unknown);
    fixture.api.put_class("new", "kata", false);
    assert_eq!(handler(&fixture.objects, Some("new")).await, Ok("kata".into()), "the watch has not delivered it yet");
    fixture.api.put_class("other", "crun", true);
    tokio::time::sleep(Duration::from_millis(1)).await;
    fixture.api.take_requests();
    assert_eq!(handler(&fixture.objects, Some("other")).await, Ok("crun".into()));
    assert_eq!(fixture.api.take_requests(), [""; 0], "the watch has it");
}

#[tokio::test(start_paused = true)]
async fn known_runtime_classes_outlast_the_api_server() {
    let fixture = Fixture::new(Strategy::Watch);
    fixture.api.put_class("sandboxed", "runsc", true);
    assert_eq!(handler(&fixture.objects, Some("sandboxed")).await, Ok("runsc".into()));
    fixture.api.away(true);
    assert_eq!(handler(&fixture.objects, Some("sandboxed")).await, Ok("runsc".into()));
    let unknown = Err("runtimeclass.node.k8s.io \"other\" not found".to_owned());
    assert_eq!(handler(&fixture.objects, Some("other")).await, unknown);

    let away = Fixture::new(Strategy::Watch);
    away.api.away(true);
    let error = handler(&away.objects, Some("sandboxed")).await.expect_err("never listed");
    assert!(error.starts_with("failed to sync runtimeclass.node.k8s.io cache: "), "{error}");
    let error = handler(&fixture.objects, Some("../x")).await.expect_err("no name");
    assert_eq!(error, "runtimeclass.node.k8s.io \"../x\" cannot exist: the name is not a DNS subdomain");
    let error = handler(&Objects::standalone(), Some("sandboxed")).await.expect_err("no API server");
    assert_eq!(error, "not supported due to running kubelet in standalone mode");
}
