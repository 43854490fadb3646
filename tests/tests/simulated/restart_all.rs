//! Restarts of all containers of a pod by the exit code of one (KEP-5532).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerRestartRule;
use k8s_openapi::api::core::v1::ContainerRestartRuleOnExitCodes;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use keblet::model::Pod;
use keblet_tests::cri::Call;
use keblet_tests::cri::Method;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
use tokio::time::Instant;
use tokio::time::sleep;

/// A pod that is restarted as a whole whenever its container `main` exits with this code.
fn restarted_by(exit_code: i32, program: &str) -> Pod {
    let mut web = ApiPod::clone(&pod("web").restarted("Never").running("main", program).running("side", "run").build());
    let main = &mut web.spec.as_mut().expect("a spec").containers[0];
    let on_exit = ContainerRestartRuleOnExitCodes { operator: "In".to_owned(), values: Some(vec![exit_code]) };
    let rule = ContainerRestartRule { action: "RestartAllContainers".to_owned(), exit_codes: Some(on_exit) };
    (main.restart_policy, main.restart_policy_rules) = (Some("Never".to_owned()), Some(vec![rule]));
    Arc::new(web)
}

/// No back-off applies, but a kubelet sees an exit within a second at the earliest.
#[tokio::test(start_paused = true)]
async fn all_containers_are_restarted_once_a_second_at_most() {
    let (sim, folder) = node();
    let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![restarted_by(42, "exit 42")]);
    sleep(Duration::from_secs(20)).await;
    let starts: Vec<Instant> = sim.trace(|trace| trace.history("web", "main").filter_map(|i| i.started).collect());
    let pauses: Vec<Duration> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!((10..=20).contains(&pauses.len()), "{pauses:?}");
    assert!(pauses[0] < Duration::from_secs(1), "the first restart waits for nothing: {pauses:?}");
    let least = Duration::from_millis(900);
    assert!(pauses[1..].iter().all(|pause| *pause >= least), "{pauses:?}");
}

/// The kernel proves the exit before the runtime has handled it.
#[tokio::test(start_paused = true)]
async fn a_container_is_stopped_once_and_removed_when_the_runtime_has_stopped_it() {
    let (sim, folder) = node();
    let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![restarted_by(42, "exit 42 1s until 1")]);
    until(&sim, "side was removed", |t| t.history("web", "side").any(|side| side.removed.is_some())).await;
    sim.trace(|trace| {
        let of_side = |method: Method| {
            let is_of_side = move |call: &&Call| call.method == method && call.object.starts_with("side_web_");
            trace.calls().filter(is_of_side).map(|call| call.at).collect::<Vec<Instant>>()
        };
        let reported = trace.history("web", "side").next().and_then(|side| side.reported).expect("it was reported");
        assert_eq!(of_side(Method::StopContainer).len(), 1, "{trace}");
        assert!(of_side(Method::RemoveContainer)[0] >= reported, "{trace}");
    });
}
