//! Events of executing plans: reasons, messages and field paths as users of kubelets know them.

use std::future::poll_fn;
use std::task::Poll;

use tonic::Status;

use super::*;

async fn events(node: &mut Node, pod: &Pod, actions: PodActions, snapshot: &PodSnapshot) -> Vec<String> {
    execute(&node.ctx, pod, &actions, snapshot).await;
    node.events.take()
}

#[tokio::test(start_paused = true)]
async fn starts_of_each_kind() {
    let spec = json!({
        "initContainers": [container("first")],
        "ephemeralContainers": [{"name": "debug", "image": "app:1", "imagePullPolicy": "IfNotPresent"}],
    });
    let kinds = [
        (start(ContainerClass::Regular, 0, "c", None), "spec.containers{c}"),
        (start(ContainerClass::Init, 0, "first", None), "spec.initContainers{first}"),
        (start(ContainerClass::Ephemeral, 0, "debug", None), "spec.ephemeralContainers{debug}"),
    ];
    for (start, path) in kinds {
        let mut node = Node::new();
        node.has_image("app:1", "sha256:1");
        let expected = [
            r#"N Pulled: Container image "app:1" already present on machine and can be accessed by the pod"#,
            "N Created: Container created",
            "N Started: Container started",
        ];
        let sent = events(&mut node, &pod(spec.clone()), actions(keep(), vec![start]), &running(&[])).await;
        assert_eq!(sent, expected.map(|event| format!("pod {path} {event}")));
    }
}

#[tokio::test(start_paused = true)]
async fn image_steps() {
    let table: [(&str, &str, Option<Status>, &[&str]); 6] = [
        (
            "new:1",
            "IfNotPresent",
            None,
            &[
                r#"N Pulling: Pulling image "new:1""#,
                r#"N Pulled: Successfully pulled image "new:1" in 0s (0s including waiting). Image size: 7 bytes."#,
                "N Created: Container created",
                "N Started: Container started",
            ],
        ),
        (
            "absent:1",
            "IfNotPresent",
            Some(Status::not_found("no such image")),
            &[
                r#"N Pulling: Pulling image "absent:1""#,
                r#"W Failed: Failed to pull image "absent:1": rpc error: code = NotFound desc = no such image"#,
                "W Failed: Error: ErrImagePull",
            ],
        ),
        (
            "absent:1",
            "IfNotPresent",
            Some(Status::unknown("RegistryUnavailable: refused")),
            &[
                r#"N Pulling: Pulling image "absent:1""#,
                r#"W Failed: Failed to pull image "absent:1": RegistryUnavailable: refused"#,
                "W Failed: Error: RegistryUnavailable",
            ],
        ),
        (
            "absent:1",
            "Never",
            None,
            &[
                r#"W ErrImageNeverPull: Container image "absent:1" is not present with pull policy of Never"#,
                "W Failed: Error: ErrImageNeverPull",
            ],
        ),
        (
            "new:1",
            "Never",
            Some(Status::internal("broken")),
            &[
                r#"W InspectFailed: Failed to inspect image "": rpc error: code = Internal desc = broken"#,
                "W Failed: Error: ImageInspectError",
            ],
        ),
        (
            "BAD",
            "Never",
            None,
            &[r#"W InspectFailed: Failed to apply default image tag "BAD": "#, "W Failed: Error: InvalidImageName"],
        ),
    ];
    for (image_name, policy, failure, expected) in table {
        let mut node = Node::new();
        node.runtime.state().registry.insert("new:1".into(), image("sha256:new"));
        if let Some(status) = failure {
            node.runtime.fail(if policy == "Never" { "ImageStatus" } else { "PullImage" }, status);
        }
        let pod = pod(json!({"containers": [{"name": "c", "image": image_name, "imagePullPolicy": policy}]}));
        let sent = events(&mut node, &pod, actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
        assert_eq!(sent.len(), expected.len(), "{sent:?}");
        for (event, expected) in sent.iter().zip(expected) {
            assert!(event.starts_with(&format!("pod spec.containers{{c}} {expected}")), "{event}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_held_back() {
    let mut node = Node::new();
    let pod = pod(json!({}));
    let plan = || actions(keep(), vec![regular(0, "c")]);
    events(&mut node, &pod, plan(), &running(&[])).await;
    let sent = events(&mut node, &pod, plan(), &running(&[])).await;
    let path = "pod spec.containers{c}";
    let expected = [
        format!(r#"{path} N BackOff: Back-off pulling image "app:1""#),
        format!("{path} W Failed: Error: ImagePullBackOff"),
    ];
    assert_eq!(sent, expected);
}

#[tokio::test(start_paused = true)]
async fn a_start_held_back() {
    let mut node = Node::new();
    let blocked = Blocked { backoff: Duration::from_secs(10), until: SystemTime::UNIX_EPOCH };
    let start = StartContainer { blocked: Some(blocked), ..regular(0, "c") };
    let sent = events(&mut node, &pod(json!({})), actions(keep(), vec![start]), &running(&[])).await;
    let expected = "pod spec.containers{c} W BackOff: Back-off restarting failed container c in pod pod_ns(uid)";
    assert_eq!(sent, [expected]);
}

#[tokio::test(start_paused = true)]
async fn containers_that_cannot_be_created_or_started() {
    let table = [
        ("CreateContainer", "no space", vec!["W Failed: Error: no space"]),
        (
            "StartContainer",
            "container c-0 is broken",
            vec!["N Created: Container created", "W Failed: Error: container c is broken"],
        ),
    ];
    for (method, text, expected) in table {
        let mut node = Node::new();
        node.has_image("app:1", "sha256:1");
        node.runtime.fail(method, Status::unknown(text));
        let sent = events(&mut node, &pod(json!({})), actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
        let expected: Vec<String> = expected.iter().map(|event| format!("pod spec.containers{{c}} {event}")).collect();
        assert_eq!(sent[1..], expected, "after Pulled");
    }
}

#[tokio::test(start_paused = true)]
async fn sandboxes() {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    let changed = SandboxPlan::Create { attempt: 1, replaces: Some("sandbox-0".into()) };
    let plan = PodActions { kill_pod: true, ..actions(changed, vec![]) };
    let sent = events(&mut node, &pod(json!({})), plan, &running(&["c"])).await;
    let expected = [
        "pod N SandboxChanged: Pod sandbox changed, it will be killed and re-created.",
        "pod spec.containers{c} N Killing: Stopping container c",
    ];
    assert_eq!(sent, expected);

    node.runtime.fail("RunPodSandbox", Status::unknown("no network"));
    let sent = events(&mut node, &pod(json!({})), actions(create(), vec![]), &empty()).await;
    let expected =
        "pod W FailedCreatePodSandBox: Failed to create pod sandbox: rpc error: code = Unknown desc = no network";
    assert_eq!(sent, [expected]);

    let cluster_dns = pod(json!({"dnsPolicy": "ClusterFirst"}));
    let sent = events(&mut node, &cluster_dns, actions(create(), vec![]), &empty()).await;
    let message = "kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" policy. \
                   Falling back to \"Default\" policy.";
    let expected = [
        format!("node W MissingClusterDNS: {message}"),
        format!("pod W MissingClusterDNS: pod: \"pod_ns(uid)\". {message}"),
    ];
    assert_eq!(sent, expected);
}

/// Upstream: `TestSyncPodWithSandboxAndDeletedPod`.
#[tokio::test(start_paused = true)]
async fn a_sandbox_that_fails_once_the_pod_is_terminated_is_no_failure() {
    let mut node = Node::new();
    node.runtime.fail("RunPodSandbox", Status::unknown("the pod is gone"));
    let runtime = node.runtime.clone();
    let during_creation = poll_fn(move |_| {
        let is_creating = runtime.state().calls.iter().any(|call| call.starts_with("RunPodSandbox"));
        if is_creating { Poll::Ready(()) } else { Poll::Pending }
    });
    let (pod, plan) = (pod(json!({})), actions(create(), vec![regular(0, "c")]));
    let outcome = execute_observed(&node.ctx, &pass(&pod, &empty()), &plan, &|_| {}, during_creation).await;
    assert!(outcome.is_ok() && outcome.starts.is_empty(), "{outcome:?}");
    assert_eq!(outcome.sandbox, Some(true));
    assert_eq!(node.events.take(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_whose_status_cannot_be_read_was_created() {
    let mut node = Node::new();
    node.runtime.fail("PodSandboxStatus", Status::unknown("busy"));
    let outcome = execute(&node.ctx, &pod(json!({})), &actions(create(), vec![regular(0, "c")]), &empty()).await;
    assert!(!outcome.is_ok() && outcome.starts.is_empty(), "{outcome:?}");
    assert_eq!(outcome.sandbox, Some(true), "counted as started, and not as failed");
    let text = "Unable to get pod sandbox status: rpc error: code = Unknown desc = busy";
    assert_eq!(node.events.take(), [format!("pod W FailedPodSandBoxStatus: {text}")]);
}

#[tokio::test(start_paused = true)]
async fn a_name_too_long_for_a_log_folder() {
    let mut node = Node::new();
    let mut pod = pod(json!({}));
    let name = "n".repeat(253);
    pod.metadata.name = Some(name.clone());
    let sent = events(&mut node, &pod, actions(create(), vec![]), &empty()).await;
    let folder = node.path("logs").join(format!("ns_{name}_uid"));
    let expected = format!(
        "{name} W FailedCreatePodSandBox: Failed to create pod sandbox: mkdir {}: file name too long: namespace, name and \
         UID of the pod make 260 bytes",
        folder.display()
    );
    assert_eq!(sent, [expected]);
    assert_eq!(node.runtime.take_calls(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_network_that_is_not_ready() {
    let mut node = Node::new();
    node.network.send_replace(Some("cni plugin not initialized".to_owned()));
    let sent = events(&mut node, &pod(json!({})), actions(create(), vec![]), &empty()).await;
    assert_eq!(sent, ["pod W NetworkNotReady: network is not ready: cni plugin not initialized"]);
}

#[tokio::test(start_paused = true)]
async fn planned_kills_have_their_own_message() {
    let mut node = Node::new();
    let message = "Container c definition changed, will be restarted";
    let kill = KillContainer {
        id: "c-0".into(),
        name: "c".to_owned(),
        reason: KillReason::DefinitionChanged,
        message: message.to_owned(),
        grace_override: None,
    };
    let plan = PodActions { kill: vec![kill], ..actions(SandboxPlan::None, vec![]) };
    let sent = events(&mut node, &pod(json!({})), plan, &running(&["c"])).await;
    assert_eq!(sent, [format!("pod spec.containers{{c}} N Killing: {message}")]);
}
