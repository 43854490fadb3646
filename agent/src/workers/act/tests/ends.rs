//! Kills, removals, clean-up and collection.

use tonic::Status;

use super::*;
use crate::model::RemoveContainer;

#[tokio::test(start_paused = true)]
async fn sidecars_stop_after_the_others() {
    let node = Node::new();
    let sidecar = |name: &str| json!({"name": name, "image": "i", "restartPolicy": "Always"});
    let pod =
        pod(json!({"initContainers": [sidecar("s1"), sidecar("s2")], "containers": [container("a"), container("b")]}));
    for (id, seconds) in [("a-0", 3), ("b-0", 1), ("s2-0", 4)] {
        node.runtime.state().stops.insert(id.into(), Duration::from_secs(seconds));
    }
    let since = Instant::now();
    terminate_pod(&node.ctx, &pod, &running(&["a", "b", "s1", "s2"]), Some(20)).await.expect("stopped");
    let mut calls = node.runtime.take_calls();
    calls[..2].sort();
    assert_eq!(
        calls,
        [
            "StopContainer a-0 20",
            "StopContainer b-0 20",
            "StopContainer s2-0 17",
            "StopContainer s1-0 13",
            "StopPodSandbox sandbox-0"
        ]
    );
    assert_eq!(since.elapsed().as_secs(), 7);
}

#[tokio::test(start_paused = true)]
async fn waiting_ends_with_the_grace_period() {
    let node = Node::new();
    let sidecar = json!({"name": "s", "image": "i", "restartPolicy": "Always"});
    let pod = pod(json!({"initContainers": [sidecar], "containers": [container("a")]}));
    node.runtime.state().stops.insert("a-0".into(), Duration::from_secs(60));
    node.runtime.fail("StopContainer", Status::unknown("stuck"));
    let error = terminate_pod(&node.ctx, &pod, &running(&["a", "s"]), Some(5)).await.expect_err("a was stuck");
    assert_eq!(
        error,
        r#"error killing pod: failed to "KillContainer" for "a" with KillContainerError: "rpc error: code = Unknown desc = stuck""#
    );
    assert_eq!(node.runtime.take_calls(), ["StopContainer a-0 5", "StopContainer s-0 2", "StopPodSandbox sandbox-0"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_gone_is_fine_and_strangers_fall_with_the_sandbox() {
    let node = Node::new();
    node.runtime.fail("StopContainer", Status::not_found("c-0"));
    node.runtime.fail("StopPodSandbox", Status::not_found("sandbox-0"));
    terminate_pod(&node.ctx, &pod(json!({})), &running(&["c"]), None).await.expect("gone is stopped");
    node.runtime.take_calls();
    let error = terminate_pod(&node.ctx, &pod(json!({})), &running(&["stranger"]), None).await.expect_err("unknown");
    assert!(error.contains("stranger"), "{error}");
    assert_eq!(node.runtime.take_calls(), ["StopPodSandbox sandbox-0"]);
}

#[tokio::test(start_paused = true)]
async fn orphans_get_two_seconds() {
    let node = Node::new();
    kill_orphan(&node.ctx, &running(&["x", "y"])).await.expect("stopped");
    let mut calls = node.runtime.take_calls();
    calls.sort();
    assert_eq!(calls, ["StopContainer x-0 2", "StopContainer y-0 2", "StopPodSandbox sandbox-0"]);
}

#[tokio::test(start_paused = true)]
async fn single_kills_come_first_and_the_first_failure_ends_the_sync() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({}));
    let kill = KillContainer {
        id: "c-0".into(),
        name: "c".into(),
        reason: KillReason::DefinitionChanged,
        message: "Container c definition changed, will be restarted".into(),
        grace_override: None,
    };
    let plan =
        PodActions { kill: vec![kill], ..actions(keep(), vec![start(ContainerClass::Regular, 0, "c", Some(1))]) };
    let snapshot = running(&["c"]);
    assert!(execute(&node.ctx, &pod, &plan, &snapshot).await.is_ok());
    let expected = ["StopContainer c-0 30", "ImageStatus app:1", "CreateContainer c/1", "StartContainer c-1"];
    assert_eq!(node.runtime.take_calls(), expected);
    node.runtime.fail("StopContainer", Status::unknown("stuck"));
    let outcome = execute(&node.ctx, &pod, &plan, &snapshot).await;
    assert_eq!((outcome.errors.len(), outcome.starts.len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_new_sandbox_follows_the_kill_and_the_removal_of_init_containers() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({"initContainers": [container("i")]}));
    let mut snapshot = running(&["c"]);
    let log = node.path("logs/ns_pod_uid/i/0.log");
    std::fs::create_dir_all(log.parent().expect("a folder")).expect("a folder");
    std::fs::write(&log, "x").expect("a log");
    let init =
        ContainerStatus { log_path: log.to_string_lossy().into_owned(), ..status("i", 0, ContainerState::Exited) };
    snapshot.containers.push(init);
    let prune = vec![RemoveContainer { id: "i-0".into(), name: "i".into(), keep_logs: false }];
    let sandbox = SandboxPlan::Create { attempt: 1, replaces: Some("sandbox-0".into()) };
    let plan =
        PodActions { kill_pod: true, prune, ..actions(sandbox, vec![start(ContainerClass::Init, 0, "i", Some(1))]) };
    let outcome = execute(&node.ctx, &pod, &plan, &snapshot).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(
        node.runtime.take_calls(),
        [
            "StopContainer c-0 30",
            "StopPodSandbox sandbox-0",
            "RemoveContainer i-0",
            "RunPodSandbox 1",
            "PodSandboxStatus sandbox-new",
            "ImageStatus app:1",
            "CreateContainer i/1",
            "StartContainer i-1"
        ]
    );
    assert!(!log.exists());
}

#[tokio::test(start_paused = true)]
async fn pruning_waits_until_the_start_is_done() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({"initContainers": [container("i")]}));
    let snapshot =
        testing::snapshot(vec![status("i", 1, ContainerState::Exited), status("i", 0, ContainerState::Exited)]);
    let prune = vec![RemoveContainer { id: "i-0".into(), name: "i".into(), keep_logs: false }];
    let plan = PodActions { prune, ..actions(keep(), vec![start(ContainerClass::Init, 0, "i", Some(2))]) };
    node.runtime.fail("RemoveContainer", Status::unknown("busy"));
    let outcome = execute(&node.ctx, &pod, &plan, &snapshot).await;
    assert!(outcome.is_ok(), "a failed removal is only logged: {outcome:?}");
    let expected = ["ImageStatus app:1", "CreateContainer i/2", "StartContainer i-2", "RemoveContainer i-0"];
    assert_eq!(node.runtime.take_calls(), expected);
}

#[tokio::test(start_paused = true)]
async fn restarting_all_keeps_the_logs() {
    let node = Node::new();
    let log = node.path("0.log");
    std::fs::write(&log, "x").expect("a log");
    let log_path = log.to_string_lossy().into_owned();
    let with_log = |name: &str, state| ContainerStatus { log_path: log_path.clone(), ..status(name, 0, state) };
    let snapshot =
        testing::snapshot(vec![with_log("c", ContainerState::Running), with_log("d", ContainerState::Exited)]);
    let pod = pod(json!({"containers": [container("c"), container("d")]}));
    let remove = |name: &str| RemoveContainer { id: format!("{name}-0").into(), name: name.into(), keep_logs: true };
    let plan = PodActions { remove: vec![remove("c"), remove("d")], ..actions(keep(), Vec::new()) };
    let outcome = execute(&node.ctx, &pod, &plan, &snapshot).await;
    assert!(outcome.restart_all_done && outcome.is_ok());
    assert_eq!(node.runtime.take_calls(), ["StopContainer c-0 2", "RemoveContainer c-0", "RemoveContainer d-0"]);
    assert!(log.exists());
    node.runtime.fail("RemoveContainer", Status::unknown("busy"));
    let outcome = execute(&node.ctx, &pod, &plan, &snapshot).await;
    assert!(!outcome.restart_all_done && outcome.errors.len() == 1);
}

#[tokio::test]
async fn a_pod_that_ended_leaves_no_volume() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({
        "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{"name": "c", "image": "app:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
    }));
    execute(&node.ctx, &pod, &actions(create(), vec![regular(0, "c")]), &empty()).await;
    std::fs::write(node.path("root/pods/uid/volumes/kubernetes.io~empty-dir/v/data"), "x").expect("a file");
    cleanup_pod(&node.ctx, &pod).await.expect("freed");
    assert!(node.ctx.volumes.is_torn_down("uid"));
    assert!(node.path("root/pods/uid/etc-hosts").exists(), "the pod's directory is not yet to go");
    cleanup_orphan(&node.ctx, "uid").await.expect("gone");
    assert!(!node.path("root/pods/uid").exists());
}

#[tokio::test]
async fn collection_takes_what_nobody_needs() {
    let node = Node::new();
    let labels = |uid: &str, name: &str| {
        [("io.kubernetes.pod.uid", uid), ("io.kubernetes.container.name", name)]
            .map(|(k, v)| (k.into(), v.into()))
            .into()
    };
    let listed = |id: &str, uid: &str, created_at, state: cri::ContainerState| cri::Container {
        id: id.into(),
        pod_sandbox_id: format!("{uid}-sandbox"),
        labels: labels(uid, "c"),
        created_at,
        state: state as i32,
        ..Default::default()
    };
    use cri::ContainerState::{ContainerExited, ContainerRunning};
    {
        let mut state = node.runtime.state();
        state.listed = vec![
            listed("old", "u1", 1, ContainerExited),
            listed("new", "u1", 2, ContainerExited),
            listed("live", "u1", 3, ContainerRunning),
            listed("gone", "u2", 1, ContainerExited),
            cri::Container { id: "stranger".into(), state: ContainerExited as i32, ..Default::default() },
        ];
        let sandbox = |id: &str, uid: &str, created_at| cri::PodSandbox {
            id: id.into(),
            labels: labels(uid, ""),
            state: cri::PodSandboxState::SandboxNotready as i32,
            created_at,
            ..Default::default()
        };
        state.listed_sandboxes =
            vec![sandbox("u1-a", "u1", 1), sandbox("u1-b", "u1", 2), sandbox("u1-sandbox", "u1", 3)];
        for id in ["old", "gone"] {
            state.log_paths.insert(id.into(), node.path(&format!("{id}.log")).to_string_lossy().into_owned());
        }
    }
    for dir in ["logs/ns_a_u1", "logs/ns_b_u2", "logs/other"] {
        std::fs::create_dir_all(node.path(dir)).expect("a folder");
    }
    std::os::unix::fs::symlink("/nowhere", node.path("links/a_ns_c-ended.log")).expect("a link");
    let outcome = gc::collect(&node.ctx, true, |uid| uid == "u2").await.expect("a list");
    assert_eq!((outcome.containers, outcome.sandboxes, outcome.log_dirs), (2, 2, 1), "{outcome:?}");
    assert_eq!(outcome.errors, Vec::<String>::new());
    assert!(
        node.path("logs/ns_a_u1").exists() && !node.path("logs/ns_b_u2").exists() && node.path("logs/other").exists()
    );
    assert!(!node.path("links/a_ns_c-ended.log").is_symlink());
    let mut calls = node.runtime.take_calls();
    calls.retain(|call| call.starts_with("Remove"));
    assert_eq!(
        calls,
        ["RemoveContainer gone", "RemoveContainer old", "RemovePodSandbox u1-a", "RemovePodSandbox u1-b"]
    );

    let outcome = gc::collect(&node.ctx, false, |_| true).await.expect("a list");
    assert_eq!(outcome.containers, 1, "before the sources are ready only surplus goes: {outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn the_newest_dead_instance_of_a_pods_container_is_kept() {
    let node = Node::new();
    let dead = |name: &str, attempt| status(name, attempt, ContainerState::Exited);
    let snapshot = testing::snapshot(vec![dead("c", 2), dead("d", 1), dead("c", 1), dead("c", 0), dead("d", 0)]);
    assert!(gc::remove_dead(&node.ctx, &snapshot, Some(&"c-2".into()), false).await.is_empty());
    assert_eq!(node.runtime.take_calls(), ["RemoveContainer c-1", "RemoveContainer c-0"]);
    gc::remove_dead(&node.ctx, &snapshot, None, true).await;
    assert_eq!(node.runtime.take_calls().len(), 5);
    assert!(gc::remove_dead(&node.ctx, &snapshot, Some(&"unknown".into()), false).await.is_empty());
    assert_eq!(node.runtime.take_calls(), Vec::<String>::new());
}
