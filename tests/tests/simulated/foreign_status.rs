//! Statuses of pods that another client of the API server has written.

use std::sync::Arc;
use std::time::Duration;

use keblet::model::PodUid;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
use tokio::time::Instant;
use tokio::time::sleep;

#[tokio::test(start_paused = true)]
async fn a_running_pod_whose_phase_is_set_to_failed_is_terminated() {
    let ((sim, folder), api) = (node(), Api::default());
    let web = api.put(&pod("web").running("main", "term 10ms").from_api().build());
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    until(&sim, "it runs", |trace| trace.live("web", "main").is_some()).await;
    sleep(Duration::from_secs(30)).await;

    let mut failed = Arc::unwrap_or_clone(api.pod("web").expect("it exists"));
    failed.status.get_or_insert_default().phase = Some("Failed".to_owned());
    let began = Instant::now();
    agent.reconcile(Arc::new(failed)).await;
    until(&sim, "it is stopped", |trace| trace.live("web", "main").is_none()).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());

    sleep(Duration::from_secs(600)).await;
    assert_eq!(sim.trace(|trace| trace.history("web", "main").count()), 1, "it is not started again");
    let status = agent.statuses.get(&PodUid::from("web-uid")).expect("a status");
    assert_eq!(status.phase.as_deref(), Some("Failed"));
}
