//! Reasons, messages and order of the checks.

use serde_json::Value;
use serde_json::json;

use super::*;
use crate::model::Amount;

fn pod(metadata: Value, spec: Value) -> Pod {
    let mut spec = spec;
    if spec.get("containers").is_none() {
        spec["containers"] = json!([{"name": "c", "image": "i"}]);
    }
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
}

/// A node that offers everything.
fn full() -> NodeOffer {
    NodeOffer { app_armor: true, supplemental_groups_policy: true, pod_level_resources: true, ..NodeOffer::unlimited() }
}

fn rejection(pod: &Pod, node: &NodeOffer) -> Option<(String, String)> {
    match decide(testing::input(pod, node)) {
        AdmissionResult::Admit => None,
        AdmissionResult::Reject(Rejection { reason, message }) => Some((reason.into_owned(), message)),
        AdmissionResult::Preempt(missing) => panic!("{missing:?}"),
    }
}

fn rejected(reason: &str, message: &str) -> Option<(String, String)> {
    Some((reason.to_owned(), message.to_owned()))
}

#[test]
fn what_the_node_lacks_rejects_the_pod() {
    let strict = json!({"securityContext": {"supplementalGroupsPolicy": "Strict"}});
    type Case = (Value, Value, fn(&mut NodeOffer), &'static str, &'static str);
    let table: [Case; 9] = [
        (
            json!({"labels": {"kubernetes.io/os": "windows"}}),
            json!({}),
            |_| {},
            "PodOSSelectorNodeLabelDoesNotMatch",
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        ),
        (
            json!({}),
            json!({"os": {"name": "windows"}}),
            |_| {},
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ),
        (
            json!({}),
            strict,
            |node| node.supplemental_groups_policy = false,
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        ),
        (
            json!({}),
            json!({"resources": {"limits": {"cpu": "1"}}}),
            |node| node.pod_level_resources = false,
            "PodLevelResourcesNotSupported",
            "PodLevelResources feature gate is disabled",
        ),
        (
            json!({}),
            json!({}),
            |node| node.shutting_down = true,
            "NodeShutdown",
            "Pod was rejected as the node is shutting down.",
        ),
        (
            json!({}),
            json!({"securityContext": {"sysctls": [{"name": "kernel.panic", "value": "1"}]}}),
            |_| {},
            "SysctlForbidden",
            "forbidden sysctl: \"kernel.panic\" not allowlisted",
        ),
        (json!({}), json!({}), |node| node.node = None, "InvalidNodeInfo", "Kubelet cannot get node info."),
        (
            json!({}),
            json!({"containers": [{"name": "c", "restartPolicyRules": [{"action": "RestartAllContainers"}]}]}),
            |node| node.declared_features = Some(Arc::default()),
            "PodFeatureUnsupported",
            "Pod requires node features that are not available: RestartAllContainersOnContainerExits",
        ),
        (
            json!({}),
            json!({"hostNetwork": true, "hostUsers": false}),
            |node| node.declared_features = Some(Arc::default()),
            "PodFeatureUnsupported",
            "Pod requires node features that are not available: UserNamespacesHostNetworkSupport",
        ),
    ];
    for (metadata, spec, change, reason, message) in table {
        let (pod, mut node) = (pod(metadata, spec), full());
        change(&mut node);
        assert_eq!(rejection(&pod, &node), rejected(reason, message));
    }
}

#[test]
fn pods_for_this_node_are_admitted() {
    let labels = json!({"labels": {"kubernetes.io/os": "linux"}});
    let spec = json!({
        "os": {"name": "linux"},
        "resources": {"limits": {"cpu": "1"}},
        "securityContext": {"supplementalGroupsPolicy": "Strict", "appArmorProfile": {"type": "RuntimeDefault"}},
    });
    assert_eq!(rejection(&pod(labels, spec), &full()), None);
    let merge = json!({"securityContext": {"supplementalGroupsPolicy": "Merge"}});
    let bare = NodeOffer::unlimited();
    assert_eq!(rejection(&pod(json!({}), merge), &bare), None);
    let rules = json!({"containers": [{"name": "c", "restartPolicyRules": [{"action": "RestartAllContainers"}]}]});
    let declared = Some(Arc::new(BTreeSet::from(["RestartAllContainersOnContainerExits".to_owned()])));
    for declared_features in [declared, None] {
        let node = NodeOffer { declared_features, ..NodeOffer::unlimited() };
        assert_eq!(rejection(&pod(json!({}), rules.clone()), &node), None);
    }
    assert_eq!(rejection(&Pod::default(), &bare), None);
}

#[test]
fn an_update_may_need_what_the_node_does_not_declare() {
    let (of_pod, of_init) = ("InPlacePodLevelResourcesVerticalScaling", "InPlacePodVerticalScalingInitContainers");
    let with_limits = |whole: &str, init: &str, sidecar: &str| {
        let limits = |cpu: &str| json!({"limits": {"cpu": cpu}});
        let entries = json!([
            {"name": "init", "resources": limits(init)},
            {"name": "side", "restartPolicy": "Always", "resources": limits(sidecar)},
        ]);
        pod(json!({}), json!({"resources": limits(whole), "initContainers": entries}))
    };
    let both = format!("{of_pod}, {of_init}");
    let rows: [(Pod, &[&str], Option<&str>); 6] = [
        (with_limits("2", "2", "1"), &[], Some(&both)),
        (with_limits("2", "2", "1"), &[of_pod], Some(of_init)),
        (with_limits("2", "2", "1"), &[of_pod, of_init], None),
        (with_limits("2", "1", "1"), &[of_init], Some(of_pod)),
        (with_limits("1", "1", "2"), &[], None),
        (with_limits("1", "1", "1"), &[], None),
    ];
    for (after, declared, missing) in rows {
        let declared: BTreeSet<String> = declared.iter().map(|name| (*name).to_owned()).collect();
        let before = with_limits("1", "1", "1");
        let expected = missing.map(|names| format!("Pod requires node features that are not available: {names}"));
        assert_eq!(missing_for_update(Some(&declared), &before, &after), expected, "{declared:?} {after:?}");
        assert_eq!(missing_for_update(None, &before, &after), None, "the feature gate is off");
    }
}

#[test]
fn the_first_check_in_order_decides() {
    let spec = json!({
        "os": {"name": "windows"},
        "resourceClaims": [{"name": "n", "resourceClaimName": "m"}],
        "securityContext": {"sysctls": [{"name": "kernel.panic", "value": "1"}], "appArmorProfile": {"type": "RuntimeDefault"}},
    });
    let mut pod = pod(json!({}), spec);
    let node = NodeOffer { shutting_down: true, ..NodeOffer::unlimited() };
    let full = NodeOffer { node: Some(Arc::default()), ..node.clone() };
    let mut reasons = Vec::new();
    let context = |pod: &mut Pod| pod.spec.as_mut().expect("a spec").security_context.take();
    let (reason, _) = rejection(&pod, &node).expect("rejected");
    reasons.push(reason);
    pod.spec.as_mut().expect("a spec").security_context.as_mut().expect("a context").sysctls = None;
    reasons.push(rejection(&pod, &node).expect("rejected").0);
    pod.spec.as_mut().expect("a spec").os = None;
    reasons.push(rejection(&pod, &full).expect("rejected").0);
    reasons.push(rejection(&pod, &node).expect("rejected").0);
    context(&mut pod);
    reasons.push(rejection(&pod, &node).expect("rejected").0);
    pod.spec.as_mut().expect("a spec").resource_claims = None;
    reasons.push(rejection(&pod, &node).expect("rejected").0);
    assert_eq!(
        reasons,
        ["SysctlForbidden", "PodOSNotSupported", "OutOfpods", "AppArmor", "PodFeatureUnsupported", "NodeShutdown"]
    );
}

#[test]
fn nothing_is_preempted_for_a_pod_that_another_check_rejects() {
    let metadata = json!({"annotations": {"kubernetes.io/config.source": "file"}});
    let full = NodeOffer { node: Some(Arc::default()), ..NodeOffer::default() };
    let critical = pod(metadata, json!({}));
    assert!(matches!(decide(testing::input(&critical, &full)), AdmissionResult::Preempt(_)));
    let down = NodeOffer { shutting_down: true, ..full };
    assert_eq!(rejection(&critical, &down).map(|(reason, _)| reason).as_deref(), Some("NodeShutdown"));
}

#[test]
fn a_running_pod_is_not_checked_for_what_may_have_changed() {
    let pressures = Pressures { disk: true, ..Pressures::default() };
    let node = NodeOffer { node: Some(Arc::default()), pressures, shutting_down: true, ..NodeOffer::default() };
    let (plain, foreign) = (pod(json!({}), json!({})), pod(json!({}), json!({"os": {"name": "windows"}})));
    let resumed = |pod| decide(Input { is_resumed: true, ..testing::input(pod, &node) });
    assert_eq!(resumed(&plain), AdmissionResult::Admit);
    assert!(matches!(decide(testing::input(&plain, &node)), AdmissionResult::Reject(_)));
    assert!(matches!(resumed(&foreign), AdmissionResult::Reject(_)), "what cannot change is checked again");
}

#[test]
fn a_pod_with_devices_is_not_run_without_them() {
    let gpu = "example.com/gpu".to_owned();
    let mut info = NodeInfo::unlimited();
    info.allocatable.scalar = [(gpu.clone(), 0), ("example.com/theirs".to_owned(), 5)].into();
    let device_resources = Arc::new([gpu.clone()].into());
    let node = NodeOffer { node: Some(Arc::new(info)), device_resources, ..full() };
    let decided = |pod: &Pod, is_resumed: bool, resource: &str| {
        let needs = Needs::new(pod, &[(resource.to_owned(), Amount::units(1))].into());
        decide(Input { is_resumed, needs: &needs, ..testing::input(pod, &node) })
    };
    let message = "Node didn't have enough resource: example.com/gpu, requested: 1, used: 0, capacity: 0";
    let lacks = AdmissionResult::reject("OutOfexample.com/gpu", message);
    let message = "Pod needs what this node does not support yet: devices of example.com/gpu";
    let unsupported = AdmissionResult::reject("PodFeatureUnsupported", message);
    let (plain, critical) = (pod(json!({}), json!({})), pod(json!({}), json!({"priority": 2_000_000_000})));
    assert_eq!(decided(&plain, false, &gpu), lacks);
    assert_eq!(decided(&plain, true, &gpu), unsupported, "it runs, and goes on unmanaged");
    assert_eq!(decided(&critical, false, &gpu), unsupported, "nothing is preempted for it");
    for is_resumed in [false, true] {
        assert_eq!(decided(&plain, is_resumed, "example.com/theirs"), AdmissionResult::Admit);
    }
}

#[test]
fn app_armor_needs_a_host_that_enforces_it() {
    let field = |kind: &str| json!({"appArmorProfile": {"type": kind}});
    let container = |context: Value| json!({"containers": [{"name": "c", "image": "i", "securityContext": context}]});
    let annotation = |value: &str| json!({"annotations": {"container.apparmor.security.beta.kubernetes.io/c": value}});
    let mut overridden = container(field("Unconfined"));
    overridden["securityContext"] = field("RuntimeDefault");
    let disabled = rejected("AppArmor", "Cannot enforce AppArmor: AppArmor is not enabled on the host");
    let host = NodeOffer { app_armor: false, ..full() };
    for (metadata, spec, expected) in [
        (json!({}), json!({"securityContext": field("RuntimeDefault")}), &disabled),
        (json!({}), container(field("RuntimeDefault")), &disabled),
        (annotation("runtime/default"), json!({}), &disabled),
        (annotation("localhost/mine"), json!({}), &disabled),
        (annotation("unconfined"), json!({}), &None),
        (json!({}), container(field("Unconfined")), &None),
        (json!({}), overridden, &disabled),
        (annotation("runtime/default"), container(field("Unconfined")), &disabled),
        (annotation("unconfined"), json!({"securityContext": field("Unconfined")}), &None),
        (json!({}), json!({}), &None),
    ] {
        assert_eq!(rejection(&pod(metadata.clone(), spec.clone()), &host), *expected, "{metadata} {spec}");
        assert_eq!(rejection(&pod(metadata, spec), &full()), None);
    }
    let mut running = pod(json!({}), container(field("RuntimeDefault")));
    running.status.get_or_insert_default().phase = Some("Running".to_owned());
    assert_eq!(rejection(&running, &host), None, "only pods that have not started are checked");
    let nameless = pod(annotation("localhost/ "), json!({}));
    let message = "Cannot enforce AppArmor: invalid empty AppArmor profile name: \" \"";
    assert_eq!(rejection(&nameless, &full()), rejected("AppArmor", message));
}

#[test]
fn the_app_armor_profile_that_a_container_runs_with_counts() {
    let nameless = json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": " "}});
    let (default, none) = (json!({"appArmorProfile": {"type": "RuntimeDefault"}}), json!({}));
    let annotation = |value: &str| json!({"annotations": {"container.apparmor.security.beta.kubernetes.io/c": value}});
    let message = "Cannot enforce AppArmor: invalid empty AppArmor profile name: \" \"";
    let refused = rejected("AppArmor", message);
    // Its own, else that of its annotation, else the pod's.
    for (metadata, of_pod, own, is_refused) in [
        (json!({}), &nameless, &none, true),
        (json!({}), &nameless, &default, false),
        (json!({}), &default, &nameless, true),
        (annotation("localhost/ "), &default, &none, true),
        (annotation("localhost/ "), &none, &default, false),
        (annotation("runtime/default"), &nameless, &none, false),
    ] {
        let containers = json!([{"name": "c", "image": "i", "securityContext": own}]);
        let found = rejection(&pod(metadata, json!({"securityContext": of_pod, "containers": containers})), &full());
        assert_eq!(found, refused.clone().filter(|_| is_refused), "{of_pod} {own}");
    }
    for list in ["initContainers", "ephemeralContainers"] {
        let mut spec = json!({});
        spec[list] = json!([{"name": "other", "image": "i", "securityContext": nameless}]);
        assert_eq!(rejection(&pod(json!({}), spec), &full()), refused, "{list}");
    }
}

#[test]
fn a_decision_is_stored_once_per_uid() {
    let (uid, mut decisions) = (PodUid::from("u"), Decisions::default());
    assert!(!decisions.contains(&uid) && decisions.rejection(&uid).is_none());
    decisions.store(uid.clone(), Decision::reject("NodeShutdown", "m"));
    decisions.store(uid.clone(), Decision::Admit);
    assert_eq!(decisions.rejection(&uid).map(|rejection| &*rejection.reason), Some("NodeShutdown"));
    assert_eq!(decisions.rejected().collect::<Vec<_>>(), [&uid]);
    decisions.remove(&uid);
    decisions.store(uid.clone(), Decision::Admit);
    assert!(decisions.contains(&uid) && decisions.rejection(&uid).is_none());
    assert_eq!(decisions.rejected().count(), 0);
}
