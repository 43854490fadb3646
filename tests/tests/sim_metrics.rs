//! What the whole agent counts of its pods and containers, as the exposition shows it.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use http_body_util::BodyExt as _;
use keblet::metrics::Metrics;
use keblet::model::Clock;
use keblet::recorder::Deferral;
use keblet::recorder::Loss;
use keblet::recorder::Recorder;
use keblet::recorder::RecorderObserver;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Nothing here takes longer, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(900);

/// Waits until the exposition has these lines.
async fn shows(metrics: &Metrics, lines: &[&str]) {
    let deadline = Instant::now() + SOON;
    loop {
        let text = metrics.render().expect("metrics");
        let missing: Vec<_> = lines.iter().filter(|line| !text.lines().any(|found| found == **line)).collect();
        if missing.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{missing:?} not in\n{text}");
        sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn worker_metrics_count_pods_and_containers() {
    let (sim, folder) = node();
    let web =
        pod("web").after("init", "exit 0 1s").running("main", "exit 3 20s until 1").running("side", "run").build();
    let (agent, metrics) = Agent::start_counting(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    shows(
        &metrics,
        &[
            "kubelet_containers_per_pod_count_sum 2",
            "kubelet_containers_per_pod_count_count 1",
            "kubelet_started_containers_total{container_type=\"container\"} 3",
            "kubelet_started_containers_total{container_type=\"init_container\"} 1",
            "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"3\",reason=\"Error\"} 1",
            "kubelet_terminated_containers_total{container_type=\"init_container\",exit_code=\"0\",reason=\"Completed\"} 1",
            "kubelet_pod_worker_duration_seconds_count{operation_type=\"create\"} 1",
        ],
    )
    .await;
    agent.update(web.clone()).await;
    shows(&metrics, &["kubelet_pod_worker_duration_seconds_count{operation_type=\"update\"} 1"]).await;
    // The same UID again while it ends: it starts anew.
    agent.remove(web.clone()).await;
    agent.add(web).await;
    shows(
        &metrics,
        &[
            "kubelet_restarted_pods_total{static=\"true\"} 1",
            "kubelet_pod_worker_duration_seconds_count{operation_type=\"kill\"} 1",
            "kubelet_pod_worker_duration_seconds_count{operation_type=\"terminated\"} 1",
            "kubelet_pod_worker_duration_seconds_count{operation_type=\"create\"} 2",
            "kubelet_orphaned_runtime_pods_total 0",
        ],
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn orphaned_runtime_pods_are_counted() {
    let (sim, folder) = node();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
    sim.until("web/main runs", SOON, |l| l.live("web", "main").is_some()).await.expect("it runs");
    drop(agent);
    let (_agent, metrics) = Agent::start_counting(&sim, SensorSet::ALL, folder.path(), Vec::new());
    shows(&metrics, &["kubelet_orphaned_runtime_pods_total 1"]).await;
}

struct NothingIsLost;

impl RecorderObserver for NothingIsLost {
    fn lost(&self, why: Loss) {
        panic!("{why:?}");
    }
}

/// What the API server is told: method, and the event or the patch of it.
type RecordedEvents = Arc<Mutex<Vec<(http::Method, serde_json::Value)>>>;

struct AtOnce;

impl Deferral for AtOnce {
    async fn ready(&self, _: Duration) {}
}

/// A recorder, and what reaches the API server of it.
fn recorder() -> (Recorder, RecordedEvents) {
    let (recorder, queue) = Recorder::delivering("sim", Clock::System, Arc::new(NothingIsLost));
    let told = RecordedEvents::default();
    let service = tower::service_fn({
        let told = told.clone();
        move |request: http::Request<kube::client::Body>| {
            let told = told.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
                let event = serde_json::from_slice(&body).map_err(std::io::Error::other)?;
                told.lock().expect("not poisoned").push((head.method, event));
                let answer = http::Response::builder().status(200);
                answer.body(kube::client::Body::from(body.to_vec())).map_err(std::io::Error::other)
            }
        }
    });
    tokio::spawn(queue.deliver(kube::Client::new(service, "default"), AtOnce, CancellationToken::new()));
    (recorder, told)
}

/// As with upstream, a container that waits long is told of again and again, as one event that is counted up.
#[tokio::test(start_paused = true)]
async fn long_back_off_repeats_its_event() {
    let (sim, folder) = node();
    let (recorder, told) = recorder();
    let web = pod("web").running("main", "exit 1 1s until 9").build();
    let _agent = Agent::start_telling(&sim, SensorSet::ALL, folder.path(), vec![web], recorder);
    let back_offs = || {
        let text = "Back-off restarting failed container main in pod ";
        let is_back_off = |event: &serde_json::Value| event["message"].as_str().is_some_and(|m| m.starts_with(text));
        let told = told.lock().expect("not poisoned");
        told.iter().filter(|(_, event)| is_back_off(event)).cloned().collect::<Vec<_>>()
    };
    let lives =
        |attempt| sim.until("a life", SOON, move |l| l.live("web", "main").is_some_and(|i| i.attempt == attempt));
    lives(4).await.expect("a fifth life");
    let before = back_offs().len();
    lives(5).await.expect("a sixth life");
    // 80 s: once when it begins, and once more after 60 to 90 s, if it still lasts then.
    let during = back_offs().len() - before;
    assert!((1..=3).contains(&during), "{during} in 80 s");
    lives(6).await.expect("a seventh life");
    let during = back_offs().len() - before - during;
    assert!((2..=4).contains(&during), "{during} in 160 s");
    let all = back_offs();
    assert_eq!(all[0].0, http::Method::POST);
    assert!(all[1..].iter().all(|(method, _)| method == http::Method::PATCH), "one event, counted up: {all:#?}");
    let counts: Vec<_> = all.iter().map(|(_, event)| event["count"].as_u64().expect("a count")).collect();
    assert_eq!(counts, (1..=u64::try_from(all.len()).expect("few")).collect::<Vec<_>>());
}

/// A pod that waits for its turn to be stopped and ends by itself meanwhile is neither stopped nor told of as killed.
#[tokio::test(start_paused = true)]
async fn pod_terminated_while_waiting_for_a_stop_permit_is_not_stopped() {
    let (sim, folder) = node();
    let (recorder, told) = recorder();
    // As many as have turns at once: they keep theirs as long as anybody may.
    let turns = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    let deaf: Vec<_> = (0..turns).map(|n| pod(&format!("deaf-{n}")).running("main", "term ignore").build()).collect();
    let static_pod = pod("static").running("main", "run").build();
    let api = pod("api").running("main", "run").from_api();
    let all = deaf.iter().chain([&static_pod, &api.clone().build()]).cloned().collect();
    let agent = Agent::start_telling(&sim, SensorSet::ALL, folder.path(), all, recorder);
    sim.until("all up", SOON, |l| l.live_count() == turns + 2).await.expect("up");
    sleep(Duration::from_secs(2)).await;
    for pod in deaf {
        agent.remove(pod).await;
    }
    sleep(Duration::from_millis(20)).await;
    agent.remove(static_pod).await;
    agent.update(api.deleting().build()).await;
    sleep(Duration::from_millis(100)).await;
    let stopped = |l: &Trace| l.calls().filter(|call| call.method == Method::StopContainer).count();
    assert_eq!(sim.trace(stopped), turns, "the last two wait for their turn");
    for name in ["static", "api"] {
        sim.kill(name, "main", Exit::Code(0)).expect("it runs");
    }
    let begin = Instant::now();
    while !(sim.sandboxes("static").is_empty() && sim.sandboxes("api").is_empty()) {
        assert!(begin.elapsed() < SOON, "{}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(sim.trace(stopped), turns, "{}", sim.trace(Trace::to_string));
    sleep(Duration::from_secs(1)).await;
    let told = told.lock().expect("not poisoned");
    let killing = told.iter().filter(|(_, event)| event["reason"] == "Killing");
    let killed: Vec<_> = killing.filter_map(|(_, event)| event["involvedObject"]["name"].as_str()).collect();
    assert_eq!(killed.len(), turns, "{killed:?}");
    assert!(killed.iter().all(|name| name.starts_with("deaf-")), "{killed:?}");
}
