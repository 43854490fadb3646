//! Addresses, QoS class and what a settled pod's status looks like as a whole.

use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::PodStatus;

use super::Situation;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::StartFailure;
use crate::model::testing::*;
use crate::status::NodeAddresses;
use crate::status::transition::check;

fn addresses(status: &PodStatus) -> (Vec<String>, Vec<String>) {
    let pods = status.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).collect();
    let hosts = status.host_ips.iter().flatten().map(|ip| ip.ip.clone()).collect();
    (pods, hosts)
}

fn node(ips: &[&str]) -> NodeAddresses {
    NodeAddresses { ips: ips.iter().map(|ip| (*ip).to_owned()).collect(), prefers_v6: false }
}

#[test]
fn pod_ips_are_one_per_family_the_preferred_one_first() {
    let ips = ["10.0.0.1", "10.0.0.2", "FD00::0:1", "nonsense"];
    let situation = Situation::new(pod("Always", &[], &["a"]), vec![])
        .with(|s| s.snapshot.ips = ips.iter().map(|ip| (*ip).to_owned()).collect());
    let status = situation.generate();
    assert_eq!(addresses(&status), (vec!["10.0.0.1".into(), "fd00::1".into()], vec![]));
    assert_eq!((status.pod_ip.as_deref(), status.host_ip), (Some("10.0.0.1"), None));
    let status = situation.with(|s| s.node = node(&["fd00::9", "192.0.2.1"])).generate();
    let (v4_first, hosts) = (["10.0.0.1", "fd00::1"].map(str::to_owned), ["fd00::9", "192.0.2.1"].map(str::to_owned));
    assert_eq!(addresses(&status), (v4_first.to_vec(), hosts.to_vec()), "IPv4 is first without the flag, as upstream");
    assert_eq!((status.pod_ip.as_deref(), status.host_ip.as_deref()), (Some("10.0.0.1"), Some("fd00::9")));
}

/// The addresses of the node are determined after the start, which may take long, and pods run already.
#[test]
fn the_order_of_pod_ips_does_not_wait_for_the_addresses_of_the_node() {
    for ips in [vec![], vec!["fd00::9".to_owned()]] {
        let situation = Situation::new(pod("Always", &[], &["a"]), vec![]).with(|s| {
            s.snapshot.ips = ["10.0.0.1", "fd00::1"].map(str::to_owned).into();
            s.node = NodeAddresses { ips, prefers_v6: true };
        });
        assert_eq!(addresses(&situation.generate()).0, ["fd00::1", "10.0.0.1"]);
    }
}

#[test]
fn a_pod_that_ended_under_an_earlier_agent_keeps_its_address() {
    let old = |phase: &str| {
        let mut situation = Situation::new(pod("Never", &[], &["a"]), vec![]).with(|s| s.snapshot.ips.clear());
        situation.old.phase = Some(phase.to_owned());
        situation.old.pod_ips = Some(vec![k8s_openapi::api::core::v1::PodIP { ip: "10.0.0.1".to_owned() }]);
        situation.generate().pod_ip
    };
    assert_eq!(old("Succeeded").as_deref(), Some("10.0.0.1"));
    assert_eq!(old("Failed").as_deref(), Some("10.0.0.1"));
    assert_eq!(old("Running"), None, "its sandbox is gone, and it gets another one");
}

/// Looking for each among all others would take minutes, for which the statuses of all pods would wait.
#[test]
fn a_pod_may_have_any_number_of_containers() {
    let names: Vec<String> = (0..20_000).map(|number| format!("container-{number:050}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (init, regular) = names.split_at(names.len() / 2);
    let instances =
        |names: &[&str], state| -> Vec<ContainerStatus> { names.iter().map(|name| status(name, 0, state)).collect() };
    let began = Instant::now();
    let waiting = Situation::new(pod("Never", init, regular), vec![]);
    let running =
        waiting.then([instances(regular, ContainerState::Running), instances(init, ContainerState::Exited)].concat());
    assert_eq!(running.old.phase.as_deref(), Some("Pending"));
    let ended = running.then(instances(&names, ContainerState::Exited));
    assert_eq!(ended.old.phase.as_deref(), Some("Running"));
    let status = ended.generate();
    assert_eq!(status.phase.as_deref(), Some("Succeeded"));
    assert_eq!(check(&ended.pod, &status, ended.gates), Ok(()));
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}

/// The node got another one by DHCP, say.
#[test]
fn host_network_pods_have_the_addresses_that_the_node_has_now() {
    let hosted = Situation::new(pod("Always", &[], &["a"]), vec![]).with(|s| {
        s.pod.spec.as_mut().expect("a spec").host_network = Some(true);
        s.snapshot.ips.clear();
    });
    assert_eq!(hosted.generate().pod_ip, None);
    let known = hosted.with(|s| s.node = node(&["192.0.2.1"]));
    assert_eq!(known.generate().pod_ip.as_deref(), Some("192.0.2.1"));
    let restarted = known.then(vec![]).with(|s| s.node = node(&[]));
    assert_eq!(addresses(&restarted.generate()).0, ["192.0.2.1"], "not determined yet");
    let moved = restarted.with(|s| s.node = node(&["192.0.2.7", "fd00::7"]));
    assert_eq!(addresses(&moved.generate()).0, ["192.0.2.7", "fd00::7"]);
    let ended = moved.with(|s| s.is_terminal = true);
    assert_eq!(addresses(&ended.generate()).0, ["192.0.2.1"]);
}

#[test]
fn the_qos_class_is_kept_once_set() {
    let situation = Situation::new(pod("Always", &[], &["a"]), vec![]);
    assert_eq!(situation.generate().qos_class.as_deref(), Some("BestEffort"));
    let set = situation.with(|s| s.pod.status.get_or_insert_default().qos_class = Some("Guaranteed".into()));
    assert_eq!(set.generate().qos_class.as_deref(), Some("Guaranteed"));
}

/// A pod whose previous status has this phase and message.
fn after(policy: &str, containers: Vec<ContainerStatus>, phase: &str, message: &str) -> Situation {
    let old = PodStatus {
        phase: Some(phase.to_owned()),
        reason: Some("PodFeatureUnsupported".to_owned()),
        message: Some(message.to_owned()),
        ..PodStatus::default()
    };
    Situation::new(pod(policy, &[], &["a"]), containers).with(|s| s.old = old)
}

fn reported(status: &PodStatus) -> (Option<&str>, Option<&str>, Option<&str>) {
    (status.phase.as_deref(), status.reason.as_deref(), status.message.as_deref())
}

#[test]
fn states_from_an_unmanaged_time_are_dropped_from_a_status() {
    let message = "Pod was rejected: resourceClaims: no; its containers run on unmanaged until the pod is deleted";
    let situation = after("Always", vec![running("a", 0)], "Running", message);
    let next = situation.with(|s| s.pod.status = Some(s.old.clone())).then(vec![running("a", 0)]);
    assert_eq!(reported(&next.old), (Some("Running"), None, None));
    assert_eq!(reported(&next.generate()), (Some("Running"), None, None), "the API server still has it");
    let kept = after("Always", vec![running("a", 0)], "Running", "of another client").generate();
    assert_eq!(reported(&kept), (Some("Running"), Some("PodFeatureUnsupported"), Some("of another client")));
}

#[test]
fn a_rejected_pod_has_failed_unless_its_containers_have_succeeded() {
    let failed = (Some("Failed"), Some("PodFeatureUnsupported"), Some("Pod was rejected: why"));
    let rows = [("Always", 0, failed), ("Never", 1, failed), ("Never", 0, (Some("Succeeded"), None, None))];
    for (policy, code, expected) in rows {
        for is_terminal in [false, true] {
            let rejected = after(policy, vec![exited("a", 0, code)], "Failed", "Pod was rejected: why");
            let status = rejected.with(|s| s.is_terminal = is_terminal).generate();
            assert_eq!(reported(&status), expected, "{policy} {code} {is_terminal}");
        }
    }
}

#[test]
fn an_unchanged_pod_has_an_unchanged_status() {
    let settled = || vec![running("a", 1), running("side", 0), exited("a", 0, 1), exited("one", 0, 0)];
    let second = Situation::new(pod("Always", &["one", "side"], &["a"]), settled()).then(settled()).then(settled());
    assert_eq!(second.generate(), second.old);
}

/// It may quote the path of a hook. The API server refuses a pod that is larger than 1.5 MiB.
#[test]
fn messages_of_waiting_containers_are_bounded() {
    for (count, longest) in [(1, 32 << 10), (64, 4 << 10)] {
        let names: Vec<String> = (0..count).map(|number| format!("c{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let situation = Situation::new(pod("Always", &[], &names), vec![]).with(|s| {
            let failure =
                StartFailure { token: "PostStartHookError".into(), message: "\u{e4}".repeat(200_000), retry_at: None };
            s.reasons.extend(names.iter().map(|name| ((*name).to_owned(), failure.clone())));
        });
        let containers = situation.generate().container_statuses.expect("statuses");
        let waiting = |status: k8s_openapi::api::core::v1::ContainerStatus| status.state?.waiting;
        let waiting: Vec<_> = containers.into_iter().filter_map(waiting).collect();
        assert_eq!(waiting.len(), count);
        for state in waiting {
            let length = state.message.map(|message| message.len());
            assert_eq!((state.reason.as_deref(), length), (Some("PostStartHookError"), Some(longest)));
        }
    }
}
