//! Pods that the API server would not accept, on the whole agent: what would lead outside its folders is neither run nor
//! taken over later, and affects no other pod.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::VolumeMount;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::status::TerminationReason;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::PodOf;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
use tokio::time::sleep;

/// The pod with a mount that leads out of its volume.
fn with_escaping_sub_path(pod: PodOf) -> Pod {
    let mut pod = Arc::unwrap_or_clone(pod.build());
    let mount = VolumeMount {
        name: "v".into(),
        mount_path: "/m".into(),
        sub_path: Some("../..".into()),
        ..VolumeMount::default()
    };
    pod.spec.as_mut().expect("a spec").containers[0].volume_mounts = Some(vec![mount]);
    Arc::new(pod)
}

fn labelled(pod: &Pod, value: &str) -> Pod {
    let mut pod = Pod::unwrap_or_clone(pod.clone());
    pod.metadata.labels.get_or_insert_default().insert("l".to_owned(), value.to_owned());
    Arc::new(pod)
}

#[tokio::test(start_paused = true)]
async fn pod_with_escaping_sub_path_is_rejected_permanently() {
    let (sim, folder) = node();
    let bad = with_escaping_sub_path(pod("bad").running("main", "run"));
    let good = pod("good").running("main", "run");
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![bad.clone(), good.clone().build()]);
    until(&sim, "the good one runs", |l| l.live("good", "main").is_some()).await;
    // Two causes of another pass: an update, and the housekeeping after another pod was removed.
    agent.update(labelled(&bad, "1")).await;
    agent.remove(good.build()).await;
    until(&sim, "the good one is gone", |l| l.live("good", "main").is_none()).await;
    sleep(Duration::from_secs(600)).await;
    assert_eq!(sim.trace(|l| l.history("bad", "main").count()), 0, "{}", sim.trace(Trace::to_string));
    let status = agent.statuses.get(&PodUid::from("bad-uid")).expect("a status");
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("FailedValidation")));
    assert!(status.message.is_some_and(|message| message.contains("subPath")));
}

#[tokio::test(start_paused = true)]
async fn running_pod_ignores_an_update_with_escaping_sub_path() {
    let (sim, folder) = node();
    let good = pod("web").running("main", "exit 1 2s").running("side", "run");
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![good.clone().build()]);
    until(&sim, "it runs", |l| l.live("web", "main").is_some() && l.live("web", "side").is_some()).await;
    let turned = with_escaping_sub_path(good);
    agent.update(turned.clone()).await;
    // Its next instance is made from the last valid specification.
    until(&sim, "another instance", |l| l.history("web", "main").filter(|i| i.started.is_some()).count() >= 3).await;
    let side = sim.trace(|l| l.history("web", "side").count());
    assert_eq!(side, 1, "{}", sim.trace(Trace::to_string));
    let status = agent.statuses.get(&PodUid::from("web-uid")).expect("a status");
    assert_eq!(status.phase.as_deref(), Some("Running"));
    // The end of the pod is heard all the same.
    agent.remove(turned).await;
    until(&sim, "it is gone", |l| l.live("web", "main").is_none() && l.live("web", "side").is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn later_kill_request_shortens_the_grace_period() {
    let (sim, folder) = node();
    let stubborn = pod("web").running("main", "term ignore").build();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![stubborn]);
    until(&sim, "it runs", |l| l.live("web", "main").is_some()).await;
    let uid = PodUid::from("web-uid");
    let end = TerminationReason { reason: "Terminated", message: String::new(), disruption: None };
    let began = tokio::time::Instant::now();
    let patient = agent.kill(uid.clone(), i64::MAX, end.clone());
    let hasty = async {
        sleep(Duration::from_secs(60)).await;
        assert!(sim.trace(|l| l.live("web", "main").is_some()), "it has all the time in the world");
        agent.kill(uid.clone(), 1, end.clone()).await;
    };
    tokio::join!(patient, hasty);
    assert!(sim.trace(|l| l.live("web", "main").is_none()), "{}", sim.trace(Trace::to_string));
    assert!(began.elapsed() < Duration::from_secs(75), "{:?}", began.elapsed());
}
