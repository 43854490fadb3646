//! Pod lifecycle in the API server: status, termination, mirror pods, and restarts of the agent in between.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until;
use keblet_tests::cluster::until_gone;
use kube::Api;
use kube::api::DeleteParams;
use kube::api::Patch;
use kube::api::PatchParams;
use serde_json::Value;
use serde_json::json;

const HASH: &str = "kubernetes.io/config.hash";
const MIRROR: &str = "kubernetes.io/config.mirror";

fn status(pod: &Pod) -> &PodStatus {
    pod.status.as_ref().unwrap()
}

fn main_container(pod: &Pod) -> &ContainerStatus {
    &status(pod).container_statuses.as_ref().unwrap()[0]
}

fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.iter().flatten().find(|condition| condition.type_ == type_)
}

fn is_true(pod: &Pod, type_: &str) -> bool {
    condition(pod, type_).is_some_and(|condition| condition.status == "True")
}

/// A folder that the test's pods mount under the same path.
fn folder(tenant: &Tenant) -> PathBuf {
    let folder = tenant.node.folder().unwrap().join(&tenant.namespace);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A shell with the folder in `$DIR`.
fn shell_in(tenant: &Tenant, folder: &Path, script: &str) -> Value {
    let mut pod = tenant.shell(&script.replace("$DIR", folder.to_str().unwrap()));
    pod["volumes"] = json!([{ "name": "dir", "hostPath": { "path": folder, "type": "Directory" } }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "dir", "mountPath": folder }]);
    pod
}

/// A test that may kill the agent: no other test uses the cluster at the same time.
async fn exclusive_tenant(name: &str) -> Tenant {
    let cluster = Cluster::exclusive().await.unwrap();
    let node = cluster.node().await.unwrap();
    Tenant::on(cluster, node, name).await.unwrap()
}

async fn restart_agent(tenant: &Tenant) {
    tenant.node.kill_agent().unwrap();
    tenant.node.start_agent().await.unwrap();
}

/// Number of running containers of the pod.
fn running(tenant: &Tenant, pod: &str) -> usize {
    let pods = tenant.node.pods().unwrap().into_iter();
    let ours = pods.filter(|one| one.namespace == tenant.namespace && one.name == pod);
    ours.flat_map(|pod| pod.containers).filter(|container| container.state == "running").count()
}

/// Waits until no container of these pods runs on the node.
async fn until_stopped(tenant: &Tenant) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let runs = || {
        let pods = tenant.node.pods().unwrap().into_iter().filter(|pod| pod.namespace == tenant.namespace);
        pods.flat_map(|pod| pod.containers).any(|container| container.state == "running")
    };
    while runs() {
        assert!(tokio::time::Instant::now() < deadline, "a container still runs; {}", tenant.node.log_excerpt());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
#[ignore = "real cluster"]
async fn running_pod_has_a_complete_status() {
    let tenant = Tenant::new_namespace("status").await.unwrap();
    tenant.pod("one", tenant.shell("sleep 3600")).await.unwrap();
    let pod = tenant.until_ready("one").await.unwrap();
    let status = status(&pod);
    let address = tenant.node.access.address.to_string();
    assert_eq!((status.phase.as_deref(), status.qos_class.as_deref()), (Some("Running"), Some("BestEffort")));
    assert_eq!(status.host_ip.as_ref(), Some(&address));
    assert_eq!(status.host_ips.as_ref().unwrap()[0].ip, address);
    assert_eq!(status.pod_ip.as_ref().unwrap(), &status.pod_ips.as_ref().unwrap()[0].ip);
    assert!(status.start_time.is_some());
    assert_eq!(status.observed_generation, pod.metadata.generation);
    for type_ in ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"] {
        assert!(is_true(&pod, type_), "{type_}: {:?}", condition(&pod, type_));
    }
    let container = main_container(&pod);
    assert!(container.state.as_ref().unwrap().running.is_some());
    assert_eq!((container.ready, container.started, container.restart_count), (true, Some(true), 0));
    assert!(container.container_id.as_ref().unwrap().starts_with("containerd://"));
    assert!(!container.image_id.is_empty());
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn resources_of_pod_and_container_are_reported() {
    let tenant = Tenant::new_namespace("resources").await.unwrap();
    let mut spec = tenant.shell("sleep 3600");
    let resources = json!({"requests": {"cpu": "100m", "memory": "32Mi", "ephemeral-storage": "1Mi"},
        "limits": {"cpu": "500m", "memory": "64Mi"}});
    spec["containers"][0]["resources"] = resources.clone();
    tenant.pod("one", spec).await.unwrap();
    let pod = tenant.until_ready("one").await.unwrap();
    let container = main_container(&pod);
    assert_eq!(serde_json::to_value(&container.resources).unwrap(), resources, "as the runtime applied them");
    assert_eq!(serde_json::to_value(&container.allocated_resources).unwrap(), resources["requests"]);
    let status = status(&pod);
    assert_eq!(serde_json::to_value(&status.allocated_resources).unwrap(), resources["requests"]);
    let of_pod = json!({"requests": resources["requests"], "limits": {"cpu": "500m", "memory": "64Mi"}});
    assert_eq!(serde_json::to_value(&status.resources).unwrap(), of_pod);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn foreign_conditions_are_kept_and_gate_readiness() {
    let tenant = Tenant::new_namespace("gates").await.unwrap();
    let mut spec = tenant.shell("sleep 3600");
    spec["readinessGates"] = json!([{ "conditionType": "example.com/open" }]);
    tenant.pod("gated", spec).await.unwrap();
    let shut = |pod: Option<&Pod>| {
        let pod = pod.filter(|pod| is_true(pod, "ContainersReady"))?;
        let ready = condition(pod, "Ready")?;
        (ready.reason.as_deref() == Some("ReadinessGatesNotReady")).then(|| ready.message.clone().unwrap_or_default())
    };
    let message = tenant.until("gated", "not ready because of its gate", shut).await.unwrap();
    assert_eq!(message, "corresponding condition of pod readiness gate \"example.com/open\" does not exist.");
    let open = json!({ "status": { "conditions": [{ "type": "example.com/open", "status": "True" }] } });
    let pods = tenant.api::<Pod>();
    pods.patch_status("gated", &PatchParams::default(), &Patch::Strategic(&open)).await.unwrap();
    let pod = tenant.until_ready("gated").await.unwrap();
    assert!(is_true(&pod, "example.com/open"), "the condition of the gate is kept");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn overwritten_status_is_restored() {
    let tenant = Tenant::new_namespace("meddled").await.unwrap();
    tenant.pod("one", tenant.shell("sleep 3600")).await.unwrap();
    let before = tenant.until_ready("one").await.unwrap();
    let meddle = json!({ "status": { "phase": "Pending", "containerStatuses": [] } });
    let pods = tenant.api::<Pod>();
    pods.patch_status("one", &PatchParams::default(), &Patch::Strategic(&meddle)).await.unwrap();
    let right = |pod: Option<&Pod>| {
        let status = pod?.status.as_ref()?;
        (status.phase.as_deref() == Some("Running")).then(|| status.container_statuses.clone())
    };
    let containers = tenant.until("one", "the phase Running", right).await.unwrap();
    assert_eq!(containers, status(&before).container_statuses);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn restart_counts_survive_agent_restarts() {
    let tenant = exclusive_tenant("counted").await;
    let dir = folder(&tenant);
    // The file is removed last: a container is reported as running before its first command has run.
    let script = "until test -e $DIR/crash; do sleep 0.05; done; rm $DIR/crash; exit 7";
    tenant.pod("crasher", shell_in(&tenant, &dir, script)).await.unwrap();
    tenant.until_ready("crasher").await.unwrap();
    let restarted = |times: i32| {
        move |pod: Option<&Pod>| {
            let pod =
                pod.filter(|pod| pod.status.as_ref().is_some_and(|status| status.container_statuses.is_some()))?;
            let container = main_container(pod);
            let runs = container.state.as_ref()?.running.is_some() && container.restart_count == times;
            runs.then(|| (pod.clone(), container.last_state.clone()))
        }
    };
    std::fs::write(dir.join("crash"), "").unwrap();
    let (before, last) = tenant.until("crasher", "restarted once", restarted(1)).await.unwrap();
    assert_eq!(last.unwrap().terminated.unwrap().exit_code, 7);

    restart_agent(&tenant).await;
    tenant.node.until_ready(&tenant.cluster).await.unwrap();
    let (after, last) = tenant.until("crasher", "still running", restarted(1)).await.unwrap();
    assert_eq!(
        main_container(&after).container_id,
        main_container(&before).container_id,
        "the container was restarted"
    );
    assert_eq!(last.unwrap().terminated.unwrap().exit_code, 7, "the last state of the first instance is kept");
    assert_eq!(status(&after).start_time, status(&before).start_time);

    // The next crash is the second; one while no agent runs counts as well.
    tenant.node.kill_agent().unwrap();
    std::fs::write(dir.join("crash"), "").unwrap();
    until_stopped(&tenant).await;
    tenant.node.start_agent().await.unwrap();
    let (_, last) = tenant.until("crasher", "restarted twice", restarted(2)).await.unwrap();
    assert_eq!(last.unwrap().terminated.unwrap().exit_code, 7);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn deleted_pod_object_remains_until_its_process_exits() {
    let tenant = Tenant::new_namespace("deleted").await.unwrap();
    let dir = folder(&tenant);
    let script = "trap 'touch $DIR/reported; until test -e $DIR/go; do sleep 0.05; done; sleep 0.5; touch $DIR/exited; exit 0' \
                  TERM; touch $DIR/up; while :; do sleep 0.05; done";
    let mut spec = shell_in(&tenant, &dir, script);
    spec["terminationGracePeriodSeconds"] = json!(60);
    tenant.pod("slow", spec).await.unwrap();
    tenant.until_ready("slow").await.unwrap();
    until_file(&tenant, &dir.join("up")).await;
    tenant.api::<Pod>().delete("slow", &DeleteParams::default()).await.unwrap();
    until_file(&tenant, &dir.join("reported")).await;
    // Longer than an agent needs that deletes the object without waiting for the process.
    let terminating = tokio::time::Instant::now();
    while terminating.elapsed() < Duration::from_secs(3) {
        let pod = tenant.api::<Pod>().get("slow").await.expect("the object remains while the process runs");
        assert_eq!(status(&pod).phase.as_deref(), Some("Running"), "the process has not exited yet");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(running(&tenant, "slow"), 1);
    std::fs::write(dir.join("go"), "").unwrap();
    // Read when the object no longer exists: the process exits 500 ms after it has read the file.
    let exited = |pod: Option<&Pod>| pod.is_none().then(|| dir.join("exited").exists());
    assert!(tenant.until("slow", "gone", exited).await.unwrap(), "the object was deleted before the process exited");
    until_stopped(&tenant).await;
    tenant.delete_namespace().await.unwrap();
}

async fn until_file(tenant: &Tenant, file: &Path) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while !file.exists() {
        assert!(tokio::time::Instant::now() < deadline, "no {}; {}", file.display(), tenant.node.log_excerpt());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
#[ignore = "real cluster"]
async fn last_status_has_exit_code_and_reason() {
    let tenant = Tenant::new_namespace("last").await.unwrap();
    let dir = folder(&tenant);
    let mut spec = shell_in(&tenant, &dir, "trap 'exit 4' TERM; touch $DIR/up; while :; do sleep 0.05; done");
    spec["restartPolicy"] = json!("Never");
    // A finalizer keeps the object, so that its last status can be read.
    let pod = json!({ "metadata": { "name": "kept", "finalizers": ["example.com/keep"] }, "spec": spec });
    tenant.create::<Pod>(pod).await.unwrap();
    tenant.until_ready("kept").await.unwrap();
    // Before the handler is set, SIGTERM would be ignored.
    until_file(&tenant, &dir.join("up")).await;
    tenant.api::<Pod>().delete("kept", &DeleteParams::default()).await.unwrap();
    let pod = tenant.until_phase("kept", "Failed").await.unwrap();
    let ended = main_container(&pod).state.clone().unwrap().terminated.unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (4, Some("Error")));
    assert!(!is_true(&pod, "Ready") && !is_true(&pod, "ContainersReady"));
    assert_eq!(condition(&pod, "Ready").unwrap().reason.as_deref(), Some("PodFailed"));
    let release = json!({ "metadata": { "finalizers": null } });
    tenant.api::<Pod>().patch("kept", &PatchParams::default(), &Patch::Merge(&release)).await.unwrap();
    tenant.until("kept", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn force_deleted_pod_is_stopped() {
    let tenant = Tenant::new_namespace("forced").await.unwrap();
    tenant.pod("one", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("one").await.unwrap();
    let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    tenant.api::<Pod>().delete("one", &at_once).await.unwrap();
    tenant.until("one", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    until_stopped(&tenant).await;
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn finished_pod_can_be_deleted_after_agent_restart() {
    let tenant = exclusive_tenant("ended").await;
    for name in ["before", "after"] {
        let mut spec = tenant.shell("exit 0");
        spec["restartPolicy"] = json!("Never");
        tenant.pod(name, spec).await.unwrap();
    }
    for name in ["before", "after"] {
        tenant.until_phase(name, "Succeeded").await.unwrap();
    }
    let gone = |pod: Option<&Pod>| pod.is_none().then_some(());
    tenant.api::<Pod>().delete("before", &DeleteParams::default()).await.unwrap();
    tenant.until("before", "gone", gone).await.unwrap();
    let reported = status(&tenant.api::<Pod>().get("after").await.unwrap()).clone();
    restart_agent(&tenant).await;
    tenant.node.until_ready(&tenant.cluster).await.unwrap();
    let pod = tenant.until_phase("after", "Succeeded").await.unwrap();
    assert_eq!(main_container(&pod).container_id, reported.container_statuses.unwrap()[0].container_id, "it ran once");
    tenant.api::<Pod>().delete("after", &DeleteParams::default()).await.unwrap();
    tenant.until("after", "gone", gone).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

/// The agent is killed at any moment of a pod's lifecycle, and the pod completes it.
#[tokio::test]
#[ignore = "real cluster"]
async fn killed_agent_resumes_every_pod() {
    let tenant = exclusive_tenant("killed").await;
    let script = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done";
    for millis in [0, 30, 60, 90, 130, 180, 250, 400] {
        let name = format!("begun-{millis}");
        tenant.pod(&name, tenant.shell(script)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(millis)).await;
        restart_agent(&tenant).await;
        let pod = tenant.until_ready(&name).await.unwrap();
        // A container that was created, or whose start was interrupted, is not used: the next one counts as its
        // restart.
        assert!(main_container(&pod).restart_count <= 1, "killed {millis} ms after its creation");
        assert_eq!(running(&tenant, &name), 1, "killed {millis} ms after its creation");
    }
    for millis in [0, 30, 60, 90, 130, 180, 250, 400] {
        let name = format!("begun-{millis}");
        tenant.api::<Pod>().delete(&name, &DeleteParams::default()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(millis)).await;
        restart_agent(&tenant).await;
        tenant.until(&name, "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    }
    until_stopped(&tenant).await;
    tenant.delete_namespace().await.unwrap();
}

fn manifest(seconds: u32) -> String {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "fixed", "labels": { "app": "fixed" } },
        "spec": {
            "terminationGracePeriodSeconds": 2,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                "command": ["sh", "-c", format!("trap 'exit 0' TERM; sleep {seconds} & wait")],
            }],
        },
    });
    pod.to_string()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn static_pod_has_a_mirror_pod() {
    let cluster = Cluster::shared().await.unwrap();
    let node = Arc::new(ClusterNode::start(&cluster, json!({})).await.unwrap());
    let file = node.node.manifests.join("fixed.json");
    std::fs::write(&file, manifest(3600)).unwrap();
    let (pods, name) = (Api::<Pod>::namespaced(cluster.client(), "default"), format!("fixed-{}", node.name()));
    let shown_running = |besides: Option<String>| {
        move |pod: Option<&Pod>| {
            let other = pod.filter(|pod| pod.metadata.uid != besides)?;
            let shown = other.status.as_ref()?.container_statuses.as_ref()?.first()?.state.as_ref()?.running.is_some();
            (shown && is_true(other, "Ready")).then(|| other.clone())
        }
    };
    let mirror = until(&pods, &name, "a mirror that is Ready", shown_running(None)).await.unwrap();
    let annotations = mirror.metadata.annotations.clone().unwrap();
    assert_eq!(annotations[HASH], annotations[MIRROR]);
    assert_eq!(annotations["kubernetes.io/config.source"], "file");
    let owner = &mirror.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.name.as_str(), owner.controller), ("Node", node.name(), Some(true)));
    assert_eq!(status(&mirror).host_ip, Some(node.access.address.to_string()));

    // Deleting the mirror pod does not affect the static pod.
    for grace in [None, Some(0)] {
        let before = pods.get(&name).await.unwrap();
        let params = DeleteParams { grace_period_seconds: grace, ..DeleteParams::default() };
        pods.delete(&name, &params).await.unwrap();
        let again = until(&pods, &name, "another mirror", shown_running(before.metadata.uid.clone())).await.unwrap();
        assert_eq!(main_container(&again).container_id, main_container(&mirror).container_id);
    }

    // Changed content makes it another pod.
    let before = pods.get(&name).await.unwrap();
    std::fs::write(&file, manifest(3601)).unwrap();
    let changed =
        until(&pods, &name, "the mirror of the new content", shown_running(before.metadata.uid.clone())).await.unwrap();
    assert_ne!(changed.metadata.annotations.as_ref().unwrap()[MIRROR], annotations[MIRROR]);
    assert_ne!(main_container(&changed).container_id, main_container(&mirror).container_id);

    // A restarted agent finds static pod and mirror pod and changes neither.
    node.kill_agent().unwrap();
    node.start_agent().await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    let kept = until(&pods, &name, "the same mirror", shown_running(None)).await.unwrap();
    assert_eq!(kept.metadata.uid, changed.metadata.uid);
    assert_eq!(main_container(&kept).container_id, main_container(&changed).container_id);

    std::fs::remove_file(&file).unwrap();
    until_gone(&pods, &name).await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

/// A mirror pod represents the containers that run: of a changed static pod it is replaced after those have ended.
#[tokio::test]
#[ignore = "real cluster"]
async fn mirror_pod_of_a_changed_static_pod_stays_until_its_containers_have_ended() {
    let cluster = Cluster::shared().await.unwrap();
    let node = ClusterNode::start(&cluster, json!({})).await.unwrap();
    let folder = node.folder().unwrap().join("mirrored");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = |version: u32| {
        let script = "trap 'touch $DIR/ending; until test -e $DIR/end; do sleep 0.1; done; exit 0' TERM; \
                      sleep 3600 & wait";
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "slow", "labels": { "version": version.to_string() } },
            "spec": {
                "terminationGracePeriodSeconds": 300,
                "volumes": [{ "name": "dir", "hostPath": { "path": folder, "type": "Directory" } }],
                "containers": [{
                    "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                    "command": ["sh", "-c", script.replace("$DIR", folder.to_str().unwrap())],
                    "volumeMounts": [{ "name": "dir", "mountPath": folder }],
                }],
            },
        });
        std::fs::write(node.node.manifests.join("slow.json"), pod.to_string()).unwrap();
    };
    let (pods, name) = (Api::<Pod>::namespaced(cluster.client(), "default"), format!("slow-{}", node.name()));
    let ready = |pod: Option<&Pod>| pod.filter(|pod| is_true(pod, "Ready")).cloned();
    manifest(1);
    let first = until(&pods, &name, "a mirror that is Ready", ready).await.unwrap();

    manifest(2);
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while !folder.join("ending").exists() {
        assert!(tokio::time::Instant::now() < deadline, "the container was not stopped");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let ending = pods.get(&name).await.unwrap();
    assert_eq!(ending.metadata.uid, first.metadata.uid, "the mirror pod was replaced while its container ran");
    assert_eq!(status(&ending).phase.as_deref(), Some("Running"));
    std::fs::write(folder.join("end"), "").unwrap();
    let other = |pod: Option<&Pod>| ready(pod).filter(|pod| pod.metadata.uid != first.metadata.uid);
    let second = until(&pods, &name, "the mirror of the changed pod", other).await.unwrap();
    assert_eq!(second.metadata.labels.unwrap()["version"], "2");

    std::fs::remove_file(node.node.manifests.join("slow.json")).unwrap();
    until_gone(&pods, &name).await.unwrap();
    node.stop_and_delete(&cluster).await.unwrap();
}

/// On the host's network the final status is sent when the processes have exited; the sandbox is stopped when the node
/// is idle, which changes only the condition PodReadyToStartContainers.
#[tokio::test]
#[ignore = "real cluster"]
async fn host_network_sandbox_is_stopped_after_the_final_status() {
    let tenant = Tenant::new_namespace("sandbox-teardown").await.unwrap();
    let folder = folder(&tenant);
    let mut pod = shell_in(&tenant, &folder, "until test -e $DIR/end; do sleep 0.1; done; exit 3");
    pod["hostNetwork"] = json!(true);
    pod["restartPolicy"] = json!("Never");
    tenant.pod("once", pod).await.unwrap();
    // It exits after the watch has begun, so that all its updates are received.
    let ends = |pod: Option<&Pod>| {
        let pod = pod.filter(|pod| is_true(pod, "Ready") || status(pod).phase.as_deref() == Some("Failed"))?;
        std::fs::write(folder.join("end"), "").unwrap();
        (!is_true(pod, "Ready")).then(|| pod.clone())
    };
    let reported = tenant.until("once", "failed", ends).await.unwrap();
    assert_eq!(status(&reported).phase.as_deref(), Some("Failed"));
    let end = |pod: &Pod| main_container(pod).state.clone().and_then(|state| state.terminated).unwrap();
    assert_eq!(end(&reported).exit_code, 3);
    let stopped = |pod: Option<&Pod>| pod.filter(|pod| !is_true(pod, "PodReadyToStartContainers")).cloned();
    let stopped = tenant.until("once", "a pod without a sandbox", stopped).await.unwrap();
    assert_eq!(status(&stopped).phase.as_deref(), Some("Failed"));
    let (before, after) = (end(&reported), end(&stopped));
    assert_eq!(
        (before.exit_code, before.reason, before.container_id),
        (after.exit_code, after.reason, after.container_id)
    );
    tenant.delete_namespace().await.unwrap();
}
