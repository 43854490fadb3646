//! Image volumes: what containers are created with, and what an image that is not there keeps from starting.

use tonic::Status;

use super::*;

fn with_volume(reference: &str, mount: Value) -> Pod {
    let mut mounting = container("c");
    mounting["volumeMounts"] = json!([mount]);
    pod(json!({"containers": [mounting, container("sibling")],
        "volumes": [{"name": "v", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}]}))
}

fn both() -> PodActions {
    actions(keep(), vec![regular(0, "c"), regular(1, "sibling")])
}

fn node() -> (Node, Arc<Metrics>) {
    let mut node = Node::new();
    let metrics = Metrics::new();
    node.ctx.metrics = Some(metrics.clone());
    node.has_image("app:1", "sha256:app");
    (node, metrics)
}

fn count(metrics: &Metrics, name: &str) -> String {
    let text = metrics.render().expect("metrics");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("kubelet_image_volume_{name}_total ")));
    line.expect("the family").to_owned()
}

#[tokio::test(start_paused = true)]
async fn the_runtime_mounts_the_image() {
    let (mut node, metrics) = node();
    node.ctx.settings.security.selinux = true;
    node.runtime.state().registry.insert("r.io/data:1".into(), image("sha256:data"));
    let pod = with_volume("r.io/data:1", json!({"name": "v", "mountPath": "/data", "subPath": "models"}));
    let outcome = execute(&node.ctx, &pod, &both(), &running(&[])).await;
    assert_eq!(tokens(&outcome), [("c", "started"), ("sibling", "started")]);
    let created = node.runtime.state().created.clone();
    let mount = created[0].mounts.iter().find(|mount| mount.container_path == "/data").expect("mounted").clone();
    let spec = mount.image.expect("an image");
    assert_eq!((spec.image.as_str(), spec.user_specified_image.as_str()), ("sha256:data", "r.io/data:1"));
    assert_eq!((mount.host_path.as_str(), mount.image_sub_path.as_str(), mount.readonly), ("", "models", true));
    assert!(!mount.selinux_relabel);
    let events = node.events.take();
    assert_eq!(events[0], r#"pod N Pulling: Pulling image "r.io/data:1""#);
    let of_metrics = ["requested", "mounted_succeed", "mounted_errors"].map(|name| count(&metrics, name));
    assert_eq!(of_metrics, ["1", "1", "0"]);

    node.runtime.take_calls();
    execute(&node.ctx, &pod, &actions(keep(), Vec::new()), &running(&["c", "sibling"])).await;
    assert!(node.runtime.take_calls().is_empty() && node.events.take().is_empty(), "nothing starts, nothing is needed");
}

#[tokio::test(start_paused = true)]
async fn a_missing_image_stops_only_the_containers_that_mount_it() {
    let (mut node, _metrics) = node();
    let pod = with_volume("r.io/data:1", json!({"name": "v", "mountPath": "/data"}));
    node.runtime.fail("PullImage", Status::unknown("denied"));
    let outcome = execute(&node.ctx, &pod, &both(), &running(&[])).await;
    assert_eq!(tokens(&outcome), [("c", "ErrImagePull"), ("sibling", "started")]);
    assert_eq!(outcome.starts[0].result.as_ref().expect_err("failed").message, "denied");
    let events = node.events.take();
    let expected = [
        r#"pod N Pulling: Pulling image "r.io/data:1""#,
        r#"pod W Failed: Failed to pull image "r.io/data:1": denied"#,
        "pod spec.containers{c} W Failed: Error: ErrImagePull",
    ];
    assert_eq!(events[..3], expected, "{events:?}");
    tokio::time::advance(Duration::from_secs(5)).await;
    let outcome = execute(&node.ctx, &pod, &both(), &running(&[])).await;
    assert_eq!(tokens(&outcome)[0], ("c", "ImagePullBackOff"));
    assert!(outcome.is_held_back() && outcome.retry_at().is_some(), "the container waits for the next pull");
}

/// As `crictl rmi --prune` does: no container was created from it.
#[tokio::test(start_paused = true)]
async fn an_image_that_was_removed_from_the_node_is_pulled_for_the_next_start() {
    let (mut node, _metrics) = node();
    node.runtime.state().registry.insert("r.io/data:1".into(), image("sha256:data"));
    let pod = with_volume("r.io/data:1", json!({"name": "v", "mountPath": "/data"}));
    execute(&node.ctx, &pod, &both(), &running(&[])).await;
    node.runtime.state().images.remove("r.io/data:1");
    node.runtime.take_calls();
    node.events.take();
    let outcome = execute(&node.ctx, &pod, &both(), &running(&[])).await;
    assert_eq!(tokens(&outcome), [("c", "started"), ("sibling", "started")]);
    assert_eq!(node.runtime.take_calls()[..2], ["ImageStatus r.io/data:1", "PullImage r.io/data:1"]);
    assert_eq!(node.events.take()[0], r#"pod N Pulling: Pulling image "r.io/data:1""#);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_terminated_does_not_wait_for_the_image_of_a_volume() {
    let (mut node, _metrics) = node();
    node.runtime.state().registry.insert("r.io/data:1".into(), image("sha256:data"));
    node.runtime.state().pulls.insert("r.io/data:1".into(), Duration::from_secs(600));
    let pod = with_volume("r.io/data:1", json!({"name": "v", "mountPath": "/data"}));
    let (since, terminated) = (Instant::now(), tokio::time::sleep(Duration::from_secs(3)));
    let outcome = execute_observed(&node.ctx, &pass(&pod, &running(&[])), &both(), &|_| {}, terminated).await;
    assert_eq!(since.elapsed().as_secs(), 3);
    assert!(outcome.is_ok() && outcome.starts.is_empty(), "{outcome:?}");
    assert_eq!(node.runtime.take_calls(), ["ImageStatus r.io/data:1", "PullImage r.io/data:1"]);
    let expected = [
        r#"pod N Pulling: Pulling image "r.io/data:1""#,
        r#"pod W Failed: Failed to pull image "r.io/data:1": rpc error: code = Canceled desc = context canceled"#,
    ];
    assert_eq!(node.events.take(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_terminated_pulls_no_further_image_of_a_volume() {
    let (mut node, _metrics) = node();
    node.runtime.state().registry.insert("r.io/data:1".into(), image("sha256:data"));
    node.runtime.state().pulls.insert("r.io/data:1".into(), Duration::from_secs(600));
    let volume = |name: &str| {
        let reference = format!("r.io/{name}:1");
        json!({"name": name, "image": {"reference": reference, "pullPolicy": "IfNotPresent"}})
    };
    let pod = pod(json!({"volumes": [volume("data"), volume("more")]}));
    let (plan, terminated) = (actions(keep(), vec![regular(0, "c")]), tokio::time::sleep(Duration::from_secs(3)));
    let outcome = execute_observed(&node.ctx, &pass(&pod, &running(&[])), &plan, &|_| {}, terminated).await;
    assert!(outcome.is_ok() && outcome.starts.is_empty(), "{outcome:?}");
    assert_eq!(node.runtime.take_calls(), ["ImageStatus r.io/data:1", "PullImage r.io/data:1"]);
    let events = node.events.take();
    assert!(events.len() == 2 && events.iter().all(|event| event.contains("r.io/data:1")), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_sub_path_stays_in_its_image() {
    for (sub_path, expected) in [
        ("/etc", "error SubPath `/etc` must not be an absolute path"),
        ("a/../..", "unable to provision SubPath `a/../..`: must not contain '..'"),
    ] {
        let (node, _metrics) = node();
        node.has_image("r.io/data:1", "sha256:data");
        let pod = with_volume("r.io/data:1", json!({"name": "v", "mountPath": "/data", "subPath": sub_path}));
        let outcome = execute(&node.ctx, &pod, &both(), &running(&[])).await;
        assert_eq!(tokens(&outcome), [("c", "CreateContainerConfigError"), ("sibling", "started")]);
        assert_eq!(outcome.starts[0].result.as_ref().expect_err("failed").message, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_cannot_mount_images_is_counted() {
    let (node, metrics) = node();
    node.has_image("r.io/data:1", "sha256:data");
    let pod = with_volume("r.io/data:1", json!({"name": "v", "mountPath": "/data"}));
    node.runtime.fail("CreateContainer", Status::unknown("ImageVolumeMountFailed: no snapshot"));
    let outcome = execute(&node.ctx, &pod, &both(), &running(&[])).await;
    assert_eq!(tokens(&outcome), [("c", "CreateContainerError"), ("sibling", "started")]);
    assert_eq!(["requested", "mounted_errors"].map(|name| count(&metrics, name)), ["1", "1"]);
}
