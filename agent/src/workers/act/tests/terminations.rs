//! Kills, removals, clean-up and garbage collection.

use tonic::Status;

use super::*;
use crate::cgroups::CgroupName;
use crate::cgroups::Cgroups;
use crate::cgroups::Driver;
use crate::cgroups::Layout;
use crate::model::RemoveContainer;
use crate::volumes;

const fn grace(seconds: i64) -> TerminationOptions {
    TerminationOptions { grace: Some(seconds), immediately: false }
}

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
    terminate_pod(&node.ctx, &pod, || running(&["a", "b", "s1", "s2"]).into(), grace(20)).await.expect("stopped");
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
    let error =
        terminate_pod(&node.ctx, &pod, || running(&["a", "s"]).into(), grace(5)).await.expect_err("a was stuck");
    assert_eq!(
        error.to_string(),
        r#"error killing pod: failed to "KillContainer" for "a" with KillContainerError: "rpc error: code = Unknown desc = stuck""#
    );
    assert_eq!(node.runtime.take_calls(), ["StopContainer a-0 5", "StopContainer s-0 2", "StopPodSandbox sandbox-0"]);
}

#[tokio::test(start_paused = true)]
async fn absent_containers_count_as_stopped_and_unknown_ones_stop_with_the_sandbox() {
    let node = Node::new();
    node.runtime.fail("StopContainer", Status::not_found("c-0"));
    node.runtime.fail("StopPodSandbox", Status::not_found("sandbox-0"));
    terminate_pod(&node.ctx, &pod(json!({})), || running(&["c"]).into(), TerminationOptions::default())
        .await
        .expect("gone is stopped");
    node.runtime.take_calls();
    let error =
        terminate_pod(&node.ctx, &pod(json!({})), || running(&["unknown"]).into(), TerminationOptions::default())
            .await
            .expect_err("unknown");
    assert!(error.to_string().contains("unknown"), "{error}");
    assert_eq!(node.runtime.take_calls(), ["StopPodSandbox sandbox-0"]);
}

/// As of a static pod with a UID of its own, whose manifest was edited.
#[tokio::test(start_paused = true)]
async fn a_container_that_the_spec_no_longer_names_is_stopped_where_no_sandbox_is() {
    let node = Node::new();
    let pod = pod(json!({"hostNetwork": true}));
    stop_containers(&node.ctx, &pod, || running(&["c", "dropped"]).into(), grace(5)).await.expect("stopped");
    let mut calls = node.runtime.take_calls();
    calls.sort();
    assert_eq!(calls, ["StopContainer c-0 5", "StopContainer dropped-0 5"]);
}

#[tokio::test(start_paused = true)]
async fn a_container_that_exits_during_its_stop_counts_as_stopped() {
    let node = Node::new();
    node.runtime.state().log_paths.insert("c-0".into(), String::new());
    let stop = async || {
        node.runtime.fail("StopContainer", Status::unknown("ttrpc: closed: unknown"));
        terminate_pod(&node.ctx, &pod(json!({})), || running(&["c"]).into(), grace(5)).await
    };
    let error = stop().await.expect_err("it runs all the same");
    assert!(error.to_string().contains("ttrpc: closed"), "{error}");
    node.runtime.state().exited.insert("c-0".into());
    stop().await.expect("nothing is left to stop");
}

#[tokio::test(start_paused = true)]
async fn a_failed_stop_of_a_sandbox_is_retried_once() {
    let node = Node::new();
    let stop = async |failures| {
        for _ in 0..failures {
            node.runtime.fail("StopPodSandbox", Status::unknown("ttrpc: closed: unknown"));
        }
        terminate_pod(&node.ctx, &pod(json!({})), || running(&[]).into(), grace(5)).await
    };
    stop(1).await.expect("it stopped then");
    let error = stop(2).await.expect_err("it did not").to_string();
    assert!(error.contains(r#"failed to "KillPodSandbox""#) && error.contains("ttrpc: closed"), "{error}");
    assert_eq!(node.runtime.take_calls(), ["StopPodSandbox sandbox-0"; 4]);
}

#[tokio::test(start_paused = true)]
async fn orphans_get_two_seconds() {
    let mut node = Node::new();
    kill_orphan(&node.ctx, || running(&["x", "y"]).into()).await.expect("stopped");
    let mut calls = node.runtime.take_calls();
    calls.sort();
    assert_eq!(calls, ["StopContainer x-0 2", "StopContainer y-0 2", "StopPodSandbox sandbox-0"]);
    node.events.take();
    node.runtime.fail("StopContainer", Status::unknown("stuck"));
    let error = kill_orphan(&node.ctx, || running(&["x"]).into()).await.expect_err("x was stuck");
    let failed = format!("pod W FailedKillPod: {error}");
    assert_eq!(node.events.take(), ["pod spec.containers{x} N Killing: Stopping container x", failed.as_str()]);
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

/// Its containers run without the pod's cgroup, and are killed.
#[tokio::test(start_paused = true)]
async fn a_terminated_pod_does_not_wait_for_a_kill_with_a_longer_grace_period() {
    let tree = tempfile::tempdir().expect("a folder");
    let layout = Layout::V2 { mount: tree.path().to_owned() };
    let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let node = Node::with_cgroups(Some(cgroups));
    node.runtime.state().stops.insert("c-0".into(), Duration::from_secs(30));
    let (pass, plan) = (pass(&pod(json!({})), &running(&["c"])), actions(keep(), vec![regular(0, "other")]));
    let (since, terminated) = (Instant::now(), tokio::time::sleep(Duration::from_secs(3)));
    let outcome = execute_observed(&node.ctx, &pass, &plan, &|_| {}, terminated).await;
    assert!(outcome.is_ok() && outcome.starts.is_empty(), "{outcome:?}");
    assert_eq!(since.elapsed().as_secs(), 3);
    assert_eq!(node.runtime.take_calls(), ["StopContainer c-0 30"]);
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

/// With a negative `containerLogMaxSize` they stay until the log folder of the pod is removed.
#[tokio::test(start_paused = true)]
async fn logs_of_removed_instances_are_kept_if_logs_are_not_rotated() {
    for keep_logs in [false, true] {
        let mut node = Node::new();
        node.ctx.settings.keep_logs = keep_logs;
        let log = node.path("logs/ns_pod_uid/c/0.log");
        std::fs::create_dir_all(log.parent().expect("a folder")).expect("a folder");
        std::fs::write(&log, "x").expect("a log");
        let removed =
            ContainerStatus { log_path: log.to_string_lossy().into_owned(), ..status("c", 0, ContainerState::Exited) };
        let snapshot = testing::snapshot(vec![removed.clone()]);
        let link = crate::workers::generate::names::log_link_name(&snapshot.pod, "c", "c-0");
        let link = node.path("links").join(link);
        std::os::unix::fs::symlink(&log, &link).expect("a link");
        super::super::remove::remove_with_logs(&node.ctx, &snapshot.pod, &removed).await.expect("removed");
        assert_eq!(node.runtime.take_calls(), ["RemoveContainer c-0"]);
        assert_eq!((log.exists(), link.is_symlink()), (keep_logs, false));
    }
}

#[tokio::test(start_paused = true)]
async fn a_sidecar_in_a_replaced_sandbox_is_killed_once() {
    let mut node = Node::new();
    let mut sidecar = container("s");
    sidecar["restartPolicy"] = json!("Always");
    let pod = pod(json!({"initContainers": [sidecar]}));
    let prune = vec![RemoveContainer { id: "s-0".into(), name: "s".into(), keep_logs: false }];
    let sandbox = SandboxPlan::Create { attempt: 1, replaces: None };
    let plan = PodActions { kill_pod: true, prune, ..actions(sandbox, Vec::new()) };
    let outcome = execute(&node.ctx, &pod, &plan, &running(&["c", "s"])).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let expected = [
        "StopContainer c-0 30",
        "StopContainer s-0 30",
        "StopPodSandbox sandbox-0",
        "RemoveContainer s-0",
        "RunPodSandbox 1",
        "PodSandboxStatus sandbox-new",
    ];
    assert_eq!(node.runtime.take_calls(), expected);
    let expected = [
        "pod spec.containers{c} N Killing: Stopping container c",
        "pod spec.initContainers{s} N Killing: Stopping container s",
    ];
    assert_eq!(node.events.take(), expected);
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
    let mut node = Node::new();
    let log = node.path("0.log");
    std::fs::write(&log, "x").expect("a log");
    let log_path = log.to_string_lossy().into_owned();
    let with_log = |name: &str, state| ContainerStatus { log_path: log_path.clone(), ..status(name, 0, state) };
    let snapshot =
        testing::snapshot(vec![with_log("c", ContainerState::Running), with_log("d", ContainerState::Exited)]);
    let pod = pod(json!({"containers": [container("c"), container("d")]}));
    let remove = |name: &str| RemoveContainer { id: format!("{name}-0").into(), name: name.into(), keep_logs: true };
    let (kill, remove) = (vec![kill_for_restart_all()], vec![remove("c"), remove("d")]);
    let plan = PodActions { kill, remove, ..actions(keep(), Vec::new()) };
    let outcome = execute(&node.ctx, &pod, &plan, &snapshot).await;
    assert!(outcome.restart_all_done && outcome.is_ok());
    assert_eq!(node.runtime.take_calls(), ["StopContainer c-0 2", "RemoveContainer c-0", "RemoveContainer d-0"]);
    assert_eq!(node.events.take(), ["pod spec.containers{c} N Killing: killing"], "it is killed once");
    assert!(log.exists());
    node.runtime.fail("RemoveContainer", Status::unknown("busy"));
    let outcome = execute(&node.ctx, &pod, &plan, &snapshot).await;
    assert!(!outcome.restart_all_done && outcome.errors.len() == 1);
}

#[tokio::test]
async fn volumes_of_a_stopped_pod_are_torn_down() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({
        "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{"name": "c", "image": "app:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
    }));
    execute(&node.ctx, &pod, &actions(create(), vec![regular(0, "c")]), &empty()).await;
    std::fs::write(node.path("root/pods/uid/volumes/kubernetes.io~empty-dir/v/data"), "x").expect("a file");
    cleanup_pod(&node.ctx, &pass(&pod, &empty())).await.expect("released");
    assert!(node.ctx.volumes.is_torn_down("uid"));
    assert!(node.path("root/pods/uid/etc-hosts").exists(), "the pod's directory stays");
    cleanup_orphan(&node.ctx, "uid").await.expect("gone");
    assert!(!node.path("root/pods/uid").exists());
}

/// As after the pods of a server that does not answer any more were deleted while the agent was down.
#[tokio::test(start_paused = true)]
async fn volumes_that_are_not_torn_down_keep_no_other_pod_from_being_removed() {
    let mut node = Node::new();
    node.ctx.volumes = volumes::testing::never_torn_down(&node.path("root"));
    let of = |uid: &str| {
        let mut snapshot = testing::snapshot(vec![status("c", 0, ContainerState::Exited)]);
        snapshot.pod.uid = uid.into();
        snapshot
    };
    let [one, two, other] = ["one", "two", "other"].map(of);
    for uid in ["one", "two"] {
        let volume = node.path(&format!("root/pods/{uid}/volumes/kubernetes.io~empty-dir/v"));
        std::fs::create_dir_all(volume).expect("folders");
    }
    std::fs::create_dir_all(node.path("root/pods/other")).expect("folders");
    tokio::select! {
        biased;
        _ = remove_content(&node.ctx, &one) => panic!("its volume stays"),
        _ = remove_content(&node.ctx, &two) => panic!("its volume stays"),
        done = tokio::time::timeout(Duration::from_secs(5), remove_content(&node.ctx, &other)) => {
            assert_eq!(texts(&done.expect("it waits for no other pod")), [""; 0]);
        }
    }
    let left = ["one", "two", "other"].map(|uid| node.path(&format!("root/pods/{uid}")).exists());
    assert_eq!(left, [true, true, false]);
}

/// A static pod has the same UID whenever its manifest is there.
#[tokio::test(start_paused = true)]
async fn a_pod_that_comes_back_is_spared_or_waits_until_what_it_left_is_removed() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let volume = node.path("root/pods/uid/volumes/kubernetes.io~empty-dir/v");
    std::fs::create_dir_all(&volume).expect("folders");
    std::fs::write(volume.join("old"), "x").expect("a file");
    let removed = remove_orphan(&node.ctx, "uid", |_| true).await.expect("nothing to do");
    assert!(!removed && volume.join("old").exists(), "it came back before");

    let pod = pod(json!({
        "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{"name": "c", "image": "app:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
    }));
    let (plan, pass) = (actions(create(), vec![regular(0, "c")]), pass(&pod, &empty()));
    let mut removal = Box::pin(remove_orphan(&node.ctx, "uid", |_| false));
    assert!(futures_util::poll!(&mut removal).is_pending(), "it has begun");
    let terminated = std::future::ready(());
    let outcome = execute_observed(&node.ctx, &pass, &plan, &|_| {}, terminated).await;
    assert!(outcome.is_ok() && outcome.starts.is_empty(), "a terminated pod does not wait: {outcome:?}");
    let (removed, outcome) = tokio::join!(removal, super::super::execute(&node.ctx, &pass, &plan));
    assert!(removed.expect("removed") && outcome.is_ok() && outcome.starts.len() == 1, "{outcome:?}");
    assert!(volume.is_dir() && !volume.join("old").exists());
    assert!(node.path("root/pods/uid/etc-hosts").exists());
}

#[tokio::test(start_paused = true)]
async fn old_instances_and_sandboxes_of_a_pod_that_stays_are_removed() {
    let node = Node::new();
    let dead = |name: &str, attempt, sandbox: &str| {
        let log = node.path(&format!("{name}-{attempt}.log"));
        std::fs::write(&log, "x").expect("a log");
        ContainerStatus {
            sandbox_id: sandbox.into(),
            log_path: log.to_string_lossy().into_owned(),
            ..status(name, attempt, ContainerState::Exited)
        }
    };
    let lost = ContainerStatus { state: ContainerState::Unknown, ..dead("c", 1, "sandbox-0") };
    let mut snapshot = testing::snapshot(vec![
        ContainerStatus { sandbox_id: "sandbox-2".into(), ..status("c", 3, ContainerState::Running) },
        dead("c", 2, "sandbox-1"),
        lost,
        dead("c", 0, "sandbox-0"),
    ]);
    let sandbox = |id: &str, ready| SandboxStatus { id: id.into(), ready, ..snapshot.sandboxes[0].clone() };
    snapshot.sandboxes = vec![sandbox("sandbox-2", true), sandbox("sandbox-1", false), sandbox("sandbox-0", false)];
    assert!(gc::has_garbage(&node.ctx, &snapshot));
    node.runtime.fail("RemoveContainer", Status::unknown("busy"));
    let failed = gc::collect_garbage(&node.ctx, &snapshot).await;
    assert_eq!(texts(&failed), ["rpc error: code = Unknown desc = busy"]);
    let expected = ["RemoveContainer c-0", "StopContainer c-1 2", "RemoveContainer c-1"];
    assert_eq!(node.runtime.take_calls(), expected, "its sandbox waits for both");
    assert!(gc::collect_garbage(&node.ctx, &snapshot).await.is_empty());
    let calls = node.runtime.take_calls();
    assert_eq!(calls[..3], expected);
    assert_eq!(calls[3..], ["StopPodSandbox sandbox-0", "RemovePodSandbox sandbox-0"]);
    let logs = [0, 1, 2].map(|attempt| node.path(&format!("c-{attempt}.log")).exists());
    assert_eq!(logs, [false, false, true]);

    assert!(!gc::has_garbage(&node.ctx, &running(&["c", "d"])));
    assert!(gc::collect_garbage(&node.ctx, &running(&["c", "d"])).await.is_empty());
    assert_eq!(node.runtime.take_calls(), [""; 0]);
}

#[tokio::test]
async fn logs_of_removed_pods_are_removed() {
    let node = Node::new();
    for dir in ["logs/ns_a_u1", "logs/ns_b_u2/c", "logs/other"] {
        std::fs::create_dir_all(node.path(dir)).expect("a folder");
    }
    std::fs::write(node.path("logs/ns_c_u3"), "x").expect("a file");
    assert!(gc::collect_logs(&node.ctx, |uid| uid == "u1").await.is_empty());
    let left = ["logs/ns_a_u1", "logs/ns_b_u2", "logs/other", "logs/ns_c_u3"].map(|dir| node.path(dir).exists());
    assert_eq!(left, [true, false, true, true]);
}

#[tokio::test]
async fn links_to_logs_that_no_longer_exist_are_removed() {
    let node = Node::new();
    let link = |name: &str, to: &str| std::os::unix::fs::symlink(to, node.path(name)).expect("a link");
    link("links/a_ns_c-ended.log", "/nowhere");
    link("links/a_ns_c-lives.log", "/");
    link("links/a_ns_c-others", "/nowhere");
    // The kernel gives up: whether the log exists is not known.
    link("links/a_ns_c-loops.log", "a_ns_c-loops.log");
    // The log of the one is being rotated.
    for id in ["writes", "exited"] {
        node.runtime.state().log_paths.insert(id.to_owned(), "/nowhere".to_owned());
        link(&format!("links/a_ns_c-{id}.log"), "/nowhere");
    }
    node.runtime.state().exited.insert("exited".to_owned());
    gc::remove_dangling_links(&node.ctx).await;
    let names = ["ended.log", "exited.log", "lives.log", "others", "loops.log", "writes.log"];
    let left = names.map(|name| node.path(&format!("links/a_ns_c-{name}")).is_symlink());
    assert_eq!(left, [false, false, true, true, true, true]);
}

/// As upstream: its processes may still run.
#[tokio::test(start_paused = true)]
async fn an_instance_in_unknown_state_that_cannot_be_stopped_stays() {
    let node = Node::new();
    let mut snapshot = testing::snapshot(vec![status("c", 0, ContainerState::Unknown)]);
    snapshot.sandboxes.clear();
    node.runtime.fail("StopContainer", Status::unknown("busy"));
    assert_eq!(gc::remove_dead(&node.ctx, &snapshot).await.len(), 1);
    assert_eq!(node.runtime.take_calls(), ["StopContainer c-0 2"]);
    assert!(gc::remove_dead(&node.ctx, &snapshot).await.is_empty());
    assert_eq!(node.runtime.take_calls(), ["StopContainer c-0 2", "RemoveContainer c-0"]);
}

/// The agent was killed between the start and the link.
#[tokio::test]
async fn missing_links_to_logs_of_running_instances_are_made() {
    let node = Node::new();
    std::fs::write(node.path("0.log"), "x").expect("a log");
    let instance = |name: &str, state, log: &str| {
        let log_path = node.path(log).to_string_lossy().into_owned();
        ContainerStatus { log_path, ..status(name, 0, state) }
    };
    let snapshot = testing::snapshot(vec![
        instance("runs", ContainerState::Running, "0.log"),
        instance("ended", ContainerState::Exited, "0.log"),
        instance("silent", ContainerState::Running, "missing.log"),
        status("unknown", 0, ContainerState::Running),
    ]);
    let link = |name: &str| node.path(&format!("links/pod_ns_{name}-{name}-0.log"));
    let pods = [Arc::new(snapshot)];
    for attempt in ["the first time", "again"] {
        gc::make_missing_links(&node.ctx, &pods).await;
        let links = ["runs", "ended", "silent", "unknown"].map(|name| link(name).is_symlink());
        assert_eq!(links, [true, false, false, false], "{attempt}");
    }
    assert_eq!(std::fs::read_link(link("runs")).expect("a link"), node.path("0.log"));
}

#[tokio::test(start_paused = true)]
async fn all_exited_instances_of_a_removed_pod_are_removed() {
    let node = Node::new();
    let dead = |name: &str, attempt| status(name, attempt, ContainerState::Exited);
    let snapshot = testing::snapshot(vec![dead("c", 2), dead("d", 1), status("c", 1, ContainerState::Running)]);
    assert!(gc::remove_dead(&node.ctx, &snapshot).await.is_empty());
    assert_eq!(node.runtime.take_calls(), ["RemoveContainer c-2", "RemoveContainer d-1"]);
}

/// Found by its name, without a list of the links of all pods.
#[tokio::test]
async fn the_log_of_a_removed_instance_goes_with_its_own_link() {
    let node = Node::new();
    let log = node.path("0.log");
    std::fs::write(&log, "x").expect("a log");
    let links = ["pod_ns_c-c0", "pod_ns_c-c1", "other_ns_c-c0"].map(|name| node.path(&format!("links/{name}.log")));
    links.iter().for_each(|link| std::os::unix::fs::symlink(&log, link).expect("a link"));
    let log_path = log.to_string_lossy().into_owned();
    let exited = ContainerStatus { id: "c0".into(), log_path, ..status("c", 0, ContainerState::Exited) };
    let snapshot = testing::snapshot(vec![exited]);
    for attempt in ["the first time", "again"] {
        assert_eq!(texts(&gc::remove_dead(&node.ctx, &snapshot).await), [""; 0], "{attempt}");
        assert_eq!(node.runtime.take_calls(), ["RemoveContainer c0"], "{attempt}");
    }
    assert!(!log.exists());
    assert_eq!(links.map(|link| link.is_symlink()), [false, true, true]);
}
