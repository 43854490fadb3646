//! Delivery to a simulated API server with scripted failures, under paused time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::SystemTime;

use http::Method;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::EventType;
use super::Loss;
use super::Recorder;
use super::RecorderObserver;
use super::delivery::Deferral;
use crate::model::Clock;
use crate::model::testing;

/// An answer: a status, or no connection at all.
type Answer = Result<(u16, &'static str), &'static str>;

/// A request: method, path and body.
type Asked = (Method, String, Value);

/// What was asked, and what is still to be answered; then everything succeeds.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<(Vec<Asked>, VecDeque<Answer>)>>);

#[derive(Default)]
struct Losses(Mutex<Vec<Loss>>);

impl RecorderObserver for Losses {
    fn lost(&self, why: Loss) {
        self.0.lock().unwrap().push(why);
    }
}

impl Server {
    fn client(&self) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| server.clone().answer(request));
        kube::Client::new(service, "default")
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, std::io::Error> {
        let (head, body) = request.into_parts();
        let bytes = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
        let body: Value = serde_json::from_slice(&bytes)?;
        let answer = {
            let mut state = self.0.lock().unwrap();
            state.0.push((head.method, head.uri.path().to_owned(), body.clone()));
            state.1.pop_front()
        };
        let (code, reason) = match answer {
            Some(Err(error)) => return Err(std::io::Error::other(error)),
            Some(Ok(status)) => status,
            None => (201, ""),
        };
        let mut answer = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": "x" }, "involvedObject": {},
        });
        if code >= 400 {
            answer = json!({ "kind": "Status", "status": "Failure", "reason": reason, "code": code });
        }
        let body = Body::from(answer.to_string().into_bytes());
        Ok(Response::builder().status(code).body(body).unwrap())
    }

    fn will(&self, answers: impl IntoIterator<Item = Answer>) {
        self.0.lock().unwrap().1.extend(answers);
    }

    fn asked(&self) -> Vec<(Method, String, Value)> {
        self.0.lock().unwrap().0.clone()
    }
}

struct TestDelivery {
    server: Server,
    losses: Arc<Losses>,
    recorder: Recorder,
    shutdown: CancellationToken,
    /// Events are deferred until they are this old.
    hold: watch::Sender<Duration>,
    delivery: tokio::task::JoinHandle<()>,
}

struct Hold(watch::Receiver<Duration>);

impl Deferral for Hold {
    async fn ready(&self, age: Duration) {
        let left = self.0.borrow().saturating_sub(age);
        tokio::time::sleep(left).await;
    }
}

fn start_delivery() -> TestDelivery {
    let (server, losses, shutdown) = (Server::default(), Arc::new(Losses::default()), CancellationToken::new());
    let clock = Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
    let (recorder, queue) = Recorder::delivering("node-1", clock, losses.clone());
    let hold = watch::Sender::new(Duration::ZERO);
    let delivery = tokio::spawn(queue.deliver(server.client(), Hold(hold.subscribe()), shutdown.clone()));
    TestDelivery { server, losses, recorder, shutdown, hold, delivery }
}

impl TestDelivery {
    fn record(&self, message: &str) {
        let pod = testing::pod("Always", &[], &["c"]);
        self.recorder.pod_event(&pod, "spec.containers{c}", EventType::Normal, "Started", message);
    }

    /// Waits until every recorded event is delivered or lost.
    async fn end(self) -> (Vec<(Method, String, Value)>, Vec<Loss>) {
        drop(self.recorder);
        self.delivery.await.unwrap();
        let losses = self.losses.0.lock().unwrap().clone();
        (self.server.asked(), losses)
    }
}

#[tokio::test(start_paused = true)]
async fn events_on_the_node_have_its_uid_once_it_is_known_also_of_one_created_again() {
    let delivery = start_delivery();
    let record = |message| delivery.recorder.node_event(EventType::Normal, "Starting", message);
    record("before");
    delivery.recorder.identify_node("uid-1");
    record("after");
    delivery.recorder.identify_node("uid-2");
    record("created again");
    let (asked, _) = delivery.end().await;
    let uids: Vec<Option<&str>> = asked.iter().map(|(_, _, body)| body["involvedObject"]["uid"].as_str()).collect();
    assert_eq!(uids, [None, Some("uid-1"), Some("uid-2")]);
}

#[tokio::test(start_paused = true)]
async fn created_then_patched_then_created_again_if_gone() {
    let test = start_delivery();
    test.server.will([Ok((201, "")), Ok((200, "")), Ok((404, "NotFound")), Ok((201, ""))]);
    (0..3).for_each(|_| test.record("hello"));
    test.recorder.node_event(EventType::Normal, "Starting", "Starting kubelet.");
    let (asked, losses) = test.end().await;
    let folder = "/api/v1/namespaces/ns/events".to_owned();
    let name = asked[0].2["metadata"]["name"].as_str().unwrap().to_owned();
    let steps: Vec<_> = asked.iter().map(|(method, path, _)| (method.clone(), path.clone())).collect();
    let expected = [
        (Method::POST, folder.clone()),
        (Method::PATCH, format!("{folder}/{name}")),
        (Method::PATCH, format!("{folder}/{name}")),
        (Method::POST, folder),
        (Method::POST, "/api/v1/namespaces/default/events".to_owned()),
    ];
    assert_eq!(steps, expected);
    assert_eq!(asked[1].2["count"], 2);
    assert_eq!((&asked[3].2["count"], asked[3].2["metadata"]["name"].as_str()), (&json!(3), Some(name.as_str())));
    assert_eq!(asked[4].2["involvedObject"], json!({ "apiVersion": "v1", "kind": "Node", "name": "node-1" }));
    assert_eq!(losses, []);
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_server_is_tried_twelve_times() {
    let test = start_delivery();
    let began = Instant::now();
    test.server.will((0..12).map(|_| Err("connection refused")));
    test.record("lost");
    test.record("recorded");
    let (asked, losses) = test.end().await;
    assert_eq!(asked.len(), 13);
    assert_eq!(losses, [Loss::Unreachable]);
    assert_eq!(asked[12].2["message"], "recorded");
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(100) && took <= Duration::from_secs(110), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn each_event_is_deferred_by_its_age() {
    let test = start_delivery();
    let began = Instant::now();
    test.hold.send_replace(Duration::from_secs(2));
    test.record("a");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    test.record("b");
    assert_eq!(test.server.asked(), []);
    let server = test.server.clone();
    let (asked, losses) = test.end().await;
    assert_eq!(began.elapsed(), Duration::from_millis(3500), "b is two seconds old then");
    let messages: Vec<_> = asked.iter().map(|(_, _, body)| body["message"].clone()).collect();
    assert_eq!((messages, losses, server.asked().len()), (vec![json!("a"), json!("b")], vec![], 2));
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_set_back_neither_dates_events_in_the_future_nor_defers_them_longer() {
    let test = start_delivery();
    let began = Instant::now();
    // The last event before was an hour later by the clock.
    let last = 1_700_003_600_000_000_000;
    test.recorder.sender.as_ref().unwrap().last_number.store(last, Ordering::Relaxed);
    test.hold.send_replace(Duration::from_secs(2));
    test.record("a");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    test.record("b");
    let (asked, _) = test.end().await;
    assert_eq!(began.elapsed(), Duration::from_millis(3500), "b is two seconds old then");
    let times: Vec<_> =
        asked.iter().flat_map(|(_, _, body)| [&body["firstTimestamp"], &body["lastTimestamp"]]).collect();
    assert_eq!(times, ["2023-11-14T22:13:20Z", "2023-11-14T22:13:20Z", "2023-11-14T22:13:21Z", "2023-11-14T22:13:21Z"]);
    let names: Vec<_> = asked.iter().map(|(_, _, body)| body["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, [format!("pod.{:x}", last + 1), format!("pod.{:x}", last + 2)], "no name is used twice");
}

#[tokio::test(start_paused = true)]
async fn a_warning_overtakes_deferred_events() {
    let test = start_delivery();
    let began = Instant::now();
    test.hold.send_replace(Duration::from_secs(2));
    test.record("a");
    test.record("b");
    tokio::time::sleep(Duration::from_millis(500)).await;
    test.recorder.node_event(EventType::Warning, "OOMKilled", "killed");
    tokio::time::sleep(Duration::from_millis(1)).await;
    let messages = |asked: &[Asked]| asked.iter().map(|(_, _, body)| body["message"].clone()).collect::<Vec<_>>();
    assert_eq!(messages(&test.server.asked()), ["killed"]);
    let (asked, losses) = test.end().await;
    assert_eq!((messages(&asked), losses), (vec![json!("killed"), json!("a"), json!("b")], vec![]));
    assert!(began.elapsed() < Duration::from_millis(2100), "a warning delays no other event");
}

#[tokio::test(start_paused = true)]
async fn a_refused_event_is_not_sent_again() {
    let test = start_delivery();
    test.server.will([Ok((403, "Forbidden")), Ok((409, "AlreadyExists")), Ok((500, "InternalError"))]);
    ["a", "b", "c", "d"].into_iter().for_each(|message| test.record(message));
    let (asked, losses) = test.end().await;
    assert_eq!(asked.len(), 4);
    assert_eq!(losses, [Loss::Rejected; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_drops_and_counts() {
    let test = start_delivery();
    test.server.will((0..12).map(|_| Err("connection refused")));
    (0..1005).for_each(|_| test.record("same"));
    assert_eq!(test.losses.0.lock().unwrap().len(), 5);
    let (_, losses) = test.end().await;
    assert_eq!(losses.iter().filter(|loss| **loss == Loss::QueueFull).count(), 5);
    assert_eq!(losses.iter().filter(|loss| **loss == Loss::Spam).count(), 1000 - 25);
}

#[tokio::test(start_paused = true)]
async fn queued_events_have_one_attempt_when_the_agent_stops() {
    let test = start_delivery();
    test.server.will([Err("connection refused")]);
    ["a", "b", "c"].into_iter().for_each(|message| test.record(message));
    while test.server.asked().is_empty() {
        tokio::task::yield_now().await;
    }
    test.shutdown.cancel();
    test.delivery.await.unwrap();
    let messages: Vec<_> = test.server.asked().iter().map(|(_, _, body)| body["message"].clone()).collect();
    assert_eq!(messages, ["a", "b", "c"]);
    assert_eq!(*test.losses.0.lock().unwrap(), [Loss::Unreachable]);
}
