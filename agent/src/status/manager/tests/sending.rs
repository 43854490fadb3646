//! The manager in paused time.

mod changed;
mod gone;

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;
use tracing::Level;

use super::copy;
use super::server::Fault;
use super::server::Server;
use super::status;
use super::time;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::ContainerStatus;
use crate::model::PodUid;
use crate::model::StartFailure;
use crate::model::restart::RestartGates;
use crate::model::testing;
use crate::model::testing::LogCount;
use crate::pacing::Pacing;
use crate::pacing::PacingPolicy;
use crate::pacing::Priority;
use crate::recorder::Recorder;
use crate::recorder::testing::listening;
use crate::retry::RetryTracker;
use crate::status::NodeAddresses;
use crate::status::PodObservations;
use crate::status::Statuses;
use crate::status::manager::StatusManager;

/// A manager, the cache it reads and the server it writes to.
struct Harness {
    server: Server,
    statuses: Statuses,
    metrics: Arc<Metrics>,
    priority: Priority,
    _shutdown: DropGuard,
}

fn site() -> Harness {
    site_reporting_to(Recorder::default())
}

/// The same, with events sent to `recorder`.
fn site_reporting_to(recorder: Recorder) -> Harness {
    let (server, metrics, shutdown) = (Server::new(), Metrics::new(), CancellationToken::new());
    let pacing = Pacing::new(PacingPolicy::default(), 2);
    let node = watch::channel(NodeAddresses::default()).1;
    let statuses = Statuses::new("sim".into(), node, RestartGates::default()).with_api(Arc::new(server.clone()));
    let manager = StatusManager {
        api_view: statuses.api_view().expect("an API server"),
        statuses: statuses.clone(),
        api: Arc::new(server.clone()),
        first_status: pacing.first_status,
        clock: Clock::System,
        metrics: metrics.clone(),
        retries: RetryTracker::new(recorder, Some(metrics.clone())),
    };
    tokio::spawn(manager.run(shutdown.clone()));
    Harness { server, statuses, metrics, priority: pacing.priority, _shutdown: shutdown.drop_guard() }
}

impl Harness {
    /// A pod that is pending in the API.
    fn pod(&self, name: &str) -> Pod {
        let pod = copy(name, &format!("{name}-uid"), 0, status(json!({"phase": "Pending"})));
        self.server.put(pod.clone());
        pod
    }

    /// Publishes a rejection with this reason.
    fn publish(&self, pod: &Pod, reason: &str) {
        self.statuses.reject(pod, reason, "why", SystemTime::now());
    }

    async fn until_sent(&self, name: &str, reason: &str) {
        self.server.until(|server| reason_of(server, name) == reason).await;
    }
}

fn reason_of(server: &Server, name: &str) -> String {
    server.pod(name).and_then(|pod| pod.status?.reason).unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn a_change_costs_one_request() {
    let site = site();
    let pod = site.pod("a");
    site.publish(&pod, "One");
    site.until_sent("a", "One").await;
    let calls = site.server.calls();
    assert_eq!(site.server.verbs(), ["patch"]);
    assert_eq!(calls[0].body["metadata"]["uid"], "a-uid");
    assert_eq!(calls[0].body["status"]["phase"], "Failed");
    assert!(site.metrics.render().unwrap().contains("kubelet_pod_status_sync_duration_seconds_count 1\n"));
    // Half a minute of reconciling what agrees, with a watch that lags, costs nothing.
    tokio::time::sleep(Duration::from_secs(30)).await;
    site.server.show();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(site.server.verbs(), ["patch"]);
}

#[tokio::test(start_paused = true)]
async fn a_field_that_the_server_drops_is_not_sent_for_ever() {
    let site = site();
    site.server.drop_field("reason");
    let pod = site.pod("a");
    site.publish(&pod, "One");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(site.server.verbs(), ["patch", "patch"], "once with the rest, once alone");
    site.publish(&pod, "Two");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(site.server.calls().len(), 3, "a new version is tried once");
    let mut other = site.server.pod("a").expect("the pod");
    other.status.get_or_insert_default().phase = Some("Running".to_owned());
    site.server.put(other);
    site.statuses.request_sync(&PodUid::from("a-uid"));
    site.server.until(|server| server.phase("a") == "Failed").await;
}

#[tokio::test(start_paused = true)]
async fn superseded_statuses_are_never_sent() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::Slow(Duration::from_secs(5))]);
    site.publish(&pod, "R0");
    tokio::time::sleep(Duration::from_secs(1)).await;
    for n in 1..=9 {
        site.publish(&pod, &format!("R{n}"));
    }
    site.until_sent("a", "R9").await;
    assert_eq!(site.server.verbs(), ["patch", "patch"]);
}

#[tokio::test(start_paused = true)]
async fn a_slow_request_delays_no_other_pod() {
    let site = site();
    let (slow, quick) = (site.pod("slow"), site.pod("quick"));
    site.server.script(&[Fault::Slow(Duration::from_secs(20))]);
    site.publish(&slow, "S");
    tokio::task::yield_now().await;
    let began = tokio::time::Instant::now();
    site.publish(&quick, "Q");
    site.until_sent("quick", "Q").await;
    assert!(began.elapsed() < Duration::from_millis(50), "{:?}", began.elapsed());
    site.until_sent("slow", "S").await;
}

#[tokio::test(start_paused = true)]
async fn a_burst_is_sent_side_by_side_within_bounds() {
    let site = site();
    let pods: Vec<Pod> = (0..1000).map(|n| site.pod(&format!("p{n}"))).collect();
    for pod in &pods {
        site.publish(pod, "First");
    }
    for pod in &pods {
        site.publish(pod, "Last");
    }
    let all =
        |server: &Server| pods.iter().all(|pod| reason_of(server, pod.metadata.name.as_deref().unwrap()) == "Last");
    site.server.until(all).await;
    assert_eq!(site.server.calls().len(), 1000, "one request each");
    assert_eq!(site.server.most_under_way(), 4);
}

#[tokio::test(start_paused = true)]
async fn hanging_requests_free_their_slot() {
    let site = site();
    site.server.script(&[Fault::Slow(Duration::from_secs(5)); 40]);
    let slow: Vec<Pod> = (0..40).map(|n| site.pod(&format!("slow{n}"))).collect();
    slow.iter().for_each(|pod| site.publish(pod, "S"));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(site.server.most_under_way(), 32, "four more each quarter of a second");
    site.until_sent("slow39", "S").await;
    assert_eq!(site.server.most_under_way(), 32);
}

#[tokio::test(start_paused = true)]
async fn deletions_go_before_other_pods_statuses() {
    let site = site();
    let pods: Vec<Pod> = (0..8).map(|n| site.pod(&format!("p{n}"))).collect();
    for mut pod in pods {
        pod.metadata.deletion_timestamp = Some(time(1));
        site.server.put(pod.clone());
        site.publish(&pod, "Last");
        site.statuses.terminate(&pod, SystemTime::now());
    }
    site.server.until(|server| server.calls().len() == 16).await;
    let verbs = site.server.verbs();
    assert_eq!(verbs[..8].iter().filter(|verb| **verb == "delete").count(), 4, "{verbs:?}");
}

#[tokio::test(start_paused = true)]
async fn after_a_lost_answer_the_copy_is_read_again() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::LostAnswer]);
    site.publish(&pod, "One");
    site.server.until(|server| server.verbs() == ["patch", "get"]).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(site.server.verbs(), ["patch", "get"], "it had been carried out");
    assert_eq!(reason_of(&site.server, "a"), "One");
}

#[tokio::test(start_paused = true)]
async fn a_status_whose_answer_cannot_be_decoded_is_sent_once() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::Undecodable, Fault::LostAnswer, Fault::Undecodable, Fault::Undecodable]);
    site.publish(&pod, "One");
    site.until_sent("a", "One").await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(site.server.verbs(), ["patch"]);
    site.publish(&pod, "Two");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(site.server.verbs(), ["patch", "patch", "get", "patch"], "after a lost answer it is sent again");
    assert_eq!(reason_of(&site.server, "a"), "Two");
}

#[tokio::test(start_paused = true)]
async fn a_status_reverted_during_a_lost_answer_is_sent() {
    let site = site();
    let pod = site.pod("a");
    site.publish(&pod, "Zero");
    site.until_sent("a", "Zero").await;
    site.server.show();
    site.server.script(&[Fault::LostAnswer]);
    site.publish(&pod, "One");
    site.until_sent("a", "One").await;
    // The watch has not shown "One": by its copy there is nothing to do.
    site.publish(&pod, "Zero");
    site.until_sent("a", "Zero").await;
}

#[tokio::test(start_paused = true)]
async fn failures_back_off_and_the_last_status_arrives() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::LostCall; 12]);
    site.publish(&pod, "One");
    site.server.until(|server| server.calls().len() == 6).await;
    site.publish(&pod, "Two");
    site.until_sent("a", "Two").await;
    let calls = site.server.calls();
    assert_eq!(calls.iter().filter(|call| call.verb == "patch").count(), 2, "one lost, one after the reading");
    let gaps: Vec<Duration> = calls.windows(2).map(|two| two[1].at - two[0].at).collect();
    assert!(gaps[0] <= Duration::from_millis(110), "{gaps:?}");
    assert!(gaps[..12].iter().all(|gap| *gap <= Duration::from_millis(10_010)), "{gaps:?}");
    assert!(gaps[10] >= Duration::from_secs(5), "{gaps:?}");
}

/// As with an admission webhook for `pods/status` that does not answer.
#[tokio::test(start_paused = true)]
async fn a_status_that_cannot_be_sent_is_retried_with_growing_pauses_although_the_pod_can_be_read() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::LostCall, Fault::None].repeat(100));
    site.publish(&pod, "One");
    tokio::time::sleep(Duration::from_secs(120)).await;
    let calls = site.server.calls();
    let patches: Vec<_> = calls.iter().filter(|call| call.verb == "patch").map(|call| call.at).collect();
    assert!((15..=35).contains(&patches.len()), "{} in two minutes", patches.len());
    let gaps: Vec<Duration> = patches.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(gaps[0] <= Duration::from_millis(110), "{gaps:?}");
    assert!(gaps[8..].iter().all(|gap| *gap >= Duration::from_secs(5)), "{gaps:?}");
}

/// As by an admission policy.
#[tokio::test(start_paused = true)]
async fn a_status_that_is_always_refused_is_retried_with_growing_pauses_and_reported() {
    let (warned, (recorder, mut events)) = (LogCount::start("keblet::retry", Level::WARN), listening());
    let site = site_reporting_to(recorder);
    let pod = site.pod("a");
    site.server.script(&[Fault::Refused; 60]);
    site.publish(&pod, "One");
    tokio::time::sleep(Duration::from_secs(300)).await;
    // 6 to 10 s of short pauses, then one in 6.4 to 9.6 s.
    let calls = site.server.calls().len();
    assert!((34..=54).contains(&calls), "{calls} calls in five minutes");
    assert_eq!(warned.lines(), 1);
    let sent = events.take();
    assert_eq!(sent.len(), 1, "{sent:?}");
    let expected = "node W OperationStuck: send_status of ns/a(a-uid) has failed for 3 minutes: refused: 403";
    assert_eq!(sent[0], expected);
    let shows = |line: &str| site.metrics.render().expect("metrics").lines().any(|shown| shown == line);
    assert!(shows("keblet_stuck_operations{operation=\"send_status\"} 1"));

    site.until_sent("a", "One").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(shows("keblet_stuck_operations{operation=\"send_status\"} 0"));
    assert!(shows("keblet_retries_total{operation=\"send_status\"} 60"));
    assert_eq!((warned.lines(), events.take()), (1, Vec::new()));
}

/// A status that cannot be sent any more is not stuck.
#[tokio::test(start_paused = true)]
async fn a_refused_status_of_a_pod_that_is_gone_is_not_counted() {
    let site = site();
    let (pod, other) = (site.pod("a"), site.pod("b"));
    site.server.script(&[Fault::Refused; 120]);
    site.publish(&pod, "One");
    site.publish(&other, "One");
    tokio::time::sleep(Duration::from_secs(240)).await;
    let shows = |count: u32| {
        let line = format!("keblet_stuck_operations{{operation=\"send_status\"}} {count}\n");
        site.metrics.render().expect("metrics").contains(&line)
    };
    assert!(shows(2));
    site.statuses.retain(&HashSet::from([PodUid::from("b-uid")]));
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(shows(1));
    // This one still terminates on the node.
    site.server.remove("b");
    site.server.show();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(shows(0));
}

#[tokio::test(start_paused = true)]
async fn a_rejected_status_is_retried_without_reading() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::Refused, Fault::Conflict, Fault::None, Fault::Failed]);
    site.publish(&pod, "One");
    site.until_sent("a", "One").await;
    let expected = ["patch", "patch", "get", "patch", "get", "patch"];
    assert_eq!(site.server.verbs(), expected, "what has failed may have been executed");
}

#[tokio::test(start_paused = true)]
async fn a_status_overwritten_by_others_is_restored() {
    let site = site();
    let pod = site.pod("a");
    site.publish(&pod, "One");
    site.until_sent("a", "One").await;
    let mut other = site.server.pod("a").expect("the pod");
    other.status.as_mut().expect("a status").reason = Some("Meddled".into());
    site.server.put(other);
    let began = tokio::time::Instant::now();
    site.until_sent("a", "One").await;
    assert!(began.elapsed() <= Duration::from_secs(11), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_static_pods_status_goes_to_its_mirror() {
    let site = site();
    let mut pod = copy("static-node", "hash", 0, status(json!({"phase": "Pending"})));
    pod.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
    site.publish(&pod, "One");
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(site.server.verbs(), Vec::<&str>::new(), "there is no mirror yet");
    site.server.put(copy("static-node", "mirror-uid", 0, status(json!({"phase": "Pending"}))));
    site.server.show_as("static-node", "hash");
    site.statuses.request_sync(&PodUid::from("hash"));
    site.until_sent("static-node", "One").await;
    assert_eq!(site.server.calls()[0].body["metadata"]["uid"], "mirror-uid");
}

fn any_fault() -> impl Strategy<Value = Fault> {
    let slow = (1u64..5_000).prop_map(|millis| Fault::Slow(Duration::from_millis(millis)));
    let rest = [Fault::None, Fault::LostAnswer, Fault::LostCall, Fault::Conflict, Fault::Refused];
    prop_oneof![4 => prop::sample::select(rest.to_vec()), 1 => slow]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever fails, and whenever the watch delivers, the server ends up with the last status of every pod.
    #[test]
    fn the_last_status_is_never_lost(
        faults in prop::collection::vec(any_fault(), 0..30),
        words in prop::collection::vec((0usize..4, 0u64..3_000, any::<bool>()), 1..30),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let site = site();
            let pods: Vec<Pod> = (0..4).map(|n| site.pod(&format!("p{n}"))).collect();
            site.server.script(&faults);
            let mut last = [None; 4];
            for (nth, (pod, pause, show)) in words.into_iter().enumerate() {
                let word = nth % 3;
                site.publish(&pods[pod], &format!("R{word}"));
                last[pod] = Some(word);
                tokio::time::sleep(Duration::from_millis(pause)).await;
                if show {
                    site.server.show();
                }
            }
            for (pod, word) in last.into_iter().enumerate() {
                if let Some(word) = word {
                    site.until_sent(&format!("p{pod}"), &format!("R{word}")).await;
                }
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
            for (pod, word) in last.into_iter().enumerate() {
                let expected = word.map(|word| format!("R{word}")).unwrap_or_default();
                assert_eq!(reason_of(&site.server, &format!("p{pod}")), expected);
            }
        });
    }
}

/// Publishes that the one container of a pod is being created, or runs.
fn publish(site: &Harness, pod: &Pod, containers: Vec<ContainerStatus>) {
    let reasons = HashMap::default();
    site.statuses.publish(pod, &testing::snapshot(containers), observations(&reasons, false), SystemTime::now());
}

fn observations(reasons: &HashMap<String, StartFailure>, is_terminal: bool) -> PodObservations<'_> {
    PodObservations {
        reasons,
        qos_class: "BestEffort",
        resources: None,
        resize: crate::status::ResizeView::default(),
        recursive_read_only: false,
        stop_signals: false,
        is_terminal,
        probes: None,
        termination: None,
    }
}

/// A pod with one container, as the scheduler has left it.
fn bound(site: &Harness, name: &str) -> Pod {
    let mut pod = site.pod(name);
    pod.spec = testing::pod("Always", &[], &["c"]).spec.clone();
    site.server.put(pod.clone());
    pod
}

#[tokio::test(start_paused = true)]
async fn a_first_status_is_held_back_for_200_ms_while_a_container_starts() {
    let site = site();
    let pods = ["a", "b", "c"].map(|name| bound(&site, name));
    let _starting = site.priority.raise();
    for pod in &pods {
        publish(&site, pod, vec![]);
    }
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(site.server.calls().len(), 0, "they are being started");
    publish(&site, &pods[0], vec![testing::running("c", 0)]);
    site.server.until(|server| server.calls().len() == 1).await;
    assert_eq!(site.server.calls()[0].body["status"]["phase"], "Running");

    let since = tokio::time::Instant::now();
    site.server.until(|server| server.calls().len() == 3).await;
    assert!(since.elapsed() <= Duration::from_millis(51), "200 ms in all: {:?}", since.elapsed());
    assert_eq!(
        site.server.calls()[2].body["status"]["containerStatuses"][0]["state"]["waiting"]["reason"],
        "ContainerCreating"
    );
}

#[tokio::test(start_paused = true)]
async fn a_first_status_is_sent_when_no_container_is_starting() {
    let site = site();
    let pod = bound(&site, "a");
    let starting = site.priority.raise();
    publish(&site, &pod, vec![]);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(site.server.calls().len(), 0);
    drop(starting);
    let since = tokio::time::Instant::now();
    site.server.until(|server| server.calls().len() == 1).await;
    assert!(since.elapsed() < Duration::from_millis(50), "{:?}", since.elapsed());
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(site.server.verbs(), ["patch"]);
}
