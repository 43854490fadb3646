//! Sandboxes and starts.

use tonic::Status;

use super::*;
use crate::allocation::Allocations;
use crate::allocation::ResizeGates;
use crate::apiserver::recovery::Recovered;
use crate::cgroups::CgroupName;
use crate::cgroups::Cgroups;
use crate::cgroups::Driver;
use crate::cgroups::Layout;
use crate::objects::Objects;
use crate::objects::ObjectsConfig;
use crate::objects::Strategy;
use crate::runtime::HandlerOffer;
use crate::runtime::RuntimeOffer;
use crate::runtime::RuntimeState;
use crate::workers::act::prerequisites;
use crate::workers::generate::HandlerFeatures;

#[tokio::test(start_paused = true)]
async fn a_pod_from_nothing() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({
        "hostAliases": [{"ip": "192.0.2.9", "hostnames": ["alias"]}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{"name": "c", "image": "app:1", "imagePullPolicy": "IfNotPresent",
            "terminationMessagePath": "/dev/termination-log",
            "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
    }));
    let outcome = execute(&node.ctx, &pod, &actions(create(), vec![regular(0, "c")]), &empty()).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(
        outcome.starts,
        [StartOutcome { name: "c".into(), class: ContainerClass::Regular, result: Ok("c-0".into()) }]
    );
    assert_eq!(
        node.runtime.take_calls(),
        [
            "RunPodSandbox 0",
            "PodSandboxStatus sandbox-new",
            "ImageStatus app:1",
            "CreateContainer c/0",
            "StartContainer c-0"
        ]
    );
    let state = node.runtime.state();
    assert_eq!(state.sandboxes[0].dns_config.as_ref().expect("dns").servers, ["192.0.2.53"]);
    let logs = node.path("logs/ns_pod_uid");
    assert_eq!(state.sandboxes[0].log_directory, logs.to_string_lossy());
    assert!(logs.join("c").is_dir());
    let config = &state.created[0];
    assert_eq!(config.envs, [cri::KeyValue { key: "IP".into(), value: "10.0.0.9".into() }]);
    let host_path = |path: &str| {
        let mount = config.mounts.iter().find(|mount| mount.container_path == path);
        std::path::PathBuf::from(&mount.unwrap_or_else(|| panic!("no mount at {path}")).host_path)
    };
    assert_eq!(host_path("/v"), node.path("root/pods/uid/volumes/kubernetes.io~empty-dir/v"));
    let hosts = std::fs::read_to_string(host_path("/etc/hosts")).expect("the hosts file");
    assert!(hosts.contains("10.0.0.9\tpod\n") && hosts.contains("192.0.2.9\talias\n"), "{hosts}");
    assert!(host_path("/dev/termination-log").is_file());
}

/// A volume may wait for minutes: for its server, or for the control plane.
#[tokio::test(start_paused = true)]
async fn a_terminated_pod_does_not_wait_for_its_volumes() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({
        "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{"name": "c", "image": "app:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
    }));
    let plan = actions(create(), vec![regular(0, "c")]);
    let terminated = std::future::ready(());
    let outcome = execute_observed(&node.ctx, &pass(&pod, &empty()), &plan, &|_| {}, terminated).await;
    assert!(outcome.is_ok() && outcome.starts.is_empty(), "{outcome:?}");
    assert!(node.runtime.take_calls().is_empty());
    node.ctx.volumes.tear_down("uid").await.expect("gone");
    assert!(node.ctx.volumes.is_torn_down("uid"));
}

#[tokio::test(start_paused = true)]
async fn a_terminated_pod_does_not_wait_for_objects_of_its_environment() {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    let mut fields = container("c");
    fields["envFrom"] = json!([{"configMapRef": {"name": "m"}}, {"secretRef": {"name": "s"}}]);
    let pod = pod(json!({"containers": [fields]}));
    let (_api, _registration) = image_access::unanswered(&mut node, &pod).await;
    let plan = actions(keep(), vec![regular(0, "c")]);
    let (since, terminated) = (Instant::now(), tokio::time::sleep(Duration::from_secs(3)));
    let outcome = execute_observed(&node.ctx, &pass(&pod, &running(&[])), &plan, &|_| {}, terminated).await;
    assert_eq!(since.elapsed().as_secs(), 3);
    let failure = outcome.starts[0].result.as_ref().expect_err("given up");
    assert_eq!((failure.token.as_str(), failure.message.as_str()), ("CreateContainerConfigError", "context canceled"));
    assert_eq!(node.runtime.take_calls(), ["ImageStatus app:1"]);
}

/// The server of a volume may not answer, which keeps a path in it from being resolved.
#[tokio::test(start_paused = true)]
async fn a_terminated_pod_does_not_wait_for_a_sub_path() {
    let node = Node::new();
    node.runtime.state().registry.insert("app:1".into(), image("sha256:1"));
    node.runtime.state().pulls.insert("app:1".into(), Duration::from_secs(10));
    let mut mounting = container("c");
    mounting["volumeMounts"] = json!([{"name": "v", "mountPath": "/v", "subPath": "s"}]);
    let pod = pod(json!({"volumes": [{"name": "v", "emptyDir": {}}], "containers": [mounting]}));
    let plan = actions(keep(), vec![regular(0, "c")]);
    let (since, terminated) = (Instant::now(), tokio::time::sleep(Duration::from_secs(20)));
    let (pass, before_pull) = (pass(&pod, &running(&[])), |_: &SandboxStatus| {});
    let starting = execute_observed(&node.ctx, &pass, &plan, &before_pull, terminated);
    let during_the_pull = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        node.ctx.volumes.hold_teardown("uid").await
    };
    let (outcome, _held) = tokio::join!(starting, during_the_pull);
    assert_eq!(since.elapsed().as_secs(), 20);
    let failure = outcome.starts[0].result.as_ref().expect_err("given up");
    assert_eq!((failure.token.as_str(), failure.message.as_str()), ("CreateContainerConfigError", "context canceled"));
}

/// Objects of an API server that answers for single RuntimeClasses only.
fn with_class(name: &'static str, handler: &'static str) -> Objects {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| async move {
        let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": handler,
            "metadata": {"name": name}});
        let failure = |code: u16| {
            let reason = if code == 404 { "NotFound" } else { "ServiceUnavailable" };
            json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "no"})
        };
        let (code, body) = match request.uri().path().strip_prefix("/apis/node.k8s.io/v1/runtimeclasses/") {
            Some(wanted) if wanted == name => (200, class),
            Some(_) => (404, failure(404)),
            None => (503, failure(503)),
        };
        let response = http::Response::builder().status(code);
        Ok::<_, std::io::Error>(response.body(kube::client::Body::from(body.to_string().into_bytes())).expect("valid"))
    });
    let config = ObjectsConfig {
        strategy: Strategy::default(),
        recovered: Recovered::default(),
        sync_frequency: Duration::from_secs(60),
        clock: Clock::System,
        node: None,
    };
    Objects::new(&kube::Client::new(service, "default"), config)
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_runs_with_the_handler_of_the_pods_class() {
    let mut node = Node::new();
    let pod = pod(json!({"runtimeClassName": "sandboxed", "hostNetwork": true}));
    let plan = || actions(create(), vec![]);
    node.ctx.objects = with_class("sandboxed", "runsc");
    let outcome = execute(&node.ctx, &pod, &plan(), &empty()).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(node.runtime.state().handlers, ["runsc"]);

    node.runtime.take_calls();
    node.ctx.objects = with_class("another", "runsc");
    let failed = execute(&node.ctx, &pod, &plan(), &empty()).await;
    let event = failed.errors[0].event().expect("an event");
    let message = "Failed to create pod sandbox: runtimeclass.node.k8s.io \"sandboxed\" not found";
    assert_eq!((&*event.reason, event.message.as_str()), ("FailedCreatePodSandBox", message));
    assert!(node.runtime.take_calls().is_empty(), "nothing is made with another handler");
}

/// Images are pulled and looked up without the handler, which only the sandbox has (gate RuntimeClassInImageCriApi).
#[tokio::test(start_paused = true)]
async fn a_container_is_created_from_an_image_of_no_handler() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let mut snapshot = running(&[]);
    snapshot.sandboxes[0].runtime_handler = "runsc".into();
    let plan = actions(keep(), vec![regular(0, "c")]);
    let outcome = execute(&node.ctx, &pod(json!({})), &plan, &snapshot).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let found = cri::ImageSpec { image: "sha256:1".into(), user_specified_image: "app:1".into(), ..Default::default() };
    assert_eq!(node.runtime.state().created[0].image, Some(found));
}

/// Killed with an older record on disk, the next agent would restart the container for its resize once more.
#[tokio::test(start_paused = true)]
async fn a_container_is_created_with_other_resources_once_they_are_recorded() {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    node.ctx.allocations = Allocations::open(node.dir.path(), ResizeGates::default()).expect("opened");
    node.ctx.allocations.container_actuated(&"uid".into(), "c", Default::default());
    node.ctx.allocations.flush().await;
    let record = node.path("actuated_pods_state");
    let before = std::fs::read_to_string(&record).expect("written");
    node.runtime.state().file = Some(record.clone());
    let mut container = container("c");
    container["resources"] = json!({"requests": {"cpu": "2"}});
    let pod = pod(json!({"containers": [container]}));
    let outcome = execute(&node.ctx, &pod, &actions(create(), vec![regular(0, "c")]), &empty()).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let after = std::fs::read_to_string(&record).expect("written");
    assert_ne!(after, before);
    assert_eq!(node.runtime.state().file_contents, [after]);
}

#[tokio::test(start_paused = true)]
async fn a_restart_is_two_calls() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({}));
    execute(&node.ctx, &pod, &actions(create(), vec![regular(0, "c")]), &empty()).await;
    node.runtime.take_calls();
    let snapshot = testing::snapshot(vec![status("c", 0, ContainerState::Exited)]);
    let again = actions(keep(), vec![start(ContainerClass::Regular, 0, "c", Some(1))]);
    let outcome = execute(&node.ctx, &pod, &again, &snapshot).await;
    assert_eq!(
        outcome.starts,
        [StartOutcome { name: "c".into(), class: ContainerClass::Regular, result: Ok("c-1".into()) }]
    );
    assert_eq!(node.runtime.take_calls(), ["CreateContainer c/1", "StartContainer c-1"]);
    let annotations = &node.runtime.state().created[1].annotations;
    assert_eq!(annotations["io.kubernetes.container.restartCount"], "1");
    assert_eq!(annotations["io.kubernetes.container.hash"], format!("{:x}", container_hash("c", "app:1")));
}

#[tokio::test(start_paused = true)]
async fn without_an_instance_the_log_files_give_the_restart_count() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let dir = node.path("logs/ns_pod_uid/c");
    std::fs::create_dir_all(dir.join("9.log")).expect("folders");
    std::fs::write(dir.join("4.log"), "").expect("a log");
    execute(&node.ctx, &pod(json!({})), &actions(create(), vec![regular(0, "c")]), &empty()).await;
    assert!(node.runtime.take_calls().contains(&"CreateContainer c/5".to_owned()));
    // Docker's logs are links, which lead nowhere once their container is gone.
    std::os::unix::fs::symlink("/no/such/place-json.log", dir.join("6.log")).expect("a link");
    execute(&node.ctx, &pod(json!({})), &actions(create(), vec![regular(0, "c")]), &empty()).await;
    assert!(node.runtime.take_calls().contains(&"CreateContainer c/7".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn only_a_failed_init_container_stops_the_rest() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({"initContainers": [container("i"), {"name": "s", "image": "app:1", "restartPolicy": "Always",
        "imagePullPolicy": "IfNotPresent"}], "containers": [container("a"), container("b")]}));
    let list = vec![
        start(ContainerClass::Sidecar, 1, "s", None),
        regular(0, "a"),
        regular(1, "b"),
        start(ContainerClass::Init, 0, "i", None),
        regular(0, "a"),
    ];
    node.runtime.fail("StartContainer", Status::unknown("s-0 broke"));
    node.runtime.fail("CreateContainer", Status::unknown("no"));
    let outcome = execute(&node.ctx, &pod, &actions(keep(), list), &running(&[])).await;
    // The sidecar cannot be created, `a` cannot be started; both leave the others alone.
    assert_eq!(
        tokens(&outcome),
        [
            ("s", "CreateContainerError"),
            ("a", "RunContainerError"),
            ("b", "started"),
            ("i", "started"),
            ("a", "started")
        ]
    );
    let outcome_of_init = {
        node.runtime.fail("CreateContainer", Status::unknown("no"));
        let list = vec![start(ContainerClass::Init, 0, "i", Some(1)), regular(0, "a")];
        execute(&node.ctx, &pod, &actions(keep(), list), &running(&[])).await
    };
    assert_eq!(tokens(&outcome_of_init), [("i", "CreateContainerError")]);
    let failure = outcome_of_init.starts[0].result.clone().expect_err("failed");
    assert_eq!(failure.message, "no");
}

#[tokio::test(start_paused = true)]
async fn back_off_holds_a_start_without_a_call() {
    let node = Node::new();
    let until = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
    let blocked = Some(Blocked { backoff: Duration::from_secs(80), until });
    let held = StartContainer { blocked, ..regular(0, "c") };
    let outcome = execute(&node.ctx, &pod(json!({})), &actions(keep(), vec![held]), &running(&[])).await;
    let failure = outcome.starts[0].result.clone().expect_err("held back");
    assert_eq!(failure.token, "CrashLoopBackOff");
    assert_eq!(failure.message, "back-off 1m20s restarting failed container=c pod=pod_ns(uid)");
    assert_eq!(failure.retry_at, Some(until));
    assert_eq!(node.runtime.take_calls(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_bad_spec_is_a_configuration_error() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({"securityContext": {"runAsNonRoot": true}}));
    let outcome = execute(&node.ctx, &pod, &actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
    let failure = outcome.starts[0].result.clone().expect_err("refused");
    assert_eq!(failure.token, "CreateContainerConfigError");
    assert!(failure.message.contains("image will run as root"), "{failure:?}");
    assert_eq!(node.runtime.take_calls(), ["ImageStatus app:1"]);
    assert!(!node.path("root/pods/uid/containers/c").exists(), "a termination message file of every attempt");
}

#[tokio::test(start_paused = true)]
async fn a_failed_sandbox_ends_the_sync() {
    let node = Node::new();
    node.runtime.fail("RunPodSandbox", Status::unknown("no network"));
    let plan = actions(create(), vec![regular(0, "c")]);
    let outcome = execute(&node.ctx, &pod(json!({})), &plan, &empty()).await;
    assert_eq!(outcome.starts, []);
    assert_eq!(
        texts(&outcome.errors),
        [
            r#"failed to "CreatePodSandbox" for "pod_ns(uid)" with CreatePodSandboxError: "Failed to create sandbox for pod \"pod_ns(uid)\": rpc error: code = Unknown desc = no network""#
        ]
    );
    std::fs::remove_file(node.path("resolv.conf")).expect("gone");
    let outcome = execute(&node.ctx, &pod(json!({})), &actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
    assert!(outcome.errors[0].to_string().contains("ConfigPodSandboxError"), "{outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_waits_for_the_network_unless_it_is_the_hosts() {
    let node = Node::new();
    node.has_image("app:1", "sha256:1");
    node.network.send_replace(Some("cni not initialized".into()));
    let plan = actions(create(), vec![regular(0, "c")]);
    let outcome = execute(&node.ctx, &pod(json!({})), &plan, &empty()).await;
    assert!(outcome.network_not_ready());
    assert_eq!(texts(&outcome.errors), ["network is not ready: cni not initialized"]);
    assert_eq!(node.runtime.take_calls(), Vec::<String>::new());
    let outcome = execute(&node.ctx, &pod(json!({"hostNetwork": true})), &plan, &empty()).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let hosts = node.runtime.state().created[0].mounts[0].host_path.clone();
    let hosts = std::fs::read_to_string(hosts).expect("the hosts file");
    assert!(hosts.starts_with("# Kubernetes-managed hosts file (host network)."), "{hosts}");
}

#[tokio::test(start_paused = true)]
async fn comments_of_the_nodes_files_may_have_any_encoding() {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    std::fs::write(node.path("resolv.conf"), b"# B\xfcro\nnameserver 192.0.2.53\n").expect("a file");
    std::fs::write(node.path("hosts"), b"127.0.0.1\tlocalhost # B\xfcro\n").expect("a file");
    node.ctx.files.hosts = node.path("hosts");
    let plan = actions(create(), vec![regular(0, "c")]);
    let outcome = execute(&node.ctx, &pod(json!({"hostNetwork": true})), &plan, &empty()).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let state = node.runtime.state();
    assert_eq!(state.sandboxes[0].dns_config.as_ref().expect("dns").servers, ["192.0.2.53"]);
    let hosts = std::fs::read_to_string(&state.created[0].mounts[0].host_path).expect("the hosts file");
    assert!(hosts.ends_with("\n127.0.0.1\tlocalhost # B\u{fffd}ro\n"), "{hosts}");
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_fails_keeps_the_pod_from_starting() {
    let node = Node::new();
    let pod = pod(json!({
        "volumes": [{"name": "v", "hostPath": {"path": "/etc/passwd", "type": "Directory"}}],
        "containers": [{"name": "c", "image": "app:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
    }));
    let outcome = execute(&node.ctx, &pod, &actions(create(), vec![regular(0, "c")]), &empty()).await;
    let expected = "unmounted volumes=[v], unattached volumes=[], failed to process volumes=[]: hostPath type check failed: /etc/passwd is not a directory, it's a File";
    assert!(outcome.volumes_not_ready());
    assert_eq!(texts(&outcome.errors), [expected]);
    assert_eq!(node.runtime.take_calls(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_runs_without_its_cgroup_is_killed() {
    let tree = tempfile::tempdir().expect("a folder");
    let controllers = [("cpu".to_owned(), tree.path().to_owned())].into();
    let layout = Layout::V1 { controllers, unified: None };
    let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let node = Node::with_cgroups(Some(cgroups));
    node.has_image("app:1", "sha256:1");
    let pod = pod(json!({}));
    let plan = actions(create(), vec![regular(0, "c")]);
    assert!(execute(&node.ctx, &pod, &plan, &empty()).await.is_ok());
    let dir = tree.path().join("kubepods/besteffort/poduid");
    assert_eq!(std::fs::read_to_string(dir.join("cpu.shares")).expect("a value"), "2");
    let parent = node.runtime.state().sandboxes[0].linux.clone().expect("linux").cgroup_parent;
    assert_eq!(parent, "/kubepods/besteffort/poduid");

    // Containers that run without their cgroup are killed first.
    std::fs::remove_dir_all(&dir).expect("gone");
    node.runtime.take_calls();
    let outcome = execute(&node.ctx, &pod, &actions(keep(), vec![regular(0, "c")]), &running(&["c"])).await;
    assert_eq!(node.runtime.take_calls(), ["StopContainer c-0 30", "StopPodSandbox sandbox-0"]);
    assert_eq!(outcome.starts, []);
    assert!(!dir.exists());

    std::fs::remove_dir_all(tree.path().join("kubepods")).expect("gone");
    std::fs::write(tree.path().join("kubepods"), "in the way").expect("a file");
    let outcome = execute(&node.ctx, &pod, &plan, &empty()).await;
    let expected = "failed to ensure that the pod: uid cgroups exist and are correctly applied: cannot create ";
    assert!(outcome.errors[0].to_string().starts_with(expected), "{outcome:?}");
}

/// An agent that ends between creating a cgroup and limiting it leaves one with the kernel's defaults.
#[tokio::test(start_paused = true)]
async fn a_cgroup_that_another_agent_has_left_is_limited_before_the_pod_starts() {
    let tree = tempfile::tempdir().expect("a folder");
    let controllers = ["memory", "pids"].map(|name| (name.to_owned(), tree.path().join(name))).into();
    let layout = Layout::V1 { controllers, unified: None };
    let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let files = ["memory/kubepods/burstable/poduid/memory.limit_in_bytes", "pids/kubepods/burstable/poduid/pids.max"]
        .map(|file| tree.path().join(file));
    let write = |values: [&str; 2]| {
        for (file, value) in files.iter().zip(values) {
            std::fs::create_dir_all(file.parent().expect("a cgroup")).expect("folders");
            std::fs::write(file, value).expect("a value");
        }
    };
    let read = || files.each_ref().map(|file| std::fs::read_to_string(file).expect("a value"));
    let defaults = ["9223372036854771712", "max"];
    write(defaults);
    let mut node = Node::with_cgroups(Some(cgroups));
    node.ctx.settings.resources.pod_pids_limit = Some(77);
    let mut fields = container("c");
    fields["resources"] = json!({"requests": {"memory": "64Mi"}, "limits": {"memory": "64Mi"}});
    let pod = pod(json!({"containers": [fields]}));
    let prepare = async |snapshot: &PodSnapshot| {
        let prepared = prerequisites::prepare(&node.ctx, &pass(&pod, snapshot), std::future::pending()).await;
        prepared.expect("prepared");
        read()
    };
    assert_eq!(prepare(&running(&["c"])).await, defaults, "only a resize changes the cgroup of a pod that runs");
    assert_eq!(prepare(&empty()).await, ["67108864", "77"]);
    assert_eq!(node.runtime.take_calls(), [""; 0], "no sandbox is made before");
    let resized = ["134217728", "77"];
    write(resized);
    assert_eq!(prepare(&empty()).await, resized, "this agent has limited it");
}

/// One without an address is ready when it is stopped and replaced.
#[tokio::test(start_paused = true)]
async fn the_cgroup_of_a_pod_whose_sandbox_is_replaced_is_resized_without_the_stopped_sandbox() {
    let tree = tempfile::tempdir().expect("a folder");
    let controllers = [("cpu".to_owned(), tree.path().to_owned())].into();
    let layout = Layout::V1 { controllers, unified: None };
    let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let node = Node::with_cgroups(Some(cgroups));
    let requesting = |cpu| pod(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}));
    assert!(execute(&node.ctx, &requesting("1"), &actions(create(), Vec::new()), &empty()).await.is_ok());
    let resize = Some(ResizePod::default());
    let plan = PodActions { kill_pod: true, resize, ..actions(create(), Vec::new()) };
    let outcome = execute(&node.ctx, &requesting("2"), &plan, &running(&[])).await;
    assert_eq!(outcome.resized, Some(true), "{outcome:?}");
    let shares = std::fs::read_to_string(tree.path().join("kubepods/burstable/poduid/cpu.shares"));
    assert_eq!(shares.expect("a value"), "2048");
}

#[tokio::test(start_paused = true)]
async fn mounts_are_relabelled_and_recursively_read_only_as_node_and_runtime_permit() {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    let handler = HandlerOffer { recursive_read_only_mounts: true, ..HandlerOffer::default() };
    let offer = RuntimeOffer { handlers: vec![handler], ..RuntimeOffer::default() };
    let (runtime, state) =
        watch::channel(RuntimeState::Ready { network_error: None, offer: std::sync::Arc::new(offer) });
    node.ctx.settings.security.selinux = true;
    node.ctx.settings.security.handlers = HandlerFeatures::new(state);
    let mut fields = container("c");
    fields["volumeMounts"] = json!([
        {"name": "own", "mountPath": "/own", "readOnly": true, "recursiveReadOnly": "Enabled"},
        {"name": "host", "mountPath": "/host", "readOnly": true, "recursiveReadOnly": "IfPossible"},
        {"name": "host", "mountPath": "/plain", "readOnly": true},
    ]);
    let pod = pod(json!({"containers": [fields],
        "volumes": [{"name": "own", "emptyDir": {}}, {"name": "host", "hostPath": {"path": "/"}}]}));
    let plan = actions(create(), vec![regular(0, "c")]);
    assert!(execute(&node.ctx, &pod, &plan, &empty()).await.is_ok());
    let flags: Vec<_> = {
        let state = node.runtime.state();
        let mounts = state.created[0].mounts.iter();
        mounts.map(|mount| (mount.container_path.clone(), mount.recursive_read_only, mount.selinux_relabel)).collect()
    };
    let expected = [
        ("/own", true, true),
        ("/host", true, false),
        ("/plain", false, false),
        ("/etc/hosts", false, true),
        ("/dev/termination-log", false, true),
    ];
    assert_eq!(flags, expected.map(|(path, recursive, relabel)| (path.to_owned(), recursive, relabel)));

    runtime.send_replace(RuntimeState::Ready { network_error: None, offer: std::sync::Arc::default() });
    let outcome = execute(&node.ctx, &pod, &plan, &empty()).await;
    let failure = outcome.starts[0].result.as_ref().expect_err("the runtime cannot");
    assert_eq!(failure.token, "CreateContainerConfigError");
    assert!(failure.message.starts_with("failed to resolve recursive read-only mode: volume \"own\""), "{failure:?}");
}
