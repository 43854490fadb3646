//! Image policies, pulls and their back-off.

use tonic::Status;

use super::*;

fn with_policy(image: &str, policy: &str) -> Pod {
    pod(json!({"containers": [{"name": "c", "image": image, "imagePullPolicy": policy}]}))
}

async fn started(node: &Node, pod: &Pod) -> Result<ContainerId, StartFailure> {
    let outcome = execute(&node.ctx, pod, &actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
    outcome.starts.into_iter().next().expect("a start").result
}

#[tokio::test(start_paused = true)]
async fn policies() {
    let ends = ["CreateContainer c/0", "StartContainer c-0"];
    let pulled = ["PullImage here:1", "ImageStatus here:1"];
    let table: [(&str, &str, &str, Vec<&str>); 8] = [
        ("here:1", "IfNotPresent", "", [&["ImageStatus here:1"][..], &ends].concat()),
        ("here:1", "Never", "", [&["ImageStatus here:1"][..], &ends].concat()),
        ("here:1", "Always", "", [&pulled[..], &ends].concat()),
        ("here:1", "", "", [&["ImageStatus here:1"][..], &ends].concat()),
        ("untagged", "", "", [&["PullImage untagged:latest", "ImageStatus untagged:latest"][..], &ends].concat()),
        ("absent:1", "Never", "ErrImageNeverPull", vec!["ImageStatus absent:1"]),
        ("absent:1", "IfNotPresent", "ErrImagePull", vec!["ImageStatus absent:1", "PullImage absent:1"]),
        ("BAD", "IfNotPresent", "InvalidImageName", Vec::new()),
    ];
    for (image_name, policy, token, calls) in table {
        let node = Node::new();
        node.has_image("here:1", "sha256:here");
        for name in ["here:1", "untagged:latest"] {
            node.runtime.state().registry.insert(name.into(), image("sha256:pulled"));
        }
        let result = started(&node, &with_policy(image_name, policy)).await;
        let got = result.map_or_else(|failure| failure.token, |_| String::new());
        assert_eq!(got, token, "{image_name} {policy}");
        assert_eq!(node.runtime.take_calls(), calls, "{image_name} {policy}");
    }
}

#[tokio::test(start_paused = true)]
async fn pulls_are_measured_by_size() {
    let mut node = Node::new();
    let metrics = crate::metrics::Metrics::new();
    node.ctx.metrics = Some(metrics.clone());
    let big = cri::Image { size: 20 << 20, ..image("sha256:pulled") };
    node.runtime.state().registry.insert("app:1".into(), big);
    started(&node, &with_policy("app:1", "IfNotPresent")).await.expect("pulled");
    started(&node, &with_policy("app:1", "IfNotPresent")).await.expect("there already");
    let text = metrics.render().expect("metrics");
    let line = "kubelet_image_pull_duration_seconds_count{image_size_in_bytes=\"10MB-100MB\"} 1\n";
    assert!(text.contains(line), "{text}");
}

#[tokio::test(start_paused = true)]
async fn image_requests_are_counted() {
    let mut node = Node::new();
    let metrics = crate::metrics::Metrics::new();
    node.ctx.metrics = Some(metrics.clone());
    node.has_image("here:1", "sha256:here");
    node.runtime.state().registry.insert("far:1".into(), image("sha256:pulled"));
    for (name, policy) in [
        ("here:1", "IfNotPresent"),
        ("here:1", "Never"),
        ("far:1", "Always"),
        ("absent:1", "Never"),
        ("absent:1", "IfNotPresent"),
        ("BAD", "IfNotPresent"),
    ] {
        drop(started(&node, &with_policy(name, policy)).await);
    }
    let text = metrics.render().expect("metrics");
    for (present, policy, required) in [
        ("true", "ifnotpresent", "false"),
        ("true", "never", "false"),
        ("unknown", "always", "true"),
        ("false", "never", "unknown"),
        ("false", "ifnotpresent", "true"),
        ("unknown", "ifnotpresent", "unknown"),
    ] {
        let labels = format!(r#"present_locally="{present}",pull_policy="{policy}",pull_required="{required}""#);
        let line = format!("kubelet_image_manager_ensure_image_requests_total{{{labels}}} 1");
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_pull_backs_off() {
    let node = Node::new();
    let pod = with_policy("absent:1", "IfNotPresent");
    let failure = started(&node, &pod).await.expect_err("absent");
    assert_eq!((failure.token.as_str(), failure.message.as_str()), ("ErrImagePull", "absent:1: not in the registry"));
    let failed_at = node.ctx.clock.wall();
    assert_eq!(failure.retry_at, Some(failed_at + Duration::from_secs(1)), "the back-off is shown soon");
    node.runtime.take_calls();
    let failure = started(&node, &pod).await.expect_err("held back");
    assert_eq!(failure.token, "ImagePullBackOff");
    assert_eq!(failure.message, "Back-off pulling image \"absent:1\": ErrImagePull: absent:1: not in the registry");
    assert_eq!(failure.retry_at, Some(failed_at + Duration::from_secs(10)), "the end of the back-off");
    assert_eq!(node.runtime.take_calls(), ["ImageStatus absent:1"]);
    tokio::time::advance(Duration::from_secs(11)).await;
    node.runtime.state().registry.insert("absent:1".into(), image("sha256:late"));
    started(&node, &pod).await.expect("pulled");
    assert_eq!(node.runtime.state().created[0].image.as_ref().expect("an image").image, "sha256:late");
}

/// A registry that fails now and then is asked less and less often, until ten minutes have passed without a failure.
#[tokio::test(start_paused = true)]
async fn a_successful_pull_does_not_shorten_the_next_back_off() {
    let (node, pod, since) = (Node::new(), with_policy("app:1", "Always"), Instant::now());
    for (at, back_off) in [(0, Some(10)), (12, Some(20)), (40, None), (100, Some(40)), (701, Some(10))] {
        tokio::time::advance(Duration::from_secs(at).saturating_sub(since.elapsed())).await;
        let Some(seconds) = back_off else {
            node.runtime.state().registry.insert("app:1".into(), image("sha256:1"));
            started(&node, &pod).await.expect("pulled");
            node.runtime.state().registry.clear();
            continue;
        };
        assert_eq!(started(&node, &pod).await.expect_err("absent").token, "ErrImagePull", "after {at} s");
        let failed_at = node.ctx.clock.wall();
        let held_back = started(&node, &pod).await.expect_err("held back");
        assert_eq!(held_back.retry_at, Some(failed_at + Duration::from_secs(seconds)), "after {at} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_pull_holds_back_neither_another_image_nor_another_pod() {
    let node = Node::new();
    let failing = with_policy("absent:1", "IfNotPresent");
    started(&node, &failing).await.expect_err("absent");
    node.runtime.state().registry.insert("other:1".into(), image("sha256:other"));
    started(&node, &with_policy("other:1", "IfNotPresent")).await.expect("pulled");
    let mut another = failing.clone();
    another.metadata.uid = Some("another".into());
    for (pod, token) in [(&another, "ErrImagePull"), (&failing, "ImagePullBackOff"), (&another, "ImagePullBackOff")] {
        let failure = started(&node, pod).await.expect_err("absent");
        assert_eq!(failure.token, token, "{:?}", pod.metadata.uid);
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_does_not_change_the_back_off_of_a_pull() {
    let mut node = Node::new();
    let pod = with_policy("absent:1", "IfNotPresent");
    started(&node, &pod).await.expect_err("absent");
    let set_to = |seconds: u64| Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
    tokio::time::advance(Duration::from_secs(4)).await;
    for seconds in [999_000_000, 1_001_000_000] {
        node.ctx.clock = set_to(seconds);
        let failure = started(&node, &pod).await.expect_err("held back");
        assert_eq!(failure.token, "ImagePullBackOff");
        let end = node.ctx.clock.wall() + Duration::from_secs(6);
        assert_eq!(failure.retry_at, Some(end), "what is left of ten seconds");
    }
    node.ctx.clock = set_to(999_000_000);
    tokio::time::advance(Duration::from_secs(7)).await;
    node.runtime.state().registry.insert("absent:1".into(), image("sha256:late"));
    started(&node, &pod).await.expect("pulled");
}

#[tokio::test(start_paused = true)]
async fn runtimes_name_the_kind_of_a_failed_pull() {
    let table = [
        (
            Status::unknown("RegistryUnavailable: pull: refused"),
            "RegistryUnavailable",
            "image pull failed for absent:1 because the registry is unavailable: pull: refused",
        ),
        (
            Status::unknown("SignatureValidationFailed: bad"),
            "SignatureValidationFailed",
            "image pull failed for absent:1 because the signature validation failed: bad",
        ),
        (Status::not_found("no such"), "ErrImagePull", "rpc error: code = NotFound desc = no such"),
    ];
    for (status, token, message) in table {
        let node = Node::new();
        node.runtime.fail("PullImage", status);
        let failure = started(&node, &with_policy("absent:1", "Always")).await.expect_err("failed");
        assert_eq!((failure.token.as_str(), failure.message.as_str()), (token, message));
    }
}

#[tokio::test(start_paused = true)]
async fn an_image_that_cannot_be_inspected() {
    let node = Node::new();
    node.runtime.fail("ImageStatus", Status::internal("broken"));
    let failure = started(&node, &with_policy("x:1", "IfNotPresent")).await.expect_err("failed");
    assert_eq!(failure.token, "ImageInspectError");
    assert_eq!(failure.message, "Failed to inspect image \"\": rpc error: code = Internal desc = broken");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_image_is_pulled_again() {
    let node = Node::new();
    node.has_image("app:1", "sha256:old");
    let pod = pod(json!({}));
    started(&node, &pod).await.expect("started");
    node.runtime.take_calls();
    node.runtime.state().images.clear();
    node.runtime.state().registry.insert("app:1".into(), image("sha256:old"));
    node.runtime.fail("CreateContainer", Status::not_found("image not found"));
    started(&node, &pod).await.expect("started again");
    assert_eq!(
        node.runtime.take_calls(),
        [
            "CreateContainer c/0",
            "ImageStatus app:1",
            "ImageStatus app:1",
            "PullImage app:1",
            "ImageStatus app:1",
            "CreateContainer c/0",
            "StartContainer c-0"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_container_that_cannot_be_created_is_not_tried_twice_with_the_same_image() {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({}));
    started(&node, &pod).await.expect("started");
    node.runtime.take_calls();
    node.events.take();
    node.runtime.fail("CreateContainer", Status::unknown("name c is reserved"));
    let failure = started(&node, &pod).await.expect_err("failed");
    assert_eq!((failure.token.as_str(), failure.message.as_str()), ("CreateContainerError", "name c is reserved"));
    assert_eq!(node.runtime.take_calls(), ["CreateContainer c/0", "ImageStatus app:1"]);
    let pulled = node.events.take().iter().filter(|event| event.contains("Pulled")).count();
    assert_eq!(pulled, 1, "one event of one attempt");
}

#[tokio::test(start_paused = true)]
async fn an_old_cache_entry_is_refreshed_after_the_start() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({}));
    started(&node, &pod).await.expect("started");
    node.has_image("app:1", "sha256:2");
    tokio::time::advance(Duration::from_secs(61)).await;
    node.runtime.take_calls();
    started(&node, &pod).await.expect("started");
    assert_eq!(node.runtime.take_calls(), ["CreateContainer c/0", "StartContainer c-0", "ImageStatus app:1"]);
    started(&node, &pod).await.expect("started");
    let used: Vec<String> =
        node.runtime.state().created.iter().map(|config| config.image.clone().expect("an image").image).collect();
    assert_eq!(used, ["sha256:1", "sha256:1", "sha256:2"]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_ended_with_its_pod_does_not_hold_the_next_one_back() {
    let node = Node::new();
    node.runtime.state().registry.insert("app:1".into(), image("sha256:1"));
    node.runtime.state().pulls.insert("app:1".into(), Duration::from_secs(600));
    let (pod, plan) = (pod(json!({})), actions(keep(), vec![regular(0, "c")]));
    let (pass, terminated) = (pass(&pod, &running(&[])), tokio::time::sleep(Duration::from_secs(3)));
    let outcome = execute_observed(&node.ctx, &pass, &plan, &|_| {}, terminated).await;
    assert_eq!(tokens(&outcome), [("c", "ErrImagePull")]);
    node.runtime.state().pulls.clear();
    let outcome = execute(&node.ctx, &pod, &plan, &running(&[])).await;
    assert_eq!(tokens(&outcome), [("c", "started")]);
}
