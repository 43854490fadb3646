//! Pressure policies on the whole agent: tasks wait for memory, and what is done about it.

use std::sync::Arc;
use std::time::Duration;

use keblet::cgroups::memory_high::High;
use keblet::cgroups::memory_high::Raise;
use keblet::config::eviction::Signal;
use keblet::metrics::Metrics;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::shortage::*;
use serde_json::Value;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;
use tokio::time::sleep;

/// An agent whose pods `hog`, `web` and `db` run, its runtime and its folder.
async fn three_pods() -> (SimRuntime, TempDir, Shown, Agent) {
    let (sim, folder) = node();
    let pods = vec![
        requesting("hog", "term ignore", None),
        requesting("web", "run", None),
        requesting("db", "run", Some("900Mi")),
    ];
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "all run", |l| l.live_count() == 3).await;
    (sim, folder, Shown::default(), agent)
}

/// [`three_pods`], of which `hog` holds most memory; they are evicted by a pressure policy with these fields. While tasks
/// wait, the kernel notifies twice a second.
async fn thrashing(fields: Value) -> (SimRuntime, TempDir, Shown, Agent, Arc<Metrics>) {
    let (sim, folder, shown, mut agent) = three_pods().await;
    shown.set_available(Signal::MemoryAvailable, 500);
    shown.holds("hog", 600, 0);
    shown.holds("web", 50, 0);
    shown.holds("db", 800, 900);
    shown.stalls(0, false);
    let (wake, metrics) = agent.evict_by(with_pressure(hard_memory(), fields), shown.clone());
    sleep(secs(30)).await;
    assert_eq!(sim.trace(Trace::live_count), 3, "no pod waits");
    let text = metrics.render().expect("metrics");
    let of_policy = |line: &&str| line.starts_with("keblet_pressure_policy_decisions_total{");
    let decisions: Vec<&str> = text.lines().filter(of_policy).collect();
    assert!(decisions.len() == 4 && decisions.iter().all(|line| line.ends_with(" 0")), "{decisions:?}");
    let kernel = shown.clone();
    tokio::spawn(async move {
        while !wake.is_closed() {
            sleep(Duration::from_millis(500)).await;
            if kernel.is_stalled() {
                let _ = wake.try_send(Instant::now());
            }
        }
    });
    (sim, folder, shown, agent, metrics)
}

fn counts(metrics: &Metrics, line: &str) -> bool {
    metrics.render().expect("metrics").lines().any(|found| found == line)
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_stalls_the_node_is_evicted_by_a_policy() {
    keep_events();
    let (sim, _folder, shown, agent, metrics) = thrashing(json!({"threshold": 40})).await;
    shown.stalls(100, true);
    let begin = Instant::now();
    until_true("evicted", || is_evicted(&agent, "hog")).await;
    // Both windows are at 40 % after two of five seconds.
    assert!(begin.elapsed() >= secs(2) && begin.elapsed() < Duration::from_millis(2300), "{:?}", begin.elapsed());
    shown.stalls(0, false);
    until(&sim, "it has ended, although it ignores the signal", |l| l.live("hog", "main").is_none()).await;
    let status = agent.statuses.get(&uid("hog")).expect("a status");
    let message = status.message.as_deref().expect("a message");
    let begins = "The node was low on resource: memory. Pressure policy thrash: tasks waited for memory (full) 100% of the \
                  last 1s and 4";
    let ends = "% of the last 5s, threshold 40%. Container main was using 600Mi, request is 0, has larger consumption of \
                memory. ";
    assert!(message.starts_with(begins) && message.ends_with(ends), "{message}");
    let mut conditions = status.conditions.iter().flatten();
    assert!(conditions.any(|condition| condition.type_ == "DisruptionTarget" && condition.status == "True"));
    assert!(agent.pressures.borrow().memory, "its successor is not to come back at once");
    sleep(secs(310)).await;
    assert!(!agent.pressures.borrow().memory);
    assert_eq!((sim.trace(Trace::live_count), events("Evicted")), (2, 1));
    assert!(counts(&metrics, "kubelet_evictions{eviction_signal=\"memory.pressure\"} 1"));
    let decided = "keblet_pressure_policy_decisions_total{action=\"evict\",mode=\"Enforce\",policy=\"thrash\"} 1";
    assert!(counts(&metrics, decided), "{:?}", metrics.render());
    assert!(counts(&metrics, "keblet_pressure_policy_active{policy=\"thrash\"} 0"));
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_reports_once_and_changes_nothing() {
    keep_events();
    let (sim, _folder, shown, agent, metrics) = thrashing(json!({"mode": "DryRun"})).await;
    shown.stalls(60, true);
    sleep(secs(60)).await;
    assert_eq!((sim.trace(Trace::live_count), events("PressurePolicyDryRun"), events("Evicted")), (3, 1, 0));
    assert!(!agent.pressures.borrow().memory, "no condition changes");
    let decided = "keblet_pressure_policy_decisions_total{action=\"evict\",mode=\"DryRun\",policy=\"thrash\"} 1";
    assert!(counts(&metrics, decided));
    shown.stalls(0, false);
    sleep(secs(30)).await;
    assert!(counts(&metrics, "keblet_pressure_policy_active{policy=\"thrash\"} 0"));
    shown.stalls(60, true);
    sleep(secs(60)).await;
    assert_eq!(events("PressurePolicyDryRun"), 2, "the next time is reported again");
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_limit_of_its_own_evicts_no_pod() {
    let (sim, _folder, shown, agent, metrics) = thrashing(json!({})).await;
    shown.stalls(90, false);
    sleep(secs(120)).await;
    assert_eq!(sim.trace(Trace::live_count), 3);
    let decided = "keblet_pressure_policy_decisions_total{action=\"own_limit\",mode=\"Enforce\",policy=\"thrash\"} 1";
    assert!(counts(&metrics, decided));
    assert!(!agent.pressures.borrow().memory);
}

#[tokio::test(start_paused = true)]
async fn memory_high_is_raised_before_a_pod_is_evicted() {
    keep_events();
    let (sim, _folder, shown, _agent, _metrics) = thrashing(json!({})).await;
    shown.state().waiting[1].highs = vec![High { cgroup: "/web/main".into(), bytes: 100 * MIB, max: None }];
    shown.stalls(90, false);
    let throttling = shown.clone();
    // The pod is throttled again and again, until its limit is raised.
    let throttled = tokio::spawn(async move {
        while throttling.state().raised.is_empty() {
            throttling.state().waiting[1].high_hits += 1;
            sleep(Duration::from_millis(50)).await;
        }
    });
    until_true("raised", || !shown.state().raised.is_empty()).await;
    throttled.await.expect("it ends");
    shown.stalls(0, false);
    sleep(secs(60)).await;
    let raised = Raise { cgroup: "/web/main".into(), from: 100 * MIB, to: Some(125 * MIB) };
    assert_eq!(shown.state().raised, [raised]);
    assert_eq!((sim.trace(Trace::live_count), events("MemoryHighRaised"), events("Evicted")), (3, 1, 0));
}

/// A pod `web` that `memory.high` throttles from now on, whatever is done.
fn throttled_for_ever(shown: &Shown) {
    shown.state().waiting[1].highs = vec![High { cgroup: "/web/main".into(), bytes: 100 * MIB, max: None }];
    shown.state().raise_refused = Some("cannot raise memory.high of /web/main: read-only".to_owned());
    let throttling = shown.clone();
    tokio::spawn(async move {
        loop {
            throttling.state().waiting[1].high_hits += 1;
            sleep(Duration::from_millis(50)).await;
        }
    });
}

#[tokio::test(start_paused = true)]
async fn a_refused_memory_high_leads_to_the_next_step() {
    keep_events();
    let (sim, _folder, shown, agent, metrics) = thrashing(json!({})).await;
    throttled_for_ever(&shown);
    shown.stalls(90, true);
    until_true("evicted", || is_evicted(&agent, "hog")).await;
    shown.stalls(0, false);
    until(&sim, "it has ended", |l| l.live_count() == 2).await;
    assert_eq!((events("MemoryHighRaised"), events("Evicted"), logged("read-only")), (0, 1, 1));
    let relaxed = "keblet_pressure_policy_decisions_total{action=\"relax\",mode=\"Enforce\",policy=\"thrash\"} 0";
    assert!(counts(&metrics, relaxed), "nothing was raised");
}

/// The write is attempted again and again while the policy holds, and the reason logged once.
#[tokio::test(start_paused = true)]
async fn a_refused_memory_high_of_a_pod_that_alone_waits_is_logged_once() {
    keep_events();
    let (sim, _folder, shown, _agent, metrics) = thrashing(json!({})).await;
    throttled_for_ever(&shown);
    shown.stalls(90, false);
    sleep(secs(60)).await;
    assert_eq!((events("MemoryHighRaised"), logged("read-only"), sim.trace(Trace::live_count)), (0, 1, 3));
    let decided = "keblet_pressure_policy_decisions_total{action=\"own_limit\",mode=\"Enforce\",policy=\"thrash\"} 1";
    assert!(counts(&metrics, decided), "{:?}", metrics.render());
    shown.state().raise_refused = None;
    until_true("raised", || !shown.state().raised.is_empty()).await;
    until_true("reported", || events("MemoryHighRaised") == 1).await;
}

/// The kernel takes a while to free the memory of a large pod: the next one is chosen afterwards.
#[tokio::test(start_paused = true)]
async fn the_next_pod_is_chosen_when_the_memory_of_the_last_one_is_free() {
    let (sim, _folder, shown, mut agent) = three_pods().await;
    ["hog", "web", "db"].into_iter().zip([600, 50, 800]).for_each(|(name, mib)| shown.uses(name, mib));
    shown.state().held.insert(uid("hog"), 600 * MIB);
    shown.set_available(Signal::MemoryAvailable, 50);
    let (_wake, metrics) = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "one has ended", |l| l.live_count() == 2).await;
    sleep(secs(20)).await;
    assert_eq!(sim.trace(Trace::live_count), 2, "its memory is not free yet");
    shown.state().held.insert(uid("hog"), MIB);
    until(&sim, "the next one ends", |l| l.live_count() == 1).await;
    assert!(counts(&metrics, "keblet_eviction_memory_returned_seconds_count 1"));
}

#[tokio::test(start_paused = true)]
async fn a_threshold_and_a_policy_at_once_evict_one_pod() {
    keep_events();
    let (sim, _folder, shown, agent, metrics) = thrashing(json!({})).await;
    shown.stalls(90, true);
    sleep(Duration::from_millis(900)).await;
    shown.set_available(Signal::MemoryAvailable, 50);
    until(&sim, "one has ended", |l| l.live_count() == 2).await;
    shown.set_available(Signal::MemoryAvailable, 600);
    shown.stalls(0, false);
    sleep(secs(60)).await;
    assert_eq!((sim.trace(Trace::live_count), events("Evicted")), (2, 1));
    assert!(is_evicted(&agent, "hog"));
    assert!(counts(&metrics, "kubelet_evictions{eviction_signal=\"memory.available\"} 1"));
}

/// Without PSI policies find nothing, and thresholds act as ever.
#[tokio::test(start_paused = true)]
async fn a_node_without_psi_evicts_by_thresholds_alone() {
    let (sim, _folder, shown, mut agent) = three_pods().await;
    shown.set_available(Signal::MemoryAvailable, 500);
    ["hog", "web", "db"].into_iter().zip([600, 50, 800]).for_each(|(name, mib)| shown.uses(name, mib));
    let (wake, _metrics) = agent.evict_by(with_pressure(hard_memory(), json!({})), shown.clone());
    drop(wake);
    sleep(secs(60)).await;
    assert_eq!(sim.trace(Trace::live_count), 3);
    shown.set_available(Signal::MemoryAvailable, 50);
    until(&sim, "one has ended", |l| l.live_count() == 2).await;
    assert!(is_evicted(&agent, "hog"));
}
