//! Probe results and the readiness of containers and pods.

use crate::model::ContainerId;
use crate::model::ProbeKind;
use crate::model::ProbeResult;
use crate::model::testing::*;

use super::Situation;
use super::condition;
use super::container;
use crate::status::conditions::update_readiness;
use crate::status::readiness::set_started_and_ready;

fn probed(kind: ProbeKind, result: ProbeResult) -> Situation {
    Situation::new(pod("Always", &["side"], &["a"]), vec![running("a", 1), running("side", 0), exited("a", 0, 1)])
        .with(|situation| _ = situation.probes.of_kind_mut(kind).insert(ContainerId::from("a-1"), result))
}

#[test]
fn probe_results_decide_which_containers_are_started_and_ready() {
    use ProbeKind::{Liveness, Readiness, Startup};
    use ProbeResult::{Failure, Success, Unknown};
    let table = [
        (Readiness, Success, (true, true)),
        (Readiness, Failure, (true, false)),
        (Readiness, Unknown, (true, false)),
        (Startup, Success, (true, true)),
        (Startup, Failure, (false, false)),
        (Startup, Unknown, (false, false)),
        (Liveness, Failure, (true, true)),
    ];
    for (kind, result, (started, ready)) in table {
        let status = probed(kind, result).generate();
        let a = container(&status, "a");
        assert_eq!((a.started, a.ready), (Some(started), ready), "{kind:?} {result:?}");
        assert!(container(&status, "side").ready, "it has no result");
        let expected = if ready { "True" } else { "False" };
        assert_eq!(condition(&status, "Ready").status, expected, "{kind:?} {result:?}");
        assert_eq!(condition(&status, "ContainersReady").status, expected, "{kind:?} {result:?}");
    }
}

#[test]
fn a_container_with_a_probe_waits_for_its_result() {
    for (kind, expected) in [
        (ProbeKind::Readiness, (Some(true), false)),
        (ProbeKind::Startup, (Some(false), false)),
        (ProbeKind::Liveness, (Some(true), true)),
    ] {
        let mut pod = pod("Always", &[], &["a"]);
        let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
        let probe = Some(k8s_openapi::api::core::v1::Probe::default());
        match kind {
            ProbeKind::Readiness => container.readiness_probe = probe,
            ProbeKind::Startup => container.startup_probe = probe,
            ProbeKind::Liveness => container.liveness_probe = probe,
        }
        let status = Situation::new(pod, vec![running("a", 0)]).generate();
        let a = super::container(&status, "a");
        assert_eq!((a.started, a.ready), expected, "{kind:?}");
    }
}

#[test]
fn results_of_a_replaced_instance_do_not_count() {
    let situation = Situation::new(pod("Always", &[], &["a"]), vec![running("a", 2), exited("a", 1, 1)]);
    let old = ContainerId::from("a-1");
    let situation = situation.with(|s| _ = s.probes.readiness.insert(old, ProbeResult::Failure));
    assert!(container(&situation.generate(), "a").ready);
}

#[test]
fn an_update_of_the_readiness_equals_a_new_status() {
    let [unready, ready] =
        [ProbeResult::Failure, ProbeResult::Success].map(|result| probed(ProbeKind::Readiness, result));
    let (mut status, expected) = (ready.generate(), unready.generate());
    set_started_and_ready(&unready.pod, &unready.snapshot, Some(&unready.probes), &mut status);
    update_readiness(&unready.pod, &mut status);
    assert_eq!(status, expected);
}
