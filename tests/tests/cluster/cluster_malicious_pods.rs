//! Malicious pods, bound to the node without the scheduler: what the API server accepts either runs as specified or
//! gets a status and an event with the reason; agent and other pods are not affected.

mod actions;
mod resizes;

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::ContainerState;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until_gone;
use keblet_tests::cluster::until_some;
use kube::api::DeleteParams;
use kube::api::ListParams;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::runtime::watcher::Config;
use serde_json::Value;
use serde_json::json;

const MOST_SECONDS: i64 = i64::MAX;
/// Text for forging log lines and terminal output.
const FORGED: &str = "\n2000-01-01T00:00:00.000000Z ERROR keblet: forged \u{1b}[31m\r\n";

/// A test with a node of its own, so that no other test is affected.
async fn alone_on_a_node(name: &str) -> Tenant {
    let cluster = Cluster::shared().await.unwrap();
    let node = Arc::new(ClusterNode::start(&cluster, json!({ "maxPods": 250 })).await.unwrap());
    Tenant::on(cluster, node, name).await.unwrap()
}

async fn leave(tenant: Tenant) {
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

/// A pod bound to the node, with `fields` over those of its only container and `more` over its own.
fn bound(tenant: &Tenant, name: &str, fields: Value, more: Value) -> Value {
    let mut spec = tenant.shell("sleep 3600");
    spec.as_object_mut().unwrap().remove("nodeSelector");
    spec["nodeName"] = json!(tenant.node.name());
    spec["tolerations"] = json!([{ "operator": "Exists" }]);
    spec["terminationGracePeriodSeconds"] = json!(1);
    let over = |target: &mut Value, changes: Value| {
        target.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    };
    over(&mut spec["containers"][0], fields);
    over(&mut spec, more);
    json!({ "metadata": { "name": name, "labels": { "app": "malicious" } }, "spec": spec })
}

/// Waits for an event on the pod with this reason, whose message contains the text.
async fn until_event(tenant: &Tenant, pod: &str, reason: &str, text: &str) {
    let of_pod = Config::default().fields(&format!("involvedObject.name={pod},reason={reason}"));
    let says = |event: &Event| event.message.as_ref().is_some_and(|message| message.contains(text)).then_some(());
    let what = format!("an event {reason} of {pod} with {text:?}");
    let found = until_some(tenant.api::<Event>(), of_pod, &what, says).await;
    assert!(found.is_ok(), "{found:?}\n{}", tenant.node.log_excerpt());
}

/// The instance of the pod's only container, and since when the pod is Ready.
fn continuity(pod: &Pod) -> (Option<String>, Option<Time>) {
    let status = pod.status.as_ref().unwrap();
    let ready = status.conditions.iter().flatten().find(|one| one.type_ == "Ready" && one.status == "True");
    let id = status.container_statuses.as_ref().unwrap()[0].container_id.clone();
    (id, ready.and_then(|ready| ready.last_transition_time.clone()))
}

/// Deletes the malicious pods. The pod `calm` has the same container as before and was Ready all the time. Deletes it, too,
/// and waits until nothing is left of any pod on the node.
async fn leave_nothing(tenant: &Tenant, calm: &Pod) {
    let api = tenant.api::<Pod>();
    let soon = DeleteParams::default().grace_period(1);
    let malicious = ListParams::default().labels("app=malicious");
    let names = api.list_metadata(&malicious).await.unwrap().items.into_iter().filter_map(|pod| pod.metadata.name);
    let names: Vec<String> = names.collect();
    api.delete_collection(&soon, &malicious).await.unwrap();
    for name in &names {
        let gone = until_gone(&api, name).await;
        assert!(gone.is_ok(), "{gone:?}\n{}", tenant.node.log_excerpt());
    }
    let still = api.get("calm").await.unwrap();
    assert_eq!(continuity(&still), continuity(calm), "another pod was disturbed");
    api.delete("calm", &soon).await.unwrap();
    tenant.node.until_nothing_remains().await.unwrap();
}

/// The state of a pod in one word, once it has reached one.
fn outcome(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if let (Some("Failed"), Some(reason)) = (status.phase.as_deref(), &status.reason) {
        return Some(reason.clone());
    }
    let state = status.container_statuses.as_ref()?.first()?.state.clone()?;
    let waiting = state.waiting.and_then(|waiting| waiting.reason);
    let ended = state.terminated.and_then(|ended| ended.reason);
    let reason = waiting.filter(|reason| !["ContainerCreating", "PodInitializing"].contains(&reason.as_str()));
    state.running.map(|_| "runs".to_owned()).or(ended).or(reason)
}

/// The reason in its status why it does not run.
fn reason(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if let Some(message) = &status.message {
        return Some(message.clone());
    }
    let container = status.container_statuses.as_ref()?.first()?;
    let ended = |state: &Option<ContainerState>| state.as_ref()?.terminated.as_ref()?.message.clone();
    let waiting = || container.state.as_ref()?.waiting.as_ref()?.message.clone();
    ended(&container.last_state).or_else(|| ended(&container.state)).or_else(waiting)
}

/// The state of a pod, also from the node's events if it has no container yet.
async fn until_settled(tenant: &Tenant, name: &str, expected: &[&str]) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let pod = tenant.api::<Pod>().get(name).await.unwrap();
        let mut found = outcome(&pod);
        if found.is_none() {
            let events = ListParams::default().fields(&format!("involvedObject.name={name},type=Warning"));
            let events = tenant.api::<Event>().list(&events).await.unwrap().items;
            found = events.into_iter().filter_map(|event| event.reason).find(|reason| reason.starts_with("Failed"));
        }
        match found {
            // A first failure may be followed by a back-off.
            Some(found) if expected.contains(&found.as_str()) => return found,
            found => assert!(
                Instant::now() < deadline,
                "{name}: {found:?} is not one of {expected:?}: {:#?}\n{}",
                pod.status,
                tenant.node.log_excerpt()
            ),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Variables that refer to variables, ten times the one before each.
fn tower(height: usize) -> Vec<Value> {
    let shared = |n: usize| json!({ "name": format!("V{}", n + 1), "value": format!("$(V{n})").repeat(10) });
    let ground = json!({ "name": "V0", "value": "x".repeat(10) });
    std::iter::once(ground).chain((0..height).map(shared)).collect()
}

/// ConfigMaps of nearly 1 MiB: one value, and many.
async fn make_maps(tenant: &Tenant) {
    let many: serde_json::Map<String, Value> =
        (0..9000).map(|n| (format!("KEY_{n:05}"), Value::from("v".repeat(90)))).collect();
    for (name, data) in [("one", json!({ "KEY": "v".repeat(1_000_000) })), ("many", Value::Object(many))] {
        tenant.create::<ConfigMap>(json!({ "metadata": { "name": name }, "data": data })).await.unwrap();
    }
}

/// States of containers that cannot be created or started.
const NOT_STARTED: &[&str] = &["CreateContainerError", "RunContainerError", "StartError", "CrashLoopBackOff"];
const MAYBE: &[&str] = &["runs", "CreateContainerError", "RunContainerError", "StartError", "CrashLoopBackOff"];
const NOT_CONFIGURED: &[&str] = &["CreateContainerConfigError"];
const NO_SANDBOX: &str = "FailedCreatePodSandBox";
const RUNS: &[&str] = &["runs"];
const NO_IMAGE: &[&str] = &["InvalidImageName"];
const NO_ROOM: &[&str] = &["OutOfcpu"];

/// Pods that the API server accepts, and the permitted states of each.
fn accepted_pods(tenant: &Tenant) -> Vec<(Value, &'static [&'static str])> {
    let pod = |name: &str, fields: Value| bound(tenant, name, fields, json!({}));
    let from = |name: &str| json!({ "envFrom": [{ "configMapRef": { "name": name } }] });
    let again: Vec<Value> =
        (0..200).map(|n| json!({ "prefix": format!("P{n}_"), "configMapRef": { "name": "many" } })).collect();
    let volume = json!({ "volumes": [{ "name": "v", "emptyDir": {} }] });
    let mount = |path: &str| json!({ "volumeMounts": [{ "name": "v", "mountPath": path }] });
    let climbing = json!({
        "env": [{ "name": "UP", "value": "../../../../.." }],
        "volumeMounts": [{ "name": "v", "mountPath": "/m", "subPathExpr": "$(UP)/etc" }],
    });
    let words: Vec<String> = (0..800).map(|_| "w".repeat(1000)).collect();
    let args = |args: Value| json!({ "command": ["sleep", "3600"], "args": args });
    let mut lead = bound(
        tenant,
        "leads-out-by-a-link",
        json!({ "volumeMounts": [{ "name": "v", "mountPath": "/m", "subPath": "link/etc" }] }),
        volume.clone(),
    );
    let mut init = lead["spec"]["containers"][0].clone();
    init["name"] = json!("init");
    init["command"] = json!(["sh", "-c", "ln -s / /m/link"]);
    init["volumeMounts"] = json!([{ "name": "v", "mountPath": "/m" }]);
    lead["spec"]["initContainers"] = json!([init]);
    let mut long = pod(&"n".repeat(253), json!({ "name": "c".repeat(63) }));
    long["spec"]["hostname"] = json!("h".repeat(63));
    let mut noted = pod("noted", json!({}));
    noted["metadata"]["annotations"] = json!({ "note": "x".repeat(250 << 10) });
    vec![
        (pod("one-huge-variable", from("one")), NOT_CONFIGURED),
        (pod("many-variables", from("many")), RUNS),
        (pod("the-same-map-again-and-again", json!({ "envFrom": again })), NOT_CONFIGURED),
        (pod("values-of-values", json!({ "env": tower(40) })), NOT_CONFIGURED),
        (pod("arguments-of-values", json!({ "env": tower(4), "args": ["$(V4)".repeat(200_000)] })), NOT_CONFIGURED),
        (pod("one-huge-argument", args(json!(["a".repeat(900_000)]))), NOT_STARTED),
        (pod("many-arguments", json!({ "command": ["sh", "-c", "sleep 3600"], "args": words })), RUNS),
        (bound(tenant, "climbs-by-a-variable", climbing, volume.clone()), NOT_CONFIGURED),
        (lead, NOT_CONFIGURED),
        (bound(tenant, "mounts-above-its-root", mount("/../../../mnt/x"), volume.clone()), RUNS),
        (bound(tenant, "mounts-on-two-lines", mount("/m\nforged"), volume.clone()), MAYBE),
        (bound(tenant, "mounts-with-nul", mount("/m\0n"), volume), NOT_STARTED),
        (pod("works-nowhere", json!({ "workingDir": format!("/proc/1/fd/{FORGED}") })), MAYBE),
        (pod("termination-message-to-a-folder", json!({ "terminationMessagePath": "/" })), NOT_STARTED),
        (pod("runs-a-forgery", json!({ "command": [FORGED] })), NOT_STARTED),
        (pod("of-no-image", json!({ "image": "no@image@:at//all" })), NO_IMAGE),
        (pod("of-an-image-on-two-lines", json!({ "image": format!("a{FORGED}b") })), NO_IMAGE),
        (
            pod(
                "requests-all-resources",
                json!({ "resources": { "limits": { "cpu": "1000000000", "memory": "9000Pi" } } }),
            ),
            NO_ROOM,
        ),
        (
            bound(tenant, "longest-grace-period", json!({}), json!({ "terminationGracePeriodSeconds": MOST_SECONDS })),
            RUNS,
        ),
        (long, &["runs", NO_SANDBOX]),
        (noted, RUNS),
    ]
}

/// Pods that the API server rejects. Their handling by the node is tested elsewhere.
fn refused(tenant: &Tenant) -> Vec<Value> {
    let items = json!([{ "key": "k", "path": "../../out" }]);
    let volume = |source: Value| {
        let mut volume = json!({ "name": "v" });
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        json!({ "volumes": [volume] })
    };
    let mount = |sub: &str| json!({ "volumeMounts": [{ "name": "v", "mountPath": "/m", "subPath": sub }] });
    vec![
        bound(tenant, "r1", json!({}), volume(json!({ "configMap": { "name": "many", "items": items } }))),
        bound(tenant, "r2", json!({}), volume(json!({ "secret": { "secretName": "s", "items": items } }))),
        bound(tenant, "r3", mount("../.."), volume(json!({ "emptyDir": {} }))),
        bound(tenant, "r4", json!({ "name": ".." }), json!({})),
        bound(tenant, "r5", json!({}), volume(json!({ "hostPath": { "path": "/a/../.." } }))),
        bound(tenant, &"n".repeat(254), json!({}), json!({})),
        bound(tenant, "r6", json!({}), json!({ "hostname": "h".repeat(64) })),
        bound(tenant, "r7", json!({ "env": [{ "name": "HUGE", "value": "x".repeat(4 << 20) }] }), json!({})),
    ]
}

/// No line of the agent's log is forged.
fn assert_unforged(node: &ClusterNode) {
    let log = node.log();
    let forged = log.lines().find(|line| line.starts_with("2000-01-01") || line.contains(['\u{1b}', '\r']));
    assert_eq!(forged, None, "a forged line");
    let odd = log.lines().find(|line| !line.starts_with("20"));
    assert_eq!(odd, None, "a line that the agent did not write");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn malicious_pods_get_a_clear_status_and_affect_no_other_pod() {
    let tenant = alone_on_a_node("harm").await;
    let pid = tenant.node.agent_pid().unwrap();
    tenant.pod("calm", tenant.shell("sleep 3600")).await.unwrap();
    let calm = tenant.until_ready("calm").await.unwrap();
    make_maps(&tenant).await;
    for pod in refused(&tenant) {
        let name = pod["metadata"]["name"].to_string();
        assert!(tenant.create::<Pod>(pod).await.is_err(), "{name} was accepted");
    }
    let pods = accepted_pods(&tenant);
    for (pod, _) in &pods {
        tenant.create::<Pod>(pod.clone()).await.unwrap();
    }
    for (pod, expected) in &pods {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let found = until_settled(&tenant, name, expected).await;
        let why = reason(&tenant.api::<Pod>().get(name).await.unwrap()).unwrap_or_default();
        assert!(found == "runs" || !why.is_empty() || found == NO_SANDBOX, "{name}: {found} without a reason");
        println!("{found:28} {:32.32} {why:.200?}", name);
    }
    tenant.pod("after", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("after").await.unwrap();
    let still = tenant.until_ready("calm").await.unwrap().status.unwrap().container_statuses.unwrap();
    assert_eq!(still[0].container_id, calm.status.unwrap().container_statuses.unwrap()[0].container_id);
    assert_eq!(tenant.node.agent_pid().unwrap(), pid);
    // Its grace period exceeds any clock; then it is deleted with a shorter one.
    let api = tenant.api::<Pod>();
    api.delete("longest-grace-period", &DeleteParams::default()).await.unwrap();
    let reported = |pod: Option<&Pod>| pod?.metadata.deletion_timestamp.as_ref().map(|_| ());
    tenant.until("longest-grace-period", "being deleted", reported).await.unwrap();
    api.delete("longest-grace-period", &DeleteParams::default().grace_period(1)).await.unwrap();
    tenant.until("longest-grace-period", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    assert_unforged(&tenant.node);
    let node = tenant.node.clone();
    assert_eq!(node.agent_pid().unwrap(), pid);
    drop(node);
    leave(tenant).await;
}

/// Updates of a running pod that the API server accepts.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn malicious_updates_of_a_running_pod_are_contained() {
    let tenant = alone_on_a_node("changed").await;
    let pid = tenant.node.agent_pid().unwrap();
    let mut spec = tenant.shell("sleep 3600");
    let mut side = spec["containers"][0].clone();
    side["name"] = json!("side");
    spec["containers"].as_array_mut().unwrap().push(side);
    tenant.pod("target", spec).await.unwrap();
    let before = tenant.until_ready("target").await.unwrap();
    let api = tenant.api::<Pod>();
    let id = |pod: &Pod, index: usize| pod.status.as_ref()?.container_statuses.as_ref()?[index].container_id.clone();
    let patch = async |change: Value| {
        api.patch("target", &PatchParams::default(), &Patch::Strategic(&change)).await.unwrap();
    };

    // Annotations, and an ephemeral container that cannot run: the running containers are unchanged.
    let labels: serde_json::Map<String, Value> = (0..500).map(|n| (format!("l{n}"), json!("v".repeat(63)))).collect();
    patch(json!({ "metadata": { "labels": labels, "annotations": { "note": FORGED.repeat(4000) } } })).await;
    let ephemeral = json!({ "spec": { "ephemeralContainers": [{
        "name": "ephemeral", "image": format!("x{FORGED}y"), "command": [FORGED], "targetContainerName": "main",
    }] } });
    api.patch_subresource("ephemeralcontainers", "target", &PatchParams::default(), &Patch::Strategic(&ephemeral))
        .await
        .unwrap();
    let ephemeral = |pod: Option<&Pod>| {
        let state = pod?.status.as_ref()?.ephemeral_container_statuses.as_ref()?.first()?.state.clone()?;
        state.waiting?.reason.filter(|reason| reason == "InvalidImageName")
    };
    tenant.until("target", "an ephemeral container without image", ephemeral).await.unwrap();
    let now = api.get("target").await.unwrap();
    assert_eq!((id(&now, 0), id(&now, 1)), (id(&before, 0), id(&before, 1)));

    // A changed image replaces the container; one that does not exist keeps it from starting, a valid one starts it.
    let image = |image: &str| json!({ "spec": { "containers": [{ "name": "main", "image": image }] } });
    patch(image(&format!("no{FORGED}image"))).await;
    let stuck = |pod: Option<&Pod>| {
        let state = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?.state.clone()?;
        state.waiting?.reason.filter(|reason| reason == "InvalidImageName")
    };
    tenant.until("target", "stuck without image", stuck).await.unwrap();
    patch(image(BUSYBOX_IMAGE)).await;
    let after = tenant.until_ready("target").await.unwrap();
    assert_ne!(id(&after, 0), id(&before, 0));
    assert_eq!(id(&after, 1), id(&before, 1), "the other container is unchanged");
    assert_eq!(tenant.node.agent_pid().unwrap(), pid);
    assert_unforged(&tenant.node);
    leave(tenant).await;
}
