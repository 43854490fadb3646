//! Pods that are deleted, or that the API server no longer has.

use std::time::Duration;
use std::time::SystemTime;

use serde_json::json;

use super::Fault;
use super::Harness;
use super::copy;
use super::observations;
use super::site;
use super::status;
use super::time;
use crate::model::testing;

#[tokio::test(start_paused = true)]
async fn deleted_and_replaced_pods_are_left_alone() {
    let site = site();
    let (gone, replaced) = (site.pod("gone"), site.pod("replaced"));
    site.server.remove("gone");
    site.server.remove("replaced");
    let newer = copy("replaced", "newer-uid", 0, status(json!({"phase": "Pending"})));
    site.server.put_unseen(newer);
    site.publish(&gone, "G");
    site.publish(&replaced, "R");
    site.server.until(|server| server.calls().len() == 3).await;
    site.publish(&gone, "again");
    site.publish(&replaced, "again");
    tokio::time::sleep(Duration::from_secs(5)).await;
    site.server.show();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let mut calls: Vec<_> = site.server.calls().into_iter().map(|call| (call.name, call.verb)).collect();
    calls.sort();
    let expected = [("gone", "patch"), ("replaced", "get"), ("replaced", "patch")];
    assert_eq!(calls, expected.map(|(name, verb)| (name.to_owned(), verb)), "never again");
    assert_eq!(site.server.phase("replaced"), "Pending");
}

#[tokio::test(start_paused = true)]
async fn a_404_about_a_pod_that_the_watch_still_shows_is_not_the_last_word() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::NotFound; 2]);
    site.publish(&pod, "One");
    site.until_sent("a", "One").await;
    let calls = site.server.calls();
    assert_eq!(site.server.verbs(), ["patch", "get", "get", "patch"]);
    let gaps: Vec<u64> = calls.windows(2).map(|two| (two[1].at - two[0].at).as_secs()).collect();
    assert!((10..=20).contains(&gaps[0]) && (20..=30).contains(&gaps[1]), "{gaps:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_gone_costs_few_requests_however_long_the_watch_shows_it() {
    let site = site();
    let pod = site.pod("a");
    site.server.remove("a");
    for n in 0..600 {
        site.publish(&pod, &format!("R{n}"));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let calls = site.server.calls().len();
    assert!((10..=14).contains(&calls), "{calls} requests in ten minutes");
}

/// As while a proxy answers for an API server that it does not reach.
#[tokio::test(start_paused = true)]
async fn after_minutes_of_404s_a_newer_copy_is_read_at_once_and_any_within_a_minute() {
    for (has_newer_copy, limit) in [(true, 11), (false, 61)] {
        let site = site();
        let pod = site.pod("a");
        site.server.script(&[Fault::NotFound; 6]);
        site.publish(&pod, "One");
        site.server.until(|server| server.calls().len() == 6).await;
        if has_newer_copy {
            site.server.put(pod);
        }
        let recovered = tokio::time::Instant::now();
        site.until_sent("a", "One").await;
        assert!(recovered.elapsed() <= Duration::from_secs(limit), "{has_newer_copy} {:?}", recovered.elapsed());
        assert_eq!(site.server.verbs()[6..], ["get", "patch"], "{has_newer_copy}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_finished_pod_is_deleted() {
    let site = site();
    let mut pod = copy("a", "a-uid", 0, status(json!({"phase": "Running"})));
    pod.metadata.deletion_timestamp = Some(time(1));
    site.server.put(pod.clone());
    site.server.script(&[Fault::None, Fault::LostAnswer]);
    let (view, reasons) = (testing::snapshot(vec![]), Default::default());
    let observations = |is_terminal| observations(&reasons, is_terminal);
    site.statuses.publish(&pod, &view, observations(false), SystemTime::now());
    site.server.until(|server| server.calls().len() == 1).await;
    site.statuses.publish(&pod, &view, observations(true), SystemTime::now());
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert!(site.server.pod("a").is_some(), "its volumes may still be mounted");
    site.statuses.terminate(&pod, SystemTime::now());
    site.server.until(|server| server.pod("a").is_none()).await;
    let verbs = site.server.verbs();
    assert_eq!(verbs.last(), Some(&"delete"), "{verbs:?}");
    let last_patch = site.server.calls().into_iter().rfind(|call| call.verb == "patch").expect("a patch");
    assert_eq!(last_patch.body["status"]["phase"], "Failed");
}

/// A pod that is being deleted, and has nothing left on this node.
fn finished(site: &Harness) {
    let mut pod = copy("a", "a-uid", 0, status(json!({"phase": "Running"})));
    pod.metadata.deletion_timestamp = Some(time(1));
    site.server.put(pod.clone());
    site.publish(&pod, "Last");
    site.statuses.terminate(&pod, SystemTime::now());
}

#[tokio::test(start_paused = true)]
async fn a_finished_pod_is_deleted_though_the_server_drops_a_field() {
    let site = site();
    site.server.drop_field("reason");
    finished(&site);
    site.server.until(|server| server.pod("a").is_none()).await;
    assert_eq!(site.server.verbs(), ["patch", "patch", "delete"], "the field is tried once more alone");
}

#[tokio::test(start_paused = true)]
async fn a_deletion_that_a_proxy_answers_with_404_is_repeated() {
    let site = site();
    site.server.script(&[Fault::None, Fault::NotFound]);
    finished(&site);
    site.server.until(|server| server.pod("a").is_none()).await;
    assert_eq!(site.server.verbs(), ["patch", "delete", "get", "delete"]);
}
