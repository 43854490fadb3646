//! What the whole agent counts of its pods and containers, as the exposition shows it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::BodyExt as _;
use keblet::metrics::Metrics;
use keblet::model::Clock;
use keblet::recorder::{Loss, Recorder, RecorderObserver};
use keblet_tests::cri::*;
use keblet_tests::node::{Agent, Senses, pod};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

/// Nothing here takes longer, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(900);

fn node() -> (SimRuntime, TempDir) {
    let sim = SimRuntime::new(Options::default());
    sim.images(|images| images.store("busybox", 1 << 20));
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("hosts"), "127.0.0.1 localhost\n").expect("a hosts file");
    (sim, folder)
}

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
async fn what_workers_do_is_counted() {
    let (sim, folder) = node();
    let web =
        pod("web").after("init", "exit 0 1s").running("main", "exit 3 20s until 1").running("side", "run").build();
    let (agent, metrics) = Agent::start_counting(&sim, Senses::ALL, folder.path(), vec![web.clone()]);
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
async fn pods_that_only_the_runtime_knows_are_counted() {
    let (sim, folder) = node();
    let agent = Agent::start(&sim, Senses::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
    sim.until("web/main runs", SOON, |l| l.live("web", "main").is_some()).await.expect("it runs");
    drop(agent);
    let (_agent, metrics) = Agent::start_counting(&sim, Senses::ALL, folder.path(), Vec::new());
    shows(&metrics, &["kubelet_orphaned_runtime_pods_total 1"]).await;
}

struct NothingIsLost;

impl RecorderObserver for NothingIsLost {
    fn lost(&self, why: Loss) {
        panic!("{why:?}");
    }
}

/// What the API server is told: method, and the event or the patch of it.
type Told = Arc<Mutex<Vec<(http::Method, serde_json::Value)>>>;

/// A recorder, and what reaches the API server of it.
fn recorder() -> (Recorder, Told) {
    let (recorder, queue) = Recorder::delivering("sim", Clock::System, Arc::new(NothingIsLost));
    let told = Told::default();
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
    tokio::spawn(queue.deliver(kube::Client::new(service, "default"), CancellationToken::new()));
    (recorder, told)
}

/// As with upstream, a container that waits long is told of again and again, as one event that is counted up.
#[tokio::test(start_paused = true)]
async fn a_long_back_off_is_told_of_while_it_lasts() {
    let (sim, folder) = node();
    let (recorder, told) = recorder();
    let web = pod("web").running("main", "exit 1 1s until 9").build();
    let _agent = Agent::start_telling(&sim, Senses::ALL, folder.path(), vec![web], recorder);
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
