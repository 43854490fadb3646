//! Metrics and events of the whole agent about its pods and containers.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use keblet::metrics::Metrics;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::recorder;
use tokio::time::Instant;
use tokio::time::sleep;

/// Deadline of every wait, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(900);

/// Waits until the exposition contains these lines.
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
    let (agent, metrics) = Agent::start_with_metrics(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
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
    // The same UID is desired again while its pod terminates: it is started afterwards.
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

/// An agent counts the exits that none before it has counted, also of the time without an agent.
#[tokio::test(start_paused = true)]
async fn agents_that_follow_each_other_count_an_exit_once() {
    let (sim, folder) = node();
    let web = pod("web").after("init", "exit 0 1s").running("main", "exit 3 20s until 1").build();
    let start = || Agent::start_with_metrics(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    let until_attempt = |attempt| {
        sim.until("the next instance", SOON, move |l| l.live("web", "main").is_some_and(|i| i.attempt == attempt))
    };
    let family = "kubelet_terminated_containers_total";
    let exit = |code: u8| format!("{family}{{container_type=\"container\",exit_code=\"{code}\",reason=\"Error\"}} 1");
    let counted = |metrics: &Metrics| -> Vec<String> {
        let text = metrics.render().expect("metrics");
        text.lines().filter(|line| line.starts_with(&format!("{family}{{"))).map(str::to_owned).collect()
    };
    let (agent, metrics) = start();
    shows(&metrics, &[&*exit(3)]).await;
    until_attempt(1).await.expect("a second instance");
    drop(agent);
    let (agent, metrics) = start();
    shows(&metrics, &["kubelet_pod_worker_duration_seconds_count{operation_type=\"create\"} 1"]).await;
    assert_eq!(counted(&metrics), Vec::<String>::new());
    sim.kill("web", "main", Exit::Code(4)).expect("it runs");
    shows(&metrics, &[&*exit(4)]).await;
    until_attempt(2).await.expect("a third instance");
    drop(agent);
    sim.kill("web", "main", Exit::Code(5)).expect("it runs");
    let (_agent, metrics) = start();
    until_attempt(3).await.expect("a fourth instance");
    assert_eq!(counted(&metrics), [exit(5)]);
}

/// Also on a node without an API server; a pod that runs already is not started.
#[tokio::test(start_paused = true)]
async fn starts_of_static_pods_are_measured() {
    let (sim, folder) = node();
    let mut web = Pod::clone(&pod("web").running("main", "run").build());
    let seen = ("kubernetes.io/config.seen".to_owned(), "1970-01-01T00:00:01Z".to_owned());
    web.metadata.annotations.get_or_insert_default().extend([seen]);
    let web = Arc::new(web);
    for starts in [1, 0] {
        let (_agent, metrics) = Agent::start_with_metrics(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
        shows(&metrics, &["kubelet_pod_worker_duration_seconds_count{operation_type=\"create\"} 1"]).await;
        shows(&metrics, &[&*format!("kubelet_pod_start_duration_seconds_count {starts}")]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn orphaned_runtime_pods_are_counted() {
    let (sim, folder) = node();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
    sim.until("web/main runs", SOON, |l| l.live("web", "main").is_some()).await.expect("it runs");
    drop(agent);
    let (_agent, metrics) = Agent::start_with_metrics(&sim, SensorSet::ALL, folder.path(), Vec::new());
    shows(&metrics, &["kubelet_orphaned_runtime_pods_total 1"]).await;
}

/// What is left of a pod that has ended is removed with it.
#[tokio::test(start_paused = true)]
async fn remains_of_a_pod_that_has_ended_are_no_orphaned_pod() {
    let (sim, folder) = node();
    let web = pod("web").restarted("Never").running("main", "exit 0 1s").build();
    let (agent, metrics) = Agent::start_with_metrics(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(sim.statuses("web").len(), 1, "the container stays for its log");
    agent.remove(web).await;
    let begin = Instant::now();
    while !sim.sandboxes("web").is_empty() {
        assert!(begin.elapsed() < SOON, "{}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(10)).await;
    }
    shows(&metrics, &["kubelet_orphaned_runtime_pods_total 0"]).await;
}

/// As in the kubelet, a long back-off repeats its event, as one event with an increasing count.
#[tokio::test(start_paused = true)]
async fn long_back_off_repeats_its_event() {
    let (sim, folder) = node();
    let (recorder, requests) = recorder();
    let web = pod("web").running("main", "exit 1 1s until 9").build();
    let _agent = Agent::start_with_recorder(&sim, SensorSet::ALL, folder.path(), vec![web], recorder);
    let back_offs = || {
        let text = "Back-off restarting failed container main in pod ";
        let is_back_off = |event: &serde_json::Value| event["message"].as_str().is_some_and(|m| m.starts_with(text));
        let requests = requests.lock().expect("not poisoned");
        requests.iter().filter(|(_, event)| is_back_off(event)).cloned().collect::<Vec<_>>()
    };
    let until_attempt = |attempt| {
        sim.until("the next instance", SOON, move |l| l.live("web", "main").is_some_and(|i| i.attempt == attempt))
    };
    until_attempt(4).await.expect("a fifth instance");
    let before = back_offs().len();
    until_attempt(5).await.expect("a sixth instance");
    // 80 s: one event when it begins, and another after 60 to 90 s, if it still lasts then.
    let during = back_offs().len() - before;
    assert!((1..=3).contains(&during), "{during} in 80 s");
    until_attempt(6).await.expect("a seventh instance");
    let during = back_offs().len() - before - during;
    assert!((2..=4).contains(&during), "{during} in 160 s");
    let all = back_offs();
    assert_eq!(all[0].0, http::Method::POST);
    assert!(
        all[1..].iter().all(|(method, _)| method == http::Method::PATCH),
        "one event with an increasing count: {all:#?}"
    );
    let counts: Vec<_> = all.iter().map(|(_, event)| event["count"].as_u64().expect("a count")).collect();
    assert_eq!(counts, (1..=u64::try_from(all.len()).expect("few")).collect::<Vec<_>>());
}

/// A pod that exits by itself while it waits for a stop permit is neither stopped nor reported as killed.
#[tokio::test(start_paused = true)]
async fn pod_terminated_while_waiting_for_a_stop_permit_is_not_stopped() {
    let (sim, folder) = node();
    let (recorder, requests) = recorder();
    // As many pods as there are permits: they hold theirs as long as possible.
    let permits = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    let stubborn: Vec<_> =
        (0..permits).map(|n| pod(&format!("stubborn-{n}")).running("main", "term ignore").build()).collect();
    let static_pod = pod("static").running("main", "run").build();
    let api = pod("api").running("main", "run").from_api();
    let all = stubborn.iter().chain([&static_pod, &api.clone().build()]).cloned().collect();
    let agent = Agent::start_with_recorder(&sim, SensorSet::ALL, folder.path(), all, recorder);
    sim.until("all up", SOON, |l| l.live_count() == permits + 2).await.expect("up");
    sleep(Duration::from_secs(2)).await;
    for pod in stubborn {
        agent.remove(pod).await;
    }
    sleep(Duration::from_millis(20)).await;
    agent.remove(static_pod).await;
    agent.update(api.deleting().build()).await;
    sleep(Duration::from_millis(100)).await;
    let stopped = |l: &Trace| l.calls().filter(|call| call.method == Method::StopContainer).count();
    assert_eq!(sim.trace(stopped), permits, "the last two wait for a permit");
    for name in ["static", "api"] {
        sim.kill(name, "main", Exit::Code(0)).expect("it runs");
    }
    let begin = Instant::now();
    while !(sim.sandboxes("static").is_empty() && sim.sandboxes("api").is_empty()) {
        assert!(begin.elapsed() < SOON, "{}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(sim.trace(stopped), permits, "{}", sim.trace(Trace::to_string));
    sleep(Duration::from_secs(1)).await;
    let requests = requests.lock().expect("not poisoned");
    let killing = requests.iter().filter(|(_, event)| event["reason"] == "Killing");
    let killed: Vec<_> = killing.filter_map(|(_, event)| event["involvedObject"]["name"].as_str()).collect();
    assert_eq!(killed.len(), permits, "{killed:?}");
    assert!(killed.iter().all(|name| name.starts_with("stubborn-")), "{killed:?}");
}
