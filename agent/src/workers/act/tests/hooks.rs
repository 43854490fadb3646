//! Hooks of containers that are started and stopped: order, events, and what is left of the grace period.

use super::*;

/// Exec, sleep and the like as a handler.
fn exec(command: &str) -> Value {
    json!({"exec": {"command": command.split(' ').collect::<Vec<_>>()}})
}

fn with_hooks(name: &str, hooks: Value) -> Value {
    let mut container = container(name);
    container["lifecycle"] = hooks;
    container
}

/// Stops a pod with one container that has this preStop hook. Returns calls, events, and how long it took.
async fn stop_with(
    handler: Value,
    grace: Option<i64>,
    takes: Duration,
    exit_code: i32,
) -> (Vec<String>, Vec<String>, Duration) {
    let mut node = Node::new();
    node.runtime.state().commands.insert("hook".into(), (takes, exit_code));
    let pod = pod(json!({"containers": [with_hooks("c", json!({"preStop": handler}))]}));
    let since = Instant::now();
    let options = TerminationOptions { grace, immediately: false };
    terminate_pod(&node.ctx, &pod, || running(&["c"]).into(), options).await.expect("stopped");
    let took = since.elapsed();
    // A hook that is still running ends later.
    tokio::time::sleep(Duration::from_secs(30)).await;
    (node.runtime.take_calls(), node.events.take(), took)
}

#[tokio::test(start_paused = true)]
async fn pre_stop_takes_whole_seconds_of_the_grace_period() {
    let table = [
        (exec("hook x"), None, 12_900, &["ExecSync c-0 hook x", "StopContainer c-0 18"][..], 12_900),
        (exec("hook x"), None, 40_000, &["ExecSync c-0 hook x", "StopContainer c-0 2"], 30_000),
        (exec("hook x"), Some(1), 40_000, &["ExecSync c-0 hook x", "StopContainer c-0 2"], 1_000),
        (exec("hook x"), Some(0), 40_000, &["StopContainer c-0 2"], 0),
        (json!({"sleep": {"seconds": 10}}), None, 0, &["StopContainer c-0 20"], 10_000),
        (json!({"sleep": {"seconds": 0}}), None, 0, &["StopContainer c-0 30"], 0),
    ];
    for (handler, grace, takes, expected, until_stopped) in table {
        let context = format!("{handler} {grace:?} {takes}");
        let (calls, _, took) = stop_with(handler, grace, Duration::from_millis(takes), 0).await;
        assert_eq!(calls[..calls.len() - 1], *expected, "{context}");
        assert_eq!(calls.last().map(String::as_str), Some("StopPodSandbox sandbox-0"), "{context}");
        assert_eq!(took.as_millis(), until_stopped, "{context}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_pre_stop_has_an_event_and_the_stop_continues() {
    let killing = "pod spec.containers{c} N Killing: Stopping container c";
    let failed = "pod spec.containers{c} W FailedPreStopHook: PreStopHook failed";
    let table = [
        (exec("hook"), 1_000, 0, &[killing][..], "StopContainer c-0 29"),
        (exec("hook"), 1_000, 3, &[killing, failed], "StopContainer c-0 29"),
        (json!({"tcpSocket": {"port": 80}}), 0, 0, &[killing, failed], "StopContainer c-0 30"),
        (json!({}), 0, 0, &[killing, failed], "StopContainer c-0 30"),
        // The command ends with its container.
        (exec("hook"), 60_000, 0, &[killing, failed], "StopContainer c-0 2"),
    ];
    for (handler, takes, exit_code, expected, stop) in table {
        let context = format!("{handler} {takes} {exit_code}");
        let (calls, events, _) = stop_with(handler, None, Duration::from_millis(takes), exit_code).await;
        assert_eq!(events, expected, "{context}");
        assert!(calls.iter().any(|call| call == stop), "{context}: {calls:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn sleeps_that_are_cut_short_are_counted() {
    for (seconds, grace, expected) in [(60, 2, 1), (10, 30, 0)] {
        let (mut node, metrics) = (Node::new(), Metrics::new());
        node.ctx.metrics = Some(metrics.clone());
        let hooks = json!({"preStop": {"sleep": {"seconds": seconds}}});
        let pod = pod(json!({"containers": [with_hooks("c", hooks)]}));
        let options = TerminationOptions { grace: Some(grace), immediately: false };
        terminate_pod(&node.ctx, &pod, || running(&["c"]).into(), options).await.expect("stopped");
        // The sleep goes on for a while after the stop.
        tokio::time::sleep(Duration::from_secs(30)).await;
        let text = metrics.render().expect("metrics");
        let line = format!("kubelet_sleep_action_terminated_early_total {expected}");
        assert!(text.lines().any(|found| found == line), "{seconds} s in {grace} s: {line} not in\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn sidecars_run_their_hooks_before_their_turn() {
    let node = Node::new();
    node.runtime.state().commands.insert("hook".into(), (Duration::from_secs(20), 0));
    let hooks = json!({"preStop": exec("hook")});
    let sidecar = |name: &str| {
        let mut sidecar = if name == "s1" { with_hooks(name, hooks.clone()) } else { container(name) };
        sidecar["restartPolicy"] = json!("Always");
        sidecar
    };
    let pod = pod(json!({"initContainers": [sidecar("s1"), sidecar("s2")], "containers": [container("main")]}));
    node.runtime.state().stops.insert("main-0".into(), Duration::from_secs(3));
    terminate_pod(&node.ctx, &pod, || running(&["main", "s1", "s2"]).into(), TerminationOptions::default())
        .await
        .expect("stopped");
    let mut calls = node.runtime.take_calls();
    calls[..2].sort();
    let expected = [
        "ExecSync s1-0 hook",
        "StopContainer main-0 30",
        "StopContainer s2-0 27",
        "StopContainer s1-0 10",
        "StopPodSandbox sandbox-0",
    ];
    assert_eq!(calls, expected);
}

#[tokio::test(start_paused = true)]
async fn a_stop_with_a_shorter_grace_period_continues_the_hook() {
    let node = Node::new();
    node.runtime.state().commands.insert("hook".into(), (Duration::from_secs(8), 0));
    let pod = pod(json!({"containers": [with_hooks("c", json!({"preStop": exec("hook")}))]}));
    let (since, view) = (Instant::now(), || Arc::new(running(&["c"])));
    let stop =
        |grace| terminate_pod(&node.ctx, &pod, view, TerminationOptions { grace: Some(grace), immediately: true });
    assert!(tokio::time::timeout(Duration::from_secs(5), stop(30)).await.is_err(), "abandoned");
    stop(6).await.expect("stopped");
    assert_eq!(since.elapsed().as_secs(), 8);
    let expected = ["ExecSync c-0 hook", "StopContainer c-0 3", "StopPodSandbox sandbox-0"];
    assert_eq!(node.runtime.take_calls(), expected);
    node.runtime.fail("StopContainer", tonic::Status::unknown("stuck"));
    stop(30).await.expect_err("stuck");
    stop(30).await.expect("stopped");
    let runs = node.runtime.take_calls().iter().filter(|call| call.starts_with("ExecSync")).count();
    assert_eq!(runs, 2, "a failed stop is tried again with its hook");
}

#[tokio::test(start_paused = true)]
async fn restarting_all_containers_runs_no_hook() {
    let node = Node::new();
    let pod = pod(json!({"containers": [with_hooks("c", json!({"preStop": exec("hook")}))]}));
    let remove = vec![RemoveContainer { id: "c-0".into(), name: "c".into(), keep_logs: true }];
    let plan = PodActions { kill: vec![kill_for_restart_all()], remove, ..actions(keep(), Vec::new()) };
    execute(&node.ctx, &pod, &plan, &running(&["c"])).await;
    assert_eq!(node.runtime.take_calls(), ["StopContainer c-0 2", "RemoveContainer c-0"]);
}

#[tokio::test(start_paused = true)]
async fn later_containers_wait_for_post_start() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    node.runtime.state().commands.insert("hook".into(), (Duration::from_secs(7), 0));
    let first = with_hooks("a", json!({"postStart": exec("hook $(HOME)")}));
    let pod = pod(json!({"containers": [first, container("b")]}));
    let since = Instant::now();
    let plan = actions(keep(), vec![regular(0, "a"), regular(1, "b")]);
    let outcome = execute(&node.ctx, &pod, &plan, &running(&[])).await;
    assert_eq!(tokens(&outcome), [("a", "started"), ("b", "started")]);
    assert_eq!(since.elapsed().as_secs(), 7);
    let calls = node.runtime.take_calls();
    let of_interest: Vec<_> = calls.iter().filter(|call| !call.starts_with("Image")).collect();
    let expected = [
        "CreateContainer a/0",
        "StartContainer a-0",
        "ExecSync a-0 hook $(HOME)",
        "CreateContainer b/0",
        "StartContainer b-0",
    ];
    assert_eq!(of_interest, expected);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_terminated_waits_for_no_post_start_and_starts_no_other_container() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    node.runtime.state().commands.insert("hook".into(), (Duration::from_secs(600), 0));
    let first = with_hooks("a", json!({"postStart": exec("hook")}));
    let pod = pod(json!({"containers": [first, container("b")]}));
    let plan = actions(keep(), vec![regular(0, "a"), regular(1, "b")]);
    let (since, terminated) = (Instant::now(), tokio::time::sleep(Duration::from_secs(3)));
    let outcome = execute_observed(&node.ctx, &pass(&pod, &running(&[])), &plan, &|_| {}, terminated).await;
    assert_eq!(since.elapsed().as_secs(), 3);
    assert_eq!(tokens(&outcome), [("a", "started")]);
    assert!(outcome.is_ok(), "{outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn a_failed_post_start_stops_its_container_alone() {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    node.runtime.state().commands.insert("hook".into(), (Duration::ZERO, 1));
    let hooks = json!({"postStart": exec("hook"), "preStop": exec("flush")});
    let pod = pod(json!({"containers": [with_hooks("a", hooks), container("b")]}));
    let plan = actions(keep(), vec![regular(0, "a"), regular(1, "b")]);
    let outcome = execute(&node.ctx, &pod, &plan, &running(&[])).await;
    assert_eq!(tokens(&outcome), [("a", "PostStartHookError"), ("b", "started")]);
    let failure = outcome.starts[0].result.as_ref().expect_err("it failed");
    let expected = r#"Exec lifecycle hook ([hook]) for Container "a" in Pod "pod_ns(uid)" failed - error: command 'hook' exited with 1: err, message: "outerr""#;
    assert_eq!(failure.message, expected);
    let calls = node.runtime.take_calls();
    let of_interest: Vec<_> = calls.iter().filter(|call| !call.starts_with("Image")).collect();
    let expected = [
        "CreateContainer a/0",
        "StartContainer a-0",
        "ExecSync a-0 hook",
        "ExecSync a-0 flush",
        "StopContainer a-0 30",
        "CreateContainer b/0",
        "StartContainer b-0",
    ];
    assert_eq!(of_interest, expected);
    let of_a: Vec<_> = node
        .events
        .take()
        .into_iter()
        .filter_map(|event| {
            event
                .strip_prefix("pod spec.containers{a} ")
                .filter(|event| !event.starts_with("N Pulled"))
                .map(str::to_owned)
        })
        .collect();
    let expected = [
        "N Created: Container created",
        "N Started: Container started",
        "W FailedPostStartHook: PostStartHook failed",
        "N Killing: FailedPostStartHook",
    ];
    assert_eq!(of_a, expected);
}

#[tokio::test(start_paused = true)]
async fn a_container_without_possible_post_start_is_stopped() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({"containers": [with_hooks("c", json!({"postStart": {"tcpSocket": {"port": 1}}}))]}));
    let outcome = execute(&node.ctx, &pod, &actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
    let failure = outcome.starts[0].result.as_ref().expect_err("it failed");
    assert_eq!(
        (failure.token.as_str(), failure.message.as_str()),
        ("PostStartHookError", "Cannot run handler: invalid handler: tcpSocket",)
    );
    assert_eq!(node.runtime.take_calls().last().map(String::as_str), Some("StopContainer c-0 30"));
}
